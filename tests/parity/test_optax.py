"""Our updates are optax's where torch has no such optimizer: float64, relative 1e-12, eager on the
CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import optree
import pytest
import torch
from optree import tree_map
from torch import Tensor

from functorch_zero import optim
from functorch_zero.optim.local import Local
from functorch_zero.testing.strategies import public_functions
from tests.parity.cases import assert_close, gradients, run, stacked
from tests.tiers import THOROUGH, thinned

jax = pytest.importorskip("jax", reason="optax is the oracle: pip install functorch-zero[test]")
optax = pytest.importorskip("optax", reason="optax is the oracle: pip install functorch-zero[test]")
contrib = pytest.importorskip("optax.contrib")

LR = 0.1
STEPS = 5
RATE = optim.linear_schedule(0.2, 0.05, 4)


def optax_line(first: float, last: float, steps: int) -> Any:
    """A line in float64: of an int32 count, optax's own schedules are float32."""
    return lambda count: (
        first + (last - first) * jax.numpy.clip(count.astype(jax.numpy.float64) / steps, 0, 1)
    )


OPTAX_RATE, OPTAX_WARMUP = optax_line(0.2, 0.05, 4), optax_line(0.0, LR, 3)


@pytest.fixture(autouse=True)
def float64_in_jax() -> Iterator[None]:
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_disable_most_optimizations", True)  # compiles in half the time
    yield
    jax.config.update("jax_enable_x64", before)


def params_of_two_leaves() -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    return {
        "matrix": torch.randn(3, 5, generator=g, dtype=torch.float64),
        "scale": torch.tensor(0.7).double(),
    }


ROWS: dict[str, tuple[Callable[[], optim.Transform], Callable[[], Any]]] = {
    "adam, eps_root": (
        lambda: optim.adam(LR, eps_root=1e-3),
        lambda: optax.adam(LR, eps_root=1e-3),
    ),
    "adamw, schedule, mask": (
        lambda: optim.adamw(RATE, weight_decay=0.1, mask={"matrix": True, "scale": False}),
        lambda: optax.adamw(OPTAX_RATE, weight_decay=0.1, mask={"matrix": True, "scale": False}),
    ),
    "adamaxw": (
        lambda: optim.contrib.adamaxw(LR, weight_decay=0.1),
        lambda: optax.adamaxw(LR, weight_decay=0.1),
    ),
    "radam": (
        lambda: optim.radam(LR, b2=0.6, eps_root=1e-3),
        lambda: optax.radam(LR, b2=0.6, eps_root=1e-3),
    ),
    "rmsprop": (
        lambda: optim.rmsprop(
            LR, 0.9, initial_scale=0.5, eps_in_sqrt=True, momentum=0.8, nesterov=True
        ),
        lambda: optax.rmsprop(LR, 0.9, initial_scale=0.5, momentum=0.8, nesterov=True),
    ),
    "rmsprop, centred, corrected": (
        lambda: optim.rmsprop(LR, 0.9, 1e-3, eps_in_sqrt=True, centered=True, bias_correction=True),
        lambda: optax.rmsprop(LR, 0.9, 1e-3, centered=True, bias_correction=True),
    ),
    "adadelta": (
        lambda: optim.adadelta(1.0, weight_decay=0.1),
        lambda: optax.adadelta(1.0, weight_decay=0.1),
    ),
    "sign_sgd": (lambda: optim.contrib.sign_sgd(LR), lambda: optax.sign_sgd(LR)),
    "lion": (
        lambda: optim.lion(RATE, weight_decay=0.1),
        lambda: optax.lion(OPTAX_RATE, weight_decay=0.1),
    ),
    "adabelief": (lambda: optim.contrib.adabelief(LR), lambda: optax.adabelief(LR)),
    "yogi": (lambda: optim.contrib.yogi(LR), lambda: optax.yogi(LR)),
    "ademamix": (
        lambda: optim.contrib.ademamix(LR, b3=RATE, alpha=RATE, eps_root=1e-3, weight_decay=0.1),
        lambda: contrib.ademamix(
            LR, b3=OPTAX_RATE, alpha=OPTAX_RATE, eps_root=1e-3, weight_decay=0.1
        ),
    ),
    "schedule_free_sgd": (
        lambda: optim.schedule_free_sgd(LR, 3, weight_decay=0.1, weight_lr_power=1.5),
        lambda: contrib.schedule_free(
            optax.chain(optax.add_decayed_weights(0.1), optax.sgd(OPTAX_WARMUP)),
            OPTAX_WARMUP,
            weight_lr_power=1.5,
        ),
    ),
    "schedule_free_adamw": (
        lambda: optim.schedule_free_adamw(LR, 3, weight_decay=0.1),
        lambda: contrib.schedule_free(
            optax.chain(
                optax.scale_by_rms(0.999, 1e-8, eps_in_sqrt=False, bias_correction=True),
                optax.add_decayed_weights(0.1),
                optax.scale_by_learning_rate(OPTAX_WARMUP),
            ),
            OPTAX_WARMUP,
        ),
    ),
    "ema": (lambda: optim.ema(0.9), lambda: optax.ema(0.9)),
    "trace": (lambda: optim.trace(0.9, nesterov=True), lambda: optax.trace(0.9, nesterov=True)),
    "clip": (lambda: optim.clip(0.5), lambda: optax.clip(0.5)),
    "multi_steps": (
        lambda: optim.multi_steps(optim.adam(LR), 2),
        lambda: optax.MultiSteps(optax.adam(LR), 2, accumulator_dtype=np.float64),
    ),
    "inject_hyperparams": (
        lambda: optim.inject_hyperparams(optim.adamw)(RATE, b1=0.8, weight_decay=0.1),
        lambda: optax.inject_hyperparams(optax.adamw)(OPTAX_RATE, b1=0.8, weight_decay=0.1),
    ),
    "partition": (
        lambda: optim.partition(
            {"a": optim.adam(LR), "b": optim.sgd(LR)}, {"matrix": "a", "scale": "b"}
        ),
        lambda: optax.partition(
            {"a": optax.adam(LR), "b": optax.sgd(LR)}, {"matrix": "a", "scale": "b"}
        ),
    ),
    "freeze": (
        lambda: optim.chain(optim.sgd(LR), optim.freeze({"matrix": False, "scale": False})),
        lambda: optax.chain(optax.sgd(LR), optax.freeze({"matrix": False, "scale": False})),
    ),
}


