"""Ranks of one machine that read each other's memory: one copy instead of two, no sockets, no threads.

Note [reading in order]. A rank shows on its board, which all ranks have mapped, how many collectives it has begun,
where the tensors of each lie, and how many it has read. Its oldest one is read as soon as all ranks have begun it, in
whatever call this rank makes next, and never a later one first. So two numbers a rank say everything: a collective can
be read when all have begun it, and is over, its tensors free to be touched, when all have read it. A rank that waits
for it waits for nothing that another does behind the same line of the program.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import GroupError
from .boards import AT_ONCE, Board, Neighbour, Run, meet
from .checks import ranks_text

Take = Callable[["CrossMemory", list[Run]], None]

_CHUNK = 2**15  # elements added at a time: what was just read is still in the cache
_LOOKS = 20  # at the boards without sleeping in between
_SLEEP, _LONGEST_SLEEP = 5e-5, 1e-3  # seconds between later ones: a tenth of what it took by then, within these
_LOOK_AROUND = 0.01  # seconds between looks at the clock and the processes
_NO_RANK = "this rank has left the group, or this process is forked from it"


class Cut(RuntimeError):
    """Another rank has left, has ended, or does not come."""


class Transfer:
    """A collective under way.

    Attributes:
        shown: what each rank may read here.
        take: called with its owner and what each rank shows to this one, once all have begun; reads it.
        kept: the tensors, until all are known to have read them. Others may free them then, before `wait`.
        alone: it is shown only when all before it have been read here.
    """

    number, alone = -1, False  # how many were begun before it

    def __init__(
        self, owner: CrossMemory, kind: str, shown: Sequence[Run], take: Take, kept: tuple[Tensor, ...]
    ) -> None:
        self._owner = weakref.proxy(owner)  # which keeps this: a cycle would keep tensors until gc
        self.kind, self.dtype, self.shown = kind, kept[0].dtype, shown
        self.kept: tuple[Tensor, ...] | None = kept
        self.take: Take | None = take

    def wait(self) -> None:
        """Return when all ranks have read it.

        Raises:
            Cut: a rank has left or ended without doing so, or did not come in time.
            GroupError: ranks have called different collectives.
        """
        self._owner.finish(self)


class CrossMemory:
    """Collectives of ranks that `meet` found able to read each other's memory (N = `size`).

    Tensors are 1-D, contiguous, on the CPU, and not to be touched before the `wait` of what a collective returns.

    Attributes:
        bytes_read: what this process has read of others, in all its groups; for measurements.
    """

    bytes_read: ClassVar[int] = 0

    def __init__(self, rank: int, ranks: Sequence[Neighbour], timeout: timedelta) -> None:
        self.rank, self.size, self._ranks, self._seconds = rank, len(ranks), ranks, timeout.total_seconds()
        self._board, self._boards = ranks[rank].board, [neighbour.board for neighbour in ranks]
        self._others = [r for r in range(self.size) if r != rank]
        self._poll = select.poll()
        for r in self._others:
            self._poll.register(ranks[r].process)
        self._pid, self._count = os.getpid(), 0
        self._lock, self._moving = threading.RLock(), False
        self._unshown: deque[Transfer] = deque()
        self._unread: deque[Transfer] = deque()
        self._unfinished: deque[Transfer] = deque()
        self.leave = weakref.finalize(self, _leave, self._pid, self._board, [r.process for r in ranks])

    def all_gather(self, out: Tensor, piece: Tensor, kind: str = "all_gather") -> Transfer:
        """`out` (N * k,) becomes the ranks' `piece`s (k,)."""
        shown, wanted = [_run(piece)] * self.size, _runs(out, [piece.nbytes] * self.size)
        return self._begin(self._exchange(kind, shown, wanted, (out, piece)))

    def all_to_all(
        self, out: Tensor, out_runs: Sequence[int], source: Tensor, in_runs: Sequence[int], kind: str = "all_to_all"
    ) -> Transfer:
        """Rank j gets the j-th run of `source` (in_runs[j] bytes); what it shows comes to the j-th run of `out`."""
        return self._begin(self._exchange(kind, _runs(source, in_runs), _runs(out, out_runs), (out, source)))

    def reduce_scatter(self, out: Tensor, whole: Tensor) -> Transfer:
        """`out` (k,) becomes the sum over ranks, in their order, of this rank's slice of `whole` (N * k,)."""
        slices = whole.view(self.size, -1)
        own = slices[self.rank]

        def take(near: CrossMemory, theirs: list[Run]) -> None:
            near._add_up(own, out, theirs)

        return self._begin(Transfer(self, "reduce_scatter", [*map(_run, slices)], take, (out, whole)))

    def all_reduce(self, tensor: Tensor) -> Transfer:
        """`tensor` (k,) becomes the sum over ranks, in place: each adds up its part, in their order, and shows it."""
        parts = tensor.tensor_split(self.size)
        own, runs = parts[self.rank], [*map(_run, parts)]

        def take(near: CrossMemory, theirs: list[Run]) -> None:
            near._add_up(own, own, theirs)

        sums = Transfer(self, "all_reduce", runs, take, (tensor,))
        shared = self._exchange("all_reduce", [_run(own)] * self.size, runs, (tensor,))
        shared.alone = True
        return self._begin(sums, shared)

    def broadcast(self, tensor: Tensor, source: int) -> Transfer:
        """`tensor` (k,) becomes rank `source`'s, in place."""
        run, nothing = _run(tensor), [(0, 0)] * self.size
        wanted = [run if r == source else (0, 0) for r in range(self.size)]
        shown = [run] * self.size if self.rank == source else nothing
        return self._begin(self._exchange("broadcast", shown, wanted, (tensor,)))

    def finish(self, transfer: Transfer) -> None:
        """Return when all ranks have read it; read meanwhile what can be read."""
        gone, looks, start, next_look = "", 0, 0.0, 0.0
        while True:
            try:
                self._move()
            except Cut:  # over a later one, maybe
                if self._num_read() <= transfer.number:
                    raise
                return
            if transfer.kept is None:
                return
            if gone:  # and it was so before that look at the boards
                self._board.why = gone
                raise Cut(gone)
            looks += 1
            if looks < _LOOKS:
                os.sched_yield()
                continue
            now = time.monotonic()
            start = start or now
            time.sleep(min(max((now - start) / 10, _SLEEP), _LONGEST_SLEEP))
            gone = self._who_left()
            if not gone and now > next_look:
                next_look = now + _LOOK_AROUND
                gone = self._who_ended() or (self._who_is_late(transfer) if now - start > self._seconds else "")

    def _exchange(self, kind: str, shown: Sequence[Run], wanted: Sequence[Run], kept: tuple[Tensor, ...]) -> Transfer:
        """A collective that only moves data; what this rank shows to itself is moved at once."""
        (here, nbytes), (there, _) = shown[self.rank], wanted[self.rank]
        if here != there:
            ctypes.memmove(there, here, nbytes)

        def take(near: CrossMemory, theirs: list[Run]) -> None:
            for r in near._others:
                near._read(r, theirs[r], wanted[r])

        return Transfer(self, kind, shown, take, kept)

    def _begin(self, *transfers: Transfer) -> Transfer:
        self._move(transfers)
        return transfers[-1]

    def _move(self, new: Sequence[Transfer] = ()) -> None:
        """Show what can be shown, read what can be read, let go of what all have read; see Note [reading in order]."""
        with self._lock:
            if self._moving or not self.leave.alive or os.getpid() != self._pid:
                raise Cut("a collective within another, from a signal's handler" if self._moving else _NO_RANK)
            try:
                self._moving = True
                for transfer in new:
                    transfer.number, self._count = self._count, self._count + 1
                    for queue in (self._unshown, self._unread, self._unfinished):
                        queue.append(transfer)
                self._show()
                while self._unread and all(board.begun > self._unread[0].number for board in self._boards):
                    self._read_oldest()
                    self._show()
                read = self._num_read()
                while self._unfinished and self._unfinished[0].number < read:
                    self._unfinished.popleft().kept = None
            except BaseException:
                self.leave()  # half of something may have been begun, or added: never again
                raise
            finally:
                self._moving = False

    def _read_oldest(self) -> None:
        transfer = self._unread[0]
        assert transfer.take  # it is called once
        transfer.take(self, [self._shown_by(r, transfer) for r in range(self.size)])
        if gone := self._who_left() or self._who_ended():
            raise Cut(gone)  # what lay there may have been something else by now, and its process another one
        transfer.take = None
        self._unread.popleft()
        self._board.read = transfer.number + 1

    def _show(self) -> None:
        while self._unshown:
            transfer = self._unshown[0]
            if (transfer.alone and transfer is not self._unread[0]) or transfer.number - AT_ONCE >= self._num_read():
                return
            self._board.show(transfer.number, transfer.kind, transfer.dtype, transfer.shown)
            self._unshown.popleft()

    def _num_read(self) -> int:
        """How many all ranks have read."""
        return min(board.read for board in self._boards)

    def _shown_by(self, r: int, transfer: Transfer) -> Run:
        """What rank `r` shows to this one."""
        kind, dtype, run = self._boards[r].shown(transfer.number, self.rank)
        if kind != transfer.kind:
            raise self._different(transfer.kind, r, kind)
        if dtype != transfer.dtype:
            raise self._different(f"{kind} of {transfer.dtype}", r, f"one of {dtype}")
        return run

    def _read(self, r: int, shown: Run, wanted: Run) -> None:
        """Copy what rank `r` shows to where it is wanted."""
        if shown[1] != wanted[1]:
            raise self._other_size(wanted[1], r, shown[1])
        CrossMemory.bytes_read += wanted[1]
        try:
            self._ranks[r].copy(shown, wanted)
        except OSError as error:
            raise Cut(f"rank {r}'s memory can't be read: {error}") from None

    def _add_up(self, own: Tensor, out: Tensor, theirs: list[Run]) -> None:
        """`out` becomes the sum over ranks, in their order, of what they show; `own`, this rank's, may be `out`."""
        for r, (_, nbytes) in enumerate(theirs):
            if nbytes != own.nbytes:
                raise self._other_size(own.nbytes, r, nbytes)
        sums, read = own.new_empty(2, min(_CHUNK, own.numel()))

        def term(r: int, at: int, into: Tensor) -> Tensor:
            if r == self.rank:
                return own[at : at + len(into)]
            self._read(r, (theirs[r][0] + at * own.element_size(), into.nbytes), _run(into))
            return into

        for at in range(0, own.numel(), _CHUNK):
            result = out[at : at + _CHUNK]
            total = term(0, at, sums[: len(result)])
            for r in range(1, self.size):
                into = result if r == self.size - 1 else sums[: len(result)]
                total = torch.add(total, term(r, at, read[: len(result)]), out=into)

    def _who_left(self) -> str:
        for r in self._others:
            if self._boards[r].left:
                return self._boards[r].why or f"rank {r} has left the group"
        return ""

    def _who_is_late(self, transfer: Transfer) -> str:
        n = transfer.number
        if late := [r for r in self._others if self._boards[r].begun <= n]:
            return f"timed out after {self._seconds:g} s: {ranks_text(late)} did not come"
        late = [r for r in self._others if self._boards[r].read <= n]
        return f"timed out after {self._seconds:g} s: {ranks_text(late)} came, and did not finish" if late else ""

    def _who_ended(self) -> str:
        ended = {process for process, _ in self._poll.poll(0)}
        return next((f"rank {r}'s process has ended" for r in self._others if self._ranks[r].process in ended), "")

    def _other_size(self, nbytes: int, r: int, other: int) -> GroupError:
        return self._different(f"{self._unread[0].kind} of {nbytes:,} bytes", r, f"one of {other:,} bytes")

    def _different(self, what: str, r: int, other: str) -> GroupError:
        return GroupError(
            f"the ranks called different collectives: rank {self.rank} {what}, rank {r} {other}. Remedy: make every "
            "rank's loss use the same units in the same order, and its loop make the same calls; "
            "fz.CheckedGroup names the calls"
        )


def connect(
    rank: int, size: int, exchange: Callable[[bytes], list[bytes]], timeout: timedelta, *, willing: bool
) -> CrossMemory | None:
    """Every rank calls this. None on all of them unless each is willing and able, see `meet`."""
    met = meet(rank, size, exchange, willing=willing)
    return CrossMemory(rank, met, timeout) if met else None


def _leave(pid: int, board: Board, processes: Sequence[int]) -> None:
    """Say that nobody may read here any more. A forked child that forgets its copy says nothing."""
    if os.getpid() == pid:
        board.leave()
    for process in processes:
        os.close(process)


def _run(tensor: Tensor) -> Run:
    return tensor.data_ptr(), tensor.nbytes


def _runs(tensor: Tensor, sizes: Sequence[int]) -> list[Run]:
    """Where runs of these sizes, in bytes, lie in it."""
    starts = itertools.accumulate(sizes[:-1], initial=tensor.data_ptr())
    return [*zip(starts, sizes, strict=True)]
