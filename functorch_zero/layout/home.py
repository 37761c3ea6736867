"""`Home`: a flat that a node of a tree owns, with the leaves that are cut from it; `HomedLeaves`:
all leaves of such a node."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property
from operator import attrgetter, is_
from typing import Any, NamedTuple

import optree
from torch import Tensor

from .._torch_private import version_of


class Lease:
    """Of tensors that a node owns. Pieces of them have it, too, and so every tree that they are put
    into.

    Attributes:
        has_ended: whether a step has written over the tensors.
    """

    has_ended = False


has_ended = attrgetter("has_ended")


class Home(Lease):
    """A flat (piece,), which a step that is given its node may write over.

    Args:
        flat: this rank's part of a bucket; or rows of the bucket's one leaf.
        kind: which bucket of which layout, and whether the flat is held or a piece.
        leaves: views of the flat, in order; None: they are still to be cut.

    Attributes:
        published: the published flat; see Note [published flats] in `layout`.
    """

    published: Published | None = None

    def __init__(self, flat: Any, kind: Any = None, leaves: Sequence[Any] | None = None):
        self.flat, self.kind, self.leaves = flat, kind, leaves

    def handed_on(self) -> Home:
        """Its flat in a home of its own, for somebody who writes over it; this one has ended."""
        made = Home(self.flat, self.kind, self.leaves)
        self.has_ended, self.flat, self.leaves, self.published = True, None, None, None
        return made

    def is_of(self, leaves: Sequence[Any]) -> bool:
        """Whether just these are cut from it."""
        known = self.leaves or ()
        return len(known) == len(leaves) and all(map(is_, known, leaves))


class Published:
    """A published flat, for as long as nobody writes to it, or to the piece that it was made of.

    Leaves are views of the piece, and all writes to them count for it.
    """

    def __init__(self, published: Tensor, piece: Tensor):
        self._published, self._writes = published, _writes_to(published, piece)

    def of(self, piece: Tensor) -> Tensor | None:
        """The flat, if it is still that of this piece."""
        writes = _writes_to(self._published, piece)
        return self._published if writes is not None and writes == self._writes else None


def _writes_to(*tensors: Tensor) -> list[int] | None:
    """How often the tensors have been written to; None: those of inference mode don't count it."""
    if any(tensor.is_inference() for tensor in tensors):
        return None
    return [version_of(tensor) for tensor in tensors]


Positions = tuple[int, ...]  # of a home's leaves, in order, among those of a tree


class Homes:
    """Flats (piece,), found by the leaves that are cut from them. A leaf is known by itself: no
    storage is looked up, and a leaf from anywhere else lies in no flat."""

    def __init__(self, homes: Iterable[Home | None] = ()):
        self._homes = homes

    @cached_property
    def _by_leaf(self) -> dict[int, Home]:
        """By the id of a leaf. With `map`, since this runs for every leaf at every step."""
        known: dict[int, Home] = {}
        for home in filter(None, self._homes):
            known |= _by_leaf(home)
        return known

    @property
    def ids(self) -> set[int]:
        """Of the flats that were given, and of their leaves."""
        found = {id(home.flat) for home in filter(None, self._homes)}
        return found.union(self._by_leaf)

    def home_of(self, leaves: Sequence[Any]) -> Home | None:
        """That which just these leaves are cut from; of one among others, its part of it. None:
        they are from elsewhere."""
        home = self._by_leaf.get(id(leaves[0]))
        if home is None or home.is_of(leaves):
            return home
        return Home(leaves[0], leaves=leaves) if len(leaves) == 1 else None

    def replace(self, old: Sequence[Any], flat: Tensor, leaves: Sequence[Tensor]) -> None:
        """Note leaves that take the place of others, whose flat may go."""
        for leaf in old:
            self._by_leaf.pop(id(leaf), None)
        self.note([Home(flat, leaves=leaves)])

    def note(self, homes: Iterable[Home]) -> None:
        """Note more of them."""
        for home in homes:
            self._by_leaf.update(_by_leaf(home))

    def among(self, leaves: Sequence[Any]) -> dict[Positions, Home]:
        """Those whose leaves are among these, by their positions. A leaf that is here twice is
        nobody's own."""
        if not (leaves and self._by_leaf):
            return {}
        positions = defaultdict[int, list[int]](list)  # by id
        for n, leaf in enumerate(leaves):
            positions[id(leaf)].append(n)
        found: dict[Positions, Home] = {}
        for home in filter(None, dict.fromkeys(self._by_leaf.get(key) for key in positions)):
            at = [positions.get(id(leaf), []) for leaf in home.leaves or ()]
            if any(len(places) > 1 for places in at):
                continue
            here = tuple(n for (n,) in filter(None, at))
            if len(here) == len(at):
                found[here] = home
            else:  # others have been replaced: each of these is still a flat of its own
                found |= {(n,): Home(leaves[n], leaves=[leaves[n]]) for n in here}
        return found


def _by_leaf(home: Home) -> dict[int, Home]:
    return dict.fromkeys(map(id, home.leaves or ()), home)


class HomedLeaves(NamedTuple):
    """The leaves of a tree, in plain tensors, and the flats that they are cut from."""

    treedef: Any
    leaves: list[Any]  # in flatten order
    homes: dict[Positions, Home]  # of some leaves; the others lie anywhere

    @classmethod
    def of(cls, tree: Any, homes: Iterable[Home] = ()) -> HomedLeaves:
        """Those of a tree, whose leaves may be cut from these."""
        leaves, treedef = optree.tree_flatten(tree)
        return cls(treedef, leaves, Homes(homes).among(leaves))

    @property
    def tree(self) -> Any:
        """The tree."""
        return self.treedef.unflatten(self.leaves)
