"""The check that ranks of the same data have found the same.

Note [equal copies]: ranks of the same data must find the same loss, metrics and weight, to the bit.
The first copy of each part of the batch sends a digest of them under one number, the other copies
under another. Where all are equal, so are the two means. Each digest is of the part's number, too,
so that parts that changed places don't cancel.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch

from ..errors import MismatchError
from ..groups.mesh import Copy
from ..groups.protocol import Group
from .words import exchange_data


def check_copies(copy: Copy, found: Mapping[str, float], group: Group) -> None:
    """Raise, on every rank with the same words, unless the copies are equal; see Note [equal
    copies]. One all-reduce; where they aren't equal, an exchange of JSON finds the first
    difference.

    `found`: this rank's values, by name.
    """
    if not _are_equal(copy, found, group):
        raise _first_difference(exchange_data(group, [copy.data, found]), group.rank)


def _are_equal(copy: Copy, found: Mapping[str, float], group: Group) -> bool:
    bits = [_bits(number) for number in found.values()]
    # Of 32 bits, so that int64 adds those of 2**31 ranks
    digest = zlib.crc32(f"{copy.data}: {bits}".encode())
    # Summed over ranks: the numbers of first and of other copies, and their digests
    entries = [1, 0, digest, 0] if copy.number == 0 else [0, 1, 0, digest]
    sums = torch.tensor(entries, device="cpu")  # (4,) int64
    group.all_reduce(sums).wait()
    num_first, num_others, first, others = sums.tolist()
    # The means of the first and of the other copies, multiplied out: digests are integers
    equal: bool = first * num_others == others * num_first
    return equal


def _first_difference(
    everyone: Sequence[tuple[int, Mapping[str, float]]], own_rank: int
) -> MismatchError:
    """The error that names the first value in which copies differ: the same one on all ranks.

    `everyone`: by rank, the number of its part of the batch, and its values by name.
    """
    first_ranks: dict[int, int] = {}  # by part: the first rank that has it
    for rank, (part, found) in enumerate(everyone):
        first_rank = first_ranks.setdefault(part, rank)
        _, expected = everyone[first_rank]
        for name in found:
            if _bits(expected[name]) != _bits(found[name]):
                return MismatchError(
                    f"ranks {first_rank} and {rank} should have the same data, part {part} of the "
                    f"batch, and found another {name}: {expected[name]!r} and {found[name]!r} "
                    f"(this is rank {own_rank}). Remedy: give each rank part `mesh.data.rank` of "
                    "the batch, and let the loss draw its random numbers from the state's seed "
                    "alone"
                )
    raise AssertionError("the sums differ, and the values don't")


def _bits(number: float) -> str:
    """Equal for numbers that are equal to the bit: NaN equals NaN, and -0.0 differs from 0.0."""
    return float(number).hex()
