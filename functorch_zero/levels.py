"""The four levels, as rows of one table: what is whole between steps, and how gradients travel.

| level | params between steps | before the loss | gradient | after the update |
|---|---|---|---|---|
| 0 | whole | - | whole, all-reduced once a unit | - |
| 1 | whole | - | whole, reduce-scattered once a unit | all-gather a bucket |
| 2 | whole | - | reduce-scattered at every entry, freed | all-gather a bucket |
| 3 | pieces | all-gather a unit, on use | reduce-scattered at every entry, freed | - |

Each bucket has its level, and the functions here do what that says, bucket by bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import optree
import torch
from torch import Tensor

from .collectives import (
    Fill,
    by_bucket,
    copy_bucket,
    cut,
    filled,
    flat_of_leaves,
    flat_of_pieces,
    slice_bucket,
    to_tree,
    unpack,
)
from .errors import StructureError, explain
from .flats import Pieces
from .groups import labelled
from .groups.mesh import Axes
from .groups.protocol import Group, Work
from .layout import Bucket, Cut, Layout
from .sinks import Accumulating, Reducer, Sink, Streaming
from .sources import Gathered, Resident, Source
from .tree import PyTree, ancestors, path_matches, paths, storage_id

AccumulateIn = Literal["pieces", "whole"]
CutStateOver = Literal["shard", "both"]
LevelRule = int | str | Mapping[str, int | str] | Callable[[str, Any], int | str]


@dataclass(frozen=True)
class Level:
    """One row of the table."""

    number: int
    name: str
    cuts_state: bool  # optimizer state in pieces
    streams: bool  # gradients reduced and freed at every entry
    cuts_params: bool  # params in pieces between steps

    def cut(self, shard: int, replicate: int = 1) -> Cut:
        """How this level cuts a bucket over an axis of `shard` ranks, and its state over `replicate` ranks more."""
        return Cut(self.number, shard * replicate if self.cuts_state else 1, shard if self.cuts_params else 1)


LEVELS = (
    Level(0, "replicated", cuts_state=False, streams=False, cuts_params=False),
    Level(1, "oss", cuts_state=True, streams=False, cuts_params=False),
    Level(2, "sdp", cuts_state=True, streams=True, cuts_params=False),
    Level(3, "fsdp", cuts_state=True, streams=True, cuts_params=True),
)


def find_level(level: int | str) -> Level:
    """A level by number or name."""
    for known in LEVELS:
        if type(level) in (int, str) and level in (known.number, known.name):
            return known
    names = ", ".join(f"{known.number} ({known.name!r})" for known in LEVELS)
    raise ValueError(f"level must be one of {names}; got {level!r}")


@dataclass(frozen=True)
class Levels:
    """The level of each leaf, as `shard` was asked for it.

    Args:
        rule: one level for all; levels by patterns of paths, where the innermost that names a leaf or a tree around it
            counts; or a function `(path, leaf) -> level`.
    """

    rule: LevelRule

    def __post_init__(self) -> None:
        if isinstance(self.rule, Mapping):
            if not self.rule:
                raise ValueError('level={} names no level. Remedy: level={"": 3}, say, or level=3')
            for level in self.rule.values():
                find_level(level)
        elif not callable(self.rule):
            find_level(self.rule)

    @property
    def number(self) -> int | None:
        """0 to 3, or None where leaves may differ in it."""
        return find_level(self.rule).number if isinstance(self.rule, int | str) else None

    def describe(self) -> Any:
        """The rule as plain data. What a function says of each leaf is in the layout."""
        if isinstance(self.rule, Mapping):
            return {pattern: find_level(level).name for pattern, level in self.rule.items()}
        return "by a function" if callable(self.rule) else find_level(self.rule).name

    def of(self, path: str, leaf: Any) -> Level:
        """The level of one leaf."""
        if callable(self.rule):
            return find_level(self.rule(path, leaf))
        if not isinstance(self.rule, Mapping):
            return find_level(self.rule)
        for around in ancestors(path):
            for pattern, level in reversed([*self.rule.items()]):
                if path_matches(around, pattern):
                    return find_level(level)
        remedy = 'add a pattern for it, or "" for all the rest'
        raise StructureError(explain("no pattern of `level` names a leaf", path=path, got=[*self.rule], remedy=remedy))

    def check(self, params: PyTree[Any]) -> None:
        """Raise if a pattern names nothing in this tree."""
        if not isinstance(self.rule, Mapping):
            return
        names = {around for path in paths(params) for around in ancestors(path)}
        for pattern in self.rule:
            if not any(path_matches(name, pattern) for name in names):
                remedy = "see `fz.named_leaves(params)` for the paths"
                raise StructureError(explain("a pattern of `level` names no leaf", path=pattern, remedy=remedy))


def level_of(bucket: Bucket) -> Level:
    """The row of a bucket."""
    return LEVELS[bucket.cut.level]


def check_accumulate_in(value: Any, levels: Levels) -> AccumulateIn | None:
    """The choice, if it is one that the level has."""
    if value not in (None, *get_args(AccumulateIn)):
        raise ValueError(f"accumulate_in must be one of {get_args(AccumulateIn)} or None, got {value!r}")
    if value == "pieces" and levels.number in (0, 1):
        raise ValueError(
            f"level {levels.number} keeps whole gradients until the update, so they can't add up in pieces. "
            "Remedy: level 2, which is level 1 with gradients in pieces"
        )
    return value  # type: ignore[no-any-return]


def check_cut_state_over(value: Any) -> CutStateOver:
    """The choice, if it is one."""
    if value not in get_args(CutStateOver):
        raise ValueError(f"cut_state_over must be one of {get_args(CutStateOver)}, got {value!r}")
    return value  # type: ignore[no-any-return]


def hold(params: PyTree[Tensor], layout: Layout, rank: int, fill: Fill | None = None) -> PyTree[Tensor]:
    """Whole leaves -> what a rank keeps of them between steps, in storage of its own.

    `fill` gives the values of one bucket's leaves at a time, for trees without.
    """
    leaves = optree.tree_leaves(params)
    parts = []
    for b, bucket in enumerate(layout.buckets):
        own = filled(leaves, layout, b, fill)
        if level_of(bucket).cuts_params:
            parts.append(slice_bucket(own, bucket.held, bucket.held_by(rank)))
        else:
            parts.append(copy_bucket(own, bucket))
    return to_tree(parts, layout)


def flats_of(params: PyTree[Tensor], layout: Layout, rank: int) -> list[Tensor]:
    """The flats that hold the params between steps: pieces at level 3, else whole."""
    return flats_of_leaves(optree.tree_leaves(params), layout, rank)


def flats_of_leaves(leaves: Sequence[Tensor], layout: Layout, rank: int) -> list[Tensor]:
    """The same, of the leaves in tree order."""
    flats = []
    for b, bucket in enumerate(layout.buckets):
        own = by_bucket(leaves, layout, b)
        if level_of(bucket).cuts_params:
            flats.append(flat_of_pieces(own, bucket.held, bucket.held_by(rank)))
        else:
            flats.append(flat_of_leaves(own, bucket))
    return flats


def all_gather_params(params: PyTree[Tensor], layout: Layout, axes: Axes) -> PyTree[Tensor]:
    """What a rank keeps -> whole leaves. One all-gather a bucket of level 3."""
    flats = flats_of(params, layout, axes.number)
    started = []
    for b, bucket in enumerate(layout.buckets):
        if level_of(bucket).cuts_params:
            whole = flats[b].new_empty(bucket.numel)
            started.append(axes.shard.all_gather(whole, flats[b]))
            flats[b] = whole
    for work in started:
        work.wait()
    return to_tree([unpack(flat, bucket) for flat, bucket in zip(flats, layout.buckets, strict=True)], layout)


def make_sink(layout: Layout, axes: Axes, log: list[str], accumulate_in: AccumulateIn | None = None) -> Sink:
    """Where a step's gradients go."""
    reducer = Reducer(layout, axes, log)
    rows = [level_of(bucket) for bucket in layout.buckets if bucket.trainable]
    gathered = any(level_of(bucket).cuts_params for bucket in layout.buckets)
    if not gathered and not any(row.streams for row in rows):
        return Accumulating(reducer)
    streams = [b for b, bkt in enumerate(layout.buckets) if level_of(bkt).streams and accumulate_in != "whole"]
    return Streaming(reducer, frozenset(streams))


