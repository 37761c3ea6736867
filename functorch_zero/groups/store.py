"""torch's store, each call of which ends within a deadline.

Ranks leave words for each other there: why one failed, and who is still there. It lives in one
process: rank 0's, or that of torchrun's first agent. When that process is stuck, or its machine is
cut off, torch's own calls wait for good. So each call here runs in a thread of its own, which the
caller leaves behind when the deadline is over.

Note [a late call]: a thread that was left behind ends when the store answers after all, or breaks
the connection. Until then other calls raise at once, so that there is one such thread at most, and
a rank that leaves its group waits for one deadline and not for several.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import socket
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from .addresses import way_to
from .deadline import Overdue, within

T = TypeVar("T")

SECONDS_TO_ANSWER = 2.0  # for a call
_SECONDS_AT_EXIT = 1.0  # for a thread that was left behind to end, once it was cut off


class StoreError(RuntimeError):
    """The store can't be reached, or doesn't answer in time."""


class Store:
    """torch's store, over one connection.

    Args:
        connect: makes the connection, a torch Store.
        seconds: the deadline of a call that is told no other.
    """

    def __init__(self, connect: Callable[[], Any], seconds: float = SECONDS_TO_ANSWER) -> None:
        self._connect, self._seconds = connect, seconds
        self._connection: Any = None
        self._asking = threading.Lock()  # one call at a time
        self._late: threading.Thread | None = None  # see Note [a late call]
        self.address = ""  # of the process that serves it, "10.0.0.1:29500"; "": not known
        self.is_here = False  # whether that is an address of this machine

    def connect(self, seconds: float | None = None) -> None:
        """Connect now, and not at the first call: torch looks up names as it connects, which may
        take seconds, and it would look for a process that has ended meanwhile again and again."""
        self._ask(lambda connection: None, seconds)

    def read(self, *keys: str, seconds: float | None = None) -> str | None:
        """The text under the first of these keys that there is."""

        def first(connection: Any) -> str | None:
            there = (key for key in keys if connection.check([key]))
            key = next(there, None)
            return None if key is None else str(connection.get(key), errors="replace")

        return self._ask(first, seconds)

    def write_once(self, key: str, text: str) -> None:
        """Put the text there, unless the key has a text."""
        self._ask(lambda connection: connection.compare_set(key, "", text))

    def append(self, key: str, text: str, seconds: float | None = None) -> None:
        """Put the text behind the one that is there."""
        self._ask(lambda connection: connection.append(key, text), seconds)

    def _ask(self, call: Callable[[Any], T], seconds: float | None = None) -> T:
        seconds = self._seconds if seconds is None else seconds
        where = f"torch's store at {self.address}" if self.address else "torch's store"
        # Another thread's call may have a later deadline
        if not self._asking.acquire(timeout=seconds):
            raise StoreError(f"{where} has not answered another call for {seconds:g} s")
        try:
            if self._late is not None and self._late.is_alive():
                raise StoreError(f"{where} does not answer")
            _LATE.discard(self)
            return within(seconds, "ask store", lambda: call(self._connected()))
        except StoreError:
            raise
        except Overdue as overdue:
            self._late = overdue.thread
            _LATE.add(self)
            raise StoreError(f"{where} has not answered for {seconds:g} s") from None
        except Exception as error:  # torch has many types for it, with stacks in their texts
            words = str(error).split("\n")[0]
            raise StoreError(f"{where} can't be reached: {words}") from None
        finally:
            self._asking.release()

    def _connected(self) -> Any:
        if self._connection is None:
            self._connection = self._connect()
            server = _behind_prefixes(self._connection)
            if isinstance(server, dist.TCPStore):  # type: ignore[attr-defined]
                self.address = f"{server.host}:{server.port}"
                way = way_to(server.host)
                self.is_here = way is not None and way.is_here
        return self._connection

    def cut_off(self) -> None:
        """Break the connection, if a thread was left behind in it, and wait for that thread."""
        if self._late is None or not self._late.is_alive():
            return
        # torch tells a connection's file in its repr, and nowhere else
        found = re.search(r"fd=(\d+)", repr(_behind_prefixes(self._connection)))
        if found is not None:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(found[1]))) as same:
                same.shutdown(socket.SHUT_RDWR)
            self._late.join(_SECONDS_AT_EXIT)


_LATE: set[Store] = set()  # those in which a thread was left behind


@atexit.register
def _cut_off_all() -> None:
    """Python ends daemon threads by force. One that comes back from torch's store just then would
    take the process with it, by `std::terminate`."""
    for store in list(_LATE):
        store.cut_off()


def _behind_prefixes(connection: Any) -> Any:
    """The store that torch has wrapped to put prefixes before keys."""
    while isinstance(connection, dist.PrefixStore):  # type: ignore[attr-defined]
        connection = connection.underlying_store
    return connection
