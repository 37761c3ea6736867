"""0-d leaves, which a pointwise author's functions see as (1,).

Sharded, a 0-d leaf is one element of a flat. In one process, were it 0-d there, a 0-d float64
number would promote it by torch's rules, as in `x * torch.tensor(0.1, dtype=torch.float64)`. So the
two would have other bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
from optree import tree_map
from torch import Tensor

from ..tree import PyTree

Tree = PyTree[Tensor]


def has_scalars(tree: Tree) -> bool:
    """Whether any leaf is 0-d."""
    return any(x.ndim == 0 for x in optree.tree_leaves(tree))


def widened(tree: Tree) -> Tree:
    """The tree with (1,) for each 0-d leaf."""
    return tree_map(lambda x: x.reshape(1) if x.ndim == 0 else x, tree)


def narrowed(tree: Tree, like: Tree) -> Tree:
    """The inverse, given a tree that was not widened."""
    return tree_map(lambda x, y: x.reshape(()) if y.ndim == 0 else x, tree, like)


def init_widened(init: Callable[[Tree], Any], params: Tree) -> Any:
    """The state of `params`, made from widened ones; its leaves that follow a 0-d param are 0-d."""
    # Made of (1,) leaves, so state that follows a 0-d param is (1,) here
    state = init(widened(params))
    return _map_flagged(_to_0d, state, followers(init, params))


def update_widened(
    update: Callable[[Tree, Any, Tree], tuple[Tree, Any]],
    init: Callable[[Tree], Any],
    updates: Tree,
    state: Any,
    params: Tree,
) -> tuple[Tree, Any]:
    """An update of widened leaves, narrowed again."""
    # Per leaf of the state, since counts are 0-d as well and must stay so
    follow = followers(init, params)
    wide_state = _map_flagged(_to_1d, state, follow)
    new, wide_state = update(widened(updates), wide_state, widened(params))
    return narrowed(new, params), _map_flagged(_to_0d, wide_state, follow)


def followers(init: Callable[[Tree], Any], params: Tree) -> list[bool]:
    """Per leaf of the state, whether it follows a 0-d param: whether it is larger when the param
    is. Found on the meta device."""

    def made_of(size: int) -> list[Any]:
        # On the meta device: `init` makes shapes and no values, whatever the leaf's size
        def resized(p: Tensor) -> Tensor:
            return p.new_empty((size,) if p.ndim == 0 else p.shape, device="meta")

        leaves: list[Any] = optree.tree_leaves(init(tree_map(resized, params)))
        return leaves

    # A leaf that is no larger for two elements than for one is a count or its like
    follow = []
    for one, two in zip(made_of(1), made_of(2), strict=True):
        follow.append(isinstance(one, Tensor) and one.shape != two.shape)
    return follow


def _to_0d(x: Tensor) -> Tensor:
    return x.reshape(())


def _to_1d(x: Tensor) -> Tensor:
    return x.reshape(1)


def _map_flagged(fn: Callable[[Tensor], Tensor], tree: Any, flags: list[bool]) -> Any:
    """The tree with `fn` of the leaves that have a flag."""
    leaves, treedef = optree.tree_flatten(tree)
    # Flags are in flatten order, one per leaf
    rows = zip(leaves, flags, strict=True)
    return treedef.unflatten([fn(x) if flag else x for x, flag in rows])
