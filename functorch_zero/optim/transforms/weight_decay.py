"""Weight decay: a multiple of the params, added to the updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..arithmetic import Number, Tree, add_scaled, add_scaled_, elementwise, is_zero
from ..base import Schedule, Transform, Update, chain, pointwise, value_of
from ..naming import named
from ..states import CountState, init_count
from ..wrappers.masking import Mask, masked
from .scaling import scale_by_learning_rate


@named
def add_decayed_weights(
    weight_decay: Number | Schedule = 0.0, mask: Mask | None = None
) -> Transform:
    """Add `weight_decay` times the param to each update. As optax.add_decayed_weights; the state is
    a step count.

    Args:
        weight_decay: a number or a schedule.
        mask: which leaves decay, as for `masked`; None for all.
    """

    def by(add: Callable[[Tensor, Tensor, Number], Tensor]) -> Update:
        def update(updates: Tree, state: CountState, params: Tree) -> tuple[Any, Any]:
            decay = value_of(weight_decay, state.count)
            return elementwise(lambda u, p: add(u, p, decay), updates, params), CountState(
                state.count + 1
            )

        return update

    decayed = pointwise(init_count, by(add_scaled), in_place=by(add_scaled_))
    return decayed if mask is None else masked(decayed, mask)


def with_coupled_decay(
    directions: Transform,
    weight_decay: Number | Schedule,
    learning_rate: Number | Schedule,
    mask: Mask | None = None,
) -> Transform:
    """Decay, as part of the gradient and left out where it is 0, then directions, then the learning
    rate."""
    decay = () if is_zero(weight_decay) else (add_decayed_weights(weight_decay, mask),)
    return chain(*decay, directions, scale_by_learning_rate(learning_rate))


def with_decoupled_decay(
    directions: Transform,
    weight_decay: Number | Schedule,
    mask: Mask | None,
    learning_rate: Number | Schedule,
) -> Transform:
    """Directions, then decay, then the learning rate."""
    return chain(
        directions, add_decayed_weights(weight_decay, mask), scale_by_learning_rate(learning_rate)
    )


def product(a: Number | Schedule, b: Number | Schedule) -> Callable[[Tensor], Any]:
    """The schedule that is the product of two."""

    def both(count: Tensor) -> Any:
        return value_of(a, count) * value_of(b, count)

    return both
