"""Where the elements that a reader wants lie: their pieces, from the rows of all files. Rows are
read file by file, and only what is wanted is kept."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import CorruptError
from .files import read_file
from .manifest import MAX_BYTES, NAME, Manifest
from .rows import decode_rows, rows_name


class RankFile(NamedTuple):
    """A rank's file, and what it takes to check its blocks."""

    path: Path
    size: int  # in bytes
    block: int  # bytes that each checksum covers
    checksum: str  # a key of `CHECKSUMS`
    sums: Tensor  # (number of blocks,) int64
    table: Tensor  # (n, 4) int64: each piece as a `SavedPiece`, in the order they lie in


class SavedPiece(NamedTuple):
    """A piece, and where it lies in a file."""

    leaf: int  # its number in the manifest
    start: int  # in elements of the whole leaf
    stop: int
    offset: int  # in bytes from the beginning of the file


class Places(NamedTuple):
    """The pieces in which wanted elements lie."""

    manifest: Manifest
    files: Sequence[RankFile]  # of all ranks, with these pieces

    def by_file(self, leaves: Collection[int]) -> Iterator[tuple[RankFile, list[SavedPiece]]]:
        """The pieces of these leaves, file by file."""
        numbers = torch.tensor([*leaves], dtype=torch.int64, device="cpu")
        for file in self.files:
            # Objects of one file at a time: a whole state may have millions of pieces
            rows = file.table[torch.isin(file.table[:, 0], numbers)].tolist()
            if rows:
                yield file, [SavedPiece(*row) for row in rows]


def find_places(manifest: Manifest, folder: Path, wanted: Mapping[int, tuple[int, int]]) -> Places:
    """Find elements in the rows of all files.

    Args:
        manifest: the checkpoint's.
        folder: the checkpoint's.
        wanted: elements [start, stop) by the number of their leaf.

    Raises:
        CorruptError: a file's rows are damaged, or a wanted element is not there exactly once.
    """
    # Of leaves that nobody wants, no elements
    spans = [wanted.get(number, (0, 0)) for number in range(len(manifest.leaves))]
    # (number of leaves,) each
    starts, stops = torch.tensor(spans, dtype=torch.int64, device="cpu").view(-1, 2).unbind(1)
    files = []
    for number in range(len(manifest.files)):
        file = read_rows(manifest, folder, number)
        leaf, start, stop, _ = file.table.unbind(1)
        is_wanted = (start < stops[leaf]) & (stop > starts[leaf]) & (starts < stops)[leaf]
        files.append(file._replace(table=file.table[is_wanted]))
    _check_coverage(manifest, folder, torch.cat([file.table for file in files]), starts, stops)
    return Places(manifest, files)


def read_rows(manifest: Manifest, folder: Path, number: int) -> RankFile:
    """A rank's file, with its checksums and all pieces in it.

    No piece lies outside of its leaf or of the file.

    Raises:
        CorruptError: the rows are missing, damaged, or those of another file.
    """
    file = manifest.files[number]
    path, data = folder / NAME, manifest.old_rows.get(file.name)
    if data is None:
        path = folder / rows_name(file.name)
        data = read_file(path, MAX_BYTES)

    def need(holds: Tensor | bool, problem: str) -> None:
        if not holds:
            raise CorruptError(f"{path}: {problem}")

    right = zlib.crc32(data) == file.rows_crc
    need(right, "its checksum isn't the manifest's, so it is damaged, cut off or of another save")
    try:
        pieces, sums = decode_rows(data, file.num_pieces, manifest.num_blocks(file))
    except ValueError as error:
        raise CorruptError(f"{path}: {error}") from None
    leaf, start, numel = pieces.unbind(1)
    numels, widths = manifest.numels_and_widths
    # Each check may rely on those before it
    need(((leaf >= 0) & (leaf < len(numels))).all(), "has a piece of a leaf which there isn't")
    inside = (start >= 0) & (numel > 0) & (start <= numels[leaf]) & (numel <= numels[leaf] - start)
    need(inside.all(), "has a piece outside of its leaf")
    nbytes = numel * widths[leaf]
    total = sum(nbytes.tolist())  # in Python's integers, which don't overflow
    first = file.size - total
    need(first >= 8, f"has {total} bytes of pieces, for a file of {file.size}")
    offset = first + nbytes.cumsum(0) - nbytes
    need((offset % widths[leaf] == 0).all(), "has a piece out of place")
    table = torch.stack([leaf, start, start + numel, offset], 1)
    name = folder / file.name
    return RankFile(name, file.size, manifest.block, manifest.checksum, sums, table)


def _check_coverage(
    manifest: Manifest, folder: Path, table: Tensor, starts: Tensor, stops: Tensor
) -> None:
    """Raise `CorruptError` unless the pieces have each leaf's elements [start, stop) exactly
    once."""
    # Of each leaf two empty pieces more, one before all others and one behind them
    numbers = torch.arange(len(starts), device="cpu")
    before, behind = (torch.stack([numbers, at, at], 1) for at in (starts, stops))
    leaf, *ends = table[:, :3].unbind(1)
    start, stop = (x.clamp(starts[leaf], stops[leaf]) for x in ends)
    rows = torch.cat([before, torch.stack([leaf, start, stop], 1), behind])
    for column in (1, 0):  # by leaf, then by start
        rows = rows[rows[:, column].argsort(stable=True)]
    leaf, start, stop = rows.unbind(1)
    # In order, so each piece must begin where the one before it ended
    wrong = (leaf[1:] == leaf[:-1]) & (start[1:] != stop[:-1])
    for i in wrong.nonzero()[:1].flatten().tolist():
        ended, begun = int(stop[i]), int(start[i + 1])
        story = "twice" if begun < ended else "not at all"
        path = manifest.leaves[int(leaf[i])].path
        raise CorruptError(f"{folder}: element {min(begun, ended)} of {path} is there {story}")
