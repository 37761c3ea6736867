"""Adam and AdamW."""

from __future__ import annotations

from dataclasses import replace

import torch
from optree import tree_map_
from torch import Tensor

from ..arithmetic import Number, Tree, bias_correction, elementwise, is_zero
from ..base import Schedule, Transform, pointwise
from ..kernels.fused_adamw import fused_adamw
from ..naming import named
from ..transforms.moments import (
    ScaleByAdamState,
    init_moments,
    shifted_root,
    uncorrected_shift,
    update_moments,
)
from ..transforms.weight_decay import with_coupled_decay, with_decoupled_decay
from ..wrappers.masking import Mask


def adam_directions(
    state: ScaleByAdamState, b1: Number, b2: Number, eps: Number, eps_root: Number
) -> Tree:
    """Adam's `mu_hat / (sqrt(nu_hat + eps_root) + eps)`."""
    c1, c2 = bias_correction(b1, state.count), bias_correction(b2, state.count)
    shift, root = uncorrected_shift(eps_root, c2), c2.sqrt()
    return elementwise(
        lambda m, v: (m / c1) / (shifted_root(v, shift) / root + eps), state.mu, state.nu
    )


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
        new = update_moments(updates, state, b1, b2)
        return adam_directions(new, b1, b2, eps, eps_root), new

    if isinstance(b1, Tensor) or isinstance(b2, Tensor) or not is_zero(eps_root):
        return pointwise(init_moments, update)
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

    return pointwise(init_moments, update, in_place=in_place)


@named
def adam(
    learning_rate: Number | Schedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
    *,
    weight_decay: Number | Schedule = 0.0,
) -> Transform:
    """Adam (Kingma and Ba, 2015). torch.optim.Adam's numerics. State: 2 tensors like params."""
    return with_coupled_decay(scale_by_adam(b1, b2, eps, eps_root), weight_decay, learning_rate)


@named
def adamw(
    learning_rate: Number | Schedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
    *,
    weight_decay: Number | Schedule = 1e-2,
    mask: Mask | None = None,
) -> Transform:
    """AdamW (Loshchilov and Hutter, 2019). torch.optim.AdamW's numerics and default weight decay
    (optax: 1e-4).

    State: 2 tensors like params. On donated storage it runs as torch's fused kernel.
    """
    pure = with_decoupled_decay(
        scale_by_adam(b1, b2, eps, eps_root), weight_decay, mask, learning_rate
    )
    has_numbers = all(isinstance(x, int | float) for x in (b1, b2, eps))
    if mask is not None or not has_numbers or not is_zero(eps_root):
        return pure
    kernel = fused_adamw(learning_rate, b1, b2, eps, weight_decay)  # type: ignore[arg-type]
    return replace(pure, fused=kernel)
