"""Between trees and buckets. A *flat* is a bucket's 1-D tensor: whole (num_pieces * piece,) or one
rank's (piece,).

Leaves of a tree made here are views of their flat, and `flat_of_pieces` finds that flat again
without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, compress, repeat
from operator import attrgetter, call, is_, is_not, not_
from typing import Any, TypeGuard
from weakref import ref

import torch
from torch import Tensor

from .._torch_private import base_of, storage_id
from ..tree import PyTree
from .layout import Bucket, Layout

_DTYPE, _SHAPE = map(attrgetter, ("dtype", "shape"))
# Leaves by path -> the same with their values
Fill = Callable[[Sequence[str], Sequence[Tensor]], Sequence[Tensor]]


def pack(
    leaves: Sequence[Tensor | None],
    bucket: Bucket,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The whole flat (num_pieces * piece,) of these whole leaves; None is zeros, and so is all
    padding.

    In `dtype`, or in the one that the leaves share.
    """
    dtype = _common_dtype(leaves, bucket.dtype) if dtype is None else dtype
    flat = torch.empty(bucket.numel, dtype=dtype, device=device)
    for start, stop in bucket.padding:
        flat[start:stop].zero_()
    here, views = _here(leaves), unpack(flat, bucket)
    for view in compress(views, map(not_, here)):
        view.zero_()
    given: list[Any] = [*compress(leaves, here)]
    if given:
        torch._foreach_copy_([*compress(views, here)], given)
    return flat


def is_flat(
    leaf: Tensor | None, bucket: Bucket, dtype: torch.dtype | None = None
) -> TypeGuard[Tensor]:
    """Whether this whole leaf, the bucket's first, is all of its flat as it lies."""
    return (
        leaf is not None
        and leaf.numel() == bucket.numel
        and leaf.is_contiguous()
        and leaf.dtype == (bucket.dtype if dtype is None else dtype)
    )


def unpack(flat: Tensor, bucket: Bucket) -> list[Tensor]:
    """The bucket's leaves, whole, as views of its whole flat."""
    return [*map(Tensor.view, _split(flat, bucket, 0)[1::2], bucket.shapes)]


def cut(piece: Tensor, bucket: Bucket, rank: int) -> list[Tensor]:
    """The part of each leaf of the bucket that `rank` keeps, 1-D, as views of its flat piece
    (piece,)."""
    return list(_split(piece, bucket, bucket.first(rank))[1::2])


def _split(flat: Tensor, bucket: Bucket, start: int) -> tuple[Tensor, ...]:
    """A flat that begins at the bucket's element `start` as views: padding, leaf, padding, leaf,
    ..., padding."""
    return flat.split_with_sizes(bucket.parts(start, start + flat.numel()))


