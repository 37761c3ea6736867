"""Momentum: a decaying sum, or a running mean, of the updates."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from optree import tree_map
from torch import Tensor

from ..arithmetic import Number, Tree, add_scaled, bias_correction, elementwise, is_zero, number
from ..arithmetic import ema as mean_of
from ..base import Transform, pointwise, step_count, tree_zeros_like
from ..naming import named


class TraceState(NamedTuple):
    """Momentum's accumulator."""

    count: Tensor  # type: ignore[assignment]  # 0-d int64, on the CPU
    trace: Any  # like params: the decaying sum of the updates


@named
def trace(decay: Number, nesterov: bool = False, dampening: Number = 0.0) -> Transform:
    """Momentum: a decaying sum of the updates. torch.optim.SGD's numerics; as optax.trace where
    dampening is 0.

    State: one tensor like params, and a step count.

    Args:
        decay: of the sum, per step (torch's `momentum`).
        nesterov: look one step ahead (Sutskever et al., 2013): updates + decay * trace.
        dampening: the share of each update that is left out of the sum, except the first one's, as
            in torch.
    """

    def init(params: Tree) -> TraceState:
        return TraceState(step_count(), tree_zeros_like(params))

    def update(updates: Tree, state: TraceState, params: Tree) -> tuple[Tree, TraceState]:
        kept = (
            1.0
            if is_zero(dampening)
            else torch.where(state.count == 0, number(1.0), number(1.0 - dampening))
        )
        new = elementwise(lambda t, u: add_scaled(t * decay, u, kept), state.trace, updates)
        if nesterov:
            return elementwise(lambda u, t: add_scaled(u, t, decay), updates, new), TraceState(
                state.count + 1, new
            )
        return tree_map(torch.clone, new), TraceState(state.count + 1, new)

    return pointwise(init, update)


class EmaState(NamedTuple):
    """A running mean of the updates."""

    count: Tensor  # type: ignore[assignment]  # 0-d int64, on the CPU
    ema: Any  # like params: the mean, not corrected for having begun at 0


@named
def ema(decay: Number, debias: bool = True) -> Transform:
    """Replace the updates by their running mean. As optax.ema. State: one tensor like params, and a
    step count.

    Args:
        decay: of the mean, per step.
        debias: divide by `1 - decay**steps`, which the mean lacks for having begun at zero.
    """

    def init(params: Tree) -> EmaState:
        return EmaState(step_count(), tree_zeros_like(params))

    def update(updates: Tree, state: EmaState, params: Tree) -> tuple[Tree, EmaState]:
        count = state.count + 1
        mean = elementwise(lambda m, u: mean_of(m, u, decay), state.ema, updates)
        c = bias_correction(decay, count)
        corrected = elementwise(lambda m: m / c if debias else m.clone(), mean)
        return corrected, EmaState(count, mean)

    return pointwise(init, update)
