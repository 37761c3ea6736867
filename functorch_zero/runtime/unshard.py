"""A unit's whole flats during one pass: resident, or gathered on use.

They are passive: `runtime/unit.py` says when they come and go.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, filterfalse
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .._torch_private import profiler_enabled, version_of
from ..compress import decoded, encoded
from ..groups.protocol import Done, Group, Work
from ..layout.flat_buffers import blank, unpack
from ..layout.layout import Bucket
from ..model.casting import cast_leaf
from ..profiling import NOTHING, ranged

Buckets = Sequence[Bucket]


class UnitFlats(Protocol):
    """A unit's whole flats, one (num_pieces * piece,) per bucket, in the dtype they are used in."""

    transient: bool  # whether they are freed when the unit is left; autograd must not keep them
    moves: bool  # whether they are gathered from other ranks
    here: list[Tensor] | None  # the flats, where nobody has to wait for them
    under_way: Sequence[Gathering] | None  # gathers that were started and not waited for
    versions: Sequence[int]  # of transient ones, when they came: a loss must not write to them

    def start(self) -> None:
        """Begin to gather the flats, unless they are here or under way."""
        ...

    def unshard(self) -> list[Tensor]:
        """Wait until the flats are here."""
        ...

    def leaves(self) -> Sequence[Tensor]:
        """The whole leaves in them, bucket by bucket. The flats are here."""
        ...


class Gathering(NamedTuple):
    """One bucket's all-gather."""

    arriving: Tensor  # (num_pieces * m,), all ranks' messages; or (numel,), a flat that is whole
    sent: Tensor  # (m,), this rank's, encoded or in the dtype of gathers; lives as long as the work
    work: Work


class ResidentFlats:
    """Levels 0 to 2: whole flats that are always here, in the dtype they are used in; held between
    steps, or published.

    Args:
        flats: one (num_pieces * piece,) per bucket.
    """

    transient = False
    moves = False
    under_way: Sequence[Gathering] | None = None
    versions: Sequence[int] = ()

    def __init__(self, flats: list[Tensor], buckets: Buckets):
        self.here: list[Tensor] | None = flats
        self._flats, self._buckets = flats, buckets

    def start(self) -> None:
        pass

    def unshard(self) -> list[Tensor]:
        return self._flats

    def leaves(self) -> Sequence[Tensor]:
        return [*_views(self._flats, self._buckets)]


class GatheredFlats:
    """Flats made on use. Level 3: this rank's pieces, all-gathered, one all-gather per bucket each
    time. Levels 1 and 2: published flats, decoded or cast. Any level: flats that are used in
    another dtype, rounded as for a gather, and cast.

    Args:
        flats: one per bucket: (bucket.held.piece,) at level 3; published ones; elsewhere whole
            flats of other levels' leaves, as held between steps. They stay if nothing is made of
            them.
        buckets: the unit's.
        group: of the ranks that hold the other pieces.
        log: of the collectives started, which ranks compare.
        name: of the unit, in the log.
    """

    transient = True

    def __init__(
        self,
        flats: list[Tensor],
        buckets: Buckets,
        group: Group,
        log: list[str],
        name: str,
    ):
        self.here: list[Tensor] | None = None
        self.under_way: Sequence[Gathering] | None = None
        self.versions: Sequence[int] = ()
        self._flats, self._buckets = flats, buckets
        self._group, self._log, self._name = group, log, name
        # A unit whose flats are only cast starts nothing, and so is in no log
        self.moves = any(bucket.is_gathered for bucket in buckets)

    def start(self) -> None:
        # Asked for ahead and on use: the first to ask starts it
        if not self.moves or self.here is not None or self.under_way is not None:
            return
        # Once per unit, and before its collectives: ranks compare logs
        self._log.append("gather " + self._name)
        started = []
        with ranged("gather", self._name) if profiler_enabled() else NOTHING:
            for flat, bucket in zip(self._flats, self._buckets, strict=True):
                if not bucket.is_gathered:
                    started.append(Gathering(flat, flat, Done()))
                    continue
                # Rounded before it travels; the cast after it takes the leaf to the compute dtype
                sent = message_of(flat, bucket, self._group.rank)
                arriving = sent.new_empty(self._group.size * sent.numel())
                work = self._group.all_gather(arriving, sent)
                started.append(Gathering(arriving, sent, work))
        self.under_way = started

    def unshard(self) -> list[Tensor]:
        if self.here is not None:
            return self.here
        self.start()
        wholes = self._flats  # if nothing travels
        if self.under_way is not None:
            with ranged("wait for gather", self._name) if profiler_enabled() else NOTHING:
                # All waits first, so that no decoding holds up the arrival of others
                for gathering in self.under_way:
                    gathering.work.wait()
            # (num_pieces * m,) each; flats that are not cut are those given
            wholes = [gathering.arriving for gathering in self.under_way]
        self.under_way = None
        here = []
        for whole, bucket in zip(wholes, self._buckets, strict=True):
            codec = None if isinstance(bucket.gather, torch.dtype) else bucket.gather
            # What has arrived, now or when it was published, was rounded before
            if bucket.is_gathered or bucket.is_published:
                if codec is not None:
                    whole = decoded(whole, codec, self._group.size, bucket.dtype)
                # To the compute dtype: a new flat, and the arrived one goes
                here.append(whole.to(bucket.compute))
                continue
            if codec is not None:
                whole = blank(whole, bucket)
            here.append(cast_leaf(whole, bucket.dtypes))
        self.here = here
        # A loss that writes to them is caught when they go
        self.versions = [*map(version_of, filterfalse(Tensor.is_inference, here))]
        return here

    def leaves(self) -> Sequence[Tensor]:
        # Views are made anew: flats gathered again lie in other storage
        return [*_views(self.unshard(), self._buckets)]


def message_of(piece: Tensor, bucket: Bucket, number: int) -> Tensor:
    """The held piece of this number (bucket.held.piece,) as it travels to other ranks: (piece,) in
    the dtype of gathers, or (m,) by their codec."""
    if isinstance(bucket.gather, torch.dtype):
        return piece.to(bucket.gather)
    return encoded(blank(piece, bucket, number * len(piece)), bucket.gather)


def _views(flats: Sequence[Tensor], buckets: Buckets) -> Iterator[Tensor]:
    return chain.from_iterable(map(unpack, flats, buckets))
