"""Batches of unequal sizes that count the same: one warning, with the sizes and the remedy."""

from __future__ import annotations

import linecache
import warnings
from typing import Any

import pytest
import torch
from optree import tree_map
from torch import nn

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import LostBuffersWarning, UnequalBatchesWarning
from functorch_zero.groups import HybridGroup, counted, run_ranks
from functorch_zero.sharded.words import tell
from functorch_zero.testing import assert_sharded_equals_unsharded
from tests.tiers import crossed, thinned, tiers

F64 = torch.float64
PARAMS = {"w": torch.ones(3, dtype=F64, requires_grad=True)}


def step_with(weighted: bool = False, accumulate: int = 1) -> Any:
    def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
        loss = ((fz.unshard(params)["w"] * batch["x"]).sum(1) - batch["y"]).square().mean()
        return (loss, fz.Aux(weight=len(batch["x"]))) if weighted else loss

    return fz.train_step(loss_fn, optim.sgd(0.1), accumulate=accumulate)


def batch_of(rows: int) -> dict[str, Any]:
    x = torch.arange(3.0 * rows, dtype=F64).view(rows, 3)
    return {"x": x, "y": x.sum(1).sin(), "name": "rows", "scale": torch.tensor(2.0)}


def caught(run: Any) -> list[str]:
    """The messages of the warnings meanwhile."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run()
    assert all(warning.category is UnequalBatchesWarning for warning in found)
    return [str(warning.message) for warning in found]


def test_micro_batches() -> None:
    def three_steps(step: Any, rows: int) -> None:
        state = step.init(PARAMS)
        for k in range(3):
            state, _ = step(state, batch_of(rows - k))

    (message,) = caught(lambda: three_steps(step_with(accumulate=3), 11))
    assert "micro-batches of unequal sizes" in message and "4, 4, 3 rows" in message
    assert "Remedy: return fz.Aux(weight=" in message
    assert not caught(lambda: three_steps(step_with(weighted=True, accumulate=3), 11))
    assert not caught(lambda: three_steps(step_with(), 11))
    step = step_with(accumulate=3)
    assert not caught(lambda: step(step.init(PARAMS), batch_of(12)))


@pytest.mark.parametrize(
    ("level", "rows", "accumulate"),
    crossed([0, 1, 2, 3], [(4, 3), (4, 4), (3, 3)], [1, 2], n=3),
)
def test_ranks(level: int, rows: tuple[int, int], accumulate: int) -> None:
    """Once in a run, by one of the ranks."""

    def train(step: Any) -> None:
        def run(group: Any) -> None:
            sharded = fz.shard(step, level=level, group=group)
            state = sharded.init(PARAMS)
            for _ in range(2):
                state, _ = sharded(state, batch_of(rows[group.rank]))

        run_ranks(run, 2)

    found = caught(lambda: train(step_with(accumulate=accumulate)))
    assert not caught(lambda: train(step_with(weighted=True, accumulate=accumulate)))
    if rows == (4, 4) or (rows == (3, 3) and accumulate == 1):
        assert not found
    elif rows == (4, 3):
        (message,) = found
        assert "ranks' batches of unequal sizes" in message
        assert "4 rows on rank 0, from 3 to 4 on all ranks" in message and "Remedy" in message
    else:
        (message,) = found
        assert "micro-batches" in message and "2, 1 rows" in message


def test_evaluations_and_programs() -> None:
    check = fz.eval_step(lambda p, b, batch: {"mean": batch["x"].mean()})
    weighted = fz.eval_step(
        lambda p, b, batch: fz.Aux(metrics={"mean": batch["x"].mean()}, weight=len(batch["x"]))
    )

    def evaluate(step: Any) -> None:
        def run(group: Any) -> None:
            sharded = fz.shard(step, level=1, group=group)
            state = fz.shard(step_with(), level=1, group=group).init(PARAMS)
            for _ in range(2):
                sharded(state, batch_of(4 + group.rank))

        run_ranks(run, 2)

    def differentiate() -> None:
        def run(group: Any) -> None:
            params = fz.shard_tree(PARAMS, level=3, group=group)
            loss = step_with().loss_fn
            for _ in range(2):
                fz.value_and_grad(lambda p, x: loss(p, {}, x))(params, batch_of(4 + group.rank))

        run_ranks(run, 2)

    for run in (lambda: evaluate(check), differentiate):
        (message,) = caught(run)
        assert "4 rows on rank 0, from 4 to 5 on all ranks" in message
    assert not caught(lambda: evaluate(weighted))


def test_ranks_of_the_same_data() -> None:
    """Three rows on two ranks, and four on two others."""

    def train() -> None:
        def run(group: Any) -> None:
            mesh = HybridGroup(group, shard_size=2, same_data="shard")
            sharded = fz.shard(step_with(), level=3, group=mesh)
            sharded(sharded.init(PARAMS), batch_of(3 + group.rank // 2))

        run_ranks(run, 4)

    assert "3 rows on rank 0, from 3 to 4 on all ranks" in caught(train)[0]


def test_sizes() -> None:
    """Large ones, too: nobody may be warned where they are equal."""
    size = 10**9 + 7
    for told in run_ranks(lambda group: tell([], [], group, size), 3):
        assert told.sizes is None
    for told in run_ranks(lambda group: tell([], [], group, size + group.rank), 3):
        assert told.sizes == (size, size + 2)


@pytest.mark.parametrize("level", thinned([0, 1, 2, 3]))
def test_no_call_more(level: int) -> None:
    def calls(rows: tuple[int, int]) -> int:
        def run(group: Any) -> int:
            watched = counted(group)
            sharded = fz.shard(step_with(), level=level, group=watched)
            state = sharded.init(PARAMS)
            before = watched.num_calls()
            sharded(state, batch_of(rows[group.rank]))
            return watched.num_calls() - before

        return run_ranks(run, 2)[0]

    with pytest.warns(UnequalBatchesWarning):
        unequal = calls((4, 3))
    assert unequal == calls((4, 4))


@pytest.mark.parametrize("kind", ["unsharded", "sharded", "evaluation", "program"])
def test_the_warning_is_at_the_users_line(kind: str) -> None:
    """Not somewhere inside of the package, nor in a decorator of torch's."""
    check = fz.eval_step(lambda p, b, batch: {"mean": batch["x"].mean()})

    def run(group: Any) -> None:
        batch = batch_of(3 + group.rank)
        if kind == "unsharded":
            step = step_with(accumulate=2)
            step(step.init(PARAMS), batch)
            return
        step = fz.shard(step_with(), level=1, group=group)
        state = step.init(PARAMS)
        if kind == "sharded":
            step(state, batch)
        elif kind == "evaluation":
            fz.shard(check, level=1, group=group)(state, batch)
        else:
            params, loss = fz.shard_tree(PARAMS, level=1, group=group), step_with().loss_fn
            fz.value_and_grad(lambda p, x: loss(p, {}, x))(params, batch)

    with pytest.warns(UnequalBatchesWarning) as found:
        run_ranks(run, 1 if kind == "unsharded" else 2)
    (warning,) = found
    assert warning.filename == __file__
    line = linecache.getline(__file__, warning.lineno)
    assert "batch)" in line and not line.strip().startswith("def")


def test_the_harness_says_nothing_where_parts_are_meant_to_count_the_same() -> None:
    def prove() -> None:
        assert_sharded_equals_unsharded(
            step_with(accumulate=2), PARAMS, {}, [batch_of(11)], ranks=(3,), levels=(1,),
            per_rank=True,
        )  # fmt: skip

    assert not caught(prove)


# New buffers that a loss doesn't return

NORM = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
APPLY, WEIGHTS, BUFFERS = fz.functionalize(NORM)
ROWS = torch.randn(12, 3, dtype=F64, generator=torch.Generator().manual_seed(0))


def drops(params: Any, buffers: Any, batch: Any) -> Any:
    return APPLY(params, buffers, batch)[0].square().mean()


def drops_beside_metrics(params: Any, buffers: Any, batch: Any) -> Any:
    return drops(params, buffers, batch), fz.Aux(metrics={"mean": batch.mean()})


def drops_the_second(params: Any, buffers: Any, batch: Any) -> Any:
    _, once = APPLY(params, buffers, batch)
    return APPLY(params, once, batch)[0].square().mean()


def returns(params: Any, buffers: Any, batch: Any) -> Any:
    out, buffers = APPLY(params, buffers, batch)
    return out.square().mean(), fz.Aux(buffers=buffers)


def writes(params: Any, buffers: Any, batch: Any) -> Any:
    out, new = APPLY(params, buffers, batch)
    for name, buffer in buffers.items():
        buffer.copy_(new[name])
    return out.square().mean()


def keeps(params: Any, buffers: Any, batch: Any) -> Any:
    return drops(params, buffers, batch), fz.Aux(buffers=buffers)


def evaluates(params: Any, buffers: Any, batch: Any) -> Any:
    return APPLY.eval()(params, buffers, batch)[0].square().mean()


LOST = {"drops": drops, "beside metrics": drops_beside_metrics, "two calls": drops_the_second}
KEPT = {"returns": returns, "writes": writes, "keeps": keeps, "evaluates": evaluates}


def lost_in(run: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run()
    assert all(warning.category is LostBuffersWarning for warning in found)
    return [str(warning.message) for warning in found]


def train_whole(loss: Any, accumulate: int) -> None:
    step = fz.train_step(loss, optim.sgd(0.1), accumulate=accumulate)
    state = step.init(WEIGHTS, BUFFERS)
    for _ in range(2):
        state, _ = step(state, ROWS)


def train_on_ranks(loss: Any, accumulate: int) -> None:
    step = fz.train_step(loss, optim.sgd(0.1), accumulate=accumulate)

    def run(group: Any) -> None:
        sharded = fz.shard(step, level=3, group=group)
        state = sharded.init(WEIGHTS, BUFFERS)
        for _ in range(2):
            state, _ = sharded(state, ROWS.chunk(2)[group.rank])

    run_ranks(run, 2)


def differentiate_twice(loss: Any, accumulate: int) -> None:
    for _ in range(2):
        fz.value_and_grad(loss, accumulate=accumulate)(WEIGHTS, buffers=BUFFERS, batch=ROWS)


@pytest.mark.parametrize(
    ("run", "accumulate"),
    # A loss of `value_and_grad` is told of once, whoever calls it
    tiers(
        [(train_whole, 1), (differentiate_twice, 2)],
        [(train_whole, 2), (train_on_ranks, 1), (train_on_ranks, 2)],
        rows=True,
    ),
)
def test_lost_buffers_are_told_once(run: Any, accumulate: int) -> None:
    for loss in LOST.values():
        (message,) = lost_in(lambda loss=loss: run(loss, accumulate))
        assert "the loss returns none" in message and "path 1.running_mean" in message
        assert "Remedy: output, buffers = apply" in message
    for loss in KEPT.values():
        assert not lost_in(lambda loss=loss: run(loss, accumulate))


def walk_of(*factors: float) -> Any:
    """A program with a gradient for each factor. All losses have the same code."""

    def loss_of(factor: float) -> Any:
        return lambda params, *, batch: (batch["x"] @ fz.unshard(params)["w"] * factor).mean()

    losses = [loss_of(factor) for factor in factors]

    def program(params: Any, batch: Any) -> Any:
        for loss in losses:
            _, grads = fz.value_and_grad(loss, accumulate=2)(params, batch=batch)
            params = fz.apply_updates(params, tree_map(lambda g: -0.1 * g, grads))
        return params, {}

    return fz.program_step(program, init=lambda params: params)


@pytest.mark.parametrize("level", [None, 1])
def test_programs_have_reminders_of_their_own(level: int | None) -> None:
    """One for all losses of a program, also where another program's loss has the same code."""

    def train(step: Any) -> None:
        def run(group: Any) -> None:
            mine = step if level is None else fz.shard(step, level=level, group=group)
            state = mine.init(PARAMS)
            for _ in range(2):
                state, _ = mine(state, batch_of(3))

        run_ranks(run, 1)

    for step in (walk_of(1.0, 2.0), walk_of(1.0)):
        (message,) = caught(lambda step=step: train(step))
        assert "2, 1 rows" in message
        assert len(caught(lambda step=step: train(step))) == (level is not None)
