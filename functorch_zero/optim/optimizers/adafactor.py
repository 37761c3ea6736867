"""Adafactor: second moments as two vectors per matrix, and steps in proportion to the params.

Whether a leaf is factored, and along which dims, follows from its full shape, so it is the same on
every rank. The vectors are replicated: they are small, and every rank needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from optree import tree_map
from torch import Tensor

from ...layout.extent import Extent
from ..across import Across, Shape, sum_dtype
from ..arithmetic import Number, Tree, in_batches, is_zero, on_numbers
from ..base import (
    NumberOrSchedule,
    Transform,
    chain,
    real_only,
    step_count,
    value_of,
    with_statistics,
)
from ..naming import named
from ..transforms.momentum import ema
from ..transforms.norms import block_rms, safe_square, safe_squares, times, zero_answers
from ..transforms.scaling import scale
from ..transforms.weight_decay import add_decayed_weights
from ..wrappers.masking import Mask

# From a full shape to the numbers of the dims that count as rows and as columns; None: not factored
FactoredDims = Callable[[Shape], tuple[int, int] | None]
ROWS, COLS = 0, 1  # positions in the answer of a FactoredDims


def largest_dims(min_dim_size_to_factor: int) -> FactoredDims:
    """optax's choice: the two largest dims, the largest for columns.

    A leaf is factored if both have at least this size.
    """

    def dims(shape: Shape) -> tuple[int, int] | None:
        # The sort is stable: of equal dims the later counts as larger
        by_size = sorted(range(len(shape)), key=lambda d: shape[d])  # dims, the smallest first
        if len(shape) < 2 or shape[by_size[-2]] < min_dim_size_to_factor:
            return None
        return by_size[-2], by_size[-1]

    return dims


def last_dims(min_dim_size_to_factor: int) -> FactoredDims:
    """torch's choice: the last two dims, and the others are a stack of matrices.

    A leaf is factored if both have at least this size.
    """

    def dims(shape: Shape) -> tuple[int, int] | None:
        # Vectors and scalars have nothing to factor
        if len(shape) < 2 or min(shape[-2:]) < min_dim_size_to_factor:
            return None
        return len(shape) - 2, len(shape) - 1

    return dims


def never(shape: Shape) -> None:
    """No leaf is factored."""


def one_of(dims: FactoredDims, which: int) -> Callable[[Shape], int | None]:
    """A function from a full shape to its ROWS or its COLS dim, None where it is not factored: as
    `across.sum_dims` and `across.spread` want it."""

    def dim(shape: Shape) -> int | None:
        chosen = dims(shape)
        return None if chosen is None else chosen[which]

    return dim


class Factors(NamedTuple):
    """Running means of squared gradients, at least fp32, factored or not.

    A leaf has either both vectors or `v`; what it lacks is None.
    """

    # At least float32, as sums are
    v_row: Any  # per factored leaf, its full shape without the COLS dim, every rank
    v_col: Any  # per factored leaf, its full shape without the ROWS dim, every rank
    v: Any  # per other leaf, like the param


def init_factors(params: Tree, across: Across, dims: FactoredDims) -> Factors:
    """The means before the first step: zeros."""

    def whole(p: Tensor, extent: Extent) -> Tensor | None:
        if dims(extent.shape) is not None:
            return None
        return torch.zeros_like(p, dtype=sum_dtype(p.dtype))

    return Factors(
        v_row=zero_answers(params, across, one_of(dims, COLS), "sum"),
        v_col=zero_answers(params, across, one_of(dims, ROWS), "sum"),
        v=tree_map(whole, params, across.extents),
    )


def update_factors(
    factors: Factors, squares: Tree, across: Across, dims: FactoredDims, weight: Tensor
) -> Factors:
    """The means one step on. One all-reduce of the vectors, for all leaves together.

        v_row = (1 - weight) * v_row + weight * mean of squares over COLS
        v_col = (1 - weight) * v_col + weight * mean of squares over ROWS
        v = (1 - weight) * v + weight * squares

    Args:
        factors: of the step before.
        squares: like params or pieces of them, at least fp32: the squared gradients.
        across: has the full shapes of the squares' leaves.
        dims: as given to `init_factors`.
        weight: 0-d float64: of the new squares.
    """

    def mix(old: list[Tensor], new: list[Tensor]) -> list[Tensor]:
        mixed = torch._foreach_mul(old, 1 - weight)
        torch._foreach_add_(mixed, torch._foreach_mul(new, weight))
        # `weight` is float64 and 0-d, so it promotes no tensor with dims; a scalar leaf it does
        return [x.to(like.dtype) for x, like in zip(mixed, old, strict=True)]

    def num_summed(extent: Extent, total: Tensor | None) -> int | None:
        if total is None:
            return None
        # Of an empty leaf there is nothing to sum; any divisor but 0 will do
        return max(extent.numel // max(total.numel(), 1), 1)

    def new_vectors(old: Tree, totals: Tree) -> Tree:
        counts = tree_map(num_summed, across.extents, totals)
        return in_batches(mix, old, in_batches(torch._foreach_div, totals, counts))

    def unless_factored(square: Tensor, extent: Extent) -> Tensor | None:
        return square if dims(extent.shape) is None else None

    # Each leaf's squares are summed twice, and all vectors travel in one all-reduce
    over_cols, over_rows = across.sum_dims(
        (squares, one_of(dims, COLS)),
        (squares, one_of(dims, ROWS)),
    )
    return Factors(
        v_row=new_vectors(factors.v_row, over_cols),
        v_col=new_vectors(factors.v_col, over_rows),
        v=in_batches(mix, factors.v, tree_map(unless_factored, squares, across.extents)),
    )


def rows_over_mean(
    factors: Factors, across: Across, dims: FactoredDims, floor: Callable[[Tensor], float]
) -> Tree:
    """`v_row / mean(v_row)`, per factored leaf: times `v_col` it is the estimate of `v`.

    Args:
        factors: up to date.
        across: for the full shapes.
        dims: as given to `init_factors`.
        floor: the least mean, from the row factors of a leaf.
    """

    def divide(extent: Extent, row: Tensor | None) -> Tensor | None:
        chosen = dims(extent.shape)
        if row is None or chosen is None:
            return None
        rows, cols = chosen
        # Without the COLS dim, those behind it have moved up by one
        rows_in_row = rows - 1 if rows > cols else rows
        # Every rank has the whole vector, so this asks nothing
        mean = row.mean(rows_in_row, keepdim=True)
        return row / mean.clamp(min=floor(row))

    return tree_map(divide, across.extents, factors.v_row)


class ScaleByFactoredRmsState(NamedTuple):
    """Adafactor's second moments."""

    count: Tensor  # type: ignore[assignment]  # 0-d int64, on the CPU
    factors: Factors


