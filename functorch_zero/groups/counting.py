"""Counting collectives and their bytes: around a real group, or in one process that only imagines
the other ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..tree import has_values
from .checks import check_call
from .forwarding import Forwarding, subgroup
from .protocol import Collectives, Done, Group, Work
from .signature import brought


class Call(NamedTuple):
    """One collective that one rank called."""

    kind: str  # the method's name
    dtype: torch.dtype  # uint8 for exchange and barrier
    # Of the longest tensor: all_gather's out, reduce_scatter's whole, all_to_all's source
    num_elements: int
    sent_bytes: float  # what one rank sends at least, on a ring

    @classmethod
    def of(cls, group: Group, kind: str, *arguments: Any) -> Call:
        """That of a group's method, called with these on this rank."""
        tensor = arguments[0] if kind == "all_gather" else brought(arguments)
        others = group.size - 1
        # That each rank sends when all parts of the tensor but one pass through it
        sent = tensor.nbytes * others / group.size
        if kind == "all_reduce":
            sent *= 2  # a reduce-scatter, then an all-gather
        elif kind == "broadcast":
            sent = tensor.nbytes if others else 0
        elif kind == "all_to_all":
            runs = arguments[-1]  # in elements
            sent = (sum(runs) - runs[group.rank]) * tensor.element_size()
        return cls(kind, tensor.dtype, tensor.numel(), sent)


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
        self.calls.append(Call.of(self, kind, *arguments))
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
        super().__init__(MirrorGroup(rank, size))


def counted(group: Group) -> RecordingGroup:
    """`group`, with every collective that this rank calls recorded in `.calls`."""
    return RecordingGroup(group)


class MirrorGroup(Collectives):
    """A group whose other ranks all hold the same as this rank. Outputs are there at once; those
    without values are left alone."""

    def __init__(self, rank: int, size: int) -> None:
        if not 0 <= rank < size:
            raise ValueError(
                f"rank must be from 0 to the number of ranks - 1, got rank {rank} of {size} ranks"
            )
        self.rank = rank
        self.size = size

    def subgroup(self, ranks: Sequence[int]) -> MirrorGroup:
        return MirrorGroup(list(ranks).index(self.rank), len(ranks))

    def fail(self, error: BaseException) -> None:
        return None

    @torch.no_grad()
    def _start(self, kind: str, *arguments: Any) -> Work:
        check_call(self.size, kind, *arguments)
        out, source, last = arguments[0], brought(arguments), arguments[-1]
        if not has_values(out):
            return Done()
        match kind:
            case "all_gather":
                # (N * k,) as N rows (k,), all equal. The piece may be this rank's row: others first
                rows = out.view(self.size, source.numel())
                for some in (rows[: self.rank], rows[self.rank + 1 :], rows[self.rank]):
                    some.copy_(source)
            case "reduce_scatter":
                # All ranks bring the same, so the sum is `size` times this rank's own slice
                start = self.rank * out.numel()
                out.copy_(source[start : start + out.numel()] * self.size)
            case "all_reduce" if last == "sum":  # the largest of equals is there already
                out.mul_(self.size)
            case "all_to_all":
                # The run that this rank sends to itself stands for the runs from all ranks
                own = torch.split(source, list(last))[self.rank].clone()
                for run in torch.split(out, list(arguments[1])):
                    _fill(run, own)
        return Done()  # a broadcast's source holds the same, so nothing changes

    def _meet(self, kind: str, *payload: bytes) -> Any:
        return [b"".join(payload)] * self.size


def _fill(run: Tensor, own: Tensor) -> None:
    """Fill a run with the elements of `own`, repeated or cut to its size."""
    if not own.numel():
        run.zero_()  # from an empty run: any values would do
        return
    num_repeats = math.ceil(run.numel() / own.numel())
    run.copy_(own.repeat(num_repeats)[: run.numel()])
