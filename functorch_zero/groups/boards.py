"""What ranks of one machine show each other, on boards in shared memory, and how they read it.

By process_vm_readv(2), as in Open MPI's cross memory attach.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import platform
import struct
import sys
from array import array
from collections.abc import Callable, Sequence

import torch

Run = tuple[int, int]  # an address in some process, and how many bytes lie there

KINDS = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_reduce (max)",
    "all_to_all",
    "broadcast",
    "exchange",
    "barrier",
)
DTYPES = sorted({x for x in vars(torch).values() if isinstance(x, torch.dtype)}, key=str)
AT_ONCE = 128  # collectives on a board

# A board's 64-bit words: three numbers, each in a cache line of its own; why its rank has left, in UTF-8; and the last
# collectives that were begun, each with its kind and dtype, and for each rank an address and a number of bytes.
_LEFT, _BEGUN, _READ, _WHY, _SHOWN = 0, 8, 16, 24, 56
_TEXT = slice(8 * _WHY, 8 * _SHOWN)  # bytes
_OFFER = struct.Struct("qqq16s")  # a process, its board's file descriptor, an address, what lies there
_U64 = ctypes.c_uint64


class Board:
    """What one rank shows, readable to all.

    Numbers are written after what they speak of, and read before it. Python has no fences, so a processor is asked for
    that keeps loads and stores in order (x86).
    """

    def __init__(self, words: memoryview, size: int) -> None:
        self._words, self._bytes, self._stride = words, words.cast("B"), 1 + 2 * size

    @property
    def begun(self) -> int:
        """How many collectives its rank has begun."""
        return int(self._words[_BEGUN])

    @property
    def read(self) -> int:
        """How many its rank has read."""
        return int(self._words[_READ])

    @read.setter
    def read(self, number: int) -> None:
        self._words[_READ] = number

    @property
    def left(self) -> bool:
        """Its rank has left: nobody may read its memory."""
        return bool(self._words[_LEFT])

    def leave(self) -> None:
        self._words[_LEFT] = 1

    @property
    def why(self) -> str:
        """Why, as far as its rank has said so."""
        return bytes(self._bytes[_TEXT]).rstrip(b"\0").decode(errors="ignore")

    @why.setter
    def why(self, text: str) -> None:
        most = _TEXT.stop - _TEXT.start
        self._bytes[_TEXT] = text.encode()[:most].ljust(most, b"\0")

    def show(self, number: int, kind: str, dtype: torch.dtype, runs: Sequence[Run]) -> None:
        """Its rank has begun this collective, and shows each rank a run; the one AT_ONCE before it goes."""
        words = array("q", [KINDS.index(kind) + len(KINDS) * DTYPES.index(dtype)])
        for run in runs:
            words.extend(run)
        start = self._place(number)
        self._words[start : start + self._stride] = memoryview(words)
        self._words[_BEGUN] = number + 1

    def shown(self, number: int, rank: int) -> tuple[str, torch.dtype, Run]:
        """A collective's kind and dtype, and the run shown to `rank`."""
        start = self._place(number)
        run = start + 1 + 2 * rank
        dtype, kind = divmod(self._words[start], len(KINDS))
        return KINDS[kind], DTYPES[dtype], (self._words[run], self._words[run + 1])

    def _place(self, number: int) -> int:
        return _SHOWN + number % AT_ONCE * self._stride


class Neighbour:
    """A rank of this machine, or this one.

    Attributes:
        board: what it shows.
        process: a file descriptor that can be read from when its process has ended (pidfd_open(2)).
    """

    def __init__(self, board: Board, pid: int, process: int) -> None:
        self.board, self._pid, self.process = board, pid, process

    def copy(self, shown: Run, wanted: Run) -> None:
        """Copy from an address there to one here. Raises OSError when not all of it can be had."""
        _copy_from(self._pid, shown, wanted)


def meet(rank: int, size: int, exchange: Callable[[bytes], list[bytes]], *, willing: bool) -> list[Neighbour] | None:
    """All ranks, this one with a new board. None on all of them unless each can read the memory of all others.

    That takes one machine, Linux on x86, one user, and a kernel that allows it: Yama's ptrace_scope must be 0, and a
    container's seccomp filter must let process_vm_readv(2) pass.

    Args:
        exchange: gives every rank's bytes, in rank order.
    """
    nbytes = 8 * (_SHOWN + AT_ONCE * (1 + 2 * size))
    proof = ctypes.create_string_buffer(os.urandom(16), 16)
    offer = b""
    with contextlib.ExitStack() as board, contextlib.ExitStack() as processes:
        if willing and is_possible():
            with contextlib.suppress(OSError):
                file = os.memfd_create("functorch_zero board")
                board.callback(os.close, file)
                os.ftruncate(file, nbytes)
                offer = _OFFER.pack(os.getpid(), file, ctypes.addressof(proof), proof.raw)
        offers, met = exchange(offer), []
        if all(offers):
            with contextlib.suppress(OSError):
                for r, other in enumerate(offers):
                    met.append(_neighbour(other, nbytes, size, mine=r == rank))
                    processes.callback(os.close, met[-1].process)
        if all(exchange(b"yes" if len(met) == size else b"")):  # nobody closes its board before all have it
            processes.pop_all()
            return met
    return None


def is_possible() -> bool:
    return sys.platform == "linux" and platform.machine() == "x86_64" and hasattr(os, "pidfd_open")


def _neighbour(offer: bytes, nbytes: int, size: int, *, mine: bool) -> Neighbour:
    """A rank, once its memory has been read. Raises OSError when that, or its board, can't be had."""
    pid, file, address, proof = _OFFER.unpack(offer)
    read = ctypes.create_string_buffer(16)
    _copy_from(pid, (address, 16), (ctypes.addressof(read), 16))
    if read.raw != proof:
        raise OSError(f"process {pid} is another one on this machine")
    opened = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR if mine else os.O_RDONLY)
    try:
        mapped = mmap.mmap(opened, nbytes, prot=mmap.PROT_READ | (mmap.PROT_WRITE if mine else 0))
    finally:
        os.close(opened)
    return Neighbour(Board(memoryview(mapped).cast("q"), size), pid, os.pidfd_open(pid))


def _copy_from(pid: int, shown: Run, wanted: Run) -> None:
    """Copy `wanted[1]` bytes from another process's address to one here; an OSError when they can't all be had."""
    (source, _), (there, left) = shown, wanted
    while left:
        read = _process_vm_readv()(pid, (_U64 * 2)(there, left), 1, (_U64 * 2)(source, left), 1, 0)
        if read <= 0:
            code = ctypes.get_errno() or errno.EFAULT
            raise OSError(code, os.strerror(code))
        source, there, left = source + read, there + read, left - read


@functools.cache
def _process_vm_readv() -> Callable[..., int]:
    function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    function.restype = ctypes.c_ssize_t
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
    return function