def flat_of_pieces(pieces: Sequence[Tensor], bucket: Bucket, rank: int) -> Tensor:
    """The flat piece (piece,) these 1-D pieces lie in; packed into a new one when they don't lie in
    one."""
    base = base_of(pieces[0])
    if (
        base is not None
        and base.dim() == 1
        and base.numel()
        and bucket.piece
        and not base.numel() % bucket.piece
    ):
        # The base is the piece, or some in a row
        first = rank % (base.numel() // bucket.piece) * bucket.piece
        flat = base if base.numel() == bucket.piece else base[first : first + bucket.piece]
        if {*map(Tensor.dim, pieces)} == {1} and _lie_in(pieces, base, flat, bucket, rank):
            return flat
    flat = pieces[0].new_zeros(bucket.piece, dtype=_common_dtype(pieces, pieces[0].dtype))
    for here, piece in zip(cut(flat, bucket, rank), pieces, strict=True):
        here.copy_(piece)
    return flat


def flat_of_leaves(leaves: Sequence[Tensor], bucket: Bucket) -> Tensor:
    """The whole flat these whole leaves lie in; packed into a new one when they don't lie in
    one."""
    base = base_of(leaves[0])
    alike = (*map(_SHAPE, leaves),) == bucket.shapes
    if (
        base is not None
        and base.shape == (bucket.numel,)
        and alike
        and _lie_in(leaves, base, base, bucket, 0)
    ):
        return base
    return pack(leaves, bucket, device=leaves[0].device)


def _lie_in(given: Sequence[Tensor], base: Tensor, flat: Tensor, bucket: Bucket, rank: int) -> bool:
    """Whether the given views of `base` are just those that `flat`, of `rank`, would be cut
    into."""
    start = bucket.first(rank)
    parts = bucket.parts(start, start + flat.numel())
    starts = [*accumulate(parts, initial=flat.storage_offset())][1:-1:2]
    return (  # without a line of Python for each leaf: steps ask this of all they hold
        all(map(is_, map(base_of, given), repeat(base)))
        and {*map(storage_id, given)} == {storage_id(base)}  # `leaf.data = other` changes no base
        and {*map(_DTYPE, given)} == {base.dtype}
        and (*map(Tensor.numel, given),) == parts[1::2]
        and [*map(Tensor.storage_offset, given)] == starts
        and all(map(Tensor.is_contiguous, given))
    )


def by_bucket(leaves: Sequence[Tensor], layout: Layout, b: int) -> list[Tensor]:
    """Of leaves in tree order, those of the b-th bucket, in bucket order."""
    return [leaves[i] for i in layout.buckets[b].leaves]


def to_tree(parts: Sequence[Sequence[Any]], layout: Layout) -> PyTree[Any]:
    """The tree of leaves given bucket by bucket."""
    return layout.treedef.unflatten([parts[b][k] for b, k in layout.places])


def slice_flat(leaves: Sequence[Tensor], bucket: Bucket, rank: int) -> Tensor:
    """A bucket's whole leaves -> the flat (piece,) of copies of the pieces that `rank` keeps."""
    flat = leaves[0].new_zeros(bucket.piece, dtype=_common_dtype(leaves, bucket.dtype))
    for k, here in enumerate(cut(flat, bucket, rank)):
        extent = bucket.extent(k, rank)
        here.copy_(leaves[k].detach().reshape(-1)[extent.in_leaf])
    return flat


def filled(leaves: Sequence[Tensor], layout: Layout, b: int, fill: Fill | None) -> Sequence[Tensor]:
    """Of leaves in tree order, those of the b-th bucket, in bucket order; their values from `fill`,
    if there is one."""
    own = by_bucket(leaves, layout, b)
    return (
        own
        if fill is None
        else fill([layout.leaves[n].path for n in layout.buckets[b].leaves], own)
    )


def _here(leaves: Sequence[Tensor | None]) -> list[bool]:
    return [*map(is_not, leaves, repeat(None))]


def _common_dtype(leaves: Sequence[Tensor | None], default: torch.dtype) -> torch.dtype:
    dtypes: set[torch.dtype] = {*map(_DTYPE, compress(leaves, _here(leaves)))} or {default}
    if len(dtypes) > 1:
        raise TypeError(
            f"the leaves of one bucket must share a dtype, got {sorted(map(str, dtypes))}"
        )
    return dtypes.pop()


class Recall:
    """`find(leaves)`, the flats that leaves lie in, which looks no closer while the leaves are
    those of the last time.

    A step is given the leaves that the last one returned, where storage is donated. They are
    remembered weakly, and asked whether they still lie where they lay.
    """

    def __init__(self, find: Callable[[Sequence[Tensor]], list[Tensor]]):
        self._find = find
        self._leaves: list[Callable[[], Tensor | None]] = []
        self._as_they_were: list[list[Any]] = []
        self._firsts: list[int] = []  # for each flat, a leaf that is a view of it

    def __call__(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        same = len(leaves) == len(self._leaves) and all(map(is_, map(call, self._leaves), leaves))
        if same and where_they_lie(leaves) == self._as_they_were:
            bases: list[Any] = [*map(base_of, map(leaves.__getitem__, self._firsts))]
            return bases
        flats = self._find(leaves)
        known = {id(base): i for i, base in enumerate(map(base_of, leaves))}
        self._leaves = []
        if {*map(type, leaves)} == {Tensor} and all(id(flat) in known for flat in flats):
            self._leaves, self._as_they_were = [*map(ref, leaves)], where_they_lie(leaves)
            self._firsts = [known[id(flat)] for flat in flats]
        return flats


def where_they_lie(leaves: Sequence[Tensor]) -> list[list[Any]]:
    """Equal while the leaves lie where they lay, fact by fact, without a line of Python per leaf:
    `leaf.data = other` leaves an object what it is."""
    facts: Any = (storage_id, Tensor.storage_offset, _SHAPE, _DTYPE, Tensor.is_contiguous)
    return [[*map(fact, leaves)] for fact in facts]


def own_piece(flat: Tensor, bucket: Bucket, rank: int) -> Tensor:
    """Of a flat that is held between steps, this rank's (piece,): a view."""
    count = bucket.cut.num_pieces // bucket.cut.num_held
    first = rank % count * bucket.piece
    return flat if bucket.piece == flat.numel() else flat[first : first + bucket.piece]
