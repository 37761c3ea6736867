"""Words of the hosts: each rank tells the others a digest of what it has done, and flags."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..groups.protocol import Group

# Lengths of messages are multiples of this, so that ranks that have more to say than others still
# send equal lengths, and learn of it instead of hanging
WIDTH = 32


class Told(NamedTuple):
    """The words of all ranks together, the same on each."""

    alike: bool  # whether the ranks' logs are equal
    flags: list[bool]  # per flag: whether any rank has raised it
    sizes: tuple[int, int] | None  # the smallest and the largest, where the ranks differ in it


def tell(log: Sequence[str], flags: Sequence[bool], group: Group, size: int = 0) -> Told:
    """Tell all ranks some words of this host, and learn theirs. One all-reduce of a few int64 on
    the CPU, which waits for the other hosts, and for no device.

    Args:
        log: the words that all ranks must have equal.
        flags: this rank's. Any one rank raises a flag for all.
        size: a number for the ranks to compare, from 0.
    """
    # Of 63 bits, so that it fits an int64 with either sign. A mistake is caught, no attack.
    words = "\n".join([f"{len(flags)} flags", *log]).encode()
    digest = int.from_bytes(hashlib.blake2b(words, digest_size=8).digest()) >> 1
    # Of maxima alone: the largest of -x is minus the smallest of x
    entries = [digest, -digest, size, -size, *flags]
    # Digests meet digests even where ranks have other numbers of flags
    num_zeros = -len(entries) % WIDTH
    vector = torch.tensor([*entries, *[0] * num_zeros], dtype=torch.int64, device="cpu")
    group.all_reduce(vector, op="max").wait()
    most, least, largest, smallest, *raised = vector.tolist()
    return Told(
        alike=most == -least,
        flags=[bool(flag) for flag in raised[: len(flags)]],
        sizes=None if largest == -smallest else (-smallest, largest),
    )
