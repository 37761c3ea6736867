"""Prodigy: Adam that estimates its learning rate from the distance to the first params."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from optree import tree_leaves, tree_map
from torch import Tensor

from ..across import Across, widest_dtype
from ..arithmetic import Tree, bias_correction, device_of, elementwise
from ..base import (
    NumberOrSchedule,
    Transform,
    real_only,
    step_count,
    tree_zeros_like,
    value_of,
    with_statistics,
)
from ..naming import named


class ProdigyState(NamedTuple):
    """Adam's moments of `estim_lr` times the gradients, and the sums of the estimate."""

    count: Tensor  # type: ignore[assignment]  # 0-d int64, on the CPU
    exp_avg: Any  # like params: running mean of the scaled gradients
    exp_avg_sq: Any  # like params: running mean of their squares
    grad_sum: Any  # like params: decaying sum of the weighted gradients
    params0: Any  # like params: the first params
    estim_lr: Tensor  # 0-d, at least fp32, every rank: d, the estimated distance to the solution
    numerator_weighted: Tensor  # 0-d, at least fp32, every rank: r


def scalar_for(params: Tree, value: float) -> Tensor:
    """A 0-d tensor where params are, in the dtype that `across.total` of them has."""
    # Leaves are pieces or whole: both tell the dtype and device of answers
    dtype = widest_dtype(tree_leaves(params), torch.float32)
    return torch.full((), value, dtype=dtype, device=device_of(params))


@named
def prodigy(
    learning_rate: NumberOrSchedule = 1.0,
    betas: tuple[float, float] = (0.9, 0.999),
    beta3: float | None = None,
    eps: float = 1e-8,
    estim_lr0: float = 1e-6,
    estim_lr_coef: float = 1.0,
    weight_decay: float = 0.0,
    *,
    safeguard_warmup: bool = False,
) -> Transform:
    """Prodigy, AdamW without a learning rate to choose (g gradient, p param, at step t from 1).

        rate = d * learning_rate * sqrt(1 - b2**t) / (1 - b1**t)
        m = b1 * m + (1 - b1) * d * g
        v = b2 * v + (1 - b2) * (d * g)**2
        s = beta3 * s + d / d0 * rate * g
        r = beta3 * r + d / d0 * rate * sum(g * (p0 - p))
        d = max(d, estim_lr_coef * r / sum(abs(s)))
        update = -rate * (m / (sqrt(v) + d * eps) + weight_decay * p)

    In the state d is `estim_lr`, d0 `estim_lr0`, m `exp_avg`, v `exp_avg_sq`, s `grad_sum`, r
    `numerator_weighted` and p0 `params0`. Sums are over the whole tree.

    Source: Mishchenko and Defazio, 2023 (2306.06101), Algorithm 4; optax.contrib.prodigy. Where the
    sum of gradients is zero the estimate stays (optax divides by it).

    Needs: statistics, one all-reduce of two scalars in all. State: 4 tensors like params, one of
    which is the first params; two numbers and a step count.

    Args:
        learning_rate: a factor on the estimate, 1 or a schedule that begins there.
        betas: b1 and b2, the decays of the moments, per step.
        beta3: decay of the estimate's sums, per step; None for the square root of the second beta.
        eps: in the denominator, times the estimate.
        estim_lr0: the first estimate, to be too small.
        estim_lr_coef: a factor on later estimates.
        weight_decay: decoupled.
        safeguard_warmup: leave the learning rate out of the sum of gradients.
    """
    # Numbers: schedules are for the factor on the estimate only
    b1, b2 = betas
    b3 = b2**0.5 if beta3 is None else beta3

    def init(params: Tree) -> ProdigyState:
        return ProdigyState(
            count=step_count(),
            exp_avg=tree_zeros_like(params),
            exp_avg_sq=tree_zeros_like(params),
            grad_sum=tree_zeros_like(params),
            params0=tree_map(torch.clone, params),  # a copy: params may be donated to a step
            estim_lr=scalar_for(params, estim_lr0),
            numerator_weighted=scalar_for(params, 0.0),
        )

    def rate_of(state: ProdigyState, count: Tensor) -> Tensor:
        """The step's learning rate, 0-d: the estimate, the schedule, Adam's bias corrections."""
        # 0-d float64; m and v stay uncorrected
        correction = bias_correction(b2, count).sqrt() / bias_correction(b1, count)
        rate: Tensor = state.estim_lr * value_of(learning_rate, state.count) * correction
        # In the estimate's dtype, which stays the same over the steps
        return rate.to(state.estim_lr.dtype)

    def new_mean_of_squares(v: Tensor, scaled: Tensor) -> Tensor:
        return b2 * v + (1 - b2) * scaled * scaled

    def update(
        updates: Tree, state: ProdigyState, params: Tree, across: Across
    ) -> tuple[Tree, ProdigyState]:
        count = state.count + 1
        d = state.estim_lr  # the estimate before this step
        rate = rate_of(state, count)

        # Adam's moments of d * g
        scaled = elementwise(lambda g: g * d, updates)
        exp_avg = elementwise(lambda m, u: b1 * m + (1 - b1) * u, state.exp_avg, scaled)
        exp_avg_sq = elementwise(new_mean_of_squares, state.exp_avg_sq, scaled)

        # The estimate's two sums, from one all-reduce
        share = d * (d if safeguard_warmup else rate) / estim_lr0
        grad_sum = elementwise(lambda s, g: b3 * s + g * share, state.grad_sum, updates)
        # Like the pieces: products are summed by `across`
        away = tree_map(lambda g, first, p: g * (first - p), updates, state.params0, params)
        numerator, denominator = across.total(away, tree_map(torch.abs, grad_sum))

        # The estimate never falls: the distance to the solution was at least that
        # All 0-d, from answers that every rank has, so the estimate needs no broadcast
        weighted = b3 * state.numerator_weighted + (d / estim_lr0) * rate * numerator
        weighted = weighted.to(d.dtype)
        estimate = torch.where(denominator > 0, estim_lr_coef * weighted / denominator, d)
        estim_lr = torch.maximum(d, estimate).to(d.dtype)

        # The moments are of d * g, so eps is scaled by d as well
        def step(m: Tensor, v: Tensor, p: Tensor) -> Tensor:
            direction: Tensor = weight_decay * p + m / (v.sqrt() + estim_lr * eps)
            return direction * -rate

        # The rate is of the estimate before this step; only eps takes the new one
        steps = elementwise(step, exp_avg, exp_avg_sq, params)
        return steps, ProdigyState(
            count, exp_avg, exp_avg_sq, grad_sum, state.params0, estim_lr, weighted
        )

    return real_only(with_statistics(init, update))
