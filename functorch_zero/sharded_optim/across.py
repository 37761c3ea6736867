"""`Sharded`: the answers to a transform's questions on this rank's pieces, with a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optree
import torch
from optree import tree_map
from torch import Tensor

from .._torch_private import storage_id
from ..errors import TransformError
from ..groups.protocol import Group, ReduceOp
from ..layout.extent import Extent
from ..layout.layout import Layout
from ..optim.across import (
    Across,
    Dim,
    DimOp,
    LeafOp,
    Owned,
    Pointwise,
    Product,
    Question,
    Tree,
    WholeLeaf,
    check_limit,
    check_whole,
    reduce_leaf,
    state_elsewhere,
    sums_of,
    total_of,
)
from ..optim.base import Transform
from ..tree import PyTree, select, storages
from .dim_reductions import reduce_piece, spread_over_piece
from .pointwise import PointwiseOnFlats
from .state_plan import EVERYONE, owners_of
from .whole_leaf import Exchange, batches, run_batch


class Sharded(Across):
    """Answers on pieces.

    Args:
        layout: how the params are cut over the group.
        group: the ranks.
        donate: pointwise updates may overwrite the updates and the state they are given.

    Every tree given or returned holds this rank's pieces of the trained leaves, None elsewhere. A
    leaf that is not cut (level 0) is here whole, and alike on every rank: what is asked of it is
    answered without communication.
    """

    def __init__(
        self,
        layout: Layout,
        group: Group,
        *,
        donate: bool = False,
        mask: PyTree[bool] | None = None,
    ):
        self._layout, self._group, self._donate = layout, group, donate
        mask = layout.trainable if mask is None else mask
        self.extents = select(layout.extents(group.rank), mask)
        self._is_cut = select(tree_map(lambda cut: cut.num_pieces > 1, layout.cuts), mask)
        self._on_flats = PointwiseOnFlats(layout, mask, group.rank, donate=donate)
        self._numbers = self._on_flats.numbers
        self._exchange = Exchange(layout, self._numbers, group)
        self._narrowed: dict[tuple[int, ...], Sharded] = {}

    def select(self, mask: PyTree[bool]) -> Sharded:
        chosen = tuple(
            n for n, keep in zip(self._numbers, optree.tree_leaves(mask), strict=True) if keep
        )
        if chosen not in self._narrowed:
            of_all = self._layout.treedef.unflatten(
                [i in set(chosen) for i in range(len(self._layout.leaves))]
            )
            self._narrowed[chosen] = Sharded(
                self._layout, self._group, donate=self._donate, mask=of_all
            )
        return self._narrowed[chosen]

    # Questions: one all-reduce for all leaves of all trees

    def reduce(self, trees: Sequence[Tree], op: LeafOp) -> tuple[Tree, ...]:
        here: Any = [tree_map(lambda x: reduce_leaf(x, op), tree) for tree in trees]
        cuts = [cut for tree in trees for cut in self._cut_leaves(tree)]
        if op != "norm":
            return tuple(self._reduce(here, op, cuts))
        squares = self._reduce(tree_map(torch.square, here), "sum", cuts)
        return tuple(tree_map(torch.sqrt, squares))

    def reduce_dims(self, questions: Sequence[Question], op: DimOp) -> tuple[Tree, ...]:
        def share(x: Tensor, extent: Extent, dims: tuple[int, ...]) -> Tensor:
            return reduce_piece(x, extent, dims, op)

        here = [self._per_leaf(share, tree, dim) for tree, dim in questions]
        cuts = [
            tree_map(lambda cut, x: None if x is None else cut, self._is_cut, tree) for tree in here
        ]
        return tuple(self._reduce(here, op, optree.tree_leaves(cuts)))

    def totals(self, products: Sequence[Product]) -> tuple[Tensor, ...]:
        cut_sums, whole_sums = [], []
        for product in products:
            sums, cuts = sums_of(product), self._cut_leaves(product[0])
            cut_sums.append([x for x, cut in zip(sums, cuts, strict=True) if cut])
            whole_sums.append([x for x, cut in zip(sums, cuts, strict=True) if not cut])
        some_cut = [bool(sums) for sums in cut_sums]
        reduced = self._reduce([total_of(sums) for sums in cut_sums], "sum", some_cut)
        return tuple(
            total_of([x, *whole] if some else whole)
            for x, some, whole in zip(reduced, some_cut, whole_sums, strict=True)
        )

    def spread(self, tree: Tree, dim: Dim) -> Tree:
        return self._per_leaf(spread_over_piece, tree, dim)

    def _cut_leaves(self, tree: Tree) -> list[bool]:
        """For each leaf of a tree, whether it is cut."""
        flags, treedef = optree.tree_flatten(self._is_cut)
        if len(set(flags)) > 1 and optree.tree_structure(tree) != treedef:
            raise TransformError(
                "some leaves are replicated (level 0) and others are cut, so a question must be "
                "asked of trees with the structure of params, and this one has another. Remedy: "
                "ask tree by tree, or train none at level 0"
            )
        return (
            flags if len(set(flags)) > 1 else [any(flags)] * optree.tree_structure(tree).num_leaves
        )

    def _reduce(self, trees: Sequence[Tree], op: ReduceOp, cuts: Sequence[bool]) -> list[Tree]:
        """Reduce the leaves that `cuts` says, of any shape, each to its own shape and dtype, in one
        all-reduce."""
        leaves, treedef = optree.tree_flatten(list(trees))
        shares = [x for x, cut in zip(leaves, cuts, strict=True) if cut]
        if shares and self._group.size > 1:
            reduced = iter(self._all_reduce(shares, op))
            leaves = [next(reduced) if cut else x for x, cut in zip(leaves, cuts, strict=True)]
        return [*treedef.unflatten(leaves)]

    def _all_reduce(self, values: list[Tensor], op: ReduceOp) -> list[Tensor]:
        """Pack, reduce and unpack, in the widest dtype."""
        dtype = values[0].dtype
        for x in values:
            dtype = torch.promote_types(dtype, x.dtype)
        device = next((x.device for x in values if x.device.type != "cpu"), values[0].device)
        packed = torch.cat([x.reshape(-1).to(device, dtype) for x in values])
        self._group.all_reduce(packed, op).wait()
        parts = packed.split([x.numel() for x in values])
        return [part.view(x.shape).to(x.dtype) for part, x in zip(parts, values, strict=True)]

    def keep(self, state: Any, *passing: Tree) -> Any:
        taken = storages(passing)

        def own(x: Any) -> Any:
            return x.clone() if isinstance(x, Tensor) and storage_id(x) in taken else x

        return tree_map(own, state)

    # Pointwise: flat by flat

    def run_pointwise(
        self, part: Pointwise, updates: Tree, state: Any, params: Tree
    ) -> tuple[Tree, Any]:
        return self._on_flats.update(part, updates, state, params)

    def flats(self, tree: Tree) -> list[Tensor]:
        """The flats that a tree's leaves lie in, as `fused` takes them."""
        return self._on_flats.flats(tree)

    def fuses(self, transform: Transform, params: Sequence[Tensor]) -> bool:
        """Whether `fused` can run this transform."""
        return self._on_flats.fuses(transform, params)

    def fused(
        self, transform: Transform, updates: list[Tensor], state: Any, params: list[Tensor]
    ) -> Any:
        """Run a transform's kernel on flats of donated params, and on donated state. Returns the
        state."""
        return self._on_flats.fused(transform, updates, state, params)

    # Whole leaves: one all-to-all in, one out

    def _owners(self, part: WholeLeaf) -> list[int]:
        """The owner of each leaf of the tree."""
        costs = [part.cost(e.shape) for e in optree.tree_leaves(self.extents)]
        return owners_of(costs, optree.tree_leaves(self._is_cut), self._group.size)

    def init_whole(self, part: WholeLeaf, params: Tree) -> Any:
        leaves, treedef = optree.tree_flatten(params)
        owners = self._owners(part)
        (whole,) = self._exchange.to_owners([leaves], owners)
        states = []
        for i, (leaf, owner, extent) in enumerate(
            zip(leaves, owners, optree.tree_leaves(self.extents), strict=True)
        ):
            here = owner in (self._group.rank, EVERYONE)
            state = part.init(whole[i]) if here else state_elsewhere(part, leaf, extent)
            states.append(Owned(state, i))
        return treedef.unflatten(states)

    def run_whole(
        self, part: WholeLeaf, updates: Tree, state: Any, params: Tree
    ) -> tuple[Tree, Any]:
        leaves, treedef = optree.tree_flatten(updates)
        states: list[Owned] = treedef.flatten_up_to(state)
        owners = self._owners(part)
        asked = [leaves, optree.tree_leaves(params)] if part.wants_param else [leaves]
        whole = self._exchange.to_owners(asked, owners)
        results = {}
        for batch in batches(part, whole[0]):
            given = [whole[-1][i] if part.wants_param else None for i in batch]
            new_u, new_s = run_batch(
                part, [whole[0][i] for i in batch], [states[i].state for i in batch], given
            )
            for i, made_u, made_s in zip(batch, new_u, new_s, strict=True):
                check_whole(updates, i, (whole[0][i], states[i].state), (made_u, made_s))
                results[i] = made_u.to(leaves[i].dtype)
                states[i] = Owned(made_s, states[i].leaf)
        return treedef.unflatten(
            self._exchange.from_owners(results, leaves, owners)
        ), treedef.unflatten(states)

    # The whole tree: gathered on every rank

    def gather(self, trees: list[Tree], limit: int) -> list[Tree]:
        """Everyone is an owner of every leaf: S (N-1)/N bytes for each of the trees."""
        extents, treedef = optree.tree_flatten(self.extents)
        leaves = [optree.tree_leaves(tree) for tree in trees]
        check_limit(extents, leaves[0], limit)
        whole = self._exchange.to_owners(leaves, [EVERYONE] * len(extents))
        return [treedef.unflatten([tree[i] for i in range(len(extents))]) for tree in whole]

    def cut(self, tree: Tree) -> Tree:
        return tree_map(lambda x, e: x.reshape(-1)[e.in_leaf].clone(), tree, self.extents)
