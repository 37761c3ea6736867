"""Coming back after a failure that every rank has caught: to the same call on all ranks.

A rank may fail when the others have finished the call, and so are further on. Their collectives
would not meet: gloo adds up the wrong tensors, or ends a healthy process where sizes differ.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

from ..errors import GroupError
from .checks import by_rank
from .forwarding import era_of
from .labels import labelled
from .protocol import Group

# Group -> the era whose first calls were compared; weak, as users make and drop groups
_COMPARED: WeakKeyDictionary[Group, int] = WeakKeyDictionary()


def check_same_call(group: Group, call: Callable[[], str]) -> None:
    """Raise, on every rank, unless all ranks make the same call, in these words.

    By one exchange, at the first call after the ranks have come back (`rejoin`); else it does
    nothing. The ranks have left the group when it raises, so their next calls are compared again.
    """
    era = era_of(group)
    if era == _COMPARED.get(group, 0):
        return
    calls = [data.decode() for data in labelled(group, "rejoin").exchange(call().encode())]
    _COMPARED[group] = era
    if len(set(calls)) == 1:
        return
    error = GroupError(
        f"after a failure the ranks came back to different calls: {by_rank(calls)}. Remedy: make "
        "the same call on all ranks, with the states of one step; or load the last checkpoint"
    )
    group.fail(error)
    raise error
