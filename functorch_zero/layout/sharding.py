"""The static part of a sharded state: how it is cut, and whether it has been used up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import optree
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .._torch_private import storage_id
from ..errors import DonatedError
from ..tree import storages
from .layout import Layout
from .levels import level_in_words, levels_of


class Donations:
    """The states that have given their storage away. A state is known by its counters, 0-d integers
    which each step makes anew: its step number, and those of its optimizer. They are known by their
    places in their storages, which detached ones have in common with them; a counter may be one
    entry of a table. Other numbers say nothing: a fixed learning rate is one tensor in the states
    of all steps."""

    def __init__(self) -> None:
        # A counter's storage -> by offset there, in bytes, the number of its state; weak, so that
        # it goes with the state
        self._taken: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._waits: list[Callable[[], None]] = []  # for those that read a state's storage

    def __reduce__(self) -> tuple[type[Donations], tuple[()]]:
        """Copies of states, pickled ones too, have given nothing away."""
        return Donations, ()

    def before_taking(self, wait: Callable[[], None]) -> None:
        """Call this before the storage of a state is reused the next time."""
        self._waits.append(wait)

    def take(self, step: Tensor) -> None:
        """Note that the storage of this step's state is being reused."""
        waits, self._waits = self._waits, []
        for wait in waits:
            wait()
        self._note(step, int(step))

    def take_counters(self, step: Tensor, old: Any, new: Any) -> None:
        """Note the counters of that state's optimizer: those that the next state has others for."""
        number = self._number_of(step)
        assert number is not None
        kept = storages(_counters(new))
        for counter in _counters(old):
            if storage_id(counter) not in kept:
                self._note(counter, number)

    def check(self, step: Tensor, opt_state: Any) -> None:
        """Raise `DonatedError` if the storage of this state, or of its optimizer's state, has been
        taken."""
        for counter in (step, *_counters(opt_state)):
            taken = self._number_of(counter)
            if taken is not None:
                # Who took it may have failed since, so no state need have come of it
                raise DonatedError(
                    f"the state of step {taken} was donated to a step or a load, which has written "
                    "over its storage. Remedy: use the state that it returned; if it failed, load "
                    "the newest checkpoint. To keep a state, copy it with tree_map(torch.clone, "
                    "state), or shard with donate=False"
                )

    def _note(self, counter: Tensor, number: int) -> None:
        self._taken.setdefault(counter.untyped_storage(), {})[_offset(counter)] = number

    def _number_of(self, counter: Tensor) -> int | None:
        """The number of the donated state that this counter is of; None: of no donated one."""
        numbers: dict[int, int] = self._taken.get(counter.untyped_storage(), {})
        return numbers.get(_offset(counter))


def _offset(counter: Tensor) -> int:
    """In bytes, from where its storage begins."""
    return int(counter.storage_offset()) * counter.element_size()


def _counters(opt_state: Any) -> list[Tensor]:
    leaves = optree.tree_leaves(opt_state)
    zero_dim = [x for x in leaves if isinstance(x, Tensor) and x.ndim == 0]
    return [x for x in zero_dim if not (x.is_floating_point() or x.is_complex())]


@dataclass(frozen=True)
class Sharding:
    """How a state is cut: a pytree node without leaves, equal for states that fit each other."""

    layout: Layout
    level: int | None  # None: leaves differ in it, and the layout says
    rank: int  # among all ranks
    mesh: tuple[int, int, int]  # the number of replicas, the ranks in each, `piece_number`
    donations: Donations = field(default_factory=Donations, compare=False, repr=False)
    # The plan of the optimizer's state, for a training step's; None: it has none, or isn't known
    plan: Any = field(default=None, compare=False, repr=False)
    # Waits until the host may read the state, of a step whose state has a place; None: it may
    settle: Callable[[], None] | None = field(default=None, compare=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies have given nothing away, and a plan has classes of the user's own
        return Sharding, (self.layout, self.level, self.rank, self.mesh)

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharding:
        """That of a copied state, which has given nothing away."""
        return replace(self, donations=Donations())

    @property
    def piece_number(self) -> int:
        """Which of the `num_pieces` pieces of a bucket is this rank's, from 0; on a mesh several
        ranks may share one."""
        return self.mesh[2]

    @property
    def told(self) -> str:
        """All in which the shardings of trees with equal paths may differ, in words for errors."""
        replicas, ranks, _ = self.mesh
        mesh = f"{ranks}" if replicas == 1 else f"{replicas} replicas of {ranks}"
        return f"{self.layout.told}; rank {self.rank} of {mesh}"

    @property
    def level_in_words(self) -> str:
        """The level for errors: "level 3", "levels 1 and 3"."""
        return level_in_words(self.level, levels_of(self.layout))

    def __str__(self) -> str:
        return f"{self.level_in_words}, rank {self.rank}"


def _flatten(sharding: Sharding) -> tuple[tuple[()], Any, tuple[()]]:
    # All of it is static: equal shardings make equal tree structures
    return (), sharding, ()


optree.register_pytree_node(
    Sharding, _flatten, lambda sharding, _: sharding, namespace=optree.registry.__GLOBAL_NAMESPACE
)
