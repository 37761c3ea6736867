"""Momentum: a decaying sum (`trace`), or a running mean (`ema`), of the updates.

Both are pointwise and keep one tensor like each param, so neither communicates.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from optree import tree_map
from torch import Tensor

from ..arithmetic import Number, Tree, add_scaled, bias_correction, elementwise, is_zero, number
from ..arithmetic import ema as mean_of
from ..base import Transform, pointwise
from ..naming import named
from ..states import zeros


class TraceState(NamedTuple):
    """Momentum's accumulator."""

    count: Tensor  # type: ignore[assignment]  # 0-d int64, on the CPU
    trace: Any  # like params: the decaying sum of the updates


@named
def trace(decay: Number, nesterov: bool = False, dampening: Number = 0.0) -> Transform:
    """Momentum: replace the updates g by their decaying sum.

        trace = decay * trace + (1 - dampening) * g    (in the first step trace = g)
        update = trace, with nesterov g + decay * trace

    Source: torch.optim.SGD; as optax.trace where dampening is 0. Nesterov's look ahead is in the
    form of Sutskever et al., 2013.

    Needs: pointwise. State: 1 tensor like params, and a step count.

    Args:
        decay: of the sum, per step (torch's `momentum`).
        nesterov: look one step ahead.
        dampening: the share of each update that is left out of the sum, except of the first one, as
            in torch.
    """

    def share_of_update(count: Tensor) -> Number:
        # A number: then a step reads no count at all
        if is_zero(dampening):
            return 1.0
        # A condition on a tensor: no value is read on the host
        return torch.where(count == 0, number(1.0), number(1.0 - dampening))

    def update(updates: Tree, state: TraceState, params: Tree) -> tuple[Tree, TraceState]:
        share = share_of_update(state.count)
        # The trace was zeros, so in the first step it becomes g, as torch begins
        new = elementwise(lambda t, g: add_scaled(t * decay, g, share), state.trace, updates)
        if nesterov:
            directions = elementwise(lambda g, t: add_scaled(g, t, decay), updates, new)
        else:
            # A copy: later links may write over the updates, and the state must not follow
            directions = tree_map(torch.clone, new)
        return directions, TraceState(state.count + 1, new)

    return pointwise(zeros(TraceState), update)


class EmaState(NamedTuple):
    """A running mean of the updates."""

    count: Tensor  # type: ignore[assignment]  # 0-d int64, on the CPU
    ema: Any  # like params: the mean, not corrected for having begun at 0


@named
def ema(decay: Number, debias: bool = True) -> Transform:
    """Replace the updates g by their running mean. As optax.ema.

        ema = decay * ema + (1 - decay) * g
        update = ema / (1 - decay**t)    (t: the number of this step, from 1)

    Needs: pointwise. State: 1 tensor like params, and a step count.

    Args:
        decay: of the mean, per step.
        debias: divide by `1 - decay**t`, which the mean lacks for having begun at zero.
    """

    def update(updates: Tree, state: EmaState, params: Tree) -> tuple[Tree, EmaState]:
        count = state.count + 1
        mean = mean_of(state.ema, updates, decay)
        if debias:
            # The state keeps the uncorrected mean, from which the next one is made
            correction = bias_correction(decay, count)
            directions = elementwise(lambda m: m / correction, mean)
        else:
            # A copy: later links may write over the updates, and the state must not follow
            directions = tree_map(torch.clone, mean)
        return directions, EmaState(count, mean)

    return pointwise(zeros(EmaState), update)
