"""`Sharded`: the answers to a transform's questions on this rank's pieces, with a group."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from optree import tree_map
from torch import Tensor

from ..errors import TransformError
from ..groups.protocol import Group, ReduceOp
from ..layout.extent import Extent
from ..layout.layout import Layout
from ..optim.across import (
    Dim,
    Owned,
    Pointwise,
    Question,
    Tree,
    WholeLeaf,
    check_limit,
    check_whole,
    dims_of,
    each,
    sum_dtype,
    total_of,
)
from ..optim.base import Transform
from ..tree import PyTree, select, storage_id, storages
from .dim_reductions import reduce_piece, spread_over_piece
from .pointwise import PointwiseOnFlats
from .state_plan import EVERYONE, owners_of
from .whole_leaf import Exchange, batches, run_batch


class Sharded:
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
        self._extents = select(layout.extents(group.rank), mask)
        self._is_cut = select(tree_map(lambda cut: cut.num_pieces > 1, layout.cuts), mask)
        self._bunches = PointwiseOnFlats(layout, mask, group.rank, donate=donate)
        self._numbers = self._bunches.numbers
        self._exchange = Exchange(layout, self._numbers, group)
        self._narrowed: dict[tuple[int, ...], Sharded] = {}

    @property
    def extents(self) -> PyTree[Extent]:
        return self._extents

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

    # scalars: one all-reduce for all leaves of all trees

    def sum(self, *trees: Tree) -> Any:
        return self._scalars(lambda x: x.sum(dtype=sum_dtype(x.dtype)), trees, "sum")

    def mean(self, *trees: Tree) -> Any:
        sums = self.sum(*trees)
        answers = [
            tree_map(lambda x, e: x / max(e.numel, 1), tree, self._extents)
            for tree in (sums if len(trees) > 1 else (sums,))
        ]
        return tuple(answers) if len(trees) > 1 else answers[0]

    def norm(self, *trees: Tree) -> Any:
        squares = self._scalars(
            lambda x: torch.linalg.vector_norm(x, dtype=sum_dtype(x.dtype)).square(), trees, "sum"
        )
        return tree_map(torch.sqrt, squares)

    def max(self, *trees: Tree) -> Any:
        return self._scalars(
            lambda x: x.max() if x.numel() else x.new_full((), -math.inf), trees, "max"
        )

    def total(self, *trees: Tree) -> Any:
        totals = [
            [x.sum(dtype=sum_dtype(x.dtype)) for x in optree.tree_leaves(tree)] for tree in trees
        ]
        return each(lambda x: x, self._totals(totals, [self._cut_leaves(tree) for tree in trees]))

    def dot(self, a: Tree, b: Tree) -> Tensor:
        return self.dots((a, b))[0]

    def dots(self, *pairs: tuple[Tree, Tree]) -> tuple[Tensor, ...]:
        return tuple(
            self._totals(
                [_products(a, b) for a, b in pairs], [self._cut_leaves(a) for a, _ in pairs]
            )
        )

    def _totals(self, sums: Sequence[list[Tensor]], cuts: Sequence[list[bool]]) -> list[Tensor]:
        """For each list of sums over leaves here, one a leaf, the total over all of them,
        everywhere."""
        parts = [
            [x for x, cut in zip(s, c, strict=True) if cut] for s, c in zip(sums, cuts, strict=True)
        ]
        reduced = self._reduce(
            [total_of(part) for part in parts], "sum", [bool(part) for part in parts]
        )
        rest = [
            [x for x, cut in zip(s, c, strict=True) if not cut]
            for s, c in zip(sums, cuts, strict=True)
        ]
        return [
            total_of(([x] if part else []) + alone)
            for x, part, alone in zip(reduced, parts, rest, strict=True)
        ]

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

    def _scalars(
        self, local: Callable[[Tensor], Tensor], trees: Sequence[Tree], op: ReduceOp
    ) -> Any:
        flattened = [optree.tree_flatten(tree) for tree in trees]
        cuts = [cut for tree in trees for cut in self._cut_leaves(tree)]
        reduced = iter(
            self._reduce([local(x) for leaves, _ in flattened for x in leaves], op, cuts)
        )
        return each(
            lambda x: x,
            [treedef.unflatten([next(reduced) for _ in leaves]) for leaves, treedef in flattened],
        )

    def _reduce(self, values: list[Tensor], op: ReduceOp, cuts: Sequence[bool]) -> list[Tensor]:
        """Reduce those tensors that `cuts` says, of any shape, each to its own shape and dtype, in
        one all-reduce."""
        if self._group.size > 1 and any(cuts):
            reduced = iter(
                self._all_reduce([x for x, cut in zip(values, cuts, strict=True) if cut], op)
            )
            return [next(reduced) if cut else x for x, cut in zip(values, cuts, strict=True)]
        return values

    def _all_reduce(self, values: list[Tensor], op: ReduceOp) -> list[Tensor]:
        dtype = values[0].dtype
        for x in values:
            dtype = torch.promote_types(dtype, x.dtype)
        device = next((x.device for x in values if x.device.type != "cpu"), values[0].device)
        packed = torch.cat([x.reshape(-1).to(device, dtype) for x in values])
        self._group.all_reduce(packed, op).wait()
        parts = packed.split([x.numel() for x in values])
        return [part.view(x.shape).to(x.dtype) for part, x in zip(parts, values, strict=True)]

    # dims: one all-reduce of vectors

    def sum_dim(self, tree: Tree, dim: Dim) -> Tree:
        return self._over_dims([(tree, dim)], "sum")[0]

    def sum_dims(self, *questions: Question) -> tuple[Tree, ...]:
        return self._over_dims(questions, "sum")

    def max_dim(self, tree: Tree, dim: Dim) -> Tree:
        return self._over_dims([(tree, dim)], "max")[0]

    def max_dims(self, *questions: Question) -> tuple[Tree, ...]:
        return self._over_dims(questions, "max")

    def _over_dims(self, questions: Sequence[Question], op: ReduceOp) -> tuple[Tree, ...]:
        def local(x: Tensor, extent: Extent, dim: Dim) -> Tensor | None:
            dims = dims_of(dim, extent.shape)
            return None if dims is None else reduce_piece(x, extent, dims, op)

        asked = [
            tree_map(lambda x, e, d=dim: local(x, e, d), tree, self._extents)
            for tree, dim in questions
        ]
        leaves, treedef = optree.tree_flatten(asked)
        cuts = [
            tree_map(lambda cut, x: None if x is None else cut, self._is_cut, tree)
            for tree in asked
        ]
        return tuple(treedef.unflatten(self._reduce(leaves, op, optree.tree_leaves(cuts))))

    def spread(self, tree: Tree, dim: Dim) -> Tree:
        def put_back(extent: Extent, x: Tensor | None) -> Tensor | None:
            dims = dims_of(dim, extent.shape)
            return None if x is None or dims is None else spread_over_piece(x, extent, dims)

        return tree_map(put_back, self._extents, tree)

    def keep(self, state: Any, *passing: Tree) -> Any:
        taken = storages(passing)

        def own(x: Any) -> Any:
            return x.clone() if isinstance(x, Tensor) and storage_id(x) in taken else x

        return tree_map(own, state)

    # pointwise: bunch by bunch

    def pointwise(
        self, part: Pointwise, updates: Tree, state: Any, params: Tree
    ) -> tuple[Tree, Any]:
        return self._bunches.pointwise(part, updates, state, params)

    def flats(self, tree: Tree) -> list[Tensor]:
        """The flats that a tree's leaves lie in, as `fused` takes them."""
        return self._bunches.flats(tree)

    def fuses(self, transform: Transform, params: Sequence[Tensor]) -> bool:
        """Whether `fused` can run this transform."""
        return self._bunches.fuses(transform, params)

    def fused(
        self, transform: Transform, updates: list[Tensor], state: Any, params: list[Tensor]
    ) -> Any:
        """Run a transform's kernel on flats of donated params, and on donated state. Returns the
        state."""
        return self._bunches.fused(transform, updates, state, params)

    # whole leaves: one all-to-all in, one out

    def _owners(self, part: WholeLeaf) -> list[int]:
        """The owner of each leaf of the tree."""
        costs = [part.cost(e.shape) for e in optree.tree_leaves(self._extents)]
        return owners_of(costs, optree.tree_leaves(self._is_cut), self._group.size)

    def whole_init(self, part: WholeLeaf, params: Tree) -> Any:
        leaves, treedef = optree.tree_flatten(params)
        owners = self._owners(part)
        (whole,) = self._exchange.to_owners([leaves], owners)
        states = []
        for i, (leaf, owner, extent) in enumerate(
            zip(leaves, owners, optree.tree_leaves(self._extents), strict=True)
        ):
            if owner in (self._group.rank, EVERYONE):
                states.append(Owned(part.init(whole[i]), i))
            else:
                made = part.init(torch.empty(extent.shape, dtype=leaf.dtype, device="meta"))
                states.append(
                    Owned(tree_map(lambda x, d=leaf.device: x.new_empty(0, device=d), made), i)
                )
        return treedef.unflatten(states)

    def whole(self, part: WholeLeaf, updates: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
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

    # the whole tree: gathered on every rank

    def whole_tree_init(self, init: Callable[[Tree], Any], params: Tree, limit: int) -> Any:
        return init(*self._gather([params], limit))

    def whole_tree(
        self, update: Callable[..., Any], updates: Tree, state: Any, params: Tree | None, limit: int
    ) -> tuple[Tree, Any]:
        whole = self._gather([updates] if params is None else [updates, params], limit)
        made, new_state = update(whole[0], state, None if params is None else whole[1])
        pieces = tree_map(lambda x, e: x.reshape(-1)[e.start : e.stop].clone(), made, self._extents)
        return pieces, new_state

    def _gather(self, trees: list[Tree], limit: int) -> list[Tree]:
        """Whole leaves on every rank, where everyone is an owner: S (N-1)/N bytes for each of the
        trees."""
        extents, treedef = optree.tree_flatten(self._extents)
        leaves = [optree.tree_leaves(tree) for tree in trees]
        check_limit(extents, leaves[0], limit)
        whole = self._exchange.to_owners(leaves, [EVERYONE] * len(extents))
        return [treedef.unflatten([tree[i] for i in range(len(extents))]) for tree in whole]


def _products(a: Tree, b: Tree) -> list[Tensor]:
    """Leaf by leaf, the inner product."""
    pairs = zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True)
    return [(x * y).sum(dtype=sum_dtype(x.dtype)) for x, y in pairs]
