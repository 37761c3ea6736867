"""Parts of older checkpoints: checked where they are read, never written.

Manifests of version 1 hold the rows of all files (`upgraded`).

`sums64` is a checksum. A block is cut into tables of 16 rows of 1921 64-bit integers; its last
table may have fewer rows. Per table, the CRC-32 goes on over three things: the sums of the columns;
the sums of the rows' runs of 113 integers; the bytes that fill no row, which only the last table
has. Sums are modulo 2^64, and integers have their lowest byte first.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

import torch

from .errors import CorruptError
from .rows import SavedRange, encode_rows
from .safetensors_file import bytes_of

ROWS, WORDS, RUN = 16, 1921, 113
ROW = 8 * WORDS  # bytes
TABLE = ROWS * ROW  # bytes


def sums64(data: memoryview) -> int:
    """The checksum of a block's bytes. Memory: a copy of the block."""
    block = bytearray(data)  # torch warns of a buffer that can't be written to
    found = 0
    for start in range(0, len(block), TABLE):
        table = block[start : start + TABLE]
        num_rows = len(table) // ROW
        if num_rows:
            # Shares the table's memory
            words = torch.frombuffer(table, dtype=torch.int64, count=num_rows * WORDS)
            found = zlib.crc32(bytes_of(words.view(num_rows, WORDS).sum(0)), found)
            found = zlib.crc32(bytes_of(words.view(-1, RUN).sum(1)), found)
        # All rows are done: the rest of the last table, or nothing
        found = zlib.crc32(table[num_rows * ROW :], found)
    return found


def upgraded(files: Any, where: str) -> tuple[list[Any], dict[str, bytes]]:
    """The files of a manifest of version 1, as one of today has them; and the rows by the file's
    name, as they would lie beside it. `where` is the manifest's name, for errors.

    What is checked of today's manifests and rows is not checked here.
    """
    entries, rows = [], {}
    try:
        for name, size, sums, pieces in files:
            # Offsets follow: all writers have put the pieces in a row
            made = [SavedRange(leaf, start, numel) for leaf, start, numel, _ in pieces]
            # 8 hexadecimal digits for each block
            crcs = [int(sums[at : at + 8], 16) for at in range(0, len(sums), 8)]
            rows[name] = encode_rows(made, crcs)
            entries.append([name, size, len(made), zlib.crc32(rows[name])])
    except (TypeError, ValueError, struct.error) as error:
        raise CorruptError(f"{where}: no files of version 1: {str(error)[:200]}") from None
    return entries, rows
