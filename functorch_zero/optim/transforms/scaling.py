"""Pointwise transforms without a mean of squares: scalings, clips, decay, momentum.

Each result depends on the values at one position only, so none of these communicates. Where "state"
is not mentioned there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from optree import tree_map
from torch import Tensor

from ..arithmetic import (
    Number,
    Tree,
    add_scaled,
    add_scaled_,
    bias_correction,
    clamp,
    elementwise,
    is_zero,
    number,
)
from ..arithmetic import ema as mean_of
from ..base import (
    EmptyState,
    Schedule,
    Transform,
    Update,
    init_empty,
    pointwise,
    step_count,
    tree_zeros_like,
    value_of,
)
from ..naming import named
from ..states import CountState as CountState
from ..states import ScaleByLearningRateState
from ..states import init_count as init_count
from ..wrappers.masking import Mask, masked


@named
def identity() -> Transform:
    """Leave updates as they are. As optax.identity."""

    def update(updates: Tree, state: EmptyState, params: Tree) -> tuple[Tree, EmptyState]:
        return updates, state

    return pointwise(init_empty, update)


@named
def set_to_zero() -> Transform:
    """Make every update zero, so that the params stay as they are. As optax.set_to_zero."""

    def update(updates: Tree, state: EmptyState, params: Tree) -> tuple[Tree, EmptyState]:
        return tree_zeros_like(updates), state

    return pointwise(init_empty, update)


@named
def scale(step_size: Number) -> Transform:
    """Multiply every update by `step_size`. As optax.scale."""

    def update(updates: Tree, state: EmptyState, params: Tree) -> tuple[Tree, EmptyState]:
        return elementwise(lambda u: u * step_size, updates), state

    return pointwise(init_empty, update)


@named
def scale_by_schedule(step_size_fn: Schedule) -> Transform:
    """Multiply every update by a schedule. As optax.scale_by_schedule; the state is a step
    count."""

    def update(updates: Tree, state: CountState, params: Tree) -> tuple[Tree, CountState]:
        factor = value_of(step_size_fn, state.count)
        return elementwise(lambda u: u * factor, updates), CountState(state.count + 1)

    return pointwise(init_count, update)


@named
def scale_by_learning_rate(
    learning_rate: Number | Schedule, *, flip_sign: bool = True
) -> Transform:
    """Multiply every update by minus the learning rate, a number or a schedule. As
    optax.scale_by_learning_rate.

    The state is a step count and the last learning rate.

    Args:
        learning_rate: a number, or a schedule, which is given the number of steps before this one.
        flip_sign: False multiplies by plus the learning rate.
    """
    fixed = None if callable(learning_rate) else number(learning_rate)

    def init(params: Tree) -> ScaleByLearningRateState:
        count = step_count()
        return ScaleByLearningRateState(count, number(value_of(learning_rate, count)))

    def by(multiply: Callable[[Tensor, Any], Tensor]) -> Update:
        def update(updates: Tree, state: ScaleByLearningRateState, params: Tree) -> tuple[Any, Any]:
            rate = value_of(learning_rate, state.count)
            factor = -rate if flip_sign else rate
            kept = number(rate) if fixed is None else fixed
            return elementwise(lambda u: multiply(u, factor), updates), ScaleByLearningRateState(
                state.count + 1, kept
            )

        return update

    return pointwise(init, by(torch.mul), in_place=by(Tensor.mul_))


@named
def scale_by_sign() -> Transform:
    """Replace every update by its sign. As optax.scale_by_sign."""

    def update(updates: Tree, state: EmptyState, params: Tree) -> tuple[Tree, EmptyState]:
        return tree_map(torch.sign, updates), state

    return pointwise(init_empty, update)


@named
def clip(max_delta: Number) -> Transform:
    """Clip every element of the updates to [-max_delta, max_delta]. As optax.clip and torch's
    clip_grad_value_."""

    def update(updates: Tree, state: EmptyState, params: Tree) -> tuple[Tree, EmptyState]:
        return elementwise(lambda u: clamp(u, -max_delta, max_delta), updates), state

    return pointwise(init_empty, update)


@named
def nan_to_num(
    nan: float = 0.0, posinf: float | None = None, neginf: float | None = None
) -> Transform:
    """Replace NaNs, and infinities, in the updates as torch.nan_to_num does. Compare
    optax.zero_nans.

    Args:
        nan: instead of NaN.
        posinf: instead of infinity; None for the dtype's largest number. Keep infinities with
            `math.inf`.
        neginf: instead of minus infinity; None for the dtype's least number.
    """

    def update(updates: Tree, state: EmptyState, params: Tree) -> tuple[Tree, EmptyState]:
        return tree_map(lambda u: torch.nan_to_num(u, nan, posinf, neginf), updates), state

    return pointwise(init_empty, update)


@named
def zero_nans() -> Transform:
    """Replace NaNs in the updates by 0, and leave infinities. As optax.zero_nans, without its
    report per leaf."""
    return nan_to_num(0.0, float("inf"), float("-inf"))


@named
def add_decayed_weights(
    weight_decay: Number | Schedule = 0.0, mask: Mask | None = None
) -> Transform:
    """Add `weight_decay` times the param to each update. As optax.add_decayed_weights; the state is
    a step count.

    Args:
        weight_decay: a number or a schedule.
        mask: which leaves decay, as for `masked`; None for all.
    """

    def by(add: Callable[[Tensor, Tensor, Number], Tensor]) -> Update:
        def update(updates: Tree, state: CountState, params: Tree) -> tuple[Any, Any]:
            decay = value_of(weight_decay, state.count)
            return elementwise(lambda u, p: add(u, p, decay), updates, params), CountState(
                state.count + 1
            )

        return update

    decayed = pointwise(init_count, by(add_scaled), in_place=by(add_scaled_))
    return decayed if mask is None else masked(decayed, mask)


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
