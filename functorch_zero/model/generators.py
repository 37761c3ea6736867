"""torch's global generators, seeded for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers of torch on the CPU and on `device` as a function of `seed`; the global states
    are as before afterwards.

    `torch.manual_seed` would seed every device's generator, which nothing restores, and formats a
    stack for each kind of device.
    """
    devices = [device] if device.type == "cuda" else []  # the CPU's generator is always forked
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def is_seeded(generator: torch.Generator, device: torch.device) -> bool:
    """Whether `seeded` seeds this generator."""
    if generator is torch.default_generator:
        return True
    if device.type != "cuda":
        return False
    number = torch.cuda.current_device() if device.index is None else device.index
    return generator is torch.cuda.default_generators[number]
