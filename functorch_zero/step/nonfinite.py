"""Numbers that are not finite: what a step does about them, and the loss scale that float16 needs.

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

from ..errors import NonFiniteError

NonFinite = Literal["raise", "skip", "pass"]


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
        minimum: the scale does not go below.
    """

    initial: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    minimum: float = 1.0

    def __post_init__(self) -> None:
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


class NonFiniteState(NamedTuple):
    """What a state remembers of numbers that were not finite; the same on every rank."""

    skipped: Tensor  # 0-d int64, on the CPU: steps skipped so far
    # 0-d float64, on the CPU: what the next loss is multiplied by; None: not scaled
    scale: Tensor | None
    good_steps: Tensor | None  # 0-d int64, on the CPU: finite steps since the scale changed last


@dataclass(frozen=True)
class NonFinitePolicy:
    """What a step does about numbers that are not finite."""

    nonfinite: NonFinite = "pass"
    scaling: LossScale | None = None

    def __post_init__(self) -> None:
        if self.nonfinite not in get_args(NonFinite):
            raise ValueError(
                f"nonfinite must be one of {get_args(NonFinite)}, got {self.nonfinite!r}"
            )
        if self.scaling is not None and self.nonfinite != "skip":
            raise ValueError(
                f"loss_scale and nonfinite={self.nonfinite!r} exclude each other: the scale is "
                "found by letting gradients overflow, and steps that do must be skipped. Remedy: "
                "leave nonfinite out, or don't scale"
            )

    @property
    def looks(self) -> bool:
        """Whether anybody looks at the numbers."""
        return self.nonfinite != "pass"

    def init(self) -> NonFiniteState | None:
        """For the first state."""
        if self.nonfinite != "skip":
            return None
        scaling = self.scaling
        return NonFiniteState(
            torch.zeros((), dtype=torch.int64),
            None if scaling is None else torch.tensor(scaling.initial, dtype=torch.float64),
            None if scaling is None else torch.zeros((), dtype=torch.int64),
        )

    def scale(self, finite: NonFiniteState | None) -> float | None:
        """What the loss is to be multiplied by."""
        return None if finite is None or finite.scale is None else float(finite.scale)

    def next(self, finite: NonFiniteState | None, *, fine: bool) -> NonFiniteState | None:
        """For the next state, after a step that was finite or wasn't."""
        if finite is None:
            return None
        skipped = finite.skipped + (0 if fine else 1)
        if self.scaling is None or finite.scale is None or finite.good_steps is None:
            return finite._replace(skipped=skipped)
        scale, good, none = (
            finite.scale.clone(),
            finite.good_steps + 1,
            torch.zeros_like(finite.good_steps),
        )
        if not fine:
            scale, good = (scale * self.scaling.backoff).clamp(min=self.scaling.minimum), none
        elif int(good) >= self.scaling.interval:
            scale, good = scale * self.scaling.growth, none
        return NonFiniteState(skipped, scale, good)

    def metrics(self, finite: NonFiniteState | None) -> dict[str, Tensor]:
        """What a step says of itself: the steps skipped so far, and the scale that the next loss
        gets."""
        if finite is None:
            return {}
        counted = {"skipped": finite.skipped.to(torch.get_default_dtype())}
        return counted if finite.scale is None else {**counted, "loss_scale": finite.scale.clone()}


def all_finite(tensors: Iterable[Tensor], limits: Iterable[float] | None = None) -> bool:
    """Whether no element is a NaN, an infinity, or as large as its tensor's limit.

    The host waits for it; nothing of the tensors' size is made.
    """
    ends = itertools.repeat(math.inf) if limits is None else limits
    pairs = [(x.detach(), end) for x, end in zip(tensors, ends, strict=False) if x.numel()]
    if not pairs:
        return True
    largest = torch.stack([torch.linalg.vector_norm(x, math.inf).double() for x, _ in pairs])
    return bool((largest < largest.new_tensor([end for _, end in pairs])).all())


def not_finite(named: dict[str, Tensor]) -> list[str]:
    """The names of the tensors that have a NaN or an infinity."""
    return [name for name, x in named.items() if not all_finite([x])]


def refusal(step: int, findings: list[Any]) -> NonFiniteError:
    """The error of a step, from what each rank has found: its loss, and the leaves whose gradients
    aren't finite."""
    losses = [
        f"{loss} on rank {rank}"
        for rank, (loss, _) in enumerate(findings)
        if not math.isfinite(float(loss))
    ]
    leaves = list(dict.fromkeys(path for _, found in findings for path in found))
    story = [f"the loss is {', '.join(losses)}"] if losses else []
    more = f" and {len(leaves) - 4} more leaves" if len(leaves) > 4 else ""
    story += [f"the gradients of {', '.join(leaves[:4])}{more} are"] if leaves else []
    return NonFiniteError(
        f"step {step} is not finite: {'; '.join(story)}. The state is as it was. Remedy: look for "
        "the cause there (the "
        'batch, a learning rate too high), or skip such steps with train_step(nonfinite="skip")'
    )
