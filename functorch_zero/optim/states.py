"""Optimizer states that several transforms share, and finding one inside another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import optree
from optree import tree_map
from torch import Tensor

from ..tree import PyTree
from .base import step_count

State = TypeVar("State")


class CountState(NamedTuple):
    """How many steps have been taken."""

    count: Tensor  # type: ignore[assignment]  # 0-d int64, on the CPU


def init_count(params: PyTree[Tensor]) -> CountState:
    """A step counter at 0."""
    return CountState(step_count())


def find_states(state: Any, kind: type[State]) -> list[State]:
    """Every state of one kind in an optimizer's state (or in anything that holds it), outermost first."""
    leaves = optree.tree_leaves(state, is_leaf=lambda s: isinstance(s, kind))
    return [leaf for leaf in leaves if isinstance(leaf, kind)]


def replace_states(state: Any, kind: type[State], fn: Callable[[State], State]) -> Any:
    """`state` with `fn` of every state of one kind in it."""
    return tree_map(lambda s: fn(s) if isinstance(s, kind) else s, state, is_leaf=lambda s: isinstance(s, kind))
