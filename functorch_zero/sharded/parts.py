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

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import StructureError
from ..groups.mesh import Axes
from ..layout.flat_buffers import cut, flat_of_leaves, flat_of_pieces, pack, slice_flat, unpack
from ..layout.layout import Bucket, Layout
from ..runtime.reduce import Carried, Kept, Reduction
from ..tree import paths, same_structure

Parts = dict[str, Any]
TreeBucket = tuple[str, int]  # the place of a tree, and the number of one of its buckets


@dataclass(frozen=True)
class KeptFlat:
    """A tensor that a reduction keeps of one bucket, and its leaves in the parts.

    Attributes:
        at: the tree's place, and the bucket's number there.
        piece_number: of this rank's piece of it.
        keys: of the leaves in the parts.
    """

    name: str
    carried: Carried
    bucket: Bucket
    at: TreeBucket
    piece_number: int
    keys: Sequence[str]

    @property
    def is_cut(self) -> bool:
        """Whether the leaves are parts (n,). An uncut bucket's piece is all of it."""
        return self.carried == "pieces" and self.bucket.cut.num_pieces > 1

    def shapes(self, *, whole: bool) -> list[tuple[int, ...] | None]:
        """Of the leaves in a state, or in a whole one; None: it may be any."""
        if self.carried == "same":
            return [None]
        if self.carried == "sum":
            return [(1, *shape) for shape in self.bucket.shapes]
        if whole or not self.is_cut:
            return [*self.bucket.shapes]
        numbers = range(len(self.keys))
        return [(self.bucket.extent(k, self.piece_number).num_here,) for k in numbers]

    def leaves(self, flat: Tensor) -> Sequence[Tensor]:
        """The leaves, as views of the tensor."""
        if self.carried == "same":
            return [flat]
        if self.is_cut:
            return cut(flat, self.bucket, self.piece_number)
        views = unpack(flat, self.bucket)
        # (1, *shape): this rank's row
        return [view[None] for view in views] if self.carried == "sum" else views

    def flat(self, leaves: Sequence[Tensor]) -> Tensor:
        """The inverse: the tensor that the leaves lie in, or a new one."""
        if self.carried == "same":
            return leaves[0]
        if self.is_cut:
            return flat_of_pieces(leaves, self.bucket, self.piece_number)
        rows = [leaf[0] for leaf in leaves] if self.carried == "sum" else leaves
        return flat_of_leaves(rows, self.bucket)

    def whole(self, flat: Tensor, axes: Axes) -> Sequence[Tensor]:
        """The leaves in a whole state, in tensors of their own. One collective, unless the tensor
        is the same everywhere."""
        if self.is_cut:
            whole = flat.new_empty(self.bucket.numel)
            axes.optimizer.all_gather(whole, flat).wait()
            return unpack(whole, self.bucket)
        flat = flat.clone()  # the given state stays good
        if self.carried == "sum":
            # Ranks of the same data keep equal rows, of which one counts
            axes.data.all_reduce(flat).wait()
        return self.leaves(flat)

    def part(self, leaves: Sequence[Tensor], axes: Axes) -> Tensor:
        """This rank's tensor, from the leaves in a whole state; see Note [rows]."""
        if self.carried == "same":
            return leaves[0].clone()
        if self.carried == "pieces":
            return slice_flat(leaves, self.bucket, self.piece_number)
        # The one row of a whole state, (numel,)
        row = pack([leaf[0] for leaf in leaves], self.bucket, device=leaves[0].device)
        # Any split with this sum would do; this one is exact
        return row if axes.data.rank == 0 else torch.zeros_like(row)


