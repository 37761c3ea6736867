"""Schedule-free learning: averaging instead of a falling learning rate.

Source: Defazio et al., 2024 (2405.15682). The params are the paper's y, where gradients are taken.
The state keeps z, which the inner optimizer moves; the average x, to evaluate at, follows from
both: `schedule_free_eval_params`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from optree import tree_map
from torch import Tensor

from ..across import Across
from ..arithmetic import Number, Tree, elementwise, number
from ..base import NumberOrSchedule, Transform, chain, step_count, value_of
from ..naming import named
from ..schedules import warmup_constant_schedule
from ..states import only_state
from ..transforms.scaling import scale_by_learning_rate
from ..transforms.weight_decay import add_decayed_weights, coupled_decay
from ..wrappers.wrappers import wrapper
from .rmsprop import scale_by_rms


class ScheduleFreeState(NamedTuple):
    """The paper's z, and the weights of the average so far."""

    b1: Tensor  # 0-d float64, on the CPU: for schedule_free_eval_params
    weight_sum: Tensor  # 0-d float64, on the CPU
    step_count: Tensor  # 0-d int64, on the CPU; begins at 1
    max_lr: Tensor  # 0-d float64, on the CPU: the largest learning rate so far
    base_optimizer_state: Any  # of the optimizer that moves z
    z: Any  # like params


@named
def schedule_free(
    base_optimizer: Transform,
    learning_rate: NumberOrSchedule,
    b1: Number = 0.9,
    weight_lr_power: Number = 2.0,
) -> Transform:
    """Turn an optimizer without momentum schedule-free.

        y = b1 * x + (1 - b1) * z    (the params, so x = (y - (1 - b1) * z) / b1)
        z = z + step of base_optimizer at y
        weight = (the largest learning rate so far)**weight_lr_power
        x = (1 - c) * x + c * z, where c = weight / sum of weights

    Source: Defazio et al., 2024 (2405.15682), Algorithm 1; optax.contrib.schedule_free. As there,
    the weights look the learning rate up one step ahead of `base_optimizer`.

    Needs: what the base optimizer needs; no communication of its own. State: 1 tensor like params,
    4 numbers, and that of the base optimizer.

    Args:
        base_optimizer: any transform that ends with the learning rate.
        learning_rate: the same as the base optimizer's: constant, or a warm-up.
        b1: how near to the average gradients are taken; above 0.
        weight_lr_power: see the formula; 0 weighs all steps alike.
    """

    def init(params: Tree, across: Across) -> ScheduleFreeState:
        return ScheduleFreeState(
            b1=number(b1),
            weight_sum=number(0.0),
            step_count=step_count() + 1,
            max_lr=number(0.0),
            base_optimizer_state=base_optimizer.init(params, across),
            z=tree_map(torch.clone, params),  # a copy: params may be donated to a step
        )

    def update(
        updates: Tree, state: ScheduleFreeState, params: Tree, across: Across
    ) -> tuple[Tree, ScheduleFreeState]:
        # `step_count` began at 1: one ahead of the base optimizer's own count
        rate = number(value_of(learning_rate, state.step_count))
        max_lr = torch.maximum(state.max_lr, rate)
        weight = max_lr**weight_lr_power
        weight_sum = state.weight_sum + weight
        # 0 while the learning rate is 0
        share = torch.where(weight_sum > 0, weight / weight_sum, number(0.0))
        # The base optimizer is given y, for its decay, but its steps move z
        old = across.beside(state.z, params)
        own = state.base_optimizer_state
        steps, own = base_optimizer.update(updates, own, params, across)
        z = tree_map(torch.add, old, steps)

        def move(y: Tensor, old_z: Tensor, new_z: Tensor) -> Tensor:
            # x is not in the state: it follows from y and z
            x = _average(y, old_z, b1)
            # Moved towards the new z; then y lies between both again
            x = x * (1 - share) + new_z * share
            return x * b1 + new_z * (1 - b1) - y

        moves = elementwise(move, params, old, z)
        return moves, ScheduleFreeState(state.b1, weight_sum, state.step_count + 1, max_lr, own, z)

    return wrapper(base_optimizer, init, update)


def _average(y: Tensor, z: Tensor, b1: Number) -> Tensor:
    """The x of which `y = b1 * x + (1 - b1) * z`."""
    return (y - z * (1 - b1)) / b1


def schedule_free_eval_params(state: Any, params: Tree) -> Tree:
    """The params to evaluate and to keep: the average x.

        x = (params - (1 - b1) * z) / b1

    Source: optax.contrib.schedule_free_eval_params.

    Args:
        state: the optimizer's state, which holds one ScheduleFreeState somewhere.
        params: the params that belong to it; both whole, or both this rank's pieces.

    Raises:
        ValueError: the state holds none, or several.
    """
    own = only_state(state, ScheduleFreeState, made_by="schedule_free", remedy="pass its own state")
    return elementwise(lambda y, z: _average(y, z, own.b1), params, own.z)


@named
def schedule_free_sgd(
    learning_rate: Number = 1.0,
    warmup_steps: int | None = None,
    b1: Number = 0.9,
    weight_decay: NumberOrSchedule | None = None,
    weight_lr_power: Number = 2.0,
) -> Transform:
    """Schedule-free gradient descent (g gradient, y param).

        g = g + weight_decay * y
        z = z - learning_rate * g, and the rest of `schedule_free`

    Source: Defazio et al., 2024 (2405.15682); optax.contrib.schedule_free_sgd.

    Needs: pointwise. State: 1 tensor like params.

    Args:
        learning_rate: after the warm-up.
        warmup_steps: of a linear warm-up, or None.
        b1: see `schedule_free`.
        weight_decay: coupled: joins the gradient; None for none.
        weight_lr_power: see `schedule_free`.
    """
    rate = _warmed(learning_rate, warmup_steps)
    # No momentum: the average takes its place
    descent = chain(
        *coupled_decay(0.0 if weight_decay is None else weight_decay),
        scale_by_learning_rate(rate),
    )
    return schedule_free(descent, rate, b1, weight_lr_power)


@named
def schedule_free_adamw(
    learning_rate: Number = 0.0025,
    warmup_steps: int | None = None,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    weight_decay: NumberOrSchedule = 0.0,
    weight_lr_power: Number = 2.0,
) -> Transform:
    """Schedule-free AdamW (g gradient, y param).

        u = scale_by_rms(g, b2), with bias correction
        z = z - learning_rate * (u + weight_decay * y), and the rest of `schedule_free`

    Source: Defazio et al., 2024 (2405.15682); optax.contrib.schedule_free_adamw.

    Needs: pointwise. State: 2 tensors like params.

    Args:
        b2: decay of the mean of squared gradients, per step.
        eps: added to its root.
        weight_decay: decoupled, times the learning rate: per step. Others: see `schedule_free_sgd`.
    """
    rate = _warmed(learning_rate, warmup_steps)
    # Adam without its mean of the gradients: the average takes that part
    descent = chain(
        scale_by_rms(b2, eps, bias_correction=True),
        add_decayed_weights(weight_decay),
        scale_by_learning_rate(rate),
    )
    return schedule_free(descent, rate, b1, weight_lr_power)


def _warmed(learning_rate: Number, warmup_steps: int | None) -> NumberOrSchedule:
    """The learning rate, after a linear warm-up if there is one."""
    # As the caller gave it: constant
    if warmup_steps is None:
        return learning_rate
    return warmup_constant_schedule(0.0, learning_rate, warmup_steps)
