"""The static part of a sharded state: how it is cut, and whether it has been used up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import optree
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import DonatedError
from .layout import Layout


class Donations:
    """The states that have given their storage away. A state is known by its step counter, which
    each step makes anew."""

    def __init__(self) -> None:
        # Counter -> its number; weak, so that counters go with their states
        # By identity: counters of two states may hold the same number
        self._taken: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def __reduce__(self) -> tuple[type[Donations], tuple[()]]:
        """Copies of states, pickled ones too, have given nothing away."""
        return Donations, ()

    def take(self, counter: Tensor) -> None:
        """Note that this state's storage is being reused."""
        # Kept as a number: the counter itself may be gone when the error is worded
        self._taken[counter] = int(counter)

    def check(self, counter: Tensor) -> None:
        """Raise `DonatedError` if this state's storage has been taken."""
        if counter in self._taken:
            taken = self._taken[counter]
            raise DonatedError(
                f"the state of step {taken} was donated to the step that made state {taken + 1}, "
                "and its storage holds that one now. Remedy: use the state it returned, keep a "
                "copy with tree_map(torch.clone, state), or shard with donate=False"
            )


@dataclass(frozen=True)
class Sharding:
    """How a state is cut: a pytree node without leaves, equal for states that fit each other."""

    layout: Layout
    level: int | None  # None: leaves differ in it, and the layout says
    rank: int  # among all ranks
    mesh: tuple[int, int, int]  # the number of replicas, the ranks in each, `piece_number`
    donations: Donations = field(default_factory=Donations, compare=False, repr=False)

    @property
    def piece_number(self) -> int:
        """Which of the `num_pieces` pieces of a bucket is this rank's, from 0; on a mesh several
        ranks may share one."""
        return self.mesh[2]


def _flatten(sharding: Sharding) -> tuple[tuple[()], Any, tuple[()]]:
    # All of it is static: equal shardings make equal tree structures
    return (), sharding, ()


optree.register_pytree_node(
    Sharding, _flatten, lambda sharding, _: sharding, namespace=optree.registry.__GLOBAL_NAMESPACE
)
