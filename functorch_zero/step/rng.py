"""Random numbers of a step, as a function of seed, step, part of the batch and micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def replayed(
    seed: Tensor | None, step: Tensor, part: int, device: torch.device, micro: int = 0
) -> Iterator[None]:
    """Random numbers as a function of (seed, step, part, micro-batch); the global state is as
    before afterwards.

    So a step is pure, and ranks draw different numbers for their different data. A run that goes on
    from a checkpoint draws the same numbers as one that never stopped.

    Args:
        seed: 0-d int64; None: the global random state is used, and goes on.
        step: the step's number, 0-d int64.
        part: the number of the part of the batch that this rank sees, `Axes.data.rank`. Ranks of
            the same data have the same one.
        device: the device of the leaves; generators of others are left alone.
        micro: the micro-batch's number.
    """
    if seed is None:
        yield
        return
    devices = [device] if device.type == "cuda" else []  # the CPU's generator is always forked
    with torch.random.fork_rng(devices=devices):
        _seed_generators(_mix(int(seed), int(step), part, micro), device)
        yield


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


def _mix(*numbers: int) -> int:
    """One 63-bit seed of several numbers (splitmix64's finaliser, after each)."""
    # Mixed, and not added: (step 1, rank 0) and (step 0, rank 1) must differ
    mixed = 0
    # Python's integers don't overflow: `&` keeps the arithmetic in 64 bits
    for number in numbers:
        mixed = (mixed + number + 0x9E3779B97F4A7C15) & (2**64 - 1)
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        mixed ^= mixed >> 31
    return mixed >> 1  # 63 bits: positive as a signed integer too
