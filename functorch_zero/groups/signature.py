"""One collective as one rank calls it: by the group's method, and that method's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..precision import short


class Signature(NamedTuple):
    """The facts of one collective that all ranks must agree on."""

    kind: str  # the group's method
    dtype: torch.dtype | None = None
    num_elements: int | None = None  # that each rank brings; None where that may differ
    option: str = ""  # a reduction's operation, a broadcast's source

    @classmethod
    def of(cls, kind: str, *arguments: Any) -> Signature:
        """That of a group's method, called with these."""
        if kind in ("exchange", "barrier"):
            return cls(kind)
        tensor = brought(arguments)
        if kind == "all_to_all":
            return cls(kind, tensor.dtype)
        options = {"all_reduce": "{}", "broadcast": "source={}"}
        option = options.get(kind, "").format(arguments[-1])
        return cls(kind, tensor.dtype, tensor.numel(), option)

    def __str__(self) -> str:
        name = f"{self.kind}({self.option})" if self.option else self.kind
        if self.dtype is None:
            return name
        count = "" if self.num_elements is None else f"{self.num_elements} "
        return f"{name} of {count}{short(self.dtype)}"


def brought(arguments: Sequence[Any]) -> Tensor:
    """Of a collective's arguments, the tensor that this rank brings."""
    # The last one, or before an operation, a rank or sizes
    last = arguments[-1]
    found: Tensor = last if isinstance(last, Tensor) else arguments[-2]
    return found
