"""Weights of batches and micro-batches count in float64, whatever type they come in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import FunctorchZeroError, StructureError
from functorch_zero.groups import run_ranks
from functorch_zero.sharded.grad_mean import to_means
from functorch_zero.sharded.program import agreement, engine
from functorch_zero.step import weights
from tests.tiers import crossed, tiers

F64 = torch.float64
# Shares of 0.1 and 0.7 are 4e-9 off in float32, and 2**24 + 1 is 2**24
WEIGHTS: list[list[Any]] = [
    [0.1, 0.7],
    [2**24 + 1, 3],
    [torch.tensor(2**24 + 1), torch.tensor(3)],
    [torch.tensor(0.1, dtype=F64), torch.tensor(0.7, dtype=F64)],
    [0.1, 2**24 + 1],
]


def exact_mean(values: Sequence[float], weights: Sequence[Any]) -> float:
    shares = [Fraction(float(weight)) for weight in weights]
    total = sum(share * Fraction(value) for share, value in zip(shares, values, strict=True))
    return float(total / sum(shares))


def weighing(weights: Sequence[Any]) -> Any:
    """A loss whose batches are (1, 2): the batch's value, and the number of its weight."""

    def loss_fn(params: Any, buffers: Any, batch: Tensor) -> Any:
        value = fz.unshard(params)["w"].sum() * batch[0, 0]
        metrics = {"value": batch[0, 0], "single": batch[0, 0].float()}
        return value, fz.Aux(metrics=metrics, weight=weights[int(batch[0, 1])])

    return loss_fn


PARAMS = {"w": torch.zeros(3, dtype=F64, requires_grad=True)}
VALUES = [1.0, 1 / 3]
BATCH = torch.tensor([[VALUES[0], 0], [VALUES[1], 1]], dtype=F64)


def check(gradient: Tensor, metrics: dict[str, Tensor], weights: Sequence[Any]) -> None:
    expected = exact_mean(VALUES, weights)
    assert metrics["value"].dtype == F64 and metrics["single"].dtype == torch.float32
    assert float(metrics["value"]) == pytest.approx(expected, rel=1e-15)
    assert gradient.tolist() == pytest.approx([expected] * 3, rel=1e-15)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_micro_batches(weights: list[Any]) -> None:
    step = fz.train_step(weighing(weights), optim.sgd(1.0), accumulate=2)
    state, metrics = step(step.init(PARAMS), BATCH)
    check(-state.params["w"], metrics, weights)


@pytest.mark.parametrize(
    ("weights", "level", "by"), crossed(WEIGHTS, [0, 1, 2, 3], ["ranks", "both"], n=3)
)
def test_ranks(weights: list[Any], level: int, by: str) -> None:
    accumulate = 2 if by == "both" else 1
    step = fz.train_step(weighing(weights), optim.sgd(1.0), accumulate=accumulate)
    evaluation = fz.eval_step(lambda p, b, x: weighing(weights)(p, b, x)[1])

    def run(group: Any) -> Any:
        batch = BATCH if by == "both" else BATCH[group.rank : group.rank + 1]
        sharded = fz.shard(step, level=level, group=group)
        state, metrics = sharded(sharded.init(PARAMS), batch)
        own = BATCH[group.rank : group.rank + 1]
        found = fz.shard(evaluation, level=level, group=group)(state, own)
        return sharded.unshard(state).params["w"], metrics, found["value"]

    for w, metrics, value in run_ranks(run, 2):
        check(-w, metrics, weights)
        assert float(value) == pytest.approx(exact_mean(VALUES, weights), rel=1e-15)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_programs(weights: list[Any]) -> None:
    loss_fn = weighing(weights)

    def run(group: Any) -> Any:
        params = fz.shard_tree(PARAMS, level=1, group=group)
        own = BATCH[group.rank : group.rank + 1]
        (_, metrics), grads = fz.value_and_grad(lambda p, x: loss_fn(p, {}, x))(params, own)
        return fz.unshard(grads)["w"], metrics

    for gradient, metrics in run_ranks(run, 2):
        check(gradient, metrics, weights)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_total_that_a_half_precision_does_not_hold(dtype: torch.dtype) -> None:
    """131072 is infinite in float16, and 257 is 256 in bfloat16."""
    for total in (131072.0, 257.0):
        flat = torch.full((3,), 4 * 257.0, dtype=dtype)
        expected = (flat.double() / total).to(dtype)
        to_means({0: flat}, torch.tensor(total, dtype=F64), None)
        assert torch.equal(flat, expected)


@pytest.mark.parametrize(
    "weight", [torch.ones(2), torch.ones(1, 1), torch.ones((), dtype=torch.cfloat)]
)
def test_a_weight_is_one_real_number(weight: Tensor) -> None:
    step = fz.train_step(lambda p, b, x: (p["w"].sum(), fz.Aux(weight=weight)), optim.sgd(0.1))
    with pytest.raises(StructureError, match=r"Aux\.weight is no weight.*Remedy"):
        step(step.init(PARAMS), BATCH)
    check = fz.eval_step(lambda p, b, x: fz.Aux(weight=weight))
    with pytest.raises(StructureError, match=r"Aux\.weight is no weight.*Remedy"):
        check(step.init(PARAMS), BATCH)


