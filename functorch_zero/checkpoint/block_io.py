"""Reading ranges of files into tensors, and writing a rank's file, block by block. Each block has a
checksum, and is checked before it counts.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..groups.thread_settings import settings_here
from .checksums import CHECKSUMS
from .contents import Run
from .errors import CorruptError
from .files import created, opened_whole, read_into, write_all, write_file
from .manifest import MAX_BYTES, File
from .places import Places, RankFile
from .rows import SavedRange, encode_rows, rows_name
from .safetensors_file import Entry, bytes_of, make_header
from .snapshot import Progress, Snapshot

# A multiple of every element's size, so that no element lies in two blocks
BLOCK = 2**22  # bytes that one checksum covers, and that are written at once
CHECKSUM = "crc32"
_SECONDS_BETWEEN_REPORTS = 10.0
_THREADS = 2  # of a read: one waits for the disk while the other checks
log = logging.getLogger("functorch_zero.checkpoint")


class Target(NamedTuple):
    """Elements of a leaf that are to be read, and their place."""

    tensor: Tensor  # (n,) contiguous, of any dtype, on any device
    start: int  # of the first one, in elements of the whole leaf


class Wanted(NamedTuple):
    """A run of elements in a file, and where they go."""

    offset: int  # in bytes from the beginning of the file
    dtype: torch.dtype  # in the file
    target: Tensor  # (n,) contiguous, of any dtype, on any device

    @property
    def end(self) -> int:
        return self.offset + self.target.numel() * self.dtype.itemsize

    def within(self, start: int, stop: int) -> Wanted:
        """What of it lies in the bytes [start, stop) of the file."""
        low, high = max(self.offset, start), min(self.end, stop)
        first, last = ((at - self.offset) // self.dtype.itemsize for at in (low, high))
        return Wanted(low, self.dtype, self.target[first:last])


def read_leaves(places: Places, targets: Mapping[int, Sequence[Target]]) -> None:
    """Read leaves, by their numbers, into targets. File by file, so that blocks which leaves share
    are read once.

    Raises:
        CorruptError: as `read_wanted`.
    """
    for file, pieces in places.by_file(targets):
        wanted = []
        for piece in pieces:
            dtype = places.manifest.leaves[piece.leaf].dtype
            for tensor, first in targets[piece.leaf]:
                # The elements in both, if any
                start = max(first, piece.start)
                stop = min(first + tensor.numel(), piece.stop)
                if start < stop:
                    offset = piece.offset + (start - piece.start) * dtype.itemsize
                    wanted.append(Wanted(offset, dtype, tensor[start - first : stop - first]))
        read_wanted(file, wanted)


def read_wanted(file: RankFile, wanted: Sequence[Wanted]) -> None:
    """Read runs of one file, in whole blocks, since only these can be checked. Memory: a block for
    each of two threads.

    Args:
        file: the file.
        wanted: runs that don't overlap in the file, aligned to their element sizes.

    Raises:
        CorruptError: the file is missing, of another size, or a block has another checksum.
    """
    rooms = threading.local()  # one block per thread
    # Targets made in inference mode can be written to in that mode alone
    settings = settings_here()

    with opened_whole(file.path, file.size) as descriptor:

        def read(block: tuple[int, list[Wanted]]) -> None:
            start, runs = block  # its first byte in the file
            with settings():
                if not hasattr(rooms, "room"):
                    # (block,) uint8, made on a thread's first block
                    rooms.room = torch.empty(file.block, dtype=torch.uint8, device="cpu")
                _read_block(descriptor, file, start, bytes_of(rooms.room))
                # Only now, so that no target has damaged bytes
                for run in runs:
                    data = rooms.room[run.offset - start : run.end - start].view(run.dtype)
                    run.target.copy_(data)  # converts the dtype, and copies to the target's device

        with ThreadPoolExecutor(_THREADS, "functorch_zero load") as pool:
            # Raises the first error, in the order of the file; then blocks not begun are not read
            list(pool.map(read, _by_block(wanted, file.block)))


def read_through(file: RankFile) -> None:
    """Read a file from end to end for its checksums.

    Raises:
        CorruptError: as `read_wanted`.
    """
    with opened_whole(file.path, file.size) as descriptor:
        room = memoryview(bytearray(file.block))  # used for each block anew
        for start in range(0, file.size, file.block):
            _read_block(descriptor, file, start, room)


def _read_block(descriptor: int, file: RankFile, start: int, room: memoryview) -> None:
    """Read the block that starts at this byte. Raise `CorruptError` unless it has the right
    checksum."""
    view = room[: file.size - start]  # of the last block, what there is
    read_into(descriptor, start, file.path, view)
    if CHECKSUMS[file.checksum](view) != int(file.sums[start // file.block]):
        problem = f"bytes {start} to {start + len(view)} are damaged: their checksum differs"
        raise CorruptError(f"{file.path}: {problem}")


def _by_block(wanted: Sequence[Wanted], block: int) -> Iterator[tuple[int, list[Wanted]]]:
    """The blocks that are needed, by their first byte, and the runs in each."""
    # Of each run all blocks that it touches, the last one perhaps not whole
    parts = (
        (number, run)
        for run in sorted(wanted, key=attrgetter("offset"))
        for number in range(run.offset // block, -(-run.end // block))
    )
    for number, own in groupby(parts, itemgetter(0)):
        start = number * block
        yield start, [run.within(start, start + block) for _, run in own]


def write_rank_file(path: Path, snapshot: Snapshot) -> File:
    """Write one rank's file and its rows, and flush them to disk. Returns its entry in the
    manifest."""
    # Wide dtypes come first, so that every piece is aligned
    runs = sorted(snapshot.runs, key=lambda run: -run.tensor.element_size())  # stable
    leaves = snapshot.contents.leaves
    header, _ = make_header(
        [entry_of(leaves[run.leaf].path, run.tensor.dtype, run.start, run.numel) for run in runs]
    )
    sums, size = list[int](), 0
    with created(path) as file:
        for block in _blocks(_data(header, runs, snapshot.progress, path.name)):
            write_all(file, block)
            sums.append(CHECKSUMS[CHECKSUM](block))
            size += len(block)
    pieces = [SavedRange(run.leaf, run.start, run.numel) for run in runs]
    rows = encode_rows(pieces, sums)
    write_file(path.with_name(rows_name(path.name)), rows, MAX_BYTES)
    return File(path.name, size, len(pieces), zlib.crc32(rows))


def _data(
    header: bytes, runs: Iterable[Run], progress: Progress, name: str
) -> Iterator[memoryview]:
    """A file's bytes. Says how far the save is, from time to time."""
    yield memoryview(header)
    reported = time.monotonic()
    for run in runs:
        for chunk in chunks_of(run.flat()):
            yield bytes_of(chunk)
            # Handed over, and perhaps still in the block under way
            progress.written += chunk.nbytes
            if time.monotonic() - reported >= _SECONDS_BETWEEN_REPORTS:
                reported = time.monotonic()
                done, total = progress.written / 1e6, progress.total / 1e6
                log.info("%s: %.0f of %.0f MB", name, done, total)


def _blocks(data: Iterable[memoryview]) -> Iterator[memoryview]:
    """The bytes block by block, the last of which may be shorter."""
    block = bytearray()
    for view in data:
        while view:
            room = BLOCK - len(block)
            block += view[:room]
            view = view[room:]
            if len(block) == BLOCK:
                yield memoryview(block)
                block = bytearray()
    if block:
        yield memoryview(block)


def entry_of(path: str, dtype: torch.dtype, start: int, numel: int) -> Entry:
    """A piece of a leaf in the header of a rank's file."""
    # The first element is in the name: several ranks' files hold pieces of one leaf
    return Entry(f"{path}@{start}", dtype, (numel,))


def chunks_of(flat: Tensor) -> Iterator[Tensor]:
    """A tensor's elements as 1-D CPU tensors: itself, or copies of a few blocks each from another
    device."""
    size = flat.numel()
    if flat.device.type != "cpu":
        size = 4 * BLOCK // flat.element_size()  # elements: 16 MiB on their way from the device
    # `split` takes no size of 0, which an empty leaf would give
    for run in flat.split(max(1, size)):
        yield run.cpu()
