"""Bytes a rank holds between steps, from a layout and a run of `init` on placeholders. Nothing is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import optree
from optree import PyTree, tree_map
from torch import Tensor

from ..across import Tree, WholeLeaf
from ..layout import Bucket, Extent, Layout
from ..levels import Level
from ..optim.base import Transform
from ..state_plan import Planner, assign_owners, plan_of
from ..tree import select
from .records import Balance, Owned


def whole_bytes(bucket: Bucket, layout: Layout) -> int:
    """Of a bucket's whole flat, padding included."""
    return bucket.numel * bucket.dtype.itemsize


def piece_bytes(bucket: Bucket) -> int:
    """Of one rank's piece of a bucket, padding included."""
    return bucket.piece * bucket.dtype.itemsize


def params_bytes(layout: Layout, level: Level) -> int:
    """Of the params that a rank holds between steps."""
    return sum(piece_bytes(b) if level.cuts_params else whole_bytes(b, layout) for b in layout.buckets)


def gradient_bytes(layout: Layout, level: Level) -> int:
    """Of the reduced gradients that a rank gives to the optimizer."""
    return sum(piece_bytes(b) if level.cuts_state else whole_bytes(b, layout) for b in layout.buckets if b.trainable)


@dataclass(frozen=True)
class StateSizes:
    """An optimizer's state, as its `init` makes it."""

    shared: int  # bytes that every rank holds: pieces of whole buckets, and what all hold alike
    single: tuple[tuple[int, int], ...]  # (leaf, bytes an element) of those whose bucket is not all there
    owned: tuple[tuple[int, int], ...]  # (owner, bytes) of the leaves that one rank holds
    balance: Balance | None

    def at(self, layout: Layout, rank: int) -> int:
        """The bytes that `rank` holds."""
        places = ((layout.places[leaf], size) for leaf, size in self.single)
        pieces = sum(layout.buckets[b].extent(k, rank).num_here * size for (b, k), size in places)
        return self.shared + pieces + sum(size for owner, size in self.owned if owner == rank)


class _Recording(Planner):
    """A planner that notes whom it made owners."""

    def __init__(
        self, numbers: PyTree[int], extents: PyTree[Extent], num_ranks: int, made: list[tuple[int, int, float]]
    ):
        super().__init__(numbers, extents, num_ranks)
        self.made = made  # (leaf, owner, cost)

    def select(self, mask: PyTree[bool]) -> _Recording:
        return _Recording(select(self._numbers, mask), select(self._extents, mask), self._num_ranks, self.made)

    def whole_init(self, part: WholeLeaf, params: Tree) -> Any:
        costs = [part.cost(e.shape) for e in optree.tree_leaves(self._extents)]
        owners = assign_owners(costs, self._num_ranks)
        self.made += zip(optree.tree_leaves(self._numbers), owners, costs, strict=True)
        return super().whole_init(part, params)


def state_sizes(optimizer: Transform, layout: Layout, num_ranks: int) -> StateSizes:
    """Run `init` on placeholders and add up what it makes. `num_ranks` are those the optimizer's work is cut over."""
    numbers = select(layout.treedef.unflatten(range(len(layout.leaves))), layout.trainable)
    extents = tree_map(lambda n: Extent(layout.leaves[n].shape, 0, layout.leaves[n].numel), numbers)
    planner = _Recording(numbers, extents, num_ranks, [])
    state = optimizer.init(planner.placeholders([leaf.dtype for leaf in layout.leaves]), planner)
    made = optree.tree_leaves(state)
    plan = plan_of(state)
    follows: dict[tuple[int, int], int] = {}  # (slot, leaf) -> bytes an element
    owned, shared = [], 0
    for leaf, what in zip(made, plan.leaves, strict=True):
        if what.kind == "follows":
            follows[what.slot, what.leaf] = leaf.element_size()
        elif what.kind == "owned":
            assert what.dtype is not None
            owned.append((what.owner, prod(what.shape) * what.dtype.itemsize))
        elif isinstance(leaf, Tensor):
            shared += leaf.nbytes
    together, single = _flats(follows, layout)
    return StateSizes(shared + together, single, tuple(owned), _balance(planner.made, layout, num_ranks))


def _flats(follows: dict[tuple[int, int], int], layout: Layout) -> tuple[int, tuple[tuple[int, int], ...]]:
    """State leaves that follow all leaves of a bucket share a flat, padding included; the others are on their own."""
    together, rest = 0, dict(follows)
    for slot in range(1 + max((slot for slot, _ in follows), default=-1)):
        for bucket in layout.buckets:
            if all((slot, leaf) in rest for leaf in bucket.leaves):
                together += bucket.piece * follows[slot, bucket.leaves[0]]
                for leaf in bucket.leaves:
                    del rest[slot, leaf]
    return together, tuple((leaf, size) for (_, leaf), size in rest.items())


def _balance(made: list[tuple[int, int, float]], layout: Layout, num_ranks: int) -> Balance | None:
    if not made:
        return None
    return Balance(tuple(Owned(layout.leaves[n].path, owner, cost) for n, owner, cost in made), num_ranks)
