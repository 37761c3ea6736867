"""Optimizer states that several transforms share, and finding one inside another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import optree
from optree import tree_map
from torch import Tensor

from ..params import is_on_engine
from ..tree import PyTree, dotted
from .arithmetic import Number, full_like
from .base import step_count, tree_zeros_like

State = TypeVar("State")  # a transform's NamedTuple


class CountState(NamedTuple):
    """The number of steps taken."""

    # mypy: a tuple has a method of this name, which the field takes the place of, as in optax
    count: Tensor  # type: ignore[assignment]  # 0-d int64, on the CPU


def zeros(kind: Callable[..., State], **others: Number) -> Callable[[PyTree[Tensor]], State]:
    """The `init` of a state that begins at zero: a NamedTuple of trees like params, whose `count`,
    if it has one, is of steps. `others`: the fields that begin at another number."""
    fields: tuple[str, ...] = kind._fields  # type: ignore[attr-defined]

    def first(field: str, params: PyTree[Tensor]) -> Any:
        if field == "count":
            return step_count()
        return full_like(params, others[field]) if field in others else tree_zeros_like(params)

    # No two parts of a state may share storage
    return lambda params: kind(*(first(field, params) for field in fields))


init_count = zeros(CountState)


class ScaleByLearningRateState(NamedTuple):
    """The number of steps taken, and the factor of the last one (before the first: its own)."""

    count: Tensor  # type: ignore[assignment]  # 0-d int64, on the CPU
    learning_rate: Tensor  # 0-d float64, on the CPU

    def report(self) -> dict[str, Tensor]:
        return {"learning_rate": self.learning_rate}


def state_metrics(state: Any) -> dict[str, Tensor]:
    """Reports of the parts of an optimizer's state, by name: 0-d tensors, the same on every rank.

    A part reports when its state has a method `report() -> {name: tensor}`. Where several report
    the same name, each is followed by the part's dotted path in `state`.
    """
    reports = [(path, part.report()) for path, part in _reporting(state, "")]
    nums = Counter(name for _, report in reports for name in report)
    metrics = {}  # metric's name -> 0-d tensor
    for path, report in reports:
        for name, value in report.items():
            # The root has no path to tell it by
            alone = nums[name] == 1 or not path
            metrics[name if alone else f"{name}.{path}"] = value
    return metrics


def _reporting(state: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The states inside that report, with their paths."""
    # A sharded node answers for what is inside, which is looked at next
    if not is_on_engine(state) and hasattr(state, "report"):
        yield path, state
    # A leaf of the state: nothing is inside
    if isinstance(state, Tensor) or optree.tree_is_leaf(state):
        return
    # Reports are numbers, which are here wherever the rest of a state lies
    if is_on_engine(state):
        yield from _reporting(state.as_it_lies, path)
        return
    children, _, entries, _ = optree.tree_flatten_one_level(state)
    # Of a NamedTuple optree gives indices; paths have its fields' names, as in checkpoint files
    fields = getattr(state, "_fields", None) if isinstance(state, tuple) else None
    for child, entry in zip(children, entries, strict=True):
        name = fields[entry] if fields else entry
        yield from _reporting(child, dotted(path, name))


def find_states(state: Any, kind: type[State]) -> list[State]:
    """Every state of one kind in an optimizer's state (or in anything that holds it), in the
    tree's order. Those that lie inside another of the kind are not looked for."""
    leaves = optree.tree_leaves(state, is_leaf=lambda s: isinstance(s, kind))
    return [leaf for leaf in leaves if isinstance(leaf, kind)]


def only_state(state: Any, kind: type[State], *, made_by: str, remedy: str) -> State:
    """The one state of a kind in an optimizer's state.

    Args:
        state: an optimizer's.
        kind: of the state to find.
        made_by: the transform that makes such states, for the error.
        remedy: for the error where there are several.

    Raises:
        ValueError: there is none, or there are several.
    """
    # Several would be ambiguous: nothing says which one the caller means
    found = find_states(state, kind)
    if not found:
        raise ValueError(
            f"expected one {made_by} in this state, got 0. Remedy: pass the opt_state of an "
            f"optimizer that has {made_by} in it"
        )
    if len(found) > 1:
        raise ValueError(
            f"expected one {made_by} in this state, got {len(found)}. Remedy: {remedy}"
        )
    return found[0]


def replace_states(state: Any, kind: type[State], fn: Callable[[State], State]) -> Any:
    """`state` with `fn` of every state that `find_states` finds."""

    def is_one(part: Any) -> bool:
        return isinstance(part, kind) or is_on_engine(part)

    def replaced(part: Any) -> Any:
        # Its other tensors stay its own, wherever they lie
        if is_on_engine(part):
            return part.with_numbers(replace_states(part.as_it_lies, kind, fn))
        return fn(part) if isinstance(part, kind) else part

    return tree_map(replaced, state, is_leaf=is_one)
