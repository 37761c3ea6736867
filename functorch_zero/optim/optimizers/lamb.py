"""LAMB."""

from __future__ import annotations

from ..arithmetic import Number
from ..base import Schedule, Transform, chain
from ..naming import named
from ..transforms.scaling import scale_by_learning_rate
from ..transforms.trust_ratio import scale_by_trust_ratio
from ..transforms.weight_decay import add_decayed_weights
from ..wrappers.masking import Mask
from .adam import scale_by_adam


@named
def lamb(
    learning_rate: Number | Schedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-6,
    eps_root: Number = 0.0,
    *,
    weight_decay: Number | Schedule = 0.0,
    mask: Mask | None = None,
) -> Transform:
    """LAMB: Adam's direction, decayed, with each leaf's step in proportion to the norm of its
    params.

    Source: You et al., 2020 (1904.00962), Algorithm 2, with the norm itself for phi; optax.lamb.

    State: 2 tensors like params. Sharded: one all-reduce of two scalars per leaf.

    Args:
        mask: which leaves decay.
    """
    return chain(
        scale_by_adam(b1, b2, eps, eps_root),
        add_decayed_weights(weight_decay, mask),
        scale_by_trust_ratio(),
        scale_by_learning_rate(learning_rate),
    )
