"""Gradients of several buckets that are summed as one: fewer collectives for small units."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..groups.mesh import Axis
from ..groups.protocol import Work
from ..groups.work import Then
from ..layout.layout import Bucket


class Summing(NamedTuple):
    """One bucket's sum along an axis, under way."""

    bucket: int
    result: Tensor  # (piece,), or (numel,) of a bucket that is not cut; ready when the work is done
    work: Work
    is_last: bool  # the bucket's sum along the axis is complete with this one


class _Member(NamedTuple):
    """A bucket's gradients that wait for others."""

    bucket: int
    flat: Tensor
    is_last: bool


class Together:
    """Flats of one dtype that an axis sums as one. They wait until there are enough of them.

    All ranks add the same buckets in the same order, so their collectives meet.

    Args:
        buckets: the layout's.
        axis: along which the flats are summed.
        cut: whether each rank gets its piece of each sum. The flats are then only read; else they
            are given away, and become the sums.
        num_bytes: of gradients that are summed as one, counted in whole buckets; 0: each bucket's
            by itself.
    """

    def __init__(self, buckets: Sequence[Bucket], axis: Axis, *, cut: bool, num_bytes: int):
        self._buckets, self._axis, self._cut = buckets, axis, cut
        # Where nothing is sent, there is nothing to wait for
        self._num_bytes = num_bytes if axis.size > 1 and axis.holds_different_data else 0
        self._room = self._num_bytes  # bytes that may still join
        self._members: list[_Member] = []

    def has_room_for(self, b: int) -> bool:
        """Whether a bucket's flat would wait, and start no collective."""
        return self._bytes_of(b) < self._room

    def add(self, b: int, flat: Tensor, *, is_last: bool) -> list[Summing]:
        """Let a bucket's flat (k,) wait. Returns the sums that have begun: of those that waited,
        where they leave no room for it; of this one, where it fills the room."""
        begun = self.leave() if self._bytes_of(b) > self._room else []
        self._members.append(_Member(b, flat, is_last))
        self._room -= self._bytes_of(b)
        return begun + self.leave() if self._room <= 0 else begun

    def leave(self) -> list[Summing]:
        """Begin to sum all that waits, in one collective."""
        members, self._members, self._room = self._members, [], self._num_bytes
        if not members:
            return []
        flats = [member.flat for member in members]
        results = flats
        if self._cut:
            results = [flat.new_empty(flat.numel() // self._axis.size) for flat in flats]
        name = self._buckets[members[0].bucket].name
        if len(members) > 1:
            axis = self._axis.at(f"{name} and {len(members) - 1} more/reduce")
            work = self._sum_joined(axis, flats, results)
        else:
            work = self._sum(self._axis.at(f"{name}/reduce"), flats[0], results[0])
        return [
            Summing(member.bucket, result, work, member.is_last)
            for member, result in zip(members, results, strict=True)
        ]

    def _sum_joined(self, axis: Axis, flats: Sequence[Tensor], results: list[Tensor]) -> Work:
        """Begin to sum flats as one; the work puts each sum into its result."""
        # Of a cut flat, row r is the r-th piece; of the joined one, it has the r-th pieces of all
        rows = axis.size if self._cut else 1
        joined = torch.cat([flat.view(rows, flat.numel() // rows) for flat in flats], 1).view(-1)
        total = joined.new_empty(joined.numel() // rows) if self._cut else joined
        # Each in a storage of its own, since an update may write over it
        sums = list(total.split_with_sizes([result.numel() for result in results]))
        return Then(self._sum(axis, joined, total), lambda: torch._foreach_copy_(results, sums))

    def _sum(self, axis: Axis, flat: Tensor, result: Tensor) -> Work:
        return axis.sum_to_pieces(result, flat) if self._cut else axis.sum(result)

    def _bytes_of(self, b: int) -> int:
        return self._buckets[b].numel * self._buckets[b].summed_in.itemsize
