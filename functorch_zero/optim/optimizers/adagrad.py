"""Adagrad with a diagonal: gradients over the root of the sum of their squares."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..arithmetic import Number, Tree, elementwise, is_zero, number
from ..base import NumberOrSchedule, Transform, chain, pointwise
from ..naming import named
from ..states import zeros
from ..transforms.scaling import scale_by_learning_rate, scale_by_schedule
from ..transforms.weight_decay import coupled_decay


class ScaleByRssState(NamedTuple):
    """Adagrad's sums."""

    sum_of_squares: Any  # like params: of all gradients so far


@named
def scale_by_rss(initial_accumulator_value: Number = 0.0, eps: Number = 1e-10) -> Transform:
    """Divide the updates g by the root of the sum of their squares so far.

        sum_of_squares = sum_of_squares + g**2
        update = g / (sqrt(sum_of_squares) + eps)

    Source: Duchi et al., 2011 (JMLR 12); torch.optim.Adagrad's numerics. optax begins at 0.1, takes
    1e-7 for eps, and adds it under the root.

    Needs: pointwise. State: 1 tensor like params.

    Args:
        initial_accumulator_value: each sum begins at it.
        eps: added to the root, against division by zero.
    """

    def update(updates: Tree, state: ScaleByRssState, params: Tree) -> tuple[Tree, ScaleByRssState]:
        sums = elementwise(lambda s, g: torch.addcmul(s, g, g), state.sum_of_squares, updates)
        directions = elementwise(lambda g, s: g / (s.sqrt() + eps), updates, sums)
        return directions, ScaleByRssState(sums)

    init = zeros(ScaleByRssState, sum_of_squares=initial_accumulator_value)
    return pointwise(init, update, in_parts=True)


@named
def adagrad(
    learning_rate: NumberOrSchedule,
    initial_accumulator_value: Number = 0.0,
    eps: Number = 1e-10,
    *,
    lr_decay: Number = 0.0,
    weight_decay: NumberOrSchedule = 0.0,
) -> Transform:
    """Adagrad, with coupled weight decay (g gradient, p param, t the step from 1).

        g = g + weight_decay * p
        update = -learning_rate / (1 + (t - 1) * lr_decay) * scale_by_rss(g)

    Source: Duchi et al., 2011 (JMLR 12); torch.optim.Adagrad, with its defaults (optax: 0.1, 1e-7).

    Needs: pointwise. State: 1 tensor like params.

    Args:
        learning_rate: a number or a schedule.
        lr_decay: of the learning rate, see the formula; per step.
        weight_decay: coupled: joins the gradient. Others: see `scale_by_rss`.
    """
    # The decay of the rate is a factor of its own, and missing where it is 1
    links = [scale_by_rss(initial_accumulator_value, eps)]
    if not is_zero(lr_decay):
        # The count is of the steps before this one: t - 1
        links.append(scale_by_schedule(lambda count: 1 / (1 + count * number(lr_decay))))
    return chain(
        *coupled_decay(weight_decay),
        # A chain of its own, also of one link: paths in checkpoint files count its links
        chain(*links),
        scale_by_learning_rate(learning_rate),
    )
