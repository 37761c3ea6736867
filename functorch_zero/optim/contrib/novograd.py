"""NovoGrad."""

from __future__ import annotations

from typing import Any, NamedTuple

from optree import tree_map
from torch import Tensor

from ..across import Across, sum_dtype
from ..arithmetic import Number, Tree, elementwise
from ..base import (
    Schedule,
    Transform,
    chain,
    step_count,
    tree_zeros_like,
    value_of,
    with_statistics,
)
from ..naming import named
from ..transforms.norms import times
from ..transforms.scaling import scale_by_learning_rate


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
