"""Known chains as torch's fused kernels, for donated storage: one pass over params, gradients and
state.

The numbers are those of the pure chain up to rounding; `tests/optim/test_fused_adamw.py` holds them
to it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..across import Fused
from ..arithmetic import number
from ..base import Schedule, value_of
from ..states import CountState, ScaleByLearningRateState
from ..transforms.adam import ScaleByAdamState

AdamWState = tuple[ScaleByAdamState, CountState, ScaleByLearningRateState]


def _takes(param: Tensor) -> bool:
    return param.dtype in (torch.float32, torch.float64) and param.device.type in ("cpu", "cuda")


def fused_adamw(
    learning_rate: float | Schedule,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float | Schedule,
) -> Fused:
    """`chain(scale_by_adam, add_decayed_weights, scale_by_learning_rate)` as torch's fused
    AdamW."""

    def update(
        params: list[Tensor], updates: list[Tensor], states: list[AdamWState]
    ) -> list[AdamWState]:
        moments, decayed, scaled = states[0]  # counts are the same in all of them
        rate = float(value_of(learning_rate, scaled.count))
        decay = float(value_of(weight_decay, decayed.count))
        step = moments.count + 1
        # The kernel takes lists of one dtype on one device
        for dtype, device in dict.fromkeys((p.dtype, p.device) for p in params):
            alike = [i for i, p in enumerate(params) if (p.dtype, p.device) == (dtype, device)]
            torch._fused_adamw_(
                [params[i] for i in alike],
                [updates[i] for i in alike],
                [states[i][0].mu[""] for i in alike],
                [states[i][0].nu[""] for i in alike],
                [],  # the largest nu, of amsgrad
                [step.to(device, torch.float32)] * len(alike),
                amsgrad=False,
                lr=rate,
                beta1=b1,
                beta2=b2,
                weight_decay=decay,
                eps=eps,
                maximize=False,
            )
        decayed = CountState(decayed.count + 1)
        scaled = ScaleByLearningRateState(scaled.count + 1, number(rate))
        return [(state[0]._replace(count=step), decayed, scaled) for state in states]

    return Fused(update, _takes)
