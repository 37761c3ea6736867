"""LARS: SGD with momentum, whose steps are in proportion to each leaf's norm."""

from __future__ import annotations

from ..arithmetic import Number
from ..base import NumberOrSchedule, Transform, chain
from ..naming import named
from ..transforms.momentum import trace
from ..transforms.scaling import scale_by_learning_rate
from ..transforms.trust_ratio import scale_by_trust_ratio
from ..transforms.weight_decay import add_decayed_weights
from ..wrappers.masking import Mask, masked


@named
def lars(
    learning_rate: NumberOrSchedule,
    weight_decay: NumberOrSchedule = 0.0,
    weight_decay_mask: Mask | None = None,
    trust_coefficient: float = 0.001,
    eps: float = 0.0,
    trust_ratio_mask: Mask | None = None,
    *,
    momentum: Number = 0.9,
    nesterov: bool = False,
) -> Transform:
    """LARS, per leaf (g gradient, p param).

        g = g + weight_decay * p
        step = learning_rate * g * trust_coefficient * norm(p) / (norm(g) + eps)
        trace = momentum * trace - step
        update = trace

    Source: You et al., 2017 (1708.03888), Algorithm 1; optax.lars.

    Needs: statistics, one all-reduce of two scalars per leaf. State: 1 tensor like params.

    Args:
        learning_rate: a number or a schedule. It stands inside the momentum.
        weight_decay: coupled: joins the gradient.
        weight_decay_mask: which leaves decay; None for all.
        trust_coefficient: the norm of a leaf's step, before the learning rate, over that of the
            leaf.
        eps: added to the gradient's norm.
        trust_ratio_mask: which leaves are scaled by the ratio; None for all. Norms and biases are
            often left out.
        momentum: decay of the sum of steps, per step.
        nesterov: look one step ahead, see `trace`.
    """
    ratio = scale_by_trust_ratio(trust_coefficient=trust_coefficient, eps=eps)
    return chain(
        # In front of the ratio: the decay counts in the gradient's norm
        add_decayed_weights(weight_decay, weight_decay_mask),
        ratio if trust_ratio_mask is None else masked(ratio, trust_ratio_mask),
        # In front of the momentum, as in the paper: the sum keeps each step's own rate
        scale_by_learning_rate(learning_rate),
        trace(momentum, nesterov),
    )
