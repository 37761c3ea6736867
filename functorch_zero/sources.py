"""Where a unit's whole leaves come from: they are here already, or they are gathered on use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from .groups.protocol import Done, Group, Work
from .step import check_unchanged, versions_of


class Source(Protocol):
    """Where a unit's whole flats come from, one (num_pieces * piece,) a bucket."""

    drops: bool  # whether flats go away on leaving, and must not be kept by autograd
    passing: Sequence[bool]  # which of them

    def start(self) -> None:
        """Begin to bring the flats here."""
        ...

    def here(self) -> bool:
        """Whether the flats are here, and nobody has to wait for them."""
        ...

    def flats(self) -> list[Tensor]:
        """The flats, once they are here."""
        ...

    def drop(self) -> None:
        """They are not needed for now."""
        ...


class Resident:
    """Levels 0 to 2: whole flats that are always here."""

    drops = False

    def __init__(self, flats: list[Tensor]):
        self._flats, self._versions = flats, versions_of(flats)
        self.passing: Sequence[bool] = [False] * len(flats)

    def start(self) -> None:
        pass

    def here(self) -> bool:
        return True

    def flats(self) -> list[Tensor]:
        return self._flats

    def drop(self) -> None:
        check_unchanged(self._flats, self._versions)


class Gathered:
    """Level 3: this rank's pieces, all-gathered on use. One all-gather a bucket each time.

    Args:
        flats: pieces where `passing`; elsewhere whole flats of other levels' leaves, which stay.
    """

    drops = True

    def __init__(self, flats: list[Tensor], passing: Sequence[bool], group: Group, log: list[str], name: str):
        self._flats, self.passing, self._group, self._log, self._name = flats, passing, group, log, name
        self._started: list[tuple[Tensor, Work]] | None = None
        self._whole: list[Tensor] | None = None
        self._versions: list[int] = []

    def start(self) -> None:
        if self._whole is None and self._started is None:
            self._log.append("gather " + self._name)
            self._started = []
            for flat, passes in zip(self._flats, self.passing, strict=True):
                whole = flat.new_empty(self._group.size * flat.numel()) if passes else flat
                self._started.append((whole, self._group.all_gather(whole, flat) if passes else Done()))

    def here(self) -> bool:
        return self._whole is not None

    def flats(self) -> list[Tensor]:
        self.start()
        if self._whole is None:
            assert self._started is not None
            for _, work in self._started:
                work.wait()
            self._whole, self._started = [whole for whole, _ in self._started], None
            self._versions = versions_of(self._whole)
        return self._whole

    def drop(self) -> None:
        if self._started is not None:
            self.flats()
        check_unchanged(self._whole or [], self._versions)
        self._whole = None
