"""A step without its loss: what units gather and reduce, and the memory this takes, from the layout alone.

It supposes what a loss that is not there can't say: units are entered once each, in the layout's order, and all of
them take part in backward. `needs_params` says whose backward needs the unit's params.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..groups.counting import Call
from ..layout import Bucket, Layout, Unit
from ..levels import Level
from .recording import Recorder
from .records import Sample
from .sizes import piece_bytes, whole_bytes


def saved_by_names(layout: Layout) -> Callable[[Unit], int]:
    """Linear maps, convolutions and norms need their weights and not their biases."""

    def num_saved(unit: Unit) -> int:
        leaves = [layout.leaves[n] for b in unit.buckets for n in layout.buckets[b].leaves]
        return sum(not leaf.path.rpartition(".")[2].startswith("bias") for leaf in leaves)

    return num_saved


class DerivedPass:
    """Forward and backward of a step in its steady state, when each unit's successor is known.

    Args:
        num_saved: how many leaves a unit's backward needs: with none it is not gathered again, with one the next
            gather starts after its reduction, with more before it.
        base: bytes of params and optimizer state, held all the time.
    """

    def __init__(
        self,
        layout: Layout,
        level: Level,
        group: Recorder,
        *,
        keeps: bool,
        num_saved: Callable[[Unit], int],
        base: tuple[int, int],
    ):
        self._layout, self._level, self._group, self._keeps = layout, level, group, keeps
        self._num_saved, self._base = num_saved, base
        self.samples: list[Sample] = []
        self._gathered: dict[str, int] = {}
        self._reduced = 0  # bytes of reduced gradients so far
        self._first = True  # whether gradients have no others to be added to

    def run(self, accumulate: int = 1) -> list[Sample]:
        """Record the collectives, and return the memory from unit to unit."""
        for i in range(accumulate):
            self._forward()
            self._group.phase = "backward"
            units = self._layout.units
            for k in range(len(units) - 1, -1, -1):
                following = next((u for u in reversed(units[:k]) if self._needs(u)), None)
                self._backward(units[k], following, last=i == accumulate - 1)
            if i == 0:
                self._first = False
        return self.samples

    def _forward(self) -> None:
        self._group.phase = "forward"
        units = self._layout.units
        for unit, after in zip(units, (*units[1:], None), strict=True):
            self._gather(unit)
            if after is not None:
                self._gather(after)
            self._sample(f"forward of {name_of(unit)}")
            if not self._keeps and not (after is None and self._needs(unit)):
                self._gathered.pop(unit.name, None)

    def _needs(self, unit: Unit) -> bool:
        return self._num_saved(unit) > 0

    def _backward(self, unit: Unit, following: Unit | None, *, last: bool) -> None:
        trained = [self._layout.buckets[b] for b in unit.buckets if self._layout.buckets[b].trainable]
        leaves = sum(whole_bytes(b, self._layout) for b in trained)
        if self._needs(unit):
            self._gather(unit)
        early = following is not None and self._num_saved(unit) > 1
        if early and following is not None:
            self._gather(following)
        self._sample(f"backward of {name_of(unit)}", leaves)
        self._gathered.pop(unit.name, None)
        if last or self._level.streams:
            for bucket in trained:
                self._reduce(unit, bucket)
        room = max((self._room(b) for b in trained), default=0)
        self._sample(f"reduction of {name_of(unit)}", leaves + room)
        if self._first:
            self._reduced += sum(self._kept(b) for b in trained)
        if following is not None and not early:
            self._gather(following)

    def _gather(self, unit: Unit) -> None:
        if not self._level.cuts_params or unit.name in self._gathered or (self._keeps and self._in_backward):
            return
        for bucket in self._buckets(unit):
            record_bucket(self._group, "all_gather", unit, bucket, 1)
        self._gathered[unit.name] = sum(whole_bytes(b, self._layout) for b in self._buckets(unit))

    @property
    def _in_backward(self) -> bool:
        return self._group.phase == "backward"

    def _reduce(self, unit: Unit, bucket: Bucket) -> None:
        if self._level.cuts_state:
            record_bucket(self._group, "reduce_scatter", unit, bucket, 1)
        else:
            record_bucket(self._group, "all_reduce", unit, bucket, 2)

    def _room(self, bucket: Bucket) -> int:
        """While a bucket's gradients are reduced: the packed flat, the piece, and over gloo what others sent."""
        whole = whole_bytes(bucket, self._layout)
        if not self._level.cuts_state:
            return whole
        return whole + piece_bytes(bucket) + (whole if self._group.size > 2 else 0)

    def _kept(self, bucket: Bucket) -> int:
        """What is left of a bucket's gradients after its reduction."""
        return piece_bytes(bucket) if self._level.cuts_state else whole_bytes(bucket, self._layout)

    def _buckets(self, unit: Unit) -> Iterator[Bucket]:
        return (self._layout.buckets[b] for b in unit.buckets)

    def _sample(self, moment: str, gradients: int = 0) -> None:
        self.samples.append(Sample(moment, *self._base, self._reduced + gradients, sum(self._gathered.values()), 0))


def record_bucket(group: Recorder, kind: str, unit: Unit, bucket: Bucket, times: int) -> None:
    """Record a collective of a whole bucket, which sends `times` its bytes * (N - 1) / N."""
    nbytes = group.size * piece_bytes(bucket) if kind != "all_reduce" else piece_bytes(bucket)
    group.log.append(f"{kind} {name_of(unit)}")
    num_elements = nbytes // bucket.dtype.itemsize
    group.note(Call(kind, bucket.dtype, num_elements, times * nbytes * (group.size - 1) / group.size))


def record_publishing(group: Recorder, layout: Layout, level: Level) -> None:
    """Levels 1 and 2: an all-gather a trained bucket after the update."""
    group.phase = "publish"
    if not level.cuts_state or level.cuts_params:
        return
    for unit in layout.units:
        for b in unit.buckets:
            if layout.buckets[b].trainable:
                record_bucket(group, "all_gather", unit, layout.buckets[b], 1)


def name_of(unit: Unit) -> str:
    """A unit's name, or the root's."""
    return unit.name or "root"
