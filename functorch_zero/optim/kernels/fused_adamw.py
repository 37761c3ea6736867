"""Known chains as torch's fused kernels, for donated storage: one pass over params, gradients and
state.

The numbers are those of the pure chain up to rounding; `tests/optim/test_fused_adamw.py` holds them
to it.
"""

from __future__ import annotations

from itertools import compress

import torch
from torch import Tensor

from ..across import Fused
from ..arithmetic import number
from ..base import Schedule, value_of
from ..states import CountState, ScaleByLearningRateState
from ..transforms.moments import ScaleByAdamState

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
        moments, decayed, scaled = states[0]
        mu, nu = [state[0].mu[""] for state in states], [state[0].nu[""] for state in states]
        rate, decay = (
            float(value_of(learning_rate, scaled.count)),
            float(value_of(weight_decay, decayed.count)),
        )
        step = moments.count + 1
        for kind in dict.fromkeys((p.dtype, p.device) for p in params):
            of_kind = [(p.dtype, p.device) == kind for p in params]
            p, u, m, v = ([*compress(flats, of_kind)] for flats in (params, updates, mu, nu))
            torch._fused_adamw_(
                p,
                u,
                m,
                v,
                [],
                [step.to(kind[1], torch.float32)] * len(p),
                amsgrad=False,
                lr=rate,
                beta1=b1,
                beta2=b2,
                weight_decay=decay,
                eps=eps,
                maximize=False,
            )
        rest = (
            CountState(decayed.count + 1),
            ScaleByLearningRateState(scaled.count + 1, number(rate)),
        )
        return [(state[0]._replace(count=step), *rest) for state in states]

    return Fused(update, _takes)
