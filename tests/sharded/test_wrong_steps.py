"""Wrong losses, batches, params and transforms of one rank or of all: an error on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optree import tree_map
from torch import nn

from functorch_zero import optim
from functorch_zero.errors import GroupError, StructureError, TransformError
from functorch_zero.groups import CountingGroup, run_ranks
from functorch_zero.model.functionalize import functionalize
from functorch_zero.sharded.api import shard
from functorch_zero.step.loss import Aux
from functorch_zero.step.train import train_step
from tests.models import ZOO
from tests.sharded.test_shard import LEVELS, batch_for, build
from tests.tiers import crossed

SECONDS = 10  # in which a failure must have reached every rank; in practice milliseconds


def by_step(
    group: Any, level: int, *, change: Any = lambda *result: result, batch: Any = None
) -> None:
    """A step whose loss gives `change(loss, aux)`."""
    loss_fn, params, buffers = ZOO["mlp"].build()
    step = train_step(lambda p, b, batch: change(*loss_fn(p, b, batch)), optim.sgd(0.1))
    sharded = shard(step, level=level, group=group)
    sharded(sharded.init(params, buffers), batch_for(group) if batch is None else batch)


def batch_elsewhere(group: Any, level: int) -> None:
    batch = batch_for(group)
    by_step(group, level, batch=batch | {"x": batch["x"].to("meta" if group.rank == 1 else "cpu")})


def no_scalar(group: Any, level: int) -> None:
    by_step(group, level, change=lambda loss, aux: loss.expand(2) if group.rank == 1 else loss)


def other_metrics(group: Any, level: int) -> None:
    own = {"only_here": 1.0} if group.rank == 0 else {}
    by_step(group, level, change=lambda loss, aux: (loss, Aux(metrics=own)))


def by_params(group: Any, level: int, params: Any) -> None:
    """A step of a linear layer whose state has these params."""
    apply, _, _ = functionalize(nn.Linear(7, 3))
    step = train_step(lambda p, b, x: apply(p, b, x)[0].sum(), optim.sgd(0.1))
    sharded = shard(step, level=level, group=group)
    sharded(sharded.init(params), torch.ones(2, 7))


def missing_param(group: Any, level: int) -> None:
    _, params, _ = functionalize(nn.Linear(7, 3))
    del params["bias"]
    by_params(group, level, params)


def other_model(group: Any, level: int) -> None:
    """Whose params would work in the model's place. An unsharded step refuses them, too."""
    by_params(group, level, functionalize(nn.Linear(7, 4))[1])


def lying_transform(group: Any, level: int) -> None:
    lying = optim.pointwise(lambda p: (), lambda u, s, p: (tree_map(lambda x: x / x.norm(), u), s))
    step, params, buffers = build(optimizer=optim.chain(lying, optim.scale(-0.1)))
    shard(step, level=level, group=group).init(params, buffers)


MISFIT = "params don't fit the model: path "
WRONG: dict[Callable[[Any, int], None], tuple[type[Exception], str]] = {
    batch_elsewhere: (
        StructureError,
        r"wrong device: path x, expected cpu, got meta, on rank 1\. Remedy",
    ),
    no_scalar: (StructureError, r"not a scalar.*got shape \(2,\).*on rank 1.*Remedy"),
    other_metrics: (GroupError, "same metrics"),
    missing_param: (StructureError, rf"{MISFIT}bias.*Remedy"),
    other_model: (StructureError, rf"{MISFIT}weight, expected \(3, 7\), got \(4, 7\).*Remedy"),
    lying_transform: (TransformError, "norm"),
}


@pytest.mark.parametrize(("run", "level"), crossed(WRONG, LEVELS))
def test_every_rank_ends_with_an_error(run: Callable[[Any, int], None], level: int) -> None:
    """Within seconds: the guilty one with its own, the others with what they heard."""
    error, message = WRONG[run]
    ended: list[BaseException] = []

    def on_rank(group: Any) -> None:
        try:
            run(group, level)
        except BaseException as caught:
            ended.append(caught)
            raise

    start = time.monotonic()
    with pytest.raises(error, match=message):
        run_ranks(on_rank, 3)
    assert time.monotonic() - start < SECONDS
    assert len(ended) == 3, [str(e) for e in ended]
    for caught in ended:
        assert isinstance(caught, error | GroupError), caught


@pytest.mark.parametrize("level", [None, 0, 3])
def test_a_moment_of_another_dtype_is_named(level: int | None) -> None:
    """By a note on torch's error: SGD, say, takes a trace of another dtype."""
    step: Any = train_step(lambda p, b, x: (p["w"] * x).sum(), optim.adamw(0.1))
    if level is not None:
        step = shard(step, level=level, group=CountingGroup(2))
    state = step.init({"w": torch.ones(4, requires_grad=True)})
    moved = tree_map(lambda x: x.bfloat16() if x.dim() else x, state.opt_state)
    with pytest.raises(RuntimeError) as error:
        step(state.replace(opt_state=moved), torch.ones(4))
    assert error.value.__notes__ == [
        "A leaf of the optimizer's state has another dtype: path 0.mu.w, expected torch.float32, "
        "got torch.bfloat16. Remedy: convert it."
    ]
