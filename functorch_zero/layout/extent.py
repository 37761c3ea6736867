"""`Extent`: the part of a leaf that one rank's piece covers. `Rows`: an update of some of its rows.

A table's gradient is `Rows` of those that a batch has touched, and goes so to transforms of rows,
and to the params. Whatever else looks at it is given the dense one: `Across.dense`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..tree import has_values

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
        """The piece's extent in its box, taken as a leaf of its own."""
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
        """The piece's elements of a whole leaf: (n,), or of the shape of the box. A view, but of a
        leaf that doesn't lie row by row."""
        if self.box is None:
            return whole.reshape(-1)[self.in_leaf]
        assert self.num_here == prod(self.box_shape), self
        return whole[tuple(slice(*ends) for ends in self.box)]


@dataclass(frozen=True, eq=False)
class Rows:
    """Some rows of those that a rank has of a leaf; the others are zeros. A leaf of trees, as
    tensors are.

    Attributes:
        ids: (k,) int64, the rows' numbers among those here: each once, in order.
        values: (k, columns).
        num_rows: here.
        is_finite: whether no gradient of the same loss is a NaN or infinite, in whatever leaf. By
            one that is, a norm makes NaNs of zeros, too.
    """

    ids: Tensor
    values: Tensor
    num_rows: int
    is_finite: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        """Of ids and values."""
        return self.ids.nbytes + self.values.nbytes

    def dense(self) -> Tensor:
        """All rows here, (num_rows * columns,)."""
        whole = self.values.new_zeros(self.num_rows, self.values.shape[1])
        return whole.index_copy_(0, self.ids, self.values).view(-1)

    def map(self, fn: Callable[[Tensor], Tensor]) -> Rows:
        """Rows of these ids, with the values that `fn` makes of these; both (k, columns)."""
        return replace(self, values=fn(self.values))

    def plus(self, ids: Tensor, values: Tensor) -> Rows:
        """The sum with rows (m, columns), whose numbers may come several times."""
        ids = torch.cat([self.ids, ids])
        values = torch.cat([self.values, values.to(self.dtype)])
        # A plan has no values: each id may be another row's
        if not has_values(ids):
            return replace(self, ids=ids[: self.num_rows], values=values[: self.num_rows])
        # As of one lookup on one rank
        if bool((ids[1:] > ids[:-1]).all()):
            return replace(self, ids=ids, values=values)
        ids, places = ids.unique(return_inverse=True)
        summed = values.new_zeros(len(ids), values.shape[1]).index_add_(0, places, values)
        return replace(self, ids=ids, values=summed)

    def touched(self) -> Rows:
        """Those that aren't all zeros, in tensors of their own."""
        at = touched_among(self.values)
        return replace(self, ids=self.ids[at], values=self.values[at])

    def add_to(self, flat: Tensor) -> None:
        """Add them to the rows that a flat begins with, in place."""
        rows = flat.view(-1, self.values.shape[1])
        rows.index_add_(0, self.ids, self.values.to(flat.dtype))


def touched_among(rows: Tensor) -> Tensor:
    """The numbers (k,) of the rows (n, columns) that aren't all zeros."""
    # A plan has no values: any row may be touched
    if not has_values(rows):
        return torch.arange(len(rows), device=rows.device)
    return rows.any(1).nonzero().squeeze(1)


def elements(x: Tensor | Rows) -> Tensor:
    """The elements that may differ from 0."""
    return x.values if isinstance(x, Rows) else x
