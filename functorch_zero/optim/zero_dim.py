"""0-d leaves, which a pointwise author's functions see as (1,).

Sharded, a 0-d leaf is one element of a flat. Were it 0-d in one process, a 0-d float64 number would
promote it there by torch's rules, as in `x * torch.tensor(0.1, dtype=torch.float64)`, and the two
would have other bits.
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
    state, flags = init(widened(params)), followers(init, params)
    return _map_flagged(lambda x: x.reshape(()), state, flags)


def update_widened(
    update: Callable[[Tree, Any, Tree], tuple[Tree, Any]],
    init: Callable[[Tree], Any],
    updates: Tree,
    state: Any,
    params: Tree,
) -> tuple[Tree, Any]:
    """An update of widened leaves, narrowed again."""
    flags = followers(init, params)
    wide = _map_flagged(lambda x: x.reshape(1), state, flags)
    new, wide = update(widened(updates), wide, widened(params))
    return narrowed(new, params), _map_flagged(lambda x: x.reshape(()), wide, flags)


def followers(init: Callable[[Tree], Any], params: Tree) -> list[bool]:
    """Which leaves of the state follow a 0-d param: those that are larger when it is. Found on the
    meta device."""

    def made(size: int) -> list[Any]:
        metas = tree_map(
            lambda p: p.new_empty((size,) if p.ndim == 0 else p.shape, device="meta"), params
        )
        leaves: list[Any] = optree.tree_leaves(init(metas))
        return leaves

    return [
        isinstance(a, Tensor) and a.shape != b.shape for a, b in zip(made(1), made(2), strict=True)
    ]


def _map_flagged(fn: Callable[[Tensor], Tensor], tree: Any, flags: list[bool]) -> Any:
    leaves, treedef = optree.tree_flatten(tree)
    return treedef.unflatten([fn(x) if flag else x for x, flag in zip(leaves, flags, strict=True)])
