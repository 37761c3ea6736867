"""The ranks of a plan: groups that record their collectives and do nothing else, and the axes made
of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ..groups.counting import RecordingGroup
from ..groups.labels import LabelledGroup
from ..groups.mesh import Axes, SameData, axes_of, check_same_data, mesh_axes
from ..groups.protocol import Done, ReduceOp, Work
from ..sharded.options import check_state_axes
from ..tree import has_values
from .report import Collective

_OF_NO_UNIT = {"step", "gradient", "loss", "optimizer", "unshard"}  # begins of labels
Notice = Callable[[str, Tensor], None]  # (kind of memory, a tensor of that kind)


class Journal:
    """The one record of a step, which the groups of all its axes write to.

    Attributes:
        phase: of the step: "forward", "backward", "metrics", "buffers", "optimizer" or "publish";
            of a program also "program", between those.
        unit: the name of the one in use; "" for none.
        recorded: the collectives so far.
        notice: told which tensors hold gathered params and gradients.
        on_call: told of each collective.
    """

    def __init__(self) -> None:
        self.phase = "forward"
        self.unit = ""
        self.recorded: list[Collective] = []
        # Until an imagined step listens
        self.notice: Notice = lambda kind, tensor: None
        self.on_call: Callable[[Collective], None] = lambda collective: None

    def enter(self, phase: str) -> None:
        """The next phase of the step."""
        self.phase, self.unit = phase, ""


class Recorder(LabelledGroup):
    """Rank `rank` of `size`: every collective is recorded with its phase and unit, and leaves its
    tensors as they are.

    Args:
        name: of these ranks, for people: "shard 4", say.
        swaps: whether a reduce-scatter takes room for the other ranks' slices, as over gloo.
    """

    def __init__(
        self, rank: int, size: int, journal: Journal, *, name: str, swaps: bool, label: str = ""
    ) -> None:
        super().__init__(_Silent(rank, size), label)
        # All groups of a step share one journal, so that collectives keep one order
        self.journal, self.name, self.swaps = journal, name, swaps
        self._counting = RecordingGroup(self.inner)  # which knows the bytes that each call sends

    def at(self, label: str) -> Recorder:
        return Recorder(
            self.rank, self.size, self.journal, name=self.name, swaps=self.swaps, label=label
        )

    def all_gather(self, out: Tensor, piece: Tensor) -> Work:
        if self._in_pass:  # an update gathers, too, and those tensors are temporaries
            self.journal.notice("gathered", out)
        elif self._phase == "publish":
            self.journal.notice("params", out)
        # Outputs stay as they are: on tensors without values there is nothing to write
        return self._noted(self._counting.all_gather(out, piece))

    def reduce_scatter(self, out: Tensor, whole: Tensor) -> Work:
        # Both count as gradients, for as long as somebody holds them
        self.journal.notice("gradients", out)
        self.journal.notice("gradients", whole)
        noted = self._noted(self._counting.reduce_scatter(out, whole))
        if self.size == 1:  # a copy, made at once
            return noted
        # Over gloo each rank's slice arrives before they are added; two ranks swap halves in place
        takes_room = self.swaps and self.size > 2
        # A backend reads its input until `wait`, and has its room until then
        return _Holding(whole, whole.new_empty(whole.numel()) if takes_room else None)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        if has_values(tensor) and op == "sum":
            tensor.mul_(self.size)  # as if every rank had the same numbers
        # In a pass an all-reduce is of gradients; others carry metrics and counts
        if self._in_pass:
            self.journal.notice("gradients", tensor)
        return self._noted(self._counting.all_reduce(tensor, op))

    def all_to_all(
        self, out: Tensor, out_sizes: Sequence[int], source: Tensor, in_sizes: Sequence[int]
    ) -> Work:
        return self._noted(self._counting.all_to_all(out, out_sizes, source, in_sizes))

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        return self._noted(self._counting.broadcast(tensor, source))

    @property
    def _in_pass(self) -> bool:
        return self._phase in ("forward", "backward")

    def _noted(self, work: Work) -> Work:
        """Put the last call into the journal. The label says where it belongs: "UNIT/..." or
        "UNIT[...]", or one of `_OF_NO_UNIT`."""
        # Labels are "blocks.0[float32]/gather", "step", "optimizer/..." and the like
        where = self.label.partition("/")[0].partition("[")[0]
        call = self._counting.calls[-1]  # `RecordingGroup` has just put it there
        collective = Collective(
            phase=self._phase,
            kind=call.kind,
            unit="" if where in _OF_NO_UNIT else where,
            dtype=call.dtype,
            num_elements=call.num_elements,
            sent_bytes=call.sent_bytes,
            group=self.name,
        )
        self.journal.recorded.append(collective)
        self.journal.on_call(collective)
        return work

    @property
    def _phase(self) -> str:
        """The phase of a collective: by its label, where that names one, whatever is announced."""
        if self.label.startswith("optimizer/"):
            return "optimizer"
        # Of metrics that set out before backward, say
        last = self.label.rpartition("/")[2]
        return last if last in ("metrics", "publish") else self.journal.phase


def imagined_axes(
    rank: int,
    size: int,
    journal: Journal,
    shard_size: int | None,
    state_axes: str,
    *,
    swaps: bool,
    same_data: SameData | None = None,
) -> Axes:
    """The groups of rank `rank` of `size`: of one axis, or of a mesh with `shard_size` ranks along
    its shard axis.

    Args:
        journal: the record that all of them write to.
        state_axes, same_data: as for `plan`.
        swaps: as for `Recorder`.
    """

    def group(rank: int, size: int, axis: str) -> Recorder:
        name = f"{axis} {size}" if size > 1 else "itself"  # the axis of one rank has no traffic
        return Recorder(rank, size, journal, name=name, swaps=swaps)

    # For metrics and agreement
    world = group(rank, size, "all")
    both = check_state_axes(state_axes) == "both"
    check_same_data(same_data)
    if shard_size is None:
        if same_data is not None:
            raise ValueError(
                f"same_data={same_data!r} names an axis of a mesh, and there is one axis only. "
                "Remedy: plan(..., shard_size=...)"
            )
        return axes_of(world, both=both)
    if shard_size < 1 or size % shard_size:
        raise ValueError(
            f"shard_size must divide the number of ranks, {size}, so that all replicas are alike; "
            f"got {shard_size}"
        )
    # As of `HybridGroup`: rank = replica * shard_size + place
    replica, place = divmod(rank, shard_size)
    num_replicas = size // shard_size
    shard = group(place, shard_size, "shard")
    replicate = group(replica, num_replicas, "replicate")
    # In the order of `HybridGroup.by_piece`
    optimizer = group(place * num_replicas + replica, size, "all") if both else shard
    return mesh_axes(world, shard, replicate, optimizer, same_data)


def imagined_like(axes: Axes, journal: Journal, *, swaps: bool) -> Axes:
    """Axes of the same sizes, for the rank with the same pieces."""
    return imagined_axes(
        axes.replicate.rank * axes.shard.size + axes.shard.rank,
        axes.world.size,
        journal,
        axes.shard.size if axes.mesh else None,
        "both" if axes.both else "shard",
        swaps=swaps,
        same_data=next(iter(axes.of_same_data), None),
    )


class _Holding:
    """Finished work that holds tensors until it is waited for, as a backend does."""

    def __init__(self, *tensors: Tensor | None) -> None:
        self._tensors = tensors

    def wait(self) -> None:
        self._tensors = ()


class _Silent:
    """A group whose collectives do nothing."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_gather(self, out: Tensor, piece: Tensor) -> Work:
        return Done()

    def reduce_scatter(self, out: Tensor, whole: Tensor) -> Work:
        return Done()

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        return Done()

    def all_to_all(
        self, out: Tensor, out_sizes: Sequence[int], source: Tensor, in_sizes: Sequence[int]
    ) -> Work:
        return Done()

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        return Done()

    def exchange(self, payload: bytes) -> list[bytes]:
        return [payload] * self.size

    def barrier(self) -> None:
        return None

    def fail(self, error: BaseException) -> None:
        return None
