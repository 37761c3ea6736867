"""First and second moments of the gradients, as Adam and its relatives keep them."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..arithmetic import Number, Tree, elementwise, ema, ema_of_squares, is_zero
from ..base import step_count, tree_zeros_like


class ScaleByAdamState(NamedTuple):
    """Adam's moments."""

    count: Tensor  # type: ignore[assignment]  # 0-d int64, on the CPU
    mu: Any  # like params: mean of the gradients
    nu: Any  # like params: mean of their squares


def init_moments(params: Tree) -> ScaleByAdamState:
    return ScaleByAdamState(step_count(), tree_zeros_like(params), tree_zeros_like(params))


def update_moments(updates: Tree, state: Any, b1: Number, b2: Number) -> ScaleByAdamState:
    """The moments after these updates."""
    mu = elementwise(lambda m, g: ema(m, g, b1), state.mu, updates)
    nu = elementwise(lambda v, g: ema_of_squares(v, g, b2), state.nu, updates)
    return ScaleByAdamState(state.count + 1, mu, nu)


def shifted_root(nu: Tensor, eps_root: Number) -> Tensor:
    """`sqrt(nu + eps_root)`."""
    return nu.sqrt() if is_zero(eps_root) else (nu + eps_root).sqrt()


def uncorrected_shift(eps_root: Number, c2: Tensor) -> Number:
    """The summand under the root that is `eps_root` after dividing by the root of `c2`."""
    return eps_root if is_zero(eps_root) else eps_root * c2
