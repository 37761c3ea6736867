"""Writing a rank's file, block by block, with a checksum of each block."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from .checksums import CHECKSUMS
from .container import bytes_of, dtype_name, make_header
from .folders import create, write_all
from .manifest import File, Piece
from .snapshot import Progress, Snapshot

BLOCK = 2**22  # bytes that one checksum covers, and that are written at once
CHECKSUM = "crc32"
_SECONDS_BETWEEN_REPORTS = 10.0

log = logging.getLogger("functorch_zero.checkpoint")


def write_rank_file(path: Path, snapshot: Snapshot) -> File:
    """Write one rank's file and flush it to disk. Wide dtypes come first, so that every piece is aligned."""
    parts = sorted(snapshot.parts, key=lambda part: -part.tensor.element_size())  # stable
    held = snapshot.contents.held
    tensors = []
    for part in parts:
        path_of_leaf = held[part.leaf].path
        dtype = dtype_name(path_of_leaf, part.tensor.dtype)
        tensors.append((f"{path_of_leaf}@{part.start}", dtype, (part.numel,)))
    header, offsets = make_header(tensors)
    out = BlockWriter(path, snapshot.progress)
    try:
        out.write(memoryview(header))
        for part in parts:
            for chunk in chunks_of(part.flat()):
                out.write(bytes_of(chunk))
                snapshot.progress.written += chunk.nbytes
                out.report()
        out.finish()
    finally:
        out.close()
    pieces = []
    for part, offset in zip(parts, offsets[:-1], strict=True):
        pieces.append(Piece(part.leaf, part.start, part.numel, offset))
    return File(path.name, out.size, "".join(out.sums), tuple(pieces))


def chunks_of(flat: Tensor) -> Iterator[Tensor]:
    """A tensor's elements as 1-D CPU tensors: itself, or copies of a few blocks each from another device."""
    size = max(1, flat.numel() if flat.device.type == "cpu" else 4 * BLOCK // flat.element_size())
    for run in flat.split(size):
        yield run.cpu()


class BlockWriter:
    """Writes a new file block by block, with a checksum of each. What is given is not copied."""

    def __init__(self, path: Path, progress: Progress) -> None:
        self.sums: list[str] = []
        self.size = 0
        self._path, self._progress = path, progress
        self._views: list[memoryview] = []  # of the block under way
        self._filled = 0
        self._file = create(path)
        self._reported = time.monotonic()

    def write(self, data: memoryview) -> None:
        """Add bytes, which must stay as they are until the end."""
        while data:
            view = data[: BLOCK - self._filled]
            data = data[len(view) :]
            self._views.append(view)
            self._filled += len(view)
            if self._filled == BLOCK:
                self._flush()

    def finish(self) -> None:
        """Write what is left, and flush everything to disk."""
        self._flush()
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)

    def report(self) -> None:
        """Say how far the save is, from time to time."""
        now = time.monotonic()
        if now - self._reported >= _SECONDS_BETWEEN_REPORTS:
            self._reported = now
            done = self._progress
            log.info("%s: %.0f of %.0f MB", self._path.name, done.written / 1e6, done.total / 1e6)

    def _flush(self) -> None:
        if self._filled:
            write_all(self._file, *self._views)
            self.sums.append(f"{CHECKSUMS[CHECKSUM](self._views):08x}")
            self.size += self._filled
            self._views, self._filled = [], 0
