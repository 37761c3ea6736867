"""What `shard` was asked for, what its steps refuse, and how the other ranks hear of a failure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

import optree
import torch
from torch import Tensor

from .buffers import BufferRule
from .errors import GroupError, NonFiniteError, StructureError, explain
from .groups import rejoin
from .groups.mesh import Axes
from .groups.protocol import Group
from .layout.layout import Cut, Layout
from .layout.levels import Levels
from .layout.sharding import Sharding
from .step.state import TrainState, check_state
from .tree import paths


class Place(NamedTuple):
    """Where a rank's part of a state lies; as in `Sharding`."""

    level: int | None
    num_pieces: int
    rank: int
    mesh: tuple[int, int, int]

    def __str__(self) -> str:
        level = "several levels" if self.level is None else f"level {self.level}"
        replicas, ranks, number = self.mesh
        mesh = f" of a mesh of {replicas} replicas of {ranks} ranks, pieces {number}" if replicas > 1 else ""
        return f"{level}, {self.num_pieces} ranks, rank {self.rank}{mesh}"


@dataclass(frozen=True)
class Options:
    """What `shard` was asked for."""

    levels: Levels
    axes: Axes
    donate: bool
    buffers: BufferRule
    reshard_after_forward: bool
    accumulate_in: AccumulateIn | None = None

    @property
    def group(self) -> Group:
        """All ranks."""
        return self.axes.world

    @cached_property
    def place(self) -> Place:
        """Where this rank's part of a state lies."""
        axes = self.axes
        mesh = axes.replicate.size, axes.shard.size, axes.number
        return Place(self.levels.number, axes.optimizer.size, self.group.rank, mesh)

    def sharding(self, layout: Layout) -> Sharding:
        """What a state that is cut so says of itself."""
        return Sharding(layout, self.place.level, self.place.rank, self.place.mesh)

    def cut_of(self, path: str, leaf: Any) -> Cut:
        """How a leaf is cut."""
        replicate = self.axes.replicate.size if self.axes.both else 1
        return self.levels.of(path, leaf).cut(self.axes.shard.size, replicate)


def check_batch(batch: Any, device: torch.device, rank: int) -> None:
    """Refuse a batch on another kind of device than the params; single numbers may be anywhere."""
    for n, leaf in enumerate(optree.tree_leaves(batch)):
        if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.device.type != device.type:
            raise StructureError(
                explain(
                    "the batch is on the wrong device",
                    path=paths(batch)[n],
                    expected=device,
                    got=leaf.device,
                    rank=rank,
                    remedy="move it with tree_map(lambda x: x.to(device), batch)",
                )
            )


def check_not_empty(batch: Any, loss: Tensor, weight: Tensor | float | None, rank: int) -> None:
    """Refuse a loss that is the mean of nothing, NaN, and would count as much as the others'."""
    if weight is not None:
        return
    for n, leaf in enumerate(optree.tree_leaves(batch)):
        if isinstance(leaf, Tensor) and leaf.dim() > 0 and not len(leaf) and bool(loss.isnan()):
            what, path = "the batch is empty, and its loss NaN", paths(batch)[n]
            remedy = "give batches a weight, fz.Aux(weight=len(x)): what weighs nothing counts for nothing"
            raise StructureError(explain(what, path=path, rank=rank, remedy=remedy))


def sharding_of(state: TrainState, options: Options) -> Sharding:
    """How a state is cut, which must be as these options cut."""
    check_state(state)
    sharding = state.sharding
    if sharding is None:
        raise StructureError("a sharded step was given a whole state. Remedy: `step.scatter(state)` first")
    got = Place(sharding.level, sharding.layout.num_ranks, sharding.rank, sharding.mesh)
    if got != options.place:
        raise StructureError(
            explain(
                "the state was sharded for another level, group or rank",
                expected=options.place,
                got=got,
                rank=options.group.rank,
                remedy="gather it with the step that made it, then scatter it with this one",
            )
        )
    if optree.tree_structure(state.params) != sharding.layout.treedef:
        remedy = "replace leaves by tree_map, which keeps the tree: in a dict they have another order"
        what = "state.params have another tree structure than those of `init`"
        kind = type(state.params).__name__
        raise StructureError(explain(what, got=f"a {kind}", rank=options.group.rank, remedy=remedy))
    return sharding


@contextmanager
def told(*groups: Group) -> Iterator[None]:
    """Tell the other ranks when this one fails, so that none waits for it. What failed before is tried again."""
    for group in groups:
        rejoin(group)
    try:
        yield
    except BaseException as error:
        for group in () if isinstance(error, NonFiniteError) else groups:  # which all ranks raise alike
            if len(groups) > 1 or not isinstance(error, GroupError):  # who shares another group has not heard of it
                group.fail(error)
        raise


def failing_together(step: Any) -> AbstractContextManager[None]:
    """Around a training loop: when it raises on this rank, outside of a step too, the other ranks raise `PeerError`.

    Steps, saves and loads tell the other ranks by themselves. What fails between them (a file that one rank can't read,
    say) would keep the others waiting, until this rank's process ends or the group's time limit is over.

        with fz.failing_together(step):
            for batch in batches:
                state, metrics = step(state, batch)

    Args:
        step: a sharded train or eval step.
    """
    return told(*step.options.axes.groups)


AccumulateIn = Literal["pieces", "whole"]


CutStateOver = Literal["shard", "both"]


def check_accumulate_in(value: Any, levels: Levels) -> AccumulateIn | None:
    """The choice, if it is one that the level has."""
    if value not in (None, *get_args(AccumulateIn)):
        raise ValueError(f"accumulate_in must be one of {get_args(AccumulateIn)} or None, got {value!r}")
    if value == "pieces" and levels.number in (0, 1):
        raise ValueError(
            f"level {levels.number} keeps whole gradients until the update, so they can't add up in pieces. "
            "Remedy: level 2, which is level 1 with gradients in pieces"
        )
    return value  # type: ignore[no-any-return]


def check_cut_state_over(value: Any) -> CutStateOver:
    """The choice, if it is one."""
    if value not in get_args(CutStateOver):
        raise ValueError(f"cut_state_over must be one of {get_args(CutStateOver)}, got {value!r}")
    return value  # type: ignore[no-any-return]
