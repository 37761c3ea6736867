"""An optimizer's update on pieces that hold nothing: its collectives, and how much more room it takes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import optree
from optree import PyTree, tree_map
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from ..bunches import Bunches
from ..collectives import cut
from ..errors import TransformError
from ..groups.counting import Call
from ..layout import Layout
from ..levels import Level
from ..optim.base import Needs, Transform, split_fused
from ..owners import Exchange
from ..sharded import Sharded
from ..state_plan import EVERYONE
from ..tree import select
from .live import LiveBytes
from .recording import Recorder


class UpdateCost(NamedTuple):
    """What an update takes."""

    extra: int  # bytes at most, above params, gradients and state
    updates: int  # bytes of the updates it returns


def plan_update(optimizer: Transform, layout: Layout, level: Level, group: Recorder) -> UpdateCost:
    """Run an update on this rank's pieces, as fake tensors. What it calls is recorded in `group`."""
    if optimizer.needs == Needs.POINTWISE:  # no collectives; in cache-sized chunks, in place
        return UpdateCost(0, 0)
    imagined = Recorder(0, 1) if not level.cuts_state else group
    rank = group.rank if level.cuts_state else 0
    with fake_tensors() as mode:
        peak = [0]
        live = LiveBytes(lambda: peak.append(max(peak.pop(), live.now["activations"])))
        with mode:
            params, grads = (_pieces(layout, rank) for _ in range(2))
        across = _Imagined(layout, imagined, layout.trainable)
        with live:
            state = optimizer.init(params, across)
            before = len(imagined.recorded)
            del group.recorded[before if imagined is group else len(group.recorded) :]
            held = live.now["activations"]
            peak[0] = held
            try:
                split = split_fused(optimizer)
                if split is not None and split[0] is not None and across.fuses(split[1], params):
                    split[0].update(grads, state[:-1], params, across)
                    return UpdateCost(max(0, peak[0] - held), 0)
                made, _ = optimizer.update(grads, state, params, across)
            except DataDependentOutputException as error:
                raise TransformError(
                    "the optimizer reads values of tensors on the host, which a plan does not have. "
                    "Remedy: compute with torch.where instead of `if`, or plan with another optimizer of the same needs"
                ) from error
            return UpdateCost(max(0, peak[0] - held), sum(u.nbytes for u in optree.tree_leaves(made)))


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """A mode whose tensors have shapes and no values."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        yield FakeTensorMode(allow_non_fake_inputs=True)


def _pieces(layout: Layout, rank: int) -> PyTree[Tensor]:
    """The trained leaves' pieces, as views of a flat a bucket."""
    import torch

    leaves: list[Any] = [None] * len(layout.leaves)
    for bucket in layout.buckets:
        flat = torch.empty(bucket.piece, dtype=bucket.dtype)
        for number, view in zip(bucket.leaves, cut(flat, bucket, rank), strict=True):
            leaves[number] = view
    return select(layout.treedef.unflatten(leaves), layout.trainable)


class _Imagined(Sharded):
    """`Sharded` for any number of ranks: nothing in it grows with their number times that of the leaves."""

    def __init__(self, layout: Layout, group: Recorder, mask: PyTree[bool]):
        self._layout, self._group, self._donate = layout, group, True
        self._extents = select(layout.extents(group.rank), mask)
        self._is_cut = select(tree_map(lambda cut: cut.num_pieces > 1, layout.cuts), mask)
        self._bunches = Bunches(layout, mask, group.rank, donate=True)
        self._numbers = self._bunches.numbers
        self._exchange = _Sizes(layout, self._numbers, group)
        self._narrowed = {}

    def select(self, mask: PyTree[bool]) -> Sharded:
        chosen = tuple(n for n, keep in zip(self._numbers, optree.tree_leaves(mask), strict=True) if keep)
        if chosen not in self._narrowed:
            of_all = self._layout.treedef.unflatten([i in set(chosen) for i in range(len(self._layout.leaves))])
            assert isinstance(self._group, Recorder)
            self._narrowed[chosen] = _Imagined(self._layout, self._group, of_all)
        return self._narrowed[chosen]


class _Sizes(Exchange):
    """The exchanges of whole leaves, as calls of the right sizes."""

    def __init__(self, layout: Layout, numbers: Sequence[int], group: Recorder):
        places = [layout.places[n] for n in numbers]
        self._recorder = group
        self._shapes = [layout.leaves[n].shape for n in numbers]
        self._here = [layout.buckets[b].extent(k, group.rank).num_here for b, k in places]

    def to_owners(self, trees: list[list[Tensor]], owners: list[int]) -> list[dict[int, Tensor]]:
        rank = self._recorder.rank
        if self._recorder.size > 1:
            for dtype in dict.fromkeys(x.dtype for leaves in trees for x in leaves):
                some = [i for leaves in trees for i, x in enumerate(leaves) if x.dtype == dtype]
                kept = sum(self._here[i] for i in some if owners[i] == rank)
                self._record(dtype, sum(self._here[i] for i in some), kept)
        return [
            {i: x.new_empty(self._shapes[i]) for i, x in enumerate(leaves) if owners[i] in (rank, EVERYONE)}
            for leaves in trees
        ]

    def from_owners(self, results: dict[int, Tensor], leaves: list[Tensor], owners: list[int]) -> list[Tensor]:
        rank = self._recorder.rank
        if self._recorder.size > 1:
            for dtype in dict.fromkeys(x.dtype for x in leaves):
                mine = [i for i, x in enumerate(leaves) if x.dtype == dtype and owners[i] == rank]
                self._record(dtype, sum(results[i].numel() for i in mine), sum(self._here[i] for i in mine))
        return [x.new_empty(here) for x, here in zip(leaves, self._here, strict=True)]

    def _record(self, dtype: Any, num_elements: int, kept: int) -> None:
        self._recorder.note(Call("all_to_all", dtype, num_elements, (num_elements - kept) * dtype.itemsize))
