"""The cut test: a transform makes the same of whole leaves and of the same elements cut otherwise.

On ranks a transform runs on 1-D pieces of leaves, and a pointwise one on any regrouping of them. So
what it does itself, outside what it asks of `across`, may depend on no shape, number of elements,
position, path, order or number of leaves, nor on how often it has been called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import optree
import torch
from optree import tree_map
from torch import Tensor

from ...tree import PyTree, paths
from ..across import Pointwise
from ..base import Needs, Transform
from .operators import Watch

Compare = Callable[[Tensor, Tensor], str | None]
"""`(expected, got)` to where they differ, None where they don't."""
Cut = Callable[[PyTree[Tensor]], Any]


class Steps(NamedTuple):
    """The input of a test: params, and the updates of each step."""

    params: PyTree[Tensor]
    updates: list[PyTree[Tensor]]


class _Made(NamedTuple):
    """The results of one step."""

    updates: list[Tensor]
    state: Any


def middle(numel: int) -> int:
    """Where a leaf is cut in two: inside it, if it has two elements, and near its beginning, so
    that a piece is small whatever the leaf."""
    return min((numel + 1) // 3, 7) if numel != 1 else 1


def first_pieces(tree: PyTree[Tensor]) -> Any:
    """The pieces that begin the leaves, 1-D, copied."""
    return tree_map(lambda x: x.reshape(-1)[: middle(x.numel())].clone(), tree)


def second_pieces(tree: PyTree[Tensor]) -> Any:
    """The pieces that end the leaves, 1-D, copied."""
    return tree_map(lambda x: x.reshape(-1)[middle(x.numel()) :].clone(), tree)


def joined(tree: PyTree[Tensor]) -> Any:
    """All leaves, the last one first, as one."""
    return {"": torch.cat([x.reshape(-1) for x in reversed(optree.tree_leaves(tree))])}


def check_cuts(
    transform: Transform,
    steps: Steps,
    watch: Watch,
    compare: Compare,
    *,
    operators: bool = False,
    regroup: bool = False,
    across_of: Callable[[Cut | None], Any] = lambda cut: None,
) -> None:
    """Run some steps on whole leaves, and on what they are cut to, and compare.

    Args:
        operators: whether those are watched, too, of one of the pieces: that comes first.
        regroup: whether to run the steps on all leaves joined, too.
        across_of: the `across` of each run, in order; None is of whole leaves.
    """

    def run(cut: Cut | None, on: str, *, operators: bool = False) -> list[_Made]:
        given = Steps(cut(steps.params), [*map(cut, steps.updates)]) if cut else steps
        return _run(transform, given, across_of(cut), watch, on, operators=operators)

    def check(step: _Made, updates: Sequence[Tensor], on: str) -> None:
        for i, (x, y) in enumerate(zip(step.updates, updates, strict=True)):
            if difference := compare(x.reshape(-1), y):
                path = paths(steps.params)[i] or "(root)"
                _refuse(watch, f"updates of leaf {path}", on, difference)

    first = run(first_pieces, "1-D pieces", operators=operators)
    whole = run(None, "whole leaves")
    second = run(second_pieces, "1-D pieces")
    for made, a, b in zip(whole, first, second, strict=True):
        check(made, [*map(_concatenate, a.updates, b.updates)], "1-D pieces")
        _check_states(made.state, a.state, b.state, watch, compare)
    if regroup:
        for made, one in zip(whole, run(joined, "all leaves joined to one"), strict=True):
            sizes = [x.numel() for x in reversed(made.updates)]
            check(made, one.updates[0].split(sizes)[::-1], "all leaves joined to one")


def check_pointwise(
    part: Pointwise, steps: Steps, watch: Watch, compare: Compare, *, operators: bool = False
) -> None:
    """`check_cuts` of a pointwise author's functions as they are."""
    alone = Transform(
        lambda params, across: part.init(params),
        lambda updates, state, params, across: part.update(updates, state, params),
        Needs.POINTWISE,
    )
    check_cuts(alone, steps, watch, compare, operators=operators, regroup=True)


def _run(
    transform: Transform, steps: Steps, across: Any, watch: Watch, on: str, *, operators: bool
) -> list[_Made]:
    params, made = steps.params, []
    with watch.running(on, operators=operators, params=params):
        state = transform.init_fn(params, across)
    size = optree.tree_structure(state).num_leaves
    for updates in steps.updates:
        with watch.running(on, operators=operators, updates=updates, state=state, params=params):
            new, state = transform.update_fn(updates, state, params, across)
        leaves, given = optree.tree_leaves(new), optree.tree_leaves(updates)
        for what, num, want in (
            ("updates", len(leaves), len(given)),
            ("state", optree.tree_structure(state).num_leaves, size),
        ):
            if num != want:
                story = f"returns {what} of {num} leaves where {want} are expected"
                watch.refuse(story, "keep the structure")
        for i, (x, u) in enumerate(zip(leaves, given, strict=True)):
            if not isinstance(x, Tensor) or x.shape != u.shape:
                got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x)}"
                _refuse(
                    watch,
                    f"updates of leaf {paths(updates)[i] or '(root)'}",
                    on,
                    f"expected shape {tuple(u.shape)}, got {got}",
                )
        made.append(_Made(leaves, state))
    return made


def _concatenate(*pieces: Tensor) -> Tensor:
    return torch.cat([x.reshape(-1) for x in pieces])


def _check_states(whole: Any, first: Any, second: Any, watch: Watch, compare: Compare) -> None:
    """State that follows a leaf follows its pieces; all other state is the same for all of them."""
    rows = zip(*map(optree.tree_leaves, (whole, first, second)), strict=True)
    for i, (x, a, b) in enumerate(rows):
        if not isinstance(x, Tensor) or x.device.type == "meta":
            continue
        if x.shape == a.shape == b.shape:
            difference = compare(x, a) or compare(x, b)
        elif x.numel() == a.numel() + b.numel():
            difference = compare(x.reshape(-1), _concatenate(a, b))
        else:
            difference = f"expected shape {tuple(x.shape)}, got {tuple(a.shape)} {tuple(b.shape)}"
        if difference:
            _refuse(watch, f"state {paths(whole)[i]}", "1-D pieces", difference)


def _refuse(watch: Watch, what: str, on: str, difference: str) -> NoReturn:
    watch.refuse(
        f"depends on how leaves are cut: the {what} of {on} are not those of whole leaves: "
        f"{difference}",
        "let each result depend on the values at its own position only, keep in other state what "
        "all ranks have, and ask `across` for the rest",
    )
