"""The ways between trees and buckets. A *flat* is a bucket's 1-D tensor: the whole bucket,
(num_pieces * piece,), or one rank's part of it, (piece,).

Leaves of a tree made here are views of their flat. A node remembers it (`home`); of tensors that a
reduction keeps, `flat_of_pieces` finds it again by the view's base.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from .._torch_private import base_of, storage_id
from ..compress import encoded
from ..tree import PyTree, is_flagged
from .layout import Bucket, Layout

# Paths and leaves -> leaves with values, of the same shapes and dtypes
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
    if dtype is None:
        dtype = _common_dtype(leaves, bucket.dtype)
    # (num_pieces * piece,), on the leaves' device
    flat = torch.empty(bucket.numel, dtype=dtype, device=device)
    first, *sizes = bucket.sizes(0, bucket.numel)  # of padding before the first leaf; then in turn
    # Padding is reduced with the rest, where a NaN left in memory would make the step overflow
    zeros = flat.new_zeros(max(1, first, *sizes[1::2]))
    parts = [zeros[:first]]
    for leaf, numel, padding in zip(leaves, sizes[::2], sizes[1::2], strict=True):
        if leaf is None:
            parts.append(zeros[:1].expand(numel))  # without memory of its own
        else:
            # An embedding's gradient may be sparse, and a flat has a place for each element
            dense = leaf if leaf.layout == torch.strided else leaf.to_dense()
            parts.append(dense.reshape(-1))
        if padding:
            parts.append(zeros[:padding])
    # One kernel for all copies: a model has many small leaves
    return torch.cat(parts, out=flat)


def is_flat(leaf: Tensor | None, bucket: Bucket, dtype: torch.dtype) -> TypeGuard[Tensor]:
    """Whether this whole leaf, the bucket's first, is all of a flat of this dtype as it lies."""
    # The bucket has one leaf and no padding, as `_stands_alone` wants it
    return (
        leaf is not None
        and leaf.layout == torch.strided
        and leaf.numel() == bucket.numel
        and leaf.is_contiguous()
        and not is_flagged(leaf)
        and leaf.dtype == dtype
    )


def unpack(flat: Tensor, bucket: Bucket) -> list[Tensor]:
    """The bucket's leaves, whole, as views of its whole flat."""
    views = []
    for part, shape in zip(_split(flat, bucket, 0), bucket.shapes, strict=True):
        views.append(part.view(shape))
    return views


def cut(piece: Tensor, bucket: Bucket, piece_number: int) -> list[Tensor]:
    """The part of each leaf of the bucket in the `piece_number`-th piece, 1-D, as views of `piece`
    (piece,)."""
    return list(_split(piece, bucket, bucket.first(piece_number)))


def _split(flat: Tensor, bucket: Bucket, start: int) -> tuple[Tensor, ...]:
    """The leaves' parts (n,) of a flat that begins at the bucket's element `start`: views."""
    ranges = flat.split_with_sizes(bucket.sizes(start, start + flat.numel()))
    return ranges[1::2]  # every other one is padding


def blank(flat: Tensor, bucket: Bucket, start: int = 0) -> Tensor:
    """A flat of params with zeros for padding, where an optimizer may have left other numbers: they
    would count in a codec's blocks. A copy, unless there is no padding.

    `start`: the bucket's element that the flat begins with.
    """
    sizes = bucket.sizes(start, start + flat.numel())
    if not any(sizes[::2]):
        return flat
    flat = flat.clone()
    torch._foreach_zero_(flat.split_with_sizes(sizes)[::2])
    return flat


def messages_of(flat: Tensor, bucket: Bucket) -> Tensor:
    """Of a whole flat, whose padding is zeros, the messages of all held pieces in a row."""
    if isinstance(bucket.gather, torch.dtype):
        return flat.to(bucket.gather)
    return encoded(flat, bucket.gather, bucket.cut.num_held)


def flat_of_pieces(pieces: Sequence[Tensor], bucket: Bucket, piece_number: int) -> Tensor:
    """The flat piece (piece,) that these 1-D pieces are cut from; packed into a new one when they
    are from elsewhere."""
    flat = _flat_of(pieces, bucket.piece, lambda flat: cut(flat, bucket, piece_number))
    return pack_pieces(pieces, bucket, piece_number) if flat is None else flat


