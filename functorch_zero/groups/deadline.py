"""Calls of torch that may wait for good, and are waited for so long and no longer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from ..devices import on_this_device

T = TypeVar("T")


class Overdue(RuntimeError):
    """A call has not returned in time. Its thread goes on."""

    def __init__(self, text: str, thread: threading.Thread) -> None:
        super().__init__(text)
        self.thread = thread


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

    # A daemon: it must not keep the process alive
    thread = threading.Thread(target=on_this_device(run), name=name, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors.pop()  # kept here, its frames would keep themselves, and half-made groups
    if not results:
        raise Overdue(f"{name}: no answer within {seconds:g} s", thread)
    return results[0]
