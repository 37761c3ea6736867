"""`Cuts`: which leaves this library has cut from which of its flats. A leaf is known by itself: no
storage is looked up, and a leaf from anywhere else lies in no flat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

from torch import Tensor

from ..layout.sharded_tree import ShardedTree
from ..tree import PyTree


class Cuts:
    """Flats (piece,), each with the leaves that are cut from it. It keeps both alive."""

    def __init__(self) -> None:
        # By the id of the first leaf, since any other flat's is another tensor
        self._flats: dict[int, tuple[Sequence[Tensor], Tensor]] = {}
        self._ids: set[int] = set()  # of all leaves

    @classmethod
    def of(cls, tree: ShardedTree, local: PyTree[Tensor | None]) -> Cuts:
        """Those of a tree, whose local tensors these are."""
        made, layout = cls(), tree.sharding.layout
        flats, leaves = tree.known_flats, layout.treedef.flatten_up_to(local)
        if flats is not None:
            for flat, bucket in zip(flats, layout.buckets, strict=True):
                if flat is not None:
                    made.add([leaves[n] for n in bucket.leaves], flat)
        return made

    def add(self, leaves: Sequence[Tensor], flat: Tensor) -> None:
        """Note the leaves that are cut from a flat, in order."""
        self._flats[id(leaves[0])] = leaves, flat
        self._ids.update(map(id, leaves))

    def replace(self, old: Sequence[Tensor], leaves: Sequence[Tensor], flat: Tensor) -> None:
        """The same of leaves that take the place of others, whose flat may go."""
        gone, _ = self._flats.pop(id(old[0]), ((), None))
        self._ids.difference_update(map(id, gone))
        self.add(leaves, flat)

    def flat_of(self, leaves: Sequence[Any]) -> Tensor | None:
        """The flat that just these leaves are cut from; of one among others, its part of it. None:
        they are from elsewhere."""
        known, flat = self._flats.get(id(leaves[0]), ((), None))
        if len(known) == len(leaves) and all(map(is_, known, leaves)):
            return flat
        return leaves[0] if len(leaves) == 1 and id(leaves[0]) in self._ids else None

    def among(self, leaves: Iterable[Any]) -> Cuts:
        """Those of flats that the leaves of a tree are cut from."""
        made = Cuts()
        for first in self._flats.keys() & {*map(id, leaves)}:
            made.add(*self._flats[first])
        return made


@dataclass
class UpdateFlats:
    """The flats that one update was given, and may write over where they were donated; those that
    it makes are added. A flat of updates, or of a state, is nothing else."""

    updates: Cuts = field(default_factory=Cuts)
    params: Cuts = field(default_factory=Cuts)
    state: Cuts = field(default_factory=Cuts)

    def begin(self, updates: Cuts, params: Cuts, state: Cuts) -> None:
        """An update begins, of trees of which this is known."""
        self.updates, self.params, self.state = updates, params, state