def pack_pieces(pieces: Sequence[Tensor], bucket: Bucket, piece_number: int) -> Tensor:
    """A new flat piece (piece,) of these 1-D pieces."""
    # Zeros, so that padding is 0 where pieces come from elsewhere
    flat = pieces[0].new_zeros(bucket.piece, dtype=_common_dtype(pieces, pieces[0].dtype))
    torch._foreach_copy_(cut(flat, bucket, piece_number), list(pieces))
    return flat


def flat_of_leaves(leaves: Sequence[Tensor], bucket: Bucket) -> Tensor:
    """The whole flat that these whole leaves lie in; packed into a new one when they don't lie in
    one."""
    flat = _flat_of(leaves, bucket.numel, lambda flat: unpack(flat, bucket))
    return pack(leaves, bucket, device=leaves[0].device) if flat is None else flat


def _flat_of(
    leaves: Sequence[Tensor], numel: int, views: Callable[[Tensor], Sequence[Tensor]]
) -> Tensor | None:
    """The flat (numel,) whose `views` lie just where the leaves do; None: it isn't found."""
    flat = base_of(leaves[0])
    if flat is None or flat.shape != (numel,):
        return None
    is_theirs = [*map(_place_of, leaves)] == [*map(_place_of, views(flat))]
    return flat if is_theirs else None


def _place_of(x: Tensor) -> tuple[Any, ...]:
    """All that tells whether two tensors are the same elements in memory, read in the same way."""
    # The storage, too: after `leaf.data = other` a leaf has another one, and still the old base
    return storage_id(x), x.storage_offset(), x.shape, x.stride(), x.dtype, is_flagged(x)


def by_bucket(leaves: Sequence[Tensor], layout: Layout, b: int) -> list[Tensor]:
    """Of leaves in tree order, those of the b-th bucket, in bucket order."""
    return [leaves[i] for i in layout.buckets[b].leaves]


def to_tree(parts: Sequence[Sequence[Any]], layout: Layout) -> PyTree[Any]:
    """The tree of leaves given bucket by bucket."""
    return layout.treedef.unflatten([parts[b][k] for b, k in layout.in_buckets])


def slice_flat(leaves: Sequence[Tensor], bucket: Bucket, piece_number: int) -> Tensor:
    """A bucket's whole leaves -> its `piece_number`-th piece (piece,), a copy."""
    pieces = []
    for k, leaf in enumerate(leaves):
        pieces.append(bucket.extent(k, piece_number).part_of(leaf.detach()).reshape(-1))
    return pack_pieces(pieces, bucket, piece_number)


def filled(leaves: Sequence[Tensor], layout: Layout, b: int, fill: Fill | None) -> Sequence[Tensor]:
    """Of leaves in tree order, those of the b-th bucket, in bucket order; their values from `fill`,
    if there is one."""
    own = by_bucket(leaves, layout, b)
    if fill is None:
        return own
    names = [layout.leaves[n].path for n in layout.buckets[b].leaves]
    return fill(names, own)


def _common_dtype(leaves: Sequence[Tensor | None], default: torch.dtype) -> torch.dtype:
    """The one dtype of leaves; those that are None are left out. `default` if all are."""
    dtypes = {leaf.dtype for leaf in leaves if leaf is not None} or {default}
    if len(dtypes) > 1:
        raise TypeError(
            f"the leaves of one bucket must share a dtype, got {sorted(map(str, dtypes))}"
        )
    return dtypes.pop()


def own_piece(flat: Tensor, bucket: Bucket, piece_number: int) -> Tensor:
    """Of a held flat, which has one or several of a bucket's pieces, the one that is the bucket's
    `piece_number`-th (piece,): a view."""
    # The held flat is one piece; see Note [two cuts] in `layout`
    if bucket.piece == flat.numel():
        return flat
    num_in_flat = bucket.cut.num_pieces // bucket.cut.num_held
    first = piece_number % num_in_flat * bucket.piece
    return flat[first : first + bucket.piece]
