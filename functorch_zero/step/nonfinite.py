"""Numbers that are not finite: a step's answer to them, and the loss scale that float16 needs.

All ranks decide together, from the loss averaged over ranks and the reduced gradients. A skipped
step leaves params, buffers and the optimizer's state as they were; only the step counter, the count
of skipped steps and the loss scale go on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ..errors import NonFiniteError, check_choice

NonFinite = Literal["raise", "skip", "pass"]
NonFiniteGradient = Literal["raise", "tell", "pass"]

_NAMED = 4  # leaves that an error names; the others are counted


@dataclass(frozen=True)
class LossScale:
    """Dynamic loss scaling, for float16: the loss is multiplied before backward, gradients are
    divided after it.

    As torch.amp.GradScaler (`init_scale`, `growth_factor`, `backoff_factor`, `growth_interval`) and
    DeepSpeed's `fp16` (`initial_scale_power`, `loss_scale_window`, `min_loss_scale`); after
    Micikevicius et al. (2018), 3.2.

    Attributes:
        initial: the first scale. A power of two, as all scales are with the other defaults, rounds
            nothing.
        growth: the scale is multiplied by this after `interval` finite steps in a row.
        backoff: and by this when a step is not finite, and skipped.
        interval: in steps.
        minimum: the smallest scale.
    """

    initial: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    minimum: float = 1.0

    def __post_init__(self) -> None:
        # "not (...)" also refuses NaN, which fails every comparison
        if not (0 < self.minimum <= self.initial < math.inf):
            raise ValueError(
                f"expected 0 < minimum <= initial, got minimum {self.minimum}, initial "
                f"{self.initial}"
            )
        if not (1 <= self.growth < math.inf and 0 < self.backoff < 1 and self.interval >= 1):
            raise ValueError(
                "expected growth >= 1, 0 < backoff < 1 and interval >= 1, got "
                f"growth {self.growth}, backoff {self.backoff}, interval {self.interval}"
            )

    def init(self) -> NonFiniteState:
        """For a first state: the first scale, and no steps so far.

        >>> float(LossScale(initial=8.0).init().scale)
        8.0
        """
        # On the CPU: the host reads them at every step
        return NonFiniteState(
            skipped=torch.zeros((), dtype=torch.int64, device="cpu"),
            scale=torch.tensor(self.initial, dtype=torch.float64, device="cpu"),
            good_steps=torch.zeros((), dtype=torch.int64, device="cpu"),
        )

    def next(self, state: NonFiniteState, *, fine: bool) -> NonFiniteState:
        """For the next state, after a step whose gradients were finite, or weren't, and which has
        changed nothing then.

        >>> scaling = LossScale(initial=8.0)
        >>> after = scaling.next(scaling.init(), fine=False)
        >>> float(after.scale), int(after.skipped)
        (4.0, 1)
        """
        assert state.scale is not None and state.good_steps is not None
        # Every tensor is a new one, since the state given stays valid
        skipped, no_steps = state.skipped + (not fine), torch.zeros_like(state.good_steps)
        # The gradients overflowed, or were no numbers at all: back off, and count anew
        if not fine:
            smaller = state.scale * self.backoff
            return NonFiniteState(skipped, smaller.clamp(min=self.minimum), no_steps)
        good_steps = state.good_steps + 1
        # Long enough without overflow: try a larger scale
        if int(good_steps) >= self.interval:
            return NonFiniteState(skipped, state.scale * self.growth, no_steps)
        return NonFiniteState(skipped, state.scale.clone(), good_steps)


class NonFiniteState(NamedTuple):
    """A state's memory of numbers that were not finite; the same on every rank."""

    skipped: Tensor  # 0-d int64, on the CPU: steps skipped so far
    # 0-d float64, on the CPU: the next loss's factor; None: not scaled
    scale: Tensor | None
    good_steps: Tensor | None  # 0-d int64, on the CPU: finite steps since the scale changed last


