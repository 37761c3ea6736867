"""Prodigy: Adam that estimates its learning rate from the distance to the first params."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from optree import tree_leaves, tree_map
from torch import Tensor

from ...tree import PyTree
from ..across import Across, sum_dtype
from ..arithmetic import Number, elementwise
from ..base import Schedule, Transform, step_count, tree_zeros_like, value_of, with_statistics
from ..naming import named

Tree = PyTree[Tensor]


class ProdigyState(NamedTuple):
    """Adam's moments of `estim_lr` times the gradients, and what the estimate is made of."""

    count: Tensor  # type: ignore[assignment]  # 0-d int64, on the CPU
    exp_avg: Any  # like params: mean of the scaled gradients
    exp_avg_sq: Any  # like params: mean of their squares
    grad_sum: Any  # like params: decaying sum of the weighted gradients
    params0: Any  # like params: the first params
    estim_lr: Tensor  # 0-d, at least fp32, every rank: d, the estimated distance to the solution
    numerator_weighted: Tensor  # 0-d, at least fp32, every rank: r


def scalar_for(params: Tree, value: float) -> Tensor:
    """A 0-d tensor where params are, in the dtype that `across.total` of them has."""
    leaves = tree_leaves(params)
    dtype = torch.float32 if not leaves else sum_dtype(leaves[0].dtype)
    for leaf in leaves:
        dtype = torch.promote_types(dtype, sum_dtype(leaf.dtype))
    return torch.as_tensor(value, dtype=dtype, device=leaves[0].device if leaves else "cpu").clone()


@named
def prodigy(
    learning_rate: Number | Schedule = 1.0,
    betas: tuple[float, float] = (0.9, 0.999),
    beta3: float | None = None,
    eps: float = 1e-8,
    estim_lr0: float = 1e-6,
    estim_lr_coef: float = 1.0,
    weight_decay: float = 0.0,
    *,
    safeguard_warmup: bool = False,
) -> Transform:
    """Prodigy: AdamW without a learning rate to choose.

    Source: Mishchenko and Defazio, 2023 (2306.06101), Algorithm 4; optax.contrib.prodigy. Where the
    sum of gradients is zero the estimate stays (optax divides by it).

    State: 4 tensors like params, one of which is the first params. Sharded: one all-reduce of two
    scalars per leaf.

    Args:
        learning_rate: a factor on the estimate, 1 or a schedule that begins there.
        betas: decay of the moments.
        beta3: decay of the estimate's sums; None for the square root of the second beta.
        estim_lr0: the first estimate, to be too small.
        estim_lr_coef: a factor on later estimates.
        weight_decay: decoupled.
        safeguard_warmup: leave the learning rate out of the sum of gradients.
    """
    b1, b2 = betas
    b3 = b2**0.5 if beta3 is None else beta3

    def init(params: Tree) -> ProdigyState:
        zeros = tree_zeros_like(params), tree_zeros_like(params), tree_zeros_like(params)
        lr, numerator = scalar_for(params, estim_lr0), scalar_for(params, 0.0)
        return ProdigyState(step_count(), *zeros, tree_map(torch.clone, params), lr, numerator)

    def update(
        updates: Tree, state: ProdigyState, params: Tree, across: Across
    ) -> tuple[Tree, ProdigyState]:
        count, d = state.count + 1, state.estim_lr
        correction = (1 - b2 ** count.double()).sqrt() / (1 - b1 ** count.double())
        dlr: Tensor = (d * value_of(learning_rate, state.count) * correction).to(d.dtype)
        share = d * (d if safeguard_warmup else dlr) / estim_lr0
        exp_avg = elementwise(lambda m, g: b1 * m + (1 - b1) * (g * d), state.exp_avg, updates)
        exp_avg_sq = elementwise(
            lambda v, g: b2 * v + (1 - b2) * (g * d) * (g * d), state.exp_avg_sq, updates
        )
        grad_sum = elementwise(lambda s, g: b3 * s + g * share, state.grad_sum, updates)
        away = tree_map(lambda g, first, p: g * (first - p), updates, state.params0, params)
        numerator, denominator = across.total(away, tree_map(torch.abs, grad_sum))
        weighted = (b3 * state.numerator_weighted + (d / estim_lr0) * dlr * numerator).to(d.dtype)
        estimate = torch.where(denominator > 0, estim_lr_coef * weighted / denominator, d)
        estim_lr = torch.maximum(d, estimate).to(d.dtype)

        def step(m: Tensor, v: Tensor, p: Tensor) -> Tensor:
            direction: Tensor = weight_decay * p + m / (v.sqrt() + estim_lr * eps)
            return direction * -dlr

        steps = elementwise(step, exp_avg, exp_avg_sq, params)
        return steps, ProdigyState(
            count, exp_avg, exp_avg_sq, grad_sum, state.params0, estim_lr, weighted
        )

    return with_statistics(init, update)
