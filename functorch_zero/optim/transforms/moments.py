"""First and second moments of the gradients, as Adam and its relatives keep them.

Symbols as in optax: `mu` is the running mean of the gradients, `nu` that of their squares; `b1` and
`b2` are their decays per step. `count` is the number of steps taken.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..arithmetic import Number, Tree, ema, ema_of_squares, is_zero
from ..base import step_count, tree_zeros_like


class ScaleByAdamState(NamedTuple):
    """Two moments, each shaped and cut like the params, in their dtypes."""

    count: Tensor  # type: ignore[assignment]  # 0-d int64, on the CPU
    mu: Any  # like params: running mean of the gradients
    nu: Any  # like params: running mean of the squared gradients


def init_moments(params: Tree) -> ScaleByAdamState:
    """The moments before the first step: zeros."""
    return ScaleByAdamState(step_count(), tree_zeros_like(params), tree_zeros_like(params))


def update_moments(updates: Tree, state: Any, b1: Number, b2: Number) -> ScaleByAdamState:
    """The moments one step on; g are the updates.

        mu = b1 * mu + (1 - b1) * g
        nu = b2 * nu + (1 - b2) * g**2

    Args:
        updates: the gradients.
        state: any state with the fields `count`, `mu` and `nu`.
        b1: decay of `mu`, per step.
        b2: decay of `nu`, per step.
    """
    # Both stay in the dtype and on the device of the params
    mu = ema(state.mu, updates, b1)
    nu = ema_of_squares(state.nu, updates, b2)
    return ScaleByAdamState(state.count + 1, mu, nu)


def shifted_root(nu: Tensor, eps_root: Number) -> Tensor:
    """`sqrt(nu + eps_root)`, of one leaf."""
    if is_zero(eps_root):
        return nu.sqrt()  # the sum would be a temporary as large as the leaf
    return (nu + eps_root).sqrt()


def uncorrected_shift(eps_root: Number, c2: Tensor) -> Number:
    """The `eps_root` of a `nu` that is not divided by its bias correction `c2` (0-d) yet.

    sqrt(nu / c2 + eps_root) = sqrt(nu + eps_root * c2) / sqrt(c2)
    """
    if is_zero(eps_root):
        return eps_root  # a number, so that `shifted_root` sees that there is nothing to add
    return eps_root * c2
