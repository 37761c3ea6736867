"""Adagrad."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..arithmetic import Number, Tree, elementwise, full_like, is_zero, number
from ..base import Schedule, Transform, chain, pointwise
from ..naming import named
from ..transforms.scaling import scale_by_schedule
from ..transforms.weight_decay import with_coupled_decay


class ScaleByRssState(NamedTuple):
    """Adagrad's sums."""

    sum_of_squares: Any  # like params


@named
def scale_by_rss(initial_accumulator_value: Number = 0.0, eps: Number = 1e-10) -> Transform:
    """Rescale updates by the root of the sum of their squares so far (Duchi et al., 2011).
    torch.optim.Adagrad's.

    optax begins at 0.1, takes eps 1e-7 and adds it under the root. State: 1 tensor like params.
    """

    def init(params: Tree) -> ScaleByRssState:
        return ScaleByRssState(full_like(params, initial_accumulator_value))

    def update(updates: Tree, state: ScaleByRssState, params: Tree) -> tuple[Tree, ScaleByRssState]:
        sums = elementwise(lambda s, g: torch.addcmul(s, g, g), state.sum_of_squares, updates)
        return elementwise(lambda g, s: g / (s.sqrt() + eps), updates, sums), ScaleByRssState(sums)

    return pointwise(init, update)


@named
def adagrad(
    learning_rate: Number | Schedule,
    initial_accumulator_value: Number = 0.0,
    eps: Number = 1e-10,
    *,
    lr_decay: Number = 0.0,
    weight_decay: Number | Schedule = 0.0,
) -> Transform:
    """Adagrad with a diagonal (Duchi et al., 2011). torch.optim.Adagrad's numerics and defaults
    (optax: 0.1, 1e-7).

    State: 1 tensor like params. `lr_decay` divides the learning rate by `1 + steps * lr_decay`.
    """
    falling = (
        ()
        if is_zero(lr_decay)
        else (scale_by_schedule(lambda count: 1 / (1 + count * number(lr_decay))),)
    )
    directions = chain(scale_by_rss(initial_accumulator_value, eps), *falling)
    return with_coupled_decay(directions, weight_decay, learning_rate)
