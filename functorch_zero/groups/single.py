"""`SingleRank`: the group of one rank, which has nobody to talk to."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .protocol import Done, ReduceOp, Work
from .work import copy_alone


class SingleRank:
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

    def all_gather(self, out: Tensor, piece: Tensor) -> Work:
        return copy_alone(out, piece)

    def reduce_scatter(self, out: Tensor, whole: Tensor) -> Work:
        return copy_alone(out, whole)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        return Done()

    def all_to_all(
        self, out: Tensor, out_sizes: Sequence[int], source: Tensor, in_sizes: Sequence[int]
    ) -> Work:
        return copy_alone(out, source)

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        return Done()

    def exchange(self, payload: bytes) -> list[bytes]:
        return [payload]

    def barrier(self) -> None:
        return None

    def fail(self, error: BaseException) -> None:
        return None
