"""Whole trees to one rank's pieces and back, for checks that need no sharded step."""

from __future__ import annotations

import optree
from torch import Tensor

from ..groups.protocol import Group
from ..layout.flat_buffers import by_bucket, cut, pack_pieces, slice_flat, to_tree, unpack
from ..layout.layout import Layout
from ..tree import PyTree


def slice_tree(tree: PyTree[Tensor], layout: Layout, piece_number: int) -> PyTree[Tensor]:
    """Whole leaves -> copies of the `piece_number`-th pieces, views of one new flat per bucket. No
    communication."""
    leaves = optree.tree_leaves(tree)
    pieces = []
    for b, bucket in enumerate(layout.buckets):
        flat = slice_flat(by_bucket(leaves, layout, b), bucket, piece_number)  # (piece,)
        pieces.append(cut(flat, bucket, piece_number))
    return to_tree(pieces, layout)


def all_gather_tree(tree: PyTree[Tensor], layout: Layout, group: Group) -> PyTree[Tensor]:
    """Pieces -> whole leaves on every rank. One all-gather per bucket: S bytes arrive in all."""
    leaves = optree.tree_leaves(tree)
    wholes, started = [], []  # (numel,) per bucket, and each with its work
    for b, bucket in enumerate(layout.buckets):
        piece = pack_pieces(by_bucket(leaves, layout, b), bucket, group.rank)
        whole = piece.new_empty(bucket.numel)
        # The piece is kept with its work: the backend reads it until `wait` returns
        started.append((group.all_gather(whole, piece), piece))
        wholes.append(whole)
    # All are started first, so that they overlap on the wire
    for work, _ in started:
        work.wait()
    found = [unpack(whole, bucket) for whole, bucket in zip(wholes, layout.buckets, strict=True)]
    return to_tree(found, layout)
