"""Ranks to which something happens: as forked processes over gloo, each of which says how it
ended."""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from functorch_zero.groups import LabelledGroup, ProcessGroup, launch

SOON = 2.0  # seconds in which every rank must hear of another's exception
LIMIT = 40.0  # seconds a case may take at most, on a busy machine


class Ended(NamedTuple):
    """How a rank ended."""

    result: Any
    error: str  # the type's name, or nothing
    text: str
    seconds: float  # since it was told to `start_clock`


def outcome(fn: Callable[[], Any]) -> Ended:
    """What `fn` returns or raises."""
    start = time.monotonic()
    try:
        return Ended(fn(), "", "", time.monotonic() - start)
    except Exception as error:
        return Ended(None, type(error).__name__, str(error), time.monotonic() - start)


def survivors(
    fn: Callable[[ProcessGroup], Any], ranks: int, *, timeout: float = 20.0
) -> dict[int, Ended]:
    """How the ranks ended that lived to tell. The others are killed when these are done."""
    with tempfile.TemporaryDirectory() as folder:

        def run() -> None:
            group = ProcessGroup(timeout=timeout)
            pids = [int(pid) for pid in group.exchange(str(os.getpid()).encode())]
            ended = outcome(lambda: fn(group))
            part = Path(folder) / f"{group.rank}.part"
            part.write_bytes(pickle.dumps(ended))
            part.rename(Path(folder) / str(group.rank))
            for pid in pids:  # those that were stopped would keep `launch` waiting
                with suppress(FileNotFoundError, ProcessLookupError):
                    if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                        os.kill(pid, signal.SIGKILL)

        with suppress(Exception):
            launch(run, ranks, start_method="fork", timeout=LIMIT)
        return {
            int(path.name): pickle.loads(path.read_bytes())
            for path in Path(folder).iterdir()
            if path.suffix == ""
        }


class Trigger:
    """Makes something happen on this rank right before a collective of a phase, once it is
    `armed`; so many are `spared`."""

    def __init__(self, phase: str, happens: Callable[[], Any], spared: int = 0) -> None:
        self.armed = False
        self._phase, self._happens, self._spared = phase, happens, spared

    def on(self, group: Any) -> LabelledGroup:
        """The group with the trigger in it."""
        trigger = self

        class Rigged(LabelledGroup):
            def _forward(self, kind: str, *arguments: Any) -> Any:
                if trigger.armed and trigger._phase in self.label:
                    trigger._spared -= 1
                    if trigger._spared < 0:
                        trigger.armed = False
                        trigger._happens()
                return super()._forward(kind, *arguments)

        return Rigged(group)
