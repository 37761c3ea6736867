"""`Extent`: the part of a leaf that one rank's piece covers."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any


@dataclass(frozen=True)
class Extent:
    """What one rank's piece covers of a leaf: elements [start, stop) of the flattened leaf of this
    full shape."""

    shape: tuple[int, ...]
    start: int
    stop: int

    def __post_init__(self) -> None:
        assert 0 <= self.start <= self.stop <= prod(self.shape), self

    @classmethod
    def of(cls, leaf: Any) -> Extent:
        """The extent of a whole leaf."""
        return cls(tuple(leaf.shape), 0, leaf.numel())

    @property
    def numel(self) -> int:
        """Elements of the whole leaf."""
        return prod(self.shape)

    @property
    def num_here(self) -> int:
        """Elements of the piece."""
        return self.stop - self.start