@named
def scale_by_factored_rms(
    factored: bool = True,
    decay_rate: float = 0.8,
    step_offset: int = 0,
    min_dim_size_to_factor: int = 128,
    epsilon: float = 1e-30,
) -> Transform:
    """Divide the updates g by a factored estimate of their root mean square, at step t (from 1).

        weight = (t - step_offset)**-decay_rate
        v_row, v_col = means over COLS and ROWS of g**2 + epsilon, each new one with that weight
        update = g / sqrt(v_row / mean(v_row)) / sqrt(v_col)    (not factored: g / sqrt(v))

    Source: Shazeer and Stern, 2018 (1804.04235), Algorithm 4, in the variant of
    optax.scale_by_factored_rms: `epsilon` is added to the squared gradient, and the two largest
    dims are factored. `adafactor` is torch's variant.

    Needs: statistics, one all-reduce of the vectors for all leaves together. State: for a factored
    leaf two vectors (its shape less one dim), on every rank; for others a tensor like it; a count.

    Args:
        factored: False keeps a tensor like each param.
        decay_rate: the mean keeps `1 - t**-decay_rate` of itself at step t.
        step_offset: the step from which t is counted.
        min_dim_size_to_factor: a leaf is factored if its two largest dims have at least this size.
        epsilon: added to the squares, against division by zero.
    """
    # A function of the full shape: pieces of a leaf agree on it
    dims = largest_dims(min_dim_size_to_factor) if factored else never

    def init(params: Tree, across: Across) -> ScaleByFactoredRmsState:
        return ScaleByFactoredRmsState(step_count(), init_factors(params, across, dims))

    def direction(g: Tensor, r: Tensor | None, c: Tensor | None, v: Tensor | None) -> Tensor:
        # Not factored: Adam's division, by a mean of squares like the leaf
        if v is not None:
            return times(g, v.rsqrt())
        # In optax's order: the rows' factor, then the columns'
        return times(times(g, r), c)

    def update(
        updates: Tree, state: ScaleByFactoredRmsState, params: Tree, across: Across
    ) -> tuple[Tree, ScaleByFactoredRmsState]:
        count = state.count + 1
        # 0-d float64, on the CPU: 1 in the step after `step_offset`, then ever less
        weight = (count - step_offset).double() ** -decay_rate
        squares = tree_map(lambda g: safe_square(g) + epsilon, updates)
        factors = update_factors(state.factors, squares, across, dims, weight)
        # Roots of the vectors, before they are as large as the leaf
        rows = tree_map(torch.rsqrt, rows_over_mean(factors, across, dims, lambda row: 0.0))
        cols = tree_map(torch.rsqrt, factors.v_col)
        # Broadcastable to whole leaves, or 1-D beside a piece; None for leaves without factors
        beside_row = across.spread(rows, one_of(dims, COLS))
        beside_col = across.spread(cols, one_of(dims, ROWS))
        directions = tree_map(direction, updates, beside_row, beside_col, factors.v)
        return directions, ScaleByFactoredRmsState(count, factors)

    return real_only(with_statistics(init, update))


