"""`check_claims` passes what is tagged rightly and fails, naming operator and transform, what is
not."""

from __future__ import annotations

import inspect
import math
import re
import subprocess
import sys
from contextlib import suppress
from typing import Any, NamedTuple

import optree
import pytest
import torch
from optree import tree_map

from functorch_zero import optim
from functorch_zero.errors import TransformError
from functorch_zero.optim import (
    Transform,
    pointwise,
    with_statistics,
    with_whole_leaves,
    with_whole_tree,
)
from functorch_zero.optim.base import init_empty
from functorch_zero.optim.claims.check import check_claims, simple_parts
from functorch_zero.optim.claims.cuts import name_of
from functorch_zero.testing import check_transform
from functorch_zero.testing.strategies import public_functions
from functorch_zero.tree import paths
from tests.tiers import THOROUGH, thinned


def leaf_by_leaf(fn: Any) -> Transform:
    """A transform that says it is pointwise and does this to every update."""

    def update(updates: Any, state: Any, params: Any) -> Any:
        return tree_map(fn, updates), state

    return pointwise(init_empty, update)


def add_own_noise(u: torch.Tensor) -> torch.Tensor:
    return u + torch.randn(u.shape)


def halve_in_place(u: torch.Tensor) -> torch.Tensor:
    return u.mul_(0.5)


def swap_data(u: torch.Tensor) -> torch.Tensor:
    u.data = u * 2
    return u


def clip_if_large(u: torch.Tensor) -> torch.Tensor:
    return u / 2 if u.numel() and u.reshape(-1)[0] > 0 else u


