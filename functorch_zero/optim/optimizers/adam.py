"""Adam and AdamW: the mean of the gradients over the root of the mean of their squares."""

from __future__ import annotations

from dataclasses import replace

import torch
from optree import tree_map_
from torch import Tensor

from ..arithmetic import Number, Tree, bias_correction, elementwise, is_zero
from ..base import NumberOrSchedule, Transform, chain, pointwise
from ..kernels.fused_adamw import fused_adamw
from ..naming import named
from ..transforms.moments import (
    ScaleByAdamState,
    adam_denominator,
    init_moments,
    update_moments,
)
from ..transforms.scaling import scale_by_learning_rate
from ..transforms.weight_decay import add_decayed_weights, coupled_decay
from ..wrappers.masking import Mask


def adam_directions(
    state: ScaleByAdamState, b1: Number, b2: Number, eps: Number, eps_root: Number
) -> Tree:
    """Adam's directions from moments that are up to date: `scale_by_adam` has the formula."""
    c1 = bias_correction(b1, state.count)  # 0-d float64, on the CPU
    denominator = adam_denominator(b2, state.count, eps, eps_root)
    return elementwise(lambda m, v: m / c1 / denominator(v), state.mu, state.nu)


@named
def scale_by_adam(
    b1: Number = 0.9, b2: Number = 0.999, eps: Number = 1e-8, eps_root: Number = 0.0
) -> Transform:
    """Rescale the updates g by Adam's moments, at step t (from 1).

        mu = b1 * mu + (1 - b1) * g
        nu = b2 * nu + (1 - b2) * g**2
        mu_hat = mu / (1 - b1**t)
        nu_hat = nu / (1 - b2**t)
        update = mu_hat / (sqrt(nu_hat + eps_root) + eps)

    Source: Kingma and Ba, 2015 (1412.6980), Algorithm 1; torch.optim.Adam's numerics.

    Needs: pointwise. State: 2 tensors like params, and a step count.

    Args:
        b1: decay of the mean of the gradients, per step.
        b2: decay of the mean of their squares, per step.
        eps: added to the root, against division by zero.
        eps_root: added under the root, for differentiating through a step (torch has none).
    """

    def update(
        updates: Tree, state: ScaleByAdamState, params: Tree
    ) -> tuple[Tree, ScaleByAdamState]:
        new = update_moments(updates, state, b1, b2)
        return adam_directions(new, b1, b2, eps, eps_root), new

    # The kernels below take decays as numbers, and would need a temporary for eps_root
    if isinstance(b1, Tensor) or isinstance(b2, Tensor) or not is_zero(eps_root):
        return pointwise(init_moments, update, in_parts=True)
    rest1, rest2 = 1 - b1, 1 - b2

    def in_place(
        updates: Tree, state: ScaleByAdamState, params: Tree
    ) -> tuple[Tree, ScaleByAdamState]:
        """`update` to the bit, over donated gradients and moments: one temporary per leaf."""
        count = state.count + 1
        c1 = bias_correction(b1, count)
        root_of_c2 = bias_correction(b2, count).sqrt()

        def move(g: Tensor, m: Tensor, v: Tensor) -> None:
            m.lerp_(g, rest1)
            v.mul_(b2).addcmul_(g, g, value=rest2)
            # Nothing reads the gradient any more: its storage takes the direction
            denominator = v.sqrt().div_(root_of_c2).add_(eps)
            torch.div(m, c1, out=g).div_(denominator)

        # The updates' storage has the directions then, and the moments' storage the new moments
        tree_map_(move, updates, state.mu, state.nu)
        return updates, state._replace(count=count)

    return pointwise(init_moments, update, in_place=in_place, in_parts=True)


@named
def adam(
    learning_rate: NumberOrSchedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
    *,
    weight_decay: NumberOrSchedule = 0.0,
) -> Transform:
    """Adam, with coupled weight decay (g gradient, p param).

        g = g + weight_decay * p
        update = -learning_rate * scale_by_adam(g)

    Source: Kingma and Ba, 2015 (1412.6980); torch.optim.Adam.

    Needs: pointwise. State: 2 tensors like params.

    Args:
        learning_rate: a number or a schedule.
        weight_decay: coupled: joins the gradient. Others: see `scale_by_adam`.
    """
    return chain(
        *coupled_decay(weight_decay),
        scale_by_adam(b1, b2, eps, eps_root),
        scale_by_learning_rate(learning_rate),
    )


@named
def adamw(
    learning_rate: NumberOrSchedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
    *,
    weight_decay: NumberOrSchedule = 1e-2,
    mask: Mask | None = None,
) -> Transform:
    """AdamW, Adam with decoupled weight decay (g gradient, p param).

        update = -learning_rate * (scale_by_adam(g) + weight_decay * p)

    Source: Loshchilov and Hutter, 2019 (1711.05101), Algorithm 2; torch.optim.AdamW, with its
    default weight decay (optax: 1e-4).

    Needs: pointwise. State: 2 tensors like params. On donated storage it runs as torch's fused
    kernel, with the same numbers up to rounding.

    Args:
        learning_rate: a number or a schedule.
        weight_decay: decoupled, times the learning rate: per step.
        mask: which leaves decay; None for all. Others: see `scale_by_adam`.
    """
    # The definition: it runs wherever storage was not donated, and the kernel is compared with it
    pure = chain(
        scale_by_adam(b1, b2, eps, eps_root),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )
    # torch's kernel decays all leaves, takes numbers, and has no eps_root
    has_numbers = all(isinstance(x, int | float) for x in (b1, b2, eps))
    if pure.plain is None or not has_numbers or not is_zero(eps_root):
        return pure
    # Schedules of rate and decay are fine: it looks them up step by step
    kernel = fused_adamw(pure.plain, learning_rate, b1, b2, eps, weight_decay)  # type: ignore[arg-type]
    return replace(pure, fused=kernel)