@named
def scale_by_adafactor(
    learning_rate: NumberOrSchedule = 1e-2,
    decay_rate: float = 0.8,
    *,
    step_offset: int = 0,
    eps: float | None = None,
    min_scale: float = 1e-3,
    clipping_threshold: float | None = 1.0,
    multiply_by_parameter_scale: bool = True,
    relative_step: bool = True,
    factored: bool = True,
    min_dim_size_to_factor: int = 0,
) -> Transform:
    """Adafactor's direction and its whole step size (g gradient, p param, at step t from 1).

        weight = (t - step_offset)**-decay_rate
        v_row, v_col = means over COLS and ROWS of g**2, each new one with that weight
        v = v_row * v_col / max(mean(v_row), eps)    (unfactored: the mean of squares)
        u = g / sqrt(max(v, eps**2))
        rho = min(learning_rate, 1 / sqrt(t))
        update = rho * max(min_scale, rms(p)) * u / max(1, rms(u) / clipping_threshold)

    Source: Shazeer and Stern, 2018 (1804.04235), Algorithm 4; torch.optim.Adafactor's numerics.
    `adafactor` has the arguments, `step_offset` by the name of `decay_offset`.

    Needs: statistics, one all-reduce of the vectors, and one of two scalars per leaf, for the
    params' size and for the clipping. State: as `scale_by_factored_rms`.
    """
    # torch's choice of dims; a function of the full shape, so that ranks agree
    dims = last_dims(min_dim_size_to_factor) if factored else never

    # By default of the tensor that is bounded: of a bf16 leaf the vectors are float32
    def floor(leaf: Tensor) -> float:
        return torch.finfo(leaf.dtype).eps if eps is None else eps

    def init(params: Tree, across: Across) -> ScaleByFactoredRmsState:
        return ScaleByFactoredRmsState(step_count(), init_factors(params, across, dims))

    # Lists of leaves and of what lies beside each: the two vectors, or else `v`; None the others
    def directions(updates: list[Tensor], *beside: list[Any]) -> Sequence[Tensor]:
        # Of the mean of squares
        estimates = []
        for row, col, v in zip(*beside, strict=True):
            estimates.append(v if row is None else row * col)
        least = [floor(g) ** 2 for g in updates]
        # The clamp gives new tensors, so the rest may be in place
        made = torch._foreach_clamp_min(estimates, least)
        torch._foreach_rsqrt_(made)
        torch._foreach_mul_(made, updates)
        return made

    def directions_of(updates: Tree, factors: Factors, across: Across) -> Tree:
        # Scaled before they are spread: the vectors are small
        rows = rows_over_mean(factors, across, dims, floor)
        beside_row = across.spread(rows, one_of(dims, COLS))
        beside_col = across.spread(factors.v_col, one_of(dims, ROWS))
        return in_batches(directions, updates, beside_row, beside_col, factors.v)

    def rate_at(count: Tensor) -> Any:
        """The step's rho, a number or 0-d."""
        # Schedules are given the number of steps before this one
        rate = value_of(learning_rate, count - 1)
        if not relative_step:
            return rate
        own_rate = torch.as_tensor(rate, dtype=torch.float64, device="cpu")
        return own_rate.minimum(count.double().rsqrt())

    def size(param_rms: Tensor, direction_rms: Tensor) -> Tensor:
        """The directions' factors but for rho: (n,), from root mean squares of n leaves."""
        # Zeros get a step, too: at least that of a leaf with this root mean square
        own = param_rms.clamp(min=min_scale) if multiply_by_parameter_scale else 1.0
        if clipping_threshold is None:
            return own * torch.ones_like(direction_rms)
        return own / (direction_rms / clipping_threshold).clamp(min=1)

    def update(
        updates: Tree, state: ScaleByFactoredRmsState, params: Tree, across: Across
    ) -> tuple[Tree, ScaleByFactoredRmsState]:
        count = state.count + 1
        weight = (count - step_offset).double() ** -decay_rate
        squares = safe_squares(updates)  # at least fp32, as the means are
        # First all-reduce: the vectors
        factors = update_factors(state.factors, squares, across, dims, weight)
        directions = directions_of(updates, factors, across)
        # Second all-reduce: two norms per leaf, also where one isn't used, so that all variants ask
        # the same question
        param_norms, direction_norms = across.norm(params, directions)
        # Per whole leaf: a block is a leaf here, as in optax
        param_rms, direction_rms = (
            block_rms(param_norms, across),
            block_rms(direction_norms, across),
        )
        rho = rate_at(count)
        factors_of_steps = on_numbers(lambda p, d: size(p, d) * rho, param_rms, direction_rms)

        def step(g: Tensor, direction: Tensor, factor: Tensor) -> Tensor:
            return times(direction, factor).to(g.dtype)

        steps = tree_map(step, updates, directions, factors_of_steps)
        return steps, ScaleByFactoredRmsState(count, factors)

    return real_only(with_statistics(init, update))


