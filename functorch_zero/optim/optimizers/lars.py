"""LARS."""

from __future__ import annotations

from ..arithmetic import Number
from ..base import Schedule, Transform, chain
from ..naming import named
from ..transforms.momentum import trace
from ..transforms.scaling import scale_by_learning_rate
from ..transforms.trust_ratio import scale_by_trust_ratio
from ..transforms.weight_decay import add_decayed_weights
from ..wrappers.masking import Mask, masked


@named
def lars(
    learning_rate: Number | Schedule,
    weight_decay: Number | Schedule = 0.0,
    weight_decay_mask: Mask | None = None,
    trust_coefficient: float = 0.001,
    eps: float = 0.0,
    trust_ratio_mask: Mask | None = None,
    *,
    momentum: Number = 0.9,
    nesterov: bool = False,
) -> Transform:
    """LARS: SGD with momentum, with each leaf's step in proportion to the norm of its params.

    Source: You et al., 2017 (1708.03888), Algorithm 1; optax.lars. Weight decay joins the gradient.

    State: 1 tensor like params. Sharded: one all-reduce of two scalars per leaf.

    Args:
        weight_decay_mask: which leaves decay; None for all.
        trust_ratio_mask: which leaves are scaled by the ratio; None for all. Norms and biases are
            often left out.
    """
    ratio = scale_by_trust_ratio(trust_coefficient=trust_coefficient, eps=eps)
    return chain(
        add_decayed_weights(weight_decay, weight_decay_mask),
        ratio if trust_ratio_mask is None else masked(ratio, trust_ratio_mask),
        scale_by_learning_rate(learning_rate),
        trace(momentum, nesterov),
    )
