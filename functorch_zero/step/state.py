"""`TrainState`: all that a training run carries from one step to the next."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..layout.sharding import Sharding
from ..tree import PyTree
from .nonfinite import NonFiniteState


class TrainState(NamedTuple):
    """Everything a training run carries from one step to the next."""

    step: Tensor  # 0-d int64, on the CPU
    params: PyTree[Tensor]  # whole; at level 3 this rank's pieces
    buffers: PyTree[Tensor]  # whole, on every rank
    opt_state: Any  # at levels 1 to 3 in pieces where it follows a param
    seed: Tensor | None  # 0-d int64, on the CPU; None: the global random state is used as it is
    sharding: Sharding | None = None  # how it is cut; None: it isn't
    # steps skipped, and the loss scale; None: nothing is skipped
    finite: NonFiniteState | None = None


def check_state(state: Any) -> None:
    """Refuse what is no state."""
    if not isinstance(state, TrainState):
        raise TypeError(
            "a step takes (state, batch), and a state is what step.init made; got a "
            f"{type(state).__name__}"
        )
