"""The tensors that a rank holds of a sharded tree or state, and of a batch."""

from __future__ import annotations

from typing import Any

import optree
from optree import tree_map
from torch import Tensor

from functorch_zero.groups.protocol import Group
from functorch_zero.layout.flat_buffers import by_bucket, pack_pieces, to_tree, unpack
from functorch_zero.layout.layout import Layout
from functorch_zero.layout.piece import Piece
from functorch_zero.layout.sharded_tree import ShardedTree
from functorch_zero.params import as_local
from functorch_zero.tree import PyTree


def local_leaves(tree: Any) -> list[Any]:
    """The leaves of a tree as this rank holds them, plain tensors, in flatten order. Leaves of
    sharded trees may be among them."""
    leaves = optree.tree_leaves(as_local(tree))
    return [leaf.here if isinstance(leaf, Piece) else leaf for leaf in leaves]


def part(batch: Any, group: Any) -> Any:
    """This rank's part of the rows of a batch."""
    return tree_map(lambda x: x.chunk(group.size)[group.rank], batch)


def published(tree: Any) -> list[Tensor]:
    """The published flats of the sharded trees in a tree."""
    found = []
    for node in optree.tree_leaves(tree, is_leaf=_is_sharded):
        if _is_sharded(node):
            found += [flat for flat in node.published() if flat is not None]
    return found


def _is_sharded(node: Any) -> bool:
    return isinstance(node, ShardedTree)


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
