"""Between trees and buckets, and the three primitives the levels are made of.

`slice_tree` (tree -> pieces, local), `all_gather_tree` (pieces -> tree), `reduce_scatter_flat` (full gradients ->
this rank's piece of their sum). A *flat* is a bucket's 1-D tensor: whole (num_ranks * piece,) or one rank's (piece,).
Leaves of a tree made here are views of their flat, and `flat_of_pieces` finds that flat again without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import optree
import torch
from torch import Tensor

from .groups.protocol import Group, Work
from .layout import Bucket, Layout
from .tree import PyTree

Fill = Callable[[Sequence[str], Sequence[Tensor]], Sequence[Tensor]]  # leaves by path -> the same with their values


def pack(leaves: Sequence[Tensor | None], bucket: Bucket, num_ranks: int, *, device: torch.device) -> Tensor:
    """The whole flat (num_ranks * piece,) of these whole leaves; None is zeros, and so is all padding."""
    flat = torch.empty(num_ranks * bucket.piece, dtype=_common_dtype(leaves, bucket.dtype), device=device)
    for leaf, offset, numel in zip(leaves, bucket.offsets, bucket.numels, strict=True):
        if leaf is None:
            flat[offset : offset + numel].zero_()
        else:
            flat[offset : offset + numel].view(leaf.shape).copy_(leaf)
    for start, stop in (*bucket.gaps, (bucket.end, flat.numel())):
        if start < stop:
            flat[start:stop].zero_()
    return flat


def unpack(flat: Tensor, bucket: Bucket) -> list[Tensor]:
    """The bucket's leaves, whole, as views of its whole flat."""
    spans = zip(bucket.offsets, bucket.numels, bucket.shapes, strict=True)
    return [flat[offset : offset + numel].view(shape) for offset, numel, shape in spans]


def piece_of(flat: Tensor, bucket: Bucket, rank: int) -> Tensor:
    """The (piece,) of the whole flat that `rank` keeps: a view."""
    return flat[rank * bucket.piece : (rank + 1) * bucket.piece]


def cut(piece: Tensor, bucket: Bucket, rank: int) -> list[Tensor]:
    """What `rank` keeps of each leaf of the bucket, 1-D, as views of its flat piece (piece,)."""
    views = []
    for k, offset in enumerate(bucket.offsets):
        extent = bucket.extent(k, rank)
        start = offset + extent.start - rank * bucket.piece if extent.num_here else 0
        views.append(piece[start : start + extent.num_here])
    return views


def flat_of_pieces(pieces: Sequence[Tensor], bucket: Bucket, rank: int) -> Tensor:
    """The flat piece (piece,) these 1-D pieces lie in; packed into a new one when they don't lie in one."""
    base = pieces[0]._base
    if base is not None and base.dim() == 1 and bucket.piece and all(p._base is base for p in pieces):
        flat = base if base.numel() == bucket.piece else None
        if flat is None and base.numel() % bucket.piece == 0 and base.numel() > rank * bucket.piece:
            flat = piece_of(base, bucket, rank)
        if flat is not None and _lie_in(pieces, cut(flat, bucket, rank)):
            return flat
    flat = pieces[0].new_zeros(bucket.piece, dtype=_common_dtype(pieces, pieces[0].dtype))
    for here, piece in zip(cut(flat, bucket, rank), pieces, strict=True):
        here.copy_(piece)
    return flat


def flat_of_leaves(leaves: Sequence[Tensor], bucket: Bucket, num_ranks: int) -> Tensor:
    """The whole flat these whole leaves lie in; packed into a new one when they don't lie in one."""
    base = leaves[0]._base
    if base is not None and all(leaf._base is base for leaf in leaves):
        whole = base.dim() == 1 and base.numel() == num_ranks * bucket.piece
        if whole and _lie_in(leaves, unpack(base, bucket)):
            return base
    return pack(leaves, bucket, num_ranks, device=leaves[0].device)


