"""Rectified Adam."""

from __future__ import annotations

import torch

from ..arithmetic import Number, Tree, bias_correction, elementwise, number
from ..base import Schedule, Transform, pointwise
from ..naming import named
from ..transforms.moments import ScaleByAdamState, init_moments, shifted_root, update_moments
from ..transforms.weight_decay import with_coupled_decay


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
        new = update_moments(updates, state, b1, b2)
        c1, c2 = bias_correction(b1, new.count), bias_correction(b2, new.count)
        limit = 2 / (1 - b2) - 1
        rho = limit - 2 * new.count * (1 - c2) / c2
        rect = ((rho - 4) * (rho - 2) * limit / ((limit - 4) * (limit - 2) * rho)).sqrt()
        # The denominator is `of_root * sqrt(nu) + of_one`: sqrt(nu) / rect where rectified, else 1.
        of_root = torch.where(rho > threshold, 1 / (rect * c2.sqrt()), number(0.0))
        of_one = torch.where(rho > threshold, number(0.0), number(1.0))
        directions = elementwise(
            lambda m, v: m / c1 / ((shifted_root(v, eps_root) + eps) * of_root + of_one),
            new.mu,
            new.nu,
        )
        return directions, new

    return pointwise(init_moments, update)


@named
def radam(
    learning_rate: Number | Schedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
    threshold: Number = 5.0,
    *,
    weight_decay: Number | Schedule = 0.0,
) -> Transform:
    """Rectified Adam (Liu et al., 2020). torch.optim.RAdam's numerics. State: 2 tensors like
    params."""
    return with_coupled_decay(
        scale_by_radam(b1, b2, eps, eps_root, threshold), weight_decay, learning_rate
    )