def optax_updates(transform: Any, params: Any, grads: list[Any]) -> list[Any]:
    p = tree_map(lambda x: jax.numpy.asarray(x.numpy()), params)
    # Compiled as one it is quicker than by operator
    state, update = (
        transform.init(p),
        jax.jit(transform.update),
    )
    history = []
    for grad in grads:
        updates, state = update(tree_map(lambda x: jax.numpy.asarray(x.numpy()), grad), state, p)
        p = optax.apply_updates(p, updates)
        history.append(tree_map(lambda x: torch.from_numpy(np.array(x)), updates))
    return history


@pytest.mark.parametrize("name", thinned(ROWS, 20))
def test_updates_are_optaxs(name: str) -> None:
    ours, theirs = ROWS[name]
    params = params_of_two_leaves()
    grads = gradients(params, STEPS)
    got, _, _ = run(ours(), params, grads)
    assert_close(stacked(got), stacked(optax_updates(theirs(), params, grads)))


@THOROUGH
def test_reduce_on_plateau_is_optaxs() -> None:
    """optax is given the metric with the updates; ours between steps."""
    options: dict[str, Any] = dict(
        factor=0.5, patience=2, rtol=0.1, cooldown=2, accumulation_size=2, min_scale=0.1
    )
    values = [
        5.0,
        5,
        4,
        4,
        4,
        4,
        4,
        4,
        3.9,
        3.8,
        4,
        4,
        4,
        4,
        1,
        1,
        2,
        3,
        4,
        5,
        6,
        7,
        8,
        9,
        9,
        9,
        9,
        9,
        9,
        9,
    ]
    theirs, ours = contrib.reduce_on_plateau(**options), optim.reduce_on_plateau(**options)
    params = {"a": torch.ones(2, dtype=torch.float64)}
    one = {"a": jax.numpy.ones(2)}
    state, optax_state = (ours.init(params, Local(params)),), theirs.init(one)
    update, scales = jax.jit(theirs.update), []
    for value in values:
        expected, optax_state = update(one, optax_state, one, value=value)
        state = optim.observe(state, value)
        got, inner = ours.update(params, state[0], params, Local(params))
        state = (inner,)
        scales.append(got["a"][0].item())
        assert scales[-1] == pytest.approx(float(expected["a"][0]), rel=1e-12)
    assert len(set(scales)) > 3, "the scale hardly changed"


