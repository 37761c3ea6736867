"""SM3: Adagrad with its sums of squares as one vector per dim."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from optree import tree_leaves, tree_map
from torch import Tensor

from ...layout.extent import Extent
from ..across import Across, Shape
from ..arithmetic import Tree, elementwise
from ..base import NumberOrSchedule, Transform, chain, real_only, tree_zeros_like, with_statistics
from ..naming import named
from ..transforms.norms import zero_answers
from ..transforms.scaling import scale_by_learning_rate


def all_but(k: int) -> Callable[[Shape], Shape | None]:
    """The dims that the k-th maximum is over: all but dim k, of leaves with more than one dim."""

    def dims(shape: Shape) -> Shape | None:
        # A vector's accumulator is like itself: no dims to reduce over
        if len(shape) < 2 or k >= len(shape):
            return None
        # A maximum over these leaves a vector along dim k
        return tuple(d for d in range(len(shape)) if d != k)

    return dims


class ScaleBySm3State(NamedTuple):
    """SM3's accumulators, and the momentum. A part that a leaf does not have is None."""

    # k-th: per leaf that has a dim k, and two dims or more, a vector along that dim, every rank
    mu: tuple[Any, ...]
    accumulator: Any  # per leaf of fewer dims, like the param
    # Optax's names: its mu are accumulators, its nu the momentum
    nu: Any  # like params: running mean of the directions


@named
def scale_by_sm3(b1: float = 0.9, b2: float = 1.0, eps: float = 1e-8) -> Transform:
    """Divide the updates g by a bound on the root of the sum of their squares, and take the mean.

        bound = min over dims k of mu[k], spread along the other dims
        a = b2 * bound + (1 - b2) * g**2    (b2 = 1: bound + g**2)
        mu[k] = max of a over all dims but k
        nu = b1 * nu + (1 - b1) * g / sqrt(a + eps)    (0 for the quotient where a is 0)
        update = nu

    Source: Anil et al., 2019 (1901.11150), SM3-II, with the slices along each dim for the cover;
    optax.scale_by_sm3.

    Needs: statistics, one all-reduce of the vectors for all leaves together. State: one vector per
    dim of a leaf, on every rank (a tensor like it for leaves of fewer than two dims), and 1 tensor
    like params.

    Args:
        b1: decay of the mean of the directions, per step.
        b2: decay of the accumulators, per step; 1 sums, as the paper does.
        eps: added to the accumulator where it isn't zero; where it is, the direction is zero.
    """
    share = 1.0 if b2 == 1.0 else 1.0 - b2  # of a squared gradient in the accumulator

    def of_vectors(x: Tensor, extent: Extent) -> Tensor | None:
        return x if len(extent.shape) < 2 else None

    def init(params: Tree, across: Across) -> ScaleBySm3State:
        # As many entries as the leaf of most dims has; one dim has no vectors
        num_dims = [len(extent.shape) for extent in tree_leaves(across.extents)]
        most_dims = max(num_dims, default=0)
        num_vectors = most_dims if most_dims > 1 else 0
        return ScaleBySm3State(
            # Per leaf (shape[k],), whole, on every rank
            mu=tuple(zero_answers(params, across, all_but(k), "max") for k in range(num_vectors)),
            accumulator=tree_map(of_vectors, tree_zeros_like(params), across.extents),
            nu=tree_zeros_like(params),
        )

    def accumulate(g: Tensor, own: Tensor | None, *beside: Tensor | None) -> Tensor:
        """A leaf's `a`, from its accumulator or from the vectors spread beside its elements."""
        # Its own accumulator, or one bound per dim: the least holds for all of them
        there = [bound for bound in (own, *beside) if bound is not None]
        bound = functools.reduce(torch.minimum, there)
        return (share * g * g + b2 * bound).to(g.dtype)

    def direction(g: Tensor, a: Tensor) -> Tensor:
        # Where a is 0 every gradient so far was 0
        return (g * (a + eps).rsqrt()).where(a > 0, 0.0)

    def largest(sums: Tree, num_vectors: int, across: Across) -> tuple[Tree, ...]:
        """The new vectors, from one all-reduce; none where no leaf has two dims."""
        if not num_vectors:
            return ()
        # Each a maximum over a rank's elements first, then over ranks
        maxima = across.max_dims(*[(sums, all_but(k)) for k in range(num_vectors)])
        # The maximum of an empty leaf is -inf
        return tuple(tree_map(lambda m: m.clamp(min=0), tree) for tree in maxima)

    def update(
        updates: Tree, state: ScaleBySm3State, params: Tree, across: Across
    ) -> tuple[Tree, ScaleBySm3State]:
        # Each vector, whole on every rank, is put beside the elements that are here
        bounds = [across.spread(mu, all_but(k)) for k, mu in enumerate(state.mu)]
        sums = tree_map(accumulate, updates, state.accumulator, *bounds)
        directions = elementwise(direction, updates, sums)
        # By the new accumulators: they have seen this gradient
        nu = elementwise(lambda old, new: b1 * old + (1 - b1) * new, state.nu, directions)
        mu = largest(sums, len(state.mu), across)
        return nu, ScaleBySm3State(mu, tree_map(of_vectors, sums, across.extents), nu)

    return real_only(with_statistics(init, update))


@named
def sm3(learning_rate: NumberOrSchedule, momentum: float = 0.9) -> Transform:
    """SM3 (g gradient).

        update = -learning_rate * scale_by_sm3(g)

    Source: Anil et al., 2019 (1901.11150); optax.sm3.

    Needs: statistics, one all-reduce of the vectors for all leaves together. State: 1 tensor like
    params, and a vector per dim of a leaf, on every rank.

    Args:
        learning_rate: a number or a schedule.
        momentum: decay of the mean of the directions, per step.
    """
    return chain(scale_by_sm3(momentum), scale_by_learning_rate(learning_rate))
