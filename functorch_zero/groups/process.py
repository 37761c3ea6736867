"""Ranks as processes, over torch.distributed: NCCL on GPUs, gloo on CPUs.

A collective that only moves data moves bytes, so every dtype works on every backend. Sums that gloo
would make slowly, or not at all, are an exchange followed by a local sum in rank order;
`ProcessGroup` says which.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from . import torch_distributed
from .checks import check_call, check_subgroup, fold
from .functorch_guard import refuse_collectives_in_transforms, refuse_in_transform
from .membership import Membership
from .protocol import ReduceOp, Work
from .rendezvous import join_launched_world
from .signature import brought
from .store import Store
from .torch_distributed import ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER
from .work import Then, as_bytes, copy_alone, nan_apart, through_host

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_KNOWN_TO_BACKENDS = (*_FLOATS, torch.int8, torch.uint8, torch.int32, torch.int64)

# Up to so many bytes gathered in all, gloo's all-gather and a local sum take no longer than its
# all-reduce
_SMALL = 2**16


class ProcessGroup(Membership):
    """The ranks of a torch process group, of a 1-D `DeviceMesh`, or (None) of the default process
    group.

    All these ranks must make it, in the same order among the groups that they make; it costs one
    barrier and one small all-gather. It communicates over a torch group of its own, so that `fail`
    can destroy it without touching the caller's. Over NCCL there are two, of which gloo's carries
    the words and failures of hosts, also where the caller's has no backend for the CPU, as of
    `init_process_group("nccl")`. A collective that takes longer than `timeout` (seconds, or a
    timedelta) fails.

    Attributes:
        rank: this rank's number, from 0 to size - 1.
        size: the number of ranks.
        ranks: their numbers in the default process group.

    The way of each collective of a `Group` (N ranks, S bytes in the whole tensor, sent by each
    rank):

    - all_gather, all_to_all, broadcast: the backend's own, on bytes; an all-gather of two ranks
      over gloo is a swap, which does not copy this rank's own half.
    - reduce_scatter: NCCL's own, beside other collectives after `reduce_apart`. gloo: an all-to-all
      (S * (N-1) / N), and a sum in rank order in `wait`. gloo's own moves as much as an all-reduce
      and takes twice as long.
    - all_reduce: the backend's own, but for small tensors on CPUs and dtypes no backend adds, which
      are gathered (two ranks over gloo: swapped) and summed in rank order. A maximum keeps NaN, by
      reducing a mask of NaN along with the values.
    - gloo with tensors on another device than the CPU: through copies on the CPU, made at the call
      and in `wait`, since gloo does not have all collectives for them.
    - one rank: copies, no communication.

    A call, or `Work.wait`, raises `PeerError` with the other rank's error when one has called
    `fail`. It raises `LostPeerError` when a rank was lost without a word or the time is over; it
    names the ranks that don't answer, and their hosts.
    Afterwards the group can't be used until all ranks have called `rejoin`, as a sharded step does
    by itself when it is tried again. Over NCCL `wait` puts streams in order and raises nothing.
    There a thread of the group hears of failures while this rank's host waits for its device; see
    `device_watch`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        timeout: float | timedelta = 300.0,
        _store: Store | None = None,
    ) -> None:
        if not isinstance(timeout, timedelta):
            timeout = timedelta(seconds=timeout)
        refuse_collectives_in_transforms()
        if group is None:
            join_launched_world()
        self._parent, self._timeout = torch_distributed.parent_group(group), timeout
        store = torch_distributed.own_store() if _store is None else _store
        super().__init__(self._parent, timeout, store)
        if not self._alone:
            self._connect(self._connections.connect)
            self._introduce_itself()

    def settle(self) -> None:
        """Return when the results of all collectives so far are there on this rank, and right; else
        raise. Every rank calls this. Over gloo alone it does nothing, as `wait` has raised.

        Over NCCL the host waits for its device. Nothing else would say that a collective was cut
        off, and what it left behind is garbage.
        """
        if self._alone or not self._connections.of_device:
            return
        self.barrier()  # all ranks have started theirs; else it raises, long before the watch does
        self._await_device()
        # torch may cut off what a dead rank doesn't end, before the watch hears of it. So all ranks
        # say that they are still there.
        self.barrier()

    def reduce_apart(self) -> None:
        """Let reduce-scatters run beside other collectives. Every rank calls this; a second call
        does nothing.

        A torch group over NCCL runs its collectives one after the other, and a gather would wait
        for the reduction started before it. So reduce-scatters get a torch group of their own.
        Over gloo alone they stay where they are.
        """
        if not self._alone:
            self._connect(self._connections.reduce_apart)

    def subgroup(self, ranks: Sequence[int]) -> ProcessGroup:
        """The group of these of its ranks, in increasing order, this one among them. Each of them
        calls it."""
        check_subgroup(self.rank, self.size, ranks)
        # `part_of` takes numbers of the world
        numbers = [self.ranks[rank] for rank in ranks]
        part = torch_distributed.part_of(self._parent, numbers, self._timeout)
        return type(self)(part, timeout=self._timeout, _store=self._store)

    def sibling(self) -> ProcessGroup:
        """Another group of the same ranks, with connections and a time limit of its own. Every rank
        calls this."""
        return type(self)(self._parent, timeout=self._timeout, _store=self._store)

    def _start(self, kind: str, *arguments: Any) -> Work:
        check_call(self.size, kind, *arguments)
        # Not for autograd: writing in place into a leaf that requires grad would raise
        given = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
        out, source = given[0], brought(given)
        # Without a message: but for an all-to-all, the number is the same on all ranks
        is_empty = kind != "all_to_all" and not source.numel()
        if self._alone or is_empty:
            return copy_alone(out, source)
        if self._must_stage(out):
            return through_host(partial(self._start, kind), given)
        # `_all_gather` and the like
        work: Work = getattr(self, f"_{kind}")(*given)
        return work

    def _meet(self, kind: str, *payload: bytes) -> Any:
        """Two all-gathers of an exchange: the sizes, then padded bytes."""
        if not payload:
            return self._gather_host(kind, torch.zeros(1, dtype=torch.uint8, device="cpu"))
        own_size = torch.tensor([len(payload[0])], device="cpu")  # (1,) int64
        sizes = self._gather_host(kind, own_size).tolist()
        longest = max(sizes)
        if not longest:  # all payloads are empty, and every rank sees it
            return [b""] * self.size
        # A bytearray, since torch warns of a buffer that can't be written to
        padded = bytearray(payload[0].ljust(longest, b"\0"))
        # (N * longest,) uint8
        gathered = self._gather_host(kind, torch.frombuffer(padded, dtype=torch.uint8))
        rows = zip(gathered.view(self.size, longest), sizes, strict=True)
        # Copies of the rows' memory, without numpy
        return [ctypes.string_at(row.data_ptr(), size) for row, size in rows]

    def _all_gather(self, out: Tensor, piece: Tensor, kind: str = "all_gather") -> Work:
        """`kind` names the collective in errors: small sums and exchanges go this way, too."""
        if not self._swaps(out):
            return self._launch(kind, ALL_GATHER, as_bytes(out), as_bytes(piece))
        refuse_in_transform(kind)
        halves = out.chunk(2)  # two views (k,) of `out`
        if halves[self.rank].data_ptr() != piece.data_ptr():  # else the piece lies in its place
            halves[self.rank].copy_(piece)
        return self._swap(kind, halves[1 - self.rank], piece)

    def _reduce_scatter(self, out: Tensor, whole: Tensor) -> Work:
        if self._backend(whole) != "gloo" and whole.dtype in _KNOWN_TO_BACKENDS:
            return self._launch("reduce_scatter", REDUCE_SCATTER, out, whole)
        if self._swaps(whole):
            halves = whole.chunk(2)  # two views (k,) of `whole`
            work = self._swap("reduce_scatter", out, halves[1 - self.rank])
            # In `wait`, on the waiting thread
            return Then(work, lambda: out.add_(halves[self.rank]))
        slices = torch.empty_like(whole).view(self.size, -1)  # (N, k), each rank's for this one
        runs = [out.nbytes] * self.size  # to, and from, each rank
        work = self._trade("reduce_scatter", slices.view(-1), runs, whole, runs)
        return Then(work, lambda: out.copy_(fold(slices.unbind(), "sum")))

    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> Work:
        small = tensor.is_cpu and self.size * tensor.nbytes <= _SMALL
        if small or tensor.dtype not in _KNOWN_TO_BACKENDS:
            rows = tensor.new_empty(self.size, tensor.numel())  # (N, k), in rank order
            work = self._all_gather(rows.view(-1), tensor, "all_reduce")
            return Then(work, lambda: tensor.copy_(fold(rows.unbind(), op)))
        if op == "sum":
            return self._launch("all_reduce", "allreduce", tensor)
        # A maximum: NaN travels as a mask, behind the values
        values, finish = nan_apart(tensor)
        return Then(self._launch("all_reduce", "allreduce", values, dist.ReduceOp.MAX), finish)

    def _all_to_all(
        self, out: Tensor, out_sizes: Sequence[int], source: Tensor, in_sizes: Sequence[int]
    ) -> Work:
        width = source.element_size()
        out_runs, in_runs = ([num * width for num in sizes] for sizes in (out_sizes, in_sizes))
        return self._trade("all_to_all", out, out_runs, source, in_runs)

    def _broadcast(self, tensor: Tensor, source: int) -> Work:
        # `source` is a number in the group, not in the world
        return self._launch("broadcast", "broadcast", as_bytes(tensor), source)

    def _trade(
        self, kind: str, out: Tensor, runs: Sequence[int], source: Tensor, in_runs: Sequence[int]
    ) -> Work:
        """An all-to-all, with the sizes of runs in bytes."""
        # torch counts runs in elements of the tensors that it is given, and those are bytes
        return self._launch(kind, ALL_TO_ALL, as_bytes(out), as_bytes(source), runs, in_runs)

    def _swaps(self, tensor: Tensor) -> bool:
        """Whether two ranks swap tensors like this one. gloo's all-gather and all-to-all copy a
        rank's own part as well, and a sum of slices needs room for those of all ranks."""
        return self.size == 2 and self._backend(tensor) == "gloo"

    def _swap(self, kind: str, out: Tensor, source: Tensor) -> Work:
        """Of two ranks: the other's `source` comes into `out`."""
        # One's own run is empty. Sent and received are equally long.
        runs = [0, out.nbytes] if self.rank == 0 else [out.nbytes, 0]
        return self._trade(kind, out, runs, source, runs)

    def _gather_host(self, kind: str, part: Tensor) -> Tensor:
        """All ranks' `part`s (k,), in rank order, (N * k,), on the CPU like `part`. `kind` names
        the collective in errors."""
        if self._alone:
            return part
        out = torch.empty(self.size * part.numel(), dtype=part.dtype, device="cpu")
        self._all_gather(out, part, kind).wait()
        return out

    def _backend(self, tensor: Tensor) -> str:
        """The backend for the tensor's device: "gloo" or "nccl", say."""
        backends = self._connections.backends
        name = backends.get(self._device_type(tensor))
        if name is None:
            raise ValueError(
                f"this group can't move tensors on {tensor.device}: its backends are "
                f"{backends}. Remedy: initialise torch.distributed with a backend for that "
                "device"
            )
        return name

    def _must_stage(self, tensor: Tensor) -> bool:
        """Whether the tensor has to go through the CPU."""
        return tensor.device.type != "cpu" and self._backend(tensor) == "gloo"
