"""Random numbers of a step, as a function of seed, step, part of the batch and micro-batch.

Note [streams of a program]: a program's own random numbers follow from the seed and the step alone,
so that every rank draws the same. Those of its losses follow from the part of the batch, too, and
from the numbers of the gradient in the step and of the micro-batch. `Streams` counts the gradients
of the step that runs; `value_and_grad` asks for the next one's streams. It also counts the draws of
`random`, and gives each a key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import Tensor

from ..errors import StructureError
from ..model.generators import seeded
from ..optim.random_numbers import key_of, mix

# Where a part of the batch stands: in the stream of a program, and in the keys of its draws
_NO_PART, _DRAW = -1, -2

# By a micro-batch's number, the random numbers of the loss on it
MicroStreams = Callable[[int], AbstractContextManager[None]]


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
    numbers = [int(seed), int(step), part, micro]
    if gradient:  # the first one's numbers are those of a training step
        numbers.append(gradient)
    # A loss may draw on the CPU and on its device
    with seeded(mix(*numbers), device):
        yield


class Streams:
    """The streams of one call of a program's step; see Note [streams of a program].

    Args:
        seed, step: as of `replayed`.
    """

    def __init__(self, seed: Tensor | None, step: Tensor):
        self._seed, self._step = seed, step
        self.num_gradients = 0
        self._in_a_loss = False
        self.num_draws = 0

    @property
    def step(self) -> int:
        """The step's number."""
        return int(self._step)

    def of_program(self, device: torch.device) -> AbstractContextManager[None]:
        """The program's own: the same on every rank."""
        return replayed(self._seed, self._step, _NO_PART, device)

    def of_next_gradient(self, part: int, device: torch.device) -> MicroStreams:
        """The next gradient's, on this part of the batch."""
        self.num_gradients += 1
        return partial(self._of_micro_batch, part, device, self.num_gradients - 1)

    @contextmanager
    def _of_micro_batch(
        self, part: int, device: torch.device, gradient: int, micro: int
    ) -> Iterator[None]:
        """A loss's draws in one micro-batch; meanwhile the program's own are refused."""
        outside, self._in_a_loss = self._in_a_loss, True
        try:
            with replayed(self._seed, self._step, part, device, micro, gradient):
                yield
        finally:
            self._in_a_loss = outside

    def next_key(self) -> int:
        """The key of the program's next draw: the same on every rank."""
        # A loss may run again in backward, and would draw other numbers then
        if self._in_a_loss:
            raise StructureError(
                "fz.random was called inside of a loss",
                remedy="draw before fz.value_and_grad(loss)(params, noise), and give the loss "
                "what was drawn; or pass seed=",
            )
        if self._seed is None:
            raise no_stream("the running step has no seed")
        self.num_draws += 1
        return key_of(self._seed, self._step, _DRAW, self.num_draws)


def no_stream(why: str) -> StructureError:
    return StructureError(
        f"fz.random was called without a seed, and {why}",
        remedy="pass seed=, and step=; or call it in a program whose step was given a seed, "
        "step.init(..., seed=0)",
    )
