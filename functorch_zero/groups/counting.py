"""Counting collectives and their bytes: around a real group, or in one process that only imagines
the other ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..tree import has_values
from .checks import (
    check_all_to_all,
    check_flat,
    check_pieces,
    check_source,
)
from .forwarding import Forwarding, subgroup
from .protocol import Done, Group, ReduceOp, Work, check_reducible
from .signature import brought


class Call(NamedTuple):
    """One collective that one rank called."""

    kind: str  # the method's name
    dtype: torch.dtype  # uint8 for exchange and barrier
    # Of the longest tensor: all_gather's out, reduce_scatter's whole, all_to_all's source
    num_elements: int
    sent_bytes: float  # what one rank sends at least, on a ring


class RecordingGroup(Forwarding):
    """Forwards to `inner` and records every collective in `calls`; `counted` makes it.

    Bytes recorded as sent by this rank, for N ranks and B bytes in the longest tensor:

    - all_gather and reduce_scatter: B * (N-1) / N; all_reduce: twice that.
    - all_to_all: the runs for other ranks; broadcast: B.
    - exchange: this rank's payload to each other rank; barrier: nothing.
    - one rank: nothing at all.
    """

    def __init__(self, inner: Group) -> None:
        super().__init__(inner)
        self.calls: list[Call] = []  # in the order of the calls; no tensor is kept

    def num_calls(self, kind: str | None = None) -> int:
        """How many collectives were called, of one kind or of all."""
        return len(self._of_kind(kind))

    def sent_bytes(self, kind: str | None = None) -> float:
        """The bytes that this rank sent, in collectives of one kind or of all."""
        return sum(call.sent_bytes for call in self._of_kind(kind))

    def reset(self) -> None:
        """Forget the calls recorded so far."""
        self.calls.clear()

    def subgroup(self, ranks: Sequence[int]) -> RecordingGroup:
        """The inner group's, whose calls are recorded here too."""
        made = RecordingGroup(subgroup(self.inner, ranks))
        # One list: the calls of a mesh's axes are found in one place
        made.calls = self.calls
        return made

    def _start(self, kind: str, *arguments: Any) -> Work:
        # Called first: a call that raises is not recorded
        work = super()._start(kind, *arguments)
        tensor = arguments[0] if kind == "all_gather" else brought(arguments)
        others = self.size - 1
        # That each rank sends when all parts of the tensor but one pass through it
        sent = tensor.nbytes * others / self.size
        if kind == "all_reduce":
            sent *= 2  # a reduce-scatter, then an all-gather
        elif kind == "broadcast":
            sent = tensor.nbytes if others else 0
        elif kind == "all_to_all":
            runs = arguments[-1]  # in elements
            sent = (sum(runs) - runs[self.rank]) * tensor.element_size()
        self.calls.append(Call(kind, tensor.dtype, tensor.numel(), sent))
        return work

    def _meet(self, kind: str, *payload: bytes) -> Any:
        result = super()._meet(kind, *payload)
        # Only the payload counts, not its size or padding; a barrier has none
        length = sum(map(len, payload))
        self.calls.append(Call(kind, torch.uint8, length, length * (self.size - 1)))
        return result

    def _of_kind(self, kind: str | None) -> list[Call]:
        return [call for call in self.calls if kind in (None, call.kind)]


class CountingGroup(RecordingGroup):
    """Rank `rank` of `size`, alone: each collective gives the result of ranks that all have the
    same data.

    An all-to-all's `out` takes from each rank this rank's run for itself, repeated or cut to the
    expected size. Meta tensors work.

    >>> group = CountingGroup(4)
    >>> out = torch.empty(8)
    >>> group.all_gather(out, torch.tensor([1.0, 2.0])).wait()
    >>> out
    tensor([1., 2., 1., 2., 1., 2., 1., 2.])
    >>> group.num_calls(), group.sent_bytes("all_gather")  # 32 bytes * 3/4
    (1, 24.0)
    """

    def __init__(self, size: int, rank: int = 0) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank must be from 0 to size - 1, got rank {rank} and size {size}")
        super().__init__(MirrorGroup(rank, size))


def counted(group: Group) -> RecordingGroup:
    """`group`, with every collective that this rank calls recorded in `.calls`."""
    return RecordingGroup(group)


class MirrorGroup:
    """A group whose other ranks all hold the same as this rank. Outputs are there at once; those
    without values are left alone."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def subgroup(self, ranks: Sequence[int]) -> MirrorGroup:
        return MirrorGroup(list(ranks).index(self.rank), len(ranks))

    @torch.no_grad()
    def all_gather(self, out: Tensor, piece: Tensor) -> Work:
        check_pieces(self.size, "out", out, "piece", piece)
        if not has_values(out):
            return Done()
        # (N * k,) as N rows (k,), all equal
        rows = out.view(self.size, piece.numel())
        rows.copy_(piece.clone())  # a copy, since the piece may lie in out
        return Done()

    @torch.no_grad()
    def reduce_scatter(self, out: Tensor, whole: Tensor) -> Work:
        check_pieces(self.size, "whole", whole, "out", out)
        check_reducible("sum", whole)
        if not has_values(out):
            return Done()
        # All ranks bring the same, so the sum is `size` times this rank's own slice
        start = self.rank * out.numel()
        out.copy_(whole[start : start + out.numel()] * self.size)
        return Done()

    @torch.no_grad()
    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        check_flat("tensor", tensor)
        check_reducible(op, tensor)
        # The largest of equals is there already
        if op == "sum" and has_values(tensor):
            tensor.mul_(self.size)
        return Done()

    @torch.no_grad()
    def all_to_all(
        self, out: Tensor, out_sizes: Sequence[int], source: Tensor, in_sizes: Sequence[int]
    ) -> Work:
        check_all_to_all(self.size, out, out_sizes, source, in_sizes)
        if not has_values(out):
            return Done()
        # The run that this rank sends to itself stands for the runs from all ranks
        own = torch.split(source, list(in_sizes))[self.rank].clone()
        for run in torch.split(out, list(out_sizes)):
            _fill(run, own)
        return Done()

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        check_flat("tensor", tensor)
        check_source(self.size, source)
        return Done()  # the source holds the same, so nothing changes

    def exchange(self, payload: bytes) -> list[bytes]:
        return [bytes(payload)] * self.size

    def barrier(self) -> None:
        return None

    def fail(self, error: BaseException) -> None:
        return None


def _fill(run: Tensor, own: Tensor) -> None:
    """Fill a run with the elements of `own`, repeated or cut to its size."""
    if not own.numel():
        run.zero_()  # from an empty run: any values would do
        return
    num_repeats = math.ceil(run.numel() / own.numel())
    run.copy_(own.repeat(num_repeats)[: run.numel()])
