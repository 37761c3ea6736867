"""Rprop."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arithmetic import Number, Tree, clamp, elementwise, full_like
from ..base import Transform, chain, pointwise, tree_zeros_like
from ..naming import named
from ..transforms.scaling import scale


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


@named
def rprop(
    learning_rate: Number,
    eta_minus: Number = 0.5,
    eta_plus: Number = 1.2,
    min_step_size: Number = 1e-6,
    max_step_size: Number = 50.0,
) -> Transform:
    """Rprop (Riedmiller and Braun, 1993). torch.optim.Rprop's numerics, not optax's. State: 2
    tensors like params.

    Arguments: see `scale_by_rprop`; `learning_rate` is the first step size.
    """
    return chain(
        scale_by_rprop(learning_rate, eta_minus, eta_plus, min_step_size, max_step_size),
        scale(-1.0),
    )
