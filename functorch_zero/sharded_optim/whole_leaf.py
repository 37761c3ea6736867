"""Whole leaves at their owners, or everywhere: one packed all-to-all in, one out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from optree import tree_map
from torch import Tensor

from ..groups.protocol import Group
from ..layout.extent import Extent
from ..layout.layout import Layout
from ..optim.across import WholeLeaf
from .state_plan import EVERYONE


class Exchange:
    """Moves leaves between pieces and owners. Leaves are known by their position among `numbers`.

    Args:
        layout: how all leaves are cut over the group.
        numbers: the leaves, by their number in the layout.

    Only the ranks that hold something of a leaf are gone through, so its cost does not grow with
    leaves times ranks.
    """

    def __init__(self, layout: Layout, numbers: Sequence[int], group: Group):
        self._group = group
        self._shapes = [layout.leaves[n].shape for n in numbers]
        self._places = [(layout.buckets[b], k) for b, k in (layout.places[n] for n in numbers)]

    def to_owners(self, trees: list[list[Tensor]], owners: list[int]) -> list[dict[int, Tensor]]:
        """Pieces of each tree -> whole leaves at their owners, by position. One all-to-all a dtype.

        A leaf that is not cut is whole already.
        """
        everyone, shapes = range(self._group.size), self._shapes
        if self._group.size == 1:
            return [
                {i: x.reshape(shape) for i, (x, shape) in enumerate(zip(t, shapes, strict=True))}
                for t in trees
            ]
        whole = [
            {i: x.reshape(shapes[i]) for i, x in enumerate(t) if not self._is_cut(i)} for t in trees
        ]
        items = [
            (t, i, x)
            for t, leaves in enumerate(trees)
            for i, x in enumerate(leaves)
            if self._is_cut(i)
        ]
        for dtype in dict.fromkeys(x.dtype for _, _, x in items):
            some = [(t, i, x) for t, i, x in items if x.dtype == dtype]
            like = some[0][2]
            runs = [
                (rank, x)
                for _, i, x in some
                for rank in (everyone if owners[i] == EVERYONE else (owners[i],))
            ]
            mine = [(t, i) for t, i, _ in some if owners[i] in (self._group.rank, EVERYONE)]
            sizes = [
                (rank, m, part.num_here)
                for m, (_, i) in enumerate(mine)
                for rank, part in self._parts(i)
            ]
            parts: list[list[Tensor]] = [[] for _ in mine]
            for (_, m, _), part in self._swap(runs, sizes, like):
                parts[m].append(part)
            for (t, i), found in zip(mine, parts, strict=True):
                joined = found[0] if len(found) == 1 else torch.cat([like.new_empty(0), *found])
                whole[t][i] = joined.reshape(shapes[i])
        return whole

    def from_owners(
        self, results: dict[int, Tensor], leaves: list[Tensor], owners: list[int]
    ) -> list[Tensor]:
        """Whole leaves at their owners -> everyone's pieces. One all-to-all a dtype."""
        here = self._group.rank
        if self._group.size == 1:
            return [results[i].reshape(-1) for i in range(len(leaves))]
        pieces = {i: results[i].reshape(-1) for i in range(len(leaves)) if owners[i] == EVERYONE}
        for dtype in dict.fromkeys(x.dtype for i, x in enumerate(leaves) if i not in pieces):
            some = [i for i, x in enumerate(leaves) if x.dtype == dtype and owners[i] != EVERYONE]
            flat = {i: results[i].reshape(-1) for i in some if owners[i] == here}
            runs = [(rank, flat[i][part.in_leaf]) for i in flat for rank, part in self._parts(i)]
            sizes = [(owners[i], i, self._part(i, here).num_here) for i in some]
            for (_, i, _), part in self._swap(runs, sizes, leaves[some[0]]):
                # A view of what was received could be taken for a view of a bucket
                pieces[i] = part.clone()
        return [pieces[i] for i in range(len(leaves))]

    def _is_cut(self, i: int) -> bool:
        return self._places[i][0].cut.num_pieces > 1

    def _part(self, i: int, rank: int) -> Extent:
        bucket, k = self._places[i]
        return bucket.extent(k, rank)

    def _parts(self, i: int) -> list[tuple[int, Extent]]:
        """The parts of a leaf, by rank, of the ranks that hold something of it."""
        bucket, k = self._places[i]
        start, numel = bucket.offsets[k], bucket.numels[k]
        holders = (
            range(start // bucket.piece, -(-(start + numel) // bucket.piece)) if numel else range(0)
        )
        return [(rank, bucket.extent(k, rank)) for rank in holders]

    def _swap(
        self, runs: list[tuple[int, Tensor]], sizes: list[tuple[int, int, int]], like: Tensor
    ) -> list[tuple[tuple[int, int, int], Tensor]]:
        """One all-to-all of packed `(rank, run)`s. What comes is `sizes`: (from which rank, what,
        elements).

        What this rank has for itself comes as it is, without a copy.
        """
        here, num_ranks = self._group.rank, self._group.size
        outgoing: list[list[Tensor]] = [[] for _ in range(num_ranks)]
        for rank, run in runs:
            outgoing[rank].append(run)
        own = iter([run for run in outgoing[here] if run.numel()])
        outgoing[here] = []
        # Stable: what comes from one rank stays in its order
        expected = sorted(sizes, key=lambda size: size[0])
        lengths = [0 if rank == here else size for rank, _, size in expected]
        received = [0] * num_ranks
        for (rank, _, _), length in zip(expected, lengths, strict=True):
            received[rank] += length
        source = torch.cat([like.new_empty(0), *(run for some in outgoing for run in some)])
        target = like.new_empty(sum(received))
        sent = [sum(run.numel() for run in some) for some in outgoing]
        self._group.all_to_all(target, received, source, sent).wait()
        came = zip(expected, target.split(lengths), strict=True)
        return [(what, next(own) if what[0] == here and what[2] else part) for what, part in came]


def batches(part: WholeLeaf, whole: dict[int, Tensor]) -> list[list[int]]:
    """Positions of leaves that run together: of one shape and dtype, if the transform takes
    batches."""
    if not part.batched:
        return [[i] for i in whole]
    alike: dict[Any, list[int]] = {}
    for i, x in whole.items():
        alike.setdefault((x.shape, x.dtype), []).append(i)
    return list(alike.values())


def run_batch(
    part: WholeLeaf, updates: list[Tensor], states: list[Any], params: list[Tensor | None]
) -> tuple[list[Tensor], list[Any]]:
    if not part.batched:
        new_u, new_s = part.update(updates[0], states[0], params[0])
        return [new_u], [new_s]
    stacked = tree_map(lambda *xs: torch.stack(xs), *states)
    given = torch.stack([p for p in params if p is not None]) if part.wants_param else None
    new_u, new_s = part.update(torch.stack(updates), stacked, given)
    return list(new_u.unbind()), [
        tree_map(lambda x, k=k: x[k].clone(), new_s) for k in range(len(updates))
    ]
