"""Adadelta."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..arithmetic import Number, Tree, elementwise, ema_of_squares
from ..base import Schedule, Transform, pointwise, tree_zeros_like
from ..naming import named
from ..transforms.weight_decay import with_coupled_decay
from ..wrappers.masking import Mask


class ScaleByAdaDeltaState(NamedTuple):
    """Adadelta's two means of squares."""

    e_g: Any  # like params: of the gradients
    e_x: Any  # like params: of the steps


@named
def scale_by_adadelta(rho: Number = 0.9, eps: Number = 1e-6) -> Transform:
    """Rescale updates as Adadelta (Zeiler, 2012, Algorithm 1) does. torch.optim.Adadelta's
    numerics; as optax.

    State: 2 tensors like params.
    """

    def init(params: Tree) -> ScaleByAdaDeltaState:
        return ScaleByAdaDeltaState(tree_zeros_like(params), tree_zeros_like(params))

    def update(
        updates: Tree, state: ScaleByAdaDeltaState, params: Tree
    ) -> tuple[Tree, ScaleByAdaDeltaState]:
        e_g = elementwise(lambda e, g: ema_of_squares(e, g, rho), state.e_g, updates)
        steps = elementwise(
            lambda g, x, e: (x + eps).sqrt() / (e + eps).sqrt() * g, updates, state.e_x, e_g
        )
        e_x = elementwise(lambda e, s: ema_of_squares(e, s, rho), state.e_x, steps)
        return steps, ScaleByAdaDeltaState(e_g, e_x)

    return pointwise(init, update)


@named
def adadelta(
    learning_rate: Number | Schedule = 1.0,
    rho: Number = 0.9,
    eps: Number = 1e-6,
    weight_decay: Number | Schedule = 0.0,
    weight_decay_mask: Mask | None = None,
) -> Transform:
    """Adadelta (Zeiler, 2012). torch.optim.Adadelta's numerics. State: 2 tensors like params."""
    return with_coupled_decay(
        scale_by_adadelta(rho, eps), weight_decay, learning_rate, weight_decay_mask
    )
