"""The words that ranks leave for each other in torch's store: why one failed, and who is there.

A broken group can't carry them, and other ranks may be in a collective.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import NamedTuple

from .store import Store, StoreError

# Set by a rank whose function raised under `launch`, as it ends
_END_OF_A_RANK = "functorch_zero/failed"

_MAX_TEXT = 4000  # characters of an error that are passed on
_MAX_PAUSE = 0.1  # seconds, between two looks at the store


class Board(NamedTuple):
    """The words of one group, in one of its eras.

    Attributes:
        store: torch's.
        name: of the group and the era, before all keys. torchrun's store outlives restarts, so
            others' words are there, too.
        rank: this rank's number in the group.
        num_ranks: the group's.
    """

    store: Store
    name: str
    rank: int
    num_ranks: int

    def publish(self, text: str, key: str = "failed") -> None:
        """Leave a text for the other ranks, unless one has been quicker. The first "failed" is the
        cause of the era's end."""
        publish(self.store, f"{self.name}/{key}", text)

    def read(self, key: str, seconds: float | None = None) -> str | None:
        """The text under a key, if it is there now."""
        return self.store.read(f"{self.name}/{key}", seconds=seconds)

    def failure(self, seconds: float | None = None) -> str | None:
        """Why this group has failed, or a rank under `launch` has ended, if either is there now."""
        return self.store.read(f"{self.name}/failed", _END_OF_A_RANK, seconds=seconds)

    def roll_call(
        self,
        key: str,
        seconds: float,
        *,
        word: int = 0,
        heeds_failure: bool = True,
        patience: float | None = None,
    ) -> tuple[dict[int, int], str | None]:
        """Say this rank's word, and wait for those of all ranks: rank -> word, of those that say
        one within that time. It ends early with the text of a failure, if it heeds one.

        Args:
            patience: seconds, for each call of the store; None: the store's own.
        """
        give_up, pause = time.monotonic() + seconds, 0.01
        # All words under one key: a key for each rank would be as many questions
        self.store.append(f"{self.name}/{key}", f"{self.rank}:{word} ", patience)
        words: dict[int, int] = {}
        while True:
            try:
                pairs = [said.split(":") for said in (self.read(key, patience) or "").split()]
                words = {int(other): int(its_word) for other, its_word in pairs}
                text = self.failure(patience) if heeds_failure else None
            except StoreError:
                # It has ended with the rank that serves it, which had heard enough
                if not words:
                    raise
                return words, None
            if text is not None or len(words) == self.num_ranks or time.monotonic() > give_up:
                return words, text
            time.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE)


def publish(store: Store, key: str, text: str) -> None:
    """Leave a text in the store, unless there is one."""
    # The store may have died with its host: then nobody can be told
    with suppress(StoreError):
        store.write_once(key, text[:_MAX_TEXT])


def publish_end(store: Store, text: str) -> None:
    """Tell all groups that a rank ends with an error, under `launch`."""
    publish(store, _END_OF_A_RANK, text)


def end_of_a_rank(store: Store) -> str | None:
    """The error with which some rank's function has ended under `launch`, published by that rank.
    None of ranks that were killed, nor under torchrun."""
    with suppress(StoreError):
        return store.read(_END_OF_A_RANK)
    return None
