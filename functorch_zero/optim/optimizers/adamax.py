"""AdaMax and AdaMaxW: Adam over a decaying maximum of the gradients' sizes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arithmetic import Number, Tree, bias_correction, elementwise, ema
from ..base import NumberOrSchedule, Transform, chain, pointwise
from ..naming import named
from ..states import zeros
from ..transforms.scaling import scale_by_learning_rate
from ..transforms.weight_decay import add_decayed_weights, coupled_decay
from ..wrappers.masking import Mask


class ScaleByAdamaxState(NamedTuple):
    """AdaMax's mean and maximum."""

    count: Tensor  # type: ignore[assignment]  # 0-d int64, on the CPU
    mu: Any  # like params: running mean of the gradients
    nu: Any  # like params: decaying maximum of the gradients' sizes


@named
def scale_by_adamax(b1: Number = 0.9, b2: Number = 0.999, eps: Number = 1e-8) -> Transform:
    """Rescale the updates g as AdaMax does, at step t (from 1).

        mu = b1 * mu + (1 - b1) * g
        nu = max(b2 * nu, abs(g) + eps)
        update = mu / (1 - b1**t) / nu

    Source: Kingma and Ba, 2015 (1412.6980), Algorithm 2; torch.optim.Adamax's numerics.

    Needs: pointwise. State: 2 tensors like params, and a step count.

    Args:
        b1: decay of the mean of the gradients, per step.
        b2: decay of the maximum, per step. It needs no bias correction.
        eps: added to each gradient's size, so that the maximum is never zero.
    """

    def update(
        updates: Tree, state: ScaleByAdamaxState, params: Tree
    ) -> tuple[Tree, ScaleByAdamaxState]:
        count = state.count + 1
        mu = ema(state.mu, updates, b1)
        # eps is inside the maximum: a direction is then a plain quotient
        nu = elementwise(lambda v, g: torch.maximum(v * b2, g.abs() + eps), state.nu, updates)
        # Only the mean is corrected: the maximum does not begin too small
        c1 = bias_correction(b1, count)
        directions = elementwise(lambda m, v: m / c1 / v, mu, nu)
        return directions, ScaleByAdamaxState(count, mu, nu)

    # Zeros for the maximum, too: the first gradient's size takes their place
    return pointwise(zeros(ScaleByAdamaxState), update, in_parts=True)


@named
def adamax(
    learning_rate: NumberOrSchedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    *,
    weight_decay: NumberOrSchedule = 0.0,
) -> Transform:
    """AdaMax, with coupled weight decay (g gradient, p param).

        g = g + weight_decay * p
        update = -learning_rate * scale_by_adamax(g)

    Source: Kingma and Ba, 2015 (1412.6980), Algorithm 2; torch.optim.Adamax.

    Needs: pointwise. State: 2 tensors like params.

    Args:
        learning_rate: a number or a schedule.
        weight_decay: coupled: joins the gradient. Others: see `scale_by_adamax`.
    """
    return chain(
        *coupled_decay(weight_decay),
        scale_by_adamax(b1, b2, eps),
        scale_by_learning_rate(learning_rate),
    )


@named
def adamaxw(
    learning_rate: NumberOrSchedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    *,
    weight_decay: NumberOrSchedule = 1e-4,
    mask: Mask | None = None,
) -> Transform:
    """AdaMaxW, AdaMax with decoupled weight decay (g gradient, p param).

        update = -learning_rate * (scale_by_adamax(g) + weight_decay * p)

    Source: optax.adamaxw; Kingma and Ba, 2015 (1412.6980), with the decay of Loshchilov and Hutter,
    2019 (1711.05101).

    Needs: pointwise. State: 2 tensors like params.

    Args:
        learning_rate: a number or a schedule.
        weight_decay: decoupled, times the learning rate: per step.
        mask: which leaves decay; None for all. Others: see `scale_by_adamax`.
    """
    return chain(
        scale_by_adamax(b1, b2, eps),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )
