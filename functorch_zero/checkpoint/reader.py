"""Reading ranges of files into tensors, block by block, each block checked before it counts.

Files are read with pread, never mapped: a mapped file that gets shorter kills the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .checksums import CHECKSUMS
from .container import DTYPES, bytes_of
from .errors import CorruptError
from .folders import opened, read_into
from .manifest import File, Manifest

_THREADS = 2
_FEW_BLOCKS = 4


class Wanted(NamedTuple):
    """A run of elements in a file, and where they go."""

    offset: int  # in bytes from the beginning of the file
    numel: int
    dtype: str  # in the file
    target: Tensor  # 1-D and contiguous, of any dtype, on any device
    first: int  # where in the target

    @property
    def end(self) -> int:
        return self.offset + self.numel * DTYPES[self.dtype].itemsize


class _Run(NamedTuple):
    """The part of a `Wanted` that lies in one block."""

    wanted: Wanted
    start: int  # in bytes from the beginning of the file
    stop: int

    @property
    def direct(self) -> bool:
        """Whether bytes can be read straight into the target."""
        target = self.wanted.target
        return target.device.type == "cpu" and target.dtype == DTYPES[self.wanted.dtype]

    @property
    def target(self) -> Tensor:
        w, width = self.wanted, DTYPES[self.wanted.dtype].itemsize
        return w.target[w.first + (self.start - w.offset) // width : w.first + (self.stop - w.offset) // width]


def read_wanted(folder: Path, file: File, manifest: Manifest, wanted: Sequence[Wanted]) -> None:
    """Read runs of one file. Memory: two blocks.

    Args:
        folder: the checkpoint's.
        file: the file, one of the manifest's.
        manifest: the checkpoint's.
        wanted: runs that don't overlap in the file, aligned to their element sizes.

    Raises:
        CorruptError: the file is missing, of another size, or a block has another checksum.
    """
    path = folder / file.name
    with opened(path) as (descriptor, size):
        check_size(path, size, file.size)
        rooms = threading.local()

        def read(block_and_runs: tuple[int, list[_Run]]) -> None:
            start, runs = block_and_runs
            if not hasattr(rooms, "room"):
                rooms.room = torch.empty(manifest.block, dtype=torch.uint8, device="cpu")
            views = _views(rooms.room, start, min(start + manifest.block, size), runs)
            read_into(descriptor, start, path, *views)
            _check_block(path, file, manifest, start, views)
            _convert(rooms.room, start, runs)

        _for_each(read, list(_by_block(wanted, manifest.block)))


def _for_each(work: Callable[[tuple[int, list[_Run]]], None], blocks: list[tuple[int, list[_Run]]]) -> None:
    """Do the work for every block: many blocks in two threads, so that one reads while the other checks."""
    if len(blocks) < _FEW_BLOCKS:
        for block in blocks:
            work(block)
        return
    with ThreadPoolExecutor(_THREADS, "functorch_zero load") as pool:
        futures = [pool.submit(work, block) for block in blocks]
        try:
            for future in futures:
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _convert(room: Tensor, start: int, runs: Sequence[_Run]) -> None:
    """Bring what was read into `room` to its targets."""
    for run in runs:
        if not run.direct:
            data = room[run.start - start : run.stop - start]
            run.target.copy_(data.view(DTYPES[run.wanted.dtype]))


def _views(room: Tensor, start: int, stop: int, runs: Sequence[_Run]) -> list[memoryview]:
    """Where the bytes [start, stop) of a file go: those of direct runs to their targets, the others into `room`."""
    spare, views, at = bytes_of(room), [], start
    for run in runs:
        if run.direct:
            views += [spare[at - start : run.start - start], bytes_of(run.target)]
            at = run.stop
    return [view for view in (*views, spare[at - start : stop - start]) if view]


def read_through(folder: Path, file: File, manifest: Manifest) -> None:
    """Read a file from end to end for its checksums.

    Raises:
        CorruptError: as `read_wanted`.
    """
    path = folder / file.name
    with opened(path) as (descriptor, size):
        check_size(path, size, file.size)
        room = memoryview(bytearray(manifest.block))
        for start in range(0, size, manifest.block):
            view = room[: size - start]
            read_into(descriptor, start, path, view)
            _check_block(path, file, manifest, start, [view])


def check_size(path: Path, found: int, expected: int) -> None:
    """Raise `CorruptError` unless a file has the size it must have."""
    if found != expected:
        raise CorruptError(f"{path}: {found} bytes, and it must have {expected}")


def _check_block(path: Path, file: File, manifest: Manifest, start: int, views: Sequence[memoryview]) -> None:
    """Raise `CorruptError` unless the block that starts at this byte has the right checksum."""
    found = CHECKSUMS[manifest.checksum](views)
    if found != file.sum_of(start // manifest.block):
        stop = start + sum(map(len, views))
        raise CorruptError(f"{path}: bytes {start} to {stop} are damaged: their checksum differs")


def _by_block(wanted: Sequence[Wanted], block: int) -> Iterator[tuple[int, list[_Run]]]:
    """The blocks that are needed, by their first byte, and the runs in each."""
    current, runs = -1, list[_Run]()
    for w in sorted(wanted, key=lambda w: w.offset):
        for number in range(w.offset // block, -(-w.end // block)):
            if number != current and runs:
                yield current * block, runs
                runs = []
            current = number
            runs.append(_Run(w, max(w.offset, number * block), min(w.end, (number + 1) * block)))
    if runs:
        yield current * block, runs
