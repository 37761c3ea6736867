"""Scalings of the updates, and replacements of single elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from optree import tree_map
from torch import Tensor

from ..arithmetic import Number, Tree, elementwise, number
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
from ..states import CountState, ScaleByLearningRateState, init_count


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
