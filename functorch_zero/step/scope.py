"""`StepScope`: what the program's step that runs in this thread shares with the functions that the
program calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from .rng import MicroStreams, Streams, no_stream


@dataclass(kw_only=True)
class StepScope:
    """One call of a program's step. On ranks it has more to share: see `sharded.program.scope`.

    Attributes:
        streams: the random numbers of the program, and of the gradients that it takes.
        rank: on which the step is sharded; None: it isn't.
    """

    streams: Streams
    rank: int | None = None


# A context variable, so that thread ranks each have their own
_SCOPE: ContextVar[StepScope | None] = ContextVar("_SCOPE", default=None)


@contextmanager
def running(scope: StepScope, device: torch.device) -> Iterator[None]:
    """Around a program: it draws its own random numbers on the CPU and on this device."""
    token = _SCOPE.set(scope)
    try:
        with scope.streams.of_program(device):
            yield
    finally:
        _SCOPE.reset(token)


def scope_here() -> StepScope | None:
    """That of the step whose program runs in this thread; None: none does."""
    return _SCOPE.get()


def next_streams(part: int, device: torch.device) -> MicroStreams:
    """The streams of the next gradient of the step that runs; outside of steps torch's own numbers,
    as they come."""
    scope = _SCOPE.get()
    if scope is None:
        return lambda micro: nullcontext()
    return scope.streams.of_next_gradient(part, device)


def rank_of_step() -> int | None:
    """The rank of the sharded program whose step runs; None: none does."""
    scope = _SCOPE.get()
    return None if scope is None else scope.rank


def next_key() -> int:
    """The key of the next draw of the step that runs."""
    scope = _SCOPE.get()
    if scope is None:
        raise no_stream("no step of fz.program_step runs")
    return scope.streams.next_key()
