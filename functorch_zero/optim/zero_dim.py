"""0-d leaves, which a pointwise author's functions see as (1,).

Sharded, a 0-d leaf is one element of a flat. In one process, were it 0-d there, a 0-d float64
number would promote it by torch's rules, as in `x * torch.tensor(0.1, dtype=torch.float64)`. So the
two would have other bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import optree
from optree import tree_map
from torch import Tensor

from ..tree import PyTree
from .across import Pointwise, Shape, Tree


def as_vectors(part: Pointwise) -> Pointwise:
    """A pointwise author's functions, which see a 0-d leaf as (1,). Flats have no such leaves, so
    `in_place` stays."""

    def init(params: Tree) -> Any:
        if not _has_scalars(params):
            return part.init(params)
        # Made of (1,) leaves, so state that follows a 0-d param is (1,) here
        return _reshaped(part.init(_widened(params)), _followers(part.init, params), ())

    def update(updates: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
        if not _has_scalars(params):
            return part.update(updates, state, params)
        # Per leaf of the state, since counts are 0-d as well and must stay so
        follow = _followers(part.init, params)
        wide = _reshaped(state, follow, (1,))
        new, after = part.update(_widened(updates), wide, _widened(params))
        new = tree_map(lambda x, p: x.reshape(()) if p.ndim == 0 else x, new, params)
        return new, _reshaped(after, follow, ())

    return replace(part, init=init, update=update)


def _has_scalars(tree: Tree) -> bool:
    return any(x.ndim == 0 for x in optree.tree_leaves(tree))


def _widened(tree: Tree) -> Tree:
    """The tree with (1,) for each 0-d leaf."""
    return tree_map(lambda x: x.reshape(1) if x.ndim == 0 else x, tree)


def _followers(init: Callable[[Tree], Any], params: Tree) -> PyTree[bool]:
    """Per leaf of the state, whether it follows a 0-d param: whether it is larger when the param
    is. Found on the meta device."""

    def made_of(size: int) -> Any:
        # On the meta device: `init` makes shapes and no values, whatever the leaf's size
        def resized(p: Tensor) -> Tensor:
            return p.new_empty((size,) if p.ndim == 0 else p.shape, device="meta")

        return init(tree_map(resized, params))

    # A leaf that is no larger for two elements than for one is a count or its like
    def follows(one: Any, two: Any) -> bool:
        return isinstance(one, Tensor) and one.shape != two.shape

    return tree_map(follows, made_of(1), made_of(2))


def _reshaped(tree: Any, flags: PyTree[bool], shape: Shape) -> Any:
    """The tree with this shape for the leaves that have a flag."""
    return tree_map(lambda x, flag: x.reshape(shape) if flag else x, tree, flags)
