"""The last collectives that each rank has started: for errors about a lost rank, and printed on a
signal.

Note [a signal inside a collective]: Python runs a signal's handler when the main thread is back in
the interpreter, and a thread that waits in gloo or NCCL is not. But the interpreter writes the
signal's number to its wakeup file at once, in C. A thread reads that file, and prints.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import sys
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Literal

import torch.distributed as dist

from .checks import ranks_text
from .signature import Signature

_NUM_REMEMBERED = 64  # collectives of a rank
_NUM_TOLD = 7  # of them in an error, under one line of words
_NUM_LATER = 3  # of these, started after the one that failed
_MAX_RANKS = 8  # that a line lists


@dataclass(slots=True, eq=False)
class Entry:
    """One collective that this rank has started. It holds no tensor."""

    number: int  # how many this rank had started then, this one included
    label: str  # a unit or bucket and a phase, "blocks.1/gather"
    call: Signature  # with the elements that this rank brings; bytes of an exchange
    ranks: Sequence[int]  # who takes part, numbered among all ranks
    state: Literal["started", "waiting", "ended"] = "started"  # "waiting": this rank waits for it

    def __str__(self) -> str:
        has_ended = self.state == "ended"
        mark = " " if has_ended else ">"
        state = "" if has_ended else f" ({self.state})"
        few = len(self.ranks) <= _MAX_RANKS
        ranks = ranks_text(self.ranks) if few else f"{len(self.ranks)} ranks"
        return f"{mark} {self.number} {self.label}: {self.call} on {ranks}{state}"


class Ring:
    """The last collectives that one rank has started, along whatever axis, in the order of start.

    Args:
        rank: its number among all ranks; None for the rank that this process is.
    """

    def __init__(self, rank: int | None = None) -> None:
        self.entries: deque[Entry] = deque(maxlen=_NUM_REMEMBERED)
        self._rank = rank
        self._numbers = count(1)  # they go on when old entries are dropped
        # Weak, and dropped by itself when the rank's groups go
        _rings.add(weakref.ref(self, _rings.discard))

    def start(self, label: str, call: Signature, ranks: Sequence[int]) -> Entry:
        """Remember a collective that is about to start."""
        entry = Entry(next(self._numbers), label, call, ranks)
        self.entries.append(entry)
        return entry

    def near(self, number: float) -> str:
        """Some lines about the collective of this number, those before it and a few after it; of
        infinity: about the last ones."""
        entries = list(self.entries)  # at once: another thread may append
        until_then = [entry for entry in entries if entry.number <= number + _NUM_LATER]
        # The newest of the ring, where it has none that old
        return self._text((until_then or entries)[-_NUM_TOLD:])

    def __str__(self) -> str:
        return self._text(list(self.entries))

    def forget(self) -> None:
        """Begin anew."""
        self.entries.clear()
        self._numbers = count(1)

    def _text(self, entries: list[Entry]) -> str:
        # Asked late: rings are made before torch.distributed is
        rank = dist.get_rank() if self._rank is None and dist.is_initialized() else self._rank
        whose = "this process" if rank is None else f"rank {rank}"
        title = f"The last collectives of {whose}, oldest first (> has not ended):"
        return "\n".join([title, *map(str, entries)])


_rings: set[weakref.ref[Ring]] = set()  # of this process
RING_OF_PROCESS = Ring()  # for a rank that is a process, whatever groups it is in


def dump_on_signal(signum: int) -> None:
    """From now on, print this process's last collectives to stderr when the signal comes, also
    inside one.

    The last 64 that sharded steps, saves and evaluations have started, with unit, phase, kind, size
    and ranks; those that have not ended have a `>`. Training goes on. It takes a thread, which
    sleeps. Each rank calls this in its main thread; a forked process calls it again.

        fz.groups.dump_on_signal(signal.SIGUSR1)  # then, in a shell: kill -USR1 PID

    Raises:
        RuntimeError: this is not the main thread, or the wakeup file of signals has another user.
        ValueError: the signal has a handler, or is ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "dump_on_signal was called outside the main thread. Remedy: call it there, before "
            "training"
        )
    there = signal.getsignal(signum)
    # The parent's handler is inherited by a fork, its thread is not
    if there is _leave_to_thread:  # it was asked for before, in this process or in its parent
        _listen()
        return
    if there is not signal.SIG_DFL or _is_caught(signum):
        # C handlers, as faulthandler's, are invisible to signal.getsignal
        handler = "one in C, as by faulthandler" if there is signal.SIG_DFL else repr(there)
        raise ValueError(
            f"signal {signum} has a handler: {handler}. Remedy: pass another signal, such as "
            "signal.SIGUSR2, or take that handler away first"
        )
    _listen()
    # Only signals with a handler in Python reach the wakeup file
    signal.signal(signum, _leave_to_thread)
    signal.siginterrupt(signum, False)  # system calls go on


def _is_caught(signum: int) -> bool:
    """Whether the signal has any handler; Python itself knows its own only."""
    if sys.platform != "linux":
        return False
    mask = re.search(r"^SigCgt:\s*(\w+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    if mask is None:
        return False
    caught = int(mask[1], 16)  # one bit per signal, the lowest for signal 1
    return bool(caught >> (signum - 1) & 1)


def _leave_to_thread(signum: int, frame: FrameType | None) -> None:
    """The signal's handler; the thread prints. See Note [a signal inside a collective]."""


@functools.cache
def _listen() -> None:
    """Start the thread, once in a process."""
    reader, writer = os.pipe()
    # A full pipe must not block the handler in C
    os.set_blocking(writer, False)
    previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # Somebody's: put it back
    if previous != -1:
        signal.set_wakeup_fd(previous)
        os.close(reader)
        os.close(writer)
        raise RuntimeError(
            "signal.set_wakeup_fd is in use in this process, as by asyncio's signal handlers. "
            "Remedy: call dump_on_signal in a process without them"
        )
    # A daemon, asleep in `read` nearly always
    threading.Thread(target=_print_rings, args=(reader,), name="dump rings", daemon=True).start()


def _print_rings(reader: int) -> None:
    """The thread: prints whenever a signal comes that is to be heard."""
    while number := os.read(reader, 1):
        if signal.getsignal(number[0]) is _leave_to_thread:
            # Dead references may be dropped meanwhile: so over a copy
            alive = [reference() for reference in list(_rings)]
            told = sorted(str(ring) for ring in alive if ring is not None and ring.entries)
            text = "\n".join(told) or "No collective has been started."
            # not by sys.stderr, whose lock a blocked thread may hold
            os.write(2, f"Process {os.getpid()}. {text}\n".encode())


def _begin_anew() -> None:
    """A forked process is another rank than its parent, and has none of its threads."""
    RING_OF_PROCESS.forget()
    # Else this process's signals would wake the parent's thread
    if _listen.cache_info().currsize:
        _listen.cache_clear()
        signal.set_wakeup_fd(-1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
