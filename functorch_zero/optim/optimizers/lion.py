"""Lion: the sign of a mean of the gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from optree import tree_map
from torch import Tensor

from ..arithmetic import Number, Tree, ema
from ..base import NumberOrSchedule, Transform, chain, pointwise
from ..naming import named
from ..states import zeros
from ..transforms.scaling import scale_by_learning_rate
from ..transforms.weight_decay import add_decayed_weights
from ..wrappers.masking import Mask


class ScaleByLionState(NamedTuple):
    """Lion's mean of the gradients."""

    # 0-d int64, on the CPU; read by nothing here, and in files, as in optax
    count: Tensor  # type: ignore[assignment]
    mu: Any  # like params: running mean of the gradients


@named
def scale_by_lion(b1: Number = 0.9, b2: Number = 0.99) -> Transform:
    """Replace the updates g by the sign of their mixture with the mean before this step.

        update = sign(b1 * mu + (1 - b1) * g)
        mu = b2 * mu + (1 - b2) * g

    Source: Chen et al., 2023 (2302.06675), Algorithm 2; optax.scale_by_lion.

    Needs: pointwise. State: 1 tensor like params, and a step count.

    Args:
        b1: how much of the mean is in the sign.
        b2: decay of the mean, per step.
    """

    def update(
        updates: Tree, state: ScaleByLionState, params: Tree
    ) -> tuple[Tree, ScaleByLionState]:
        # Both mixtures are of the mean before; only the second stays
        signs = tree_map(torch.sign, ema(state.mu, updates, b1))
        mu = ema(state.mu, updates, b2)
        return signs, ScaleByLionState(state.count + 1, mu)

    return pointwise(zeros(ScaleByLionState), update, in_parts=True)


@named
def lion(
    learning_rate: NumberOrSchedule,
    b1: Number = 0.9,
    b2: Number = 0.99,
    *,
    weight_decay: NumberOrSchedule = 1e-3,
    mask: Mask | None = None,
) -> Transform:
    """Lion, with decoupled weight decay (g gradient, p param).

        update = -learning_rate * (scale_by_lion(g) + weight_decay * p)

    Source: Chen et al., 2023 (2302.06675); optax.lion.

    Needs: pointwise. State: 1 tensor like params.

    Args:
        learning_rate: the size of every element's step before decay, so commonly 3 to 10 times
            less than Adam's; a number or a schedule.
        weight_decay: decoupled, times the learning rate: per step.
        mask: which leaves decay; None for all. Others: see `scale_by_lion`.
    """
    return chain(
        scale_by_lion(b1, b2),
        # Behind the sign, which would hide the decay's size
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )
