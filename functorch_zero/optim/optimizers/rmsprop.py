"""Pointwise transforms that rescale by a mean or sum of squares alone, and Rprop's step sizes.

Each result depends on the values at one position only, so none of these communicates.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arithmetic import (
    Number,
    Tree,
    bias_correction,
    clamp,
    elementwise,
    ema,
    ema_of_squares,
    full_like,
)
from ..base import Transform, pointwise, step_count, tree_zeros_like
from ..naming import named


class ScaleByRssState(NamedTuple):
    """Adagrad's sums."""

    sum_of_squares: Any  # like params


@named
def scale_by_rss(initial_accumulator_value: Number = 0.0, eps: Number = 1e-10) -> Transform:
    """Rescale updates by the root of the sum of their squares so far (Duchi et al., 2011).
    torch.optim.Adagrad's.

    optax begins at 0.1, takes eps 1e-7 and adds it under the root. State: 1 tensor like params.
    """

    def init(params: Tree) -> ScaleByRssState:
        return ScaleByRssState(full_like(params, initial_accumulator_value))

    def update(updates: Tree, state: ScaleByRssState, params: Tree) -> tuple[Tree, ScaleByRssState]:
        sums = elementwise(lambda s, g: torch.addcmul(s, g, g), state.sum_of_squares, updates)
        return elementwise(lambda g, s: g / (s.sqrt() + eps), updates, sums), ScaleByRssState(sums)

    return pointwise(init, update)


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


class ScaleByRpropState(NamedTuple):
    """Rprop's step sizes."""

    step_sizes: Any  # like params
    prev_updates: Any  # like params: the gradients before, 0 where their sign had changed


@named
def scale_by_rprop(
    learning_rate: Number,
    eta_minus: Number = 0.5,
    eta_plus: Number = 1.2,
    min_step_size: Number = 1e-6,
    max_step_size: Number = 50.0,
) -> Transform:
    """Replace updates by signed step sizes that grow while the sign stays (Riedmiller and Braun,
    1993).

    torch.optim.Rprop's numerics; optax's updates come one step later. State: 2 tensors like params.

    Args:
        learning_rate: the first step size.
        eta_minus: a step size's factor where the sign has changed; the update there is 0 once.
        eta_plus: its factor where the sign has stayed.
        min_step_size: the least step size.
        max_step_size: the largest.
    """

    def init(params: Tree) -> ScaleByRpropState:
        return ScaleByRpropState(full_like(params, learning_rate), tree_zeros_like(params))

    def resize(size: Tensor, g: Tensor, prev: Tensor) -> Tensor:
        agreement = g * prev
        grown = torch.where(agreement > 0, size * eta_plus, size)
        return clamp(
            torch.where(agreement < 0, size * eta_minus, grown), min_step_size, max_step_size
        )

    def update(
        updates: Tree, state: ScaleByRpropState, params: Tree
    ) -> tuple[Tree, ScaleByRpropState]:
        sizes = elementwise(resize, state.step_sizes, updates, state.prev_updates)
        kept = elementwise(
            lambda g, prev: torch.where(g * prev < 0, torch.zeros_like(g), g),
            updates,
            state.prev_updates,
        )
        return elementwise(lambda g, s: g.sign() * s, kept, sizes), ScaleByRpropState(sizes, kept)

    return pointwise(init, update)
