"""Pieces as flats, which a step passes on without cutting trees that nobody looks at, and flats found again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from operator import attrgetter, call, is_
from typing import Any
from weakref import ref

from torch import Tensor

from .collectives import cut, to_tree
from .layout import Layout
from .tree import PyTree

_BASE, _SHAPE, _DTYPE = map(attrgetter, ("_base", "shape", "dtype"))


class Pieces:
    """This rank's pieces of the trained leaves: a flat (piece,) for each trained bucket.

    Args:
        flats: in the order of the layout's buckets.
    """

    def __init__(self, flats: Sequence[Tensor], layout: Layout, rank: int):
        self.flats, self._layout, self._rank = list(flats), layout, rank

    @cached_property
    def tree(self) -> PyTree[Tensor]:
        """The tree of pieces, 1-D views of the flats; None where a leaf is frozen."""
        flats = iter(self.flats)
        parts: list[Sequence[Any]] = [
            cut(next(flats), bucket, self._rank) if bucket.trainable else [None] * len(bucket.leaves)
            for bucket in self._layout.buckets
        ]
        return to_tree(parts, self._layout)


class Recall:
    """`find(leaves)`, the flats that leaves lie in, which looks no closer while the leaves are those of the last time.

    A step is given the leaves that the last one returned, where storage is donated. They are remembered weakly, and
    asked whether they still lie where they lay: `leaf.data = other` leaves an object what it is.
    """

    def __init__(self, find: Callable[[Sequence[Tensor]], list[Tensor]]):
        self._find = find
        self._leaves: list[Callable[[], Tensor | None]] = []
        self._as_they_were: list[list[Any]] = []
        self._firsts: list[int] = []  # for each flat, a leaf that is a view of it

    def __call__(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        same = len(leaves) == len(self._leaves) and all(map(is_, map(call, self._leaves), leaves))
        if same and _places(leaves) == self._as_they_were:
            return [*map(_BASE, map(leaves.__getitem__, self._firsts))]
        flats = self._find(leaves)
        known = {id(base): i for i, base in enumerate(map(_BASE, leaves))}
        self._leaves = []
        if {*map(type, leaves)} == {Tensor} and all(id(flat) in known for flat in flats):
            self._leaves, self._as_they_were = [*map(ref, leaves)], _places(leaves)
            self._firsts = [known[id(flat)] for flat in flats]
        return flats


def _places(leaves: Sequence[Tensor]) -> list[list[Any]]:
    return [[*map(fact, leaves)] for fact in (Tensor.data_ptr, _SHAPE, _DTYPE, Tensor.is_contiguous)]