def _product(a: NumberOrSchedule, b: NumberOrSchedule) -> Callable[[Tensor], Any]:
    """The schedule that is the product of two."""

    def both(count: Tensor) -> Any:
        return value_of(a, count) * value_of(b, count)

    return both


@named
def adafactor(
    learning_rate: NumberOrSchedule = 1e-2,
    min_dim_size_to_factor: int = 0,
    decay_rate: float = 0.8,
    decay_offset: int = 0,
    *,
    multiply_by_parameter_scale: bool = True,
    clipping_threshold: float | None = 1.0,
    momentum: Number | None = None,
    weight_decay_rate: NumberOrSchedule = 0.0,
    weight_decay_mask: Mask | None = None,
    eps: float | None = None,
    min_scale: float = 1e-3,
    factored: bool = True,
    relative_step: bool = True,
) -> Transform:
    """Adafactor, with decoupled weight decay (g gradient, p param).

        step = scale_by_adafactor(g), with momentum its running mean
        update = -(step + weight_decay_rate * learning_rate * p)

    Source: Shazeer and Stern, 2018 (1804.04235); torch.optim.Adafactor's numerics, optax's names.

    torch's variant: the last two dims are factored, whatever their size; `eps` bounds the estimate
    from below; the step is `min(learning_rate, 1 / sqrt(t))` times the params' root mean square;
    weight decay is multiplied by the learning rate. optax.adafactor is
    `chain(scale_by_factored_rms(), clip_by_block_rms(1.0), scale_by_learning_rate(rate),
    scale_by_param_block_rms())`.

    Needs: statistics, one all-reduce of the vectors and one of two scalars per leaf. State: for a
    factored leaf two vectors (its shape less one dim), on every rank; for others a tensor like it;
    with momentum 1 tensor like params more.

    Args:
        learning_rate: the largest step, relative to the params' size; a number or a schedule.
        min_dim_size_to_factor: leaves with a smaller one among their last two dims are not factored
            (optax: 128).
        decay_rate: the second moment keeps `1 - t ** -decay_rate` of itself at step t (torch:
            beta2_decay, negative).
        decay_offset: the step from which t is counted.
        multiply_by_parameter_scale: steps are in proportion to the params' root mean square, at
            least `min_scale`.
        clipping_threshold: the largest root mean square of a direction (torch: d); None doesn't
            clip.
        momentum: decay of a running mean of the steps, as in optax (torch has none).
        weight_decay_rate: per step, times the learning rate; a number or a schedule.
        weight_decay_mask: which leaves decay; None for all.
        eps: None for the dtype's epsilon, as in torch.
        min_scale: see `multiply_by_parameter_scale`.
        factored: False keeps a tensor like each param.
        relative_step: False makes the step `learning_rate` itself.
    """
    directions = scale_by_adafactor(
        learning_rate,
        decay_rate,
        step_offset=decay_offset,
        eps=eps,
        min_scale=min_scale,
        clipping_threshold=clipping_threshold,
        multiply_by_parameter_scale=multiply_by_parameter_scale,
        relative_step=relative_step,
        factored=factored,
        min_dim_size_to_factor=min_dim_size_to_factor,
    )
    links = [directions]
    # Of the steps rather than of the directions, as in optax
    if momentum is not None:
        links.append(ema(momentum, debias=False))
    if not is_zero(weight_decay_rate):
        # The learning rate is in the steps already, so the decay brings its own
        decay = _product(weight_decay_rate, learning_rate)
        links.append(add_decayed_weights(decay, weight_decay_mask))
    # Steps have their size already, and get their sign here
    return chain(*links, scale(-1.0))
