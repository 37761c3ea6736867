"""AdaBelief."""

from __future__ import annotations

from ..arithmetic import Number, Tree, elementwise, ema, ema_of_squares
from ..base import Schedule, Transform, chain, pointwise
from ..naming import named
from ..optimizers.adam import adam_directions
from ..transforms.moments import ScaleByAdamState, init_moments
from ..transforms.scaling import scale_by_learning_rate


@named
def scale_by_belief(
    b1: Number = 0.9, b2: Number = 0.999, eps: Number = 1e-16, eps_root: Number = 1e-16
) -> Transform:
    """Rescale updates by how far gradients are from their mean: AdaBelief (Zhuang et al., 2020). As
    optax.

    State: 2 tensors like params, and a step count; `nu` is the mean of the squared distances.

    Args:
        eps_root: added to `nu` in every step, as in the paper's algorithm. Others: see
            `scale_by_adam`.
    """

    def update(
        updates: Tree, state: ScaleByAdamState, params: Tree
    ) -> tuple[Tree, ScaleByAdamState]:
        count = state.count + 1
        mu = elementwise(lambda m, g: ema(m, g, b1), state.mu, updates)
        nu = elementwise(
            lambda v, g, m: ema_of_squares(v, g - m, b2) + eps_root, state.nu, updates, mu
        )
        new = ScaleByAdamState(count, mu, nu)
        return adam_directions(new, b1, b2, eps, 0.0), new

    return pointwise(init_moments, update)


@named
def adabelief(
    learning_rate: Number | Schedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-16,
    eps_root: Number = 1e-16,
) -> Transform:
    """AdaBelief (Zhuang et al., 2020). As optax.adabelief. State: 2 tensors like params."""
    return chain(scale_by_belief(b1, b2, eps, eps_root), scale_by_learning_rate(learning_rate))
