"""Whole trees to one rank's pieces, for checks that need no sharded step."""

from __future__ import annotations

import optree
from torch import Tensor

from ..layout.flat_buffers import by_bucket, cut, slice_flat, to_tree
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
