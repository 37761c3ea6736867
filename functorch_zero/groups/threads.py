"""Ranks as threads of one process: for property tests and for trying things out. A case takes
milliseconds and no port.

One rank at a time executes (thread_scheduler.py says how), so runs are repeatable. Outputs are
written by `Work.wait()`, never before: code that reads too early sees old values every time, not
only where the network is slow.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import GroupError, PeerError
from .checks import check_call, check_subgroup, failure_text, fold, ranks_text
from .last_collectives import Ring
from .protocol import Collectives, Done, Work
from .signature import Signature, brought
from .thread_scheduler import Circle, Combine, Meeting, World
from .thread_settings import settings_here
from .work import Then

T = TypeVar("T")

_SECONDS_TO_END = 2.0  # given to interrupted ranks before run_ranks gives up on joining them


def run_ranks(fn: Callable[[ThreadGroup], T], ranks: int, *, timeout: float = 60.0) -> list[T]:
    """Call `fn(group)` on each of `ranks` threads and return the results in rank order.

    Every rank starts from the caller's torch RNG state (CPU) and has its own stream from there; the
    caller's is left as it was. Grad mode, inference mode, default device and context variables are
    the caller's; backward runs in the rank's own thread. Python's `random`, numpy's and CUDA's
    generators are shared by all ranks.

    Raises:
        Exception: the first failing rank's, with a note naming the rank; the others get
            `PeerError`.
        GroupError: the ranks call different collectives, or none of them can go on.
        TimeoutError: after `timeout` seconds, with the place where each rank is.

    >>> def mean_of_ranks(group):
    ...     rank = torch.tensor([float(group.rank)])
    ...     group.all_reduce(rank).wait()
    ...     return (rank / group.size).item()
    >>> run_ranks(mean_of_ranks, 4)
    [1.5, 1.5, 1.5, 1.5]
    """
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    stream = torch.get_rng_state()  # uint8, the CPU generator's state
    world = World(ranks)
    results: dict[int, T] = {}
    failures: list[tuple[int, BaseException]] = []  # in the order in which they happened
    settings = settings_here()

    def call(rank: int) -> None:
        try:
            # Before anything else: one rank runs at a time, from its first line
            world.take_baton(rank)
            torch.set_rng_state(stream)  # the caller's: each rank starts there
            # Backward in the rank's own thread, which is the one that holds the baton
            with settings(), torch.autograd.set_multithreading_enabled(False):
                results[rank] = fn(ThreadGroup(world, rank))
        except BaseException as error:
            # `_Interrupted` and SystemExit too: the other ranks must hear of any end
            failures.append((rank, error))
            world.break_with(PeerError(failure_text(rank, error)))

    def run(rank: int) -> None:
        """A rank's thread, from its start to its end."""
        with contextlib.suppress(_Interrupted):  # should it come in the last lines, after fn
            try:
                call(rank)
            finally:
                world.end(rank)

    threads: list[threading.Thread] = []
    for rank in range(ranks):
        # One copy for each thread: a context can't be entered by two at a time
        in_context = contextvars.copy_context().run
        # A daemon, so that a rank that can't be interrupted doesn't keep the process alive
        thread = threading.Thread(target=in_context, args=(run, rank), daemon=True)
        thread.name = f"rank {rank}"
        threads.append(thread)
    try:
        for thread in threads:
            thread.start()
        world.begin()
        in_time = world.all_ended.wait(timeout)
        places = world.where_ranks_are()
    finally:
        # Also on the caller's KeyboardInterrupt: no rank may run on
        still_alive = _stop(world, threads)
        torch.set_rng_state(stream)
    # In order of cause: the time, a collective that somebody missed, a rank's own error
    if not in_time:
        raise TimeoutError(
            f"run_ranks took longer than {timeout:g} s: {places}{still_alive}. Remedy: where the "
            f"ranks need longer, run_ranks(fn, {ranks}, timeout={2 * timeout:g})"
        )
    world.check_all_called()
    if not failures:
        return [results[rank] for rank in range(ranks)]
    # A PeerError only tells of another rank's failure; `min` takes the first of equals
    rank, error = min(failures, key=lambda failure: isinstance(failure[1], PeerError))
    failures.clear()
    error.add_note(f"Raised on rank {rank} of {ranks}.")
    try:
        raise error
    finally:
        # An exception and a frame that hold each other would keep the ranks' tensors alive
        del error


def _stop(world: World, threads: list[threading.Thread]) -> str:
    """End every thread: at once when all ranks have ended, else by breaking their collectives and
    interrupting the one that runs.

    Return the words to add to an error about a thread that could not be ended, if any.
    """
    if world.all_ended.is_set():
        for thread in threads:
            thread.join()
            _await_kernel(thread)
        return ""
    # Those that wait raise; the one that runs is interrupted between two lines of Python
    world.stop()
    _interrupt(threads[world.holder])
    for thread in threads:
        if thread.ident is not None:  # None: it was never started
            thread.join(_SECONDS_TO_END)
    alive = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if not alive:
        return ""
    return f". The thread of {ranks_text(alive)} could not be interrupted and still runs"


def _await_kernel(thread: threading.Thread) -> None:
    """Wait until the kernel, too, has ended a joined thread, on Linux.

    Before Python 3.13 `join` returns sooner. What is left is the libraries' own end: MKL gives
    back the thread's buffers under a lock, and a process forked in that moment waits for the lock
    for good.
    """
    task = f"/proc/self/task/{thread.native_id}"
    give_up = time.monotonic() + _SECONDS_TO_END
    while os.path.exists(task) and time.monotonic() < give_up:
        time.sleep(0)


