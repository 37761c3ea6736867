"""NAdam."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..arithmetic import Number, Tree, bias_correction, elementwise, number
from ..base import Schedule, Transform, pointwise
from ..naming import named
from ..transforms.moments import init_moments, update_moments
from ..transforms.weight_decay import with_coupled_decay, with_decoupled_decay
from ..wrappers.masking import Mask


class ScaleByNadamState(NamedTuple):
    """Adam's moments, and the product of the momenta so far."""

    count: Tensor  # type: ignore[assignment]  # 0-d int64, on the CPU
    mu_product: Tensor  # 0-d float64, on the CPU (torch's is float32 by default)
    mu: Any  # like params: mean of the gradients
    nu: Any  # like params: mean of their squares


@named
def scale_by_nadam(
    b1: Number = 0.9, b2: Number = 0.999, eps: Number = 1e-8, momentum_decay: Number = 4e-3
) -> Transform:
    """Rescale updates as NAdam (Dozat, 2016, Algorithm 2) does. torch.optim.NAdam's numerics.

    The momentum warms up as `b1 * (1 - 0.96**(step * momentum_decay) / 2)`; optax's nadam has none
    of this. State: 2 tensors like params, a step count and a number.
    """

    def init(params: Tree) -> ScaleByNadamState:
        count, mu, nu = init_moments(params)
        return ScaleByNadamState(count, number(1.0), mu, nu)

    def update(
        updates: Tree, state: ScaleByNadamState, params: Tree
    ) -> tuple[Tree, ScaleByNadamState]:
        count, mu, nu = update_moments(updates, state, b1, b2)
        momentum, momentum_next = (
            b1 * (1 - 0.5 * 0.96 ** (t.double() * momentum_decay)) for t in (count, count + 1)
        )
        product = state.mu_product * momentum
        of_grad, of_mean = (
            (1 - momentum) / (1 - product),
            momentum_next / (1 - product * momentum_next),
        )
        c2 = bias_correction(b2, count)
        directions = elementwise(
            lambda g, m, v: (g * of_grad + m * of_mean) / ((v / c2).sqrt() + eps), updates, mu, nu
        )
        return directions, ScaleByNadamState(count, product, mu, nu)

    return pointwise(init, update)


@named
def nadam(
    learning_rate: Number | Schedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    momentum_decay: Number = 4e-3,
    *,
    weight_decay: Number | Schedule = 0.0,
) -> Transform:
    """NAdam (Dozat, 2016). torch.optim.NAdam's numerics, with its warm-up of the momentum, which
    optax lacks.

    State: 2 tensors like params.
    """
    return with_coupled_decay(
        scale_by_nadam(b1, b2, eps, momentum_decay), weight_decay, learning_rate
    )


@named
def nadamw(
    learning_rate: Number | Schedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    momentum_decay: Number = 4e-3,
    *,
    weight_decay: Number | Schedule = 1e-2,
    mask: Mask | None = None,
) -> Transform:
    """NAdam with decoupled weight decay. torch.optim.NAdam(decoupled_weight_decay=True)'s numerics;
    see `nadam`.

    State: 2 tensors like params.
    """
    return with_decoupled_decay(
        scale_by_nadam(b1, b2, eps, momentum_decay), weight_decay, mask, learning_rate
    )