def make_sources(
    flats: Sequence[Tensor], layout: Layout, axes: Axes, log: list[str], params: PyTree[Tensor] = None
) -> list[Source]:
    """Where a pass's whole leaves come from, unit by unit. `params` may have been cut from the flats already."""
    sources: list[Source] = []
    leaves = optree.tree_leaves(params)
    for unit, content in zip(layout.units, layout.contents, strict=True):
        own, sharded = [*map(flats.__getitem__, unit.buckets)], [level_of(b).cuts_params for b in content.buckets]
        if content.rounds or any(sharded):
            group = labelled(axes.shard, f"{unit.name or 'root'}/gather")
            sources.append(Gathered(own, content.buckets, sharded, group, log, unit.name))
        else:
            held = [*map(leaves.__getitem__, content.leaves)] if leaves else ()
            sources.append(Resident(own, content.buckets, held))
    return sources


def pieces_of(flats: Sequence[Tensor], layout: Layout, rank: int) -> Pieces:
    """What the optimizer sees of the params: this rank's pieces of the trained leaves, views of the flats."""
    trained = [_own(f, bucket, rank) for f, bucket in zip(flats, layout.buckets, strict=True) if bucket.trainable]
    return Pieces(trained, layout, rank)


def grads_of(reduced: dict[int, Tensor], flats: Sequence[Tensor], layout: Layout, rank: int) -> Pieces:
    """The reduced gradient flats; zeros for what no loss reached."""
    trained = [(b, bucket.piece) for b, bucket in enumerate(layout.buckets) if bucket.trainable]
    return Pieces([reduced[b] if b in reduced else flats[b].new_zeros(piece) for b, piece in trained], layout, rank)


