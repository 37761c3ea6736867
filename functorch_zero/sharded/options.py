"""`Options`: the arguments of `shard`, checked."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor

from ..groups.mesh import Axes
from ..groups.protocol import Group
from ..layout.build import make_layout
from ..layout.layout import Cut, Layout
from ..layout.levels import Levels
from ..layout.sharding import Sharding
from ..runtime.prefetch import Overlap
from ..tree import PyTree
from .buffers import SyncBuffers


class StatePlace(NamedTuple):
    """Where a rank's part of a state lies; as in `Sharding`."""

    level: int | None
    num_pieces: int
    rank: int
    mesh: tuple[int, int, int]

    def __str__(self) -> str:
        level = "several levels" if self.level is None else f"level {self.level}"
        replicas, ranks, number = self.mesh
        mesh = (
            f" of a mesh of {replicas} replicas of {ranks} ranks, pieces {number}"
            if replicas > 1
            else ""
        )
        return f"{level}, {self.num_pieces} ranks, rank {self.rank}{mesh}"


@dataclass(frozen=True)
class Options:
    """The arguments of `shard`. See there."""

    levels: Levels
    axes: Axes
    donate: bool
    sync_buffers: SyncBuffers
    reshard_after_forward: bool
    reduce_gradients: ReduceGradients | None = None
    overlap: OverlapChoice = "memory"

    @property
    def group(self) -> Group:
        """All ranks."""
        return self.axes.world

    @cached_property
    def place(self) -> StatePlace:
        """Where this rank's part of a state lies."""
        axes = self.axes
        mesh = axes.replicate.size, axes.shard.size, axes.number
        return StatePlace(self.levels.number, axes.optimizer.size, self.group.rank, mesh)

    def sharding(self, layout: Layout) -> Sharding:
        """The static part of a state that is cut so."""
        return Sharding(layout, self.place.level, self.place.rank, self.place.mesh)

    def layout_of(self, params: PyTree[Tensor]) -> Layout:
        """How a tree is cut: leaves with `requires_grad` are trained, the others are frozen."""
        self.levels.check(params)
        return make_layout(
            params,
            self.axes.optimizer.size,
            trainable=lambda path, leaf: leaf.requires_grad,
            cut=self.cut_of,
        )

    def cut_of(self, path: str, leaf: Any) -> Cut:
        """How a leaf is cut."""
        replicate = self.axes.replicate.size if self.axes.both else 1
        return self.levels.of(path, leaf).cut(self.axes.shard.size, replicate)


ReduceGradients = Literal["every_microbatch", "once"]


StateAxes = Literal["shard", "both"]


OverlapChoice = Literal["memory", "time"]
OVERLAPS: dict[OverlapChoice, Overlap] = {"memory": Overlap.memory, "time": Overlap.time}


def check_reduce_gradients(value: Any, levels: Levels) -> ReduceGradients | None:
    """The choice, if it is one that the level has."""
    if value not in (None, *get_args(ReduceGradients)):
        raise ValueError(
            f"reduce_gradients must be one of {get_args(ReduceGradients)} or None, got {value!r}"
        )
    if value == "every_microbatch" and levels.number in (0, 1):
        raise ValueError(
            f"level {levels.number} keeps whole gradients until the update, so they can't add up "
            "in pieces. Remedy: level 2, which is level 1 with gradients in pieces"
        )
    return value  # type: ignore[no-any-return]


def check_state_axes(value: Any) -> StateAxes:
    """The choice, if it is one."""
    if value not in get_args(StateAxes):
        raise ValueError(f"state_axes must be one of {get_args(StateAxes)}, got {value!r}")
    return value  # type: ignore[no-any-return]


def check_overlap(value: Any) -> OverlapChoice:
    """The choice, if it is one."""
    if value not in OVERLAPS:
        raise ValueError(f"overlap must be one of {(*OVERLAPS,)}, got {value!r}")
    return value  # type: ignore[no-any-return]
