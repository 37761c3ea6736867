"""Pointwise transforms that keep a mean of the gradient and of its size: the Adam family.

Each result depends on the values at one position only, so none of these communicates. `count` is
the number of steps taken; `mu` and `nu` are the first and second moments, as in optax.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from optree import tree_map, tree_map_
from torch import Tensor

from ..arithmetic import (
    Number,
    Tree,
    bias_correction,
    elementwise,
    ema,
    ema_of_squares,
    full_like,
    is_zero,
    number,
)
from ..base import Schedule, Transform, pointwise, step_count, tree_zeros_like, value_of
from ..naming import named


class ScaleByAdamState(NamedTuple):
    """Adam's moments."""

    count: Tensor  # type: ignore[assignment]  # 0-d int64, on the CPU
    mu: Any  # like params: mean of the gradients
    nu: Any  # like params: mean of their squares


def _init_moments(params: Tree) -> ScaleByAdamState:
    return ScaleByAdamState(step_count(), tree_zeros_like(params), tree_zeros_like(params))


def _moments(updates: Tree, state: Any, b1: Number, b2: Number) -> ScaleByAdamState:
    """The moments after these updates."""
    mu = elementwise(lambda m, g: ema(m, g, b1), state.mu, updates)
    nu = elementwise(lambda v, g: ema_of_squares(v, g, b2), state.nu, updates)
    return ScaleByAdamState(state.count + 1, mu, nu)


def _root(nu: Tensor, eps_root: Number) -> Tensor:
    """`sqrt(nu + eps_root)`."""
    return nu.sqrt() if is_zero(eps_root) else (nu + eps_root).sqrt()


def _shift(eps_root: Number, c2: Tensor) -> Number:
    """The summand under the root that is `eps_root` after dividing by the root of `c2`."""
    return eps_root if is_zero(eps_root) else eps_root * c2


def _adam_directions(
    state: ScaleByAdamState, b1: Number, b2: Number, eps: Number, eps_root: Number
) -> Tree:
    """Adam's `mu_hat / (sqrt(nu_hat + eps_root) + eps)`."""
    c1, c2 = bias_correction(b1, state.count), bias_correction(b2, state.count)
    shift, root = _shift(eps_root, c2), c2.sqrt()
    return elementwise(lambda m, v: (m / c1) / (_root(v, shift) / root + eps), state.mu, state.nu)


@named
def scale_by_adam(
    b1: Number = 0.9, b2: Number = 0.999, eps: Number = 1e-8, eps_root: Number = 0.0
) -> Transform:
    """Rescale updates by Adam's moments (Kingma and Ba, 2015, Algorithm 1). torch.optim.Adam's
    numerics.

    State: 2 tensors like params, and a step count.

    Args:
        b1: decay of the mean of the gradients.
        b2: decay of the mean of their squares.
        eps: added to the denominator.
        eps_root: added under the root, for differentiating through a step (torch has none).
    """

    def update(
        updates: Tree, state: ScaleByAdamState, params: Tree
    ) -> tuple[Tree, ScaleByAdamState]:
        new = _moments(updates, state, b1, b2)
        return _adam_directions(new, b1, b2, eps, eps_root), new

    if isinstance(b1, Tensor) or isinstance(b2, Tensor) or not is_zero(eps_root):
        return pointwise(_init_moments, update)
    rest1, rest2 = 1 - b1, 1 - b2

    def in_place(
        updates: Tree, state: ScaleByAdamState, params: Tree
    ) -> tuple[Tree, ScaleByAdamState]:
        count = state.count + 1
        c1, root = bias_correction(b1, count), bias_correction(b2, count).sqrt()

        def move(g: Tensor, m: Tensor, v: Tensor) -> None:
            m.lerp_(g, rest1)
            v.mul_(b2).addcmul_(g, g, value=rest2)
            torch.div(m, c1, out=g).div_(v.sqrt().div_(root).add_(eps))

        tree_map_(move, updates, state.mu, state.nu)
        return updates, state._replace(count=count)

    return pointwise(_init_moments, update, in_place=in_place)


class ScaleByAmsgradState(NamedTuple):
    """Adam's moments, and the largest second moment so far."""

    count: Tensor  # type: ignore[assignment]  # 0-d int64, on the CPU
    mu: Any  # like params: mean of the gradients
    nu: Any  # like params: mean of their squares
    nu_max: Any  # like params: the largest nu so far


