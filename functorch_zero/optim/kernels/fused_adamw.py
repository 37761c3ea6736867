"""AdamW's chain as torch's fused kernel, for donated storage: one pass over params, gradients and
state.

The numbers are those of the pure chain up to rounding; `tests/optim/test_fused_adamw.py` holds them
to it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...devices import number_on
from ..across import Fused
from ..arithmetic import number
from ..base import Schedule, value_of
from ..states import CountState, ScaleByLearningRateState
from ..transforms.moments import ScaleByAdamState

# The state of chain(scale_by_adam, add_decayed_weights, scale_by_learning_rate)
AdamWState = tuple[ScaleByAdamState, CountState, ScaleByLearningRateState]


class _Flats(NamedTuple):
    """The tensors of one call of torch's kernel, which changes all but the updates in place."""

    params: list[Tensor]  # each (piece,), all of one dtype, on one device
    updates: list[Tensor]  # like params, in their order, as are mu and nu
    mu: list[Tensor]
    nu: list[Tensor]


def _takes(param: Tensor) -> bool:
    # Half precisions, and other devices, run as the chain
    return param.dtype in (torch.float32, torch.float64) and param.device.type in ("cpu", "cuda")


def fused_adamw(
    learning_rate: float | Schedule,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float | Schedule,
) -> Fused:
    """`chain(scale_by_adam, add_decayed_weights, scale_by_learning_rate)` as torch's fused AdamW.

    Arguments: see `adamw`; the kernel takes `b1`, `b2` and `eps` as numbers only.
    """

    def update(
        params: list[Tensor], updates: list[Tensor], states: list[AdamWState]
    ) -> list[AdamWState]:
        kinds: dict[tuple[torch.dtype, torch.device], _Flats] = {}  # a call takes one kind
        for param, update, (moments, _, _) in zip(params, updates, states, strict=True):
            flats = kinds.setdefault((param.dtype, param.device), _Flats([], [], [], []))
            flats.params.append(param)
            flats.updates.append(update)
            # Trees of one leaf, which is the flat
            flats.mu.append(moments.mu[""])
            flats.nu.append(moments.nu[""])
        moments, decayed, scaled = states[0]  # counts are the same in all of them
        # Numbers for the kernel. Counts are on the CPU, so no device is waited for
        rate = float(value_of(learning_rate, scaled.count))
        decay = float(value_of(weight_decay, decayed.count))
        # The kernel divides by 1 - b**step: it wants the number of this step, from 1
        step = moments.count + 1
        for (_, device), flats in kinds.items():
            largest_nu: list[Tensor] = []  # amsgrad's, which is off
            # One tensor for all flats of the kind, in float32 as torch's own AdamW has it
            steps = [number_on(device, step, torch.float32)] * len(flats.params)
            torch._fused_adamw_(
                *flats,
                largest_nu,
                steps,
                amsgrad=False,
                lr=rate,
                beta1=b1,
                beta2=b2,
                weight_decay=decay,
                eps=eps,
                maximize=False,
            )
        # mu and nu were moved on where they lie; counts are new, and the same tensors for all flats
        decayed = CountState(decayed.count + 1)
        scaled = ScaleByLearningRateState(scaled.count + 1, number(rate))
        return [(state[0]._replace(count=step), decayed, scaled) for state in states]

    return Fused(update, _takes)
