"""Overlap of communication with a pass: the moments of backward at which gathers start and
reductions end; and what one pass tells the next, the order of its gathers and its uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..groups.forwarding import all_say, era_of
from ..groups.protocol import Group
from ..groups.single import SingleRank
from .same_uses import END, SameUses
from .unshard import UnitFlats


@dataclass(frozen=True)
class Overlap:
    """The moments at which a unit's backward starts the next gather and ends earlier reductions.

    Backward asks for saved leaves of a unit one after the other. Asks are counted from 1, and only
    while most of the unit's backward is still to come; see Note [peak of backward].
    Whatever the choice, collectives start in the same order: a unit's own gather, the gathers
    ahead, the unit's reductions.

    Attributes:
        gather_at: the ask at which the units ahead begin to be gathered.
        settle_at: the ask at which a rank waits for the reductions under way; None: it waits no
            earlier than it must.
        num_under_way: the number of units whose reductions may be under way at a time. At level 0
            all may: a sum takes the place of its flat there.
        distance: the number of units ahead that are being gathered, in forward and in backward; at
            least 1. Each more takes a unit's memory.
    """

    gather_at: int
    settle_at: int | None
    num_under_way: int
    distance: int = 1

    # Least memory: a unit's backward begins with no other flat beside it
    memory: ClassVar[Overlap]
    # Most time to hide communication: the whole backward of a unit, for GPUs. On CUDA, waiting for
    # a reduction stops the computing stream, so nothing waits before a second one is under way.
    time: ClassVar[Overlap]

    def __post_init__(self) -> None:
        if self.distance < 1:
            raise ValueError(f"distance must be at least 1, got {self.distance}")

    @classmethod
    def by_default(cls, device: torch.device) -> Overlap:
        """The choice for leaves on this device: `memory` on a CPU, else `time`."""
        return cls.memory if device.type == "cpu" else cls.time


# The second ask: at the first, all of the unit's activations are still there
Overlap.memory = Overlap(gather_at=2, settle_at=2, num_under_way=1)
Overlap.time = Overlap(gather_at=1, settle_at=None, num_under_way=2)


# Passes in a row that use the same units, after one that used others, until ranks trust in it
_EQUAL_PASSES = 8


class PrefetchOrder:
    """The units that the last pass gathered, in order. While one is used, the next are on their
    way. Beside them stand the uses of the loss, in words; see Note [same uses].

    Ranks must start the same gathers, so all of them follow the same order. When one rank fails,
    wherever, the others fail in their next collective, and may be a pass ahead. So an order ends
    with the group's era, which all ranks count alike. What all ranks find out together begins no
    era, and users' own groups count none: so a call that fails forgets the orders, too.

    Args:
        group: all ranks; None: one.
    """

    def __init__(self, group: Group | None = None) -> None:
        self._group: Group = SingleRank() if group is None else group
        self._units: Sequence[str] = ()  # names; () until a pass has recorded some
        # Words of the last pass, by `SameUses.of_units`; none until a pass has compared them
        self._uses: dict[bool, Sequence[str]] = {}
        self._untrusted = 0  # passes that must be equal before ranks rely on the uses
        self._era = 0  # of the group, when they were recorded
        # The words of `agree_before`, in an order of their own; None: nobody has asked
        self._before: PrefetchOrder | None = None

    @property
    def units(self) -> Sequence[str]:
        """Their names; () where nothing is known that holds for all ranks."""
        return self._units if self._era == era_of(self._group) else ()

    def record(self, units: Sequence[str], uses: SameUses | None = None) -> None:
        """A pass has gathered these units, in this order, and compared these uses. None: it had
        nothing to compare."""
        if self._era != era_of(self._group):
            self._uses, self._untrusted, self._era = {}, 0, era_of(self._group)
        self._units = tuple(units)  # a copy: the pass goes on appending to its list
        if uses is not None:
            self._uses[uses.of_units] = uses.words
            self._untrusted = _EQUAL_PASSES if uses.left else max(self._untrusted - 1, 0)

    def compare(
        self,
        flats: Sequence[UnitFlats],
        *,
        of_units: bool = True,
        kind: type[SameUses] = SameUses,
    ) -> SameUses | None:
        """The comparison of uses for a pass that begins, over these flats; None where ranks have no
        way to compare.

        Args:
            of_units: whether collectives follow from uses of units. Else words are of exchanges
                alone: see Note [same uses].
        """
        if self._group.size == 1 or all_say(self._group) is None:
            return None
        known = self._era == era_of(self._group)
        last = self._uses.get(of_units) if known else None
        if last is None and not of_units:
            last = [END]
        trusted = not self._untrusted
        return kind(self._group, last, flats, trusted=trusted, of_units=of_units)

    def agree_before(self, words: Sequence[str], kind: type[SameUses]) -> None:
        """Before a pass: return when all ranks are known to say these words, of gathers that they
        start then.

        Raises:
            GroupError: they don't.
        """
        self._before = self._before or PrefetchOrder(self._group)
        said = self._before.compare((), kind=kind)
        if said is not None:
            said.words += words
            said.check_end()
            self._before.record((), said)


class Following:
    """A pass on its way along the order of the last one, as far as the two have gathered alike.

    Attributes:
        gathered: the units of this pass so far.
        expected: the unit to be gathered next; None where that is not known.
        ahead: the flats of the units that should be on their way soon, `expected` first.
    """

    def __init__(self, order: Sequence[str], distance: int, flats: Mapping[str, UnitFlats]) -> None:
        self.gathered: list[str] = []
        # The order is followed by position: the n-th gather of this pass is the n-th of the last
        self._order, self._distance, self._flats = order, distance, flats
        self._look_ahead()

    def add(self, unit: str) -> None:
        """This pass has had to gather the unit."""
        if unit != self.expected:
            self._order = ()  # from here on the last pass is no guide
        self.gathered.append(unit)
        self._look_ahead()

    def _look_ahead(self) -> None:
        at = len(self.gathered)
        names = self._order[at : at + self._distance]
        self.expected = names[0] if names else None
        # The last pass may have been over another tree
        self.ahead = [self._flats[name] for name in names if name in self._flats]
