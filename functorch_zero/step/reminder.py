"""The warnings that a step gives once: batches of unequal sizes count the same, because their loss
gives no weight; and new buffers that a loss doesn't return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..errors import LostBuffersWarning, UnequalBatchesWarning, explain, warn
from ..model.buffer_copies import Changed
from .rows import leading_sizes


class Reminder:
    """Warns of each once in the life of a step, on rank 0."""

    def __init__(self) -> None:
        self._done = self._told_buffers = False

    def lost_buffers(self, lost: Sequence[Changed], rank: int = 0) -> None:
        """Warn of buffers that `apply` has changed, and that a loss has not returned.

        `lost`: those of one call of the loss that it may have changed.
        """
        if self._told_buffers or rank != 0:
            return
        found = [changed.path for changed in lost if changed.is_sure()]
        if not found:
            return
        self._told_buffers = True
        text = explain(
            "apply has changed buffers, and the loss returns none: the state keeps the old ones, "
            "and evaluation will use these",
            path=found[0],
            got=f"{len(found)} new buffers from apply, and no Aux.buffers",
            remedy="output, buffers = apply(params, buffers, x); return loss, "
            "fz.Aux(buffers=buffers). To keep the old ones: Aux(buffers=...) of those that the "
            "loss was given, or apply.eval()",
        )
        warn(text, LostBuffersWarning)

    def compare_parts(
        self, parts: Sequence[Any], weight: Tensor | float | None, rank: int = 0
    ) -> None:
        """Warn if a batch's micro-batches have unequal sizes.

        `weight`: that the loss gave for one of them.
        """
        if self._done or rank != 0 or weight is not None or len(parts) == 1:
            return
        sizes = [leading_sizes(part) for part in parts]
        if any(others != sizes[0] for others in sizes):
            rows = [f"{_mean(of_part):g}" for of_part in sizes]
            self._warn("micro-batches", f"{', '.join(rows)} rows")

    def compare_ranks(
        self,
        rows: Sequence[int],
        sizes: tuple[int, int] | None,
        rank: int,
    ) -> None:
        """Warn if ranks' batches have unequal sizes.

        Args:
            rows: of this rank's part, as `leading_sizes` gives them.
            sizes: the smallest and the largest sum of them of all ranks; None: they are equal.
            rank: this one.
        """
        if self._done or rank != 0 or sizes is None:
            return
        least, most = (size / max(len(rows), 1) for size in sizes)
        got = f"{_mean(rows):g} rows on rank 0, from {least:g} to {most:g} on all ranks"
        self._warn("ranks' batches", got)

    def _warn(self, what: str, got: str) -> None:
        self._done = True
        text = explain(
            f"{what} of unequal sizes count the same in means, since the loss gives no weight",
            got=got,
            remedy="return fz.Aux(weight=...), the number of examples or tokens that the loss is "
            "the mean of; or weight=1, where each shall count the same",
        )
        warn(text, UnequalBatchesWarning)


def _mean(sizes: Sequence[int]) -> float:
    """The number of rows: most often all tensors have the same."""
    return sum(sizes) / max(len(sizes), 1)
