"""RMSprop."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arithmetic import Number, Tree, bias_correction, elementwise, ema, ema_of_squares, full_like
from ..base import Schedule, Transform, chain, pointwise, step_count, tree_zeros_like
from ..naming import named
from ..transforms.momentum import trace
from ..transforms.weight_decay import with_coupled_decay


class ScaleByRmsState(NamedTuple):
    """RMSprop's mean of squares."""

    count: Tensor  # type: ignore[assignment]  # 0-d int64, on the CPU
    nu: Any  # like params: mean of the squares


@named
def scale_by_rms(
    decay: Number = 0.99,
    eps: Number = 1e-8,
    initial_scale: Number = 0.0,
    eps_in_sqrt: bool = False,
    bias_correction: bool = False,
) -> Transform:
    """Rescale updates by the root of the mean of their squares (Hinton, 2012).
    torch.optim.RMSprop's numerics.

    optax's defaults differ: decay 0.9, eps under the root. State: 1 tensor like params, and a step
    count.

    Args:
        decay: of the mean, per step (torch's `alpha`).
        eps: added to the denominator.
        initial_scale: what the mean begins at.
        eps_in_sqrt: add eps under the root instead.
        bias_correction: divide the mean by `1 - decay**steps`, as Adam does.
    """

    def init(params: Tree) -> ScaleByRmsState:
        return ScaleByRmsState(step_count(), full_like(params, initial_scale))

    def update(updates: Tree, state: ScaleByRmsState, params: Tree) -> tuple[Tree, ScaleByRmsState]:
        count = state.count + 1
        nu = elementwise(lambda v, g: ema_of_squares(v, g, decay), state.nu, updates)
        means = _corrected(nu, decay, count) if bias_correction else nu
        return elementwise(
            lambda g, v: g / _root(v, eps, eps_in_sqrt), updates, means
        ), ScaleByRmsState(count, nu)

    return pointwise(init, update)


class ScaleByStddevState(NamedTuple):
    """Centred RMSprop's means."""

    count: Tensor  # type: ignore[assignment]  # 0-d int64, on the CPU
    mu: Any  # like params: mean of the gradients
    nu: Any  # like params: mean of their squares


@named
def scale_by_stddev(
    decay: Number = 0.99,
    eps: Number = 1e-8,
    initial_scale: Number = 0.0,
    eps_in_sqrt: bool = False,
    bias_correction: bool = False,
) -> Transform:
    """Rescale updates by their standard deviation (Graves, 2013).
    torch.optim.RMSprop(centered=True)'s numerics.

    State: 2 tensors like params, and a step count. Arguments: see `scale_by_rms`.
    """

    def init(params: Tree) -> ScaleByStddevState:
        return ScaleByStddevState(
            step_count(), tree_zeros_like(params), full_like(params, initial_scale)
        )

    def update(
        updates: Tree, state: ScaleByStddevState, params: Tree
    ) -> tuple[Tree, ScaleByStddevState]:
        count = state.count + 1
        mu = elementwise(lambda m, g: ema(m, g, decay), state.mu, updates)
        nu = elementwise(lambda v, g: ema_of_squares(v, g, decay), state.nu, updates)
        m, v = (_corrected(t, decay, count) if bias_correction else t for t in (mu, nu))
        # Where gradients hardly vary, rounding may leave less than nothing.
        variances = elementwise(lambda m, v: torch.addcmul(v, m, m, value=-1).clamp(min=0), m, v)
        scaled = elementwise(lambda g, v: g / _root(v, eps, eps_in_sqrt), updates, variances)
        return scaled, ScaleByStddevState(count, mu, nu)

    return pointwise(init, update)


def _root(nu: Tensor, eps: Number, inside: bool) -> Tensor:
    return (nu + eps).sqrt() if inside else nu.sqrt() + eps


def _corrected(mean: Tree, decay: Number, count: Tensor) -> Tree:
    c = bias_correction(decay, count)
    return elementwise(lambda m: m / c, mean)


@named
def rmsprop(
    learning_rate: Number | Schedule,
    decay: Number = 0.99,
    eps: Number = 1e-8,
    initial_scale: Number = 0.0,
    eps_in_sqrt: bool = False,
    centered: bool = False,
    momentum: Number | None = None,
    nesterov: bool = False,
    bias_correction: bool = False,
    *,
    weight_decay: Number | Schedule = 0.0,
) -> Transform:
    """RMSprop (Hinton, 2012; centred: Graves, 2013). torch.optim.RMSprop's numerics and defaults.

    optax differs: decay 0.9, eps under the root, and momentum after the learning rate, which
    matters while that changes. State: 1 tensor like params, one more if centred, one more with
    momentum. Arguments:
        see `scale_by_rms`.
    """
    rescale = scale_by_stddev if centered else scale_by_rms
    momenta = () if momentum is None else (trace(momentum, nesterov),)
    directions = chain(rescale(decay, eps, initial_scale, eps_in_sqrt, bias_correction), *momenta)
    return with_coupled_decay(directions, weight_decay, learning_rate)
