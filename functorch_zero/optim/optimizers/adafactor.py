"""Second moments kept as vectors, one per dim, instead of as whole tensors: Adafactor and SM3.

Whether and where a leaf is factored is decided by its full shape. The vectors are replicated: every
rank holds them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from optree import tree_map
from torch import Tensor

from ...tree import PyTree
from ..across import Across, sum_dtype
from ..arithmetic import Number, is_zero
from ..base import Schedule, Transform, chain, step_count, value_of, with_statistics
from ..naming import named
from ..transforms.momentum import ema
from ..transforms.norms import block_rms, safe_square, times
from ..transforms.scaling import scale
from ..transforms.weight_decay import add_decayed_weights, product
from ..wrappers.masking import Mask

Tree = PyTree[Tensor]


FactoredDims = Callable[[tuple[int, ...]], tuple[int, int] | None]


def largest_dims(min_dim_size_to_factor: int) -> FactoredDims:
    """optax's choice: the two largest dims, the largest last, if the smaller of them is large
    enough."""

    def dims(shape: tuple[int, ...]) -> tuple[int, int] | None:
        order = sorted(range(len(shape)), key=lambda d: shape[d])  # of equal dims the later
        if len(shape) < 2 or shape[order[-2]] < min_dim_size_to_factor:
            return None
        return order[-2], order[-1]

    return dims


def last_dims(min_dim_size_to_factor: int) -> FactoredDims:
    """torch's choice: the last two dims, and the others are a stack of matrices."""

    def dims(shape: tuple[int, ...]) -> tuple[int, int] | None:
        if len(shape) < 2 or min(shape[-2:]) < min_dim_size_to_factor:
            return None
        return len(shape) - 2, len(shape) - 1

    return dims


def never(shape: tuple[int, ...]) -> None:
    """No leaf is factored."""


class Factors(NamedTuple):
    """Mean squared gradients, factored or not. What a leaf does not have is None."""

    # per factored leaf, its shape without the second of its factored dims, at least fp32, every
    # rank
    v_row: Any
    # per factored leaf, its shape without the first of its factored dims, at least fp32, every rank
    v_col: Any
    v: Any  # per other leaf, like the param, at least fp32


def init_factors(params: Tree, across: Across, dims: FactoredDims) -> Factors:
    """Zeros for each leaf."""

    def zeros_without(k: int) -> Callable[[Tensor, Any], Any]:
        def zeros(p: Tensor, extent: Any) -> Any:
            chosen = dims(extent.shape)
            if chosen is None:
                return None
            shape = [size for d, size in enumerate(extent.shape) if d != chosen[k]]
            return p.new_zeros(shape, dtype=sum_dtype(p.dtype))

        return zeros

    def whole(p: Tensor, extent: Any) -> Any:
        return torch.zeros_like(p, dtype=sum_dtype(p.dtype)) if dims(extent.shape) is None else None

    return Factors(
        *(
            tree_map(fn, params, across.extents)
            for fn in (zeros_without(1), zeros_without(0), whole)
        )
    )


def one_of(dims: FactoredDims, k: int) -> Callable[[tuple[int, ...]], int | None]:
    """The k-th of the two factored dims, as `sum_dims` wants it."""

    def dim(shape: tuple[int, ...]) -> int | None:
        chosen = dims(shape)
        return None if chosen is None else chosen[k]

    return dim


def decayed(
    factors: Factors, squares: Tree, sums: tuple[Tree, Tree], across: Across, weight: Tensor
) -> Factors:
    """The means one step on: each is `1 - weight` times itself plus `weight` times the mean of the
    new squares."""

    def mix(old: Tensor, new: Tensor) -> Tensor:
        return (old * (1 - weight) + new * weight).to(old.dtype)

    def mixed_vector(extent: Any, old: Tensor | None, total: Tensor | None) -> Any:
        if old is None or total is None:
            return None
        num_summed = max(extent.numel, 1) // max(total.numel(), 1)
        return mix(old, total / num_summed)

    return Factors(
        tree_map(mixed_vector, across.extents, factors.v_row, sums[0]),
        tree_map(mixed_vector, across.extents, factors.v_col, sums[1]),
        tree_map(lambda new, old: None if old is None else mix(old, new), squares, factors.v),
    )


