"""Levels by leaf and meshes of two axes with precision, recomputation, deferred values, and running means."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optree import tree_leaves
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.groups import HybridGroup, run_ranks
from functorch_zero.testing import assert_sharded_equals_unsharded
from tests.test_parts import Adapted, is_adapter, make_batches

PLACES: dict[str, dict[str, Any]] = {
    "several levels": {"level": {"": 3, "*.down": 1, "*.up": 0, "1": 2}},
    "two axes": {"level": 3, "shard_axis": 2},
    "state over both": {"level": 3, "shard_axis": 2, "cut_state_over": "both"},
    "several levels, state over both": {
        "level": {"": 3, "*.down": 1, "*.up": 0},
        "shard_axis": 2,
        "cut_state_over": "both",
    },
}
OPTIONS: dict[str, dict[str, Any]] = {
    "remat": {"remat": True},
    "bfloat16": {"precision": fz.Precision(compute=torch.bfloat16, output=torch.float32)},
    "bfloat16, remat": {"precision": fz.Precision(compute=torch.bfloat16, output=torch.float32), "remat": True},
}


def make(trainable: Any = None, optimizer: Any = None, **options: Any) -> tuple[Any, Any, Any]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        apply, params, buffers = fz.functionalize(nn.Sequential(*(Adapted() for _ in range(3))), **options)

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
        return (apply(params, buffers, batch["x"])[0] - batch["y"]).square().mean()

    return fz.train_step(loss_fn, optimizer or optim.adamw(0.01), trainable=trainable), params, buffers


def floats(num: int = 2, rows: int = 12) -> list[dict[str, Tensor]]:
    return [{name: x.float() for name, x in batch.items()} for batch in make_batches(num, rows)]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("option", OPTIONS)
def test_with_precision_and_recomputation(option: str, place: str) -> None:
    settings = dict(PLACES[place])
    level = settings.pop("level")
    step, params, buffers = make(is_adapter, optim.sgd(0.1, momentum=0.9), **OPTIONS[option])
    assert_sharded_equals_unsharded(
        step, params, buffers, floats(), levels=(level,), ranks=(4,), per_rank=True, **settings
    )


def on_ranks(place: str, run: Any, **others: Any) -> list[Any]:
    """`run(shard)` on 4 ranks, where `shard(step)` puts things in that place."""
    settings = PLACES[place] | others
    axis = settings.pop("shard_axis", None)

    def on_a_rank(group: Any) -> Any:
        mesh = group if axis is None else HybridGroup(group, shard=axis)
        return run(lambda step: fz.shard(step, group=mesh, **settings))

    return run_ranks(on_a_rank, 4)


@pytest.mark.parametrize("place", PLACES)
def test_running_means_are_evaluated_and_states_described(place: str) -> None:
    step, params, buffers = make(None, optim.params_ema(optim.adamw(0.01), decay=0.9))
    check = fz.eval_step(lambda p, b, batch: {"loss": step.loss_fn(p, b, batch)}, params=optim.ema_params)
    (batch,) = floats(1)
    state, _ = step(step.init(params, buffers), batch)
    expected = check(state, batch)["loss"]

    def run(shard: Any) -> tuple[Tensor, int, int]:
        sharded, evaluation = shard(step), shard(check)
        n = sharded.group.size
        share = {name: x.chunk(n)[sharded.group.rank] for name, x in batch.items()}
        state, _ = sharded(sharded.init(params, buffers), share)
        held = sum(leaf.nbytes for leaf in tree_leaves(state.params))
        return evaluation(state, share)["loss"], held, len(str(sharded.describe(state)))

    for loss, held, words in on_ranks(place, run):
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
        assert held < sum(leaf.nbytes for leaf in params.values()) and words


@pytest.mark.parametrize("place", PLACES)
def test_deferred_values(place: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    apply, params, buffers = fz.functionalize(model)
    values = fz.deferred(model, seed=3)
    step = fz.train_step(lambda p, b, x: apply(p, b, x)[0].square().mean(), optim.adamw(0.01))
    expected = step.init(params, buffers, values=values).params

    def run(shard: Any) -> Any:
        sharded = shard(step)
        return sharded.gather(sharded.init(params, buffers, values=values)).params

    found = on_ranks(place, run, **({"level": {"": 3, "*.bias": 0}} if "levels" in place else {}))
    for got in found:
        assert all(torch.equal(got[path], leaf) for path, leaf in expected.items())
