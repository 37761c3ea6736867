"""What a reduction keeps between steps: in `State.parts` by leaf, for the reduction by bucket.

`State.parts` is None where nothing is kept, else {"reduction": {name: {path: tensor}}}. A tensor
lies there as its name is carried:

    "sum"     (1, *shape) per trained leaf: this rank's row of the rows of all ranks
    "pieces"  (n,) per trained leaf: this rank's piece; in a whole state (*shape)
    "same"    as it is, per bucket, under the bucket's name

Note [rows]: rows are numbered by the data that ranks hold, since ranks of the same data keep the
same. Only the sum of all rows counts. A whole state has one row, the sum, which becomes rank 0's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor

from ..errors import StructureError, explain
from ..groups.mesh import Axes
from ..layout.flat_buffers import cut, flat_of_leaves, flat_of_pieces, slice_flat, unpack
from ..layout.layout import Bucket, Layout
from ..runtime.reduce import Carried, Kept, Reduction
from ..tree import paths, same_structure

Parts = dict[str, Any]
Leaves = dict[str, Tensor]  # of one bucket: by path, or by the bucket's name


@dataclass(frozen=True)
class Kind:
    """A leaf of the parts."""

    carried: Carried
    bucket: int
    k: int  # the leaf's position in the bucket; 0 where it is no leaf's


class ReductionParts:
    """The parts of states that are cut by one layout, and the tensors that a reduction keeps."""

    def __init__(self, reduction: Reduction, layout: Layout, axes: Axes):
        self._reduction, self._layout, self._axes = reduction, layout, axes
        self._rank = axes.number
        if "pieces" in reduction.keeps.values() and axes.replicate.size > 1:
            raise NotImplementedError(
                f"reduction={type(reduction).__name__} keeps pieces, and replicas of shards would "
                'each keep others. Remedy: keep a "sum", or use one axis of ranks'
            )

    def init(self, device: torch.device) -> Parts | None:
        """Before the first step. No communication."""
        kept = {}
        for b, bucket in self._trained():
            kept[b] = self._reduction.init(bucket, device)
            self._check_init(bucket, kept[b])
        return self.parts_of(kept)

    def parts_of(self, kept: Mapping[int, Kept]) -> Parts | None:
        """What is kept by bucket -> parts, as views."""
        made: Parts = {}
        for name, carried in self._reduction.keeps.items():
            made[name] = {}
            for b, bucket in self._trained():
                made[name] |= self._leaves(kept[b][name], carried, bucket)
        return {"reduction": made} if made else None

    def kept_in(self, parts: Any) -> dict[int, Kept]:
        """The inverse: what is kept by bucket."""
        if parts is None and not self._reduction.keeps:
            return {}
        self.check(parts)
        kept: dict[int, Kept] = {}
        for b, bucket in self._trained():
            kept[b] = {
                name: self._flat(parts["reduction"][name], carried, bucket)
                for name, carried in self._reduction.keeps.items()
            }
        return kept

    def check(self, parts: Any) -> None:
        """Raise StructureError unless the parts of a state are those that this reduction keeps."""
        name = type(self._reduction).__name__
        if parts is None and self._reduction.keeps:
            raise StructureError(
                f"the state has no parts, and reduction={name} keeps {[*self._reduction.keeps]} "
                f"between steps (rank {self._axes.world.rank}). Remedy: take the state from this "
                "step's `init` or `shard_state`"
            )
        if parts is not None and not self._reduction.keeps:
            raise StructureError(
                f"the state has parts, {paths(parts)[:5]}, and reduction={name} keeps nothing "
                f"(rank {self._axes.world.rank}). Remedy: shard with the reduction that they are "
                "of, or leave them behind with state.replace(parts=None)"
            )
        if parts is not None:
            same_structure(self._expected(), parts, what="state.parts", rank=self._axes.world.rank)

    def kinds(self) -> list[Kind]:
        """Of the parts' leaves, in flatten order."""
        leaves: list[Kind] = optree.tree_leaves(self._expected())
        return leaves

    def whole(self, parts: Any, axes: Axes) -> Parts | None:
        """The parts of a whole state, in tensors of their own: sums of rows, and joined pieces.

        Per bucket, one all-reduce over the ranks' data for each sum, one all-gather for pieces.
        """
        made: Parts = {name: {} for name in self._reduction.keeps}
        for b, kept in self.kept_in(parts).items():
            bucket = self._layout.buckets[b]
            for name, carried in self._reduction.keeps.items():
                flat = kept[name].clone()
                if carried == "sum":
                    axes.data.all_reduce(flat).wait()
                if carried != "pieces":
                    made[name] |= self._leaves(flat, carried, bucket)
                    continue
                if bucket.cut.num_pieces > 1:
                    piece, flat = flat, flat.new_empty(bucket.numel)
                    axes.optimizer.all_gather(flat, piece).wait()
                made[name] |= dict(zip(self._paths(bucket), unpack(flat, bucket), strict=True))
        return {"reduction": made} if made else None

    def part(self, whole: Any, device: torch.device) -> Parts | None:
        """This rank's part of a whole state's parts; first ones, where it has none. No
        communication."""
        if whole is None:
            return self.init(device)
        self.check(whole)
        kept: dict[int, Kept] = {}
        for b, bucket in self._trained():
            kept[b] = {
                name: self._flat_of_whole(whole["reduction"][name], carried, bucket)
                for name, carried in self._reduction.keeps.items()
            }
        return self.parts_of(kept)

    def _flat_of_whole(self, leaves: Leaves, carried: Carried, bucket: Bucket) -> Tensor:
        if carried == "same":
            return leaves[bucket.name].clone()
        own = [leaves[key] for key in self._paths(bucket)]
        if carried == "pieces":
            return slice_flat(own, bucket, self._rank)
        row = flat_of_leaves([x[0] for x in own], bucket)
        return row.clone() if self._axes.data.rank == 0 else torch.zeros_like(row)

    def _leaves(self, kept: Tensor, carried: Carried, bucket: Bucket) -> Leaves:
        """Views of what is kept of a bucket."""
        if carried == "same":
            return {bucket.name: kept}
        if carried == "pieces" and bucket.cut.num_pieces > 1:
            views = cut(kept, bucket, self._rank)
        else:
            views = unpack(kept, bucket)
        if carried == "sum":
            views = [view[None] for view in views]
        return dict(zip(self._paths(bucket), views, strict=True))

    def _flat(self, leaves: Leaves, carried: Carried, bucket: Bucket) -> Tensor:
        """The inverse: the flat that the leaves lie in, or a new one."""
        if carried == "same":
            return leaves[bucket.name]
        own = [leaves[key] for key in self._paths(bucket)]
        if carried == "sum":
            return flat_of_leaves([x[0] for x in own], bucket)
        if bucket.cut.num_pieces == 1:
            return flat_of_leaves(own, bucket)
        return flat_of_pieces(own, bucket, self._rank)

    def _expected(self) -> Parts:
        """The structure of the parts, with a Kind for each leaf."""
        made: Parts = {}
        for name, carried in self._reduction.keeps.items():
            made[name] = {}
            for b, bucket in self._trained():
                keys = [bucket.name] if carried == "same" else self._paths(bucket)
                made[name] |= {key: Kind(carried, b, k) for k, key in enumerate(keys)}
        return {"reduction": made}

    def _check_init(self, bucket: Bucket, kept: Kept) -> None:
        name, keeps = type(self._reduction).__name__, self._reduction.keeps
        rank = self._axes.world.rank
        if kept.keys() != keeps.keys():
            raise StructureError(
                explain(
                    f"{name}.init must make what `keeps` names",
                    path=bucket.name,
                    expected=sorted(keeps),
                    got=sorted(kept),
                    rank=rank,
                )
            )
        shapes = {"sum": (bucket.numel,), "pieces": (bucket.piece,)}
        for key, carried in keeps.items():
            expected = shapes.get(carried)
            if expected is not None and kept[key].shape != expected:
                raise StructureError(
                    explain(
                        f"{name}.init: {key!r} is carried as {carried!r} and has another shape",
                        path=bucket.name,
                        expected=expected,
                        got=tuple(kept[key].shape),
                        rank=rank,
                    )
                )

    def _trained(self) -> Iterator[tuple[int, Bucket]]:
        return ((b, x) for b, x in enumerate(self._layout.buckets) if x.trainable)

    def _paths(self, bucket: Bucket) -> list[str]:
        return [self._layout.leaves[n].path for n in bucket.leaves]
