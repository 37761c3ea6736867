"""Where a unit's whole leaves come from: they are here already, or they are gathered on use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from .groups.protocol import Done, Group, Work
from .handle import check_unchanged, versions_of
from .layout import Bucket
from .ranges import ranged


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
    """Levels 0 to 2: whole flats that are always here, in the dtype they are used in."""

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
    """Flats made on use. Level 3: this rank's pieces, all-gathered, one all-gather a bucket each time. Any level: flats
    that are used in another dtype, rounded as for a gather, and cast.

    Args:
        flats: pieces where `cut`; elsewhere whole flats of other levels' leaves, which stay if they needn't be cast.
    """

    drops = True

    def __init__(
        self, flats: list[Tensor], buckets: list[Bucket], cut: Sequence[bool], group: Group, log: list[str], name: str
    ):
        self._flats, self._buckets, self._cut = flats, buckets, cut
        self._group, self._log, self._name = group, log, name
        self.passing: Sequence[bool] = [c or bucket.dtypes is not None for c, bucket in zip(cut, buckets, strict=True)]
        self._started: list[tuple[Tensor, Tensor, Work]] | None = None  # whole, what it is made of, the gather
        self._whole: list[Tensor] | None = None
        self._versions: list[int] = []

    def start(self) -> None:
        if self._whole is None and self._started is None and any(self._cut):
            self._log.append("gather " + self._name)
            self._started = []
            with ranged("gather", self._name):
                for flat, bucket, cut in zip(self._flats, self._buckets, self._cut, strict=True):
                    sent = flat.to(bucket.gather) if cut else flat
                    whole = sent.new_empty(self._group.size * sent.numel()) if cut else flat
                    self._started.append((whole, sent, self._group.all_gather(whole, sent) if cut else Done()))

    def here(self) -> bool:
        return self._whole is not None

    def flats(self) -> list[Tensor]:
        self.start()
        if self._whole is None:
            with ranged("wait for gather", self._name):
                for _, _, work in self._started or ():
                    work.wait()
            wholes = self._flats if self._started is None else [whole for whole, _, _ in self._started]
            self._started = None
            pairs = zip(wholes, self._buckets, strict=True)
            self._whole = [whole.to(bucket.gather).to(bucket.compute) for whole, bucket in pairs]
            self._versions = versions_of(self._whole)
        return self._whole

    def drop(self) -> None:
        if self._started is not None:
            self.flats()
        check_unchanged(self._whole or [], self._versions)
        self._whole = None
