"""AdamW's chain as torch's fused kernel, for donated storage: one pass over params, gradients and
state.

The numbers are those of the pure chain up to rounding; `tests/optim/test_fused_adamw.py` holds them
to it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...devices import number_on
from ...tree import grouped
from ..across import Fused, Pointwise
from ..arithmetic import number
from ..base import Schedule, value_of
from ..states import CountState, ScaleByLearningRateState
from ..transforms.moments import ScaleByAdamState

# The state of chain(scale_by_adam, add_decayed_weights, scale_by_learning_rate)
AdamWState = tuple[ScaleByAdamState, CountState, ScaleByLearningRateState]


def _takes(param: Tensor) -> bool:
    # Half precisions, and other devices, run as the chain; on meta a plan counts as on these
    runs = param.device.type in ("cpu", "cuda", "meta")
    return runs and param.dtype in (torch.float32, torch.float64)


def fused_adamw(
    plain: Pointwise,
    learning_rate: float | Schedule,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float | Schedule,
) -> Fused:
    """`plain`, of `chain(scale_by_adam, add_decayed_weights, scale_by_learning_rate)`, as torch's
    fused AdamW.

    Others: see `adamw`; the kernel takes `b1`, `b2` and `eps` as numbers only.
    """

    def update(params: list[Tensor], updates: list[Tensor], state: AdamWState) -> AdamWState:
        moments, decayed, scaled = state
        rows = zip(params, updates, moments.mu.values(), moments.nu.values(), strict=True)
        # Numbers for the kernel. Counts are on the CPU, so no device is waited for
        rate = float(value_of(learning_rate, scaled.count))
        decay = float(value_of(weight_decay, decayed.count))
        # The kernel divides by 1 - b**step: it wants the number of this step, from 1
        step = moments.count + 1
        # mu and nu are moved on where they lie
        new = (
            moments._replace(count=step),
            CountState(decayed.count + 1),
            ScaleByLearningRateState(scaled.count + 1, number(rate)),
        )
        # A call takes those of one dtype on one device
        kinds = grouped(((row[0].dtype, row[0].device), row) for row in rows)
        for (_, device), alike in kinds.items():
            of_kind, grads, mu, nu = map(list, zip(*alike, strict=True))
            largest_nu: list[Tensor] = []  # amsgrad's, which is off
            # One tensor for all flats of the kind, in float32 as torch's own AdamW has it
            steps = [number_on(device, step, torch.float32)] * len(alike)
            torch._fused_adamw_(
                *(of_kind, grads, mu, nu),
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
        return new

    return Fused(update, _takes, plain)
