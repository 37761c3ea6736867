"""SGD."""

from __future__ import annotations

from ..arithmetic import Number
from ..base import Schedule, Transform
from ..naming import named
from ..transforms.momentum import trace
from ..transforms.scaling import identity
from ..transforms.weight_decay import with_coupled_decay


@named
def sgd(
    learning_rate: Number | Schedule,
    momentum: Number | None = None,
    nesterov: bool = False,
    *,
    dampening: Number = 0.0,
    weight_decay: Number | Schedule = 0.0,
) -> Transform:
    """Gradient descent. torch.optim.SGD's numerics. State with momentum: 1 tensor like params, else
    none."""
    directions = identity() if momentum is None else trace(momentum, nesterov, dampening)
    return with_coupled_decay(directions, weight_decay, learning_rate)
