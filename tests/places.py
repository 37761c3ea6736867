"""Places for tests: one that counts, and one whose tensors must be brought."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from functorch_zero.places import Arriving, File, Here, Leaving


@dataclass(frozen=True)
class Counted(File):
    """Files, and how often each method was called."""

    calls: Counter[str] = field(default_factory=Counter, repr=False, compare=False)

    def empty(self, like: Tensor) -> Tensor:
        self.calls["empty"] += 1
        return super().empty(like)

    def bring(self, stored: Tensor) -> Arriving:
        assert self.holds(stored)
        self.calls["bring"] += 1
        return super().bring(stored)

    def leave(self, tensor: Tensor, into: Tensor) -> Leaving:
        assert self.holds(into)
        self.calls["leave"] += 1
        return super().leave(tensor, into)


class Away:
    """Keeps other values than it is given, so that what isn't brought gives others: as where the
    params are on a GPU."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.held: list[Tensor] = []

    def empty(self, like: Tensor) -> Tensor:
        self.calls["empty"] += 1
        self.held.append(torch.full(like.shape, torch.nan).to(like.dtype))
        return self.held[-1]

    def holds(self, tensor: Tensor) -> bool:
        return any(tensor is held for held in self.held)

    def bring(self, stored: Tensor) -> Any:
        assert self.holds(stored)
        self.calls["bring"] += 1
        return Here(-stored)

    def leave(self, tensor: Tensor, into: Tensor) -> Any:
        assert self.holds(into) and not self.holds(tensor)
        self.calls["leave"] += 1
        return Here(into.copy_(-tensor))
