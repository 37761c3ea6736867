"""AdaBelief: Adam over the gradients' distance from their mean."""

from __future__ import annotations

from torch import Tensor

from ..arithmetic import Number, Tree, elementwise, ema, ema_of_squares
from ..base import NumberOrSchedule, Transform, chain, pointwise
from ..naming import named
from ..optimizers.adam import adam_directions
from ..transforms.moments import ScaleByAdamState, init_moments
from ..transforms.scaling import scale_by_learning_rate


@named
def scale_by_belief(
    b1: Number = 0.9, b2: Number = 0.999, eps: Number = 1e-16, eps_root: Number = 1e-16
) -> Transform:
    """Rescale the updates g by how far gradients are from their mean, at step t (from 1).

        mu = b1 * mu + (1 - b1) * g
        nu = b2 * nu + (1 - b2) * (g - mu)**2 + eps_root
        update = mu / (1 - b1**t) / (sqrt(nu / (1 - b2**t)) + eps)

    Source: Zhuang et al., 2020 (2010.07468), Algorithm 2; optax.scale_by_belief.

    Needs: pointwise. State: 2 tensors like params, and a step count; `nu` is the mean of the
    squared distances.

    Args:
        b1: decay of the mean of the gradients, per step.
        b2: decay of the mean of squared distances, per step.
        eps: added to the root, against division by zero.
        eps_root: added to `nu` in every step, as in the paper's algorithm, so it sums up.
    """

    # eps_root is part of the mean, and keeps it above zero
    def new_nu(v: Tensor, g: Tensor, m: Tensor) -> Tensor:
        return ema_of_squares(v, g - m, b2) + eps_root

    def update(
        updates: Tree, state: ScaleByAdamState, params: Tree
    ) -> tuple[Tree, ScaleByAdamState]:
        # The mean first: the distance is from the one that has seen this gradient
        mu = ema(state.mu, updates, b1)
        nu = elementwise(new_nu, state.nu, updates, mu)
        new = ScaleByAdamState(state.count + 1, mu, nu)
        # The root's shift is in `nu` already
        return adam_directions(new, b1, b2, eps, 0.0), new

    return pointwise(init_moments, update, in_parts=True)


@named
def adabelief(
    learning_rate: NumberOrSchedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-16,
    eps_root: Number = 1e-16,
) -> Transform:
    """AdaBelief (g gradient).

        update = -learning_rate * scale_by_belief(g)

    Source: Zhuang et al., 2020 (2010.07468); optax.adabelief.

    Needs: pointwise. State: 2 tensors like params.

    Args:
        learning_rate: a number or a schedule. Others: see `scale_by_belief`.
    """
    return chain(
        scale_by_belief(b1, b2, eps, eps_root),
        scale_by_learning_rate(learning_rate),
    )
