"""AdEMAMix: Adam with a second, slow mean of the gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..arithmetic import Number, Tree, bias_correction, elementwise, ema, ema_of_squares
from ..base import (
    NumberOrSchedule,
    Transform,
    chain,
    pointwise,
    value_of,
)
from ..naming import named
from ..states import zeros
from ..transforms.moments import adam_denominator
from ..transforms.scaling import scale_by_learning_rate
from ..transforms.weight_decay import add_decayed_weights
from ..wrappers.masking import Mask


class ScaleByAdemamixState(NamedTuple):
    """Two means of the gradients, a fast one and a slow one, and the second moment."""

    count: Tensor  # type: ignore[assignment]  # 0-d int64, on the CPU
    m1: Any  # like params: the fast mean of the gradients
    m2: Any  # like params: the slow mean of the gradients
    nu: Any  # like params: running mean of the squared gradients


@named
def scale_by_ademamix(
    b1: Number = 0.9,
    b2: Number = 0.999,
    b3: NumberOrSchedule = 0.9999,
    alpha: NumberOrSchedule = 6.0,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
) -> Transform:
    """Rescale the updates g as AdEMAMix does, at step t (from 1).

        m1 = b1 * m1 + (1 - b1) * g
        m2 = b3 * m2 + (1 - b3) * g
        nu = b2 * nu + (1 - b2) * g**2
        update = (m1 / (1 - b1**t) + alpha * m2) / (sqrt(nu / (1 - b2**t) + eps_root) + eps)

    Source: Pagliardini et al., 2024 (2409.03137), Algorithm 1; optax.contrib.scale_by_ademamix.

    Needs: pointwise. State: 3 tensors like params, and a step count.

    Args:
        b1: decay of the fast mean, per step.
        b2: decay of the mean of squares, per step.
        b3: decay of the slow mean, per step, whose bias is not corrected: it should begin small. A
            number or a schedule.
        alpha: weight of the slow mean; a number or a schedule. Others: see `scale_by_adam`.
    """

    def update(
        updates: Tree, state: ScaleByAdemamixState, params: Tree
    ) -> tuple[Tree, ScaleByAdemamixState]:
        count = state.count + 1
        # Schedules are given the number of steps before this one
        slow_decay = value_of(b3, state.count)
        slow_weight = value_of(alpha, state.count)
        m1 = ema(state.m1, updates, b1)
        m2 = ema(state.m2, updates, slow_decay)
        nu = ema_of_squares(state.nu, updates, b2)
        c1 = bias_correction(b1, count)
        denominator = adam_denominator(b2, count, eps, eps_root)

        def direction(fast: Tensor, slow: Tensor, v: Tensor) -> Tensor:
            # The slow mean is taken as it is: it should begin small
            mixture: Tensor = fast / c1 + slow * slow_weight
            return mixture / denominator(v)

        return elementwise(direction, m1, m2, nu), ScaleByAdemamixState(count, m1, m2, nu)

    return pointwise(zeros(ScaleByAdemamixState), update, in_parts=True)


@named
def ademamix(
    learning_rate: NumberOrSchedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    b3: NumberOrSchedule = 0.9999,
    alpha: NumberOrSchedule = 5.0,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
    *,
    weight_decay: NumberOrSchedule = 0.0,
    mask: Mask | None = None,
) -> Transform:
    """AdEMAMix, with decoupled weight decay (g gradient, p param).

        update = -learning_rate * (scale_by_ademamix(g) + weight_decay * p)

    Source: Pagliardini et al., 2024 (2409.03137); optax.contrib.ademamix.

    Needs: pointwise. State: 3 tensors like params.

    Args:
        learning_rate: a number or a schedule.
        weight_decay: decoupled, times the learning rate: per step.
        mask: which leaves decay; None for all. Others: see `scale_by_ademamix`.
    """
    return chain(
        scale_by_ademamix(b1, b2, b3, alpha, eps, eps_root),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )
