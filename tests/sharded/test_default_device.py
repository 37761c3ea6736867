"""Under a default device of the user's, which is another than the params': the library makes its
own numbers on the CPU, and beside tensors that it is given. "meta" stands for a GPU: whatever is
made there has no values, and can't be read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import functorch_zero as fz
from functorch_zero import checkpoint, optim
from functorch_zero.groups import run_ranks
from tests.tiers import crossed

PARAMS = {
    "matrix": torch.linspace(-1, 1, 24).view(6, 4).requires_grad_(),
    "vector": torch.linspace(0, 1, 4).requires_grad_(),
}
X = torch.linspace(-2, 2, 24).view(4, 6)

OPTIMIZERS: dict[str, Callable[[], optim.Transform]] = {
    "adamw": lambda: optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(1e-2)),
    "adafactor": lambda: optim.adafactor(1e-2, min_dim_size_to_factor=2),
    "shampoo": lambda: optim.shampoo(1e-2),
    "schedule": lambda: optim.sgd(optim.cosine_decay_schedule(1e-2, 5), momentum=0.9),
    "apply_if_finite": lambda: optim.apply_if_finite(optim.lamb(1e-2), 3),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"loss_scale": fz.LossScale(initial=8.0), "nonfinite": "skip"},
    "accumulated": {"accumulate": 2, "metrics": ("grad_norm", "update_norm")},
}


def loss_fn(params: Any, buffers: Any, x: Tensor) -> Any:
    out = x @ params["matrix"] + params["vector"]
    return out.square().mean(), fz.Aux(metrics={"rows": len(x)}, weight=len(x))


def evaluate(params: Any, buffers: Any, x: Tensor) -> Any:
    return fz.Aux(metrics={"rows": len(x)}, weight=len(x))


def trained(optimizer: str, options: str, group: Any, level: int | None) -> Any:
    """The states and metrics of two steps, whole, with the evaluation's."""
    step: Any = fz.train_step(loss_fn, OPTIMIZERS[optimizer](), **OPTIONS[options])
    evaluation: Any = fz.eval_step(evaluate)
    x = X
    if level is not None:
        step = fz.shard(step, level=level, group=group)
        evaluation = fz.shard(evaluation, level=level, group=group)
        x = X.chunk(group.size)[group.rank]
    state = step.init(PARAMS, {}, seed=3)
    counters = [state.step, state.seed]
    found: list[Any] = []
    for _ in range(2):
        state, metrics = step(state, x)
        found += [metrics, evaluation(state, x)]
    assert all(x.device.type == "cpu" for x in [*counters, state.step, state.seed])
    return found, state if level is None else step.unshard(state)


def values(tree: Any) -> list[Any]:
    return [x.tolist() if isinstance(x, Tensor) else x for x in optree.tree_leaves(tree)]


@pytest.mark.parametrize(
    ("optimizer", "options", "level"), crossed([*OPTIMIZERS], [*OPTIONS], [None, 0, 3], quick=1)
)
def test_training(optimizer: str, options: str, level: int | None) -> None:
    def run(group: Any, context: Any) -> Any:
        with context:
            return values(trained(optimizer, options, group, level))

    if level is None:
        plain = run(None, contextlib.nullcontext())
        assert run(None, torch.device("meta")) == plain
        return
    plain = run_ranks(lambda group: run(group, contextlib.nullcontext()), 2)
    assert run_ranks(lambda group: run(group, torch.device("meta")), 2) == plain


def test_a_loop() -> None:
    def run(group: Any) -> bool:
        with torch.device("meta"):
            return fz.any_rank(group.rank == 1, group)

    assert run_ranks(run, 2) == [True, True]


def test_saves(tmp_path: Path) -> None:
    step = fz.train_step(loss_fn, optim.adamw(1e-2))
    with torch.device("meta"):
        state, _ = step(step.init(PARAMS, {}), X)
        checkpoint.save(tmp_path, step, state)
        loaded = checkpoint.load(tmp_path, step, like=step.init(PARAMS, {})).state
    assert values(loaded) == values(state)
