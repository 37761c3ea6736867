"""Clipping: of single elements, of the whole tree's norm, and of the norms of units."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from optree import tree_map
from torch import Tensor

from ..across import Across, Dims, Shape
from ..arithmetic import Number, Tree, clamp, device_of
from ..base import (
    Schedule,
    Transform,
    real_only,
    step_count,
    value_of,
    with_statistics,
)
from ..naming import named
from ..states import CountState, init_count
from .norms import global_norm, safe_square, scaled, times
from .scaling import of_elements


@named
def clip(max_delta: Number) -> Transform:
    """Clip every element of the updates to [-max_delta, max_delta].

    Source: optax.clip; torch.nn.utils.clip_grad_value_.

    Needs: pointwise. State: none.
    """
    # NaNs stay: clipping hides none
    return of_elements(lambda u: clamp(u, -max_delta, max_delta), in_parts=True)


class ClipByGlobalNormState(NamedTuple):
    """The norm that the last step met, and the factor that it took. Reported as metrics."""

    count: Tensor  # type: ignore[assignment]  # 0-d int64, on the CPU
    norm: Tensor  # 0-d float64: of the updates it was given; 0 before the first step
    factor: Tensor  # 0-d float64: multiplied the updates; 1 before the first step

    def report(self) -> dict[str, Tensor]:
        return {"clip_norm": self.norm, "clip_factor": self.factor}


@named
def clip_by_global_norm(max_norm: float | Schedule) -> Transform:
    """Scale all updates down together, so that the norm of the whole tree is at most `max_norm`.

        factor = min(1, max_norm / norm(all updates))

    Source: Pascanu et al., 2013 (1211.5063); optax.clip_by_global_norm.
    torch.nn.utils.clip_grad_norm_ divides by `norm + 1e-6` instead, so it clips to a little less.

    Needs: statistics, one all-reduce of a scalar per leaf. State: three numbers.

    Args:
        max_norm: a number, or a schedule, which is given the number of steps before this one.
    """

    def init(params: Tree) -> ClipByGlobalNormState:
        # The numbers lie where the params do: they are computed from answers about the updates
        number = partial(torch.full, (), dtype=torch.float64, device=device_of(params))
        return ClipByGlobalNormState(step_count(), norm=number(0.0), factor=number(1.0))

    def update(
        updates: Tree, state: ClipByGlobalNormState, params: Tree, across: Across
    ) -> tuple[Tree, ClipByGlobalNormState]:
        limit = value_of(max_norm, state.count)
        norm = global_norm(updates, across)  # 0-d, at least float32, the same on every rank
        # A NaN norm is not below the limit, and makes the factor NaN: clipping hides none
        factor = torch.where(norm < limit, torch.ones_like(norm), limit / norm)
        # Multiplied in float32 at least, then rounded once
        clipped = scaled(updates, factor, params, across)
        return clipped, ClipByGlobalNormState(state.count + 1, norm.double(), factor.double())

    # Norms and factors are of rows as of all of a leaf
    return replace(with_statistics(init, update), takes_rows=True)


def unit_dims(shape: Shape) -> Shape:
    """The dims that a unit's norm sums over: all but the first.

    All dims where at most one of them is longer than 1: such a tensor is one unit.
    """
    # Dims of 1 split nothing: a row, a column and a vector are one unit alike
    num_long = sum(size != 1 for size in shape)
    first_summed = 0 if num_long <= 1 else 1
    return tuple(range(first_summed, len(shape)))


@named
def adaptive_grad_clip(
    clipping: float | Schedule, eps: float = 1e-3, axis: Dims | None = None
) -> Transform:
    """Clip each unit's update to at most `clipping` times the norm of the unit's params.

        limit = clipping * max(norm(p of the unit), eps)
        update = g * min(1, limit / norm(g of the unit))

    Source: Brock et al., 2021 (2102.06171), equation 3; optax.adaptive_grad_clip.

    Needs: statistics, one all-reduce of two vectors (a number per unit) for all leaves together.
    State: a step count.

    Args:
        clipping: the largest ratio of norms; a number or a schedule.
        eps: stands for the norm of params that are still about zero.
        axis: the dims that a unit's norm sums over, optax's name. By default a unit makes one
            output: torch stores outputs first, so all dims but the first (optax, whose
            layouts store them last, sums over the first dims); scalars, vectors and tensors with
            only one dim longer than 1 are one unit, as in optax.
    """
    # A function of the full shape, so pieces of a leaf agree on its units
    dims = unit_dims if axis is None else axis

    def update(
        updates: Tree, state: CountState, params: Tree, across: Across
    ) -> tuple[Tree, CountState]:
        ratio = value_of(clipping, state.count)

        def factor(update_sum: Tensor, param_sum: Tensor) -> Tensor:
            """Per unit, from the sums of squares."""
            norm = update_sum.sqrt()
            limit = ratio * param_sum.sqrt().clamp(min=eps)
            # A norm of 0 is below the limit; the clamp keeps the branch not taken finite
            return torch.where(norm < limit, torch.ones_like(norm), limit / norm.clamp(min=1e-6))

        # Like the pieces; both trees' sums come from one all-reduce
        update_squares = tree_map(safe_square, updates)
        param_squares = tree_map(safe_square, params)
        sums = across.sum_dims((update_squares, dims), (param_squares, dims))
        # Per leaf, a number per unit, back beside the elements that are here
        factors = across.spread(tree_map(factor, *sums), dims)
        return tree_map(times, updates, factors), CountState(state.count + 1)

    return real_only(with_statistics(init_count, update))
