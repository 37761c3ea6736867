"""The calls of losses: their numbers, by which slow questions are asked of some of them, and what
their user is told once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar
from weakref import ref

from .reminder import Reminder

T = TypeVar("T")


class PerLoss(Generic[T]):
    """An object for each loss, made when it is first asked for.

    A lambda or a bound method that a program makes anew in each step goes on with the object of
    one that is gone: of the same kind, see `_kind_of`. Losses that live at the same time have
    objects of their own, up to 16 of a kind. A further one goes on with the object that was asked
    for longest ago, since losses in reference cycles stay until a garbage collection.

    Ranks collect garbage at different times, so calls that are counted by such an object may have
    other numbers on other ranks. A number decides only whether this rank looks at its loss: by
    `Untouched`, `refuse_reentrant_checkpoints`, `check_weight_value` and `TwoSeeds`. It never
    decides about a collective.
    """

    def __init__(self, make: Callable[[], T]):
        self._make = make
        # By kind: weak references to losses, with their objects; the last one asked for is last
        self._of_kind: dict[Any, list[tuple[Callable[[], Any], T]]] = {}

    def of(self, loss: Callable[..., Any]) -> T:
        """The object of a loss."""
        kind = _kind_of(loss)
        # Of code that is compiled anew in each step, say, the oldest goes
        if kind not in self._of_kind and len(self._of_kind) >= _MOST_KINDS:
            oldest, *_ = self._of_kind  # in one go, since other threads may note theirs
            self._of_kind.pop(oldest, None)
        before = self._of_kind.get(kind, [])
        entry = _entry_for(loss, before)
        own = self._make() if entry is None else entry[1]
        # A new list, since other threads may be reading that one
        self._of_kind[kind] = [*(e for e in before if e is not entry), (_weak(loss), own)]
        return own


_MOST_KINDS = 256
_MOST_OF_A_KIND = 16  # objects of `PerLoss`: each call of a loss looks through them


def _entry_for(
    loss: Callable[..., Any], entries: list[tuple[Callable[[], Any], T]]
) -> tuple[Callable[[], Any], T] | None:
    """The loss's own entry, else that of a loss that is gone; where there are many, else the one
    asked for longest ago. None: the loss gets a new one."""
    for wanted in (loss, None):
        for entry in entries:
            if entry[0]() is wanted:
                return entry
    return entries[0] if len(entries) >= _MOST_OF_A_KIND else None


def _kind_of(loss: Callable[..., Any]) -> Any:
    """The code of a loss, below partials of it; its class, where it has no code."""
    while isinstance(loss, partial):
        loss = loss.func
    return getattr(loss, "__code__", type(loss))


def _weak(loss: Callable[..., Any]) -> Callable[[], Any]:
    """A weak reference; of an object that can't have one, a reference to nothing, so that all
    losses of its class share their object."""
    try:
        return ref(loss)
    except TypeError:
        return lambda: None


class LossCalls:
    """The calls of the losses of one step, of one engine's trees, or of one loss.

    Attributes:
        reminder: warns once, of whichever loss.
    """

    def __init__(self) -> None:
        self._numbers = PerLoss(itertools.count)
        self.reminder = Reminder()

    def __reduce__(self) -> Any:
        """A copy, in another process say, begins anew."""
        return LossCalls, ()

    def next_number(self, loss: Callable[..., Any]) -> int:
        """The number of the next call of a loss, from 0."""
        return next(self._numbers.of(loss))
