"""Where a unit's whole leaves come from: they are here already, or they are gathered on use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import Protocol

from torch import Tensor

from .._torch_private import base_of
from ..groups.protocol import Done, Group, Work
from ..layout.flat_buffers import unpack
from ..layout.layout import Bucket
from ..model.casting import cast_leaf
from ..model.lazy_param import check_unchanged, versions_of
from ..profiling import ranged

Buckets = Sequence[Bucket]
_DTYPES = attrgetter("dtypes")


class Source(Protocol):
    """Where a unit's whole flats come from, one (num_pieces * piece,) a bucket."""

    drops: bool  # whether flats go away on leaving, and must not be kept by autograd
    passing: Sequence[bool]  # which of those that come

    @property
    def here(self) -> list[Tensor] | None:
        """The flats, if they are here, and nobody has to wait for them."""
        ...

    def start(self) -> None:
        """Begin to bring the flats here."""
        ...

    def flats(self) -> list[Tensor]:
        """The flats, once they are here."""
        ...

    def leaves(self) -> Sequence[Tensor]:
        """The whole leaves in them, bucket by bucket. The flats are here."""
        ...

    def drop(self) -> None:
        """They are not needed for now."""
        ...


class Resident:
    """Levels 0 to 2: whole flats that are always here, in the dtype they are used in."""

    drops = False
    passing: Sequence[bool] = ()

    def __init__(self, flats: list[Tensor], buckets: Buckets, leaves: Sequence[Tensor] = ()):
        """`leaves` are the whole leaves, if they are at hand already, as views of the flats."""
        self.here, self._buckets = flats, buckets
        self._leaves = leaves if {*map(id, map(base_of, leaves))} == {*map(id, flats)} else None

    def start(self) -> None:
        pass

    def flats(self) -> list[Tensor]:
        return self.here

    def leaves(self) -> Sequence[Tensor]:
        return [*_views(self.here, self._buckets)] if self._leaves is None else self._leaves

    def drop(self) -> None:
        pass


class Gathered:
    """Flats made on use. Level 3: this rank's pieces, all-gathered, one all-gather a bucket each
    time. Any level: flats that are used in another dtype, rounded as for a gather, and cast.

    Args:
        flats: pieces where `cut`; elsewhere whole flats of other levels' leaves, which stay if they
            needn't be cast.
    """

    drops = True

    def __init__(
        self,
        flats: list[Tensor],
        buckets: Buckets,
        cut: Sequence[bool],
        group: Group,
        log: list[str],
        name: str,
    ):
        self._flats, self._buckets, self._cut = flats, buckets, cut
        self._group, self._log, self._name = group, log, name
        self.passing: Sequence[bool] = [
            c or bucket.dtypes is not None for c, bucket in zip(cut, buckets, strict=True)
        ]
        self._moves = any(cut)
        self._started: list[tuple[Tensor, Tensor, Work]] | None = (
            None  # whole, what it is made of, the gather
        )
        self.here: list[Tensor] | None = None
        self._versions: list[int] = []

    def start(self) -> None:
        if self._moves and self.here is None and self._started is None:
            self._log.append("gather " + self._name)
            with ranged("gather", self._name):
                self._started = [*map(self._gather, self._flats, self._buckets, self._cut)]

    def _gather(self, flat: Tensor, bucket: Bucket, cut: bool) -> tuple[Tensor, Tensor, Work]:
        if not cut:
            return flat, flat, Done()
        sent = flat if bucket.dtypes is None else flat.to(bucket.dtypes.gather)
        whole = sent.new_empty(self._group.size * sent.numel())
        return whole, sent, self._group.all_gather(whole, sent)

    def flats(self) -> list[Tensor]:
        if self.here is None:
            self.start()
            wholes = self._flats
            if self._started is not None:
                with ranged("wait for gather", self._name):
                    for _, _, work in self._started:
                        work.wait()
                wholes, self._started = [whole for whole, _, _ in self._started], None
            self.here = [*map(cast_leaf, wholes, map(_DTYPES, self._buckets))]
            self._versions = versions_of(self.here)
        return self.here

    def leaves(self) -> Sequence[Tensor]:
        return [*_views(self.flats(), self._buckets)]

    def drop(self) -> None:
        if self._started is not None:
            self.flats()
        if self.here is not None:
            check_unchanged(self.here, self._versions)
            self.here = None


def _views(flats: Sequence[Tensor], buckets: Buckets) -> Iterator[Tensor]:
    return chain.from_iterable(map(unpack, flats, buckets))
