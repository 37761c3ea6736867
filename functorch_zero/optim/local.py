"""`Local`: the answers to a transform's questions in one process. It is the oracle."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self

import optree
from optree import tree_map
from torch import Tensor

from ..layout.extent import Extent
from ..tree import PyTree, paths, select
from .across import (
    Across,
    Dim,
    DimOp,
    Factors,
    LeafOp,
    Owned,
    Pointwise,
    Question,
    Shape,
    Tree,
    WholeLeaf,
    check_limit,
    note_leaves,
    reduce_leaf,
    reduce_over,
    run_batch,
    sums_of,
    total_of,
    with_ones,
)


class Local(Across):
    """One process, whole leaves, plain torch."""

    def __init__(self, params: Tree):
        self.extents = tree_map(Extent.of, params)  # per leaf, all of it: [0, numel)

    def reduce(self, trees: Sequence[Tree], op: LeafOp) -> tuple[Tree, ...]:
        # No collective: all elements are here
        return tuple(tree_map(lambda x: reduce_leaf(x, op), tree) for tree in trees)

    def reduce_dims(self, questions: Sequence[Question], op: DimOp) -> tuple[Tree, ...]:
        # The extent says nothing more: the leaf has its full shape
        def reduced(x: Tensor, extent: Extent, dims: Shape) -> Tensor:
            return reduce_over(x, dims, op)

        return tuple(self._per_leaf(reduced, tree, dim) for tree, dim in questions)

    def totals(self, products: Sequence[Factors]) -> tuple[Tensor, ...]:
        return tuple(total_of(sums_of(product)) for product in products)

    def spread(self, tree: Tree, dim: Dim) -> Tree:
        def put_back(x: Tensor, extent: Extent, dims: Shape) -> Tensor:
            # A view with dims of size 1, which broadcasts over the leaf
            return x.reshape(with_ones(extent.shape, dims))

        return self._per_leaf(put_back, tree, dim)

    def select(self, mask: PyTree[bool]) -> Self:
        # A copy, so that a subclass keeps its own fields
        narrowed = copy.copy(self)
        narrowed.extents = select(self.extents, mask)
        return narrowed

    def keep(self, state: Any, *passing: Tree) -> Any:
        # No copies: nothing overwrites the updates here, since `in_place` is never taken
        return state

    def run_pointwise(
        self, part: Pointwise, updates: Tree, state: Any, params: Tree
    ) -> tuple[Tree, Any]:
        return part.update(updates, state, params)

    def _init_leaves(self, part: WholeLeaf, leaves: list[Tensor]) -> Sequence[Any]:
        # This process owns every leaf, so each state is whole
        return [*map(part.init, leaves)]

    def run_whole(
        self, part: WholeLeaf, updates: Tree, state: Any, params: Tree
    ) -> tuple[Tree, Any]:
        # States are trees inside a leaf's place: flattened as far as the updates go, one Owned each
        leaves, treedef = optree.tree_flatten(updates)
        states = treedef.flatten_up_to(state)
        new_updates, new_states = [], []
        rows = zip(leaves, states, optree.tree_leaves(params), strict=True)
        for n, (update, old, param) in enumerate(rows):
            try:
                (new,) = run_batch(part, [update], [old.state], [param])
            except Exception as error:
                note_leaves(error, [paths(updates)[n]])
                raise
            new_updates.append(new.update)
            new_states.append(Owned(new.state, old.leaf))
        return treedef.unflatten(new_updates), treedef.unflatten(new_states)

    def gather(self, trees: list[Tree], limit: int) -> list[Tree]:
        # Leaves are whole already; the limit holds here, too, so that one process finds the error
        for tree in trees:
            check_limit(optree.tree_leaves(self.extents), optree.tree_leaves(tree), limit)
        return trees

    def cut(self, tree: Tree) -> Tree:
        return tree