def test_a_weight_is_a_constant() -> None:
    """The mean's own gradient by the weight would be lost."""
    step = fz.train_step(
        lambda p, b, x: (p["w"].sum(), fz.Aux(weight=p["w"].exp().sum())), optim.sgd(0.1)
    )
    with pytest.raises(StructureError, match=r"requires grad.*Remedy: detach it"):
        step(step.init(PARAMS), BATCH)


BAD = [-1.0, float("nan"), float("inf")]


OUT_OF_RANGE = [1e-50, 1e-44, 1e-21, 1e21, 1e39]


@pytest.mark.parametrize(("weight", "level"), crossed(OUT_OF_RANGE, [None, 0, 3]))
def test_a_weight_is_in_range(weight: float, level: int | None) -> None:
    """In float32 its product with a gradient would lose digits, or be infinite."""

    def run(group: Any) -> None:
        step: Any = fz.train_step(weighing([weight]), optim.sgd(0.1))
        if level is not None:
            step = fz.shard(step, level=level, group=group)
        state = step.init(PARAMS)
        with pytest.raises(StructureError, match=r"1e-20 to 1e\+20, got .*Remedy: divide all"):
            step(state, BATCH[:1])

    run_ranks(run, 1 if level is None else 2)


@pytest.mark.parametrize("weight", [1e-20, 1e20])
@pytest.mark.parametrize("level", tiers([3], [0, 1]))
def test_the_ends_of_the_range(level: int, weight: float) -> None:
    """Two ranks of one weight have the gradient that one rank has without."""

    def run(group: Any) -> Tensor:
        def loss_fn(params: Any, buffers: Any, x: Tensor) -> Any:
            return (params["w"] * x).square().sum(), fz.Aux(weight=weight)

        step = fz.shard(fz.train_step(loss_fn, optim.sgd(0.1)), level=level, group=group)
        state = step.init({"w": torch.tensor([1e-3, 0.1, 10.0], requires_grad=True)})
        state, _ = step(state, torch.ones(1))
        return step.unshard(state).params["w"]

    expected = torch.tensor([0.8e-3, 0.08, 8.0])
    torch.testing.assert_close(run_ranks(run, 2)[0].detach(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("level", tiers([None, 3], [0, 1, 2]))
def test_a_sum_of_weights_may_leave_the_range(level: int | None) -> None:
    """Each micro-batch's weight is in it."""

    def run(group: Any) -> float:
        step: Any = fz.train_step(weighing([1e20, 1e20]), optim.sgd(0.1), accumulate=2)
        if level is not None:
            step = fz.shard(step, level=level, group=group)
        return float(step(step.init(PARAMS), BATCH)[1]["value"])

    for got in run_ranks(run, 1 if level is None else 2):
        assert got == pytest.approx(sum(VALUES) / 2, rel=1e-12)


@pytest.mark.parametrize("call", ["step", "evaluation", "program"])
def test_a_devices_weight_is_in_range_where_steps_look(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "is_on_device", lambda weight: isinstance(weight, Tensor))
    given = weighing([torch.tensor(1e21)])

    def run(group: Any) -> None:
        step = fz.shard(fz.train_step(given, optim.sgd(0.1)), level=3, group=group)
        evaluation = fz.shard(fz.eval_step(lambda p, b, x: given(p, b, x)[1]), group=group, level=3)
        state = step.init(PARAMS)
        with pytest.raises(StructureError, match=r"1e-20 to 1e\+20, got .*Remedy: divide all"):
            if call == "step":
                step(state, BATCH[:1])
            elif call == "evaluation":
                evaluation(state, BATCH[:1])
            else:
                fz.value_and_grad(lambda p, x: given(p, {}, x))(state.params, BATCH[:1])

    run_ranks(run, 2)


@pytest.mark.parametrize("weight", BAD)
@pytest.mark.parametrize("on_device", [False, True])
def test_a_weight_is_finite_and_not_negative(
    weight: float, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if on_device:
        monkeypatch.setattr(weights, "is_on_device", lambda weight: isinstance(weight, Tensor))
    given = torch.tensor(weight)
    for accumulate in (1, 2):
        step = fz.train_step(weighing([3.0, given]), optim.sgd(0.1), accumulate=accumulate)
        with pytest.raises(StructureError, match=rf"weight.*expected >= 0.*got {weight}.*Remedy"):
            step(step.init(PARAMS), BATCH if accumulate == 2 else BATCH[1:])
    check = fz.eval_step(lambda p, b, x: fz.Aux(weight=given))
    with pytest.raises(StructureError, match=rf"expected >= 0.*got {weight}.*Remedy"):
        check(step.init(PARAMS), BATCH)


@pytest.mark.parametrize(
    ("weight", "level", "call", "on_device"),
    crossed(
        BAD, [0, 1, 2, 3], ["step", "accumulated", "evaluation", "program"], [True, False], n=5
    ),
)
def test_a_wrong_weight_on_one_rank_is_an_error_on_all(
    weight: float, level: int, call: str, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device's weight is first known to the host when the ranks agree."""
    if on_device:
        monkeypatch.setattr(weights, "is_on_device", lambda weight: isinstance(weight, Tensor))
    given = weighing([torch.tensor(5.0), torch.tensor(weight)])
    step = fz.train_step(given, optim.sgd(1.0), accumulate=2 if call == "accumulated" else 1)
    evaluation = fz.eval_step(lambda p, b, x: given(p, b, x)[1])

    def run(group: Any) -> str:
        sharded = fz.shard(step, level=level, group=group)
        state = sharded.init(PARAMS)
        number = group.rank  # rank 1 gives the wrong one
        own = BATCH[number : number + 1]
        with pytest.raises(FunctorchZeroError) as caught:
            if call == "step":
                sharded(state, own)
            elif call == "accumulated":
                sharded(state, torch.cat([BATCH[:1], own]))
            elif call == "evaluation":
                fz.shard(evaluation, level=level, group=group)(state, own)
            else:
                params = fz.shard_tree(PARAMS, level=level, group=group)
                fz.value_and_grad(lambda p, x: given(p, {}, x))(params, own)
        return str(caught.value)

    other, guilty = run_ranks(run, 2)
    assert "Aux.weight is no weight" in guilty and "on rank 1" in guilty and "Remedy" in guilty
    assert "rank 1 failed" in other and "Aux.weight is no weight" in other


@pytest.mark.parametrize("weight", BAD)
@pytest.mark.parametrize(("level", "accumulate"), crossed([0, 1, 2, 3], [1, 2], n=3))
def test_a_devices_wrong_weight_makes_all_results_nan(
    weight: float, level: int, accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the steps in which no host reads it."""
    monkeypatch.setattr(weights, "is_on_device", lambda weight: isinstance(weight, Tensor))
    for module in (agreement, engine):
        monkeypatch.setattr(module, "is_looked_at", lambda call: False)
    given = weighing([torch.tensor(5.0), torch.tensor(weight)])
    step = fz.train_step(given, optim.sgd(1.0), accumulate=accumulate)

    def run(group: Any) -> None:
        sharded = fz.shard(step, level=level, group=group)
        evaluation = fz.eval_step(lambda p, b, x: given(p, b, x)[1])
        evaluation = fz.shard(replace(evaluation, calls=count(5)), level=level, group=group)
        state = sharded.init(PARAMS)
        own = BATCH[group.rank : group.rank + 1]
        assert evaluation(state, own)["value"].isnan()
        state, metrics = sharded(state, own if accumulate == 1 else BATCH)
        assert metrics["loss"].isnan() and metrics["value"].isnan()
        assert sharded.unshard(state).params["w"].isnan().all()

    run_ranks(run, 2)


def test_complex_metrics_are_refused() -> None:
    """Their imaginary part would be lost in the mean."""
    metrics = {"a": torch.tensor(1j)}
    step = fz.train_step(lambda p, b, x: (p["w"].sum(), fz.Aux(metrics=metrics)), optim.sgd(0.1))
    with pytest.raises(StructureError, match=r"real number.*complex64.*Remedy"):
        step(step.init(PARAMS), BATCH)


@pytest.mark.parametrize(
    ("level", "ranks", "weighted"), crossed([0, 1, 2, 3], [1, 2, 4], [False, True])
)
def test_a_loss_less_precise_than_its_leaves(level: int, ranks: int, weighted: bool) -> None:
    """A third of it, as float32, would be 1e-8 off in float64 gradients."""

    def loss_fn(params: Any, buffers: Any, x: Tensor) -> Any:
        loss = (fz.unshard(params)["w"] * x).cos().mean().float()
        return (loss, fz.Aux(weight=0.1 * len(x))) if weighted else loss

    step = fz.train_step(loss_fn, optim.sgd(0.1), accumulate=3)
    batches = [torch.arange(36.0, dtype=F64).view(12, 3) + 1]
    params = {"w": torch.ones(3, dtype=F64, requires_grad=True)}
    alone, _ = step(step.init(params), batches[0])
    expected = alone.params["w"] - 1

    def run(group: Any) -> Tensor:
        sharded = fz.shard(step, level=level, group=group)
        state, _ = sharded(sharded.init(params), batches[0].chunk(ranks)[group.rank])
        return sharded.unshard(state).params["w"] - 1

    for got in run_ranks(run, ranks):
        torch.testing.assert_close(got, expected, rtol=1e-13, atol=0)
