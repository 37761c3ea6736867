"""Whole leaves at their owners: one packed all-to-all in, one out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from optree import tree_map
from torch import Tensor

from .across import WholeLeaf
from .groups.protocol import Group
from .layout import Extent, Layout
from .state_plan import EVERYONE


class Exchange:
    """Moves leaves between pieces and owners. Leaves are known by their position among `numbers`.

    Args:
        layout: how all leaves are cut over the group.
        numbers: the leaves, by their number in the layout.

    Only the ranks that hold something of a leaf are gone through, so its cost does not grow with leaves times ranks.
    """

    def __init__(self, layout: Layout, numbers: Sequence[int], group: Group):
        self._group = group
        self._shapes = [layout.leaves[n].shape for n in numbers]
        self._places = [(layout.buckets[b], k) for b, k in (layout.places[n] for n in numbers)]

    def to_owners(self, trees: list[list[Tensor]], owners: list[int]) -> list[dict[int, Tensor]]:
        """Pieces of each tree -> whole leaves at their owners, by position. One all-to-all a dtype.

        What is everyone's is whole already.
        """
        here, shapes = self._group.rank, self._shapes
        if self._group.size == 1:
            return [{i: x.reshape(shape) for i, (x, shape) in enumerate(zip(t, shapes, strict=True))} for t in trees]
        whole = [{i: x.reshape(shapes[i]) for i, x in enumerate(t) if owners[i] == EVERYONE} for t in trees]
        items = [(t, i, x) for t, leaves in enumerate(trees) for i, x in enumerate(leaves) if owners[i] != EVERYONE]
        for dtype in dict.fromkeys(x.dtype for _, _, x in items):
            some = [(t, i, x) for t, i, x in items if x.dtype == dtype]
            runs = [(owners[i], x) for _, i, x in some]
            mine = [(t, i) for t, i, _ in some if owners[i] == here]
            sizes = [(rank, m, part.num_here) for m, (_, i) in enumerate(mine) for rank, part in self._parts(i)]
            parts: list[list[Tensor]] = [[] for _ in mine]
            for (_, m, _), part in self._swap(runs, sizes, some[0][2]):
                parts[m].append(part)
            for (t, i), found in zip(mine, parts, strict=True):
                whole[t][i] = torch.cat([some[0][2].new_empty(0), *found]).view(shapes[i])
        return whole

    def from_owners(self, results: dict[int, Tensor], leaves: list[Tensor], owners: list[int]) -> list[Tensor]:
        """Whole leaves at their owners -> everyone's pieces. One all-to-all a dtype."""
        here = self._group.rank
        if self._group.size == 1:
            return [results[i].reshape(-1) for i in range(len(leaves))]
        pieces = {i: results[i].reshape(-1) for i in range(len(leaves)) if owners[i] == EVERYONE}
        for dtype in dict.fromkeys(x.dtype for i, x in enumerate(leaves) if i not in pieces):
            some = [i for i, x in enumerate(leaves) if x.dtype == dtype and owners[i] != EVERYONE]
            flat = {i: results[i].reshape(-1) for i in some if owners[i] == here}
            runs = [(rank, flat[i][part.start : part.stop]) for i in flat for rank, part in self._parts(i)]
            sizes = [(owners[i], i, self._part(i, here).num_here) for i in some]
            for (_, i, _), part in self._swap(runs, sizes, leaves[some[0]]):
                pieces[i] = part.clone()  # a view of what was received could be taken for a view of a bucket
        return [pieces[i] for i in range(len(leaves))]

    def _part(self, i: int, rank: int) -> Extent:
        bucket, k = self._places[i]
        return bucket.extent(k, rank)

    def _parts(self, i: int) -> list[tuple[int, Extent]]:
        """What the ranks hold of a leaf, those that hold something of it."""
        bucket, k = self._places[i]
        start, numel = bucket.offsets[k], bucket.numels[k]
        holders = range(start // bucket.piece, -(-(start + numel) // bucket.piece)) if numel else range(0)
        return [(rank, bucket.extent(k, rank)) for rank in holders]

    def _swap(
        self, runs: list[tuple[int, Tensor]], sizes: list[tuple[int, int, int]], like: Tensor
    ) -> list[tuple[tuple[int, int, int], Tensor]]:
        """One all-to-all of packed `(rank, run)`s. What comes is `sizes`: (from which rank, what, elements)."""
        sent, received = [0] * self._group.size, [0] * self._group.size
        for rank, run in runs:
            sent[rank] += run.numel()
        for rank, _, size in sizes:
            received[rank] += size
        ordered = sorted(runs, key=lambda run: run[0])  # stable: runs for one rank stay in their order
        source = torch.cat([like.new_empty(0), *(run.reshape(-1) for _, run in ordered)])
        target = like.new_empty(sum(received))
        self._group.all_to_all(target, received, source, sent).wait()
        expected = sorted(sizes, key=lambda size: size[0])
        return list(zip(expected, target.split([size for _, _, size in expected]), strict=True))


def batches(part: WholeLeaf, whole: dict[int, Tensor]) -> list[list[int]]:
    """Positions of leaves that run together: of one shape and dtype, if the transform takes batches."""
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
    return list(new_u.unbind()), [tree_map(lambda x, k=k: x[k].clone(), new_s) for k in range(len(updates))]