@dataclass(frozen=True)
class NonFinitePolicy:
    """A step's answer to numbers that are not finite."""

    nonfinite: NonFinite = "pass"
    scaling: LossScale | None = None

    def __post_init__(self) -> None:
        check_choice("nonfinite", self.nonfinite, get_args(NonFinite))
        if self.scaling is not None and self.nonfinite != "skip":
            raise ValueError(
                f"loss_scale and nonfinite={self.nonfinite!r} exclude each other: the scale is "
                "found by letting gradients overflow, and steps that do must be skipped. Remedy: "
                "leave nonfinite out, or don't scale"
            )

    @property
    def looks(self) -> bool:
        """Whether the step looks at the numbers, for which the host waits."""
        return self.nonfinite != "pass"

    def init(self) -> NonFiniteState | None:
        """For the first state; None unless steps are skipped."""
        if self.nonfinite != "skip":
            return None
        if self.scaling is not None:
            return self.scaling.init()
        # On the CPU: the host reads it at every step
        skipped = torch.zeros((), dtype=torch.int64, device="cpu")
        return NonFiniteState(skipped, scale=None, good_steps=None)

    def scale(self, state: NonFiniteState | None) -> float | None:
        """The factor of the next loss; None: not scaled."""
        return None if state is None or state.scale is None else float(state.scale)

    def next(self, state: NonFiniteState | None, *, fine: bool) -> NonFiniteState | None:
        """For the next state, after a step that was finite or wasn't."""
        if state is None:
            return None
        # Skipping without a scale: only the count goes on
        if self.scaling is None or state.scale is None or state.good_steps is None:
            return state._replace(skipped=state.skipped + (not fine))
        return self.scaling.next(state, fine=fine)

    def metrics(self, state: NonFiniteState | None) -> dict[str, Tensor]:
        """The step's own metrics: the steps skipped so far, and the next loss's scale."""
        if state is None:
            return {}
        found = {"skipped": state.skipped.to(torch.get_default_dtype())}
        if state.scale is not None:
            # A tensor of its own: who writes to a metric must not change the state
            found["loss_scale"] = state.scale.clone()
        return found


def all_finite(tensors: Iterable[Tensor], limits: Iterable[float] | None = None) -> bool:
    """Whether no element is a NaN, an infinity, or as large as its tensor's limit.

    The host waits for it, once for all tensors; nothing of the tensors' size is made.
    """
    ends = itertools.repeat(math.inf) if limits is None else limits
    found: list[Tensor] = []  # 0-d bools
    # Not strict: without limits the ends repeat for ever
    for x, end in zip(tensors, ends, strict=False):
        if x.numel():  # an empty tensor has no largest element
            # The infinity norm: a NaN among the elements makes it a NaN, which is below nothing
            largest = torch.linalg.vector_norm(x.detach(), math.inf)
            # In float64, which holds every dtype's values
            found.append(largest.double() < end)
    if not found:
        return True
    # The one wait: a bool of all tensors together
    return bool(torch.stack(found).all())


def not_finite(named: dict[str, Tensor]) -> list[str]:
    """The names of the tensors that have a NaN or an infinity."""
    return [name for name, x in named.items() if not all_finite([x])]


def refusal(what: str, findings: list[Any]) -> NonFiniteError:
    """The error of a step, or of a gradient outside of one.

    Args:
        what: its name, with the number.
        findings: from each rank in order, its loss and the paths of the leaves whose gradients are
            not finite there.
    """
    losses: list[str] = []
    leaves: dict[str, None] = {}  # each once, in the order found
    for rank, (loss, paths) in enumerate(findings):
        if not math.isfinite(float(loss)):
            losses.append(f"{loss} on rank {rank}")
        leaves |= dict.fromkeys(paths)

    story = []
    if losses:
        story.append(f"the loss is {', '.join(losses)}")
    if leaves:
        named = ", ".join(list(leaves)[:_NAMED])
        more = f" and {len(leaves) - _NAMED} more leaves" if len(leaves) > _NAMED else ""
        story.append(f"the gradients of {named}{more} are")
    return NonFiniteError(
        f"{what} is not finite: {'; '.join(story)}. The state is as it was. Remedy: look for the "
        "cause there (the batch, a learning rate too high), or skip such steps, with "
        'train_step(nonfinite="skip"), or in a program by value_and_grad(nonfinite="tell")'
    )