def by_bucket(leaves: Sequence[Tensor], layout: Layout, b: int) -> list[Tensor]:
    """Of leaves in tree order, those of the b-th bucket, in bucket order."""
    return [leaves[i] for i in layout.buckets[b].leaves]


def to_tree(parts: Sequence[Sequence[Tensor]], layout: Layout) -> PyTree[Tensor]:
    """The tree of leaves given bucket by bucket."""
    return layout.treedef.unflatten([parts[b][k] for b, k in layout.places])


def slice_tree(tree: PyTree[Tensor], layout: Layout, rank: int, fill: Fill | None = None) -> PyTree[Tensor]:
    """Whole leaves -> copies of this rank's pieces, views of one new flat a bucket. No communication.

    `fill` gives the values of one bucket's leaves at a time, for trees without.
    """
    leaves = optree.tree_leaves(tree)
    parts = []
    for b, bucket in enumerate(layout.buckets):
        own = _filled(leaves, layout, b, fill)
        flat = own[0].new_zeros(bucket.piece, dtype=_common_dtype(own, bucket.dtype))
        for k, here in enumerate(cut(flat, bucket, rank)):
            extent = bucket.extent(k, rank)
            here.copy_(own[k].detach().reshape(-1)[extent.start : extent.stop])
        parts.append(cut(flat, bucket, rank))
    return to_tree(parts, layout)


def copy_tree(tree: PyTree[Tensor], layout: Layout, fill: Fill | None = None) -> PyTree[Tensor]:
    """Whole leaves -> copies of them, views of one new whole flat a bucket. No communication. `fill` as above."""
    leaves = optree.tree_leaves(tree)
    parts = []
    for b, bucket in enumerate(layout.buckets):
        own = [leaf.detach() for leaf in _filled(leaves, layout, b, fill)]
        parts.append(unpack(pack(own, bucket, layout.num_ranks, device=own[0].device), bucket))
    return to_tree(parts, layout)


def _filled(leaves: Sequence[Tensor], layout: Layout, b: int, fill: Fill | None) -> Sequence[Tensor]:
    own = by_bucket(leaves, layout, b)
    return own if fill is None else fill([layout.leaves[n].path for n in layout.buckets[b].leaves], own)


def all_gather_tree(tree: PyTree[Tensor], layout: Layout, group: Group) -> PyTree[Tensor]:
    """Pieces -> whole leaves on every rank. One all-gather a bucket: S bytes arrive in all."""
    leaves = optree.tree_leaves(tree)
    started = []
    for b, bucket in enumerate(layout.buckets):
        piece = flat_of_pieces(by_bucket(leaves, layout, b), bucket, group.rank)
        whole = piece.new_empty(layout.num_ranks * bucket.piece)
        started.append((whole, group.all_gather(whole, piece), piece))
    for _, work, _ in started:
        work.wait()
    return to_tree([unpack(whole, layout.buckets[b]) for b, (whole, _, _) in enumerate(started)], layout)


def reduce_scatter_flat(flat: Tensor, bucket: Bucket, group: Group) -> tuple[Tensor, Work]:
    """Every rank's whole flat -> this rank's piece of their sum, in a new tensor that is ready when the work is."""
    piece = flat.new_empty(bucket.piece)
    return piece, group.reduce_scatter(piece, flat)


def _common_dtype(leaves: Sequence[Tensor | None], default: torch.dtype) -> torch.dtype:
    dtypes = {leaf.dtype for leaf in leaves if leaf is not None} or {default}
    if len(dtypes) > 1:
        raise TypeError(f"the leaves of one bucket must share a dtype, got {sorted(map(str, dtypes))}")
    return dtypes.pop()


def _lie_in(given: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(
        g.dtype == e.dtype and (_place(g) == _place(e) or g.numel() == e.numel() == 0)
        for g, e in zip(given, expected, strict=True)
    )


def _place(x: Tensor) -> tuple[object, ...]:
    return x.storage_offset(), x.shape, x.stride()
