"""Fromage: each leaf turns by an angle, and keeps its norm."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..base import NumberOrSchedule, Transform, chain, value_of
from ..naming import named
from ..transforms.scaling import scale_by_learning_rate
from ..transforms.trust_ratio import scale_by_trust_ratio
from ..transforms.weight_decay import add_decayed_weights


@named
def fromage(learning_rate: NumberOrSchedule, min_norm: float = 1e-6) -> Transform:
    """Fromage, per leaf (g gradient, p param).

        shrink = 1 / sqrt(1 + learning_rate**2)
        p + update = shrink * (p - learning_rate * g * norm(p) / norm(g))

    Source: Bernstein et al., 2020 (2002.03432), Algorithm 1; optax.fromage.

    Needs: statistics, one all-reduce of two scalars per leaf. State: none but step counts.

    Args:
        learning_rate: the tangent of the angle; a number or a schedule.
        min_norm: the norms of the params and of the gradients count as at least this.
    """

    # A number for a number, 0-d for a schedule; 1 at a rate of 0
    def shrink(count: Tensor) -> Any:
        return (1 + value_of(learning_rate, count) ** 2) ** -0.5

    # The update's part along p: (shrink - 1) * p is added
    def decay(count: Tensor) -> Any:
        return shrink(count) - 1

    # The update's part along g
    def rate(count: Tensor) -> Any:
        return shrink(count) * value_of(learning_rate, count)

    return chain(
        scale_by_trust_ratio(min_norm),
        scale_by_learning_rate(rate),
        add_decayed_weights(decay),  # behind the rate, since it is the whole of `shrink - 1`
    )
