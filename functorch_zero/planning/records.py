"""What a plan is made of: collectives, samples of a step's memory, the owners' balance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

KINDS = {  # of memory: the field of a `Sample`, and what it is called
    "params": "params",
    "state": "optimizer state",
    "gradients": "gradients",
    "gathered": "gathered params",
    "activations": "activations, temporaries",
}


class Collective(NamedTuple):
    """One collective that a rank calls in a step."""

    phase: str  # forward, backward, metrics, buffers, optimizer or publish
    kind: str  # the group's method
    unit: str  # whose bucket; empty where it belongs to no unit
    dtype: torch.dtype
    num_elements: int  # of the longest tensor: all_gather's out, reduce_scatter's whole, all_to_all's source
    sent_bytes: float  # what this rank sends at least, on a ring
    group: str  # which ranks

    @property
    def nbytes(self) -> int:
        """Bytes of the longest tensor."""
        return self.num_elements * self.dtype.itemsize


class Sample(NamedTuple):
    """A rank's memory at one moment of a step, in bytes by kind."""

    moment: str  # "forward of blocks.0", say
    params: int
    state: int
    gradients: int
    gathered: int
    activations: int  # and temporaries

    @property
    def total(self) -> int:
        """All kinds."""
        return sum(self[1:])


class Owned(NamedTuple):
    """One leaf of a whole-leaf optimizer, at its owner."""

    path: str
    owner: int
    cost: float


class Balance(NamedTuple):
    """How evenly whole leaves are spread over their owners."""

    leaves: tuple[Owned, ...]
    num_ranks: int

    def loads(self) -> list[float]:
        """Each rank's cost."""
        loads = [0.0] * self.num_ranks
        for leaf in self.leaves:
            loads[leaf.owner] += leaf.cost
        return loads

    @property
    def imbalance(self) -> float:
        """The busiest rank's cost, in units of the mean: 1 is even, `num_ranks` is all at one."""
        loads = self.loads()
        return max(loads) * len(loads) / (sum(loads) or 1.0)


def highest(samples: Sequence[Sample]) -> Sample:
    """The first of the largest samples."""
    return max(samples, key=lambda sample: sample.total)
