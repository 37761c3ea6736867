"""The check that ranks of the same data have found the same.

Note [equal copies]: ranks of the same data must find the same loss, metrics and weight, to the bit.
The first copy of each part of the batch sends a digest of them under one number, the other copies
under another. Where all are equal, so are the two means. Each digest is of the part's number, too,
so that parts that changed places don't cancel.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping

import torch

from ..errors import MismatchError
from ..groups.mesh import Copy
from ..groups.protocol import Group


def check_copies(copy: Copy, found: Mapping[str, float], group: Group) -> None:
    """Raise, on every rank with the same words, unless the copies are equal; see Note [equal
    copies]. One all-reduce; where they aren't equal, an exchange of JSON finds the first
    difference.

    `found`: this rank's values, by name.
    """
    # Of 32 bits, so that int64 adds those of 2**31 ranks
    digest = zlib.crc32(f"{copy.data}: {_bits(found)}".encode())
    # Summed over ranks: the numbers of first and of other copies, and their digests
    entries = [1, 0, digest, 0] if copy.number == 0 else [0, 1, 0, digest]
    sums = torch.tensor(entries, device="cpu")  # (4,) int64
    group.all_reduce(sums).wait()
    num_first, num_others, first, others = sums.tolist()
    # The means of the first and of the other copies, multiplied out: digests are integers
    if first * num_others == others * num_first:
        return
    told = group.exchange(json.dumps([copy.data, found]).encode())
    # All ranks have all messages, and find the same first difference
    holders: dict[int, tuple[int, dict[str, float]]] = {}  # by part: first rank, and its findings
    for rank, message in enumerate(told):
        part, theirs = json.loads(message)
        other, expected = holders.setdefault(part, (rank, theirs))
        for name, ours, mine in zip(theirs, _bits(expected), _bits(theirs), strict=True):
            if ours == mine:
                continue
            raise MismatchError(
                f"ranks {other} and {rank} should have the same data, part {part} of the batch, "
                f"and found another {name}: {expected[name]!r} and {theirs[name]!r} (this is rank "
                f"{group.rank}). Remedy: give each rank part `mesh.data.rank` of the batch, and "
                "let the loss draw its random numbers from the state's seed alone"
            )
    raise AssertionError("the sums differ, and the values don't")


def _bits(found: Mapping[str, float]) -> list[str]:
    """Equal for values that are equal to the bit: NaN equals NaN, and -0.0 differs from 0.0."""
    return [float(number).hex() for number in found.values()]
