"""The rows of one rank's file, in a file of their own beside it: the pieces of leaves that it
holds, and its blocks' checksums.

Each rank writes its own, and none needs those of all ranks. Rows are a safetensors file of two
int64 tensors, `pieces` (n, 3) and `checksums` (one per block), so that a reader gets through
millions of them by a few operations.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .safetensors_file import Entry, make_header


class SavedRange(NamedTuple):
    """Elements of a leaf in a file. A file's pieces lie in a row up to its end, which gives their
    offsets."""

    leaf: int  # its number in the manifest
    start: int  # in elements of the whole leaf
    numel: int


_COLUMNS = len(SavedRange._fields)


def rows_name(file: str) -> str:
    """The name of the rows that belong to a rank's file."""
    return file.removesuffix(".safetensors") + ".rows"


def rows_size(num_pieces: int, num_blocks: int) -> int:
    """The bytes of a rows file."""
    return _header(num_pieces, num_blocks)[1][-1]


def _header(num_pieces: int, num_blocks: int) -> tuple[bytes, list[int]]:
    """The first bytes of a rows file; the offsets of its tensors, and its end."""
    pieces = Entry("pieces", torch.int64, (num_pieces, _COLUMNS))
    return make_header([pieces, Entry("checksums", torch.int64, (num_blocks,))])


def encode_rows(pieces: Sequence[SavedRange], sums: Sequence[int]) -> bytes:
    """A rows file's bytes.

    Args:
        pieces: in the order in which they lie.
        sums: the checksum of each block.
    """
    header, _ = _header(len(pieces), len(sums))
    numbers = [number for piece in pieces for number in piece]
    return header + struct.pack(f"<{len(numbers) + len(sums)}q", *numbers, *sums)


def decode_rows(data: bytes, num_pieces: int, num_blocks: int) -> tuple[Tensor, Tensor]:
    """`pieces` (n, 3) and `checksums` (blocks,) of a rows file.

    Raises:
        ValueError: it has others.
    """
    header, (start, stop, end) = _header(num_pieces, num_blocks)
    if len(data) != end or not data.startswith(header):
        raise ValueError(f"expected rows of {num_pieces} pieces and {num_blocks} blocks")
    # A bytearray, since torch warns of a buffer that can't be written to
    numbers = torch.frombuffer(bytearray(data[start:]), dtype=torch.int64)
    pieces, sums = numbers.split([(stop - start) // 8, (end - stop) // 8])
    # A copy, so that who keeps the checksums doesn't keep the pieces
    return pieces.view(num_pieces, _COLUMNS), sums.clone()
