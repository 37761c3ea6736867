"""Transforms that ask for norms of whole tensors: clipping, trust ratios, NovoGrad.

Leaves may be 1-D pieces, so every update here is elementwise on leaves, and everything else is
asked of `across`. What `across` answers (0-d tensors, vectors) is the same on every rank.
Statistics are kept in at least float32.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from optree import tree_leaves, tree_map
from torch import Tensor

from ...tree import PyTree
from ..across import Across, Dims, sum_dtype, total_of
from ..arithmetic import elementwise
from ..base import (
    EmptyState,
    Schedule,
    Transform,
    init_empty,
    step_count,
    tree_zeros_like,
    value_of,
    with_statistics,
)
from ..naming import named
from ..states import CountState, init_count

Tree = PyTree[Tensor]


def times(leaf: Tensor, factor: Any) -> Tensor:
    """`leaf * factor` in the leaf's dtype, computed in at least float32, so that 0-d leaves are no
    special case."""
    if not isinstance(factor, Tensor):
        return leaf.mul(factor)
    wide = sum_dtype(leaf.dtype)
    return (leaf.to(wide) * factor.to(wide)).to(leaf.dtype)


def safe_square(leaf: Tensor) -> Tensor:
    """Its elements' squares, in at least float32."""
    wide = leaf.to(sum_dtype(leaf.dtype))
    return wide * wide


def global_norm(updates: Tree, across: Across) -> Tensor:
    """The Euclidean norm of a whole tree, 0-d. One all-reduce of a scalar per leaf."""
    return total_of([norm * norm for norm in tree_leaves(across.norm(updates))]).sqrt()


def block_rms(norms: Tree, across: Across) -> Tree:
    """From each leaf's norm, the root of the mean of its squared elements (0 for an empty leaf)."""
    return tree_map(
        lambda norm, extent: norm / math.sqrt(max(extent.numel, 1)), norms, across.extents
    )


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


@named
def clip_by_block_rms(threshold: float | Schedule) -> Transform:
    """Scale each leaf's update down so that its root mean square is at most `threshold`.

    Source: Shazeer and Stern, 2018 (1804.04235), section 6; optax.clip_by_block_rms.

    State: a step count. Sharded: one all-reduce of a scalar per leaf.
    """

    def update(
        updates: Tree, state: CountState, params: Tree, across: Across
    ) -> tuple[Tree, CountState]:
        limit = value_of(threshold, state.count)
        rms = block_rms(across.norm(updates), across)
        clipped = tree_map(lambda u, r: times(u, 1 / (r / limit).clamp(min=1)), updates, rms)
        return clipped, CountState(state.count + 1)

    return with_statistics(init_count, update)


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


@named
def scale_by_trust_ratio(
    min_norm: float = 0.0, trust_coefficient: float = 1.0, eps: float = 0.0
) -> Transform:
    """Scale each leaf's update by the norm of its params over the norm of the update; by 1 where
    either is zero.

    Source: You et al., 2017 and 2020 (1708.03888, 1904.00962); optax.scale_by_trust_ratio.

    State: none. Sharded: one all-reduce of two scalars per leaf.

    Args:
        min_norm: both norms count as at least this.
        trust_coefficient: multiplies the ratio.
        eps: added to the update's norm.
    """

    def trust(param_norm: Tensor, update_norm: Tensor) -> Tensor:
        param_norm, update_norm = param_norm.clamp(min=min_norm), update_norm.clamp(min=min_norm)
        ratio = trust_coefficient * param_norm / (update_norm + eps)
        return torch.where((param_norm == 0) | (update_norm == 0), torch.ones_like(ratio), ratio)

    def update(
        updates: Tree, state: EmptyState, params: Tree, across: Across
    ) -> tuple[Tree, EmptyState]:
        ratios = tree_map(trust, *across.norm(params, updates))
        return tree_map(times, updates, ratios), state

    return with_statistics(init_empty, update)


@named
def scale_by_param_block_norm(min_scale: float = 1e-3) -> Transform:
    """Scale each leaf's update by the norm of its params, at least `min_scale`. As
    optax.scale_by_param_block_norm.

    State: none. Sharded: one all-reduce of a scalar per leaf.
    """

    def update(
        updates: Tree, state: EmptyState, params: Tree, across: Across
    ) -> tuple[Tree, EmptyState]:
        norms = across.norm(params)
        return tree_map(lambda u, norm: times(u, norm.clamp(min=min_scale)), updates, norms), state

    return with_statistics(init_empty, update)


@named
def scale_by_param_block_rms(min_scale: float = 1e-3) -> Transform:
    """Scale each leaf's update by the root mean square of its params, at least `min_scale`.

    Source: Shazeer and Stern, 2018 (1804.04235), section 8; optax.scale_by_param_block_rms.

    State: none. Sharded: one all-reduce of a scalar per leaf.
    """

    def update(
        updates: Tree, state: EmptyState, params: Tree, across: Across
    ) -> tuple[Tree, EmptyState]:
        rms = block_rms(across.norm(params), across)
        return tree_map(lambda u, r: times(u, r.clamp(min=min_scale)), updates, rms), state

    return with_statistics(init_empty, update)


class ScaleByNovogradState(NamedTuple):
    """NovoGrad's moments."""

    count: Tensor  # type: ignore[assignment]  # 0-d int64, on the CPU
    mu: Any  # like params: momentum of the normalised gradients
    nu: Any  # per leaf 0-d, at least fp32, every rank: mean of the squared gradient norms


@named
def scale_by_novograd(
    b1: float = 0.9,
    b2: float = 0.25,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    weight_decay: float | Schedule = 0.0,
) -> Transform:
    """Momentum of gradients divided by a running mean of their leaf's norm.

    Source: Ginsburg et al., 2019 (1905.11286), Algorithm 1; optax.scale_by_novograd. The first step
    takes its own norm for the mean.

    State: a tensor like params, and a scalar per leaf. Sharded: one all-reduce of a scalar per
    leaf.

    Args:
        weight_decay: times the param is added to the normalised gradient, inside the momentum.
    """

    def init(params: Tree) -> ScaleByNovogradState:
        nu = tree_map(lambda p: p.new_zeros((), dtype=sum_dtype(p.dtype)), params)
        return ScaleByNovogradState(step_count(), tree_zeros_like(params), nu)

    def update(
        updates: Tree, state: ScaleByNovogradState, params: Tree, across: Across
    ) -> tuple[Tree, ScaleByNovogradState]:
        keep = b2 * (state.count > 0).double()  # nothing is kept before the first step
        decay = value_of(weight_decay, state.count)
        nu = tree_map(
            lambda v, n: (keep * v + (1 - keep) * n * n).to(v.dtype), state.nu, across.norm(updates)
        )

        def momentum(m: Tensor, g: Tensor, v: Tensor, p: Tensor) -> Tensor:
            return b1 * m + times(g, 1 / ((v + eps_root).sqrt() + eps)) + times(p, decay)

        mu = elementwise(momentum, state.mu, updates, nu, params)
        return mu, ScaleByNovogradState(state.count + 1, mu, nu)

    return with_statistics(init, update)
