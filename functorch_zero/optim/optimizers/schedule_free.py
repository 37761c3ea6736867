"""Schedule-free learning (Defazio et al., 2024, arXiv 2405.15682): averaging instead of a falling
learning rate.

The params are the paper's y, where gradients are taken. The state keeps z, which the inner
optimizer moves; the average x, to evaluate at, follows from both: `schedule_free_eval_params`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from optree import tree_map
from torch import Tensor

from ..arithmetic import Number, Tree, elementwise, is_zero, number
from ..base import Schedule, Transform, chain, step_count, value_of
from ..naming import named
from ..schedules import warmup_constant_schedule
from ..states import find_states
from ..transforms.scaling import scale_by_learning_rate
from ..transforms.weight_decay import add_decayed_weights
from ..wrappers.wrappers import InnerInit, InnerUpdate, wrapper
from .rmsprop import scale_by_rms


class ScheduleFreeState(NamedTuple):
    """The paper's z, and the weights of the average so far."""

    b1: Tensor  # 0-d float64, on the CPU: for schedule_free_eval_params
    weight_sum: Tensor  # 0-d float64, on the CPU
    step_count: Tensor  # 0-d int64, on the CPU; begins at 1
    max_lr: Tensor  # 0-d float64, on the CPU: the largest learning rate so far
    base_optimizer_state: Any
    z: Any  # like params


@named
def schedule_free(
    base_optimizer: Transform,
    learning_rate: Number | Schedule,
    b1: Number = 0.9,
    weight_lr_power: Number = 2.0,
) -> Transform:
    """Turn an optimizer without momentum schedule-free. As optax.contrib.schedule_free.

    As there, the weights look the learning rate up one step ahead of `base_optimizer`. State: 1
    tensor like params, 4 numbers, and that of the base optimizer. No communication of its own.

    Args:
        base_optimizer: any transform that ends with the learning rate.
        learning_rate: the same as the base optimizer's: constant, or a warm-up.
        b1: how near to the average gradients are taken; above 0.
        weight_lr_power: the average's weights are the largest learning rate so far to this power.
    """

    def init(params: Tree, inner_init: InnerInit) -> ScheduleFreeState:
        numbers = (number(b1), number(0.0), step_count() + 1, number(0.0))
        return ScheduleFreeState(*numbers, inner_init(params), tree_map(torch.clone, params))

    def update(
        updates: Tree, state: ScheduleFreeState, params: Tree, inner: InnerUpdate
    ) -> tuple[Tree, ScheduleFreeState]:
        max_lr = torch.maximum(state.max_lr, number(value_of(learning_rate, state.step_count)))
        weight = max_lr**weight_lr_power
        weight_sum = state.weight_sum + weight
        # 0 while the learning rate is 0
        share = torch.where(weight_sum > 0, weight / weight_sum, number(0.0))
        steps, inner_state = inner(updates, state.base_optimizer_state, params)
        z = tree_map(torch.add, state.z, steps)

        def move(y: Tensor, old: Tensor, new: Tensor) -> Tensor:
            x = _average(y, old, b1)
            x = x * (1 - share) + new * share
            return x * b1 + new * (1 - b1) - y

        moves = elementwise(move, params, state.z, z)
        numbers = (state.b1, weight_sum, state.step_count + 1, max_lr)
        return moves, ScheduleFreeState(*numbers, inner_state, z)

    return wrapper(base_optimizer, init, update)


def _average(y: Tensor, z: Tensor, b1: Number) -> Tensor:
    return (y - z * (1 - b1)) / b1


def schedule_free_eval_params(state: Any, params: Tree) -> Tree:
    """The params to evaluate and to keep: the average x. As
    optax.contrib.schedule_free_eval_params.

    Args:
        state: the optimizer's state, which holds one ScheduleFreeState somewhere.
        params: the params that belong to it; both whole, or both this rank's pieces.
    """
    found = find_states(state, ScheduleFreeState)
    if len(found) != 1:
        raise ValueError(
            f"expected one schedule_free in this state, got {len(found)}. Remedy: pass its own "
            "state"
        )
    return elementwise(lambda y, z: _average(y, z, found[0].b1), params, found[0].z)


@named
def schedule_free_sgd(
    learning_rate: Number = 1.0,
    warmup_steps: int | None = None,
    b1: Number = 0.9,
    weight_decay: Number | Schedule | None = None,
    weight_lr_power: Number = 2.0,
) -> Transform:
    """Schedule-free gradient descent. As optax.contrib.schedule_free_sgd. State: 1 tensor like
    params.

    Args:
        learning_rate: after the warm-up.
        warmup_steps: of a linear warm-up, or None.
        b1: see `schedule_free`.
        weight_decay: added, times the param, to the gradient.
        weight_lr_power: see `schedule_free`.
    """
    rate = _warmed(learning_rate, warmup_steps)
    decay = (
        ()
        if weight_decay is None or is_zero(weight_decay)
        else (add_decayed_weights(weight_decay),)
    )
    return schedule_free(chain(*decay, scale_by_learning_rate(rate)), rate, b1, weight_lr_power)


@named
def schedule_free_adamw(
    learning_rate: Number = 0.0025,
    warmup_steps: int | None = None,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    weight_decay: Number | Schedule = 0.0,
    weight_lr_power: Number = 2.0,
) -> Transform:
    """Schedule-free AdamW. As optax.contrib.schedule_free_adamw. State: 2 tensors like params.

    Arguments: see `schedule_free_sgd`; `b2` and `eps` as in AdamW.
    """
    rate = _warmed(learning_rate, warmup_steps)
    parts = (scale_by_rms(b2, eps, bias_correction=True), add_decayed_weights(weight_decay))
    return schedule_free(chain(*parts, scale_by_learning_rate(rate)), rate, b1, weight_lr_power)


def _warmed(learning_rate: Number, warmup_steps: int | None) -> Number | Schedule:
    return (
        learning_rate
        if warmup_steps is None
        else warmup_constant_schedule(0.0, learning_rate, warmup_steps)
    )
