"""Lion."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..arithmetic import Number, Tree, elementwise, ema
from ..base import Schedule, Transform, pointwise, step_count, tree_zeros_like
from ..naming import named
from ..transforms.weight_decay import with_decoupled_decay
from ..wrappers.masking import Mask


class ScaleByLionState(NamedTuple):
    """Lion's mean of the gradients."""

    count: Tensor  # type: ignore[assignment]  # 0-d int64, on the CPU
    mu: Any  # like params


@named
def scale_by_lion(b1: Number = 0.9, b2: Number = 0.99) -> Transform:
    """Replace updates by a sign, as Lion (Chen et al., 2023, Algorithm 2) does. As optax.

    State: 1 tensor like params, and a step count.

    Args:
        b1: how much of the mean is in the sign: `sign(b1 * mu + (1 - b1) * g)`.
        b2: decay of the mean.
    """

    def init(params: Tree) -> ScaleByLionState:
        return ScaleByLionState(step_count(), tree_zeros_like(params))

    def update(
        updates: Tree, state: ScaleByLionState, params: Tree
    ) -> tuple[Tree, ScaleByLionState]:
        signs = elementwise(lambda m, g: ema(m, g, b1).sign(), state.mu, updates)
        mu = elementwise(lambda m, g: ema(m, g, b2), state.mu, updates)
        return signs, ScaleByLionState(state.count + 1, mu)

    return pointwise(init, update)


@named
def lion(
    learning_rate: Number | Schedule,
    b1: Number = 0.9,
    b2: Number = 0.99,
    *,
    weight_decay: Number | Schedule = 1e-3,
    mask: Mask | None = None,
) -> Transform:
    """Lion (Chen et al., 2023). As optax.lion. State: 1 tensor like params."""
    return with_decoupled_decay(scale_by_lion(b1, b2), weight_decay, mask, learning_rate)
