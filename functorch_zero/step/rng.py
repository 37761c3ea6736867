"""Random numbers of a step, as a function of seed, step, part of the batch and micro-batch.

Note [streams of a program]: a program's own random numbers follow from the seed and the step alone,
so that every rank draws the same. Those of its losses follow from the part of the batch, too, and
from the number of the gradient in the step. `streams` counts the gradients of the step that runs;
`value_and_grad` asks for the next one's stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from itertools import count

import torch
from torch import Tensor

from ..optim.random_numbers import mix

_NO_PART = -1  # stands where a part of the batch does, in the stream of a program


@contextmanager
def replayed(
    seed: Tensor | None,
    step: Tensor,
    part: int,
    device: torch.device,
    micro: int = 0,
    gradient: int = 0,
) -> Iterator[None]:
    """Random numbers as a function of (seed, step, part, micro-batch, gradient); the global state
    is as before afterwards.

    So a step is pure, and ranks draw different numbers for their different data. A run that goes on
    from a checkpoint draws the same numbers as one that never stopped.

    Args:
        seed: 0-d int64; None: the global random state is used, and goes on.
        step: the step's number, 0-d int64.
        part: the number of the part of the batch that this rank sees, `Axes.data.rank`. Ranks of
            the same data have the same one.
        device: the device of the leaves; generators of others are left alone.
        micro: the micro-batch's number.
        gradient: the number of the gradient in the step, from 0.
    """
    if seed is None:
        yield
        return
    devices = [device] if device.type == "cuda" else []  # the CPU's generator is always forked
    with torch.random.fork_rng(devices=devices):
        numbers = [int(seed), int(step), part, micro]
        if gradient:  # the first one's numbers are those of a training step
            numbers.append(gradient)
        _seed_generators(mix(*numbers), device)
        yield


class Streams:
    """The streams of one call of a program's step; see Note [streams of a program].

    Args:
        seed, step: as of `replayed`.
    """

    def __init__(self, seed: Tensor | None, step: Tensor):
        self._seed, self._step = seed, step
        self._gradients = count()

    def of_program(self, device: torch.device) -> AbstractContextManager[None]:
        """The program's own: the same on every rank."""
        return replayed(self._seed, self._step, _NO_PART, device)

    def of_next_gradient(self, part: int, device: torch.device) -> AbstractContextManager[None]:
        """The next gradient's, on this part of the batch."""
        gradient = next(self._gradients)
        return replayed(self._seed, self._step, part, device, gradient=gradient)


# Of the step that runs. A context variable, so that thread ranks each have their own.
_STREAMS: ContextVar[Streams | None] = ContextVar("_STREAMS", default=None)


@contextmanager
def streams(seed: Tensor | None, step: Tensor, device: torch.device) -> Iterator[None]:
    """Around a program: its random numbers, and those of the gradients that it takes."""
    own = Streams(seed, step)
    token = _STREAMS.set(own)
    try:
        with own.of_program(device):
            yield
    finally:
        _STREAMS.reset(token)


def next_stream(part: int, device: torch.device) -> AbstractContextManager[None]:
    """The stream of the next gradient of the step that runs; outside of steps torch's own numbers,
    as they come."""
    running = _STREAMS.get()
    return nullcontext() if running is None else running.of_next_gradient(part, device)


def _seed_generators(seed: int, device: torch.device) -> None:
    """Seed the CPU's generator, and that of `device`.

    `torch.manual_seed` would seed every device's, which nothing restores, and formats a stack for
    each kind of device.
    """
    # Both: a loss may draw on the CPU and on its device
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
