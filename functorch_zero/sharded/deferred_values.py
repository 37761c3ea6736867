"""`DigestedFill`: values for leaves on the meta device, made on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..model.deferred_init import DeferredInit
from ..tree import content_digests


class DigestedFill:
    """`DeferredInit.fill_leaves`, with digests of all values that it has given, for ranks to
    compare: a whole tree of them is never held at once."""

    def __init__(self, values: DeferredInit):
        self._values = values
        self.digests: dict[str, Any] = {}  # by path

    def __call__(self, names: Sequence[str], leaves: Sequence[Tensor]) -> list[Tensor]:
        filled = self._values.fill_leaves(names, leaves)
        self.digests |= content_digests(dict(zip(names, filled, strict=True)))
        return filled
