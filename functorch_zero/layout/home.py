"""`Home`: a flat that a node of a tree owns, with the leaves that are cut from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from operator import attrgetter, is_
from typing import Any

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


class Homes:
    """Flats (piece,), found by the leaves that are cut from them. A leaf is known by itself: no
    storage is looked up, and a leaf from anywhere else lies in no flat."""

    def __init__(self, homes: Sequence[Home | None] = ()):
        self._homes = homes

    @cached_property
    def _by_leaf(self) -> dict[int, Home]:
        """By the id of a leaf. With `map`, since this runs for every leaf at every step."""
        known: dict[int, Home] = {}
        for home in filter(None, self._homes):
            known.update(dict.fromkeys(map(id, home.leaves or ()), home))
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
        self._by_leaf.update(dict.fromkeys(map(id, leaves), Home(flat, leaves=leaves)))

    def among(self, leaves: Sequence[Any]) -> list[Home]:
        """Those that leaves of a tree are cut from. A leaf that it has twice is nobody's own."""
        counts = Counter(map(id, leaves))
        found = filter(None, dict.fromkeys(map(self._by_leaf.get, counts)))
        if len(counts) == len(leaves):
            return [*found]
        return [home for home in found if all(counts[id(x)] < 2 for x in home.leaves or ())]
