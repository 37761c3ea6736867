"""NovoGrad: momentum of gradients that are divided by a running norm of their leaf's."""

from __future__ import annotations

from typing import Any, NamedTuple

from optree import tree_map
from torch import Tensor

from ..across import Across, sum_dtype
from ..arithmetic import Tree, elementwise
from ..base import (
    NumberOrSchedule,
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
    nu: Any  # per leaf 0-d, at least fp32, every rank: running mean of the squared gradient norms


@named
def scale_by_novograd(
    b1: float = 0.9,
    b2: float = 0.25,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    weight_decay: float | Schedule = 0.0,
) -> Transform:
    """Momentum of normalised gradients, per leaf (g gradient, p param).

        nu = b2 * nu + (1 - b2) * norm(g)**2    (in the first step nu = norm(g)**2)
        mu = b1 * mu + g / (sqrt(nu + eps_root) + eps) + weight_decay * p
        update = mu

    Source: Ginsburg et al., 2019 (1905.11286), Algorithm 1; optax.scale_by_novograd.

    Needs: statistics, one all-reduce of a scalar per leaf. State: 1 tensor like params and a scalar
    per leaf, and a step count.

    Args:
        b1: decay of the momentum, a sum, per step.
        b2: decay of the mean of squared norms, per step.
        eps: added to the root, against division by zero.
        eps_root: added under the root.
        weight_decay: times the param is added to the normalised gradient, inside the momentum; a
            number or a schedule.
    """

    def init(params: Tree) -> ScaleByNovogradState:
        nu = tree_map(lambda p: p.new_zeros((), dtype=sum_dtype(p.dtype)), params)
        return ScaleByNovogradState(step_count(), tree_zeros_like(params), nu)

    def update(
        updates: Tree, state: ScaleByNovogradState, params: Tree, across: Across
    ) -> tuple[Tree, ScaleByNovogradState]:
        share = (
            b2 * (state.count > 0).double()
        )  # of the mean before; there is none in the first step
        decay = value_of(weight_decay, state.count)

        # All 0-d: of a whole leaf, and in nu's dtype at the end
        def new_nu(v: Tensor, norm: Tensor) -> Tensor:
            mean = share * v + (1 - share) * norm * norm
            return mean.to(v.dtype)

        def momentum(m: Tensor, g: Tensor, v: Tensor, p: Tensor) -> Tensor:
            # v is 0-d: all pieces of the leaf are divided by one number
            normalised = times(g, 1 / ((v + eps_root).sqrt() + eps))
            return b1 * m + normalised + times(p, decay)

        # One all-reduce, of one squared norm per leaf
        nu = tree_map(new_nu, state.nu, across.norm(updates))
        mu = elementwise(momentum, state.mu, updates, nu, params)
        return mu, ScaleByNovogradState(state.count + 1, mu, nu)

    return with_statistics(init, update)


@named
def novograd(
    learning_rate: NumberOrSchedule,
    b1: float = 0.9,
    b2: float = 0.25,
    eps: float = 1e-6,
    eps_root: float = 0.0,
    weight_decay: float | Schedule = 0.0,
) -> Transform:
    """NovoGrad (g gradient).

        update = -learning_rate * scale_by_novograd(g)

    Source: Ginsburg et al., 2019 (1905.11286); optax.novograd.

    Needs: statistics, one all-reduce of a scalar per leaf. State: 1 tensor like params and a scalar
    per leaf.

    Args:
        learning_rate: a number or a schedule. Others: see `scale_by_novograd`.
    """
    return chain(
        scale_by_novograd(b1, b2, eps, eps_root, weight_decay),
        scale_by_learning_rate(learning_rate),
    )