def publish(
    params: PyTree[Tensor],
    flats: Sequence[Tensor],
    updates: PyTree[Tensor] | None,
    layout: Layout,
    axes: Axes,
    *,
    donate: bool,
) -> PyTree[Tensor]:
    """params + updates, as kept between steps; with updates None the flats hold the sums already.

    Levels 1 and 2: one all-gather a bucket, each started when that bucket is ready.
    """
    rank = axes.number
    moved = {} if updates is None else dict(zip(_trained_numbers(layout), optree.tree_leaves(updates), strict=True))
    leaves, started = list(optree.tree_leaves(params)), []
    for bucket, flat in zip(layout.buckets, flats, strict=True):
        if not bucket.trainable:
            continue
        new = flat if donate else torch.empty_like(flat)
        if updates is not None:
            old_piece, piece = (_own(x, bucket, rank) for x in (flat, new))
            update = flat_of_pieces([moved[n] for n in bucket.leaves], bucket, rank)
            torch.add(old_piece, update.to(flat.dtype), out=piece)
        if over := _held_over(bucket, axes):
            started.append(_Spreading(new, bucket, over))
        first = leaves[bucket.leaves[0]]
        if new is not flat or (first._base is not flat and not _lies_in(first, flat)):
            cuts = level_of(bucket).cuts_params
            views = cut(new, bucket.held, bucket.held_by(rank)) if cuts else unpack(new, bucket)
            for n, view in zip(bucket.leaves, views, strict=True):
                leaves[n] = view
    while started:
        started = [spreading for spreading in started if spreading.go_on()]
    return layout.treedef.unflatten(leaves)


class _Spreading:
    """A bucket's new pieces on their way to the ranks that hold them between steps: an all-gather along each axis."""

    def __init__(self, held: Tensor, bucket: Bucket, over: Sequence[Group]):
        self._stages: list[tuple[Group, Tensor, Tensor]] = []
        for axis in over:
            group = labelled(axis, f"{bucket.name}/publish")
            piece = held.view(group.size, -1)[group.rank]
            self._stages.append((group, held, piece))
            held = piece
        self._work = self._next()

    def _next(self) -> Work | None:
        if not self._stages:
            return None
        group, out, piece = self._stages.pop()
        return group.all_gather(out, piece)

    def go_on(self) -> bool:
        """Wait for the all-gather under way, and start the next one, if there is one."""
        if self._work is not None:
            self._work.wait()
            self._work = self._next()
        return self._work is not None


def _held_over(bucket: Bucket, axes: Axes) -> list[Group]:
    """The axes along which what is held between steps is cut further, outermost first."""
    level = level_of(bucket)
    shard = [axes.shard] if level.cuts_state and not level.cuts_params else []
    return shard + ([axes.replicate] if level.cuts_state and axes.both else [])


def _own(flat: Tensor, bucket: Bucket, rank: int) -> Tensor:
    """Of a flat that is held between steps, this rank's (piece,): a view."""
    count = bucket.cut.num_pieces // bucket.cut.num_held
    first = rank % count * bucket.piece
    return flat if bucket.piece == flat.numel() else flat[first : first + bucket.piece]


def evaluated(chosen: PyTree[Tensor], flats: Sequence[Tensor], layout: Layout, axes: Axes) -> list[Tensor]:
    """The flats that would hold the params between steps if the trained ones were `chosen`, this rank's pieces.

    Levels 1 and 2: one all-gather a bucket, all under way at once.
    """
    leaves, held, started = iter(optree.tree_leaves(chosen)), [], []
    pieces = {n: next(leaves) for n in _trained_numbers(layout)}
    for bucket, flat in zip(layout.buckets, flats, strict=True):
        if bucket.trainable:
            own = flat_of_pieces([pieces[n].reshape(-1) for n in bucket.leaves], bucket, axes.number)
            flat = torch.empty_like(flat)
            _own(flat, bucket, axes.number).copy_(own)
            started.append(_Spreading(flat, bucket, _held_over(bucket, axes)))
        held.append(flat)
    while started:
        started = [spreading for spreading in started if spreading.go_on()]
    return held


def _trained_numbers(layout: Layout) -> list[int]:
    return [i for i, leaf in enumerate(layout.leaves) if leaf.trainable]


def _lies_in(leaf: Tensor, flat: Tensor) -> bool:
    return storage_id(leaf) == storage_id(flat)
