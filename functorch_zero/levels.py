"""The four levels, as rows of one table: what is whole between steps, and how gradients travel.

| level | params between steps | before the loss | gradient | after the update |
|---|---|---|---|---|
| 0 | whole | - | whole, all-reduced once a unit | - |
| 1 | whole | - | whole, reduce-scattered once a unit | all-gather a bucket |
| 2 | whole | - | reduce-scattered at every entry, freed | all-gather a bucket |
| 3 | pieces | all-gather a unit, on use | reduce-scattered at every entry, freed | - |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import optree
import torch
from torch import Tensor

from .collectives import (
    Fill,
    by_bucket,
    copy_tree,
    cut,
    flat_of_leaves,
    flat_of_pieces,
    piece_of,
    slice_tree,
    to_tree,
    unpack,
)
from .groups.protocol import Group
from .groups.solo import Solo
from .layout import Layout
from .sinks import Accumulating, Reducer, Sink, Streaming
from .sources import Gathered, Resident, Source
from .tree import PyTree, select


@dataclass(frozen=True)
class Level:
    """One row of the table."""

    number: int
    name: str
    cuts_state: bool  # optimizer state in pieces
    streams: bool  # gradients reduced and freed at every entry
    cuts_params: bool  # params in pieces between steps

    def num_pieces(self, group: Group) -> int:
        """Into how many pieces this level cuts a bucket."""
        return group.size if self.cuts_state else 1

    def optimizer_group(self, group: Group) -> Group:
        """Whom the optimizer asks: at level 0 every rank does the whole work by itself."""
        return group if self.cuts_state else Solo()

    def hold(self, params: PyTree[Tensor], layout: Layout, rank: int, fill: Fill | None = None) -> PyTree[Tensor]:
        """Whole leaves -> what a rank keeps of them between steps, in storage of its own. `fill` as in `slice_tree`."""
        return slice_tree(params, layout, rank, fill) if self.cuts_params else copy_tree(params, layout, fill)

    def flats(self, params: PyTree[Tensor], layout: Layout, rank: int) -> list[Tensor]:
        """The flats that hold the params between steps: pieces at level 3, else whole."""
        leaves = optree.tree_leaves(params)
        if self.cuts_params:
            return [flat_of_pieces(by_bucket(leaves, layout, b), bkt, rank) for b, bkt in enumerate(layout.buckets)]
        return [
            flat_of_leaves(by_bucket(leaves, layout, b), bkt, layout.num_ranks) for b, bkt in enumerate(layout.buckets)
        ]

    def sink(self, layout: Layout, group: Group, log: list[str]) -> Sink:
        """Where a step's gradients go."""
        reducer = Reducer(layout, group, scatter=self.cuts_state, log=log)
        return Streaming(reducer) if self.streams else Accumulating(reducer)

    def sources(self, flats: Sequence[Tensor], layout: Layout, group: Group, log: list[str]) -> list[Source]:
        """Where a pass's whole leaves come from, unit by unit."""
        return [self._source([flats[b] for b in unit.buckets], group, log, unit.name) for unit in layout.units]

    def _source(self, flats: list[Tensor], group: Group, log: list[str], name: str) -> Source:
        return Gathered(flats, group, log, name) if self.cuts_params else Resident(flats)

    def pieces(self, flats: Sequence[Tensor], layout: Layout, rank: int) -> PyTree[Tensor]:
        """What the optimizer sees of the params: this rank's pieces of the trained leaves, views of the flats."""
        parts = []
        for flat, bucket in zip(flats, layout.buckets, strict=True):
            piece = flat if self.cuts_params else piece_of(flat, bucket, rank)
            parts.append(cut(piece, bucket, rank))
        return select(to_tree(parts, layout), layout.trainable)

    def grads(self, reduced: dict[int, Tensor], flats: Sequence[Tensor], layout: Layout, rank: int) -> PyTree[Tensor]:
        """The reduced gradient flats as a tree of pieces; zeros for what no loss reached."""
        parts = [
            cut(reduced[b] if b in reduced else flat.new_zeros(bucket.piece), bucket, rank)
            for b, (flat, bucket) in enumerate(zip(flats, layout.buckets, strict=True))
        ]
        return select(to_tree(parts, layout), layout.trainable)

    def publish(
        self,
        params: PyTree[Tensor],
        flats: Sequence[Tensor],
        updates: PyTree[Tensor] | None,
        layout: Layout,
        group: Group,
        *,
        donate: bool,
    ) -> PyTree[Tensor]:
        """params + updates, as kept between steps; with updates None the flats hold the sums already.

        Levels 1 and 2: one all-gather a bucket, each started when that bucket is ready.
        """
        rank = group.rank if self.cuts_state else 0
        moved = {} if updates is None else dict(zip(_trained_numbers(layout), optree.tree_leaves(updates), strict=True))
        leaves, started = list(optree.tree_leaves(params)), []
        for bucket, flat in zip(layout.buckets, flats, strict=True):
            if not bucket.trainable:
                continue
            new = flat if donate else torch.empty_like(flat)
            old_piece, piece = (flat, new) if self.cuts_params else (piece_of(x, bucket, rank) for x in (flat, new))
            if updates is not None:
                update = flat_of_pieces([moved[n] for n in bucket.leaves], bucket, rank)
                torch.add(old_piece, update.to(flat.dtype), out=piece)
            if self.cuts_state and not self.cuts_params:
                started.append(group.all_gather(new, piece))
            if new is not flat or not _lies_in(leaves[bucket.leaves[0]], flat):
                views = cut(new, bucket, rank) if self.cuts_params else unpack(new, bucket)
                for n, view in zip(bucket.leaves, views, strict=True):
                    leaves[n] = view
        for work in started:
            work.wait()
        return layout.treedef.unflatten(leaves)


LEVELS = (
    Level(0, "replicated", cuts_state=False, streams=False, cuts_params=False),
    Level(1, "oss", cuts_state=True, streams=False, cuts_params=False),
    Level(2, "sdp", cuts_state=True, streams=True, cuts_params=False),
    Level(3, "fsdp", cuts_state=True, streams=True, cuts_params=True),
)


def find_level(level: int | str) -> Level:
    """A level by number or name."""
    for known in LEVELS:
        if level in (known.number, known.name):
            return known
    names = ", ".join(f"{known.number} ({known.name!r})" for known in LEVELS)
    raise ValueError(f"level must be one of {names}; got {level!r}")


def _trained_numbers(layout: Layout) -> list[int]:
    return [i for i, leaf in enumerate(layout.leaves) if leaf.trainable]


def _lies_in(leaf: Tensor, flat: Tensor) -> bool:
    return leaf.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
