"""Muon's parts: momentum, and the orthogonalisation of whole matrices by Newton-Schulz
iterations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ...tree import PyTree
from ..across import sum_dtype
from ..arithmetic import Number, elementwise, ema
from ..base import EmptyState, Transform, pointwise, tree_zeros_like, with_whole_leaves
from ..naming import named

Tree = PyTree[Tensor]
Matrices = Callable[[tuple[int, ...]], tuple[int, int, int]]
# Https://kellerjordan.github.io/posts/muon/, torch.optim.Muon's
MUON_COEFFICIENTS = (
    3.4445,
    -4.7750,
    2.0315,
)


def matrices(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """How a tensor of this shape is seen as `(count, rows, cols)`: a stack of matrices.

    2-D: one matrix. 3-D: a stack of them, as expert weights are kept. 4-D and 5-D: a convolution
    kernel, one matrix of (out, in * kernel). A scalar or vector is one column.

    >>> matrices((8, 4)), matrices((16, 8, 4)), matrices((8, 4, 3, 3)), matrices((5,))
    ((1, 8, 4), (16, 8, 4), (1, 8, 36), (1, 5, 1))
    """
    if len(shape) < 2:
        return 1, math.prod(shape), 1
    if len(shape) == 3:
        return shape
    return 1, shape[0], math.prod(shape[1:])


class MomentumState(NamedTuple):
    """A running mean of the gradients."""

    mu: Any  # like params


@named
def scale_by_momentum(decay: Number = 0.95, nesterov: bool = True) -> Transform:
    """torch.optim.Muon's momentum: a running mean of the gradients, with Nesterov's look ahead.
    Elementwise.

    State: a tensor like params. Sharded: no communication.
    """

    def init(params: Tree) -> MomentumState:
        return MomentumState(tree_zeros_like(params))

    def update(updates: Tree, state: MomentumState, params: Tree) -> tuple[Tree, MomentumState]:
        mu = elementwise(lambda m, g: ema(m, g, decay), state.mu, updates)
        ahead = elementwise(lambda g, m: ema(g, m, 1 - decay), updates, mu) if nesterov else mu
        return ahead, MomentumState(mu)

    return pointwise(init, update)


def newton_schulz(
    x: Tensor,
    coefficients: tuple[float, float, float] = MUON_COEFFICIENTS,
    steps: int = 5,
    eps: float = 1e-7,
) -> Tensor:
    """Orthogonalise each matrix of a batch `(n, rows, cols)`, roughly: singular values go to about
    1, zeros stay zero.

    The quintic iteration of torch.optim.Muon, in the dtype of `x`. All of it is matrix products of
    the batch.
    """
    a, b, c = coefficients
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


Scaling = Literal["original", "match_rms_adamw"]


def shape_scale(rows: int, cols: int, scaling: Scaling | None) -> float:
    """How much longer a step a matrix of this shape takes. torch.optim.Muon's `adjust_lr_fn`.

    "original": `sqrt(max(1, rows / cols))` (Jordan). "match_rms_adamw": `0.2 * sqrt(max(rows,
    cols))`, AdamW's usual root mean square (Liu et al., 2025, 2502.16982). None: 1.
    """
    if scaling is None or not rows * cols:
        return 1.0
    return (
        math.sqrt(max(1, rows / cols))
        if scaling == "original"
        else 0.2 * math.sqrt(max(rows, cols))
    )


@named
def orthogonalize(
    ns_coeffs: tuple[float, float, float] = MUON_COEFFICIENTS,
    ns_steps: int = 5,
    eps: float = 1e-7,
    *,
    ns_dtype: torch.dtype | None = None,
    scaling: Scaling | None = "original",
    as_matrices: Matrices | None = None,
) -> Transform:
    """Replace each matrix of the updates by its nearest orthogonal one, by Newton-Schulz
    iterations.

    Source: Jordan et al., 2024; torch.optim.Muon. Singular values end up between about 0.7 and 1.2,
    not at 1.

    State: none. Sharded: whole leaves at their owners, one all-to-all in and one out; same-shape
    leaves of an owner run as one batch.

    Args:
        ns_dtype: what the iterations run in; None: the update's dtype, at least float32, as optax
            does. torch always takes bfloat16, which is faster on GPUs, but there a last bit of the
            gradient, or how many matrices run as one batch, can show as a relative change of 1e-2
            in the update.
        scaling: see `shape_scale`; rows and cols are those of `as_matrices`.
        as_matrices: from a full shape to `(count, rows, cols)`, the stack of matrices it is; None
            for `matrices`.
    """
    if scaling not in (None, "original", "match_rms_adamw"):
        raise ValueError(f"scaling must be 'original', 'match_rms_adamw' or None, got {scaling!r}")

    view = matrices if as_matrices is None else as_matrices

    def init(param: Tensor) -> EmptyState:
        return EmptyState()

    def update(updates: Tensor, state: EmptyState) -> tuple[Tensor, EmptyState]:
        count, rows, cols = view(tuple(updates.shape[1:]))
        stack = updates.reshape(len(updates) * count, rows, cols).to(
            ns_dtype or sum_dtype(updates.dtype)
        )
        done = newton_schulz(stack, ns_coeffs, ns_steps, eps).to(updates.dtype)
        return done.reshape(updates.shape) * shape_scale(rows, cols, scaling), state

    def cost(shape: tuple[int, ...]) -> float:
        count, rows, cols = view(shape)
        return float(count * rows * cols * min(rows, cols))

    return with_whole_leaves(init, update, cost=cost, batched=True)
