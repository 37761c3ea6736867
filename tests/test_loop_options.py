"""The options of a loop in any combination: sharded = unsharded, and options that change no number change none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from functorch_zero import optim
from functorch_zero.deferred import deferred
from functorch_zero.evaluation import eval_step
from functorch_zero.functional import functionalize
from functorch_zero.groups import ProcessGroup, launch, run_ranks
from functorch_zero.shard import shard
from functorch_zero.step import Aux, TrainStep, train_step
from functorch_zero.testing.models import GPT, Block
from functorch_zero.testing.models import gpt as gpt_case
from tests.compare import Run, assert_close, assert_equal_updates, assert_same_on_all_ranks
from tests.models import split

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's compiler looks at it
ROWS, SIZES = 9, {2: [4, 5], 3: [2, 3, 4]}  # of a batch; of each rank's part, by the number of ranks
MIXED = {"": 3, "blocks.0": 1, "blocks.1": 0}
METRICS = ["grad_norm", "update_norm", "param_norm", "learning_rate"]

# How each option may be set, the first way being without it.
OPTIONS: dict[str, tuple[Any, ...]] = {
    "remat": (False, True, Block),
    "compile": (False, Block),
    "deferred": (False, True),
    "metrics": ((), tuple(METRICS)),
    "ema": (False, True),
    "accumulate": (1, 2),
    "frozen": (False, True),
    "optimizer": ("adamw", "clip + lamb"),
}
SHARDING: dict[str, tuple[Any, ...]] = {
    "level": (3, 0, 1, 2, MIXED), "donate": (True, False), "reshard_after_forward": (True, False)
}  # fmt: skip
NEUTRAL = ("remat", "compile", "metrics", "ema")  # these change no number of a step in one process


def optimizer(name: str, ema: bool) -> Any:
    rate = optim.linear_schedule(0.02, 0.01, 5)
    made = optim.adamw(rate) if name == "adamw" else optim.chain(optim.clip_by_global_norm(0.1), optim.lamb(rate))
    return optim.params_ema(made, 0.5) if ema else made


def build(**options: Any) -> Any:
    """(step, eval step, params, buffers, values)."""
    o = SimpleNamespace(**options)
    with torch.device("meta" if o.deferred else "cpu"), torch.random.fork_rng():
        torch.manual_seed(0)
        model: nn.Module = GPT(11, 6, 2, 2, 5, True).double()
    how = {"compile_options": {"backend": "eager"}} if o.compile else {}
    apply, params, buffers = functionalize(model, units=Block, remat=o.remat, compile=o.compile, **how)
    criterion = gpt_case().criterion

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
        output, new = apply(params, buffers, batch["x"])
        return criterion(output, batch), Aux(buffers=new, weight=len(batch["x"]))

    step = train_step(
        loss_fn,
        optimizer(o.optimizer, o.ema),
        trainable=(lambda path, leaf: not path.startswith("blocks.0.up")) if o.frozen else None,
        accumulate=o.accumulate,
        metrics=o.metrics,
    )
    of_batch = lambda p, b, batch: Aux(metrics={"loss": loss_fn(p, b, batch)[0]}, weight=len(batch["x"]))
    return (
        step,
        eval_step(of_batch, params=optim.ema_params if o.ema else None),
        params,
        buffers,
        deferred(model, 5) if o.deferred else None,
    )


def run(made: Any, group: Any = None, **sharding: Any) -> Run:
    """Two steps, an evaluation after each."""
    step, evaluate, params, buffers, values = made
    if group is not None:
        step, evaluate = (shard(s, group=group, **sharding) for s in (step, evaluate))
    whole = (lambda state: state) if isinstance(step, TrainStep) else step.gather
    state = step.init(params, buffers, values=values)
    states, seen = [whole(state)], []
    for batch in gpt_case().batches(2, ROWS):
        own = batch if group is None else split(batch, SIZES[group.size])[group.rank]
        state, metrics = step(state, own)
        states.append(whole(state))
        seen.append(metrics | {"evaluated": evaluate(state, own)["loss"]})
    return Run(states, seen)


def check(options: dict[str, Any], sharding: dict[str, Any], ranks: int) -> None:
    torch._dynamo.reset()
    expected = run(build(**options))
    runs = run_ranks(lambda group: run(build(**options), group, **sharding), ranks)
    assert_same_on_all_ranks(runs)
    assert_equal_updates(expected, runs[0])
    plain = run(build(**options | {name: OPTIONS[name][0] for name in NEUTRAL}))
    for want, have in zip(plain.states, expected.states, strict=True):
        assert_close(*({k: p.detach() for k, p in s.params.items()} for s in (want, have)), 1e-12, "params")


@settings(max_examples=8)
@given(st.data())
def test_pairs(data: st.DataObject) -> None:
    """Two options, or three, at a drawn level."""
    default = {name: ways[0] for name, ways in OPTIONS.items()}
    names = data.draw(st.lists(st.sampled_from(sorted(OPTIONS)), min_size=2, max_size=3, unique=True), "options")
    options = default | {name: data.draw(st.sampled_from(OPTIONS[name][1:]), name) for name in names}
    sharding = {name: data.draw(st.sampled_from(ways), name) for name, ways in SHARDING.items()}
    check(options, sharding, data.draw(st.sampled_from([2, 3]), "ranks"))


@pytest.mark.parametrize("level", SHARDING["level"], ids=str)
def test_everything_together(level: Any) -> None:
    check({name: ways[-1] for name, ways in OPTIONS.items()}, {"level": level}, 2)


def test_on_processes() -> None:
    options = {name: ways[-1] for name, ways in OPTIONS.items()} | {"compile": False}
    expected = run(build(**options))
    runs = launch(
        lambda: [run(build(**options), ProcessGroup(), level=level) for level in (1, 3)],
        2,
        start_method="fork",
        timeout=100,
    )
    for both in zip(*runs, strict=True):
        assert_same_on_all_ranks(both)
        assert_equal_updates(expected, both[0])
