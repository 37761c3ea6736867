"""RMSprop, plain and centred: gradients over a running estimate of their size."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arithmetic import Number, Tree, bias_correction, elementwise, ema, ema_of_squares
from ..base import NumberOrSchedule, Transform, chain, pointwise
from ..naming import named
from ..states import zeros
from ..transforms.momentum import trace
from ..transforms.scaling import scale_by_learning_rate
from ..transforms.weight_decay import coupled_decay


class ScaleByRmsState(NamedTuple):
    """RMSprop's mean of squares."""

    count: Tensor  # type: ignore[assignment]  # 0-d int64, on the CPU
    nu: Any  # like params: running mean of the squared gradients


@named
def scale_by_rms(
    decay: Number = 0.99,
    eps: Number = 1e-8,
    initial_scale: Number = 0.0,
    eps_in_sqrt: bool = False,
    bias_correction: bool = False,
) -> Transform:
    """Divide the updates g by the root of the mean of their squares.

        nu = decay * nu + (1 - decay) * g**2
        update = g / (sqrt(nu) + eps)    (with eps_in_sqrt: g / sqrt(nu + eps))

    With bias_correction the root is of nu / (1 - decay**t), at step t from 1.

    Source: Hinton, 2012 (lecture 6e of Neural Networks for Machine Learning); torch.optim.RMSprop's
    numerics. optax's defaults differ: decay 0.9, eps under the root.

    Needs: pointwise. State: 1 tensor like params, and a step count.

    Args:
        decay: of the mean, per step (torch's `alpha`).
        eps: added to the root, against division by zero.
        initial_scale: the mean begins at it.
        eps_in_sqrt: add eps under the root instead.
        bias_correction: correct the mean for having begun at zero, as Adam does.
    """

    def update(updates: Tree, state: ScaleByRmsState, params: Tree) -> tuple[Tree, ScaleByRmsState]:
        count = state.count + 1
        nu = ema_of_squares(state.nu, updates, decay)
        # The state keeps the uncorrected mean
        means = _corrected(nu, decay, count) if bias_correction else nu
        directions = elementwise(lambda g, v: g / _root(v, eps, eps_in_sqrt), updates, means)
        return directions, ScaleByRmsState(count, nu)

    return pointwise(zeros(ScaleByRmsState, nu=initial_scale), update, in_parts=True)


class ScaleByStddevState(NamedTuple):
    """Centred RMSprop's means."""

    count: Tensor  # type: ignore[assignment]  # 0-d int64, on the CPU
    mu: Any  # like params: running mean of the gradients
    nu: Any  # like params: running mean of the squared gradients


@named
def scale_by_stddev(
    decay: Number = 0.99,
    eps: Number = 1e-8,
    initial_scale: Number = 0.0,
    eps_in_sqrt: bool = False,
    bias_correction: bool = False,
) -> Transform:
    """Divide the updates g by their standard deviation over the steps.

        mu = decay * mu + (1 - decay) * g
        nu = decay * nu + (1 - decay) * g**2
        update = g / (sqrt(max(nu - mu**2, 0)) + eps)

    Source: Graves, 2013 (1308.0850), section 4.2; torch.optim.RMSprop(centered=True)'s numerics,
    but for the maximum with 0: torch's root of less than 0 is NaN.

    Needs: pointwise. State: 2 tensors like params, and a step count.

    Arguments: see `scale_by_rms`.
    """

    def variance(m: Tensor, v: Tensor) -> Tensor:
        # Where gradients hardly vary, rounding may leave less than nothing
        return torch.addcmul(v, m, m, value=-1).clamp(min=0)

    def update(
        updates: Tree, state: ScaleByStddevState, params: Tree
    ) -> tuple[Tree, ScaleByStddevState]:
        count = state.count + 1
        mu = ema(state.mu, updates, decay)
        nu = ema_of_squares(state.nu, updates, decay)
        # Both means began at zero, and lack the same factor
        if bias_correction:
            means, squares = _corrected(mu, decay, count), _corrected(nu, decay, count)
        else:
            means, squares = mu, nu
        variances = elementwise(variance, means, squares)
        directions = elementwise(lambda g, v: g / _root(v, eps, eps_in_sqrt), updates, variances)
        return directions, ScaleByStddevState(count, mu, nu)

    return pointwise(zeros(ScaleByStddevState, nu=initial_scale), update, in_parts=True)


def _root(nu: Tensor, eps: Number, inside: bool) -> Tensor:
    return (nu + eps).sqrt() if inside else nu.sqrt() + eps


def _corrected(mean: Tree, decay: Number, count: Tensor) -> Tree:
    """A mean that began at zero, divided by its lack after `count` steps."""
    correction = bias_correction(decay, count)
    return elementwise(lambda m: m / correction, mean)


@named
def rmsprop(
    learning_rate: NumberOrSchedule,
    decay: Number = 0.99,
    eps: Number = 1e-8,
    initial_scale: Number = 0.0,
    eps_in_sqrt: bool = False,
    centered: bool = False,
    momentum: Number | None = None,
    nesterov: bool = False,
    bias_correction: bool = False,
    *,
    weight_decay: NumberOrSchedule = 0.0,
) -> Transform:
    """RMSprop, with coupled weight decay (g gradient, p param).

        g = g + weight_decay * p
        u = scale_by_rms(g), centered: scale_by_stddev(g)
        update = -learning_rate * u, with momentum -learning_rate * trace(u, momentum)

    Source: Hinton, 2012; centred: Graves, 2013 (1308.0850); torch.optim.RMSprop, with its defaults.
    optax differs: decay 0.9, eps under the root, and momentum after the learning rate, which
    matters while that changes.

    Needs: pointwise. State: 1 tensor like params, one more if centred, one more with momentum.

    Args:
        learning_rate: a number or a schedule.
        centered: divide by the standard deviation, see `scale_by_stddev`.
        momentum: decay of a sum of the directions, per step, see `trace`; None keeps no sum.
        nesterov: of the momentum.
        weight_decay: coupled: joins the gradient. Others: see `scale_by_rms`.
    """
    rescale = scale_by_stddev if centered else scale_by_rms
    # Momentum comes behind the division and in front of the learning rate, as in torch
    links = [rescale(decay, eps, initial_scale, eps_in_sqrt, bias_correction)]
    if momentum is not None:
        links.append(trace(momentum, nesterov))
    return chain(
        *coupled_decay(weight_decay),
        # A chain of its own, also of one link: paths in checkpoint files count its links
        chain(*links),
        scale_by_learning_rate(learning_rate),
    )
