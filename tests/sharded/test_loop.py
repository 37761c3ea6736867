"""Ranks go on and stop together, on threads and processes, at every level."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from functorch_zero import checkpoint, optim
from functorch_zero.errors import PeerError, StructureError
from functorch_zero.groups import ProcessGroup, launch, run_ranks
from functorch_zero.sharded.api import shard
from functorch_zero.sharded.data import equalize_batches
from functorch_zero.sharded.loop import any_rank
from functorch_zero.step.evaluate import eval_step
from functorch_zero.step.loss import Aux
from functorch_zero.step.train import train_step
from tests.tiers import thinned

LEVELS = (0, 1, 2, 3)


def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
    return (params["w"] * batch - 1).square().mean(), Aux(weight=len(batch))


def batch_of(k: int) -> torch.Tensor:
    return torch.tensor([[1.0 + k] * 3, [1.5 + k] * 3], dtype=torch.float64)


def loop(group: Any, level: int) -> Any:
    """Ranks with 2, 3, ... batches each; one of them wants to stop after the fourth step; then
    evaluation on all."""
    step = shard(train_step(loss_fn, optim.sgd(0.1)), level=level, group=group)
    of_batch = lambda p, b, x: Aux(metrics={"loss": loss_fn(p, b, x)[0]}, weight=len(x))
    evaluate = shard(eval_step(of_batch), level=level, group=group)
    state = step.init({"w": torch.ones(3, dtype=torch.float64, requires_grad=True)})
    # In an order of each rank's own, as of other examples
    mine = [batch_of(k).roll(group.rank, 0) for k in range(3 + group.rank)]
    for batch in equalize_batches(mine, group):
        state, _ = step(state, batch)
        if any_rank(group.rank == 0 and int(state.step) == 4, group):
            break
    losses = [float(evaluate(state, batch)["loss"]) for batch in equalize_batches(mine, group)]
    return int(state.step), losses, step.unshard(state).params["w"].detach().tolist()


def expected() -> Any:
    step, evaluate = (
        train_step(loss_fn, optim.sgd(0.1)),
        eval_step(lambda p, b, x: {"loss": loss_fn(p, b, x)[0]}),
    )
    state = step.init({"w": torch.ones(3, dtype=torch.float64, requires_grad=True)})
    batches = [batch_of(k) for k in range(5)]
    for batch in batches[:4]:
        state, _ = step(state, batch)
    return (
        4,
        [float(evaluate(state, x)["loss"]) for x in batches],
        state.params["w"].detach().tolist(),
    )


@pytest.mark.parametrize("level", thinned([3, 2, 1, 0]))
def test_all_stop_together_and_evaluate_all_batches(level: int) -> None:
    steps, losses, params = expected()
    for got_steps, got_losses, got_params in run_ranks(lambda group: loop(group, level), 3):
        assert (got_steps, got_losses, got_params) == (
            steps,
            pytest.approx(losses),
            pytest.approx(params),
        )


@pytest.mark.thorough
def test_on_processes() -> None:
    steps, losses, params = expected()
    for found in launch(lambda: loop(ProcessGroup(), 3), 3, start_method="fork", timeout=100):
        assert found == (steps, pytest.approx(losses), pytest.approx(params))


def test_a_rank_without_any_batch() -> None:
    def run(group: Any, empty: Any) -> int:
        return sum(
            len(x) for x in equalize_batches([torch.ones(2)] * group.rank, group, empty=empty)
        )

    assert run_ranks(lambda group: run(group, torch.ones(0)), 2) == [0, 2]

    def told(group: Any) -> str:
        with pytest.raises((StructureError, PeerError), match="no batch at all") as caught:
            run(group, None)
        return type(caught.value).__name__

    assert run_ranks(told, 2) == ["StructureError", "PeerError"]


def test_batches_that_fail_on_one_rank() -> None:
    def broken(group: Any) -> Any:
        yield torch.ones(2)
        if group.rank == 1:
            raise OSError("the disk is gone")
        yield torch.ones(2)

    def run(group: Any) -> str:
        with pytest.raises((OSError, PeerError), match="disk is gone") as caught:
            list(equalize_batches(broken(group), group))
        return type(caught.value).__name__

    assert run_ranks(run, 2) == ["PeerError", "OSError"]


def test_a_group_without_a_backend_for_the_cpu(tmp_path: Path) -> None:
    """Flags, metrics that are numbers, and saves, over such a group as `init_process_group("nccl")`
    makes; here gloo stands for NCCL."""

    def run() -> Any:
        group = ProcessGroup(dist.new_group(backend="cuda:gloo"))
        number = shard(eval_step(lambda p, b, x: {"rows": len(x)}), level=3, group=group)
        step = shard(train_step(loss_fn, optim.sgd(0.1)), level=3, group=group)
        state = step.init({"w": torch.ones(3, dtype=torch.float64, requires_grad=True)})
        rows = float(number(state, torch.ones(4))["rows"])
        checkpoint.async_save(tmp_path, step, state)
        results = loop(group, 3)
        checkpoint.wait_for_saves(step)
        return rows, results

    on_threads = run_ranks(lambda group: loop(group, 3), 2)
    found = launch(run, 2, start_method="fork", timeout=60)
    assert found == [(4.0, expected) for expected in on_threads]
    assert checkpoint.verify(tmp_path) == {0: []}
