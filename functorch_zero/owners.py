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
    """

    def __init__(self, layout: Layout, numbers: Sequence[int], group: Group):
        places = [layout.places[n] for n in numbers]
        self._group = group
        self._shapes = [layout.leaves[n].shape for n in numbers]
        self._extents: list[list[Extent]] = [  # for each rank, for each leaf
            [layout.buckets[b].extent(k, rank) for b, k in places] for rank in range(group.size)
        ]

    def to_owners(self, trees: list[list[Tensor]], owners: list[int]) -> list[dict[int, Tensor]]:
        """Pieces of each tree -> whole leaves at their owners, by position. One all-to-all a dtype.

        What is everyone's is whole already.
        """
        here, size = self._group.rank, self._group.size
        shapes = self._shapes
        if size == 1:
            return [{i: x.reshape(shape) for i, (x, shape) in enumerate(zip(t, shapes, strict=True))} for t in trees]
        counts = [[e.num_here for e in row] for row in self._extents]
        whole = [{i: x.reshape(shapes[i]) for i, x in enumerate(t) if owners[i] == EVERYONE} for t in trees]
        items = [(t, i, x) for t, leaves in enumerate(trees) for i, x in enumerate(leaves) if owners[i] != EVERYONE]
        for dtype in _dtypes(items):
            some = [(t, i, x) for t, i, x in items if x.dtype == dtype]
            out = [x for rank in range(size) for t, i, x in some if owners[i] == rank]
            sent = [sum(counts[here][i] for _, i, _ in some if owners[i] == rank) for rank in range(size)]
            mine = [(t, i) for t, i, _ in some if owners[i] == here]
            parts = self._swap(out, sent, [[counts[rank][i] for _, i in mine] for rank in range(size)], some[0][2])
            for k, (t, i) in enumerate(mine):
                whole[t][i] = torch.cat([parts[rank][k] for rank in range(size)]).view(shapes[i])
        return whole

    def from_owners(self, results: dict[int, Tensor], leaves: list[Tensor], owners: list[int]) -> list[Tensor]:
        """Whole leaves at their owners -> everyone's pieces. One all-to-all a dtype."""
        here, size = self._group.rank, self._group.size
        if size == 1:
            return [results[i].reshape(-1) for i in range(len(leaves))]
        extents = self._extents
        pieces = {i: results[i].reshape(-1) for i in range(len(leaves)) if owners[i] == EVERYONE}
        for dtype in dict.fromkeys(x.dtype for i, x in enumerate(leaves) if i not in pieces):
            some = [i for i, x in enumerate(leaves) if x.dtype == dtype and owners[i] != EVERYONE]
            mine = [i for i in some if owners[i] == here]
            flat = {i: results[i].reshape(-1) for i in mine}
            cuts = [[flat[i][extents[r][i].start : extents[r][i].stop] for i in mine] for r in range(size)]
            theirs = [[i for i in some if owners[i] == rank] for rank in range(size)]
            counts = [[extents[here][i].num_here for i in theirs[rank]] for rank in range(size)]
            sent = [sum(x.numel() for x in cuts[rank]) for rank in range(size)]
            parts = self._swap([x for row in cuts for x in row], sent, counts, leaves[some[0]])
            for rank in range(size):  # copies: views of what was received could be taken for views of a bucket
                pieces.update(zip(theirs[rank], (part.clone() for part in parts[rank]), strict=True))
        return [pieces[i] for i in range(len(leaves))]

    def _swap(self, out: list[Tensor], sent: list[int], counts: list[list[int]], like: Tensor) -> list[list[Tensor]]:
        """One all-to-all of packed runs; `counts[rank]` are the sizes of what comes from each rank."""
        source = torch.cat([like.new_empty(0), *(x.reshape(-1) for x in out)])
        received = [sum(row) for row in counts]
        target = like.new_empty(sum(received))
        self._group.all_to_all(target, received, source, sent).wait()
        return [list(run.split(row)) for run, row in zip(target.split(received), counts, strict=True)]


def _dtypes(items: Sequence[tuple[int, int, Tensor]]) -> list[torch.dtype]:
    return list(dict.fromkeys(x.dtype for _, _, x in items))


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
