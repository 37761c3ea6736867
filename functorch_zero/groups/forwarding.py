"""Groups around another group, and the abilities that only some kinds of groups have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from .last_collectives import RING_OF_PROCESS, Ring
from .protocol import Collectives, Group, Work

T = TypeVar("T")
AllSay = Callable[[str, float], bool]


class Forwarding(Collectives):
    """All of a group's collectives, done by another group."""

    def __init__(self, inner: Group):
        self.inner = inner

    @property
    def rank(self) -> int:
        """This rank's number, from 0 to size - 1."""
        return self.inner.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.inner.size

    def _start(self, kind: str, *arguments: Any) -> Work:
        work: Work = getattr(self.inner, kind)(*arguments)
        return work

    def _meet(self, kind: str, *payload: bytes) -> Any:
        return getattr(self.inner, kind)(*payload)

    def fail(self, error: BaseException) -> None:
        self.inner.fail(error)

    def rejoin(self) -> None:
        """After a failure that all ranks have caught: as the inner group does, if it can."""
        rejoin(self.inner)


def _ability(group: Group, name: str, without: T) -> T:
    """The attribute of this name of a group, or of the one that it is around; else `without`."""
    # Not in the protocol: single ranks and users' own groups need none of them
    while isinstance(group, Forwarding) and not hasattr(group, name):
        group = group.inner
    found: T = getattr(group, name, without)
    return found


def rejoin(group: Group) -> None:
    """Make a group that has failed usable again, where its kind can be; every rank calls this."""
    _ability(group, "rejoin", lambda: None)()


def era_of(group: Group) -> int:
    """How often all ranks of a group have come back after a failure; the same on each of them."""
    return _ability(group, "era", 0)


def sibling(group: Group) -> Group | None:
    """Another group of the same ranks that another thread may use at the same time; None where
    there is none."""
    # A group without one is used by one thread at a time
    made: Group | None = _ability(group, "sibling", lambda: None)()
    return made


def subgroup(group: Group, ranks: Sequence[int]) -> Group:
    """The group of these of its ranks, in increasing order, this one among them. Each of them calls
    it.

    Raises:
        TypeError: groups of this kind can't be divided.
    """
    divide = getattr(group, "subgroup", None)
    if divide is None:
        raise TypeError(
            f"a {type(group).__name__} can't be divided into axes. Remedy: give it a method "
            "`subgroup(ranks) -> Group`"
        )
    made: Group = divide(ranks)
    return made


def reduce_apart(group: Group) -> None:
    """Let a group's reduce-scatters run beside its other collectives, where its kind can; every
    rank calls this."""
    _ability(group, "reduce_apart", lambda: None)()


def settle(group: Group) -> None:
    """Return when the results of a group's collectives so far are right on this rank, or raise;
    every rank calls this. It does nothing where `wait` has raised already."""
    # Single ranks, threads and users' own groups have no device that is behind its host
    _ability(group, "settle", lambda: None)()


def all_say(group: Group) -> AllSay | None:
    """The group's `all_say(words, seconds)`: whether all ranks say the same words within that time.
    It is no collective: other ranks may be in one. None where the group can't ask."""
    return _ability(group, "all_say", None)


def ranks_of(group: Group) -> Sequence[int]:
    """A group's ranks, numbered among all ranks if the group knows that."""
    return _ability(group, "ranks", range(group.size))


def ring_of(group: Group) -> Ring:
    """The ring of a group's rank: its own where ranks are threads, else the process's."""
    # A process has one ring for all its groups, so that their collectives stay in one order
    return _ability(group, "ring", RING_OF_PROCESS)
