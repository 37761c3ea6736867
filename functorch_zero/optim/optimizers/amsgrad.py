"""AMSGrad."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from optree import tree_map
from torch import Tensor

from ..arithmetic import Number, Tree
from ..base import Schedule, Transform, pointwise, tree_zeros_like
from ..naming import named
from ..transforms.moments import init_moments, update_moments
from ..transforms.weight_decay import with_coupled_decay
from .adam import adam_directions


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
        return ScaleByAmsgradState(*init_moments(params), tree_zeros_like(params))

    def update(
        updates: Tree, state: ScaleByAmsgradState, params: Tree
    ) -> tuple[Tree, ScaleByAmsgradState]:
        new = update_moments(updates, state, b1, b2)
        nu_max = tree_map(torch.maximum, state.nu_max, new.nu)
        directions = adam_directions(new._replace(nu=nu_max), b1, b2, eps, eps_root)
        return directions, ScaleByAmsgradState(*new, nu_max)

    return pointwise(init, update)


@named
def amsgrad(
    learning_rate: Number | Schedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
    *,
    weight_decay: Number | Schedule = 0.0,
) -> Transform:
    """AMSGrad (Reddi et al., 2018). torch.optim.Adam(amsgrad=True)'s numerics. State: 3 tensors
    like params."""
    return with_coupled_decay(scale_by_amsgrad(b1, b2, eps, eps_root), weight_decay, learning_rate)