def rows_over_mean(
    factors: Factors, across: Across, dims: FactoredDims, floor: Callable[[Tensor], float]
) -> Tree:
    """The row factors divided by their mean, which is at least `floor`; with the col factors it
    gives the estimate."""

    def divide(extent: Any, row: Tensor | None) -> Any:
        chosen = dims(extent.shape)
        if row is None or chosen is None:
            return None
        rows, cols = chosen
        mean = row.mean(rows - (rows > cols), keepdim=True)
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
    """Divide updates by a factored estimate of their root mean square, as
    optax.scale_by_factored_rms.

    Source: Shazeer and Stern, 2018 (1804.04235), Algorithm 4, in optax's variant: `epsilon` is
    added to the squared gradient, and the two largest dims are factored. `adafactor` is torch's
    variant.

    State: for a factored leaf two vectors (shape less one dim), replicated; for others a tensor
    like it. Sharded: one all-reduce of those vectors for all leaves together.

    Args:
        decay_rate: the mean keeps `1 - t ** -decay_rate` of itself at step t, counted from
            `step_offset`.
        min_dim_size_to_factor: a leaf is factored if its two largest dims have at least this size.
    """
    dims = largest_dims(min_dim_size_to_factor) if factored else never

    def init(params: Tree, across: Across) -> ScaleByFactoredRmsState:
        return ScaleByFactoredRmsState(step_count(), init_factors(params, across, dims))

    def update(
        updates: Tree, state: ScaleByFactoredRmsState, params: Tree, across: Across
    ) -> tuple[Tree, ScaleByFactoredRmsState]:
        count = state.count + 1
        squares = tree_map(lambda u: safe_square(u) + epsilon, updates)
        sums = across.sum_dims((squares, one_of(dims, 1)), (squares, one_of(dims, 0)))
        weight = (count - step_offset).double() ** -decay_rate
        factors = decayed(state.factors, squares, (sums[0], sums[1]), across, weight)
        rows = tree_map(torch.rsqrt, rows_over_mean(factors, across, dims, lambda row: 0.0))
        row = across.spread(rows, one_of(dims, 1))
        col = across.spread(tree_map(torch.rsqrt, factors.v_col), one_of(dims, 0))

        def direction(u: Tensor, r: Tensor | None, c: Tensor | None, v: Tensor | None) -> Tensor:
            return times(u, v.rsqrt()) if v is not None else times(times(u, r), c)

        return tree_map(direction, updates, row, col, factors.v), ScaleByFactoredRmsState(
            count, factors
        )

    return with_statistics(init, update)


