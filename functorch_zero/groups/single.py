"""`SingleRank`: the group of one rank, which has nobody to talk to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .protocol import Collectives, Work
from .signature import brought
from .work import copy_alone


class SingleRank(Collectives):
    """One rank, alone: every collective is a copy at most.

    `shard(step, level=0, group=SingleRank())` is the unsharded step on donated state, in one
    process and without torch.distributed. It holds params and optimizer state once, where the
    unsharded step makes new ones beside the old. Known chains run as fused kernels.

    >>> SingleRank().size
    1
    """

    rank = 0
    size = 1

    def subgroup(self, ranks: Sequence[int]) -> SingleRank:
        return self

    def fail(self, error: BaseException) -> None:
        return None

    def _start(self, kind: str, *arguments: Any) -> Work:
        return copy_alone(arguments[0], brought(arguments))

    def _meet(self, kind: str, *payload: bytes) -> list[bytes]:
        return [*payload]
