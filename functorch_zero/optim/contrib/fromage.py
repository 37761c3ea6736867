"""Fromage."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..arithmetic import Number
from ..base import Schedule, Transform, chain, value_of
from ..naming import named
from ..transforms.scaling import scale_by_learning_rate
from ..transforms.trust_ratio import scale_by_trust_ratio
from ..transforms.weight_decay import add_decayed_weights


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
