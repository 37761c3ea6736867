"""The order in which units are fetched: a hint from one pass to the next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class PrefetchOrder:
    """The units that the last pass fetched, in order. While one unit is used, the next is on its
    way.

    It belongs to a step. Ranks must start the same gathers, so all of them follow the same order.
    When one rank fails, wherever, the others fail in their next collective, and may be a pass
    ahead; so whoever fails forgets it.
    """

    def __init__(self) -> None:
        self.units: Sequence[str] = ()

    def record(self, units: Sequence[str]) -> None:
        """A pass has fetched these units, in this order."""
        self.units = tuple(units)

    @contextmanager
    def forgotten_on_failure(self) -> Iterator[None]:
        """Forget the order when what runs inside fails."""
        try:
            yield
        except BaseException:
            self.units = ()
            raise
