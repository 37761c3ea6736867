"""Leaves that torch has cut, each by itself: DTensors.

`fully_shard` cuts a leaf by rows, tensor parallelism by rows or columns, and both together by one
after the other. So a rank's piece is a box of the leaf, and several ranks may hold the same one.
Here each leaf is a bucket of its own, which says what every rank holds of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import optree
import torch

from .extent import Box, Extent
from .layout import Bucket, Cut, Layout, LeafSpec, Unit


@dataclass(frozen=True)
class PlacedLeaf:
    """A leaf, and how it is cut.

    Attributes:
        cuts: (axis, dim), one after the other: the dim is cut along that axis of ranks, as
            `torch.chunk` cuts.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    cuts: tuple[tuple[int, int], ...] = ()

    def boxes(self, sizes: Sequence[int]) -> tuple[Box, ...]:
        """The box of each rank. Ranks are numbered along axes of these sizes, the last one
        fastest."""
        return tuple(self._box(place, sizes) for place in product(*map(range, sizes)))

    def _box(self, place: Sequence[int], sizes: Sequence[int]) -> Box:
        box = [(0, size) for size in self.shape]
        for axis, dim in self.cuts:
            start, stop = box[dim]
            chunk = -(-(stop - start) // sizes[axis])  # rounded up: the last ones may be empty
            first = min(start + place[axis] * chunk, stop)
            box[dim] = first, min(first + chunk, stop)
        return tuple(box)


@dataclass(frozen=True)
class PlacedBucket(Bucket):
    """One leaf that torch has cut. `piece` is the size of the largest piece.

    Attributes:
        extents: what each rank holds.
    """

    extents: tuple[Extent, ...] = ()

    def extent(self, k: int, piece_number: int) -> Extent:
        return self.extents[piece_number] if self.cut.num_pieces > 1 else self.extents[0]

    def holders(self, k: int) -> Sequence[int]:
        return [rank for rank, extent in enumerate(self.extents) if extent.num_here]

    def has_whole_rows(self, k: int) -> bool:
        return False  # in torch's state dicts a state is a tensor like its param, or at an owner

    def counts(self, rank: int) -> bool:
        return self.extents[rank] not in self.extents[:rank]


def extent_of_box(shape: tuple[int, ...], box: Box) -> Extent:
    """A box as an extent: a range of the flattened leaf, where it has whole rows."""
    if all(ends == (0, size) for ends, size in zip(box[1:], shape[1:], strict=True)):
        row = prod(shape[1:])
        first, last = box[0] if box else (0, 1)
        return Extent(shape, first * row, last * row)
    return Extent(shape, 0, prod(stop - start for start, stop in box), box)


def placed_layout(leaves: Mapping[str, PlacedLeaf], sizes: Sequence[int]) -> Layout:
    """The layout of a dict of leaves over ranks along axes of these sizes.

    Args:
        leaves: by path.
    """
    num_ranks = prod(sizes)
    paths: Any = optree.tree_structure(dict(leaves)).entries()  # in tree order
    specs, buckets = [], []
    for n, path in enumerate(paths):
        leaf = leaves[path]
        extents = tuple(extent_of_box(leaf.shape, box) for box in leaf.boxes(sizes))
        # The same on every rank: questions about it need no communication
        num_pieces = num_ranks if len(set(extents)) > 1 else 1
        cut = Cut(level=3 if num_pieces > 1 else 0, num_pieces=num_pieces, num_held=num_pieces)
        specs.append(LeafSpec(path, leaf.shape, leaf.dtype, trainable=True, cut=cut))
        piece = max(extent.num_here for extent in extents)
        bucket = PlacedBucket(
            name=path,
            dtype=leaf.dtype,
            trainable=True,
            leaves=(n,),
            shapes=(leaf.shape,),
            offsets=(0,),
            piece=piece,
            cut=cut,
            extents=extents,
        )
        buckets.append(bucket)
    units = tuple(Unit(bucket.name, (), (n,)) for n, bucket in enumerate(buckets))
    structure = optree.tree_structure(dict(leaves))
    return Layout(num_ranks, tuple(specs), units, tuple(buckets), structure)
