"""Muon: momentum of matrices, orthogonalised by Newton-Schulz iterations; AdamW for the rest."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ...errors import check_choice
from ..across import Shape, sum_dtype
from ..arithmetic import Number, Tree, ema
from ..base import (
    EmptyState,
    NumberOrSchedule,
    Transform,
    chain,
    init_empty,
    pointwise,
    real_only,
    with_whole_leaves,
)
from ..naming import named
from ..states import zeros
from ..transforms.matrices import Matrices, matrices
from ..transforms.scaling import scale_by_learning_rate
from ..transforms.weight_decay import add_decayed_weights
from ..wrappers.masking import Labels, partition
from .adam import adamw

# From https://kellerjordan.github.io/posts/muon/, as in torch.optim.Muon. The slope at zero is
# large, so that small singular values grow fast; the price is that none converges to exactly 1
MUON_COEFFICIENTS = (3.4445, -4.7750, 2.0315)

Scaling = Literal["original", "match_rms_adamw"]


class MomentumState(NamedTuple):
    """Muon's momentum."""

    mu: Any  # like params: running mean of the gradients


@named
def scale_by_momentum(decay: Number = 0.95, nesterov: bool = True) -> Transform:
    """Muon's momentum: replace the updates g by their running mean.

        mu = decay * mu + (1 - decay) * g
        update = decay * mu + (1 - decay) * g    (without nesterov: mu)

    Source: torch.optim.Muon.

    Needs: pointwise. State: 1 tensor like params.

    Args:
        decay: of the mean, per step.
        nesterov: look one step ahead.
    """

    def update(updates: Tree, state: MomentumState, params: Tree) -> tuple[Tree, MomentumState]:
        # A mean where others keep a sum: the orthogonalisation takes away the difference in size
        mu = ema(state.mu, updates, decay)
        # The state and the update are one tensor here; `across` and `chain` copy where it matters
        if not nesterov:
            return mu, MomentumState(mu)
        # From the gradient a share `decay` of the way to the mean
        ahead = ema(updates, mu, 1 - decay)
        return ahead, MomentumState(mu)

    return pointwise(zeros(MomentumState), update)


def newton_schulz(
    x: Tensor,
    coefficients: tuple[float, float, float] = MUON_COEFFICIENTS,
    steps: int = 5,
    eps: float = 1e-7,
) -> Tensor:
    """Orthogonalise each matrix of a batch, roughly.

    Singular values go to about 1, zeros stay zero. The quintic iteration of torch.optim.Muon:

        x = x / norm(x)
        x = a * x + (b * gram + c * gram @ gram) @ x, where gram = x @ x.T    (each of the steps)

    Args:
        x: (n, rows, cols), in the dtype that the iterations run in.
        coefficients: a, b and c.
        steps: the number of iterations.
        eps: the least norm.

    Returns:
        (n, rows, cols), like `x`.
    """
    # p(s) = a s + b s**3 + c s**5 is applied to each singular value s
    a, b, c = coefficients
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x  # so that gram is the smaller of the two
    norms = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)  # (n, 1, 1): Frobenius
    # Singular values are at most 1 then, where the iteration is made for
    x = x / norms.clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # b * gram + c * gram @ gram
        x = torch.baddbmm(x, polynomial, x, beta=a)  # a * x + polynomial @ x
    return x.mT if tall else x


def shape_scale(rows: int, cols: int, scaling: Scaling | None) -> float:
    """A factor on the steps of matrices of this shape. torch.optim.Muon's `adjust_lr_fn`.

    "original": `sqrt(max(1, rows / cols))` (Jordan et al., 2024).
    "match_rms_adamw": `0.2 * sqrt(max(rows, cols))`, which gives AdamW's usual root mean square
    (Liu et al., 2025, 2502.16982). None: 1.
    """
    # An empty matrix has no scale, and no elements to multiply
    if scaling is None or not rows * cols:
        return 1.0
    if scaling == "original":
        return math.sqrt(max(1, rows / cols))
    return 0.2 * math.sqrt(max(rows, cols))


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
    """Replace each matrix of the updates by its nearest orthogonal one.

        update = shape_scale(rows, cols) * newton_schulz(g)

    Source: Jordan et al., 2024 (https://kellerjordan.github.io/posts/muon/); torch.optim.Muon.
    Singular values end up between about 0.7 and 1.2, not at 1.

    Needs: whole leaves at their owners: one all-to-all in and one out, about 2S/N bytes per rank.
    Leaves of an owner that have the same shape run as one batch. State: none.

    Args:
        ns_coeffs: of the iteration, see `newton_schulz`.
        ns_steps: the number of iterations.
        eps: the least norm of a matrix.
        ns_dtype: the dtype of the iterations; None: the update's dtype, at least float32. torch
            always takes bfloat16, which is faster on GPUs, but there a last bit of the gradient, or
            how many matrices run as one batch, can show as a relative change of 1e-2 in the update.
        scaling: see `shape_scale`; rows and cols are those of `as_matrices`.
        as_matrices: from a full shape to `(count, rows, cols)`, the stack of matrices it is; None
            for `matrices`.
    """
    check_choice("scaling", scaling, (None, *get_args(Scaling)))

    # From the full shape, so all ranks see the same stack
    view = matrices if as_matrices is None else as_matrices

    def update(updates: Tensor, state: EmptyState) -> tuple[Tensor, EmptyState]:
        # The first dim counts leaves of one shape, each of which is a stack of `count` matrices
        num_leaves, *shape = updates.shape
        count, rows, cols = view(tuple(shape))
        # Half precisions run in float32 unless the user says otherwise
        dtype = ns_dtype or sum_dtype(updates.dtype)
        # Matrices of all leaves in one batch: large kernels instead of many small ones
        stack = updates.reshape(num_leaves * count, rows, cols).to(dtype)
        orthogonal = newton_schulz(stack, ns_coeffs, ns_steps, eps).to(updates.dtype)
        # Rounded to the update's dtype first, then scaled by a number
        return orthogonal.reshape(updates.shape) * shape_scale(rows, cols, scaling), state

    def cost(shape: Shape) -> float:
        """Multiplications of one matrix product, up to a factor."""
        count, rows, cols = view(shape)
        # gram is (k, k) for k the shorter side: rows * cols * k multiplications
        return float(count * rows * cols * min(rows, cols))

    return real_only(with_whole_leaves(init_empty, update, cost=cost, batched=True))


