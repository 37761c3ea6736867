"""Threads for calls of torch that may wait for good; they are waited for so long and no longer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from ..devices import on_this_device

T = TypeVar("T")


class Overdue(RuntimeError):
    """A call has not returned in time. Its thread goes on."""

    def __init__(self, text: str, thread: threading.Thread) -> None:
        super().__init__(text)
        self.thread = thread


def started(name: str, run: Callable[[], object]) -> threading.Thread:
    """A thread of this name that runs this, on the accelerator that is current here."""
    # A daemon: it must not keep the process alive
    thread = threading.Thread(target=on_this_device(run), name=name, daemon=True)
    thread.start()
    return thread


def await_ends(threads: Iterable[threading.Thread], seconds: float) -> None:
    """Return when all threads have ended, or after so many seconds."""
    give_up = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(give_up - time.monotonic(), 0.0))


def within(seconds: float, name: str, call: Callable[[], T]) -> T:
    """Return or raise as `call()` does, in a thread of that name; raise `Overdue` if it takes
    longer than so many seconds."""
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:
            errors.append(error)

    thread = started(name, run)
    thread.join(seconds)
    if errors:
        raise errors.pop()  # kept here, its frames would keep themselves, and half-made groups
    if not results:
        raise Overdue(f"{name}: no answer within {seconds:g} s", thread)
    return results[0]