@named
def scale_by_amsgrad(
    b1: Number = 0.9, b2: Number = 0.999, eps: Number = 1e-8, eps_root: Number = 0.0
) -> Transform:
    """Rescale updates as AMSGrad (Reddi et al., 2018) does. torch.optim.Adam(amsgrad=True)'s
    numerics.

    That is the maximum of the second moments before their bias is corrected; optax takes it after.
    State: 3 tensors like params, and a step count. Arguments: see `scale_by_adam`.
    """

    def init(params: Tree) -> ScaleByAmsgradState:
        return ScaleByAmsgradState(*_init_moments(params), tree_zeros_like(params))

    def update(
        updates: Tree, state: ScaleByAmsgradState, params: Tree
    ) -> tuple[Tree, ScaleByAmsgradState]:
        new = _moments(updates, state, b1, b2)
        nu_max = tree_map(torch.maximum, state.nu_max, new.nu)
        directions = _adam_directions(new._replace(nu=nu_max), b1, b2, eps, eps_root)
        return directions, ScaleByAmsgradState(*new, nu_max)

    return pointwise(init, update)


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
        return ScaleByAdamaxState(*_init_moments(params))

    def update(
        updates: Tree, state: ScaleByAdamaxState, params: Tree
    ) -> tuple[Tree, ScaleByAdamaxState]:
        count = state.count + 1
        mu = elementwise(lambda m, g: ema(m, g, b1), state.mu, updates)
        nu = elementwise(lambda v, g: torch.maximum(v * b2, g.abs() + eps), state.nu, updates)
        c1 = bias_correction(b1, count)
        return elementwise(lambda m, v: m / c1 / v, mu, nu), ScaleByAdamaxState(count, mu, nu)

    return pointwise(init, update)


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
        count, mu, nu = _init_moments(params)
        return ScaleByNadamState(count, number(1.0), mu, nu)

    def update(
        updates: Tree, state: ScaleByNadamState, params: Tree
    ) -> tuple[Tree, ScaleByNadamState]:
        count, mu, nu = _moments(updates, state, b1, b2)
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
def scale_by_radam(
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
    threshold: Number = 5.0,
) -> Transform:
    """Rescale updates as Rectified Adam (Liu et al., 2020) does. torch.optim.RAdam's numerics.

    State: 2 tensors like params, and a step count.

    Args:
        threshold: of the variance's degrees of freedom, below which the step is the mean of the
            gradients. Others: see `scale_by_adam`.
    """

    def update(
        updates: Tree, state: ScaleByAdamState, params: Tree
    ) -> tuple[Tree, ScaleByAdamState]:
        new = _moments(updates, state, b1, b2)
        c1, c2 = bias_correction(b1, new.count), bias_correction(b2, new.count)
        limit = 2 / (1 - b2) - 1
        rho = limit - 2 * new.count * (1 - c2) / c2
        rect = ((rho - 4) * (rho - 2) * limit / ((limit - 4) * (limit - 2) * rho)).sqrt()
        # The denominator is `of_root * sqrt(nu) + of_one`: sqrt(nu) / rect where rectified, else 1.
        of_root = torch.where(rho > threshold, 1 / (rect * c2.sqrt()), number(0.0))
        of_one = torch.where(rho > threshold, number(0.0), number(1.0))
        directions = elementwise(
            lambda m, v: m / c1 / ((_root(v, eps_root) + eps) * of_root + of_one), new.mu, new.nu
        )
        return directions, new

    return pointwise(_init_moments, update)


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
        return _adam_directions(new, b1, b2, eps, 0.0), new

    return pointwise(_init_moments, update)


@named
def scale_by_yogi(
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-3,
    eps_root: Number = 0.0,
    initial_accumulator_value: Number = 1e-6,
) -> Transform:
    """Rescale updates as Yogi (Zaheer et al., 2018, Algorithm 2) does. As optax.

    State: 2 tensors like params, and a step count.

    Args:
        initial_accumulator_value: what both moments begin at. Others: see `scale_by_adam`.
    """

    def init(params: Tree) -> ScaleByAdamState:
        mu, nu = (full_like(params, initial_accumulator_value) for _ in range(2))
        return ScaleByAdamState(step_count(), mu, nu)

    def towards(v: Tensor, g: Tensor) -> Tensor:
        squares = g * g
        return v - (v - squares).sign() * squares * (1 - b2)

    def update(
        updates: Tree, state: ScaleByAdamState, params: Tree
    ) -> tuple[Tree, ScaleByAdamState]:
        mu = elementwise(lambda m, g: ema(m, g, b1), state.mu, updates)
        new = ScaleByAdamState(state.count + 1, mu, elementwise(towards, state.nu, updates))
        return _adam_directions(new, b1, b2, eps, eps_root), new

    return pointwise(init, update)


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
        shift, root = _shift(eps_root, c2), c2.sqrt()
        directions = elementwise(
            lambda a, b, v: (a / c1 + b * weight) / (_root(v, shift) / root + eps), m1, m2, nu
        )
        return directions, ScaleByAdemamixState(count, m1, m2, nu)

    return pointwise(init, update)


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
