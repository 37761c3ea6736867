"""SM3."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from optree import tree_leaves, tree_map
from torch import Tensor

from ..across import Across
from ..arithmetic import Number, Tree, elementwise
from ..base import Schedule, Transform, chain, tree_zeros_like, with_statistics
from ..naming import named
from ..transforms.scaling import scale_by_learning_rate


def all_but(k: int) -> Callable[[tuple[int, ...]], tuple[int, ...] | None]:
    """The dims that SM3 takes its k-th maximum over: all but dim k, of leaves with more than one
    dim."""

    def dims(shape: tuple[int, ...]) -> tuple[int, ...] | None:
        if len(shape) < 2 or k >= len(shape):
            return None
        return tuple(d for d in range(len(shape)) if d != k)

    return dims


class ScaleBySm3State(NamedTuple):
    """SM3's accumulators, and the momentum."""

    # K-th: per leaf with a dim k, of two dims and more, a vector along that dim, every rank
    mu: tuple[Any, ...]
    accumulator: Any  # per leaf of fewer dims, like the param
    nu: Any  # like params: mean of the directions


@named
def scale_by_sm3(b1: float = 0.9, b2: float = 1.0, eps: float = 1e-8) -> Transform:
    """Divide by a bound on the root of the sum of squares, kept as one vector per dim, and take the
    mean.

    Source: Anil et al., 2019 (1901.11150), SM3-II, with the slices along each dim for the cover;
    optax.scale_by_sm3.

    State: one vector per dim of a leaf, replicated (a tensor like it for leaves of fewer than two
    dims), and 1 tensor like params. Sharded: one all-reduce of those vectors for all leaves
    together.

    Args:
        b1: decay of the mean of the directions.
        b2: decay of the accumulators; 1 sums, as the paper does.
        eps: added to the accumulator where it isn't zero; where it is, the direction is zero.
    """
    share = 1.0 if b2 == 1.0 else 1.0 - b2

    def init(params: Tree, across: Across) -> ScaleBySm3State:
        def vectors(k: int) -> Tree:
            def zeros(p: Tensor, extent: Any) -> Any:
                return None if all_but(k)(extent.shape) is None else p.new_zeros(extent.shape[k])

            return tree_map(zeros, params, across.extents)

        def whole(p: Tensor, extent: Any) -> Any:
            return torch.zeros_like(p) if len(extent.shape) < 2 else None

        num_dims = max((len(extent.shape) for extent in tree_leaves(across.extents)), default=0)
        mu = tuple(vectors(k) for k in range(num_dims if num_dims > 1 else 0))
        return ScaleBySm3State(mu, tree_map(whole, params, across.extents), tree_zeros_like(params))

    def update(
        updates: Tree, state: ScaleBySm3State, params: Tree, across: Across
    ) -> tuple[Tree, ScaleBySm3State]:
        bounds = [across.spread(mu, all_but(k)) for k, mu in enumerate(state.mu)]

        def accumulate(u: Tensor, own: Tensor | None, *spread: Tensor | None) -> Tensor:
            there = [bound for bound in (own, *spread) if bound is not None]
            return (share * u * u + b2 * functools.reduce(torch.minimum, there)).to(u.dtype)

        sums = tree_map(accumulate, updates, state.accumulator, *bounds)
        directions = elementwise(
            lambda u, a: (u * (a + eps).rsqrt()).where(a > 0, 0.0), updates, sums
        )
        nu = elementwise(lambda old, new: b1 * old + (1 - b1) * new, state.nu, directions)
        mu = (
            across.max_dims(*[(sums, all_but(k)) for k in range(len(state.mu))]) if state.mu else ()
        )
        # Of an empty leaf it was -inf
        mu = tuple(tree_map(lambda m: m.clamp(min=0), one) for one in mu)
        own = tree_map(lambda a, extent: a if len(extent.shape) < 2 else None, sums, across.extents)
        return nu, ScaleBySm3State(mu, own, nu)

    return with_statistics(init, update)


@named
def sm3(learning_rate: Number | Schedule, momentum: float = 0.9) -> Transform:
    """SM3: Adagrad with its sums of squares kept as one vector per dim (Anil et al., 2019,
    1901.11150). As optax.sm3.

    State: 1 tensor like params and a vector per dim of a leaf, replicated. Sharded: one all-reduce
    of those vectors.
    """
    return chain(scale_by_sm3(momentum), scale_by_learning_rate(learning_rate))
