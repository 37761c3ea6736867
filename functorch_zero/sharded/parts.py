"""The tensors that a reduction keeps between steps: in `State.parts` by leaf, for the reduction by
bucket.

`State.parts` is None where nothing is kept, else {"reduction": {name: {path: tensor}}}. Paths of a
program's leaves begin with their tree's. Each name is carried in one of three ways, which gives its
tensors their form:

    "sum"     (1, *shape) per trained leaf: this rank's row of the rows of all ranks
    "pieces"  (n,) per trained leaf: this rank's piece; in a whole state (*shape)
    "same"    as it is, per bucket, under the bucket's name. Of buckets that have one name the later
              ones are numbered

Note [rows]: rows are numbered by the data that ranks hold, since ranks of the same data keep the
same. Only the sum of all rows counts. A whole state has one row, the sum, which becomes rank 0's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor

from ..errors import StructureError, explain
from ..groups.mesh import Axes
from ..layout.flat_buffers import cut, flat_of_leaves, flat_of_pieces, pack, slice_flat, unpack
from ..layout.layout import Bucket, Layout
from ..runtime.reduce import Carried, Kept, Reduction
from ..tree import paths, same_structure
from .params import all_gathered

Parts = dict[str, Any]
Leaves = dict[str, Tensor]  # of one bucket: by path, or by the bucket's name


@dataclass(frozen=True)
class Kind:
    """The kind of one leaf of the parts."""

    carried: Carried
    bucket: int  # its number in the layout
    k: int  # the leaf's position in the bucket; 0 where there is one tensor per bucket


class ReductionParts:
    """The parts of states that are cut by one layout, and the tensors that a reduction keeps.

    Attributes:
        layout: of the params, or of a program's trees together.
    """

    def __init__(self, reduction: Reduction, layout: Layout, axes: Axes):
        self.layout = layout
        self._reduction, self._axes = reduction, axes
        self._names = _distinct_names(layout.buckets)
        self._trained = [b for b, bucket in enumerate(layout.buckets) if bucket.trainable]
        self._piece_number = axes.piece_number
        # A whole state holds each element once, and each replica keeps a value of its own for it:
        # nothing says which to save
        if "pieces" in reduction.keeps.values() and axes.replicate.size > 1:
            raise NotImplementedError(
                f"reduction={type(reduction).__name__} keeps pieces, and replicas of shards would "
                'each keep others. Remedy: keep a "sum", or use one axis of ranks'
            )

    def init(self, device: torch.device) -> Parts | None:
        """The parts before the first step. No communication."""
        kept = {}  # by bucket
        for b in self._trained:
            bucket = self.layout.buckets[b]
            kept[b] = self._reduction.init(bucket, device)
            self._check_init(bucket, kept[b])
        return self.parts_of(kept)

    def parts_of(self, kept: Mapping[int, Kept]) -> Parts | None:
        """Kept tensors by bucket -> parts, which are views of them."""
        return self._parts_by(self._leaves, kept)

    def _parts_by(
        self, leaves_of: Callable[[Tensor, Carried, int], Leaves], kept: Mapping[int, Kept]
    ) -> Parts | None:
        """The leaves that a function makes of each kept tensor, by name."""
        made: Parts = {name: {} for name in self._reduction.keeps}
        for b, own in kept.items():
            for name, carried in self._reduction.keeps.items():
                made[name] |= leaves_of(own[name], carried, b)
        return {"reduction": made} if made else None

    def kept_in(self, parts: Any) -> dict[int, Kept]:
        """The inverse: the kept tensors by bucket."""
        if parts is None and not self._reduction.keeps:
            return {}
        self.check(parts)
        return self._kept_by(self._flat, parts)

    def _kept_by(
        self, flat_of: Callable[[Leaves, Carried, int], Tensor], parts: Parts
    ) -> dict[int, Kept]:
        """The tensors that a function makes of the leaves of each bucket and name."""
        kept: dict[int, Kept] = {}
        for b in self._trained:
            kept[b] = {
                name: flat_of(parts["reduction"][name], carried, b)
                for name, carried in self._reduction.keeps.items()
            }
        return kept

    def check(self, parts: Any, *, whole: bool = False) -> None:
        """Raise StructureError unless the parts of a state, or of a whole one, are those that this
        reduction keeps."""
        name, keeps = type(self._reduction).__name__, self._reduction.keeps
        rank = self._axes.world.rank
        if parts is None and keeps:
            raise StructureError(
                f"the state has no parts, and reduction={name} keeps {[*keeps]} between steps "
                f"(rank {rank}). Remedy: take the state from this step's `init` or `shard`"
            )
        if parts is not None and not keeps:
            raise StructureError(
                f"the state has parts, {paths(parts)[:5]}, and reduction={name} keeps nothing "
                f"(rank {rank}). Remedy: shard with the reduction that they are of, or leave them "
                "behind with state.replace(parts=None)"
            )
        if parts is not None:
            same_structure(self._expected(), parts, what="state.parts", rank=rank)
            self._check_shapes(parts, whole=whole)

    def _check_shapes(self, parts: Parts, *, whole: bool) -> None:
        leaves = optree.tree_leaves(parts)
        for n, (kind, leaf) in enumerate(zip(self.kinds(), leaves, strict=True)):
            expected, got = self._shape_of(kind, whole=whole), getattr(leaf, "shape", None)
            if expected is not None and got != expected:
                raise StructureError(
                    explain(
                        "a tensor that a reduction keeps has another shape",
                        path=f"parts.{paths(parts)[n]}",
                        expected=expected,
                        got=type(leaf).__name__ if got is None else tuple(got),
                        rank=self._axes.world.rank,
                        remedy="take the state from this step's `init` or `shard`",
                    )
                )

    def _shape_of(self, kind: Kind, *, whole: bool) -> tuple[int, ...] | None:
        """The shape of a leaf of the parts; None: it may have any."""
        bucket = self.layout.buckets[kind.bucket]
        if kind.carried == "same":
            return None
        if kind.carried == "sum":
            return (1, *bucket.shapes[kind.k])
        if whole or bucket.cut.num_pieces == 1:
            return bucket.shapes[kind.k]
        return (bucket.extent(kind.k, self._piece_number).num_here,)

    def kinds(self) -> list[Kind]:
        """The kinds of the parts' leaves, in flatten order."""
        leaves: list[Kind] = optree.tree_leaves(self._expected())
        return leaves

    def whole(self, parts: Any, axes: Axes) -> Parts | None:
        """The parts of a whole state, in tensors of their own: sums of rows, and joined pieces.

        Collectives: per bucket and name one all-reduce of a sum, over the ranks of different data,
        or one all-gather of pieces.
        """

        def whole_leaves(kept: Tensor, carried: Carried, b: int) -> Leaves:
            bucket = self.layout.buckets[b]
            if carried == "pieces":
                flat = all_gathered(kept, bucket, axes.optimizer)
                return dict(zip(self._keys(carried, b), unpack(flat, bucket), strict=True))
            flat = kept.clone()  # the given state stays good
            if carried == "sum":
                # Ranks of the same data keep equal rows, of which one counts
                axes.data.all_reduce(flat).wait()
            return self._leaves(flat, carried, b)

        return self._parts_by(whole_leaves, self.kept_in(parts))

    def part(self, whole: Any, device: torch.device) -> Parts | None:
        """This rank's part of a whole state's parts; those of `init`, where it has none. No
        communication."""
        if whole is None:
            return self.init(device)
        self.check(whole, whole=True)
        return self.parts_of(self._kept_by(self._flat_of_whole, whole))

    def _flat_of_whole(self, leaves: Leaves, carried: Carried, b: int) -> Tensor:
        """This rank's flat of a bucket, from the leaves of a whole state's parts; see Note
        [rows]."""
        bucket = self.layout.buckets[b]
        if carried == "same":
            return leaves[self._names[b]].clone()
        own = [leaves[key] for key in self._keys(carried, b)]
        if carried == "pieces":
            return slice_flat(own, bucket, self._piece_number)
        # The one row of a whole state, (numel,)
        row = pack([leaf[0] for leaf in own], bucket, device=own[0].device)
        # Any split with this sum would do; this one is exact
        return row if self._axes.data.rank == 0 else torch.zeros_like(row)

    def _leaves(self, kept: Tensor, carried: Carried, b: int) -> Leaves:
        """The leaves of a bucket, as views of its kept flat."""
        bucket = self.layout.buckets[b]
        if carried == "same":
            return {self._names[b]: kept}
        # An uncut bucket's piece is all of it, and its leaves keep their shapes
        if carried == "pieces" and bucket.cut.num_pieces > 1:
            views = cut(kept, bucket, self._piece_number)
        else:
            views = unpack(kept, bucket)
        if carried == "sum":
            # (1, *shape): this rank's row
            views = [view[None] for view in views]
        return dict(zip(self._keys(carried, b), views, strict=True))

    def _flat(self, leaves: Leaves, carried: Carried, b: int) -> Tensor:
        """The inverse: the flat that the leaves lie in, or a new one."""
        bucket = self.layout.buckets[b]
        if carried == "same":
            return leaves[self._names[b]]
        own = [leaves[key] for key in self._keys(carried, b)]
        if carried == "sum":
            return flat_of_leaves([leaf[0] for leaf in own], bucket)
        if bucket.cut.num_pieces == 1:
            return flat_of_leaves(own, bucket)
        return flat_of_pieces(own, bucket, self._piece_number)

    def _expected(self) -> Parts:
        """The structure of the parts, with a Kind for each leaf."""
        made: Parts = {}
        for name, carried in self._reduction.keeps.items():
            made[name] = {
                key: Kind(carried, b, k)
                for b in self._trained
                for k, key in enumerate(self._keys(carried, b))
            }
        return {"reduction": made}

    def _check_init(self, bucket: Bucket, kept: Kept) -> None:
        """Raise unless a reduction's first tensors have its names, and shapes that fit them."""
        # By how a flat is carried; one that is the same everywhere has any shape
        shapes = {"sum": (bucket.numel,), "pieces": (bucket.piece,), "same": None}
        keeps = self._reduction.keeps
        expected = {name: shapes[carried] for name, carried in keeps.items()}
        got: Any = type(kept).__name__
        if isinstance(kept, Mapping):
            got = {n: None if keeps.get(n) == "same" else (*x.shape,) for n, x in kept.items()}
        if got != expected:
            raise StructureError(
                explain(
                    f"{type(self._reduction).__name__}.init must make the tensors that `keeps` "
                    "names, of these shapes (None: any)",
                    path=bucket.name,
                    expected=expected,
                    got=got,
                    rank=self._axes.world.rank,
                )
            )

    def _keys(self, carried: Carried, b: int) -> list[str]:
        """The keys of a bucket's leaves."""
        if carried == "same":
            return [self._names[b]]
        return [self.layout.leaves[n].path for n in self.layout.buckets[b].leaves]


def _distinct_names(buckets: Sequence[Bucket]) -> list[str]:
    """The names of buckets, each once. A module called "root" beside leaves of the root makes two
    of one name."""
    seen: Counter[str] = Counter()
    names = []
    for bucket in buckets:
        seen[bucket.name] += 1
        number = seen[bucket.name]
        names.append(bucket.name if number == 1 else f"{bucket.name}#{number}")
    return names
