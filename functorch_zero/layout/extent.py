"""`Extent`: the part of a leaf that one rank's piece covers."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

Box = tuple[tuple[int, int], ...]  # for each dim of a leaf, a half-open range


@dataclass(frozen=True)
class Extent:
    """The part of a leaf that one rank's piece covers: elements [start, stop) of a box of the leaf,
    flattened.

    Attributes:
        shape: of the whole leaf. Transforms decide by it, so that all ranks decide alike.
        start, stop: in the flattened box.
        box: for each dim, the half-open range that the box takes of it; None: the whole leaf. With
            a box a piece can lie in some columns of a matrix, as torch's tensor parallelism cuts.
    """

    shape: tuple[int, ...]
    start: int
    stop: int
    box: Box | None = None

    def __post_init__(self) -> None:
        # Of the box, since a piece is a range of the flattened box
        assert 0 <= self.start <= self.stop <= prod(self.box_shape), self
        if self.box is not None:
            ranges = zip(self.box, self.shape, strict=True)
            assert all(0 <= first <= last <= size for (first, last), size in ranges), self

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

    @property
    def box_shape(self) -> tuple[int, ...]:
        """The shape of the box."""
        if self.box is None:  # the whole leaf is its own box
            return self.shape
        return tuple(stop - start for start, stop in self.box)

    @property
    def in_box(self) -> Extent:
        """The same piece, of the box as a leaf of its own."""
        return Extent(self.box_shape, self.start, self.stop)

    @property
    def in_leaf(self) -> slice:
        """The piece's place in the flattened whole leaf.

        Raises:
            NotImplementedError: the piece lies in a box, whose elements are not side by side there.
        """
        if self.box is not None:
            raise NotImplementedError(
                f"a piece of the box {self.box} of a leaf of shape {self.shape} is not one range "
                "of the flattened leaf. Remedy: ask sums over dims and pointwise updates of it, "
                "which don't need one"
            )
        return slice(self.start, self.stop)

    def part_of(self, whole: Tensor) -> Tensor:
        """The piece's elements as a view of a whole leaf: (n,), or of the shape of the box."""
        if self.box is None:
            return whole.view(-1)[self.in_leaf]
        assert self.num_here == prod(self.box_shape), self
        return whole[tuple(slice(*ends) for ends in self.box)]
