"""Where a unit's whole leaves come from: they are here already, or they are gathered on use."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from .groups.protocol import Group, Work
from .step import check_unchanged, versions_of


class Source(Protocol):
    """Where a unit's whole flats come from, one (num_ranks * piece,) a bucket."""

    drops: bool  # whether flats go away on leaving, and must not be kept by autograd

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

    def start(self) -> None:
        pass

    def here(self) -> bool:
        return True

    def flats(self) -> list[Tensor]:
        return self._flats

    def drop(self) -> None:
        check_unchanged(self._flats, self._versions)


class Gathered:
    """Level 3: this rank's pieces, all-gathered on use. One all-gather a bucket each time."""

    drops = True

    def __init__(self, pieces: list[Tensor], group: Group, log: list[str], name: str):
        self._pieces, self._group, self._log, self._name = pieces, group, log, name
        self._started: list[tuple[Tensor, Work]] | None = None
        self._whole: list[Tensor] | None = None
        self._versions: list[int] = []

    def start(self) -> None:
        if self._whole is None and self._started is None:
            self._log.append("gather " + self._name)
            self._started = []
            for piece in self._pieces:
                whole = piece.new_empty(self._group.size * piece.numel())
                self._started.append((whole, self._group.all_gather(whole, piece)))

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
