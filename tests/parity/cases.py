"""The trees and the runs that tests of pointwise transforms share."""

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
