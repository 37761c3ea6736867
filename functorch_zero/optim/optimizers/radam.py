"""Rectified Adam: Adam once its second moment has seen enough gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from ..arithmetic import Number, Tree, bias_correction, elementwise, number
from ..base import NumberOrSchedule, Transform, chain, pointwise
from ..naming import named
from ..transforms.moments import ScaleByAdamState, init_moments, shifted_root, update_moments
from ..transforms.scaling import scale_by_learning_rate
from ..transforms.weight_decay import coupled_decay


@named
def scale_by_radam(
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
    threshold: Number = 5.0,
) -> Transform:
    """Rescale the updates g as Rectified Adam does, at step t (from 1).

        mu = b1 * mu + (1 - b1) * g
        nu = b2 * nu + (1 - b2) * g**2
        rho_inf = 2 / (1 - b2) - 1
        rho = rho_inf - 2 * t * b2**t / (1 - b2**t)
        rect = sqrt((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho))
        mu_hat = mu / (1 - b1**t)
        update = rect * mu_hat * sqrt(1 - b2**t) / (sqrt(nu + eps_root) + eps)
                 where rho > threshold, else mu_hat

    Source: Liu et al., 2020 (1908.03265), Algorithm 2; torch.optim.RAdam's numerics, which add eps
    before the root is corrected.

    Needs: pointwise. State: 2 tensors like params, and a step count.

    Args:
        threshold: of rho, the second moment's degrees of freedom, up to which a step is the mean of
            the gradients; 5 as in torch (the paper: 4). Others: see `scale_by_adam`.
    """

    def update(
        updates: Tree, state: ScaleByAdamState, params: Tree
    ) -> tuple[Tree, ScaleByAdamState]:
        new = update_moments(updates, state, b1, b2)
        c1 = bias_correction(b1, new.count)  # 0-d float64, on the CPU, as all of these are
        c2 = bias_correction(b2, new.count)
        # rho's value after very many steps
        limit = 2 / (1 - b2) - 1
        rho = limit - 2 * new.count * (1 - c2) / c2
        # Up to the threshold it may be NaN, and is not taken
        numerator = (rho - 4) * (rho - 2) * limit
        denominator = (limit - 4) * (limit - 2) * rho
        rect = (numerator / denominator).sqrt()
        # The two cases in one formula, so that no value is read on the host. The denominator is
        # `of_root * (sqrt(nu) + eps) + of_one`: the first where rectified, else 1
        rectified = rho > threshold
        of_root = torch.where(rectified, 1 / (rect * c2.sqrt()), number(0.0))
        of_one = torch.where(rectified, number(0.0), number(1.0))

        def direction(m: Tensor, v: Tensor) -> Tensor:
            corrected = m / c1
            return corrected / ((shifted_root(v, eps_root) + eps) * of_root + of_one)

        return elementwise(direction, new.mu, new.nu), new

    return pointwise(init_moments, update, in_parts=True)


@named
def radam(
    learning_rate: NumberOrSchedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
    threshold: Number = 5.0,
    *,
    weight_decay: NumberOrSchedule = 0.0,
) -> Transform:
    """Rectified Adam, with coupled weight decay (g gradient, p param).

        g = g + weight_decay * p
        update = -learning_rate * scale_by_radam(g)

    Source: Liu et al., 2020 (1908.03265); torch.optim.RAdam.

    Needs: pointwise. State: 2 tensors like params.

    Args:
        learning_rate: a number or a schedule.
        weight_decay: coupled: joins the gradient. Others: see `scale_by_radam`.
    """
    return chain(
        *coupled_decay(weight_decay),
        scale_by_radam(b1, b2, eps, eps_root, threshold),
        scale_by_learning_rate(learning_rate),
    )