def through_numpy(u: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(u.numpy() * 2)


CUT = "depends on how leaves are cut"

CULPRITS = {
    "a hidden mean": (lambda u: u - u.mean(), "aten.mean.default"),
    "a sort": (lambda u: u.sort(dim=-1).values, "aten.sort"),
    "a norm": (lambda u: u / u.norm(), "aten.linalg_vector_norm"),
    "a foreach norm": (lambda u: u / torch._foreach_norm([u])[0], "aten._foreach_norm"),
    "a foreach maximum": (lambda u: u / torch._foreach_max([u])[0], "aten._foreach_max"),
    "a cumulative sum": (lambda u: u.cumsum(0), "aten.cumsum"),
    "a matrix product": (lambda u: u @ u, "aten.dot"),
    "a softmax": (lambda u: u.softmax(0), "aten._softmax"),
    "a random number per position": (add_own_noise, "aten.randn"),
    "dropout": (lambda u: torch.nn.functional.dropout(u), "aten.bernoulli_"),
    "a change of its input in place": (halve_in_place, "aten.mul_.Tensor: updates of leaf"),
    "an input whose data is swapped": (swap_data, "changes its input in place"),
    "a host read": (clip_if_large, "on the host by aten._local_scalar_dense"),
    "a comparison of whole tensors": (lambda u: u if torch.equal(u, -u) else -u, "aten.equal"),
    "a list": (lambda u: u * (sum(u.tolist()) + 1), "Tensor.tolist"),
    "numpy": (through_numpy, "Tensor.numpy"),
    "another element": (lambda u: u * u[-1:], CUT),
    "neighbours": (lambda u: torch.cat([u[:1], u[1:] - u[:-1]]), CUT),
    "a transposition": (
        lambda u: torch.stack([u.reshape(-1)] * 2).t().reshape(-1)[: u.numel()].view(u.shape),
        CUT,
    ),
    "an outer product": (lambda u: (u[:, None] * u[None]).diagonal(), CUT),
    "elements chosen by value": (lambda u: u[u > 0], "aten.index"),
    "a flip": (lambda u: u.flip(0), "aten.flip"),
}


@pytest.mark.parametrize("culprit", CULPRITS)
def test_mistagged_pointwise_is_refused(culprit: str) -> None:
    fn, given_away = CULPRITS[culprit]
    with pytest.raises(TransformError) as caught:
        check_claims(leaf_by_leaf(fn))
    message = str(caught.value)
    assert given_away in message
    assert "leaf_by_leaf.<locals>.update" in message
    assert "Remedy" in message
    assert re.search(r"\(test_claims\.py:\d+\)", message) or CUT in message


def test_foreach_operators_in_place_are_elementwise() -> None:
    def update(updates: Any, state: Any, params: Any) -> Any:
        leaves, treedef = optree.tree_flatten(updates)
        own = [leaf.clone() for leaf in leaves]
        # That of one tensor isn't tagged, or isn't there
        torch._foreach_abs_(own)
        torch._foreach_maximum_(own, 0.5)
        return treedef.unflatten(own), state

    check_claims(pointwise(init_empty, update))


def test_a_count_outside_of_the_state_is_told_from_a_cut() -> None:
    counts = [0]

    def update(updates: Any, state: Any, params: Any) -> Any:
        counts[0] += 1
        return tree_map(lambda u: u / counts[0], updates), state

    with pytest.raises(TransformError, match=r"is not a function: repeated.*keep it in the state"):
        check_claims(pointwise(init_empty, update))


@pytest.mark.parametrize("mixed", [lambda u: u / u.norm(), lambda u: u - u.mean(0)])
def test_a_batch_of_leaves_must_not_be_mixed(mixed: Any) -> None:
    """In one process each leaf comes alone: ranks would train otherwise, by what each one owns."""

    def update(batch: torch.Tensor, state: Any) -> Any:
        return mixed(batch), state

    transform = with_whole_leaves(lambda param: (), update, batched=True)
    params = {"a": torch.ones(3, 4), "none": torch.ones(0)}
    with pytest.raises(TransformError, match=r"leaf a in a batch of two.*Remedy: the first dim"):
        check_claims(transform, params)


MIXED = {
    "params": (lambda param: (), lambda u, s, param: (u + 0.5 * param.mean(0), s)),
    "states": (torch.zeros_like, lambda u, s: (s.mean(0) - s + u, s + u)),
    "norm of states": (torch.zeros_like, lambda u, s: (u / (1 + s.norm()), s + u)),
}


@pytest.mark.parametrize("mixed", MIXED)
def test_what_else_a_batch_has_must_not_be_mixed(mixed: str) -> None:
    """Params, and states from the second step on."""
    transform = with_whole_leaves(*MIXED[mixed], batched=True)
    torch.manual_seed(1)
    with pytest.raises(TransformError, match=r"leaf a in a batch of two"):
        check_claims(transform, {"a": torch.randn(3, 4)})


def test_right_functions_of_a_batch_pass_where_numbers_far_from_1_fail() -> None:
    def whitened(u: torch.Tensor, state: Any) -> Any:
        gram = u @ u.mT + 1e-3 * torch.eye(u.shape[1])  # of updates of 1e3, round-off drowns it
        return torch.cholesky_solve(u, torch.linalg.cholesky(gram)), state

    torch.manual_seed(1)
    check_claims(with_whole_leaves(lambda p: (), whitened, batched=True), {"a": torch.randn(8, 2)})


def test_a_function_that_fails_in_a_batch_is_refused() -> None:
    def update(batch: torch.Tensor, state: Any) -> Any:
        (alone,) = batch  # of k leaves
        return alone[None], state

    transform = with_whole_leaves(lambda param: (), update, batched=True)
    with pytest.raises(TransformError, match=r"update of .*update fails on whole leaves"):
        check_claims(transform, {"a": torch.ones(3, 4)})


def test_a_whole_leaf_function_must_not_write_to_its_param() -> None:
    """On ranks some params are copies, and a write to these would be lost."""

    def update(update: torch.Tensor, state: Any, param: torch.Tensor) -> Any:
        param.mul_(0.9)
        return update, state

    with pytest.raises(TransformError, match="changes its input in place: param of leaf a"):
        check_claims(with_whole_leaves(lambda param: (), update), {"a": torch.ones(3, 4)})


def test_asking_across_in_a_pointwise_transform_is_refused() -> None:
    def update(updates: Any, state: Any, params: Any, across: Any) -> Any:
        return tree_map(torch.mul, updates, across.norm(params)), state

    with pytest.raises(TransformError, match=r"across\.norm.*with_statistics"):
        check_claims(pointwise(init_empty, update))


def every_leaf(fn: Any) -> Any:
    """An update that makes this of the number of a leaf, its path and itself."""

    def update(updates: Any, state: Any, params: Any) -> Any:
        leaves, treedef = optree.tree_flatten(updates)
        rows = enumerate(zip(paths(updates), leaves, strict=True))
        return treedef.unflatten([fn(i, path, u) for i, (path, u) in rows]), state

    return update


def alone(fn: Any) -> Any:
    return every_leaf(lambda i, path, u: fn(u))


def add_the_next(updates: Any, state: Any, params: Any) -> Any:
    leaves, treedef = optree.tree_flatten(updates)
    others = [x.reshape(-1)[:1] for x in leaves if x.numel()]
    return treedef.unflatten([u + others[i % len(others)] for i, u in enumerate(leaves)]), state


def average(updates: Any, state: Any, params: Any) -> Any:
    return tree_map(lambda u: u / len(optree.tree_leaves(updates)), updates), state


def first_call_first() -> Any:
    calls: list[int] = []

    def update(updates: Any, state: Any, params: Any) -> Any:
        calls.append(1)
        return tree_map(lambda u: u * (2 if len(calls) == 1 else 1), updates), state

    return update


class Steps(NamedTuple):
    """A state that counts the steps taken, in its author's own field."""

    n: torch.Tensor  # 0-d


def from_a_step_on(
    first: int, lie: Any, *, dtype: torch.dtype = torch.int64, branch: bool = False
) -> Transform:
    """A transform that is honest before its `first` call, numbered from 1."""

    def update(updates: Any, state: Steps, params: Any) -> Any:
        n = state.n + 1
        if branch:
            return tree_map(lambda u: lie(u) if n >= first else u, updates), Steps(n)
        return tree_map(lambda u: torch.where(n >= first, lie(u), u), updates), Steps(n)

    return pointwise(lambda params: Steps(torch.zeros((), dtype=dtype)), update)


# A lie, and what of the error names it
LATE_LIES: dict[str, tuple[Transform, str]] = {
    "a mean, chosen by where": (from_a_step_on(3, lambda u: u - u.mean()), "aten.mean"),
    "a mean, in a branch": (from_a_step_on(3, lambda u: u - u.mean(), branch=True), "aten.mean"),
    "numel": (from_a_step_on(3, lambda u: u / max(u.numel(), 1)), CUT),
    "numel, in a branch": (from_a_step_on(3, lambda u: u / max(u.numel(), 1), branch=True), CUT),
    "numel, by an int32": (from_a_step_on(3, lambda u: u * u.numel(), dtype=torch.int32), CUT),
    "numel, by a float": (from_a_step_on(3, lambda u: u * u.numel(), dtype=torch.float32), CUT),
    "position": (
        from_a_step_on(3, lambda u: u * torch.arange(u.numel()).view(u.shape)),
        CUT,
    ),
    "another element": (from_a_step_on(3, lambda u: u * u[:1]), CUT),
    "after the warm-up": (from_a_step_on(1001, lambda u: u * u.numel()), CUT),
    "a shape that pieces lack": (
        from_a_step_on(3, lambda u: u.mT.mT if u.numel() > 3 else u, branch=True),
        "fails on 1-D pieces",
    ),
}


@pytest.mark.parametrize("params", [None, {"w": torch.zeros(4, 3), "b": torch.zeros(7)}])
@pytest.mark.parametrize("lie", LATE_LIES)
def test_lies_that_begin_later_are_refused(lie: str, params: Any) -> None:
    """As `shard` does at init: from the third call on, or after a thousand steps."""
    transform, given_away = LATE_LIES[lie]
    with pytest.raises(TransformError, match=re.escape(given_away)):
        check_claims(transform, params)


def every(period: int, first: int) -> Transform:
    """Work of its own in each step whose number, counted from `first`, divides by the period."""

    def update(updates: Any, state: Steps, params: Any) -> Any:
        if (int(state.n) + first) % period == 0:
            updates = tree_map(lambda u: u / (1 + u.norm()), updates)
        return updates, Steps(state.n + 1)

    return pointwise(lambda params: Steps(torch.zeros((), dtype=torch.int64)), update)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("period", [2, 3, 4, 7, 10, 16])
def test_work_at_the_beginning_or_the_end_of_a_period_is_refused(period: int, first: int) -> None:
    with pytest.raises(TransformError, match=r"aten\.linalg_vector_norm"):
        check_claims(every(period, first))


def test_a_transform_that_has_no_late_steps_is_tested_in_its_first_ones() -> None:
    """Here a table of learning rates, which has no row for a late one."""
    rates = torch.tensor([0.1, 0.2, 0.3])
    counts: list[int] = []

    def by_table(fn: Any) -> Transform:
        def update(updates: Any, state: Steps, params: Any) -> Any:
            counts.append(int(state.n))
            rate = rates[state.n]
            return tree_map(lambda u: fn(u * rate), updates), Steps(state.n + 1)

        return pointwise(lambda params: Steps(torch.zeros((), dtype=torch.int64)), update)

    check_claims(by_table(lambda u: u))
    assert {0, 1, 2} < set(counts)
    with pytest.raises(TransformError, match=CUT):
        check_claims(by_table(lambda u: u * u.numel()))


# Elementwise operators, and other results of the same elements when they are cut otherwise
LIES: dict[str, Any] = {
    "by ndim": lambda: alone(lambda u: u * u.ndim),
    "by the ndim of matrices": lambda: alone(lambda u: u * 2 if u.ndim == 2 else u),
    "by shape": lambda: alone(lambda u: u / (u.shape[-1] + 1)),
    "by a row": lambda: alone(lambda u: u * 2 if u.shape[0] == 1 and u.numel() > 1 else u),
    "by a column": lambda: alone(lambda u: u * 2 if u.shape[-1] == 1 and u.numel() > 1 else u),
    "by numel": lambda: alone(lambda u: u / max(u.numel(), 1)),
    "by a large numel": lambda: alone(lambda u: u * 2 if u.numel() >= 4096 else u),
    "by one element": lambda: alone(lambda u: u * 2 if u.numel() == 1 else u),
    "by odd numbers": lambda: alone(lambda u: u * (1 + u.numel() % 2)),
    "by position": lambda: alone(lambda u: u * torch.arange(u.numel()).view(u.shape)),
    "by the first position": lambda: alone(
        lambda u: torch.where(torch.arange(u.numel()).view(u.shape) == 0, u * 2, u)
    ),
    "by the last dim's position": lambda: alone(lambda u: u * torch.arange(u.shape[-1])),
    "by path": lambda: every_leaf(lambda i, path, u: u * 2 if path == "matrix" else u),
    "by any path": lambda: every_leaf(lambda i, path, u: u * len(path)),
    "by the leaf's number": lambda: every_leaf(lambda i, path, u: u * i),
    "by the first leaf": lambda: every_leaf(lambda i, path, u: u * (2 if i == 0 else 1)),
    "by another leaf": lambda: add_the_next,
    "by the number of leaves": lambda: average,
    "by calls": first_call_first,
    "by its own first element": lambda: alone(lambda u: u * u.reshape(-1)[:1] if u.numel() else u),
    "by a broken broadcast": lambda: alone(lambda u: u + u.reshape(-1)[:1].view(1, 1)),
    "a transposed matrix": lambda: alone(lambda u: u.t() if u.ndim == 2 else u),
    "a flattened result": lambda: alone(lambda u: u.reshape(-1)),
    "what only matrices have": lambda: alone(lambda u: u.mT.mT if u.numel() > 3 else u),
}


@pytest.mark.parametrize("lie", LIES)
def test_results_by_the_cut_are_refused(lie: str) -> None:
    update = LIES[lie]()
    with pytest.raises(TransformError, match=re.escape(update.__qualname__)) as caught:
        check_claims(pointwise(init_empty, update))
    assert CUT in str(caught.value) or "fails on" in str(caught.value)


def with_an_answer(fn: Any) -> Transform:
    """A transform that multiplies each leaf by its norm and by this of itself."""

    def update(updates: Any, state: Any, params: Any, across: Any) -> Any:
        norms = across.norm(updates)
        return tree_map(lambda u, n: u * n * fn(u), updates, norms), state

    return with_statistics(init_empty, update)


WHOLE_ONLY = {
    "ndim": lambda u: u.ndim + 1,
    "shape": lambda u: u.shape[0] if u.ndim else 1,
    "numel": lambda u: u.numel() + 1,
    "position": lambda u: torch.arange(u.numel()).view(u.shape),
    "a large numel": lambda u: 2 if u.numel() >= 4000 else 1,
}


@pytest.mark.parametrize("what", WHOLE_ONLY)
@pytest.mark.parametrize("params", [None, {"w": torch.zeros(300, 200), "b": torch.zeros(7)}])
def test_what_an_author_adds_to_an_answer_is_tested(what: str, params: Any) -> None:
    with pytest.raises(TransformError, match=f"with_an_answer.*{CUT}"):
        check_claims(with_an_answer(WHOLE_ONLY[what]), params)


def test_answers_are_told_to_all_ranks() -> None:
    """However the leaves are cut: so are they once spread, and the sums of a tree."""

    def update(updates: Any, state: Any, params: Any, across: Any) -> Any:
        sums = tree_map(
            lambda x: x * (1 + torch.arange(x.numel()).view(x.shape)), across.sum_dim(updates, -1)
        )
        spread = across.spread(sums, -1)
        total = across.total(updates)
        return tree_map(lambda u, s: u * s * total, updates, spread), state

    params = {"w": torch.zeros(300, 200), "b": torch.zeros(7), "cube": torch.zeros(2, 3, 4)}
    check_claims(with_statistics(init_empty, update), params)


def test_other_questions_on_pieces_are_refused() -> None:
    def update(updates: Any, state: Any, params: Any, across: Any) -> Any:
        total = across.total(updates)
        if optree.tree_leaves(updates)[0].ndim > 1:
            total = total + across.total(params)
        return tree_map(lambda u: u * total, updates), state

    with pytest.raises(TransformError, match=r"update: it asks across for other things"):
        check_claims(with_statistics(init_empty, update), {"w": torch.zeros(3, 4)})


def asks_if(fits: Any, question: Any, first: int = 1) -> Transform:
    """A transform that asks, from its `first` call on, where its first leaf fits."""

    def update(updates: Any, state: Steps, params: Any, across: Any) -> Any:
        n = state.n + 1
        if n >= first and fits(optree.tree_leaves(updates)[0]):
            question(across, updates)
        return updates, Steps(n)

    return with_statistics(lambda params: Steps(torch.zeros((), dtype=torch.int64)), update)


QUESTIONS: dict[str, Any] = {
    "totals": lambda across, tree: across.total(tree),
    "sums": lambda across, tree: across.sum(tree),
    "sums over a dim": lambda across, tree: across.sum_dim(tree, 0),
}


@pytest.mark.parametrize("first", [1, 1001])
@pytest.mark.parametrize("fits", [lambda u: u.numel() > 5, lambda u: u.numel() <= 5])
@pytest.mark.parametrize("question", QUESTIONS)
def test_questions_of_some_ranks_only_are_refused(question: str, fits: Any, first: int) -> None:
    """On ranks, those that ask would wait for the others."""
    transform = asks_if(fits, QUESTIONS[question], first)
    with pytest.raises(TransformError, match="asks across for other things"):
        check_claims(transform, {"w": torch.zeros(3, 4)})


def test_other_questions_are_told_from_one_another() -> None:
    def update(updates: Any, state: Any, params: Any, across: Any) -> Any:
        whole = optree.tree_leaves(updates)[0].ndim > 1
        across.norm(updates) if whole else across.sum(updates)
        return updates, state

    with pytest.raises(TransformError, match="asks across for other things"):
        check_claims(with_statistics(init_empty, update), {"w": torch.zeros(3, 4)})


def test_a_question_that_a_pointwise_transform_asks_later_is_refused() -> None:
    def update(updates: Any, state: Steps, params: Any, across: Any) -> Any:
        if state.n > 1000:
            across.total(updates)
        return updates, Steps(state.n + 1)

    with pytest.raises(TransformError, match=r"asked across\.total"):
        check_claims(pointwise(lambda params: Steps(torch.zeros((), dtype=torch.int64)), update))


def test_a_late_step_that_fails_on_pieces_only_is_refused() -> None:
    transform = from_a_step_on(1001, lambda u: u.mT.mT, branch=True)
    with pytest.raises(TransformError, match="fails on 1-D pieces"):
        check_claims(transform, {"w": torch.zeros(4, 3)})


def test_paths_of_the_tree_are_tried() -> None:
    """Also by transforms that are run by the bucket, where paths are lost."""
    lie = pointwise(init_empty, every_leaf(lambda i, path, u: u * 2 if "bias" in path else u))
    check_claims(lie)
    tree = {"head": {"bias": torch.zeros(3), "weight": torch.zeros(3, 2)}}
    for transform in (lie, optim.lookahead(lie, 2, 0.5), optim.chain(optim.clip(1.0), lie)):
        with pytest.raises(TransformError, match=f"every_leaf.*{CUT}.*joined"):
            check_claims(transform, tree)


def many_leaves() -> Any:
    """Of a deep model."""
    return {
        "layers": [{"w": torch.zeros(4, 3), "b": torch.zeros(4)} for _ in range(200)],
        "head": torch.zeros(3, 2),
    }


def test_leaves_that_are_alike_are_tried_once() -> None:
    seen: list[int] = []

    def update(updates: Any, state: Any, params: Any, across: Any) -> Any:
        seen.append(len(optree.tree_leaves(updates)))
        return tree_map(torch.mul, updates, across.norm(updates)), state

    check_claims(with_statistics(init_empty, update), many_leaves())
    assert set(seen) == {5}


def test_a_transform_of_one_tree_is_tried_on_all_of_it() -> None:
    """And lies of a label that few leaves have are found."""
    tree = many_leaves()
    factors = tree_map(lambda leaf: 2.0, tree)

    def update(updates: Any, state: Any, params: Any, across: Any) -> Any:
        return tree_map(lambda u, n, f: u * n * f, updates, across.norm(updates), factors), state

    check_claims(with_statistics(init_empty, update), tree)
    lie = with_an_answer(lambda u: u.numel())
    middle = optim.partition(
        {"one": lie, "rest": optim.scale(1.0)},
        lambda path, leaf: "one" if path == "layers.100.w" else "rest",
    )
    with pytest.raises(TransformError, match=CUT):
        check_claims(middle, tree)


def test_leaves_may_not_be_combined() -> None:
    def update(updates: Any, state: Any, params: Any) -> Any:
        return updates | {"vector": updates["vector"][:1] + updates["matrix"][:1]}, state

    with pytest.raises(TransformError, match=rf"{CUT}: the updates of leaf vector"):
        check_claims(pointwise(init_empty, update))


def test_state_that_follows_no_param_may_not_hold_values() -> None:
    def init(params: Any) -> Any:
        return {"first": torch.zeros(())}

    def update(updates: Any, state: Any, params: Any) -> Any:
        return updates, {"first": updates["vector"][0] * 1}

    with pytest.raises(TransformError, match=rf"{CUT}: the state first"):
        check_claims(pointwise(init, update))


def test_an_in_place_change_of_the_step_count_is_refused() -> None:
    def update(updates: Any, state: Any, params: Any) -> Any:
        state["count"].add_(1)
        return updates, state

    with pytest.raises(
        TransformError, match=r"in place by aten\.add_.*state of leaf count \(test_claims\.py:"
    ):
        check_claims(pointwise(lambda params: {"count": torch.zeros(())}, update))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_in_place_must_give_the_same_nans_and_infinities(value: float) -> None:
    def fill(updates: Any, state: Any, params: Any) -> Any:
        return tree_map(lambda u: torch.full_like(u, value), updates), state

    # Zeros for NaN, the dtype's largest numbers for infinities
    def fill_with_finite(updates: Any, state: Any, params: Any) -> Any:
        return tree_map(lambda u: torch.full_like(u, value).nan_to_num(), updates), state

    check_claims(pointwise(init_empty, fill, in_place=fill))
    with pytest.raises(TransformError, match="in_place and update differ"):
        check_claims(pointwise(init_empty, fill, in_place=fill_with_finite))


def test_init_is_watched_too() -> None:
    def init(params: Any) -> Any:
        return tree_map(lambda p: p / p.sum(), params)

    with pytest.raises(TransformError, match=r"aten\.sum"):
        check_claims(pointwise(init, lambda updates, state, params: (updates, state)))


def test_a_statistics_transform_that_takes_the_mean_itself_is_refused() -> None:
    def update(updates: Any, state: Any, params: Any, across: Any) -> Any:
        return tree_map(lambda u, n: u - u.mean() * n, updates, across.norm(params)), state

    with pytest.raises(TransformError, match=r"aten\.mean.*ask `across`"):
        check_claims(with_statistics(init_empty, update))


def test_a_culprit_inside_a_chain_is_named() -> None:
    chained = optim.chain(optim.adam(0.1), leaf_by_leaf(lambda u: u.cumsum(0)))
    with pytest.raises(TransformError, match=r"leaf_by_leaf.*aten\.cumsum"):
        check_claims(chained)


ALLOWED = {
    "views": lambda u: u.view(1, -1).t().reshape(u.shape),
    "work in place on a temporary": lambda u: u.clone().mul_(2).add_(u),
    "out": lambda u: torch.mul(u, 2, out=torch.empty_like(u)),
    "a slice written": lambda u: torch.zeros_like(u).copy_(u).clamp_(-1, 1),
    "foreach": lambda u: torch._foreach_add(torch._foreach_mul([u, u], [1.0, 2.0]), 1.0)[1],
    "foreach in place": lambda u: torch._foreach_lerp_([v := u.clone()], [u], 0.5) or v,
    "joined and split": lambda u: torch.cat([u, u * 2])[len(u) :],
    "another dtype and back": lambda u: u.double().to(torch.bfloat16).to(u.dtype),
    "where": lambda u: torch.where(u.isfinite() & (u > 0), u, torch.full_like(u, 2.0)),
    "sums of what has no position": lambda u: u * torch.arange(3.0).sum(),
    "complex numbers": lambda u: torch.view_as_real(torch.complex(u, -u) * 2)[..., 0],
    "float parts": lambda u: torch.frexp(u).mantissa,
}


@pytest.mark.parametrize("name", ALLOWED)
def test_elementwise_work_is_allowed(name: str) -> None:
    check_claims(leaf_by_leaf(ALLOWED[name]))


def test_reading_the_step_count_is_allowed() -> None:
    def update(updates: Any, state: Any, params: Any) -> Any:
        return tree_map(lambda u: u * int(state["count"]), updates), {"count": state["count"] + 1}

    check_claims(pointwise(lambda params: {"count": torch.zeros((), dtype=torch.int64)}, update))


def test_whole_leaves_may_be_used_as_one_likes() -> None:
    check_claims(
        with_whole_leaves(
            lambda param: torch.zeros(()), lambda u, state: (u.sort(-1).values, state + u.sum())
        )
    )


def test_masks_and_labels_are_checked_with_params() -> None:
    params = {"a": torch.zeros(3, 4), "b": [torch.zeros(2), None]}
    mask = {"a": True, "b": [False, None]}
    check_claims(optim.masked(optim.adam(0.1), mask), params)
    check_claims(optim.scale_by_label({"a": 1.0, "b": 2.0}, lambda path, leaf: path[0]), params)
    with pytest.raises(TransformError, match=r"aten\.mean"):
        check_claims(optim.masked(leaf_by_leaf(lambda u: u - u.mean()), mask), params)


def test_a_wrappers_own_code_is_checked_with_params() -> None:
    inner = optim.scale(2.0)

    def update(updates: Any, state: Any, params: Any, across: Any) -> Any:
        updates, state = inner.update(updates, state, params, across)
        return tree_map(lambda u: u / u.abs().max() if u.numel() else u, updates), state

    wrapper = Transform(inner.init, update, optim.Needs.STATISTICS, parts=(inner,))
    with pytest.raises(TransformError, match=r"aten\.max"):
        check_claims(wrapper, {"w": torch.zeros(3, 4)})


def test_names() -> None:
    chained = optim.chain(optim.scale(1.0), optim.masked(optim.clip(1.0), lambda path, leaf: True))
    assert [name_of(t) for t in simple_parts(chained)] == ["scale", "clip"]
    assert name_of(chained) == " + ".join(name_of(t) for t in simple_parts(chained))


def members() -> dict[str, Transform]:
    """Every transform that functorch_zero.optim makes from no argument, or from one number."""
    found = {}
    for name, make in public_functions().items():
        if inspect.isfunction(make) and not name.startswith("with_"):
            required = [
                p for p in inspect.signature(make).parameters.values() if p.default is p.empty
            ]
            arguments = [0.5 for p in required if p.kind is p.POSITIONAL_OR_KEYWORD]
            with suppress(TypeError, AttributeError, ValueError):
                found[name] = make(*arguments)
    return {name: made for name, made in found.items() if isinstance(made, Transform)}


@pytest.mark.parametrize("name", thinned(members(), 27))
def test_every_member_passes(name: str) -> None:
    transform = members()[name]
    check_claims(transform)
    check_claims(
        transform,
        {"layer": {"w": torch.zeros(4, 5), "b": torch.zeros(4)}, "s": torch.zeros(()), "n": None},
    )


FIRST_STEPS = """
import sys, tempfile, torch, functorch_zero as fz
from functorch_zero import checkpoint, optim, testing
from tests.conformance.table import ROWS

SLOW = ("torch._dynamo", "sympy")
params = {"w": torch.ones(5, 3).requires_grad_(), "b": torch.ones(3).requires_grad_()}
x = torch.ones(2, 5)

def loss_fn(params, buffers, x):
    return (x @ params["w"] + params["b"]).square().mean()

def steps_of(optimizer):
    def program(value, x):
        params, state = value
        mean, grads = fz.value_and_grad(loss_fn)(params, {}, x)
        return optimizer.apply(grads, state, params), {"loss": mean}

    init = lambda params: (params, optimizer.init(params))
    return fz.train_step(loss_fn, optimizer), fz.program_step(program, init=init)

def begin(group, step, level):
    sharded = fz.shard(step, group=group, level=level)
    return sharded, sharded.init(params)

def run(group, step, level):
    sharded, state = begin(group, step, level)
    return sharded, sharded(state, x)[0]

def imported(*, by):
    print(by, *(name for name in SLOW if name in sys.modules))

imported(by="import")
clipped = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3))
steps = [*steps_of(clipped), *steps_of(optim.lamb(1e-3))]
for action in (begin, run):
    for step, level in zip(steps, (3, 1, 0, 3)):
        testing.run_ranks(lambda group: action(group, step, level), 2)
    imported(by=action.__name__)

def and_more(group):
    sharded, state = run(group, steps[0], 3)
    score = fz.eval_step(lambda *args: {"loss": loss_fn(*args)})
    fz.shard(score, group=group, level=3)(state, x)
    checkpoint.save(root, sharded, state)
    sharded.unshard(checkpoint.load(root, sharded, like=state).state)

with tempfile.TemporaryDirectory() as root:
    testing.run_ranks(and_more, 2)
imported(by="more")
of_torch = optim.to_torch(optim.lamb, params.items(), lr=1e-3)
for _ in range(2):
    of_torch.zero_grad()
    loss_fn(params, {}, x).backward()
    of_torch.step()
of_torch.load_state_dict(of_torch.state_dict())
imported(by="to_torch")
for name, row in ROWS.items():
    if name != "from_torch":  # torch's own step imports it
        testing.run_ranks(lambda group: begin(group, fz.train_step(loss_fn, row.make()), 1), 2)
imported(by="optimizers")
"""


@THOROUGH
def test_the_first_steps_import_nothing_slow() -> None:
    """The compiler takes seconds. So does sympy, for the strides of meta tensors, half a second:
    torch's backward imports it."""
    command = [sys.executable, "-c", FIRST_STEPS]
    run = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100)
    imported, begun, *others = run.stdout.splitlines()
    assert (imported, begun) == ("import", "begin")
    assert [line.removesuffix(" sympy") for line in others] == [
        *("run", "more", "to_torch", "optimizers")
    ]


def forgets_the_state(updates: Any, *others: Any) -> Any:
    return updates


@pytest.mark.parametrize("make", [pointwise, with_statistics, with_whole_leaves, with_whole_tree])
def test_an_update_that_forgets_the_state_is_named(make: Any) -> None:
    transform, params = make(lambda params: (), forgets_the_state), {"w": torch.ones(2, 3)}
    with pytest.raises(
        TransformError, match=r"forgets_the_state must return \(updates, state\), got a"
    ):
        check_transform(transform, params=params)


def test_a_dim_that_a_leaf_does_not_have() -> None:
    """Among the leaves that a transform is tried on is one without dims."""
    transform = with_statistics(
        lambda params: (),
        lambda u, s, params, across: (across.spread(across.sum_dim(u, -1), -1), s),
    )
    with pytest.raises(
        ValueError, match=r"distinct dims of a leaf of shape \(\), got -1. Remedy: a function"
    ):
        check_transform(transform)
