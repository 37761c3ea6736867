"""Single leaves that a loss uses or returns, and trees of them that an evaluation chooses."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from optree import tree_map
from torch import Tensor

import functorch_zero as fz
from functorch_zero import checkpoint, optim
from functorch_zero.errors import (
    GroupError,
    StructureError,
)
from functorch_zero.groups import run_ranks
from functorch_zero.testing import assert_equal_values, assert_sharded_equals_unsharded
from tests.local import part
from tests.sharded.program.test_leaves import (
    FIRST,
    LEVELS,
    REFUSED,
    RIGHT,
    X,
    changed_at,
    check_refused,
    check_right,
    in_threads,
    loss,
    on_ranks,
    step_with,
)
from tests.tiers import crossed, thinned


def scaled(params: Any, x: Tensor, leaf: Tensor, **more: Tensor) -> Tensor:
    return loss(params, x) * leaf.square().sum()


def in_batch(params: Any, x: Tensor, *, batch: Tensor) -> Tensor:
    return loss(params, x) * batch.square().sum()


def with_buffers(params: Any, x: Tensor, *, buffers: Any) -> Tensor:
    return loss(params, x) * buffers["leaf"].square().sum()


def size_of(leaf: Tensor) -> Tensor:
    return leaf.square().sum()


# By the way to the leaf, the gradient of a loss that uses it
Take = Callable[[Any, Tensor, Tensor], Any]
USING_A_LEAF: dict[str, Take] = {
    "argument": lambda p, x, leaf: fz.value_and_grad(scaled)(p, x, leaf),
    "batch": lambda p, x, leaf: fz.value_and_grad(in_batch)(p, x, batch=leaf),
    "buffer": lambda p, x, leaf: fz.value_and_grad(with_buffers)(p, x, buffers={"leaf": leaf}),
    "closure": lambda p, x, leaf: fz.value_and_grad(lambda p, x: scaled(p, x, leaf))(p, x),
    "hvp": lambda p, x, leaf: fz.hvp(lambda p, x: scaled(p, x, leaf))(p, fz.zero_updates(p), x),
    "twice": lambda p, x, leaf: twice_of(p, x, leaf),
    "own": lambda p, x, leaf: parameter_of(p, x, leaf),
    "partial": lambda p, x, leaf: fz.value_and_grad(partial(scaled, leaf=leaf))(p, x),
    "compiled": lambda p, x, leaf: fz.value_and_grad(
        lambda p, x: loss(p, x) * torch.compile(size_of, backend="eager")(leaf)
    )(p, x),
    "threads": lambda p, x, leaf: fz.value_and_grad(
        lambda p, x: loss(p, x) * in_threads(size_of, [leaf])[0]
    )(p, x),
}


def twice_of(params: Any, x: Tensor, leaf: Tensor) -> Any:
    twice = 2 * leaf
    return fz.value_and_grad(lambda p, x: scaled(p, x, twice))(params, x)


def parameter_of(params: Any, x: Tensor, leaf: Tensor) -> Any:
    own = torch.nn.Parameter(leaf)  # made without an operator
    return fz.value_and_grad(lambda p, x: scaled(p, x, own))(params, x)


def step_using(take: Take, leaf_of: Callable[[Any, Any], Tensor]) -> Any:
    def program(value: Any, x: Tensor, now: bool) -> Any:
        params, other = value
        found = grads = fz.value_and_grad(loss)(params, x)[1]
        if now:
            found = take(params, x, leaf_of(other, grads))[1]
        return (fz.apply_updates(params, tree_map(lambda g: -0.1 * g, found)), other), {}

    return fz.program_step(program, init=lambda params, other: (params, other))


OTHER = {"v": torch.linspace(1, 2, 80, dtype=torch.float64, requires_grad=True)}


@pytest.mark.parametrize(("way", "level"), crossed(USING_A_LEAF, [0, 1, 2, 3], quick=1))
def test_a_loss_that_uses_a_single_leaf(way: str, level: int) -> None:
    """A leaf of the gradients, or one of params: right where it is whole."""
    leaves: list[tuple[Callable[[Any, Any], Tensor], bool]] = [
        (lambda other, grads: grads["a"], level == 0),
        (lambda other, grads: other["v"], level < 3),
    ]
    for leaf_of, is_whole in leaves:
        step = step_using(USING_A_LEAF[way], leaf_of)
        if is_whole:
            check_right(step, level, first=(FIRST, OTHER))
        else:
            story = REFUSED.format("sum|pow|view|slice")
            check_refused(step, level, StructureError, story, first=(FIRST, OTHER))


RETURNED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "loss": lambda value, leaf: leaf,
    "its multiple": lambda value, leaf: leaf * 2,
    "metric": lambda value, leaf: (value, fz.Aux(metrics={"leaf": leaf})),
    "weight": lambda value, leaf: (value, fz.Aux(weight=leaf.detach())),
}


@pytest.mark.parametrize("name", RETURNED)
def test_a_loss_that_returns_a_single_leaf(name: str) -> None:
    """One without dims, of which other ranks may hold nothing."""

    def take(params: Any, x: Tensor, leaf: Tensor) -> Any:
        own = leaf.detach().requires_grad_()

        def returning(p: Any, x: Tensor) -> Any:
            return RETURNED[name](loss(p, x), own)

        (_, *_), grads = fz.value_and_grad(returning)(params, x)
        return None, grads

    step = step_using(take, lambda other, grads: grads["scale"])
    for ranks in on_ranks(step, 1, first=(FIRST, OTHER)):
        for found in ranks:
            assert isinstance(found, StructureError), found
            assert "as if they were whole" in str(found), found


@pytest.mark.parametrize("level", thinned([0, 1, 2, 3]))
def test_a_loss_may_use_what_is_whole(level: int) -> None:
    """Whole trees, and tensors that are the same on all ranks."""

    def program(value: Any, x: Tensor) -> Any:
        params, other, heat = value
        whole, twice = fz.unshard(other), 2 * heat
        grads = fz.value_and_grad(lambda p, x: scaled(p, x, whole["v"]) + twice)(params, x)[1]
        grads = fz.value_and_grad(scaled)(params, x, fz.unshard(grads)["a"])[1]
        return (fz.apply_updates(params, tree_map(lambda g: -0.01 * g, grads)), other, heat), {}

    step = fz.program_step(program, init=lambda params, other, heat: (params, other, heat))
    first = FIRST, OTHER, torch.ones(()).double()
    assert_sharded_equals_unsharded(step, *first, [X, X], levels=[level], ranks=[2], unused=["1.v"])


# ---- Leaves that an evaluation chooses ----


def evaluation_on(choose: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
    """A training step with a mean of the params, and an evaluation of the leaves chosen."""
    optimizer = optim.params_ema(optim.adamw(0.1), 0.9)
    step = fz.train_step(lambda p, b, x: loss(p, x), optimizer)
    return step, fz.eval_step(lambda p, b, x: {"loss": loss(p, x)}, params=choose)


def evaluated(step: Any, evaluate: Any, batches: list[Tensor]) -> list[Tensor]:
    state, found = step.init(FIRST), []
    for x in batches:
        state, _ = step(state, x)
        found.append(evaluate(state, x)["loss"])
    return found


REFUSED_CHOICES = {
    "norm": lambda s, p: tree_map(lambda a: a / torch.linalg.norm(a), s.ema),
    "sum of params": lambda s, p: tree_map(lambda a: a * a.sum(), p),
    "largest": lambda s, p: tree_map(lambda a: a / a.abs().max(), s.ema),
    "dot": lambda s, p: tree_map(lambda a: a * fz.dot(p, p), s.ema),
    "random": lambda s, p: tree_map(lambda a: a + torch.rand_like(a), s.ema),
    "on the host": lambda s, p: tree_map(lambda a: a * float(a.numpy().max()), s.ema),
}


PASSING_CHOICES = {
    "size": lambda s, p: tree_map(lambda a: a / a.numel(), s.ema),
    "mean": optim.ema_params,
    "mixed": lambda s, p: tree_map(lambda a, b: 0.5 * a + 0.5 * b, s.ema, p),
    "by a counter": lambda s, p: tree_map(lambda a: a / (1 + s.count), s.ema),
    "clipped": lambda s, p: tree_map(lambda a, b: torch.where(a > b, a.clamp(-1, 1), b), s.ema, p),
}


CHOICES = REFUSED_CHOICES | PASSING_CHOICES


@pytest.mark.parametrize(
    ("name", "level"),
    [*crossed(REFUSED_CHOICES, LEVELS, quick=2), *crossed(PASSING_CHOICES, LEVELS, quick=2)],
)
def test_choices(name: str, level: int) -> None:
    """Of parts others than elementwise ones are refused, however often it was called before."""
    step, evaluate = evaluation_on(CHOICES[name])
    expected = evaluated(step, evaluate, [X] * 4)

    def run(group: Any) -> Any:
        steps = [fz.shard(s, level=level, group=group) for s in (step, evaluate)]
        if level == 0 or name in PASSING_CHOICES:
            return evaluated(*steps, [part(X, group)] * 4)
        for _ in range(2):
            with pytest.raises(StructureError, match=r"used as if they were whole"):
                evaluated(*steps, [part(X, group)])
        return expected

    for found in run_ranks(run, 2):
        assert_equal_values(expected, found)


@pytest.mark.parametrize("level", thinned([3, 0, 1]))
def test_evaluations_of_what_differs_between_ranks_are_refused(level: int) -> None:
    """A choice of params, and a program's value, by a rank's own number."""

    def run(group: Any) -> None:
        own, x = 1 + group.rank, part(X, group)
        training, evaluate = evaluation_on(lambda s, p: tree_map(lambda a: a * own, s.ema))
        steps = [fz.shard(s, level=level, group=group) for s in (training, evaluate)]
        with pytest.raises(GroupError, match=r"trees made as #"):
            evaluated(*steps, [x])

        step = fz.shard(step_with(RIGHT["elementwise"]), level=level, group=group)
        evaluation = fz.eval_step(lambda params, x: {"loss": loss(params, x)})
        evaluation = fz.shard(evaluation, level=level, group=group)
        state = changed_at(5, step, (FIRST,), x)
        before = evaluation(state, x)
        changed = state.replace(value=tree_map(lambda p: p.detach() * own, state.value))
        with pytest.raises(GroupError, match=r"trees made as #"):
            evaluation(changed, x)
        if group.rank == 0:
            tree_map(torch.clone, state.value)
        assert_equal_values(before, evaluation(state, x))

    run_ranks(run, 2)


def test_choices_from_a_loaded_state(tmp_path: Any) -> None:
    step, evaluate = evaluation_on(REFUSED_CHOICES["norm"])

    def run(group: Any) -> None:
        sharded, evaluation = (fz.shard(s, level=1, group=group) for s in (step, evaluate))
        checkpoint.save(tmp_path, sharded, sharded.init(FIRST))
        loaded = checkpoint.load(tmp_path, sharded, like=sharded.init(FIRST)).state
        wholes = sharded.shard(sharded.unshard(loaded))
        copies = copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))
        for state in (loaded, wholes, sharded.refit(loaded, FIRST), *copies):
            with pytest.raises(StructureError, match="used as if they were whole"):
                evaluation(state, part(X, group))

    run_ranks(run, 2)
