"""SignSGD: gradient descent by the gradient's sign."""

from __future__ import annotations

from ..base import NumberOrSchedule, Transform, chain
from ..naming import named
from ..transforms.scaling import scale_by_learning_rate, scale_by_sign


@named
def sign_sgd(learning_rate: NumberOrSchedule) -> Transform:
    """SignSGD (g gradient).

        update = -learning_rate * sign(g)

    Source: Bernstein et al., 2018 (1802.04434); optax.sign_sgd. The gradient's sign is taken after
    ranks have averaged it, not by their vote.

    Needs: pointwise. State: none but a step count and the last learning rate.

    Args:
        learning_rate: the size of every element's step; a number or a schedule.
    """
    return chain(scale_by_sign(), scale_by_learning_rate(learning_rate))
