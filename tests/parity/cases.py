"""The trees and the rows that tests of pointwise transforms share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from optree import tree_map
from torch import Tensor

from functorch_zero import optim
from functorch_zero.optim.local import Local

NUM_STEPS = 6


def hostile_tree(dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, Any]:
    """Leaves of every kind: 0-d, 1-D, empty, a matrix, a convolution kernel, None, one in another
    memory order."""
    g = torch.Generator().manual_seed(seed)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)

    return {
        "kernel": make(3, 2, 5, 7),
        "layers": [
            {"weight": make(37, 11), "bias": make(37)},
            {"weight": make(1, 3), "bias": None},
        ],
        "scale": make(),
        "nothing": make(0, 4),
        "turned": make(6, 9).t(),
    }


def gradients(params: Any, num_steps: int = NUM_STEPS, seed: int = 1) -> list[Any]:
    """Different gradients for each step."""
    g = torch.Generator().manual_seed(seed)
    return [
        tree_map(
            lambda p: torch.randn(p.shape, generator=g, dtype=torch.float64).to(p.dtype), params
        )
        for _ in range(num_steps)
    ]


def run(
    transform: optim.Transform, params: Any, grads: Sequence[Any]
) -> tuple[list[Any], Any, Any]:
    """The updates of every step, the last params and the last state; params move by the updates."""
    across = Local(params)
    state = transform.init(params, across)
    history = []
    for grad in grads:
        updates, state = transform.update(grad, state, params, across)
        params = tree_map(lambda p, u: p + u, params, updates)
        history.append(updates)
    return history, params, state


def assert_close(got: Any, expected: Any, rtol: float = 1e-12) -> None:
    """Every leaf of `expected` is somewhere non-zero, and `got` is as near to it, relative to its
    largest element."""
    assert optree.tree_structure(got) == optree.tree_structure(expected)
    for path, a, b in zip(
        optree.tree_paths(expected),
        optree.tree_leaves(got),
        optree.tree_leaves(expected),
        strict=True,
    ):
        assert a.shape == b.shape and a.dtype == b.dtype, path
        if b.numel():
            assert b.abs().max() > 0, f"{path}: the reference does nothing"
            assert (a - b).abs().max() <= rtol * b.abs().max(), path


def stacked(history: Sequence[Any]) -> Any:
    """All steps' updates in one tree; an update that happens to be small is then held to the size
    of the others."""
    return tree_map(lambda *steps: torch.stack(steps), *history)


def decayed_matrices(path: str, leaf: Tensor) -> bool:
    """A mask: matrices and larger."""
    return leaf.ndim >= 2


Schedule = Callable[[Any], Any]
RATE: Schedule = optim.warmup_cosine_decay_schedule(0.05, 0.3, 2, NUM_STEPS + 1, 0.01)

# Every pointwise optimizer and transform by name, with a schedule and weight decay where they take
# one.
POINTWISE: dict[str, Callable[[], optim.Transform]] = {
    "sgd": lambda: optim.sgd(RATE, weight_decay=0.1),
    "sgd momentum": lambda: optim.sgd(RATE, 0.9, weight_decay=0.1),
    "sgd nesterov": lambda: optim.sgd(RATE, 0.9, nesterov=True),
    "sgd dampening": lambda: optim.sgd(RATE, 0.9, dampening=0.3),
    "adam": lambda: optim.adam(RATE, weight_decay=0.1),
    "adam eps_root": lambda: optim.adam(RATE, eps_root=1e-6),
    "adamw": lambda: optim.adamw(RATE, weight_decay=0.1),
    "amsgrad": lambda: optim.amsgrad(RATE, weight_decay=0.1),
    "adamax": lambda: optim.adamax(RATE, weight_decay=0.1),
    "adamaxw": lambda: optim.contrib.adamaxw(RATE, weight_decay=0.1),
    "nadam": lambda: optim.nadam(RATE, weight_decay=0.1),
    "nadamw": lambda: optim.contrib.nadamw(RATE, weight_decay=0.1),
    "radam": lambda: optim.radam(RATE, b2=0.6, weight_decay=0.1),
    "adagrad": lambda: optim.adagrad(RATE, lr_decay=0.1, weight_decay=0.1),
    "adadelta": lambda: optim.adadelta(RATE, weight_decay=0.1),
    "rmsprop": lambda: optim.rmsprop(RATE, weight_decay=0.1),
    "rmsprop centred": lambda: optim.rmsprop(RATE, centered=True, momentum=0.9, nesterov=True),
    "rmsprop optax": lambda: optim.rmsprop(
        RATE, 0.9, initial_scale=1.0, eps_in_sqrt=True, bias_correction=True
    ),
    "rprop": lambda: optim.contrib.rprop(0.01),
    "sign_sgd": lambda: optim.contrib.sign_sgd(RATE),
    "lion": lambda: optim.lion(RATE, weight_decay=0.1),
    "adabelief": lambda: optim.contrib.adabelief(RATE),
    "yogi": lambda: optim.contrib.yogi(RATE),
    "ademamix": lambda: optim.contrib.ademamix(
        RATE, b3=optim.linear_schedule(0.9, 0.99, 4), weight_decay=0.1
    ),
    "schedule_free_sgd": lambda: optim.schedule_free_sgd(0.3, warmup_steps=2, weight_decay=0.1),
    "schedule_free_adamw": lambda: optim.schedule_free_adamw(0.3, warmup_steps=2, weight_decay=0.1),
    "trace": lambda: optim.trace(0.9),
    "ema": lambda: optim.ema(0.9),
    "ema biased": lambda: optim.ema(0.9, debias=False),
    "clip": lambda: optim.clip(0.5),
    "nan_to_num": lambda: optim.nan_to_num(1.0, 2.0, 3.0),
    "scale_by_schedule": lambda: optim.scale_by_schedule(RATE),
    "lookahead": lambda: optim.lookahead(optim.sgd(RATE, 0.9), 2, 0.5),
    "params_ema": lambda: optim.params_ema(optim.adam(RATE), 0.9),
    "named_chain": lambda: optim.named_chain(("clip", optim.clip(1.0)), ("adam", optim.adam(RATE))),
    "inject_hyperparams": lambda: optim.inject_hyperparams(optim.adamw)(
        RATE, b1=0.8, weight_decay=0.1
    ),
    "inject_hyperparams all": lambda: optim.inject_hyperparams(optim.rmsprop)(
        0.1, initial_scale=0.1, momentum=0.9, centered=True, weight_decay=0.1
    ),
    "inject_hyperparams sgd": lambda: optim.inject_hyperparams(optim.sgd)(
        RATE, momentum=0.9, dampening=0.3
    ),
    "inject_hyperparams nadam": lambda: optim.inject_hyperparams(optim.nadam)(RATE),
    "inject_hyperparams radam": lambda: optim.inject_hyperparams(optim.radam)(RATE, b2=0.6),
    "inject_hyperparams yogi": lambda: optim.inject_hyperparams(optim.contrib.yogi)(RATE),
    "inject_hyperparams rprop": lambda: optim.inject_hyperparams(optim.contrib.rprop)(0.01),
    "inject_hyperparams adagrad": lambda: optim.inject_hyperparams(optim.adagrad)(
        0.1, lr_decay=0.1
    ),
    "inject_hyperparams ademamix": lambda: optim.inject_hyperparams(optim.contrib.ademamix)(RATE),
    "inject_hyperparams lion": lambda: optim.inject_hyperparams(optim.lion)(RATE),
    "inject_hyperparams clip": lambda: optim.inject_hyperparams(optim.clip)(0.5),
    "inject_hyperparams free": lambda: optim.inject_hyperparams(optim.schedule_free_sgd)(
        0.1, warmup_steps=2
    ),
    "reduce_on_plateau": lambda: optim.chain(optim.adam(RATE), optim.reduce_on_plateau()),
    "from_torch": lambda: optim.from_torch(torch.optim.Adamax, lr=0.1, weight_decay=0.1),
}
