"""SignSGD."""

from __future__ import annotations

from ..arithmetic import Number
from ..base import Schedule, Transform, chain
from ..naming import named
from ..transforms.scaling import scale_by_learning_rate, scale_by_sign


@named
def sign_sgd(learning_rate: Number | Schedule) -> Transform:
    """Gradient descent by the gradient's sign (Bernstein et al., 2018). As optax.sign_sgd. No state
    like params."""
    return chain(scale_by_sign(), scale_by_learning_rate(learning_rate))
