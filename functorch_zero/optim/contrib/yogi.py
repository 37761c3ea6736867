"""Yogi: Adam whose second moment moves by bounded steps."""

from __future__ import annotations

from torch import Tensor

from ..arithmetic import Number, Tree, elementwise, ema
from ..base import NumberOrSchedule, Transform, chain, pointwise
from ..naming import named
from ..optimizers.adam import adam_directions
from ..states import zeros
from ..transforms.moments import ScaleByAdamState
from ..transforms.scaling import scale_by_learning_rate


@named
def scale_by_yogi(
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-3,
    eps_root: Number = 0.0,
    initial_accumulator_value: Number = 1e-6,
) -> Transform:
    """Rescale the updates g as Yogi does, at step t (from 1).

        mu = b1 * mu + (1 - b1) * g
        nu = nu - (1 - b2) * sign(nu - g**2) * g**2
        update = mu / (1 - b1**t) / (sqrt(nu / (1 - b2**t) + eps_root) + eps)

    Source: Zaheer et al., 2018 (Adaptive Methods for Nonconvex Optimization), Algorithm 2;
    optax.scale_by_yogi.

    Needs: pointwise. State: 2 tensors like params, and a step count.

    Args:
        b2: 1 - b2 is the share of a squared gradient by which the second moment moves, per step.
        initial_accumulator_value: both moments begin at it. Others: see `scale_by_adam`.
    """

    def new_nu(v: Tensor, g: Tensor) -> Tensor:
        squares = g * g
        # A step of the size of g**2, whatever the distance: nu falls slower than Adam's
        return v - (v - squares).sign() * squares * (1 - b2)

    def update(
        updates: Tree, state: ScaleByAdamState, params: Tree
    ) -> tuple[Tree, ScaleByAdamState]:
        mu = ema(state.mu, updates, b1)
        nu = elementwise(new_nu, state.nu, updates)
        new = ScaleByAdamState(state.count + 1, mu, nu)
        return adam_directions(new, b1, b2, eps, eps_root), new

    # The mean begins at it, too, as in optax
    first = initial_accumulator_value
    return pointwise(zeros(ScaleByAdamState, mu=first, nu=first), update, in_parts=True)


@named
def yogi(
    learning_rate: NumberOrSchedule, b1: Number = 0.9, b2: Number = 0.999, eps: Number = 1e-3
) -> Transform:
    """Yogi (g gradient).

        update = -learning_rate * scale_by_yogi(g)

    Source: Zaheer et al., 2018; optax.yogi.

    Needs: pointwise. State: 2 tensors like params.

    Args:
        learning_rate: a number or a schedule. Others: see `scale_by_yogi`.
    """
    return chain(scale_by_yogi(b1, b2, eps), scale_by_learning_rate(learning_rate))
