"""The trust ratio: the norm of a leaf's params over that of its update, for LARS, LAMB, Fromage."""

from __future__ import annotations

import torch
from optree import tree_map
from torch import Tensor

from ..across import Across
from ..arithmetic import Tree, on_numbers
from ..base import EmptyState, Transform, init_empty, with_statistics
from ..naming import named
from .norms import times


@named
def scale_by_trust_ratio(
    min_norm: float = 0.0, trust_coefficient: float = 1.0, eps: float = 0.0
) -> Transform:
    """Scale each leaf's update u by the norm of its params p over the norm of the update.

        update = u * trust_coefficient * norm(p) / (norm(u) + eps)

    The ratio is 1 where either norm is zero: fresh zeros must be able to move.

    Source: You et al., 2017 and 2020 (1708.03888, 1904.00962); optax.scale_by_trust_ratio.

    Needs: statistics, one all-reduce of two scalars per leaf. State: none.

    Args:
        min_norm: both norms count as at least this.
        trust_coefficient: multiplies the ratio.
        eps: added to the update's norm.
    """

    def trust(param_norm: Tensor, update_norm: Tensor) -> Tensor:
        # (n,), a number per whole leaf, at least float32
        param_norm = param_norm.clamp(min=min_norm)
        update_norm = update_norm.clamp(min=min_norm)
        ratio = trust_coefficient * param_norm / (update_norm + eps)
        # A condition on tensors: no value is read on the host
        either_is_zero = (param_norm == 0) | (update_norm == 0)
        return torch.where(either_is_zero, torch.ones_like(ratio), ratio)

    def update(
        updates: Tree, state: EmptyState, params: Tree, across: Across
    ) -> tuple[Tree, EmptyState]:
        # Both norms from one all-reduce
        param_norms, update_norms = across.norm(params, updates)
        ratios = on_numbers(trust, param_norms, update_norms)
        return tree_map(times, updates, ratios), state

    return with_statistics(init_empty, update)
