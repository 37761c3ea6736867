"""AMSGrad: Adam over the largest second moment so far."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from optree import tree_map
from torch import Tensor

from ..arithmetic import Number, Tree
from ..base import NumberOrSchedule, Transform, chain, pointwise
from ..naming import named
from ..states import zeros
from ..transforms.moments import update_moments
from ..transforms.scaling import scale_by_learning_rate
from ..transforms.weight_decay import coupled_decay
from .adam import adam_directions


class ScaleByAmsgradState(NamedTuple):
    """Adam's moments, and the largest second moment so far."""

    count: Tensor  # type: ignore[assignment]  # 0-d int64, on the CPU
    mu: Any  # like params: running mean of the gradients
    nu: Any  # like params: running mean of the squared gradients
    nu_max: Any  # like params: the largest nu so far


@named
def scale_by_amsgrad(
    b1: Number = 0.9, b2: Number = 0.999, eps: Number = 1e-8, eps_root: Number = 0.0
) -> Transform:
    """Rescale the updates g by AMSGrad's moments, at step t (from 1).

        mu = b1 * mu + (1 - b1) * g
        nu = b2 * nu + (1 - b2) * g**2
        nu_max = max(nu_max, nu)
        update = mu / (1 - b1**t) / (sqrt(nu_max / (1 - b2**t) + eps_root) + eps)

    Source: Reddi et al., 2018 (1904.09237), Algorithm 2; torch.optim.Adam(amsgrad=True)'s numerics.
    torch corrects the bias of the maximum, optax takes the maximum of corrected moments, and the
    paper corrects none.

    Needs: pointwise. State: 3 tensors like params, and a step count.

    Arguments: see `scale_by_adam`.
    """

    def update(
        updates: Tree, state: ScaleByAmsgradState, params: Tree
    ) -> tuple[Tree, ScaleByAmsgradState]:
        # Of uncorrected moments, as in torch: the correction comes after the maximum
        moments = update_moments(updates, state, b1, b2)
        nu_max = tree_map(torch.maximum, state.nu_max, moments.nu)
        directions = adam_directions(moments._replace(nu=nu_max), b1, b2, eps, eps_root)
        return directions, ScaleByAmsgradState(moments.count, moments.mu, moments.nu, nu_max)

    return pointwise(zeros(ScaleByAmsgradState), update, in_parts=True)


@named
def amsgrad(
    learning_rate: NumberOrSchedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
    *,
    weight_decay: NumberOrSchedule = 0.0,
) -> Transform:
    """AMSGrad, with coupled weight decay (g gradient, p param).

        g = g + weight_decay * p
        update = -learning_rate * scale_by_amsgrad(g)

    Source: Reddi et al., 2018 (1904.09237); torch.optim.Adam(amsgrad=True).

    Needs: pointwise. State: 3 tensors like params.

    Args:
        learning_rate: a number or a schedule.
        weight_decay: coupled: joins the gradient. Others: see `scale_by_adam`.
    """
    return chain(
        *coupled_decay(weight_decay),
        scale_by_amsgrad(b1, b2, eps, eps_root),
        scale_by_learning_rate(learning_rate),
    )
