"""Rprop: a step size per element, which grows while the gradient's sign stays."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arithmetic import Number, Tree, clamp, elementwise
from ..base import Transform, chain, pointwise
from ..naming import named
from ..states import zeros
from ..transforms.scaling import scale


class ScaleByRpropState(NamedTuple):
    """Rprop's step sizes."""

    step_sizes: Any  # like params: positive
    prev_updates: Any  # like params: the gradients before, 0 where their sign had changed


@named
def scale_by_rprop(
    learning_rate: Number,
    eta_minus: Number = 0.5,
    eta_plus: Number = 1.2,
    min_step_size: Number = 1e-6,
    max_step_size: Number = 50.0,
) -> Transform:
    """Replace the updates g by signed step sizes.

        step_sizes = step_sizes * eta_plus where g has the sign of the gradient before,
                     step_sizes * eta_minus where it has the other sign,
                     clamped to [min_step_size, max_step_size]
        update = sign(g) * step_sizes, or 0 where the sign has changed

    Source: Riedmiller and Braun, 1993 (A Direct Adaptive Method for Faster Backpropagation
    Learning); torch.optim.Rprop's numerics. optax's updates come one step later.

    Needs: pointwise. State: 2 tensors like params.

    Args:
        learning_rate: the first step size.
        eta_minus: a step size's factor where the sign has changed.
        eta_plus: its factor where the sign has stayed.
        min_step_size: the least step size.
        max_step_size: the largest.
    """

    def resize(size: Tensor, g: Tensor, prev: Tensor) -> Tensor:
        # Above 0 where signs agree, below 0 where they differ, 0 where either gradient is 0
        agreement = g * prev
        grown = torch.where(agreement > 0, size * eta_plus, size)
        resized = torch.where(agreement < 0, size * eta_minus, grown)
        return clamp(resized, min_step_size, max_step_size)

    def unless_turned(g: Tensor, prev: Tensor) -> Tensor:
        # Zero where the sign has changed: no step now, and no second halving in the next step
        return torch.where(g * prev < 0, torch.zeros_like(g), g)

    def update(
        updates: Tree, state: ScaleByRpropState, params: Tree
    ) -> tuple[Tree, ScaleByRpropState]:
        # By both gradients as they are, then the step by those that count
        sizes = elementwise(resize, state.step_sizes, updates, state.prev_updates)
        grads = elementwise(unless_turned, updates, state.prev_updates)
        steps = elementwise(lambda g, size: g.sign() * size, grads, sizes)
        return steps, ScaleByRpropState(sizes, grads)

    return pointwise(zeros(ScaleByRpropState, step_sizes=learning_rate), update, in_parts=True)


@named
def rprop(
    learning_rate: Number,
    eta_minus: Number = 0.5,
    eta_plus: Number = 1.2,
    min_step_size: Number = 1e-6,
    max_step_size: Number = 50.0,
) -> Transform:
    """Rprop, for gradients of the whole data rather than of batches (g gradient).

        update = -scale_by_rprop(g)

    Source: Riedmiller and Braun, 1993; torch.optim.Rprop, not optax's.

    Needs: pointwise. State: 2 tensors like params.

    Args:
        learning_rate: the first step size. Others: see `scale_by_rprop`.
    """
    return chain(
        scale_by_rprop(learning_rate, eta_minus, eta_plus, min_step_size, max_step_size),
        # Step sizes are learning rates already
        scale(-1.0),
    )
