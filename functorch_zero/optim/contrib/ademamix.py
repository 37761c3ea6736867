"""AdEMAMix."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..arithmetic import Number, Tree, bias_correction, elementwise, ema, ema_of_squares
from ..base import Schedule, Transform, pointwise, step_count, tree_zeros_like, value_of
from ..naming import named
from ..transforms.moments import shifted_root, uncorrected_shift
from ..transforms.weight_decay import with_decoupled_decay
from ..wrappers.masking import Mask


class ScaleByAdemamixState(NamedTuple):
    """Two means of the gradients, a fast one and a slow one, and the second moment."""

    count: Tensor  # type: ignore[assignment]  # 0-d int64, on the CPU
    m1: Any  # like params: the fast mean
    m2: Any  # like params: the slow mean
    nu: Any  # like params: mean of the squares


@named
def scale_by_ademamix(
    b1: Number = 0.9,
    b2: Number = 0.999,
    b3: Number | Schedule = 0.9999,
    alpha: Number | Schedule = 6.0,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
) -> Transform:
    """Rescale updates as AdEMAMix (Pagliardini et al., 2024, Algorithm 1) does. As optax.contrib.

    State: 3 tensors like params, and a step count.

    Args:
        b3: decay of the slow mean, whose bias is not corrected; a number or a schedule.
        alpha: weight of the slow mean; a number or a schedule. Others: see `scale_by_adam`.
    """

    def init(params: Tree) -> ScaleByAdemamixState:
        return ScaleByAdemamixState(step_count(), *(tree_zeros_like(params) for _ in range(3)))

    def update(
        updates: Tree, state: ScaleByAdemamixState, params: Tree
    ) -> tuple[Tree, ScaleByAdemamixState]:
        count, decay, weight = (
            state.count + 1,
            value_of(b3, state.count),
            value_of(alpha, state.count),
        )
        m1 = elementwise(lambda m, g: ema(m, g, b1), state.m1, updates)
        m2 = elementwise(lambda m, g: ema(m, g, decay), state.m2, updates)
        nu = elementwise(lambda v, g: ema_of_squares(v, g, b2), state.nu, updates)
        c1, c2 = bias_correction(b1, count), bias_correction(b2, count)
        shift, root = uncorrected_shift(eps_root, c2), c2.sqrt()
        directions = elementwise(
            lambda a, b, v: (a / c1 + b * weight) / (shifted_root(v, shift) / root + eps),
            m1,
            m2,
            nu,
        )
        return directions, ScaleByAdemamixState(count, m1, m2, nu)

    return pointwise(init, update)


@named
def ademamix(
    learning_rate: Number | Schedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    b3: Number | Schedule = 0.9999,
    alpha: Number | Schedule = 5.0,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
    *,
    weight_decay: Number | Schedule = 0.0,
    mask: Mask | None = None,
) -> Transform:
    """AdEMAMix (Pagliardini et al., 2024), with decoupled decay. As optax.contrib. State: 3 tensors
    like params."""
    return with_decoupled_decay(
        scale_by_ademamix(b1, b2, b3, alpha, eps, eps_root), weight_decay, mask, learning_rate
    )
