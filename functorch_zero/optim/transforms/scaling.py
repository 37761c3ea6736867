"""Scalings of the updates by one number, and replacements of single elements.

All of these are pointwise: an element of the result depends on that element only, so none of them
communicates. Where a docstring mentions no state there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..arithmetic import Number, Tree, elementwise, number
from ..base import (
    EmptyState,
    NumberOrSchedule,
    Schedule,
    Transform,
    init_empty,
    keeping_zeros,
    pointwise,
    step_count,
    tree_zeros_like,
    value_of,
)
from ..naming import named
from ..states import CountState, ScaleByLearningRateState, init_count


def of_elements(fn: Callable[[Tensor], Tensor], *, in_parts: bool = False) -> Transform:
    """The transform that makes an elementwise function of each leaf of the updates. `in_parts`: as
    in `pointwise`."""

    def update(updates: Tree, state: EmptyState, params: Tree) -> tuple[Tree, EmptyState]:
        return elementwise(fn, updates), state

    return pointwise(init_empty, update, in_parts=in_parts)


@named
def identity() -> Transform:
    """Leave updates as they are. As optax.identity."""
    return of_elements(lambda u: u)


@named
def set_to_zero() -> Transform:
    """Make every update zero, so that the params stay as they are. As optax.set_to_zero."""
    return of_elements(tree_zeros_like)


@named
def scale(step_size: Number) -> Transform:
    """Multiply every update by `step_size`. As optax.scale."""
    return keeping_zeros(of_elements(lambda u: u * step_size))


@named
def scale_by_schedule(step_size_fn: Schedule) -> Transform:
    """Multiply every update by a schedule's value. As optax.scale_by_schedule.

    State: a step count.

    Args:
        step_size_fn: from the number of steps before this one (0-d int64) to a factor.
    """

    def update(updates: Tree, state: CountState, params: Tree) -> tuple[Tree, CountState]:
        factor = value_of(step_size_fn, state.count)
        scaled = elementwise(lambda u: u * factor, updates)
        return scaled, CountState(state.count + 1)

    return keeping_zeros(pointwise(init_count, update))


@named
def scale_by_learning_rate(learning_rate: NumberOrSchedule, *, flip_sign: bool = True) -> Transform:
    """Multiply every update by minus the learning rate. As optax.scale_by_learning_rate.

    State: a step count and the last learning rate, which `state_metrics` reports.

    Args:
        learning_rate: a number, or a schedule, which is given the number of steps before this one.
        flip_sign: False multiplies by plus the learning rate.
    """
    # Of a number the tensor in the state is made once, not once per step
    fixed = None if callable(learning_rate) else number(learning_rate)

    def init(params: Tree) -> ScaleByLearningRateState:
        count = step_count()
        return ScaleByLearningRateState(count, number(value_of(learning_rate, count)))

    def update(
        updates: Tree,
        state: ScaleByLearningRateState,
        params: Tree,
        *,
        multiply: Callable[[Tensor, Any], Tensor] = torch.mul,
    ) -> tuple[Tree, ScaleByLearningRateState]:
        rate = value_of(learning_rate, state.count)
        # Updates are added to the params, so descent is a negative factor
        factor = -rate if flip_sign else rate
        scaled = elementwise(lambda u: multiply(u, factor), updates)
        # A float64 copy for reports, whatever the schedule answers with
        last = number(rate) if fixed is None else fixed
        return scaled, ScaleByLearningRateState(state.count + 1, last)

    return keeping_zeros(pointwise(init, update, in_place=partial(update, multiply=Tensor.mul_)))


@named
def scale_by_sign() -> Transform:
    """Replace every element by its sign: -1, 0 or 1. As optax.scale_by_sign."""
    return of_elements(torch.sign, in_parts=True)


@named
def nan_to_num(
    nan: float = 0.0, posinf: float | None = None, neginf: float | None = None
) -> Transform:
    """Replace NaNs, and infinities, as torch.nan_to_num does. Compare optax.zero_nans.

    Args:
        nan: instead of NaN.
        posinf: instead of infinity; None for the dtype's largest number. Keep infinities with
            `math.inf`.
        neginf: instead of minus infinity; None for the dtype's least number.
    """
    return of_elements(lambda u: torch.nan_to_num(u, nan, posinf, neginf), in_parts=True)


@named
def zero_nans() -> Transform:
    """Replace NaNs by 0, and leave infinities. As optax.zero_nans, without its report per leaf."""
    # Infinities for infinity: only NaNs change
    return nan_to_num(0.0, float("inf"), float("-inf"))
