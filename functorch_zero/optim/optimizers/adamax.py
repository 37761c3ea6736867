"""AdaMax."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arithmetic import Number, Tree, bias_correction, elementwise, ema
from ..base import Schedule, Transform, pointwise
from ..naming import named
from ..transforms.moments import init_moments
from ..transforms.weight_decay import with_coupled_decay, with_decoupled_decay
from ..wrappers.masking import Mask


class ScaleByAdamaxState(NamedTuple):
    """AdaMax's moments."""

    count: Tensor  # type: ignore[assignment]  # 0-d int64, on the CPU
    mu: Any  # like params: mean of the gradients
    nu: Any  # like params: decaying maximum of their sizes


@named
def scale_by_adamax(b1: Number = 0.9, b2: Number = 0.999, eps: Number = 1e-8) -> Transform:
    """Rescale updates as AdaMax (Kingma and Ba, 2015, Algorithm 2) does. torch.optim.Adamax's
    numerics.

    State: 2 tensors like params, and a step count.
    """

    def init(params: Tree) -> ScaleByAdamaxState:
        return ScaleByAdamaxState(*init_moments(params))

    def update(
        updates: Tree, state: ScaleByAdamaxState, params: Tree
    ) -> tuple[Tree, ScaleByAdamaxState]:
        count = state.count + 1
        mu = elementwise(lambda m, g: ema(m, g, b1), state.mu, updates)
        nu = elementwise(lambda v, g: torch.maximum(v * b2, g.abs() + eps), state.nu, updates)
        c1 = bias_correction(b1, count)
        return elementwise(lambda m, v: m / c1 / v, mu, nu), ScaleByAdamaxState(count, mu, nu)

    return pointwise(init, update)


@named
def adamax(
    learning_rate: Number | Schedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    *,
    weight_decay: Number | Schedule = 0.0,
) -> Transform:
    """AdaMax (Kingma and Ba, 2015, Algorithm 2). torch.optim.Adamax's numerics. State: 2 tensors
    like params."""
    return with_coupled_decay(scale_by_adamax(b1, b2, eps), weight_decay, learning_rate)


@named
def adamaxw(
    learning_rate: Number | Schedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    *,
    weight_decay: Number | Schedule = 1e-4,
    mask: Mask | None = None,
) -> Transform:
    """AdaMax with decoupled weight decay. As optax.adamaxw. State: 2 tensors like params."""
    return with_decoupled_decay(scale_by_adamax(b1, b2, eps), weight_decay, mask, learning_rate)
