"""Reductions of gradients: those under way, their sums, and whole flats that add up before.

They are passive: `runtime/unit.py` says which flat is reduced, and when.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._torch_private import profiler_enabled, version_of
from ..compress import Codec, decoded, encoded, rounded
from ..devices import divided
from ..errors import StructureError
from ..groups import Then, labelled
from ..groups.mesh import Axes, Axis
from ..groups.protocol import Group, Work
from ..layout.extent import Rows
from ..layout.layout import Bucket, Layout
from ..places import Place, moved
from ..profiling import NOTHING, ranged
from .together import Summing, Together

# How a tensor that a reduction keeps of a bucket is carried to another number of ranks
Carried = Literal[
    "sum",  # (numel,), each rank's own, of which the sum over ranks counts: a rounding error
    "pieces",  # (piece,), cut as the optimizer's state of the bucket is
    "same",  # the same on every rank, of a shape that does not depend on their number
]
Kept = Mapping[str, Tensor]  # the tensors that a reduction keeps for one bucket, by name


class Started(NamedTuple):
    """A reduction under way. The tensors are ready when the work is done."""

    result: Tensor  # the sum: (piece,), or (numel,) of a bucket that is not cut; any dtype
    work: Work
    kept: Kept  # for the next one, in tensors of its own


@runtime_checkable
class Reduction(Protocol):
    """How a bucket's gradients are summed over ranks: a seam, `shard(reduction=...)`.

    Between steps, `State.parts` holds the tensors that it keeps, per trained bucket. A rank has no
    other memory of earlier steps: an object is given to several steps, and a step may be repeated.

    Attributes:
        keeps: the names of the tensors that it keeps, and how each is carried; empty: none.
    """

    keeps: Mapping[str, Carried]

    def init(self, bucket: Bucket, device: torch.device) -> Kept:
        """The tensors kept for a bucket before the first reduction, one per name in `keeps`. No
        communication.

        The shape of a tensor follows from how it is carried. Its dtype is free. Padding must be 0.
        """
        ...

    def start(self, flat: Tensor, kept: Kept, group: Group, *, cut: bool) -> Started:
        """Begin to sum a bucket's gradients over the ranks of a group, whose data differ.

        All ranks call this in the same order, once per use of a unit or once per step; see
        `GradientReduction`. Any collectives of the group may be started here, the same on every
        rank; none in the `wait` of the work, to which ranks come at different moments. A plan calls
        this with tensors without values.

        Args:
            flat: this rank's gradients (numel,), in the dtype of reductions, times the share of its
                data in the mean; where nothing is kept, and the loss gives a weight, times that.
                Where `cut`, it is only read; else it is given away.
            kept: from `init` or the start before. It is only read: it may belong to a state that
                stays valid, and the next one is dropped where the step is skipped.
            group: where `cut`, the ranks of the shard axis; pieces are then summed along the
                replicate axis as they are. Else all ranks with data of their own.
            cut: whether the result is this rank's piece, the `group.rank`-th of `group.size` equal
                ones.
        """
        ...


class Summed:
    """Gradients summed as they are: one reduce-scatter per bucket in pieces, else one all-reduce.
    The default."""

    keeps: Mapping[str, Carried] = {}

    def init(self, bucket: Bucket, device: torch.device) -> Kept:
        return {}

    def start(self, flat: Tensor, kept: Kept, group: Group, *, cut: bool) -> Started:
        # In place: a flat that is not cut was given away
        if not cut:
            return Started(flat, group.all_reduce(flat), kept)
        result = flat.new_empty(flat.numel() // group.size)  # (piece,)
        return Started(result, group.reduce_scatter(result, flat), kept)


SUMMED = Summed()


def sum_encoded(flat: Tensor, codec: Codec, group: Group) -> tuple[Tensor, Work]:
    """Begin to sum flats (numel,) over ranks into equal pieces (piece,), one on each: every rank's
    are rounded once, and what has arrived is added up.

    One all-to-all of messages. A flat that can't be cut at blocks is filled up with zeros.
    """
    num, dtype = group.size, flat.dtype
    if missing := -flat.numel() % (num * codec.block):
        flat = pad(flat, (0, missing))
    sent = encoded(flat, codec, num)  # (num * m,)
    arrived, sizes = torch.empty_like(sent), [sent.numel() // num] * num
    result = flat.new_empty(flat.numel() // num)

    def add_up() -> None:
        torch.sum(decoded(arrived, codec, num, dtype).view(num, -1), 0, out=result)

    return result, Then(group.all_to_all(arrived, sizes, sent, sizes), add_up)


def _fault_of(started: Any, length: int, kept: Kept) -> tuple[str, str, Any] | None:
    """The first thing that isn't as a reduction must return it: its name, the form it must have,
    and what there is; None: all is well."""
    if not isinstance(started, tuple) or len(started) != len(Started._fields):
        return "its results", "Started(result, work, kept)", started
    result, work, new = started
    if not isinstance(result, Tensor) or result.shape != (length,):
        return "the sum", f"a tensor of shape ({length},)", result
    if not callable(getattr(work, "wait", None)):
        return "the work", "an object with wait(), as collectives return it", work
    if not isinstance(new, Mapping) or new.keys() != kept.keys():
        return "the tensors to keep", f"a dict with {sorted(kept)}", new
    for name, x in kept.items():
        if _form_of(new[name]) != _form_of(x):
            return f"kept[{name!r}]", _form_of(x), new[name]
    return None


def _form_of(x: Any) -> str:
    """A tensor without its values, or the type of what is none."""
    if not isinstance(x, Tensor):
        return type(x).__name__
    return f"a tensor of shape {tuple(x.shape)}, {x.dtype} on {x.device}"


class GradientReduction:
    """A step's gradients on their way to the optimizer, over all passes.

    A bucket in pieces is reduce-scattered along the shard axis, at every use of its unit or once
    per step. The results of several reductions add up. Along the replicate axis the sum is reduced
    once, as soon as it is complete: while backward goes on with other units. Ranks of the same data
    have the same gradients, and sum nothing; see Note [same data].

    Small buckets of levels 0 to 2 may be summed together. One that waits for others is not under
    way yet: nobody waits for it before `finish`, which lets all leave.

    Args:
        layout, axes: the step's.
        log: takes an entry for each reduction that is started; ranks compare their logs.
        every_use: the buckets whose gradients are reduced at every use of their unit, and freed:
            those of levels 2 and 3, in pieces, unless all are to be reduced once per step. The
            others' add up whole, and are reduced once per unit, in the last pass's backward.
        in_layout_order: start the whole ones in the reverse of the layout's order, each unit once,
            rather than in the order of uses: where nothing else is gathered or reduced in backward.
        by: how a bucket is summed along the shard axis, or over all data where it is not cut.
        kept: the tensors that `by` has kept, by bucket.
        num_bytes: of gradients that are summed as one, where they are summed as they are; 0: each
            bucket's by itself.
        places: by bucket, that of gradients that add up, and of their sums; None: memory of the
            device. (): all lie there.
        in_rows: the tables whose sums are left as rows; those of others are made dense.

    Attributes:
        kept: those that it keeps for the next step, by bucket, once the reduction is finished.
        divisor: of gradients before they are reduced, 0-d; None: they are reduced as they are.
    """

    def __init__(
        self,
        layout: Layout,
        axes: Axes,
        log: list[str],
        *,
        every_use: frozenset[int] = frozenset(),
        in_layout_order: bool = False,
        by: Reduction = SUMMED,
        kept: Mapping[int, Kept] | None = None,
        num_bytes: int = 0,
        places: Sequence[Place | None] = (),
        in_rows: frozenset[int] = frozenset(),
    ):
        self._by = by
        self._places = places or [None] * len(layout.buckets)
        # A copy: a step that is repeated begins with the same tensors
        self.kept: dict[int, Kept] = {} if kept is None else {**kept}
        self.divisor: Tensor | None = None
        self.every_use, self.in_layout_order = every_use, in_layout_order
        self.whole: dict[int, Tensor] = {}  # by bucket: (numel,), not reduced yet
        self._buckets, self._axes, self._log = layout.buckets, axes, log
        self._under_way: deque[list[Summing]] = deque()  # one list per unit, the oldest first
        self._in_place: list[Summing] = []  # under way, too; see `_stays`
        # By bucket, in the storage dtype: this rank's slice along the shard axis, or (numel,)
        self._sums: dict[int, Tensor] = {}
        # The same of tables that are left as rows
        self._rows: dict[int, Rows] = {}
        self._in_rows = in_rows
        self._complete: set[int] = set()  # buckets whose sums along the shard axis lack nothing
        self._second: list[Summing] = []  # what follows on such sums: see `_go_on`
        self._num_bytes = num_bytes
        # By the axis, the dtype, and whether buckets are joined
        self._together: dict[tuple[str, torch.dtype, bool], Together] = {}

    @property
    def keeps(self) -> bool:
        """Whether tensors of these gradients are kept for the next ones."""
        return bool(self._by.keeps)

    @property
    def reduces_before_the_end(self) -> bool:
        """Whether gradients are reduced before the last pass."""
        return any(self._buckets[b].trainable for b in self.every_use)

    def follows_uses(self, last: bool) -> bool:
        """Whether the order of a pass's reductions follows from the units that its loss uses."""
        return not self.in_layout_order and (last or bool(self.every_use))

    def add(self, b: int, flat: Tensor) -> None:
        """Add gradients (numel,) to the bucket's whole ones, in the storage dtype from the second
        on."""
        if b in self.whole:
            # One micro-batch keeps the dtype of reductions; sums are made in the storage dtype
            flat = self.whole[b].to(self._buckets[b].dtype).add_(flat)
        self.whole[b] = moved(self._places[b], flat)

    def add_rows(self, b: int, rows: Tensor, grads: Tensor) -> None:
        """Add gradients (m, columns) that have come from other ranks to the sum of a table's rows
        here, (rows * columns,). Numbers of rows may come several times."""
        self._log.append("reduce " + self._buckets[b].name)
        bucket = self._buckets[b].held
        if b in self._in_rows:
            if b not in self._rows:
                num_rows = bucket.extent(0, self._axes.shard.rank).num_here // grads.shape[1]
                none = grads.new_zeros(0, grads.shape[1], dtype=bucket.dtype)
                self._rows[b] = Rows(rows[:0], none, num_rows)
            self._rows[b] = self._rows[b].plus(rows, grads)
            return
        if b not in self._sums:
            zeros = grads.new_zeros(bucket.piece, dtype=bucket.dtype)
            self._sums[b] = moved(self._places[b], zeros)
        into = self._sums[b].view(-1, grads.shape[1])
        into.index_add_(0, rows, grads.to(bucket.dtype))

    def make_room(self, num_under_way: int, buckets: Sequence[int]) -> None:
        """Wait until another unit's reductions, of these buckets, may start, so that those of at
        most `num_under_way` units are under way. The reductions started next are that unit's."""
        if buckets and all(map(self._would_wait, buckets)):
            return
        if self._under_way and not self._under_way[-1]:
            self._under_way.pop()  # of a unit that had nothing to reduce
        # That leaves room for the unit to come
        self.settle(leaving=num_under_way - 1)
        self._under_way.append([])
        # Here every rank is between the same collectives; it settles at moments of its own
        self._go_on(self._complete)
        self._complete.clear()

    def start(self, b: int, flat: Tensor, *, is_last: bool) -> None:
        """Begin to reduce whole gradients (numel,) of a bucket.

        Args:
            flat: given away: level 0 reduces in place. One of level 2 or 3 is only read, since it
                may be autograd's own.
            is_last: whether no more gradients of the bucket are expected in this step. Some may
                come all the same, from a custom function's backward; they add up apart.
        """
        bucket = self._buckets[b]
        # The log is compared across ranks, so an entry comes before its collective
        self._log.append("reduce " + bucket.name)
        with ranged("reduce", bucket.name) if profiler_enabled() else NOTHING:
            if self.divisor is not None:
                flat = divided(flat, self.divisor)
            # Rounded here, unless it is in the dtype of reductions already
            cut, flat, shard = self._is_cut(b), flat.to(bucket.summed_in), self._axes.shard
            if self._is_joined(b):
                if not self._under_way:  # `make_room` has left all room for what waits
                    self._under_way.append([])
                self._under_way[-1] += self._together_of(b).add(b, flat, is_last=is_last)
                return
            group = labelled(shard.group if cut else self._axes.data, self._label(b))
            # Ranks of the same data have equal gradients: each takes its piece, nothing is summed
            if cut and not shard.holds_different_data:
                result = flat.new_empty(flat.numel() // shard.size)
                work = shard.sum_to_pieces(result, flat)
                result = rounded(result, bucket.reduce)
            elif bucket.codec is not None:
                result, work = sum_encoded(flat, bucket.codec, group)
            else:
                kept = self.kept.get(b, {})
                versions = [version_of(x) for x in kept.values()]
                # A flat that is not cut is given away
                length = flat.numel() // group.size if cut else flat.numel()
                started = self._by.start(flat, kept, group, cut=cut)
                if self._by is not SUMMED:  # it is the user's
                    self._check_read_only(bucket, kept, versions)
                    self._check_started(bucket, started, length, kept)
                result, work, self.kept[b] = started
        under_way = self._in_place if self._stays(b) else self._under_way[-1]
        under_way.append(Summing(b, result, work, is_last))

    def _check_read_only(self, bucket: Bucket, kept: Kept, versions: list[int]) -> None:
        """Raise if the reduction has written to what it keeps, since they had these versions."""
        for (name, x), version in zip(kept.items(), versions, strict=True):
            if version_of(x) != version:
                raise StructureError(
                    f"{type(self._by).__name__}.start has written to kept[{name!r}] in place, "
                    "and the state that it belongs to has changed with it",
                    path=bucket.name,
                    rank=self._axes.world.rank,
                    remedy="return a new tensor, kept[name] + ... instead of kept[name] += ...",
                )

    def _check_started(self, bucket: Bucket, started: Any, length: int, kept: Kept) -> None:
        """Raise unless the reduction has returned a sum of this length, its work, and tensors to
        keep that are as those before."""
        fault = _fault_of(started, length, kept)
        if fault is None:
            return
        name, (what, expected, got) = type(self._by).__name__, fault
        raise StructureError(
            f"{name}.start has returned {what} in another form than it must have",
            path=bucket.name,
            expected=expected,
            got=sorted(map(str, got)) if isinstance(got, Mapping) else _form_of(got),
            rank=self._axes.world.rank,
            remedy=f"return Started(result, work, kept), with tensors as {name}.init makes "
            "them in kept",
        )

    def settle(self, *, leaving: int = 0) -> None:
        """Wait for the oldest units' reductions, and let go of their flats. Those of the newest
        `leaving` units stay under way."""
        while len(self._under_way) > leaving:
            # One by one from the front, so that each flat goes as soon as its work is done
            unit = self._under_way[0]
            while unit:
                reduction = unit.pop(0)
                self._wait_for(reduction)
                if reduction.is_last:
                    self._complete.add(reduction.bucket)
            self._under_way.popleft()

    def finish(self) -> dict[int, Tensor | Rows]:
        """The sums over all ranks by bucket, (piece,), (numel,) or rows; buckets nobody reduced are
        missing."""
        self._under_way.append(self._in_place + self._leave(over_replicas=False))
        self.settle()
        # Rows came undivided, since those of early micro-batches can't be divided yet
        divisor, found = self.divisor, self._rows
        for b, dense in self._sums.items():
            if divisor is not None and self._buckets[b].cut.by_rows:
                self._sums[b] = divided(dense, divisor)
        if divisor is not None:
            found = {b: rows.map(lambda x: divided(x, divisor)) for b, rows in found.items()}
        self._go_on(self._sums)
        self._second += self._leave(over_replicas=True)
        for reduction in self._second:
            self._wait_for(reduction)
        sums, self._sums = self._sums, {}  # given away
        return {**sums, **found}

    def _wait_for(self, reduction: Summing) -> None:
        """Wait for a reduction, and add its result to the bucket's sum."""
        b, result, work, _ = reduction
        bucket = self._buckets[b]
        with ranged("wait for reduce", bucket.name) if profiler_enabled() else NOTHING:
            work.wait()
        # Sums over passes are made in the storage dtype, which the optimizer sees
        result = result.to(bucket.dtype)
        if b in self._sums:
            self._sums[b].add_(result)
        else:
            self._sums[b] = moved(self._places[b], result)

    def _go_on(self, buckets: Iterable[int]) -> None:
        """Begin what follows on sums along the shard axis, or of encoded gradients of level 0. They
        leave the sums, and come back by `_wait_for`.

        Other sums of level 0 stay: they were made over all data at once.
        """
        replicate, both = self._axes.replicate, self._axes.both
        # With `both`, equal data still leave each rank a smaller piece to take
        over_replicas = replicate.size > 1 and (replicate.holds_different_data or both)
        # In one order on every rank
        for b in sorted(buckets):
            bucket, is_cut = self._buckets[b], self._is_cut(b)
            if is_cut and over_replicas:
                # In the dtype of reductions; with `both`, as many pieces as there are replicas
                part = self._sums.pop(b).to(bucket.summed_in)
                begun = self._together_along(replicate, b, cut=both).add(b, part, is_last=True)
            elif not is_cut and bucket.codec is not None:
                begun = [self._gather_sum(b, self._sums.pop(b))]
            else:
                continue
            self._second += begun

    def _gather_sum(self, b: int, part: Tensor) -> Summing:
        """Begin to gather a sum (numel,) from the parts that ranks have of it, without a codec."""
        group, numel = labelled(self._axes.data, self._label(b)), self._buckets[b].numel
        arriving = part.new_empty(group.size * part.numel())
        work = group.all_gather(arriving, part)
        if arriving.numel() == numel:
            return Summing(b, arriving, work, is_last=True)
        # Flats lie alone in their storage
        result = part.new_empty(numel)
        copied = Then(work, lambda: result.copy_(arriving[:numel]))
        return Summing(b, result, copied, is_last=True)

    def _is_joined(self, b: int) -> bool:
        """Whether the bucket may be summed together with others."""
        bucket = self._buckets[b]
        return self._num_bytes > 0 and bucket.cut.level < 3 and bucket.codec is None

    def _stays(self, b: int) -> bool:
        """Whether the bucket's sum is left in its flat, as at level 0: then nobody waits for it
        before the end, since that would free no memory."""
        bucket = self._buckets[b]
        is_kept = bucket.codec is None and bucket.summed_in == bucket.dtype
        return self._by is SUMMED and is_kept and not self._is_cut(b) and self._places[b] is None

    def _would_wait(self, b: int) -> bool:
        """Whether the bucket's gradients would wait for others, and start no collective."""
        return self._is_joined(b) and self._together_of(b).has_room_for(b)

    def _together_of(self, b: int) -> Together:
        """The buckets that this one is summed with first."""
        cut = self._is_cut(b)
        axis = self._axes.shard if cut else Axis("data", self._axes.data)
        return self._together_along(axis, b, cut=cut)

    def _together_along(self, axis: Axis, b: int, *, cut: bool) -> Together:
        """The buckets that this one is summed with along an axis."""
        is_joined = self._is_joined(b)
        key = axis.name, self._buckets[b].summed_in, is_joined
        if key not in self._together:
            num_bytes = self._num_bytes if is_joined else 0
            self._together[key] = Together(self._buckets, axis, cut=cut, num_bytes=num_bytes)
        return self._together[key]

    def _leave(self, *, over_replicas: bool) -> list[Summing]:
        """Begin to sum all that waits for others: along the replicate axis, or the one before."""
        begun = []
        for (axis, _, _), together in self._together.items():
            if (axis == "replicate") == over_replicas:
                begun += together.leave()
        return begun

    def _label(self, b: int) -> str:
        return f"{self._buckets[b].name}/reduce"

    def _is_cut(self, b: int) -> bool:
        # From level 1 on gradients are cut, though params may be held whole
        return self._buckets[b].cut.level > 0