def test_apply_if_finite_is_optaxs() -> None:
    params = params_of_two_leaves()
    ours, theirs = (
        optim.apply_if_finite(optim.adam(LR), 2),
        optax.apply_if_finite(optax.adam(LR), 2),
    )
    grads = gradients(params, 8)
    for i in (1, 4, 5, 6):
        grads[i]["matrix"][1, 2] = math.nan if i % 2 else math.inf
    got, _, state = run(ours, params, grads)
    for i, (a, b) in enumerate(zip(got, optax_updates(theirs, params, grads), strict=True)):
        for x, y in zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True):
            assert torch.allclose(x, y, rtol=1e-12, atol=0, equal_nan=True)
            assert (x == 0).all() if i in (1, 4, 5) else (x != 0).any()
    assert state.total_notfinite == 4  # the third in a row has passed


@THOROUGH
def test_added_noise_has_optaxs_variance() -> None:
    """Step by step; the numbers themselves are others."""
    zeros = {"w": torch.zeros(100_000, dtype=torch.float64)}
    ours, theirs = optim.add_noise(0.3, 0.55), optax.add_noise(0.3, 0.55, key=0)
    got, _, _ = run(ours, zeros, [zeros] * 3)
    for a, b in zip(got, optax_updates(theirs, zeros, [zeros] * 3), strict=True):
        # Each is known to 0.45%
        assert abs(a["w"].var() / b["w"].var() - 1) < 0.025


SCHEDULES: list[tuple[str, tuple[Any, ...]]] = [
    ("constant_schedule", (0.3,)),
    ("polynomial_schedule", (1.0, 0.1, 2.0, 7, 2)),
    ("linear_schedule", (0.0, 1.0, 5)),
    ("linear_schedule", (0.3, 1.0, 0)),
    ("exponential_decay", (1.0, 4, 0.5, 2, True, 0.2)),
    ("exponential_decay", (1.0, 4, 1.5, 1, False, 2.0)),
    ("cosine_decay_schedule", (2.0, 9, 0.1, 1.3)),
    ("warmup_constant_schedule", (0.0, 1.0, 4)),
    ("warmup_cosine_decay_schedule", (0.1, 1.0, 4, 12, 0.05, 1.5)),
    ("warmup_exponential_decay_schedule", (0.0, 1.0, 4, 3, 0.7, 1, True, 0.1)),
    ("piecewise_constant_schedule", (1.0, {3: 0.5, 7: 0.1})),
    ("piecewise_interpolate_schedule", ("linear", 1.0, {3: 0.5, 7: 0.1})),
    ("piecewise_interpolate_schedule", ("cosine", 1.0, {3: 0.5, 7: 3.0})),
    ("linear_onecycle_schedule", (14, 1.0)),
    ("cosine_onecycle_schedule", (14, 1.0)),
    (
        "sgdr_schedule",
        (
            [
                dict(init_value=0.0, peak_value=1.0, warmup_steps=2, decay_steps=6),
                dict(init_value=0.1, peak_value=0.5, warmup_steps=1, decay_steps=7),
            ],
        ),
    ),
]


@pytest.mark.parametrize(("name", "args"), thinned(SCHEDULES, rows=True))
def test_schedules_are_optaxs(name: str, args: tuple[Any, ...]) -> None:
    ours, theirs = public_functions()[name](*args), getattr(optax, name)(*args)
    for count in range(17):
        value: Tensor = ours(torch.tensor(count))
        assert value.dtype == torch.float64 and value.shape == ()
        assert value.item() == pytest.approx(float(theirs(count)), rel=1e-12, abs=1e-15)
        assert value == ours(count), "an int and a tensor differ"