@named
def scale_by_adafactor(
    learning_rate: Number | Schedule = 1e-2,
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
    """Adafactor's whole step size and direction, in torch.optim.Adafactor's variant. `adafactor`
    has the arguments.

    State: as `scale_by_factored_rms`. Sharded: one all-reduce of the vectors, and one of two
    scalars per leaf, for the params' size and for the clipping.
    """
    dims = last_dims(min_dim_size_to_factor) if factored else never

    def floor(leaf: Tensor) -> float:
        return torch.finfo(leaf.dtype).eps if eps is None else eps

    def directions(updates: Tree, factors: Factors, across: Across) -> Tree:
        rows = rows_over_mean(factors, across, dims, floor)
        row, col = (
            across.spread(rows, one_of(dims, 1)),
            across.spread(factors.v_col, one_of(dims, 0)),
        )

        def direction(u: Tensor, r: Tensor | None, c: Tensor | None, v: Tensor | None) -> Tensor:
            estimate = r * c if r is not None and c is not None else v
            assert estimate is not None
            return estimate.clamp(min=floor(u) ** 2).rsqrt_().mul_(u)

        return tree_map(direction, updates, row, col, factors.v)

    def step_size(count: Tensor) -> Any:
        rate = value_of(learning_rate, count - 1)
        return (
            torch.as_tensor(rate, dtype=torch.float64).minimum(count.double().rsqrt())
            if relative_step
            else rate
        )

    def sizes_of(params: Tree, steps: Tree, across: Across) -> Tree:
        """Per leaf, what a step is multiplied by."""
        of_params, of_steps = (block_rms(norms, across) for norms in across.norm(params, steps))
        sizes = tree_map(torch.ones_like, of_steps)
        if multiply_by_parameter_scale:
            sizes = tree_map(lambda r: r.clamp(min=min_scale), of_params)
        if clipping_threshold is not None:
            sizes = tree_map(
                lambda a, r: a / (r / clipping_threshold).clamp(min=1), sizes, of_steps
            )
        return sizes

    def init(params: Tree, across: Across) -> ScaleByFactoredRmsState:
        return ScaleByFactoredRmsState(step_count(), init_factors(params, across, dims))

    def update(
        updates: Tree, state: ScaleByFactoredRmsState, params: Tree, across: Across
    ) -> tuple[Tree, ScaleByFactoredRmsState]:
        count = state.count + 1
        squares = tree_map(safe_square, updates)
        rows, cols = across.sum_dims((squares, one_of(dims, 1)), (squares, one_of(dims, 0)))
        weight = (count - step_offset).double() ** -decay_rate
        factors = decayed(state.factors, squares, (rows, cols), across, weight)
        steps = directions(updates, factors, across)
        sizes = sizes_of(params, steps, across)
        rho = step_size(count)
        stepped = tree_map(
            lambda u, s, a: (s * (a * rho).to(s.dtype)).to(u.dtype), updates, steps, sizes
        )
        return stepped, ScaleByFactoredRmsState(count, factors)

    return with_statistics(init, update)


@named
def adafactor(
    learning_rate: Number | Schedule = 1e-2,
    min_dim_size_to_factor: int = 0,
    decay_rate: float = 0.8,
    decay_offset: int = 0,
    *,
    multiply_by_parameter_scale: bool = True,
    clipping_threshold: float | None = 1.0,
    momentum: Number | None = None,
    weight_decay_rate: Number | Schedule = 0.0,
    weight_decay_mask: Mask | None = None,
    eps: float | None = None,
    min_scale: float = 1e-3,
    factored: bool = True,
    relative_step: bool = True,
) -> Transform:
    """Adafactor (Shazeer and Stern, 2018, 1804.04235). torch.optim.Adafactor's numerics, optax's
    names.

    torch's variant: the last two dims are factored, whatever their size; `eps` bounds the estimate
    from below; the step is `min(learning_rate, 1 / sqrt(t))` times the params' root mean square;
    weight decay is multiplied by the learning rate. optax.adafactor is
    `chain(scale_by_factored_rms(), clip_by_block_rms(1.0), scale_by_learning_rate(rate),
    scale_by_param_block_rms())`.

    State: for a factored leaf two vectors (its shape less one dim), replicated; for others a tensor
    like it; with momentum 1 tensor like params more. Sharded: one all-reduce of those vectors and a
    scalar per leaf, and one of a scalar per leaf for the clipping.

    Args:
        min_dim_size_to_factor: leaves with a smaller one among their last two dims are not factored
            (optax: 128).
        decay_rate: the second moment keeps `1 - t ** -decay_rate` of itself at step t (torch:
            beta2_decay, negative).
        decay_offset: the step from which t is counted.
        multiply_by_parameter_scale: steps are in proportion to the params' root mean square, at
            least `min_scale`.
        clipping_threshold: the largest root mean square of a direction (torch: d); None doesn't
            clip.
        momentum: of a running mean of the steps, as in optax (torch has none).
        weight_decay_mask: which leaves decay; None for all.
        eps: None for the dtype's epsilon, as in torch.
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
    decay = add_decayed_weights(product(weight_decay_rate, learning_rate), weight_decay_mask)
    return chain(
        directions,
        *(() if momentum is None else (ema(momentum, debias=False),)),
        *(() if is_zero(weight_decay_rate) else (decay,)),
        scale(-1.0),
    )