class ThreadGroup(Collectives):
    """One rank's view of N ranks that are threads of one process; `run_ranks` makes it.

    It belongs to its rank's thread and refuses calls from any other. Sums are in rank order. A
    `Work` may be waited for late, in any order, or never.

    Attributes:
        rank: this rank's number, from 0 to size - 1.
        size: the number of ranks.
        ranks: their numbers among all ranks.
    """

    def __init__(
        self, world: World, rank: int, circle: Circle | None = None, ring: Ring | None = None
    ) -> None:
        # One ring per rank: the groups of its axes write to the same
        self.ring = Ring(rank) if ring is None else ring
        self._world = world
        self._rank = rank  # among all ranks of the world
        self._circle = world.everyone if circle is None else circle
        self.ranks: Sequence[int] = self._circle.ranks
        self.rank, self.size = self.ranks.index(rank), len(self.ranks)
        self._thread = threading.get_ident()  # the one that may use it

    def subgroup(self, ranks: Sequence[int]) -> ThreadGroup:
        """The group of these of its ranks, in increasing order, this one among them. Each of them
        calls it."""
        check_subgroup(self.rank, self.size, ranks)
        members = tuple(self._circle.ranks[rank] for rank in ranks)  # numbered among all ranks
        circle = self._world.circle(self._rank, members)
        return ThreadGroup(self._world, self._rank, circle, self.ring)

    def all_say(self, words: str, seconds: float) -> bool:
        """Whether all ranks say the same words. No time limit is needed: where other ranks wait for
        this one elsewhere, no rank can go on, and the answer is no."""
        return self._world.all_say(self._rank, words, self._circle)

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one has failed: their collectives, and this rank's, raise
        `PeerError`."""
        self._world.fail(self._rank, failure_text(self._rank, error))

    def rejoin(self) -> None:
        """After a failure that every rank has caught: begin anew. Every rank calls this. It does
        nothing where nothing failed.

        Raises:
            GroupError: this can't be, since a rank has ended or the ranks called different
                collectives. Every rank gets the same error.
        """
        self._world.rejoin(self._rank)

    @property
    def era(self) -> int:
        """How often all ranks have come back after a failure."""
        return self._world.times_rejoined

    def _start(self, kind: str, *arguments: Any) -> Work:
        check_call(self.size, kind, *arguments)
        # An operation and a source are part of it: ranks that disagree on them raise
        call = Signature.of(kind, *arguments)
        meeting, out = self._call(call, arguments, partial(_outputs, kind)), arguments[0]

        def write() -> None:
            result = self._world.result_of(meeting, self._rank)
            with torch.no_grad():
                out.copy_(result)

        # The meeting may be complete by now, and the output is still written in `wait`. Then the
        # results go when the last rank lets go of them.
        return Then(Done(), write)

    def _meet(self, kind: str, *payload: bytes) -> Any:
        own = b"".join(payload)  # a copy of a bytearray, which the caller may change later
        meeting = self._call(Signature(kind), own, lambda payloads: [payloads] * len(payloads))
        return list(self._world.result_of(meeting, self._rank))

    def _call(self, call: Signature, deposit: Any, combine: Combine) -> Meeting:
        """Bring this rank's deposit to the next collective. Nobody waits yet."""
        # Another thread has no baton, and would run beside a rank that has it
        if threading.get_ident() != self._thread:
            raise GroupError(
                f"the ThreadGroup of rank {self._rank} was used for {call} outside its rank's "
                "thread. Remedy: use each group only in the function that run_ranks gave it to, "
                "and in no thread of your own"
            )
        return self._world.join(self._rank, call, deposit, combine, self._circle)


def _outputs(kind: str, calls: Sequence[Sequence[Any]]) -> Sequence[Tensor]:
    """Each rank's output of a collective, of all ranks' arguments. Ranks may share one: `wait`
    copies it, so no rank holds another's memory."""
    size = len(calls)
    tensors, last = [brought(arguments) for arguments in calls], calls[0][-1]
    match kind:
        case "all_gather":
            return [torch.cat(tensors)] * size
        case "reduce_scatter":
            return fold(tensors, "sum").tensor_split(size)  # summed once; rank i gets row i
        case "all_reduce":
            return [fold(tensors, last)] * size
        case "broadcast":
            # A copy: its rank may write to it before others have waited
            return [tensors[last].clone()] * size
    return _trade_runs(calls)


def _trade_runs(calls: Sequence[Sequence[Any]]) -> list[Tensor]:
    """All ranks' arguments of an all-to-all -> each rank's `out`."""
    for sender, (_, _, _, in_sizes) in enumerate(calls):
        for receiver, (_, out_sizes, _, _) in enumerate(calls):
            num_sent, num_expected = in_sizes[receiver], out_sizes[sender]
            if num_sent != num_expected:
                raise GroupError(
                    f"all_to_all: rank {sender} sends {num_sent} elements to rank {receiver}, "
                    f"which expects {num_expected}"
                )
    runs = [torch.split(source, list(in_sizes)) for _, _, source, in_sizes in calls]  # by sender
    # By receiver, runs in rank order
    return [torch.cat(received) for received in zip(*runs, strict=True)]


class _Interrupted(BaseException):
    """Raised inside a rank that still runs when the time is over."""


def _interrupt(thread: threading.Thread) -> None:
    """Raise `_Interrupted` in a thread, when it next runs Python code."""
    # A thread inside C code hears of it when that has returned
    if thread.ident is not None and thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident), ctypes.py_object(_Interrupted)
        )
