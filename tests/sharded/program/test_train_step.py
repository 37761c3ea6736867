"""A training step as a program: the same numbers, to the bit."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from optree import tree_map
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import MismatchError
from functorch_zero.groups import CountingGroup, run_ranks
from functorch_zero.testing.equality import assert_equal_values
from tests.tiers import crossed

LEVELS = [0, 1, 2, 3]
SCALING = fz.LossScale(initial=2.0**12, interval=2)


def build(dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """A loss with BatchNorm, dropout, a metric and a weight, whose batch may have bad rows."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(3, 5, bias=False), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 2)
    )
    policy = fz.Precision(compute=dtype, output=torch.float32)
    apply, params, buffers = fz.functionalize(net, precision={nn.Linear: policy})

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
        predicted, new = apply(params, buffers, batch["x"])
        loss = F.mse_loss(predicted * (1 + batch["bad"]), batch["y"])
        metrics = {"mean": predicted.mean()}
        return loss, fz.Aux(buffers=new, metrics=metrics, weight=batch["weight"].sum())

    return loss_fn, params, buffers


def batch_of(number: int) -> dict[str, Tensor]:
    """Of 12 rows: that of step 2 has a NaN, that of step 4 gradients beyond float16's range."""
    made = torch.Generator().manual_seed(number)
    x, y = (torch.randn(12, width, generator=made) for width in (3, 2))
    bad = torch.zeros(12, 1)
    bad[5] = {2: torch.nan, 4: 1e3}.get(number, 0.0)
    return {"x": x, "y": y, "bad": bad, "weight": torch.rand(12, generator=made) + 0.5}


def run_both(shard: Any, share: Any, dtype: torch.dtype, accumulate: int) -> list[Any]:
    """By step, the training step's and the program's whole states and metrics."""
    loss_fn, params, buffers = build(dtype)
    optimizer = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(0.1))
    rule = {path: path != "3.bias" for path in params}
    trainable = fz.Params(rule, params.units, params.names)
    names = ["grad_norm", "param_norm", "clip_norm", "clip_factor", "learning_rate"]
    if accumulate == 2:
        names.insert(1, "update_norm")
    options = {"accumulate": accumulate, "trainable": trainable}
    train = fz.train_step(loss_fn, optimizer, metrics=names, loss_scale=SCALING, **options)
    found = []
    for step in (shard(train), shard(train)):
        state, seen = step.init(params, buffers, seed=3), []
        for number in range(6):
            state, metrics = step(state, tree_map(share, batch_of(number)))
            whole = step.unshard(state) if hasattr(step, "unshard") else state
            seen.append((*whole.value, metrics))
        found.append(seen)
    return found


def check(train: Any, program: Any) -> None:
    """Equal to the bit, in steps that are looked at (0, 1, 2, 4) and others; skipped are 2 and,
    with float16, 4."""
    for one, other in zip(train, program, strict=True):
        assert_equal_values(one, other, grade="bitwise")
    skipped = [int(finite.skipped) for *_, finite, _ in train]
    assert skipped[:4] == [0, 0, 1, 1]
    moved = [
        not torch.equal(one[0]["0.weight"], other[0]["0.weight"]) for one, other in pairwise(train)
    ]
    assert moved == [True, False, True, skipped[4] == 1, True]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_in_one_process(accumulate: int) -> None:
    check(*run_both(lambda step: step, lambda x: x, torch.float32, accumulate))


CASES = crossed(LEVELS, [2, 3], [1, 2], [torch.float32, torch.float16], n=2)


@pytest.mark.parametrize(("level", "ranks", "accumulate", "dtype"), CASES)
def test_on_ranks(level: int, ranks: int, accumulate: int, dtype: torch.dtype) -> None:
    def run(group: Any) -> list[Any]:
        return run_both(
            lambda step: fz.shard(step, level=level, group=group, donate=True),
            lambda x: x.chunk(group.size)[group.rank],
            dtype,
            accumulate,
        )

    for found in run_ranks(run, ranks):
        check(*found)


ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "norms": {"metrics": ["grad_norm", "param_norm"]},
    "skips": {"nonfinite": "skip", "metrics": ["grad_norm", "update_norm"]},
    "scaled": {"loss_scale": SCALING, "accumulate": 2},
}
SOME = crossed([1, 2, 3], [*ASKED], [True, False], n=2)


@pytest.mark.parametrize(("level", "asked", "donate"), SOME)
def test_a_step_sends_two_messages(level: int, asked: str, donate: bool) -> None:
    """Metrics and words, in steps that are looked at and others; all norms together are one more.
    Units take no all-reduce at these levels."""

    def loss(params: Any, buffers: Any, batch: Tensor) -> Tensor:
        return (batch @ params["w"]).square().mean()

    group, options = CountingGroup(2), ASKED[asked]
    train = fz.train_step(loss, optim.adamw(0.1), **options)
    step = fz.shard(train, level=level, group=group, donate=donate)
    state = step.init({"w": torch.ones(3, 5, requires_grad=True)})
    for _ in range(6):
        group.reset()
        state, _ = step(state, torch.ones(4, 3))
        num = sum(call.kind == "all_reduce" for call in group.calls)
        assert num == 2 + ("metrics" in options)


def test_a_state_that_one_rank_has_changed() -> None:
    """Nothing is sent at the end of a step. What a step is given is in its gradient's words, which
    come before the first write: in a step that isn't looked at (3), too."""
    loss_fn, params, buffers = build(torch.float32)
    train = fz.train_step(loss_fn, optim.adamw(0.1))

    def others(state: Any, name: str) -> Any:
        field = "buffers" if name == "buffer" else name
        changed = tree_map(lambda leaf: leaf * 2, getattr(state, field))
        return state.replace(**{field: changed})

    def run(group: Any) -> None:
        step = fz.shard(train, level=3, group=group, donate=True)
        state, own = step.init(params, buffers, seed=3), None
        for number in range(3):
            own = tree_map(lambda x: x.chunk(group.size)[group.rank], batch_of(number % 2))
            state, _ = step(state, own)
        before = step.unshard(state)
        for name in ("params", "opt_state", "buffer"):
            with pytest.raises(MismatchError, match=rf"is given a state .*{name}.* on rank 0 and"):
                step(others(state, name) if group.rank == 1 else state, own)
            # A rank's other params leave those of the state as they were
            assert_equal_values(before.value, step.unshard(state).value, grade="bitwise")
        step(state, own)

    run_ranks(run, 2)
