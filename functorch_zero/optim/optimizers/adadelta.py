"""Adadelta: steps in the units of the params, by a ratio of two means of squares."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..arithmetic import Number, Tree, elementwise, ema_of_squares
from ..base import NumberOrSchedule, Transform, chain, pointwise
from ..naming import named
from ..states import zeros
from ..transforms.scaling import scale_by_learning_rate
from ..transforms.weight_decay import coupled_decay
from ..wrappers.masking import Mask


class ScaleByAdaDeltaState(NamedTuple):
    """Adadelta's two running means of squares."""

    e_g: Any  # like params: of the gradients
    e_x: Any  # like params: of the steps, before the learning rate


@named
def scale_by_adadelta(rho: Number = 0.9, eps: Number = 1e-6) -> Transform:
    """Rescale the updates g by the size of steps so far over that of gradients.

        e_g = rho * e_g + (1 - rho) * g**2
        update = sqrt(e_x + eps) / sqrt(e_g + eps) * g
        e_x = rho * e_x + (1 - rho) * update**2

    Source: Zeiler, 2012 (1212.5701), Algorithm 1; torch.optim.Adadelta's numerics;
    optax.scale_by_adadelta.

    Needs: pointwise. State: 2 tensors like params.

    Args:
        rho: decay of both means, per step.
        eps: added under both roots. It also sets the size of the first steps, since `e_x` begins
            at zero.
    """

    def step(g: Tensor, of_steps: Tensor, of_grads: Tensor) -> Tensor:
        # The mean of steps is one step behind: this step isn't known yet
        ratio = (of_steps + eps).sqrt() / (of_grads + eps).sqrt()
        return ratio * g

    def update(
        updates: Tree, state: ScaleByAdaDeltaState, params: Tree
    ) -> tuple[Tree, ScaleByAdaDeltaState]:
        # Gradients first: the step is divided by a mean that has seen its gradient
        e_g = ema_of_squares(state.e_g, updates, rho)
        steps = elementwise(step, updates, state.e_x, e_g)  # by the steps before this one
        e_x = ema_of_squares(state.e_x, steps, rho)
        return steps, ScaleByAdaDeltaState(e_g, e_x)

    return pointwise(zeros(ScaleByAdaDeltaState), update, in_parts=True)


@named
def adadelta(
    learning_rate: NumberOrSchedule = 1.0,
    rho: Number = 0.9,
    eps: Number = 1e-6,
    weight_decay: NumberOrSchedule = 0.0,
    weight_decay_mask: Mask | None = None,
) -> Transform:
    """Adadelta, with coupled weight decay (g gradient, p param).

        g = g + weight_decay * p
        update = -learning_rate * scale_by_adadelta(g)

    Source: Zeiler, 2012 (1212.5701); torch.optim.Adadelta.

    Needs: pointwise. State: 2 tensors like params.

    Args:
        learning_rate: a factor on the steps, 1 in the paper; a number or a schedule.
        weight_decay: coupled: joins the gradient.
        weight_decay_mask: which leaves decay; None for all. Others: see `scale_by_adadelta`.
    """
    return chain(
        *coupled_decay(weight_decay, weight_decay_mask),
        scale_by_adadelta(rho, eps),
        scale_by_learning_rate(learning_rate),
    )
