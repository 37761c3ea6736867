"""Norms, learning rate, clipping and skipped steps as metrics; evaluation on a running mean.
Sharded = unsharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import optree
import pytest
import torch
from optree import tree_map
from torch import Tensor

from functorch_zero import optim
from functorch_zero.errors import MismatchError, StructureError
from functorch_zero.groups import CountingGroup, ProcessGroup, launch, run_ranks
from functorch_zero.sharded.api import shard
from functorch_zero.step.evaluate import eval_step
from functorch_zero.step.loss import Aux
from functorch_zero.step.train import train_step
from functorch_zero.testing import assert_sharded_equals_unsharded, models
from functorch_zero.testing.runs import split
from tests.local import local_leaves
from tests.tiers import THOROUGH, crossed, thinned, tiers

LEVELS = (0, 1, 2, 3)
MIXED = {"": 3, "layers.0": 0, "layers.1": 1}
NORMS = ["grad_norm", "update_norm", "param_norm"]
BY_CASE = {
    "clip + adamw": (
        lambda: optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(rate)),
        ["clip_factor"],
    ),
    "adamw": (lambda: optim.adamw(rate), ["learning_rate"]),
    "muon": (lambda: optim.muon(0.02), NORMS[1:]),
    "lamb": (
        lambda: optim.chain(optim.clip_by_global_norm(10.0), optim.lamb(0.01)),
        ["clip_norm", *NORMS],
    ),
    "if finite": (lambda: optim.apply_if_finite(optim.sgd(rate), 3), ["skipped", "learning_rate"]),
    "masked": (lambda: optim.masked(optim.sgd(0.1), lambda path, leaf: leaf.ndim > 1), NORMS),
    "averaged": (lambda: optim.params_ema(optim.adamw(rate), 0.9), NORMS),
}


def rate(count: Tensor) -> Tensor:
    return 0.1 * 0.5 ** count.double()


def step_of(
    case: models.Case, optimizer: Any, metrics: Sequence[str], accumulate: int = 1
) -> tuple[Any, Any, Any]:
    step, params, buffers = case.step(optimizer, weighted=True)
    return (
        train_step(step.loss_fn, optimizer, metrics=metrics, accumulate=accumulate),
        params,
        buffers,
    )


@pytest.mark.parametrize("name", thinned(BY_CASE))
def test_sharded_is_unsharded(name: str) -> None:
    make, metrics = BY_CASE[name]
    case, accumulate = (
        (models.frozen_mlp(), 2) if name in ("lamb", "averaged") else (models.mlp(), 1)
    )
    step, params, buffers = step_of(case, make(), metrics, accumulate)
    assert_sharded_equals_unsharded(
        step, params, buffers, case.batches(2, 13), levels=(*LEVELS, MIXED), ranks=(3,)
    )


@THOROUGH
def test_on_processes() -> None:
    case = models.mlp()
    make = lambda: step_of(
        case, optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(rate)), NORMS
    )

    def run(group: Any) -> Any:
        step, params, buffers = make()
        found = {}
        for level in (*LEVELS, MIXED):
            sharded = shard(step, level=level, group=group)
            state = sharded.init(params, buffers)
            found[str(level)] = sharded(state, split(case.batches(1, 12)[0], 3)[group.rank])[1]
        return found

    step, params, buffers = make()
    _, expected = step(step.init(params, buffers), case.batches(1, 12)[0])
    for found in launch(lambda: run(ProcessGroup()), 3, start_method="fork", timeout=100):
        for level in (*LEVELS, MIXED):
            torch.testing.assert_close(found[str(level)], expected, rtol=1e-12, atol=0)


def test_what_they_are() -> None:
    loss_fn = lambda p, b, x: (p["w"] * x).sum() + p["frozen"].sum()
    params = {"w": torch.tensor([6.0, 8.0], requires_grad=True), "frozen": torch.ones(5)}
    optimizer = optim.chain(
        optim.clip_by_global_norm(1.0), optim.sgd(lambda count: 0.5 / (1 + count))
    )
    step = train_step(
        loss_fn, optimizer, metrics=[*NORMS, "learning_rate", "clip_norm", "clip_factor"]
    )
    state = step.init(params)
    seen = []
    for _ in range(2):
        state, metrics = step(state, torch.tensor([3.0, 4.0]))
        seen.append(
            {name: round(float(value), 5) for name, value in metrics.items() if name != "loss"}
        )
    first = dict(
        grad_norm=5, update_norm=0.5, param_norm=10, learning_rate=0.5, clip_norm=5, clip_factor=0.2
    )
    assert seen[0] == first
    assert seen[1] == first | {"update_norm": 0.25, "param_norm": 9.5, "learning_rate": 0.25}


@pytest.mark.parametrize("level", thinned([3, 2, 1, 0]))
def test_a_skipped_step_has_no_update(level: int) -> None:
    loss_fn = lambda p, b, x: (p["w"] * x).sum()
    step = train_step(loss_fn, optim.sgd(0.1), metrics=["update_norm"], nonfinite="skip")

    def norms(step: Any) -> list[float]:
        state, seen = step.init({"w": torch.ones(4, requires_grad=True)}), []
        for x in (1.0, float("inf"), 1.0):
            state, metrics = step(state, torch.full((4,), x))
            seen.append(float(metrics["update_norm"]))
        return seen

    expected = pytest.approx([0.2, 0, 0.2])
    assert norms(step) == expected
    assert (
        run_ranks(lambda group: norms(shard(step, level=level, group=group)), 2) == [expected] * 2
    )


@pytest.mark.parametrize("level", thinned([3, 2, 1, 0]))
def test_an_overflow_on_one_rank_is_counted_on_all(level: int) -> None:
    def run(group: Any) -> list[float]:
        step = train_step(
            lambda p, b, x: (p["w"] * x).sum(),
            optim.apply_if_finite(optim.sgd(0.1), 5),
            metrics=["skipped"],
        )
        sharded = shard(step, level=level, group=group)
        state, seen = sharded.init({"w": torch.ones(3, requires_grad=True)}), []
        for k in range(3):
            state, metrics = sharded(
                state, torch.full((3,), float("inf") if (group.rank, k) == (1, 1) else 1.0)
            )
            seen.append(float(metrics["skipped"]))
        return seen

    assert run_ranks(run, 3) == [[0.0, 1.0, 1.0]] * 3


@pytest.mark.parametrize("level", tiers([3], [1, 2]))
def test_all_norms_cost_one_collective(level: int) -> None:
    case, calls = models.mlp(), []
    for metrics in ([], ["grad_norm"], NORMS, [*NORMS, "learning_rate"]):
        step, params, buffers = step_of(case, optim.adamw(0.1), metrics)
        group = CountingGroup(4)
        sharded = shard(step, level=level, group=group)
        state = sharded.init(params, buffers)
        group.reset()
        sharded(state, case.batches(1, 12)[0])
        calls.append((group.num_calls(), group.num_calls("all_reduce")))
    assert (
        [c[0] - calls[0][0] for c in calls] == [0, 1, 1, 1] == [c[1] - calls[0][1] for c in calls]
    )


def test_several_learning_rates_are_told_apart() -> None:
    optimizer = optim.partition(
        {"fast": optim.sgd(0.5), "slow": optim.adamw(0.25)},
        lambda path, leaf: "fast" if leaf.ndim > 1 else "slow",
    )
    step, params, buffers = step_of(case := models.mlp(), optimizer, ["learning_rate"])
    _, metrics = step(step.init(params, buffers), case.batches(1, 12)[0])
    rates = {
        name: float(value) for name, value in metrics.items() if name.startswith("learning_rate.")
    }
    assert sorted(rates.values()) == [0.25, 0.5] and len(rates) == 2
    assert [rates[name] for name in rates if "fast" in name] == [0.5]
    assert_sharded_equals_unsharded(
        step, params, buffers, case.batches(2, 12), levels=(3,), ranks=(2,)
    )


def test_parts_of_ones_own_report() -> None:
    class Mine(NamedTuple):
        steps: Tensor

        def report(self) -> dict[str, Tensor]:
            return {"mine": self.steps.double()}

    mine = optim.pointwise(
        lambda params: Mine(torch.zeros(())), lambda u, s, p: (u, Mine(s.steps + 1))
    )
    step, params, buffers = step_of(
        case := models.mlp(), optim.chain(mine, optim.sgd(0.1)), ["mine"]
    )
    state, metrics = step(step.init(params, buffers), case.batches(1, 12)[0])
    assert metrics["mine"] == 1 and optim.state_metrics(state.opt_state).keys() == {
        "mine",
        "learning_rate",
    }


def test_wrong_names() -> None:
    case = models.mlp()
    for wrong, error in (
        (["no_norm"], "no metric 'no_norm'.*grad_norm.*learning_rate"),
        (["skipped"], "'skipped'"),
    ):
        step, params, buffers = step_of(case, optim.adamw(0.1), wrong)
        with pytest.raises(ValueError, match=error):
            step.init(params, buffers)
        with pytest.raises(ValueError, match=error):
            shard(step, level=3, group=CountingGroup(2)).init(params, buffers)
    with pytest.raises(ValueError, match="twice"):
        step_of(case, optim.sgd(0.1), ["grad_norm", "grad_norm"])
    with pytest.raises(TypeError, match="list of names"):
        step_of(case, optim.sgd(0.1), "grad_norm")
    loss_fn = lambda p, b, x: (p["w"].sum(), Aux(metrics={"grad_norm": 1.0}))
    step = train_step(loss_fn, optim.sgd(0.1), metrics=["grad_norm"])
    with pytest.raises(StructureError, match="give metrics named"):
        step(step.init({"w": torch.ones(2, requires_grad=True)}), None)

    def differ(group: Any) -> None:
        step, params, buffers = step_of(case, optim.sgd(0.1), NORMS[: 1 + group.rank])
        with pytest.raises(MismatchError, match="metrics"):
            shard(step, level=1, group=group).init(params, buffers)

    run_ranks(differ, 2)


MEANS = {
    "ema": (lambda: optim.params_ema(optim.adamw(0.1), 0.5), optim.ema_params),
    "schedule-free": (lambda: optim.schedule_free_adamw(0.1), optim.schedule_free_eval_params),
    "a function": (
        lambda: optim.sgd(0.1),
        lambda opt_state, params: tree_map(lambda p: 2 * p, params),
    ),
}


@pytest.mark.parametrize(
    ("case", "name", "level"),
    crossed([models.frozen_mlp(), models.mixed()], MEANS, [*LEVELS, MIXED], n=3, quick=1),
    ids=lambda value: value.name if isinstance(value, models.Case) else str(value),
)
def test_evaluation_on_a_mean(case: models.Case, name: str, level: Any) -> None:
    if level == MIXED and "mlp" not in case.name:
        level = {"": 2, "first": 3}
    make, params_of = MEANS[name]
    step, params, buffers = case.step(make(), weighted=True)
    evaluate = eval_step(
        lambda p, b, batch: (
            lambda loss, aux: Aux(metrics={"loss": loss, **aux.metrics}, weight=aux.weight)
        )(*step.loss_fn(p, b, batch)),
        params=params_of,
    )
    batches = case.batches(3, 7)
    state = step.init(params, buffers)
    for batch in batches:
        state, _ = step(state, batch)
    expected = evaluate(state, batches[0])
    view = tree_map(lambda p: p.detach() if p.requires_grad else None, state.params)
    moved = optree.tree_leaves(params_of(state.opt_state, view))
    trained = [p for p in state.params.values() if p.requires_grad]
    assert any(not torch.equal(a, b) for a, b in zip(moved, trained, strict=True))

    def run(group: Any) -> Any:
        sharded, on_mean = (shard(s, level=level, group=group) for s in (step, evaluate))
        state = sharded.init(params, buffers)
        for batch in batches:
            state, _ = sharded(state, split(batch, 3)[group.rank])
        before = [leaf.clone() for leaf in local_leaves(state)]
        metrics = on_mean(state, split(batches[0], 3)[group.rank])
        assert all(torch.equal(a, b) for a, b in zip(before, local_leaves(state), strict=True))
        return metrics

    for metrics in run_ranks(run, 3):
        torch.testing.assert_close(
            metrics, expected, rtol=1e-5 if "mixed" in case.name else 1e-12, atol=1e-12
        )


def test_a_mean_of_another_structure_is_refused() -> None:
    step, params, buffers = models.mlp().step(optim.sgd(0.1))
    evaluate = eval_step(
        lambda p, b, batch: {}, params=lambda opt_state, params: dict(list(params.items())[1:])
    )
    with pytest.raises(StructureError, match=r"eval_step\(params=\.\.\.\) gave"):
        evaluate(step.init(params, buffers), None)


@pytest.mark.parametrize("level", [None, *LEVELS])
def test_a_mean_of_another_dtype_or_shape_is_refused(level: int | None) -> None:
    step, params, buffers = models.mlp().step(optim.sgd(0.1))
    chosen = {
        "dtype": lambda _, params: tree_map(lambda p: p.to(torch.complex64), params),
        "shape": lambda _, params: tree_map(lambda p: torch.ones(1, 2, dtype=p.dtype), params),
    }

    def run(group: Any) -> None:
        for params_of in chosen.values():
            evaluate = eval_step(lambda p, b, batch: {}, params=params_of)
            ours, theirs = step, evaluate
            if level is not None:
                ours, theirs = (shard(s, level=level, group=group) for s in (step, evaluate))
            with pytest.raises(StructureError, match=r"can't take its param's place: path .*cast"):
                theirs(ours.init(params, buffers), None)

    run(None) if level is None else run_ranks(run, 2)
