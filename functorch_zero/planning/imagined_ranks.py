"""The ranks of a plan: groups that record their collectives, and the axes made of them."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..groups.counting import Call, MirrorGroup
from ..groups.labels import LabelledGroup
from ..groups.mesh import Axes, HybridGroup, SameData
from ..groups.protocol import Group, Work
from ..groups.signature import brought
from ..groups.work import Then
from .report import Collective
from .watch import MemoryWatch

_OF_NO_UNIT = {"step", "gradient", "loss", "optimizer", "unshard"}  # begins of labels


class Recorder(LabelledGroup):
    """Rank `rank` of `size`: every collective is recorded with its phase and unit. Tensors without
    values stay as they are; numbers become those of ranks that all have the same.

    Args:
        name: of these ranks, for people: "shard 4", say.
        swaps: whether a reduce-scatter takes room for the other ranks' slices, as over gloo.
    """

    def __init__(self, rank: int, size: int, watch: MemoryWatch, *, name: str, swaps: bool) -> None:
        super().__init__(MirrorGroup(rank, size))
        # All groups of a step share one watch, so that collectives keep one order
        self.watch, self.name, self.swaps = watch, name, swaps

    def at(self, label: str) -> Recorder:
        made = copy(self)
        made.label = label
        return made

    def _start(self, kind: str, *arguments: Any) -> Work:
        for memory, x in self._kinds_of(kind, *arguments):
            self.watch.adopt(memory, x)
        work: Work = getattr(self.inner, kind)(*arguments)
        self._note(Call.of(self, kind, *arguments))
        # One rank copies at once. A backend reads its input until `wait`, and has its room until
        # then
        if kind != "reduce_scatter" or self.size == 1:
            return work
        held = [brought(arguments)]
        # Over gloo each rank's slice arrives before they are added; two ranks swap halves in place
        if self.swaps and self.size > 2:
            held.append(held[0].new_empty(held[0].numel()))
        return Then(work, held.clear)

    def _kinds_of(self, call: str, out: Tensor, *others: Any) -> list[tuple[str, Tensor]]:
        """The kinds of memory of a collective's tensors, as far as they are any."""
        # Both count as gradients, for as long as somebody holds them
        if call == "reduce_scatter":
            return [("gradients", out), ("gradients", others[0])]
        # An update gathers, too, and those tensors are temporaries
        if call == "all_gather" and (self._in_pass or self._phase == "publish"):
            return [("gathered" if self._in_pass else "params", out)]
        # Others than those of a pass carry metrics and counts
        return [("gradients", out)] if call == "all_reduce" and self._in_pass else []

    @property
    def _in_pass(self) -> bool:
        return self._phase in ("forward", "backward")

    def _note(self, call: Call) -> None:
        """Tell the watch of a call. The label says where it belongs: "UNIT/..." or
        "UNIT[...]", or one of `_OF_NO_UNIT`."""
        # Labels are "blocks.0[float32]/gather", "step", "optimizer/..." and the like
        where = self.label.partition("/")[0].partition("[")[0]
        unit = "" if where in _OF_NO_UNIT else where
        self.watch.note(Collective(self._phase, unit=unit, group=self.name, **call._asdict()))

    @property
    def _phase(self) -> str:
        """The phase of a collective: by its label, where that names one, whatever is announced."""
        if self.label.startswith("optimizer/"):
            return "optimizer"
        # Of metrics that set out before backward, say
        last = self.label.rpartition("/")[2]
        return last if last in ("metrics", "publish") else self.watch.phase


def lone_rank(rank: int, size: int, shard_size: int | None, same_data: SameData | None) -> Group:
    """Rank `rank` of `size` without the others, for `shard`: of one axis, or of a mesh with
    `shard_size` ranks along its shard axis."""
    group = MirrorGroup(rank, size)
    if shard_size is not None:
        return HybridGroup(group, shard_size=shard_size, same_data=same_data)
    if same_data is not None:
        raise ValueError(
            f"same_data={same_data!r} names an axis of a mesh, and there is one axis only. "
            "Remedy: plan(..., shard_size=...)"
        )
    return group


def imagined(axes: Axes, watch: MemoryWatch, *, swaps: bool) -> Axes:
    """These axes, with recorders for their groups.

    Args:
        watch: that all of them tell.
        swaps: as for `Recorder`.
    """
    made: dict[int, Recorder] = {}  # by the id of a group, which may be that of several axes

    def recorder(group: Group, axis: str) -> Recorder:
        # The axis of one rank has no traffic
        name = f"{axis} {group.size}" if group.size > 1 else "itself"
        new = Recorder(group.rank, group.size, watch, name=name, swaps=swaps)
        return made.setdefault(id(group), new)

    shard, replicate = axes.shard, axes.replicate
    return replace(
        axes,
        world=recorder(axes.world, "all"),  # for metrics and agreement
        shard=replace(shard, group=recorder(shard.group, "shard")),
        replicate=replace(replicate, group=recorder(replicate.group, "replicate")),
        optimizer=recorder(axes.optimizer, "all"),
    )
