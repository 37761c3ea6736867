"""Clipping, of elements or by norms."""

from __future__ import annotations

from typing import NamedTuple

import torch
from optree import tree_leaves, tree_map
from torch import Tensor

from ...tree import PyTree
from ..across import Across, Dims
from ..arithmetic import Number, clamp, elementwise
from ..base import (
    EmptyState,
    Schedule,
    Transform,
    init_empty,
    pointwise,
    step_count,
    value_of,
    with_statistics,
)
from ..naming import named
from ..states import CountState, init_count
from .norms import global_norm, safe_square, times


@named
def clip(max_delta: Number) -> Transform:
    """Clip every element of the updates to [-max_delta, max_delta]. As optax.clip and torch's
    clip_grad_value_."""

    def update(updates: Tree, state: EmptyState, params: Tree) -> tuple[Tree, EmptyState]:
        return elementwise(lambda u: clamp(u, -max_delta, max_delta), updates), state

    return pointwise(init_empty, update)


Tree = PyTree[Tensor]


class ClipByGlobalNormState(NamedTuple):
    """The findings of the last step's clipping."""

    count: Tensor  # type: ignore[assignment]  # 0-d int64, on the CPU
    norm: Tensor  # 0-d float64: of the updates it was given; 0 before the first step
    factor: Tensor  # 0-d float64: what they were multiplied by

    def report(self) -> dict[str, Tensor]:
        return {"clip_norm": self.norm, "clip_factor": self.factor}


@named
def clip_by_global_norm(max_norm: float | Schedule) -> Transform:
    """Scale all updates down together so that the norm of the whole tree is at most `max_norm`.

    Source: Pascanu et al., 2013 (1211.5063); optax.clip_by_global_norm.
    torch.nn.utils.clip_grad_norm_ divides by `norm + 1e-6` instead, so it clips to a little less.

    State: three numbers. Sharded: one all-reduce of a scalar per leaf.
    """

    def init(params: Tree) -> ClipByGlobalNormState:
        like = next(iter(tree_leaves(params)), torch.zeros(()))
        return ClipByGlobalNormState(
            step_count(), *(like.new_full((), x, dtype=torch.float64) for x in (0, 1))
        )

    def update(
        updates: Tree, state: ClipByGlobalNormState, params: Tree, across: Across
    ) -> tuple[Tree, ClipByGlobalNormState]:
        limit, norm = value_of(max_norm, state.count), global_norm(updates, across)
        factor = torch.where(norm < limit, torch.ones_like(norm), limit / norm)
        clipped = tree_map(lambda u: times(u, factor), updates)
        return clipped, ClipByGlobalNormState(state.count + 1, norm.double(), factor.double())

    return with_statistics(init, update)


def unit_dims(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The dims that a unit-wise norm sums over: all but the first; all of them when only one dim is
    longer than 1."""
    if sum(size != 1 for size in shape) <= 1:
        return tuple(range(len(shape)))
    return tuple(range(1, len(shape)))


@named
def adaptive_grad_clip(
    clipping: float | Schedule, eps: float = 1e-3, axis: Dims | None = None
) -> Transform:
    """Clip each unit's update to at most `clipping` times the norm of the unit's params (at least
    `eps`).

    Source: Brock et al., 2021 (2102.06171), equation 3; optax.adaptive_grad_clip.

    State: a step count. Sharded: one all-reduce of two vectors (a number per unit) for all leaves
    together.

    Args:
        clipping: the largest ratio of norms.
        eps: stands for the norm of params that are still about zero.
        axis: the dims that a unit's norm sums over, optax's name. By default a unit is what one
            output is made of: torch stores outputs first, so all dims but the first (optax, whose
            layouts store them last, sums over the first dims); scalars, vectors and tensors with
            only one dim longer than 1 are one unit, as in optax.
    """
    dims = unit_dims if axis is None else axis

    def update(
        updates: Tree, state: CountState, params: Tree, across: Across
    ) -> tuple[Tree, CountState]:
        ratio = value_of(clipping, state.count)
        sums = across.sum_dims(
            (tree_map(safe_square, updates), dims), (tree_map(safe_square, params), dims)
        )

        def factor(update_sum: Tensor, param_sum: Tensor) -> Tensor:
            norm, limit = update_sum.sqrt(), ratio * param_sum.sqrt().clamp(min=eps)
            return torch.where(norm < limit, torch.ones_like(norm), limit / norm.clamp(min=1e-6))

        factors = across.spread(tree_map(factor, *sums), dims)
        return tree_map(times, updates, factors), CountState(state.count + 1)

    return with_statistics(init_count, update)
