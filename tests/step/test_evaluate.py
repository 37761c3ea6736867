"""Rows and the total weight of evaluations, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import StructureError
from functorch_zero.groups import HybridGroup, run_ranks
from tests.tiers import crossed, thinned

F64 = torch.float64
PARAMS = {
    "w": torch.arange(1.0, 6.0, dtype=F64, requires_grad=True),
    "v": torch.ones(3, dtype=F64),
}
X = torch.arange(15.0, dtype=F64).view(3, 5)


def loss_fn(params: Any, buffers: Any, x: Tensor) -> Tensor:
    return (fz.unshard(params)["w"] * x).mean()


STEP = fz.train_step(loss_fn, optim.sgd(0.1))


def predict(params: Any, buffers: Any, x: Tensor) -> Any:
    scores = (fz.unshard(params)["w"] * x).sum(1)
    rows = {"scores": scores, "names": [f"row {float(first)}" for first in x[:, 0]]}
    return fz.Aux(metrics={"mean": scores.mean()}, weight=0.1 * len(x)), rows


@pytest.mark.parametrize(
    ("level", "ranks", "donate"), crossed([0, 1, 2, 3], [1, 2, 3], [True, False], n=3)
)
def test_rows_and_the_total_weight(level: int, ranks: int, donate: bool) -> None:
    evaluation = fz.eval_step(predict, metrics=["weight"])
    metrics, rows = evaluation(STEP.init(PARAMS), X)
    assert metrics["weight"].dtype == F64 and float(metrics["weight"]) == 0.1 * 3

    def run(group: Any) -> Any:
        step = fz.shard(STEP, level=level, group=group, donate=donate)
        state = step.init(PARAMS)
        return fz.shard(evaluation, level=level, group=group)(
            state, X.tensor_split(ranks)[group.rank]
        )

    found = run_ranks(run, ranks)
    for got, _ in found:
        assert got.keys() == metrics.keys()
        for name in metrics:
            torch.testing.assert_close(got[name], metrics[name], rtol=1e-14, atol=0)
    scores = torch.cat([own["scores"] for _, own in found])
    assert torch.equal(scores, rows["scores"]) and not scores.requires_grad
    assert [name for _, own in found for name in own["names"]] == rows["names"]


@pytest.mark.parametrize("level", thinned([3, 2, 1, 0]))
@pytest.mark.parametrize("ranks", thinned([1, 2]))
def test_rows_that_are_params_stay_as_they_were(level: int, ranks: int) -> None:
    """A later step writes over the params' storage; a lazy param would be gathered too late."""

    def evaluate(params: Any, buffers: Any, x: Tensor) -> Any:
        whole = fz.unshard(params)
        return {"a": 1.0}, (params["w"], whole["w"][1:], whole["v"], buffers["b"], "text", None)

    def run(group: Any) -> Any:
        step = fz.shard(STEP, level=level, group=group)
        state = step.init(PARAMS, {"b": torch.tensor(5)})
        _, rows = fz.shard(fz.eval_step(evaluate), level=level, group=group)(state, X)
        for _ in range(2):
            state, _ = step(state, X)
        return rows

    for w, part, v, b, text, nothing in run_ranks(run, ranks):
        assert type(w) is Tensor and torch.equal(w, PARAMS["w"])
        assert torch.equal(part, PARAMS["w"][1:]) and torch.equal(v, PARAMS["v"])
        assert int(b) == 5 and text == "text" and nothing is None


def test_ranks_of_the_same_data_count_once() -> None:
    evaluation = fz.eval_step(predict, metrics=["weight"])

    def run(group: Any) -> Any:
        mesh = HybridGroup(group, shard_size=2, same_data="shard")
        state = fz.shard(STEP, level=3, group=mesh).init(PARAMS)
        own = X[: 1 + group.rank // 2]
        return fz.shard(evaluation, level=3, group=mesh)(state, own)[0]["weight"]

    assert run_ranks(run, 4) == [pytest.approx(0.3)] * 4


@pytest.mark.parametrize("level", [0, 3])
def test_the_mean_of_nothing_is_refused(level: int) -> None:
    """It would make the mean over all ranks NaN, where one process has a number."""

    def found(weighted: bool) -> list[float]:
        def mean(params: Any, buffers: Any, x: Tensor) -> fz.Aux:
            scores = fz.unshard(params)["w"] * x
            weight = len(x) if weighted else None
            return fz.Aux(metrics={"rows": 1.0, "score": scores.mean()}, weight=weight)

        def run(group: Any) -> float:
            state = fz.shard(STEP, level=level, group=group).init(PARAMS)
            sharded = fz.shard(fz.eval_step(mean), level=level, group=group)
            return float(sharded(state, {0: X, 1: X[:0]}[group.rank])["score"])

        return run_ranks(run, 2)

    with pytest.raises(StructureError, match=r"batch is empty, and its score NaN.*on rank 1"):
        found(weighted=False)
    assert found(weighted=True) == [pytest.approx(float((PARAMS["w"].detach() * X).mean()))] * 2


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (fz.Aux(buffers={}, weight=1.0), r"Aux\(buffers=.*Remedy"),
        (fz.Aux(metrics={"a": 1.0}), r"no weight to tell.*Remedy"),
        ({"a": 1.0}, r"no weight to tell.*Remedy"),
        (fz.Aux(metrics={"weight": 1.0}, weight=1.0), r'"weight" itself.*Remedy'),
    ],
)
def test_what_is_refused(sharded: bool, returned: Any, message: str) -> None:
    evaluation = fz.eval_step(lambda p, b, x: returned, metrics=["weight"])

    def run(group: Any) -> None:
        state = fz.shard(STEP, level=1, group=group).init(PARAMS)
        fz.shard(evaluation, level=1, group=group)(state, X)

    with pytest.raises(StructureError, match=message):
        run_ranks(run, 2) if sharded else evaluation(STEP.init(PARAMS), X)


def test_other_metrics_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no metric 'grad_norm'.*Remedy"):
        fz.eval_step(predict, metrics=["grad_norm"])
    with pytest.raises(TypeError, match="list of names"):
        fz.eval_step(predict, metrics="weight")
    with pytest.raises(TypeError, match=r"rows; got tuple"):
        fz.eval_step(lambda p, b, x: ({}, 1, 2))(STEP.init(PARAMS), X)
