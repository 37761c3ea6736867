"""The static part of a sharded state: how it is cut, and whether it has been used up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ..params import register_node
from .layout import Layout
from .levels import level_in_words, levels_of


@dataclass(frozen=True)
class Sharding:
    """How a state is cut: a pytree node without leaves, equal for states that fit each other."""

    layout: Layout
    level: int | None  # None: leaves differ in it, and the layout says
    rank: int  # among all ranks
    mesh: tuple[int, int, int]  # the number of replicas, the ranks in each, `piece_number`
    # To call before a step writes over the state's storage: they wait for those that read it
    waits: list[Callable[[], None]] = field(default_factory=list, compare=False, repr=False)
    # Waits until the host may read the state, of a step whose state has a place; None: it may
    settle: Callable[[], None] | None = field(default=None, compare=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return Sharding, (self.layout, self.level, self.rank, self.mesh)

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharding:
        """That of a copied state, for which nothing waits."""
        return replace(self, waits=[])

    def take_storage(self) -> None:
        """Return once the state's storage may be written over."""
        while self.waits:
            self.waits.pop(0)()

    @property
    def piece_number(self) -> int:
        """Which of the `num_pieces` pieces of a bucket is this rank's, from 0; on a mesh several
        ranks may share one."""
        return self.mesh[2]

    @property
    def in_words(self) -> str:
        """All in which the shardings of trees with equal paths may differ, in words for errors."""
        replicas, ranks, _ = self.mesh
        mesh = f"{ranks}" if replicas == 1 else f"{replicas} replicas of {ranks}"
        return f"{self.layout.in_words}; rank {self.rank} of {mesh}"

    @property
    def level_in_words(self) -> str:
        """The level for errors: "level 3", "levels 1 and 3"."""
        return level_in_words(self.level, levels_of(self.layout))

    def __str__(self) -> str:
        return f"{self.level_in_words}, rank {self.rank}"


def _flatten(sharding: Sharding) -> tuple[tuple[()], Any, tuple[()]]:
    # All of it is static: equal shardings make equal tree structures
    return (), sharding, ()


register_node(Sharding, _flatten, lambda sharding, _: sharding)
