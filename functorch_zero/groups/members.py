"""Who is lost: the ranks of a group, the machines that they are on, and who answers a call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..tree import grouped
from .checks import ranks_text


class Member(NamedTuple):
    """A rank of a group."""

    rank: int  # its number among all ranks
    host: str  # its machine's name; "": not known yet
    beside_store: bool  # whether torch's store is served from that machine


def named(members: Iterable[Member]) -> str:
    """'ranks 0, 1 on m0 and rank 4 on m2'."""
    on_host = grouped((member.host, member.rank) for member in members)
    return " and ".join(
        f"{ranks_text(ranks)} on {host}" if host else ranks_text(ranks)
        for host, ranks in on_host.items()
    )


def culprits(members: Sequence[Member], started: Mapping[int, int]) -> str:
    """Which ranks don't answer, or have started fewer collectives than others.

    Args:
        members: of the group.
        started: of those that answer, by their place in the group: how many collectives of it.
    """
    missing = [member for i, member in enumerate(members) if i not in started]
    if missing:
        return f"No word came from {named(missing)}"
    # All live: the others wait in a collective that some rank has yet to start
    least, most = min(started.values()), max(started.values())
    if least == most:
        return f"All ranks have started {most} collectives of this group"
    behind = named(member for i, member in enumerate(members) if started[i] == least)
    return (
        f"Behind: {behind}, with {least} collectives of this group started; the others: up to "
        f"{most}"
    )


def without_store(members: Sequence[Member], place: int, problem: str) -> str:
    """Who may be lost, where nobody can be asked. `place` is this rank's in the group, `problem`
    says what is wrong with the store."""
    own = members[place]
    others = [member for member in members if member is not own]
    beside = [member for member in others if member.beside_store]
    text = problem[0].upper() + problem[1:]
    if beside and not own.beside_store:
        text += (
            f". It is served on the machine of {named(beside)}, which has ended or can't be "
            f"reached from {named([own])}"
        )
    elif len(others) == 1:
        text += f". The other rank is {named(others)}"
    return text
