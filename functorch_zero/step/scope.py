"""The step that runs in this thread, and around a loss or an evaluation its batch: for functions of
the library that user code calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .loss_calls import LossCalls
from .rng import MicroStreams, Streams, no_stream


@dataclass(kw_only=True)
class StepScope:
    """One call of a program's step. On ranks it has more to share: see `sharded.program.scope`.

    Attributes:
        streams: the random numbers of the program, and of the gradients that it takes.
        calls: of the step's losses, from its first one on.
        rank: on which the step is sharded; None: it isn't.
    """

    streams: Streams
    calls: LossCalls
    rank: int | None = None


ALL_ROWS = "all rows are here"  # of a batch in one process


class _Here(NamedTuple):
    """The step and the batch of this thread."""

    step: StepScope | None = None  # whose program runs
    # Around a loss, its backward too, and around an evaluation: ALL_ROWS, or on ranks the way to
    # the others' rows, a `BatchOnRanks`
    batch: Any = None


# A context variable, so that thread ranks each have their own
_HERE: ContextVar[_Here] = ContextVar("_HERE", default=_Here())  # noqa: B039


@contextmanager
def running(scope: StepScope, device: torch.device) -> Iterator[None]:
    """Around a program: it draws its own random numbers on the CPU and on this device."""
    token = _HERE.set(_Here(scope))
    try:
        with scope.streams.of_program(device):
            yield
    finally:
        _HERE.reset(token)


@contextmanager
def given_batch(batch: Any = ALL_ROWS) -> Iterator[None]:
    """Around a loss and its backward, or around an evaluation.

    By default torch runs the backward of a GPU's tensors in a thread of the device, where nothing
    of this is known. So all of it, also a backward of the loss's own, runs in this thread.
    """
    token = _HERE.set(_HERE.get()._replace(batch=batch))
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        _HERE.reset(token)


def batch_here() -> Any:
    """That of the loss or evaluation that runs in this thread; None: none does."""
    return _HERE.get().batch


def scope_here() -> StepScope | None:
    """That of the step whose program runs in this thread; None: none does."""
    return _HERE.get().step


def next_streams(part: int, device: torch.device) -> MicroStreams:
    """The streams of the next gradient of the step that runs; outside of steps torch's own numbers,
    as they come."""
    scope = scope_here()
    if scope is None:
        return lambda micro: nullcontext()
    return scope.streams.of_next_gradient(part, device)


def rank_of_step() -> int | None:
    """The rank of the sharded program whose step runs; None: none does."""
    scope = scope_here()
    return None if scope is None else scope.rank


def gradient_in_words() -> str:
    """The step that runs, for errors of its gradients; or just a gradient."""
    scope = scope_here()
    return "the gradient" if scope is None else f"step {scope.streams.step}"


def next_key() -> int:
    """The key of the next draw of the step that runs."""
    scope = scope_here()
    if scope is None:
        raise no_stream("no step of fz.program_step runs")
    return scope.streams.next_key()
