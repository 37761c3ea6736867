"""Checksums of the frozen params that a checkpoint was saved without: whether another state has the
same ones."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from functools import cache

import torch

from .block_io import chunks_of
from .contents import LocalLeaf, runs_to_save
from .safetensors_file import bytes_of

Shares = list[tuple[int, int]]  # of one rank: a leaf's number, and this rank's share of its CRC


def crc_shares(
    leaves: Sequence[LocalLeaf], dtypes: Sequence[torch.dtype], rank: int, num_ranks: int
) -> Shares:
    """This rank's shares of the CRC-32 of each leaf's bytes, in these dtypes. Each element is read
    by one rank."""
    shares = []
    for run in runs_to_save(list(leaves), rank, num_ranks):
        crc, dtype = 0, dtypes[run.leaf]
        for chunk in chunks_of(run.flat()):
            crc = zlib.crc32(bytes_of(chunk.to(dtype)), crc)
        after = leaves[run.leaf].numel - run.start - run.numel  # elements
        shares.append((run.leaf, _followed_by(after * dtype.itemsize, crc)))
    return shares


def crcs_from(everyone: Iterable[Sequence[Sequence[int]]], num_leaves: int) -> list[int]:
    """The CRC-32 of each leaf's bytes, from all ranks' shares."""
    crcs = [0] * num_leaves
    for shares in everyone:
        for number, share in shares:
            crcs[number] ^= share
    return crcs


def _followed_by(num_bytes: int, crc: int) -> int:
    """The share of some bytes in the CRC-32 of all, of which so many follow: CRC-32(a + b) is
    _followed_by(len(b), CRC-32(a)) ^ CRC-32(b), as in zlib's crc32_combine."""
    for power, bit in enumerate(reversed(f"{num_bytes:b}")):
        if bit == "1":
            crc = _product(_shift(power), crc)
    return crc


@cache
def _shift(power: int) -> int:
    """x to the 8 * 2**power, modulo CRC-32's polynomial."""
    return _product(_shift(power - 1), _shift(power - 1)) if power else 1 << 23


def _product(a: int, b: int) -> int:
    """The product of two polynomials modulo CRC-32's. The highest of 32 bits is the coefficient of
    1."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (0xEDB88320 if b & 1 else 0)
    return product
