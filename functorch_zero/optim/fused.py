"""Known chains as torch's fused kernels, for donated storage: one pass over params, gradients and state.

The numbers are those of the pure chain up to rounding; `tests/test_fused.py` holds them to it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..across import Fused
from .base import Schedule, value_of
from .elementwise import number
from .moments import ScaleByAdamState
from .states import CountState, ScaleByLearningRateState

AdamWState = tuple[ScaleByAdamState, CountState, ScaleByLearningRateState]


def _takes(param: Tensor) -> bool:
    return param.dtype in (torch.float32, torch.float64) and param.device.type in ("cpu", "cuda")


def fused_adamw(
    learning_rate: float | Schedule, b1: float, b2: float, eps: float, weight_decay: float | Schedule
) -> Fused:
    """`chain(scale_by_adam, add_decayed_weights, scale_by_learning_rate)` as torch's fused AdamW."""

    def update(params: Tensor, updates: Tensor, state: AdamWState) -> AdamWState:
        moments, decayed, scaled = state
        rate = float(value_of(learning_rate, scaled.count))
        torch._fused_adamw_(
            [params],
            [updates],
            [moments.mu[""]],
            [moments.nu[""]],
            [],
            [(moments.count + 1).to(params.device, torch.float32)],
            amsgrad=False,
            lr=rate,
            beta1=b1,
            beta2=b2,
            weight_decay=float(value_of(weight_decay, decayed.count)),
            eps=eps,
            maximize=False,
        )
        kept = ScaleByLearningRateState(scaled.count + 1, number(rate))
        return moments._replace(count=moments.count + 1), CountState(decayed.count + 1), kept

    return Fused(update, _takes)
