"""Sharded = unsharded on real processes over gloo: a smaller set, and what threads can't show."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jvp, vmap

from functorch_zero import optim
from functorch_zero.groups import ProcessGroup, launch
from functorch_zero.step.train import train_step
from tests.compare import (
    Run,
    assert_equal_updates,
    assert_same_on_all_ranks,
    train,
    train_by_rank,
    train_sharded,
)
from tests.models import MLP, ZOO, Shared, even, rows, uneven
from tests.runtime.test_skipped_units import (
    half_chosen,
    skipping,
    skipping_net,
    some_rows_reach,
    with_negative_half,
)
from tests.runtime.test_unit import batches_of, build
from tests.tiers import THOROUGH, tiers

LEVELS = (0, 1, 2, 3)
ROWS = 12


def level_of(model: str, optimizer: str, ranks: int, turn: int) -> int:
    """The level of one combination.

    In each of four turns, two and three ranks together run every level with every model, and with
    every optimizer; the four turns together are all there is.
    """
    number = [*ZOO].index(model) + [*OPTIMIZERS].index(optimizer) + ranks + turn
    return LEVELS[number % len(LEVELS)]


OPTIMIZERS: dict[str, Callable[[], optim.Transform]] = {
    "adamw": lambda: optim.adamw(0.01),
    "clip+lamb": lambda: optim.chain(
        optim.clip_by_global_norm(0.1), optim.lamb(0.01, weight_decay=0.01)
    ),
    "muon": lambda: optim.muon(0.02),
}


def on_processes(fn: Callable[[Any], Any], ranks: int) -> list[Any]:
    return launch(lambda: fn(ProcessGroup()), ranks, start_method="fork", timeout=100)


MODELS = ("mlp", "gpt", "convnet", "frozen", "scalars")


COMBINATIONS = [*itertools.product(MODELS, OPTIMIZERS)]
EVERY, EVEN, ODD = slice(None), slice(0, None, 2), slice(1, None, 2)


def everything(ranks: int, turn: int, part: slice) -> Any:
    """One rank's work: optimizers with models, each at one level; results by their names."""

    def run(group: Any) -> dict[Any, Run]:
        found = {}
        for name, optimizer in COMBINATIONS[part]:
            level = level_of(name, optimizer, ranks, turn)
            loss_fn, params, buffers = ZOO[name].build(weighted=True)
            found[name, optimizer, level] = train_sharded(
                group,
                train_step(loss_fn, OPTIMIZERS[optimizer]()),
                params,
                buffers,
                ZOO[name].batches(2, ROWS),
                uneven(ROWS, ranks),
                level=level,
            )
        return found

    return run


@pytest.mark.parametrize(
    ("ranks", "turn", "part"),
    tiers(
        [(2, 0, slice(1, None, 8))],
        [(2, 0, EVEN), (2, 0, ODD), (3, 0, EVEN), (3, 0, ODD), (2, 1, EVERY)],
        itertools.product((2, 3), (1, 2, 3), (EVERY,)),
        rows=True,
    ),
)
def test_sharded_is_unsharded(ranks: int, turn: int, part: slice) -> None:
    runs = on_processes(everything(ranks, turn, part), ranks)
    for key in runs[0]:
        name, optimizer, _ = key
        assert_same_on_all_ranks([run[key] for run in runs])
        assert_equal_updates(unsharded(name, optimizer, ranks), runs[0][key])


@cache
def unsharded(name: str, optimizer: str, ranks: int) -> Run:
    """The same for every level."""
    loss_fn, params, buffers = ZOO[name].build(weighted=True)
    step, batches = train_step(loss_fn, OPTIMIZERS[optimizer]()), ZOO[name].batches(2, ROWS)
    if ZOO[name].by_rank:
        return train_by_rank(step, params, buffers, batches, uneven(ROWS, ranks))
    return train(step, params, buffers, batches)


@THOROUGH
@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)  # torch's own use of it
@pytest.mark.parametrize("levels", [(0, 3), (1, 2)], ids=str)
def test_derivatives_inside_the_loss(levels: tuple[int, int]) -> None:
    """Forward mode too: torch keeps its level for the whole process, so threads can't show it at
    level 3."""

    def make_loss(apply: Any) -> Any:
        def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
            f, x = (lambda v: apply(params, {}, v)[0].sum()), batch["x"]
            slopes = vmap(lambda v: jvp(f, (v,), (torch.ones_like(v),))[1])(x)
            curvature = vmap(hessian(f))(x)
            fit = (apply(params, buffers, x)[0] - batch["y"]).square().mean()
            return (
                fit
                + slopes.square().mean()
                + curvature.square().mean()
                + vmap(grad(f))(x).square().mean()
            )

        return loss_fn

    def step() -> Any:
        apply, params, buffers = build(MLP)
        return train_step(make_loss(apply), optim.sgd(0.01, momentum=0.9)), params, buffers

    batches = batches_of(rows(7, 3))
    expected = train(*step(), batches)
    runs = on_processes(
        lambda group: {
            k: train_sharded(group, *step(), batches, even(12, 2), level=k) for k in levels
        },
        2,
    )
    for level in levels:
        assert_equal_updates(expected, runs[0][level])


@THOROUGH
def test_a_rank_whose_loss_does_not_reach_a_unit() -> None:
    """It takes part in the others' collectives all the same, gathers of backward included,
    recomputed units' too."""
    batches, chosen = batches_of(with_negative_half), batches_of(half_chosen)

    def step() -> Any:
        apply, params, buffers = build(Shared)
        return train_step(some_rows_reach(apply), optim.sgd(0.05, momentum=0.9)), params, buffers

    def again() -> Any:
        apply, params, buffers = build(lambda: skipping_net("a b?* c*"))
        return train_step(skipping(apply), optim.sgd(0.05, momentum=0.9)), params, buffers

    expected = train(*step(), batches), train(*again(), chosen)

    def run(group: Any) -> Any:
        own = {k: train_sharded(group, *step(), batches, even(12, 2), level=k) for k in LEVELS}
        return own, train_sharded(group, *again(), chosen, even(12, 2), level=3)

    own, recomputed = on_processes(run, 2)[0]
    for level in LEVELS:
        assert_equal_updates(expected[0], own[level])
    assert_equal_updates(expected[1], recomputed)


@THOROUGH
def test_leaves_without_elements() -> None:
    """A bucket of nothing is a bucket: gloo is not asked to move it."""
    params = {
        "w": torch.ones(7, 3, dtype=torch.float64),
        "none": torch.zeros(0, 3),
        "a": {"scale": torch.tensor(2.0)},
    }

    def loss_fn(p: Any, b: Any, batch: Any) -> Tensor:
        return ((batch["x"] @ p["w"]) * p["a"]["scale"] - batch["y"]).square().mean() + p[
            "none"
        ].sum()

    step = train_step(loss_fn, optim.adamw(0.1), trainable=lambda path, leaf: True)
    batches = batches_of(rows(7, 3))
    expected = train(step, params, None, batches)
    runs = on_processes(
        lambda group: {
            k: train_sharded(group, step, params, None, batches, even(12, 3), level=k)
            for k in LEVELS
        },
        3,
    )
    for level in LEVELS:
        assert_equal_updates(expected, runs[0][level], unused=("none",), tolerance=1e-5)
