"""Words of the hosts: each rank tells the others a digest of what it has done, and flags; and, once
ranks know that they differ, the data that say in what.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

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
    same_batch: bool | None  # whether the ranks' batches are equal; None: some said nothing


def tell(
    log: Sequence[str], flags: Sequence[bool], group: Group, size: int = 0, batch: int = 0
) -> Told:
    """Tell all ranks some words of this host, and learn theirs. One all-reduce of a few int64 on
    the CPU, which waits for the other hosts, and for no device.

    Args:
        log: the words that all ranks must have equal.
        flags: this rank's. Any one rank raises a flag for all.
        size: a number for the ranks to compare, from 0.
        batch: a digest of this rank's batch; 0: it says nothing.
    """
    digest = digest_of([f"{len(flags)} flags", *log])
    # Of maxima alone: the largest of -x is minus the smallest of x
    entries = [digest, -digest, size, -size, batch, -batch, group.rank, *flags]
    # Digests meet digests even where ranks have other numbers of flags
    entries += [0] * (-len(entries) % WIDTH)
    vector = torch.tensor(entries, dtype=torch.int64, device="cpu")
    group.all_reduce(vector, op="max").wait()
    digest, minus_digest, largest, minus_smallest, *others = vector.tolist()
    batch, minus_batch, last_rank, *raised = others
    smallest = -minus_smallest
    # A counting group has no other ranks, whose batches could be equal
    compared = minus_batch < 0 and last_rank == group.size - 1
    return Told(
        alike=digest == -minus_digest,
        flags=[bool(flag) for flag in raised[: len(flags)]],
        sizes=None if smallest == largest else (smallest, largest),
        same_batch=batch == -minus_batch if compared else None,
    )


def digest_of(words: Sequence[str]) -> int:
    """Of 63 bits, so that an int64 holds it with either sign. A mistake is caught, no attack."""
    text = "\n".join(words).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1


def exchange_data(group: Group, data: Any) -> list[Any]:
    """The plain data of all ranks, in their order. One exchange of JSON."""
    return [json.loads(message) for message in group.exchange(json.dumps(data).encode())]
