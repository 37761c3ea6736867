"""`Local`: the answers to a transform's questions in one process. It is the oracle."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self

import optree
from optree import tree_map
from torch import Tensor

from ..layout.extent import Extent
from ..tree import PyTree, select
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
    check_whole,
    reduce_leaf,
    run_batch,
    smallest,
    sum_dtype,
    sums_of,
    total_of,
    with_ones,
    without,
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
            return _sum_dims(x, dims) if op == "sum" else _max_dims(x, dims)

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

    def init_whole(self, part: WholeLeaf, params: Tree) -> Any:
        # This process owns every leaf, so each state is whole
        leaves, treedef = optree.tree_flatten(params)
        return treedef.unflatten([Owned(part.init(leaf), i) for i, leaf in enumerate(leaves)])

    def run_whole(
        self, part: WholeLeaf, updates: Tree, state: Any, params: Tree
    ) -> tuple[Tree, Any]:
        # States are trees inside a leaf's place: flattened as far as the updates go, one Owned each
        leaves, treedef = optree.tree_flatten(updates)
        states = treedef.flatten_up_to(state)
        new_updates, new_states = [], []
        rows = zip(leaves, states, optree.tree_leaves(params), strict=True)
        for i, (update, old, param) in enumerate(rows):
            (new,) = run_batch(part, [update], [old.state], [param])
            check_whole(updates, i, (update, old.state), new)
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


def _sum_dims(x: Tensor, dims: Shape) -> Tensor:
    # In at least float32, as ranks add their shares
    dtype = sum_dtype(x.dtype)
    if not dims:  # torch would sum over all of them
        return x.to(dtype, copy=True)
    return x.sum(dims, dtype=dtype)


def _max_dims(x: Tensor, dims: Shape) -> Tensor:
    if not dims:  # torch would take the maximum over all of them
        return x.clone()
    if not x.numel():  # of which torch has no maximum
        return x.new_full(without(tuple(x.shape), dims), smallest(x.dtype))
    return x.amax(dims)
