"""Numbers of sharded trees, by which ranks name a tree in words that all of them understand."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from weakref import WeakKeyDictionary

from ..groups.protocol import Group

# By group, while it lives: the numbers of the trees that are cut over it. Ranks cut trees in the
# same order, so a tree has one number on all of them, whichever step or `shard_tree` has cut it.
_NUMBERS: WeakKeyDictionary[Group, Iterator[int]] = WeakKeyDictionary()


def next_number(world: Group) -> int:
    """The number of the next tree that is cut over these ranks, from 1; the same on each of
    them."""
    return next(_NUMBERS.setdefault(world, itertools.count(1)))
