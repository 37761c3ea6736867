"""First and second moments of the gradients, as Adam and its relatives keep them.

Symbols as in optax: `mu` is the running mean of the gradients, `nu` that of their squares; `b1` and
`b2` are their decays per step. `count` is the number of steps taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ..arithmetic import Number, Tree, bias_correction, ema, ema_of_squares, is_zero
from ..states import zeros


class ScaleByAdamState(NamedTuple):
    """Two moments, each shaped and cut like the params, in their dtypes."""

    count: Tensor  # type: ignore[assignment]  # 0-d int64, on the CPU
    mu: Any  # like params: running mean of the gradients
    nu: Any  # like params: running mean of the squared gradients


init_moments = zeros(ScaleByAdamState)


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


def adam_denominator(
    b2: Number, count: Tensor, eps: Number, eps_root: Number
) -> Callable[[Tensor], Tensor]:
    """From a leaf of `nu` to `sqrt(nu / (1 - b2**count) + eps_root) + eps`."""
    c2 = bias_correction(b2, count)  # 0-d float64, on the CPU, as its root is
    # The root is divided, not nu, as in torch.optim.Adam: the bits depend on it
    root_of_c2 = c2.sqrt()
    # sqrt(nu / c2 + eps_root) = sqrt(nu + eps_root * c2) / sqrt(c2). A number, where it is 0
    shift = eps_root if is_zero(eps_root) else eps_root * c2
    return lambda v: shifted_root(v, shift) / root_of_c2 + eps
