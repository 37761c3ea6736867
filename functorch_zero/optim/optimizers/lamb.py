"""LAMB: Adam whose steps are in proportion to each leaf's norm."""

from __future__ import annotations

from ..arithmetic import Number
from ..base import NumberOrSchedule, Transform, chain
from ..naming import named
from ..transforms.scaling import scale_by_learning_rate
from ..transforms.trust_ratio import scale_by_trust_ratio
from ..transforms.weight_decay import add_decayed_weights
from ..wrappers.masking import Mask
from .adam import scale_by_adam


@named
def lamb(
    learning_rate: NumberOrSchedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-6,
    eps_root: Number = 0.0,
    *,
    weight_decay: NumberOrSchedule = 0.0,
    mask: Mask | None = None,
) -> Transform:
    """LAMB, per leaf (g gradient, p param).

        u = scale_by_adam(g) + weight_decay * p
        update = -learning_rate * u * norm(p) / norm(u)

    Source: You et al., 2020 (1904.00962), Algorithm 2, with the norm itself for phi; optax.lamb.

    Needs: statistics, one all-reduce of two scalars per leaf. State: 2 tensors like params.

    Args:
        learning_rate: the norm of a leaf's step over that of the leaf; a number or a schedule.
        weight_decay: decoupled from the moments, inside the trust ratio.
        mask: which leaves decay; None for all. Others: see `scale_by_adam`.
    """
    return chain(
        # Bias-corrected, as in the paper's algorithm
        scale_by_adam(b1, b2, eps, eps_root),
        # In front of the ratio: the decay counts in the norm of u
        add_decayed_weights(weight_decay, mask),
        scale_by_trust_ratio(),
        scale_by_learning_rate(learning_rate),
    )
