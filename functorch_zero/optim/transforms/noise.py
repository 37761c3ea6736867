"""Gaussian noise on gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..across import Across
from ..arithmetic import Number, Tree, add_scaled, elementwise
from ..base import Transform, step_count, with_statistics
from ..naming import named


class AddNoiseState(NamedTuple):
    """The number of steps taken, and the seed of the noise."""

    count: Tensor  # type: ignore[assignment]  # 0-d int64, on the CPU
    seed: Tensor  # 0-d int64, on the CPU


@named
def add_noise(eta: Number, gamma: Number, seed: int = 0) -> Transform:
    """Add normal noise of variance `eta / (1 + t) ** gamma` to the updates of step t, from 0.
    Neelakantan et al., 2015 (1511.06807). As optax.add_noise.

    The noise follows from the seed, the step and each leaf's path. It is the same at every level
    and number of ranks, and in a run that goes on from a checkpoint. Two of these in one optimizer
    need two seeds.

    Needs: statistics, of which it asks none. State: a step count and the seed. No communication.

    Args:
        eta: the variance in the first step.
        gamma: how fast it falls; the paper takes 0.55.
        seed: of the noise.
    """

    def init(params: Tree) -> AddNoiseState:
        return AddNoiseState(step_count(), torch.tensor(seed, device="cpu"))

    def update(
        updates: Tree, state: AddNoiseState, params: Tree, across: Across
    ) -> tuple[Any, AddNoiseState]:
        noise = across.normal(updates, seed=state.seed, step=state.count)
        variance = eta * (1 + state.count).double() ** -gamma  # 0-d float64
        noisy = elementwise(lambda u, n: add_scaled(u, n, variance.sqrt()), updates, noise)
        return noisy, AddNoiseState(state.count + 1, state.seed)

    return with_statistics(init, update)
