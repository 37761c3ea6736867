"""Reductions of gradients: those under way, their sums, and whole flats that add up before.

They are passive: `runtime/unit.py` says which flat is reduced, and when.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from torch import Tensor

from .._torch_private import profiler_enabled
from ..groups import labelled
from ..groups.mesh import Axes
from ..groups.protocol import Work
from ..layout.layout import Layout
from ..profiling import NOTHING, ranged


class Reduction(NamedTuple):
    """One bucket's reduction under way."""

    bucket: int
    result: Tensor  # (piece,), or (numel,) of a bucket that is not cut; ready when the work is done
    work: Work


class GradientReduction:
    """A step's gradients on their way to the optimizer, over all passes.

    A bucket in pieces is reduce-scattered along the shard axis, at every use of its unit or once
    per step. The results of several reductions add up; along the replicate axis the sum is reduced
    once, at the end. Ranks of the same data have the same gradients, and sum nothing; see Note
    [same data].

    Args:
        every_use: the buckets whose gradients are reduced at every use of their unit, and freed:
            those of levels 2 and 3, in pieces. The others' add up whole, and are reduced once per
            unit, in the last pass's backward.
        in_layout_order: start those in the reverse of the layout's order, each unit once, rather
            than in the order of uses: where nothing else is gathered or reduced in backward.
    """

    def __init__(
        self,
        layout: Layout,
        axes: Axes,
        log: list[str],
        *,
        every_use: frozenset[int] = frozenset(),
        in_layout_order: bool = False,
    ):
        self.every_use, self.in_layout_order = every_use, in_layout_order
        self.whole: dict[int, Tensor] = {}  # by bucket: (numel,), not reduced yet
        self._buckets, self._axes, self._log = layout.buckets, axes, log
        self._under_way: deque[list[Reduction]] = deque()  # one list per unit, the oldest first
        self._sums: dict[int, Tensor] = {}  # by bucket: (piece,) or (numel,), storage dtype

    def add(self, b: int, flat: Tensor) -> None:
        """Add gradients (numel,) to the bucket's whole ones, in the storage dtype from the second
        on."""
        if b in self.whole:
            flat = self.whole[b].to(self._buckets[b].dtype).add_(flat)
        self.whole[b] = flat

    def make_room(self, num_under_way: int) -> None:
        """Wait until another unit's reductions may start, so that no more than so many units' are
        under way. That unit's come next."""
        if self._under_way and not self._under_way[-1]:
            self._under_way.pop()  # of a unit that had nothing to reduce
        self.settle(leaving=num_under_way - 1)
        self._under_way.append([])

    def start(self, b: int, flat: Tensor) -> None:
        """Begin to reduce whole gradients (numel,) of a bucket.

        `flat` is given away; one of level 2 or 3 is only read.
        """
        bucket = self._buckets[b]
        self._log.append("reduce " + bucket.name)
        with ranged("reduce", bucket.name) if profiler_enabled() else NOTHING:
            flat = flat.to(bucket.reduce)
            if self._is_cut(b):
                shard = self._axes.shard.at(self._label(b))
                result = flat.new_empty(flat.numel() // shard.size)
                work = shard.sum_to_pieces(result, flat)
            else:
                result = flat
                work = labelled(self._axes.data, self._label(b)).all_reduce(flat)
        self._under_way[-1].append(Reduction(b, result, work))

    def settle(self, *, leaving: int = 0) -> None:
        """Wait for the oldest units' reductions, and let go of their flats. Those of the newest
        `leaving` units stay under way."""
        while len(self._under_way) > leaving:
            unit = self._under_way[0]
            while unit:
                b, result, work = unit.pop(0)
                bucket = self._buckets[b]
                with ranged("wait for reduce", bucket.name) if profiler_enabled() else NOTHING:
                    work.wait()
                result = result.to(bucket.dtype)
                self._sums[b] = self._sums[b].add_(result) if b in self._sums else result
            self._under_way.popleft()

    def finish(self) -> dict[int, Tensor]:
        """The sums over all ranks by bucket, (piece,) or (numel,); buckets nobody reduced are
        missing."""
        self.settle()
        sums, self._sums = self._sums, {}  # given away
        replicate = self._axes.replicate
        if replicate.size > 1 and (replicate.holds_different_data or self._axes.both):
            self._sum_over_replicas(sums)
        return sums

    def _sum_over_replicas(self, sums: dict[int, Tensor]) -> None:
        """Pieces of sums along the shard axis -> the same of sums over all ranks, in place."""
        sent = {}  # by bucket: (piece,) in the dtype of reductions; lives until all is done
        for b, piece in sums.items():
            if self._is_cut(b):
                sent[b] = piece.to(self._buckets[b].reduce)
        started = [self._over_replicas(b, piece) for b, piece in sent.items()]
        for reduction in started:
            reduction.work.wait()
            sums[reduction.bucket] = reduction.result.to(self._buckets[reduction.bucket].dtype)

    def _over_replicas(self, b: int, piece: Tensor) -> Reduction:
        """Of a sum along the shard axis (piece,), reduce this rank's part or, if state is not cut
        along the replicate axis, all of it."""
        replicate = self._axes.replicate.at(self._label(b))
        if not self._axes.both:
            return Reduction(b, piece, replicate.sum(piece))
        part = piece.new_empty(piece.numel() // replicate.size)
        return Reduction(b, part, replicate.sum_to_pieces(part, piece))

    def _label(self, b: int) -> str:
        return f"{self._buckets[b].name}/reduce"

    def _is_cut(self, b: int) -> bool:
        return self._buckets[b].cut.level > 0
