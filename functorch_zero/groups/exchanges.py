"""Collectives that a backend lacks, or makes slowly: exchanges, and a sum in rank order.

Note [two ranks]: gloo's all-gather and all-to-all copy this rank's own part as well, and a sum of
slices needs room for those of all ranks. Two ranks need neither: see `Pair`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .checks import fold
from .functorch_guard import refuse_in_transform
from .protocol import ReduceOp, Work
from .torch_distributed import ALL_GATHER, ALL_TO_ALL
from .work import Then, as_bytes

# (kind, torch's method, its arguments): start one of torch's collectives
Start = Callable[..., Work]


def all_to_all(
    start: Start,
    kind: str,
    out: Tensor,
    runs: Sequence[int],
    source: Tensor,
    in_runs: Sequence[int],
) -> Work:
    """A group's `all_to_all`, with the sizes of runs in bytes. `kind` names the collective in
    errors."""
    return start(kind, ALL_TO_ALL, as_bytes(out), as_bytes(source), runs, in_runs)


class Exchanges:
    """Of any number of ranks N, over any backend. All move bytes, so every dtype works."""

    def __init__(self, rank: int, size: int, start: Start):
        self._rank, self._size, self._start = rank, size, start

    def all_gather(self, kind: str, out: Tensor, piece: Tensor) -> Work:
        """A group's; small sums and exchanges go this way, too."""
        # `out` (N * k,), `piece` (k,)
        return self._start(kind, ALL_GATHER, as_bytes(out), as_bytes(piece))

    def reduce_scatter(self, out: Tensor, whole: Tensor) -> Work:
        """A group's, by an all-to-all."""
        slices = torch.empty_like(whole).view(self._size, -1)  # (N, k), each rank's for this one
        runs = [out.nbytes] * self._size  # to, and from, each rank
        work = all_to_all(self._start, "reduce_scatter", slices.view(-1), runs, whole, runs)
        return Then(work, lambda: _fold_into(out, slices, "sum"))

    def all_reduce(self, tensor: Tensor, op: ReduceOp) -> Work:
        """A group's, for few bytes: by an all-gather."""
        parts = tensor.new_empty(self._size, tensor.numel())  # (N, k), in rank order
        work = self.all_gather("all_reduce", parts.view(-1), tensor)
        return Then(work, lambda: _fold_into(tensor, parts, op))


class Pair(Exchanges):
    """Of two ranks over gloo, which swap; see Note [two ranks]."""

    def all_gather(self, kind: str, out: Tensor, piece: Tensor) -> Work:
        refuse_in_transform(kind)
        halves = out.chunk(2)  # two views (k,) of `out`
        if halves[self._rank].data_ptr() != piece.data_ptr():  # else the piece lies in its place
            halves[self._rank].copy_(piece)
        return self._swap(kind, halves[1 - self._rank], piece)

    def reduce_scatter(self, out: Tensor, whole: Tensor) -> Work:
        halves = whole.chunk(2)  # two views (k,) of `whole`
        work = self._swap("reduce_scatter", out, halves[1 - self._rank])
        return Then(work, lambda: out.add_(halves[self._rank]))  # in `wait`, on the waiting thread

    def _swap(self, kind: str, out: Tensor, source: Tensor) -> Work:
        """The other's `source` comes into `out`."""
        # Of ranks 0 and 1: one's own run is empty. Sent and received are equally long.
        runs = [0, out.nbytes] if self._rank == 0 else [out.nbytes, 0]
        return all_to_all(self._start, kind, out, runs, source, runs)


def _fold_into(out: Tensor, parts: Tensor, op: str) -> None:
    """`out` (k,) becomes the sum or the maximum of the rows of `parts` (N, k), in rank order."""
    out.copy_(fold(parts.unbind(), op))
