"""Optimizers by name that look beyond one element: compositions of the transforms with statistics
or whole leaves.

Weight decay is decoupled unless said otherwise. A learning rate or a weight decay may be a
schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..arithmetic import Number, is_zero
from ..base import Schedule, Transform, chain, value_of
from ..contrib.full_matrix_adagrad import (
    scale_by_full_matrix_adagrad,
    scale_by_full_matrix_adagrad_tree,
)
from ..naming import named
from ..transforms.norms import scale_by_novograd, scale_by_trust_ratio
from ..transforms.scaling import add_decayed_weights, ema, scale, scale_by_learning_rate, trace
from ..wrappers.masking import Labels, Mask, masked, partition
from .adafactor import scale_by_adafactor, scale_by_sm3
from .adam import scale_by_adam
from .lbfgs import scale_by_lbfgs
from .muon import MUON_COEFFICIENTS, Matrices, Scaling, orthogonalize, scale_by_momentum
from .shampoo import Graft, scale_by_shampoo
from .soap import scale_by_soap


@named
def lamb(
    learning_rate: Number | Schedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-6,
    eps_root: Number = 0.0,
    *,
    weight_decay: Number | Schedule = 0.0,
    mask: Mask | None = None,
) -> Transform:
    """LAMB: Adam's direction, decayed, with each leaf's step in proportion to the norm of its
    params.

    Source: You et al., 2020 (1904.00962), Algorithm 2, with the norm itself for phi; optax.lamb.

    State: 2 tensors like params. Sharded: one all-reduce of two scalars per leaf.

    Args:
        mask: which leaves decay.
    """
    return chain(
        scale_by_adam(b1, b2, eps, eps_root),
        add_decayed_weights(weight_decay, mask),
        scale_by_trust_ratio(),
        scale_by_learning_rate(learning_rate),
    )


@named
def lars(
    learning_rate: Number | Schedule,
    weight_decay: Number | Schedule = 0.0,
    weight_decay_mask: Mask | None = None,
    trust_coefficient: float = 0.001,
    eps: float = 0.0,
    trust_ratio_mask: Mask | None = None,
    *,
    momentum: Number = 0.9,
    nesterov: bool = False,
) -> Transform:
    """LARS: SGD with momentum, with each leaf's step in proportion to the norm of its params.

    Source: You et al., 2017 (1708.03888), Algorithm 1; optax.lars. Weight decay joins the gradient.

    State: 1 tensor like params. Sharded: one all-reduce of two scalars per leaf.

    Args:
        weight_decay_mask: which leaves decay; None for all.
        trust_ratio_mask: which leaves are scaled by the ratio; None for all. Norms and biases are
            often left out.
    """
    ratio = scale_by_trust_ratio(trust_coefficient=trust_coefficient, eps=eps)
    return chain(
        add_decayed_weights(weight_decay, weight_decay_mask),
        ratio if trust_ratio_mask is None else masked(ratio, trust_ratio_mask),
        scale_by_learning_rate(learning_rate),
        trace(momentum, nesterov),
    )


@named
def fromage(learning_rate: Number | Schedule, min_norm: float = 1e-6) -> Transform:
    """Fromage: each leaf turns by an angle that the learning rate says, keeping its norm.

    Source: Bernstein et al., 2020 (2002.03432), Algorithm 1; optax.fromage.

    State: none but step counts. Sharded: one all-reduce of two scalars per leaf.

    Args:
        min_norm: the norms of the params and of the updates count as at least this.
    """

    def shrink(count: Tensor) -> Any:
        return (1 + value_of(learning_rate, count) ** 2) ** -0.5

    def decay(count: Tensor) -> Any:
        return shrink(count) - 1

    def rate(count: Tensor) -> Any:
        return shrink(count) * value_of(learning_rate, count)

    return chain(
        scale_by_trust_ratio(min_norm), scale_by_learning_rate(rate), add_decayed_weights(decay)
    )


@named
def novograd(
    learning_rate: Number | Schedule,
    b1: float = 0.9,
    b2: float = 0.25,
    eps: float = 1e-6,
    eps_root: float = 0.0,
    weight_decay: float | Schedule = 0.0,
) -> Transform:
    """NovoGrad: momentum of gradients that are divided by a running mean of their leaf's norm.

    Source: Ginsburg et al., 2019 (1905.11286); optax.novograd. Weight decay is inside the momentum.

    State: 1 tensor like params and a scalar per leaf. Sharded: one all-reduce of a scalar per leaf.
    """
    return chain(
        scale_by_novograd(b1, b2, eps, eps_root, weight_decay),
        scale_by_learning_rate(learning_rate),
    )


def product(a: Number | Schedule, b: Number | Schedule) -> Callable[[Tensor], Any]:
    """The schedule that is the product of two."""

    def both(count: Tensor) -> Any:
        return value_of(a, count) * value_of(b, count)

    return both


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


def by_num_dims(path: str, leaf: Tensor) -> str:
    """Muon for leaves of two dims and more, AdamW for the rest."""
    return "muon" if leaf.ndim >= 2 else "adam"


@named
def muon(
    learning_rate: Number | Schedule,
    ns_coeffs: tuple[float, float, float] = MUON_COEFFICIENTS,
    ns_steps: int = 5,
    beta: Number = 0.95,
    eps: float = 1e-7,
    *,
    weight_decay: Number | Schedule = 0.1,
    nesterov: bool = True,
    scaling: Scaling | None = "original",
    ns_dtype: torch.dtype | None = None,
    as_matrices: Matrices | None = None,
    param_labels: Labels = by_num_dims,
    adam_learning_rate: Number | Schedule | None = None,
    adam_b1: Number = 0.9,
    adam_b2: Number = 0.999,
    adam_eps: Number = 1e-8,
    adam_weight_decay: Number | Schedule = 0.0,
) -> Transform:
    """Muon for matrices: momentum, orthogonalised by Newton-Schulz iterations; AdamW for what isn't
    one.

    Source: Jordan et al., 2024; torch.optim.Muon's momentum, coefficients, scalings and weight
    decay (optax corrects the momentum's bias, which the orthogonalisation undoes but for `eps`);
    optax's names.

    State: 1 tensor like params for matrices, 2 for the rest, in pieces. Sharded: the matrices'
    momentum goes to their owners and comes back orthogonal: two all-to-alls, about 2S/N bytes per
    rank; each rank does 1/N of the work.

    Args:
        scaling: "original" or "match_rms_adamw" as torch's `adjust_lr_fn`, see `shape_scale`.
        ns_dtype: what the iterations run in; None for the update's dtype. torch always takes
            bfloat16, which no longer
            shows that sharded equals unsharded to the last bits: see `orthogonalize`.
        as_matrices: from a full shape to `(count, rows, cols)`. By default 3-D leaves are stacks of
            matrices (experts) and 4-D and 5-D ones convolution kernels of (out, in * kernel). For
            1-D convolutions pass your own (and under `inject_hyperparams` name it in `static_args`:
            it looks like a schedule).
        param_labels: "muon" or "adam" per leaf, a tree or a function `(path, leaf) -> label`. By
            default leaves with two dims and more are matrices; embeddings and heads are commonly
            given to AdamW.
        adam_learning_rate: None for `learning_rate`.
    """
    orthogonal = orthogonalize(
        ns_coeffs, ns_steps, eps, ns_dtype=ns_dtype, scaling=scaling, as_matrices=as_matrices
    )
    return partition(
        {
            "muon": chain(
                scale_by_momentum(beta, nesterov),
                orthogonal,
                add_decayed_weights(weight_decay),
                scale_by_learning_rate(learning_rate),
            ),
            "adam": chain(
                scale_by_adam(adam_b1, adam_b2, adam_eps),
                add_decayed_weights(adam_weight_decay),
                scale_by_learning_rate(
                    learning_rate if adam_learning_rate is None else adam_learning_rate
                ),
            ),
        },
        param_labels,
    )


@named
def sm3(learning_rate: Number | Schedule, momentum: float = 0.9) -> Transform:
    """SM3: Adagrad with its sums of squares kept as one vector per dim (Anil et al., 2019,
    1901.11150). As optax.sm3.

    State: 1 tensor like params and a vector per dim of a leaf, replicated. Sharded: one all-reduce
    of those vectors.
    """
    return chain(scale_by_sm3(momentum), scale_by_learning_rate(learning_rate))


@named
def lbfgs(
    learning_rate: Number | Schedule = 1.0, memory_size: int = 10, scale_init_precond: bool = True
) -> Transform:
    """L-BFGS with a step size of your own: optax.lbfgs without its line search. See
    `scale_by_lbfgs`.

    State: 2 (memory_size + 1) tensors like params. Sharded: one all-reduce of 5 memory_size + 1
    scalars.
    """
    return chain(
        scale_by_lbfgs(memory_size, scale_init_precond), scale_by_learning_rate(learning_rate)
    )


@named
def shampoo(
    learning_rate: Number | Schedule,
    momentum: Number = 0.9,
    b2: float = 1.0,
    eps: float = 1e-6,
    *,
    block_size: int = 1024,
    precondition_frequency: int = 1,
    graft: Graft | None = "adagrad",
    weight_decay: Number | Schedule = 0.0,
    mask: Mask | None = None,
    nesterov: bool = False,
    as_matrices: Matrices | None = None,
) -> Transform:
    """Shampoo with grafting, then momentum and decoupled weight decay. See `scale_by_shampoo`.

    Source: Gupta et al., 2018 (1802.09568); Anil et al., 2020 (2002.09018).

    State: 1 tensor like params in pieces; at owners the blocks' statistics and roots and the
    graft's squares. Sharded: two all-to-alls, about 2S/N bytes per rank.

    Args:
        mask: which leaves decay; None for all.
    """
    directions = scale_by_shampoo(
        b2,
        eps,
        block_size=block_size,
        precondition_frequency=precondition_frequency,
        graft=graft,
        as_matrices=as_matrices,
    )
    decay = add_decayed_weights(weight_decay, mask)
    return chain(
        directions, trace(momentum, nesterov), decay, scale_by_learning_rate(learning_rate)
    )


@named
def soap(
    learning_rate: Number | Schedule = 3e-3,
    b1: float = 0.95,
    b2: float = 0.95,
    eps: float = 1e-8,
    *,
    weight_decay: Number | Schedule = 0.01,
    mask: Mask | None = None,
    shampoo_beta: float | None = None,
    precondition_frequency: int = 10,
    max_precond_dim: int = 10000,
    as_matrices: Matrices | None = None,
) -> Transform:
    """SOAP: Adam in the eigenbasis of Shampoo's statistics, with decoupled weight decay. See
    `scale_by_soap`.

    Source: Vyas et al., 2024 (2409.11321).

    State: for a matrix of m x n, 2 (m n + m^2 + n^2) numbers at its owner. Sharded: two
    all-to-alls, about 2S/N bytes per rank.

    Args:
        mask: which leaves decay; None for all.
    """
    directions = scale_by_soap(
        b1,
        b2,
        eps,
        shampoo_beta=shampoo_beta,
        precondition_frequency=precondition_frequency,
        max_precond_dim=max_precond_dim,
        as_matrices=as_matrices,
    )
    return chain(
        directions, add_decayed_weights(weight_decay, mask), scale_by_learning_rate(learning_rate)
    )


@named
def full_matrix_adagrad(
    learning_rate: Number | Schedule,
    eps: float = 1e-8,
    *,
    whole_tree: bool = False,
    weight_decay: Number | Schedule = 0.0,
    limit: int = 256 * 2**20,
) -> Transform:
    """Adagrad with full matrices, of each leaf, or with `whole_tree` of all leaves together (Duchi
    et al., 2011).

    Weight decay joins the gradient. State: n^2 numbers for n elements, at a leaf's owner; for the
    whole tree on every rank. Sharded: two all-to-alls, about 2S/N bytes per rank; for the whole
    tree all is gathered.

    Raises:
        TransformError: by `init`, where a matrix would take more than `limit` bytes; it says how
            many.
    """
    directions = (
        scale_by_full_matrix_adagrad_tree if whole_tree else scale_by_full_matrix_adagrad
    )(eps, limit=limit)
    return chain(
        add_decayed_weights(weight_decay), directions, scale_by_learning_rate(learning_rate)
    )
