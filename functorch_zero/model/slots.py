"""Places in modules where leaves are used, filled with whole leaves while a unit is entered.

Every unit of every step does this, so there is no line of Python for each leaf.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import compress, repeat
from operator import attrgetter, getitem, is_, itemgetter, setitem
from typing import Any, NamedTuple

from .lazy_param import Entrance


class Slot(NamedTuple):
    """A place in a module where a leaf is used."""

    module: str  # its path
    attribute: str
    leaf: str  # the leaf's path


# A module's own dict of tensors, the name there, the leaf's path
Place = tuple[dict[str, Any], str, str]
_DICT, _NAME, _LEAF = map(itemgetter, range(3))
_NUMBER = attrgetter("number")


def found(places: Sequence[Place]) -> list[Any]:
    """What is in the places."""
    return [*map(getitem, map(_DICT, places), map(_NAME, places))]


def put(places: Sequence[Place], values: Iterable[Any]) -> None:
    """Fill the places."""
    deque(map(setitem, map(_DICT, places), map(_NAME, places), values), maxlen=0)


def used(places: Sequence[Place], leaves: Mapping[str, Any]) -> list[Any]:
    """For each place the leaf that is used there."""
    return [*map(leaves.__getitem__, map(_LEAF, places))]


def entering(
    path: str, places: Sequence[Place], leaves: Mapping[str, Any], forward: Callable[..., Any]
) -> Callable[..., Any]:
    """The same function, with whatever the leaves of the places lie in entered: mostly the one
    entrance of all.

    Args:
        path: of the module whose `forward` it is.
        leaves: by path; those that are not lazy are in their places already.
    """
    given = used(places, leaves)
    owners = [*map(getattr, given, repeat("entrance"), repeat(None))]
    for entrance in filter(None, dict.fromkeys(owners)):
        own = [*map(is_, owners, repeat(entrance))]
        numbers = [*map(_NUMBER, compress(given, own))]
        forward = partial(_entered, entrance, path, [*compress(places, own)], numbers, forward)
    return forward


def _entered(
    entrance: Entrance,
    path: str,
    places: Sequence[Place],
    numbers: Sequence[int],
    forward: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run inside the entrance, with its whole leaves of these numbers in the places meanwhile."""
    leaves, before = entrance.enter(path), found(places)
    try:
        put(places, map(leaves.__getitem__, numbers))
        with entrance.watch():
            return forward(*args, **kwargs)
    finally:
        put(places, before)
        entrance.leave(path)
