"""Sharded = unsharded: every level, 1 to 5 ranks, each kind of optimizer, every model of the zoo.

Of 1,400 cases, 35 have every pair of choices. The quick tier runs the 5 of an MLP. The
thorough tier runs the other 30, and 140 of all models; the full tier runs all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import optree
import pytest
import torch

from functorch_zero import optim
from functorch_zero.groups import run_ranks
from functorch_zero.step.train import train_step
from tests.compare import (
    Run,
    assert_equal_updates,
    assert_same_on_all_ranks,
    train,
    train_by_rank,
    train_sharded,
)
from tests.models import ZOO, even, uneven
from tests.tiers import FULL, tiers

LEVELS = (0, 1, 2, 3)
RANKS = (1, 2, 3, 4, 5)
ROWS = 60  # of a batch: divisible by every number of ranks
STEPS = 2

OPTIMIZERS = {
    "sgd": lambda: optim.sgd(0.1, momentum=0.9),
    "adamw": lambda: optim.adamw(0.01),
    "clip+lamb": lambda: optim.chain(
        optim.clip_by_global_norm(0.1), optim.lamb(0.01, weight_decay=0.01)
    ),
    "adafactor": lambda: optim.adafactor(0.02),
    "muon": lambda: optim.muon(0.02),
}


@cache
def oracle(name: str, optimizer: str, weighted: bool, sizes: tuple[int, ...] | None) -> Run:
    """The unsharded run: on whole batches, or on each rank's part by itself."""
    case = ZOO[name]
    loss_fn, params, buffers = case.build(weighted=weighted)
    step = train_step(loss_fn, OPTIMIZERS[optimizer]())
    batches = case.batches(STEPS, ROWS)
    if sizes is None:
        return train(step, params, buffers, batches)
    return train_by_rank(step, params, buffers, batches, list(sizes))


def check(
    name: str, optimizer: str, level: int, ranks: int, weighted: bool, **options: Any
) -> None:
    case = ZOO[name]
    sizes = uneven(ROWS, ranks) if weighted else even(ROWS, ranks)
    expected = oracle(name, optimizer, weighted, tuple(sizes) if case.by_rank else None)

    def run(group: Any) -> Run:
        loss_fn, params, buffers = case.build(weighted=weighted)
        step = train_step(loss_fn, OPTIMIZERS[optimizer]())
        return train_sharded(
            group, step, params, buffers, case.batches(STEPS, ROWS), sizes, level=level, **options
        )

    runs = run_ranks(run, ranks)
    assert_same_on_all_ranks(runs)
    assert_equal_updates(expected, runs[0], unused=case.unused)
    for old, new in itertools.pairwise(runs[0].states):
        assert not any(torch.equal(old.buffers[path], new.buffers[path]) for path in new.buffers), (
            "BatchNorm's move"
        )


Case = tuple[str, str, int, int, bool]


def product() -> list[Case]:
    """All choices: model, optimizer, level, ranks, weighted."""
    return [*itertools.product(ZOO, OPTIMIZERS, LEVELS, RANKS, (False, True))]


def few() -> Iterator[Case]:
    """The fewest with every pair of (model, optimizer), (model, level), (level, ranks), and so
    on."""
    for (m, name), (o, optimizer) in itertools.product(enumerate(ZOO), enumerate(OPTIMIZERS)):
        level, ranks = LEVELS[(3 * o + m // 2) % 4], RANKS[(m + o) % 5]
        yield name, optimizer, level, ranks, bool((m // 2 + o // 2) % 2)


def more() -> Iterator[Case]:
    """Every pair several times."""
    models, optimizers = list(ZOO), list(OPTIMIZERS)
    for case in product():
        m, o, level, r = (
            models.index(case[0]),
            optimizers.index(case[1]),
            case[2],
            RANKS.index(case[3]),
        )
        if (m + o + level + r) % 5 == 0 and (m + level + o // 2 + r // 2) % 2 == case[4]:
            yield case


@pytest.mark.parametrize("part", tiers([few], [more]), ids=lambda part: part.__name__)
@pytest.mark.parametrize("name", tiers(["mlp"], [name for name in ZOO if name != "mlp"]))
def test_sharded_is_unsharded(name: str, part: Callable[[], Iterator[Case]]) -> None:
    for case in part():
        if case[0] == name:
            check(*case)


@FULL
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ZOO)
def test_sharded_is_unsharded_in_every_case(name: str, optimizer: str, level: int) -> None:
    for ranks, weighted in itertools.product(RANKS, (False, True)):
        check(name, optimizer, level, ranks, weighted)


@pytest.mark.parametrize("part", [few, more])
def test_a_part_covers_every_pair(part: Callable[[], Iterator[Case]]) -> None:
    chosen = list(part())
    choices = (list(ZOO), list(OPTIMIZERS), list(LEVELS), list(RANKS), [False, True])
    for (i, a), (j, b) in itertools.combinations(enumerate(choices), 2):
        missing = set(itertools.product(a, b)) - {(case[i], case[j]) for case in chosen}
        assert not missing, missing


def spoiled(run: Run, change: Any) -> Run:
    """The run with its last state changed."""
    return run._replace(states=[*run.states[:-1], change(run.states[-1])])


CHANGES = {
    "a leaf a little off": lambda s: s.replace(
        params={**s.params, "norm.bias": s.params["norm.bias"] * (1 + 1e-9)}
    ),
    "a moment a little off": lambda s: s.replace(
        opt_state=optree.tree_map(lambda x: x * (1 + 1e-9), s.opt_state)
    ),
    "the step": lambda s: s.replace(step=s.step + 1),
    "a dtype": lambda s: s.replace(params=optree.tree_map(lambda p: p.detach().float(), s.params)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_the_comparison_can_fail(what: str) -> None:
    expected = oracle("mlp", "adamw", False, None)
    assert_equal_updates(expected, expected)
    with pytest.raises(AssertionError):
        assert_equal_updates(expected, spoiled(expected, CHANGES[what]))


def test_an_optimizer_that_does_nothing_is_noticed() -> None:
    loss_fn, params, buffers = ZOO["mlp"].build()
    idle = train(
        train_step(loss_fn, optim.sgd(0.0)), params, buffers, ZOO["mlp"].batches(STEPS, ROWS)
    )
    with pytest.raises(AssertionError, match="is zero"):
        assert_equal_updates(idle, idle)
