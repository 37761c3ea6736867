"""Groups around another group, and the abilities that only some kinds of groups have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .last_collectives import RING_OF_PROCESS, Ring
from .protocol import Group, ReduceOp, Work

AllSay = Callable[[str, float], bool]


class Forwarding:
    """All of a group's collectives, done by another group: by `_start` and `_meet`."""

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

    @property
    def ranks(self) -> Sequence[int]:
        """Its ranks, numbered among all."""
        return ranks_of(self.inner)

    @property
    def ring(self) -> Ring:
        """The last collectives of this rank, in this group and others."""
        return ring_of(self.inner)

    def all_gather(self, out: Tensor, piece: Tensor) -> Work:
        return self._start("all_gather", out, piece)

    def reduce_scatter(self, out: Tensor, whole: Tensor) -> Work:
        return self._start("reduce_scatter", out, whole)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        return self._start("all_reduce", tensor, op)

    def all_to_all(
        self, out: Tensor, out_sizes: Sequence[int], source: Tensor, in_sizes: Sequence[int]
    ) -> Work:
        return self._start("all_to_all", out, out_sizes, source, in_sizes)

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        return self._start("broadcast", tensor, source)

    def exchange(self, payload: bytes) -> list[bytes]:
        payloads: list[bytes] = self._meet("exchange", payload)
        return payloads

    def barrier(self) -> None:
        self._meet("barrier")

    def _start(self, kind: str, *arguments: Any) -> Work:
        """Start the collective of this name."""
        work: Work = getattr(self.inner, kind)(*arguments)
        return work

    def _meet(self, kind: str, *payload: bytes) -> Any:
        """The result of an exchange or a barrier, which wait in the call itself."""
        return getattr(self.inner, kind)(*payload)

    def fail(self, error: BaseException) -> None:
        self.inner.fail(error)

    @property
    def era(self) -> int:
        """How often all ranks have come back after a failure."""
        return era_of(self.inner)

    def rejoin(self) -> None:
        """After a failure that all ranks have caught: as the inner group does, if it can."""
        rejoin(self.inner)

    def sibling(self) -> Group | None:
        """Another group of the same ranks, for another thread: as the inner group makes it, if it
        can."""
        return sibling(self.inner)

    def reduce_apart(self) -> None:
        """Let reduce-scatters run beside other collectives: as the inner group does, if it can."""
        reduce_apart(self.inner)

    def settle(self) -> None:
        """Wait for the results of all collectives so far: as the inner group does, if it can."""
        settle(self.inner)

    @property
    def all_say(self) -> AllSay | None:
        """The inner group's own, if it has one."""
        return all_say(self.inner)


def rejoin(group: Group) -> None:
    """Make a group that has failed usable again, where its kind can be; every rank calls this."""
    # Not in the protocol: single ranks and users' own groups need no such method
    own = getattr(group, "rejoin", None)
    if own is not None:
        own()


def era_of(group: Group) -> int:
    """How often all ranks of a group have come back after a failure; the same on each of them."""
    own: int = getattr(group, "era", 0)  # single ranks and users' own groups don't come back
    return own


def sibling(group: Group) -> Group | None:
    """Another group of the same ranks that another thread may use at the same time; None where
    there is none."""
    # A group without one is used by one thread at a time
    own = getattr(group, "sibling", None)
    made: Group | None = None if own is None else own()
    return made


def reduce_apart(group: Group) -> None:
    """Let a group's reduce-scatters run beside its other collectives, where its kind can; every
    rank calls this."""
    own = getattr(group, "reduce_apart", None)
    if own is not None:
        own()


def settle(group: Group) -> None:
    """Return when the results of a group's collectives so far are right on this rank, or raise;
    every rank calls this. It does nothing where `wait` has raised already."""
    # Single ranks, threads and users' own groups have no device that is behind its host
    own = getattr(group, "settle", None)
    if own is not None:
        own()


def all_say(group: Group) -> AllSay | None:
    """The group's `all_say(words, seconds)`: whether all ranks say the same words within that time.
    It is no collective: other ranks may be in one. None where the group can't ask."""
    own: AllSay | None = getattr(group, "all_say", None)
    return own


def ranks_of(group: Group) -> Sequence[int]:
    """A group's ranks, numbered among all ranks if the group knows that."""
    own: Sequence[int] | None = getattr(group, "ranks", None)
    return range(group.size) if own is None else own


def ring_of(group: Group) -> Ring:
    """The ring of a group's rank: its own where ranks are threads, else the process's."""
    # A process has one ring for all its groups, so that their collectives stay in one order
    own: Ring = getattr(group, "ring", RING_OF_PROCESS)
    return own
