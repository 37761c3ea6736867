"""`Recent`: things that are made once by key, of which the last ones are kept."""

from __future__ import annotations

from typing import Generic, TypeVar

K = TypeVar("K")
T = TypeVar("T")


class Recent(Generic[K, T]):
    """Those that were noted or asked for last. Ranks that ask alike keep the same ones.

    Args:
        most: how many.
    """

    def __init__(self, most: int):
        self._most = most
        self._kept: dict[K, T] = {}  # the last one asked for is last

    def get(self, key: K) -> T | None:
        """The one of this key; None: it isn't kept."""
        found = self._kept.pop(key, None)
        if found is not None:
            self._kept[key] = found
        return found

    def note(self, key: K, made: T) -> None:
        """Keep this one."""
        self._kept[key] = made
        if len(self._kept) > self._most:
            del self._kept[next(iter(self._kept))]

    def forget(self) -> None:
        """Keep none."""
        self._kept.clear()
