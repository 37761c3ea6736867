"""What becomes of buffers that ranks change differently."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from functorch_zero import optim
from functorch_zero.groups import counted, run_ranks
from functorch_zero.model.functionalize import functionalize
from functorch_zero.sharded.api import shard
from functorch_zero.sharded.buffers import check_sync_buffers, replaced, synchronize
from functorch_zero.step.loss import Aux
from functorch_zero.step.train import train_step

INF = float("inf")
OLD = {
    "mean": torch.tensor([1.0, 2.0], dtype=torch.float64),
    "other": torch.tensor([[0.1]]),
    "count": torch.tensor(3),
    "flag": torch.tensor([True, False]),
    "constant": torch.tensor([0.1, -INF, float("nan")], dtype=torch.float64),
    "half": torch.tensor([1.5], dtype=torch.bfloat16),
    "empty": torch.zeros(0),
}


def new_on(rank: int) -> dict[str, Tensor]:
    """Rank r's buffers; `other` is replaced on rank 1 only, `constant` on none."""
    new = dict(OLD)
    new["mean"] = OLD["mean"] + rank + 1
    new["count"] = OLD["count"] + rank + 1
    new["flag"] = torch.tensor([rank == 0, True])
    new["half"] = OLD["half"] * (rank + 1)
    if rank == 1:
        new["other"] = OLD["other"] + 3
    return new


def sync(rule: Any, ranks: int = 3) -> list[dict[str, Tensor]]:
    def run(group: Any) -> dict[str, Tensor]:
        flags = [True] * len(OLD)  # any rank's
        return synchronize(OLD, new_on(group.rank), flags, rule, group)

    return run_ranks(run, ranks)


def test_mean() -> None:
    for got in sync("mean"):
        assert torch.allclose(got["mean"], OLD["mean"] + 2, rtol=1e-14)
        assert torch.allclose(got["other"], OLD["other"] + 1)
        assert int(got["count"]) == 4 and got["flag"].tolist() == [True, True], (
            "integers are rank 0's"
        )
        assert got["half"].dtype == torch.bfloat16 and float(got["half"]) == 3.0
        assert got["constant"].view(torch.int64).equal(OLD["constant"].view(torch.int64)), (
            "to the bit"
        )
        assert all(got[name].shape == OLD[name].shape for name in OLD)


@pytest.mark.parametrize("old", [INF, 1e30, float(torch.finfo(torch.float32).max)])
def test_a_mean_far_below_the_value_before(old: float) -> None:
    """A smallest loss so far, say, that began as infinity."""
    before = {"best": torch.full((2,), old)}

    def run(group: Any) -> Tensor:
        new = {"best": torch.tensor([4.0 + group.rank, old])}
        return synchronize(before, new, [True], "mean", group)["best"]

    for best in run_ranks(run, 3):
        assert best.tolist() == [5.0, before["best"][1].item()]


def test_rank0() -> None:
    for got in sync("rank0"):
        expected = new_on(0)
        for name in set(OLD) - {"constant"}:
            assert torch.equal(got[name], expected[name]), name


def test_local() -> None:
    for rank, got in enumerate(sync("local")):
        assert all(
            got[name] is not None and torch.equal(got[name], new_on(rank)[name])
            for name in ("mean", "count")
        )


def test_a_collective_a_dtype_and_none_without_changes() -> None:
    def run(group: Any) -> tuple[int, int]:
        watched = counted(group)
        synchronize(OLD, new_on(group.rank), [True] * len(OLD), "mean", watched)
        first = watched.num_calls()
        synchronize(OLD, dict(OLD), [False] * len(OLD), "mean", watched)
        return first, watched.num_calls() - first

    assert run_ranks(run, 2) == [(5, 0)] * 2  # float64, float32, int64, bool, bfloat16


def test_replaced() -> None:
    assert replaced(OLD, OLD) == [False] * len(OLD)
    assert sum(replaced(OLD, new_on(1))) == 5 and sum(replaced(OLD, new_on(0))) == 4


def test_unknown_rules_are_refused() -> None:
    with pytest.raises(ValueError, match="buffers must be one of"):
        check_sync_buffers("sum")


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("rule", ["mean", "rank0", "local"])
def test_in_a_step(rule: Any, level: int) -> None:
    """Only rank 1's loss changes one of the buffers: all ranks take part all the same."""

    def run(group: Any) -> tuple[float, float]:
        def loss_fn(params: Any, buffers: Any, batch: Any) -> tuple[Tensor, Aux]:
            new = {"seen": buffers["seen"] + batch, "rare": buffers["rare"]}
            if group.rank == 1:
                new["rare"] = buffers["rare"] + 4
            return params["w"].sum() * batch, Aux(buffers=new)

        step = shard(
            train_step(loss_fn, optim.sgd(0.1)), level=level, group=group, sync_buffers=rule
        )
        buffers = {"seen": torch.tensor(1.0), "rare": torch.tensor(2.0)}
        state = step.init({"w": torch.ones(3, requires_grad=True)}, buffers)
        for _ in range(2):
            state, _ = step(state, torch.tensor(float(group.rank + 1)))
        assert buffers["seen"] == 1 and buffers["rare"] == 2
        return float(state.buffers["seen"]), float(state.buffers["rare"])

    expected = {
        "mean": [(4.0, 6.0)] * 2,
        "rank0": [(3.0, 2.0)] * 2,
        "local": [(3.0, 2.0), (5.0, 10.0)],
    }
    assert run_ranks(run, 2) == expected[rule]


@pytest.mark.parametrize("rows", [[4, 0], [0, 4], [0, 0]])
@pytest.mark.parametrize("rule", ["mean", "rank0", "local"])
def test_a_batch_without_weight_changes_no_buffer(rule: Any, rows: list[int]) -> None:
    """The mean of no rows is NaN, and BatchNorm counts a batch of none; nor do its ranks count in
    the mean."""
    apply, params, buffers = functionalize(nn.BatchNorm1d(3).double())

    def loss_fn(params: Any, buffers: Any, x: Tensor) -> tuple[Tensor, Aux]:
        output, new = apply(params, {name: buffers[name] for name in buffers if name != "seen"}, x)
        return output.square().mean(), Aux(
            buffers={**new, "seen": buffers["seen"] + x.mean()}, weight=len(x)
        )

    step = train_step(loss_fn, optim.sgd(0.1), accumulate=2)
    first = {**buffers, "seen": torch.zeros((), dtype=torch.float64)}
    batch = torch.arange(12.0, dtype=torch.float64).view(4, 3)
    alone, _ = step(step.init(params, first), batch[: max(rows)])

    def run(group: Any) -> Any:
        sharded = shard(step, level=1, group=group, sync_buffers=rule)
        return sharded(sharded.init(params, first), batch[: rows[group.rank]])[0].buffers

    for rank, got in enumerate(run_ranks(run, 2)):
        idle = not rows[0 if rule == "rank0" else rank] if rule != "mean" else not any(rows)
        for name, expected in (first if idle else alone.buffers).items():
            assert torch.equal(got[name], expected), name