def by_num_dims(path: str, leaf: Tensor) -> str:
    """Muon for leaves of two dims and more, AdamW for the rest."""
    return "muon" if leaf.ndim >= 2 else "adam"


@named
def muon(
    learning_rate: NumberOrSchedule,
    ns_coeffs: tuple[float, float, float] = MUON_COEFFICIENTS,
    ns_steps: int = 5,
    beta: Number = 0.95,
    eps: float = 1e-7,
    *,
    weight_decay: NumberOrSchedule = 0.1,
    nesterov: bool = True,
    scaling: Scaling | None = "original",
    ns_dtype: torch.dtype | None = None,
    as_matrices: Matrices | None = None,
    param_labels: Labels = by_num_dims,
    adam_learning_rate: NumberOrSchedule | None = None,
    adam_b1: Number = 0.9,
    adam_b2: Number = 0.999,
    adam_eps: Number = 1e-8,
    adam_weight_decay: NumberOrSchedule = 0.0,
) -> Transform:
    """Muon for matrices, AdamW for the other leaves (g gradient, p param).

        u = orthogonalize(scale_by_momentum(g, beta))
        update = -learning_rate * (u + weight_decay * p)

    Source: Jordan et al., 2024; torch.optim.Muon's momentum, coefficients, scalings and weight
    decay; optax's names. optax also corrects the bias of the momentum. Without nesterov the
    orthogonalisation undoes that but for `eps`; with it the first steps mix momentum and gradient
    in other shares.

    Needs: whole leaves. The matrices' momentum goes to their owners and comes back orthogonal: two
    all-to-alls, about 2S/N bytes per rank; each rank does 1/N of the work. State: 1 tensor like
    params for matrices, 2 for the rest, in pieces.

    Args:
        learning_rate: a number or a schedule.
        beta: decay of the momentum, per step.
        eps: the least norm of a matrix.
        weight_decay: of the matrices; decoupled, times the learning rate: per step.
        nesterov: of the momentum: look one step ahead.
        scaling: "original" or "match_rms_adamw" as torch's `adjust_lr_fn`, see `shape_scale`.
        ns_dtype: the dtype of the iterations; None for the update's dtype, at least float32. In
            torch's bfloat16 sharded no longer equals unsharded to the last bits: see
            `orthogonalize`.
        as_matrices: from a full shape to `(count, rows, cols)`. By default 3-D leaves are stacks of
            matrices (experts) and 4-D and 5-D ones convolution kernels of (out, in * kernel). For
            1-D convolutions pass your own (and under `inject_hyperparams` name it in `static_args`:
            it looks like a schedule).
        param_labels: "muon" or "adam" per leaf, a tree or a function `(path, leaf) -> label`. By
            default leaves with two dims and more are matrices; embeddings and heads are commonly
            given to AdamW.
        adam_learning_rate: of the other leaves; None for `learning_rate`.
        adam_b1: of the other leaves, as `adam_b2` and `adam_eps`: see `scale_by_adam`.
        adam_weight_decay: of the other leaves; decoupled. Others: see `orthogonalize`.
    """
    orthogonal = orthogonalize(
        ns_coeffs, ns_steps, eps, ns_dtype=ns_dtype, scaling=scaling, as_matrices=as_matrices
    )
    # Pointwise on pieces, then whole at owners, then on pieces again
    for_matrices = chain(
        scale_by_momentum(beta, nesterov),
        orthogonal,
        add_decayed_weights(weight_decay),
        scale_by_learning_rate(learning_rate),
    )
    rate_of_rest = learning_rate if adam_learning_rate is None else adam_learning_rate
    # No whole leaves here: these leaves never travel
    for_rest = adamw(rate_of_rest, adam_b1, adam_b2, adam_eps, weight_decay=adam_weight_decay)
    return partition({"muon": for_matrices, "adam": for_rest}, param_labels)