class ReductionParts:
    """The parts of states whose values hold the same trained trees, and the tensors that a
    reduction keeps of these.

    Args:
        layouts: of the trees, by their places, with which paths begin; "": they don't.
    """

    def __init__(self, reduction: Reduction, layouts: Mapping[str, Layout], axes: Axes):
        self._reduction, self._axes = reduction, axes
        # A whole state holds each element once, and each replica keeps a value of its own for it:
        # nothing says which to save
        if "pieces" in reduction.keeps.values() and axes.replicate.size > 1:
            raise NotImplementedError(
                f"reduction={type(reduction).__name__} keeps pieces, and replicas of shards would "
                'each keep others. Remedy: keep a "sum", or use one axis of ranks'
            )
        self._flats: list[KeptFlat] = []
        self._trained: dict[TreeBucket, Bucket] = {}
        for tree, layout in layouts.items():
            names = _distinct_names(layout.buckets)
            for b, bucket in enumerate(layout.buckets):
                if not bucket.trainable:
                    continue
                self._trained[tree, b] = bucket
                own_paths = [layout.leaves[n].path for n in bucket.leaves]
                for name, carried in reduction.keeps.items():
                    named = [names[b]] if carried == "same" else own_paths
                    keys = [f"{tree}.{key}" if tree else key for key in named]
                    made = KeptFlat(name, carried, bucket, (tree, b), axes.piece_number, keys)
                    self._flats.append(made)

    def by_leaf(self, leaves_of: Callable[[KeptFlat], Sequence[Any]]) -> Parts | None:
        """Parts of the leaves that a function gives for each kept tensor."""
        made: Parts = {name: {} for name in self._reduction.keeps}
        for own in self._flats:
            made[own.name] |= zip(own.keys, leaves_of(own), strict=True)
        return {"reduction": made} if made else None

    def _kept(
        self, parts: Parts, flat_of: Callable[[KeptFlat, Sequence[Tensor]], Tensor]
    ) -> dict[TreeBucket, Kept]:
        """By bucket, the tensors that a function makes of their leaves in the parts."""
        kept = defaultdict[TreeBucket, dict[str, Tensor]](dict)
        for own in self._flats:
            leaves = parts["reduction"][own.name]
            kept[own.at][own.name] = flat_of(own, [leaves[key] for key in own.keys])
        return {**kept}

    def init(self, device: torch.device) -> Parts | None:
        """The parts before the first step. No communication."""
        kept: dict[TreeBucket, Kept] = {}
        for at, bucket in self._trained.items():
            kept[at] = self._reduction.init(bucket, device)
            self._check_init(bucket, kept[at])
        return self.parts_of(kept)

    def parts_of(self, kept: Mapping[TreeBucket, Kept]) -> Parts | None:
        """Kept tensors by bucket -> parts, which are views of them."""
        return self.by_leaf(lambda own: own.leaves(kept[own.at][own.name]))

    def kept_in(self, parts: Any) -> dict[TreeBucket, Kept]:
        """The inverse: the kept tensors by bucket."""
        self.check(parts)
        return self._kept(parts, KeptFlat.flat)

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
            structure = self.by_leaf(lambda own: own.keys)
            same_structure(structure, parts, what="state.parts", rank=rank)
            self._check_shapes(parts, whole=whole)

    def _check_shapes(self, parts: Parts, *, whole: bool) -> None:
        for own in self._flats:
            for key, expected in zip(own.keys, own.shapes(whole=whole), strict=True):
                leaf = parts["reduction"][own.name][key]
                got = getattr(leaf, "shape", None)
                if expected is not None and got != expected:
                    raise StructureError(
                        "a tensor that a reduction keeps has another shape",
                        path=f"parts.reduction.{own.name}.{key}",
                        expected=expected,
                        got=type(leaf).__name__ if got is None else tuple(got),
                        rank=self._axes.world.rank,
                        remedy="take the state from this step's `init` or `shard`",
                    )

    def whole(self, parts: Any, axes: Axes) -> Parts | None:
        """The parts of a whole state, in tensors of their own: sums of rows, and joined pieces.

        Collectives: per bucket and name one all-reduce of a sum, over the ranks of different data,
        or one all-gather of pieces.
        """
        kept = self.kept_in(parts)
        return self.by_leaf(lambda own: own.whole(kept[own.at][own.name], axes))

    def part(self, whole: Any, device: torch.device) -> Parts | None:
        """This rank's part of a whole state's parts; those of `init`, where it has none. No
        communication."""
        if whole is None:
            return self.init(device)
        self.check(whole, whole=True)
        return self.parts_of(self._kept(whole, lambda own, leaves: own.part(leaves, self._axes)))

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
                f"{type(self._reduction).__name__}.init must make the tensors that `keeps` "
                "names, of these shapes (None: any)",
                path=bucket.name,
                expected=expected,
                got=got,
                rank=self._axes.world.rank,
            )


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
