"""SGD, with momentum or without."""

from __future__ import annotations

from ..arithmetic import Number
from ..base import NumberOrSchedule, Transform, chain
from ..naming import named
from ..transforms.momentum import trace
from ..transforms.scaling import identity, scale_by_learning_rate
from ..transforms.weight_decay import coupled_decay


@named
def sgd(
    learning_rate: NumberOrSchedule,
    momentum: Number | None = None,
    nesterov: bool = False,
    *,
    dampening: Number = 0.0,
    weight_decay: NumberOrSchedule = 0.0,
) -> Transform:
    """Gradient descent (g gradient, p param).

        g = g + weight_decay * p
        trace = momentum * trace + (1 - dampening) * g
        update = -learning_rate * trace

    Source: torch.optim.SGD.

    Needs: pointwise. State: with momentum 1 tensor like params, else none.

    Args:
        learning_rate: a number or a schedule.
        momentum: decay of the sum of gradients, per step; None keeps no sum.
        nesterov: look one step ahead, see `trace`.
        dampening: the share of each gradient that is left out of the sum, see `trace`.
        weight_decay: coupled: joins the gradient.
    """
    # A link of the chain without momentum, too: paths in checkpoint files count the links
    direction = identity() if momentum is None else trace(momentum, nesterov, dampening)
    return chain(
        *coupled_decay(weight_decay),
        direction,
        scale_by_learning_rate(learning_rate),
    )
