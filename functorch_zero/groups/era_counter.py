"""`EraCounter`: numbers of calls that all ranks of a group make alike."""

from __future__ import annotations

from .forwarding import era_of
from .protocol import Group


class EraCounter:
    """Numbers from 0 in each era of a group: ranks that come back after a failure may have made
    different numbers of calls before it."""

    def __init__(self, group: Group):
        self._group = group
        self._era, self._next = era_of(group), 0

    def next(self) -> int:
        """The number of the next call, the same on every rank."""
        era = era_of(self._group)
        if era != self._era:
            self._era, self._next = era, 0
        number = self._next
        self._next += 1
        return number
