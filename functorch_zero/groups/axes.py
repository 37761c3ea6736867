"""The groups of a step: along which axis pieces lie, gradients are summed, and the optimizer asks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .hybrid import HybridGroup
from .labels import labelled
from .protocol import Group
from .solo import Solo


@dataclass(frozen=True)
class Axes:
    """The groups that a rank is in.

    Attributes:
        world: all ranks.
        shard: the ranks that hold the pieces of one copy of the params.
        replicate: the ranks that hold the same piece of different copies.
        optimizer: the ranks among which each element has one that updates it, in the order of their pieces.
    """

    world: Group
    shard: Group
    replicate: Group
    optimizer: Group

    @cached_property
    def groups(self) -> list[Group]:
        """The groups that are not the same, or of one rank."""
        distinct = {id(group): group for group in (self.world, self.shard, self.replicate, self.optimizer)}
        return [group for group in distinct.values() if group.size > 1]

    def at(self, label: str) -> Axes:
        """The same, for collectives that belong to `label`."""
        groups = (self.world, self.shard, self.replicate, self.optimizer)
        return Axes(*(labelled(group, label) for group in groups))

    @property
    def number(self) -> int:
        """Which of the pieces that the optimizer's ranks hold is this rank's."""
        return self.optimizer.rank

    @property
    def both(self) -> bool:
        """Whether gradients and optimizer state are cut over both axes, the replicate axis inside the shard axis."""
        return self.optimizer.size > self.shard.size


def axes_of(group: Group, *, both: bool = False) -> Axes:
    """Those of a group; `both` cuts the state over the replicate axis, too.

    Raises:
        ValueError: the group has one axis, and can't.
    """
    if isinstance(group, HybridGroup):
        return Axes(group, group.shard, group.replicate, group.by_piece() if both else group.shard)
    if both:
        raise ValueError(
            'cut_state_over="both" needs a group with a replicate and a shard axis, and this one has one axis, over '
            "which state is cut at levels 1 to 3. Remedy: HybridGroup(group, shard=...), or a DeviceMesh of two dims"
        )
    return Axes(group, group, Solo(), group)
