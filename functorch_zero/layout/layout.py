"""How a tree is cut: units, buckets, extents. Integers only, the same on every rank, no
communication.

A unit's leaves of one dtype, one precision policy and one trainability lie in one bucket, a flat
1-D buffer: each leaf starts at a 256-byte boundary (in proofs anywhere), in path order, and the
bucket is padded to equal pieces, as many as its `Cut` says. Rank r keeps the elements
[r * piece, (r + 1) * piece) of each bucket. So of each leaf in it the rank keeps a contiguous
range, possibly empty. A table is a bucket and a unit of its own, and its pieces are of whole rows.

Note [two cuts]: a bucket has one cut for gradients and optimizer state, into `num_pieces`, and one
for params between steps, into `num_held`. At level 3 over one axis the two are equal. At levels 0
to 2 params are held whole: `num_held` is 1. With a state cut over both axes of a mesh, each held
piece is `num_pieces / num_held` of the smaller ones in a row. Ranks are numbered so that rank r
keeps the r-th of the smaller pieces, and holds the one in which it lies. So what the optimizer sees
of a param is a view of what its rank holds.

Note [published flats]: at levels 1 and 2 a bucket whose leaves are gathered in fewer bytes than
they are stored in is held in pieces, too. Beside its piece a rank has the whole flat as all pieces
were published: rounded to the gather's dtype, or in a codec's messages. Losses use only that, and
would round the leaves to it anyway. It is a cache of the tree, which trees that `tree_map` makes
don't have, nor files: a pass gathers what isn't there.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch

from ..compress import Codec, Form, dtype_of
from ..precision import Dtypes, short
from ..tree import PyTree, grouped
from .extent import Extent


@dataclass(frozen=True)
class Cut:
    """The numbers of pieces that a bucket is cut into."""

    level: int  # from which the numbers follow
    num_pieces: int  # of gradients and optimizer state; 1: every rank has them whole
    num_held: int  # of the params between steps; divides num_pieces
    by_rows: bool = False  # a table: pieces are of whole rows

    def __post_init__(self) -> None:
        # See Note [two cuts]
        assert self.num_pieces % self.num_held == 0, self

    @property
    def holds_pieces(self) -> bool:
        """Whether a rank holds pieces of params between steps. One rank does, too, at level 3 and
        of a table."""
        return self.level >= 3 or self.num_held > 1

    @property
    def level_name(self) -> int | str:
        """The level as `shard` is given it."""
        return "table" if self.by_rows else self.level


@dataclass(frozen=True)
class LeafSpec:
    """A leaf, as far as layouts read it."""

    path: str  # dotted, such as "blocks.0.up.weight"; unique in a tree
    shape: tuple[int, ...]
    dtype: torch.dtype  # that it is stored in
    trainable: bool
    cut: Cut
    dtypes: Dtypes | None = None  # None: it is gathered, used and reduced as it is stored

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Bucket:
    """One flat buffer of a unit: the leaves of one dtype, policy, trainability and level, and where
    each starts."""

    name: str  # unique in a layout; it stands in the names of collectives and in errors
    dtype: torch.dtype  # that the leaves are stored in
    trainable: bool
    leaves: tuple[int, ...]  # numbers of the leaves in tree order
    shapes: tuple[tuple[int, ...], ...]  # of the whole leaves
    offsets: tuple[int, ...]  # in elements, multiples of the alignment
    piece: int  # elements that one rank keeps; the bucket holds cut.num_pieces of them
    cut: Cut
    dtypes: Dtypes | None = None  # None: leaves are gathered, used and reduced as they are stored

    # Cached: steps ask for these on every entry of a unit
    @cached_property
    def compute(self) -> torch.dtype:
        """The dtype that whole leaves are used in."""
        return self.dtype if self.dtypes is None else self.dtypes.compute

    @cached_property
    def gather(self) -> Form:
        """The dtype or codec that leaves are rounded to, and travel in, before they are used."""
        return self.dtype if self.dtypes is None else self.dtypes.gather

    @cached_property
    def reduce(self) -> Form:
        """The dtype or codec that gradients are rounded to before they travel."""
        return self.dtype if self.dtypes is None else self.dtypes.reduce

    @cached_property
    def summed_in(self) -> torch.dtype:
        """The dtype that gradients are packed and summed over ranks in: that of `reduce`, or, with
        a codec, the storage dtype."""
        return dtype_of(self.reduce, self.dtype)

    @cached_property
    def codec(self) -> Codec | None:
        """The codec by which gradients travel to be summed; None: they do in a dtype."""
        return None if isinstance(self.reduce, torch.dtype) else self.reduce

    @cached_property
    def is_gathered(self) -> bool:
        """Whether its whole flat is gathered for each use, or rows of it."""
        return self.cut.level >= 3

    @cached_property
    def is_published(self) -> bool:
        """Whether a rank has a whole flat beside its piece; see Note [published flats]."""
        return self.cut.holds_pieces and not self.is_gathered

    @cached_property
    def is_published_as_used(self) -> bool:
        """Whether losses use that flat as it is."""
        return self.is_published and self.gather == self.compute

    @cached_property
    def is_made_on_use(self) -> bool:
        """Whether its whole flat is made for each use, gathered or cast, and then freed. Else it is
        the state's own."""
        is_cast = self.dtypes is not None and not self.is_published_as_used
        return self.is_gathered or is_cast

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """Elements of each whole leaf."""
        return tuple(prod(shape) for shape in self.shapes)

    @cached_property
    def numel(self) -> int:
        """Elements of the whole flat, padding included."""
        return self.cut.num_pieces * self.piece

    @cached_property
    def held(self) -> Bucket:
        """The bucket, cut as its params are between steps; see Note [two cuts]."""
        num_held = self.cut.num_held
        cut = replace(self.cut, num_pieces=num_held)
        return replace(self, piece=self.numel // num_held, cut=cut)

    def held_by(self, piece_number: int) -> int:
        """The number of the piece of `held` in which the `piece_number`-th piece lies."""
        # Every rank holds all of it
        if self.cut.num_held == 1:
            return 0
        return piece_number * self.cut.num_held // self.cut.num_pieces

    def first(self, piece_number: int) -> int:
        """The first element of the `piece_number`-th piece."""
        # One piece: all ranks keep all of it
        return piece_number * self.piece if self.cut.num_pieces > 1 else 0

    def extent(self, k: int, piece_number: int) -> Extent:
        """The part of the bucket's k-th leaf in the `piece_number`-th piece."""
        numel = self.numels[k]
        # The piece in elements of the leaf: it may begin before, and end behind it
        first = self.first(piece_number) - self.offsets[k]
        start = _clamp(first, 0, numel)
        stop = _clamp(first + self.piece, 0, numel)
        return Extent(self.shapes[k], start, stop)

    def holders(self, k: int) -> Sequence[int]:
        """The numbers of the pieces that have elements of the k-th leaf, of a bucket that is
        cut."""
        if not self.numels[k]:
            return range(0)
        first, last = self.offsets[k], self.offsets[k] + self.numels[k] - 1
        return range(first // self.piece, last // self.piece + 1)

    def has_whole_rows(self, k: int) -> bool:
        """Whether each piece has whole rows of the k-th leaf; not so of one without elements."""
        row = prod(self.shapes[k][1:])  # elements
        return row > 0 and all(self.extent(k, n).start % row == 0 for n in self.holders(k))

    def counts(self, rank: int) -> bool:
        """Whether a sum over ranks counts this rank's elements, which no rank before holds, too."""
        return True

    def sizes(self, start: int, stop: int) -> tuple[int, ...]:
        """The sizes of the ranges that the elements [start, stop) consist of: padding, leaf,
        padding, leaf, ..., padding."""
        known = self._sizes.get((start, stop))
        if known is None:
            edges = [start]  # of padding and leaves in turn, cut off at both ends
            for offset, numel in zip(self.offsets, self.numels, strict=True):
                # A leaf outside of [start, stop) gets size 0
                edges.append(_clamp(offset, start, stop))
                edges.append(_clamp(offset + numel, start, stop))
            edges.append(stop)  # 2 * leaves + 2 edges, and so 2 * leaves + 1 sizes
            known = tuple(after - before for before, after in pairwise(edges))
            self._sizes[start, stop] = known
        return known

    @cached_property
    def _sizes(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """The sizes that `sizes` has found, by its arguments: steps ask for the same few."""
        return {}


def _clamp(number: int, low: int, high: int) -> int:
    return min(max(number, low), high)


@dataclass(frozen=True)
class Unit:
    """Leaves that are gathered and freed together."""

    name: str  # "" is the root
    modules: tuple[str, ...]  # whose calls enter the unit; empty for a tree that no module uses
    buckets: tuple[int, ...]  # their numbers in the layout
    # By which options of `shard` name it, also in a layout of several trees: its own name, inside
    # of its tree's among the arguments of a program's `init`
    path: str = field(default="", compare=False)
    why: str = field(default="", compare=False)  # as in UnitSpec


class UnitContent(NamedTuple):
    """The content of a unit. Its own leaves are numbered bucket by bucket."""

    buckets: tuple[Bucket, ...]
    leaves: tuple[int, ...]  # the numbers that its leaves have in tree order
    trained: tuple[int, ...]  # the numbers of its trained buckets
    slices: tuple[slice, ...]  # per trained bucket, its leaves among the unit's
    frozen: tuple[int, ...]  # among the unit's leaves, those that are not trained
    is_table: bool  # whose rows alone are used
    is_made_on_use: bool  # whether some of its flats are; see there


@dataclass(frozen=True, eq=True)
class Layout:
    """How a tree of leaves is cut over `num_ranks` ranks, or fewer: each bucket says into how many
    pieces."""

    num_ranks: int
    leaves: tuple[LeafSpec, ...]  # in tree order
    units: tuple[Unit, ...]
    buckets: tuple[Bucket, ...]
    treedef: Any  # optree's PyTreeSpec of the tree

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Of the leaves, in tree order."""
        return tuple(leaf.path for leaf in self.leaves)

    @cached_property
    def in_buckets(self) -> tuple[tuple[int, int], ...]:
        """For each leaf in tree order: (number of its bucket, its number there)."""
        return _places([bucket.leaves for bucket in self.buckets])

    @cached_property
    def contents(self) -> tuple[UnitContent, ...]:
        """The content of each unit."""
        return tuple(self._content(unit) for unit in self.units)

    def _content(self, unit: Unit) -> UnitContent:
        buckets = tuple(self.buckets[b] for b in unit.buckets)
        leaves: list[int] = []  # number in tree order, by number in the unit
        trained: list[int] = []
        # A unit's gradients come in one list, and each bucket takes its own
        slices: list[slice] = []
        frozen: list[int] = []
        for b, bucket in zip(unit.buckets, buckets, strict=True):
            first = len(leaves)
            leaves += bucket.leaves
            if bucket.trainable:
                trained.append(b)
                slices.append(slice(first, len(leaves)))
            else:
                frozen += range(first, len(leaves))
        return UnitContent(
            buckets=buckets,
            leaves=tuple(leaves),
            trained=tuple(trained),
            slices=tuple(slices),
            frozen=tuple(frozen),
            is_table=any(bucket.cut.by_rows for bucket in buckets),
            is_made_on_use=any(bucket.is_made_on_use for bucket in buckets),
        )

    @cached_property
    def in_units(self) -> tuple[tuple[int, int], ...]:
        """For each leaf in tree order: (number of its unit, its number there)."""
        return _places([content.leaves for content in self.contents])

    @cached_property
    def trained(self) -> tuple[bool, ...]:
        """For each leaf in tree order, whether it is trained."""
        return tuple(leaf.trainable for leaf in self.leaves)

    @cached_property
    def rounds(self) -> bool:
        """Whether some leaf is stored in a half precision, or used in another dtype than it is
        stored in."""
        halves = torch.float16, torch.bfloat16
        return any(bucket.dtypes is not None or bucket.dtype in halves for bucket in self.buckets)

    @cached_property
    def publishes(self) -> bool:
        """Whether some bucket has a published flat beside its pieces."""
        return any(bucket.is_published for bucket in self.buckets)

    @cached_property
    def has_tables(self) -> bool:
        """Whether gradients of some bucket may be `Rows`."""
        return any(bucket.cut.by_rows for bucket in self.buckets)

    @cached_property
    def leaf_cuts(self) -> tuple[tuple[LeafSpec, int, int], ...]:
        """Per leaf, all that its pieces follow from. Equal for trees whose pieces are those of the
        same elements, whichever leaves are trained."""
        cuts = []
        for leaf, (b, k) in zip(self.leaves, self.in_buckets, strict=True):
            bucket = self.buckets[b]
            alike = replace(leaf, trainable=False)
            cuts.append((alike, bucket.offsets[k], bucket.piece))
        return tuple(cuts)

    @cached_property
    def in_words(self) -> str:
        """All in which layouts of equal paths may differ, in words for errors. Texts differ where
        `leaf_cuts` do."""
        levels = _by_value((f"level {leaf.cut.level_name}", leaf.path) for leaf in self.leaves)
        dtypes = _by_value((short(leaf.dtype), leaf.path) for leaf in self.leaves)
        trained = _by_value(
            ("trained" if leaf.trainable else "frozen", leaf.path) for leaf in self.leaves
        )
        # Of shapes, units and places in them as well
        number = zlib.crc32(repr(self.leaf_cuts).encode())
        return f"{levels}; {dtypes}; {trained}; layout {number:08x}"

    @cached_property
    def trainable(self) -> PyTree[bool]:
        """A tree of bools: which leaves are trained."""
        return self.treedef.unflatten(self.trained)

    def extents(self, piece_number: int) -> PyTree[Extent]:
        """The tree of the parts of leaves in the `piece_number`-th pieces of their buckets."""
        extents = [self.buckets[b].extent(k, piece_number) for b, k in self.in_buckets]
        return self.treedef.unflatten(extents)

    @cached_property
    def cuts(self) -> PyTree[Cut]:
        """The tree of the leaves' cuts."""
        return self.treedef.unflatten([leaf.cut for leaf in self.leaves])

    def describe(self) -> dict[str, Any]:
        """The layout as plain data, for comparing ranks and for files."""
        precision, leaves = {}, {}  # paths -> text; leaf paths -> facts
        for leaf in self.leaves:
            leaves[leaf.path] = {
                "shape": list(leaf.shape),
                "dtype": str(leaf.dtype),
                "trained": leaf.trainable,
            }
            if leaf.dtypes is not None:
                precision[leaf.path] = str(leaf.dtypes)
        return {
            "num_ranks": self.num_ranks,
            "precision": precision,
            "leaves": leaves,
            "units": {unit.name: self._describe_unit(unit) for unit in self.units},
        }

    def _describe_unit(self, unit: Unit) -> dict[str, Any]:
        leaves = {}
        for b in unit.buckets:
            bucket = self.buckets[b]
            leaves[bucket.name] = [self.leaves[n].path for n in bucket.leaves]
        return {"modules": list(unit.modules), "leaves": leaves}


def _places(groups: Iterable[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    """For each leaf in tree order: (the number of its group, its number there). `make_layout` has
    seen that each is in one."""
    found = {leaf: (g, k) for g, group in enumerate(groups) for k, leaf in enumerate(group)}
    return tuple(found[leaf] for leaf in sorted(found))


def _by_value(rows: Iterable[tuple[str, str]], most: int = 3) -> str:
    """The one value that all leaves have; else each value with its leaves: "level 3 (a, b) and
    level 1 (c)".

    Args:
        rows: per leaf, a value and the path.
        most: the leaves that are named for each value.
    """
    found = grouped((value, path or "(root)") for value, path in rows)
    if len(found) <= 1:
        return next(iter(found), "no leaves")
    told = []
    for value, names in found.items():
        rest = [f"{len(names) - most} more"] if len(names) > most else []
        told.append(f"{value} ({', '.join(names[:most] + rest)})")
    return " and ".join(told)
