"""`Recording`: what one run computed, step by step: of the unsharded step, of one on ranks, or of
anybody's loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import optree
from torch import Tensor

from ..tree import named_leaves
from .equality import apart, differences, wide_values

Leaves: TypeAlias = dict[str, Tensor]  # by name, whole


class RecordedStep(NamedTuple):
    """The results of one step; a kind that wasn't recorded has no leaves."""

    params: Any  # after it, a tree; of a loop's each leaf by its name
    others: dict[str, Any]  # by kind, a tree: all but the updates
    settings: dict[str, dict[str, float]]  # by param, torch's optimizer's: lr, step, ...
    draws: bool  # whether random numbers were drawn


@dataclass
class Recording:
    """One run, as one rank recorded it."""

    start: Any = field(default_factory=dict)  # the params before it
    first: int = 0  # the number of the first step
    trained: set[str] = field(default_factory=set)
    uses: dict[str, int] = field(default_factory=dict)  # how many names each param has
    axes: dict[str, int] = field(default_factory=dict)  # of the meshes that DTensors lie on
    part: int = 0  # of the batches, that this run took
    num_parts: int = 0  # of how many; 0: it took none
    weighted: bool = True  # whether the loss says how much a batch counts
    steps: list[RecordedStep] = field(default_factory=list)

    def at(self, k: int) -> RecordedStep:
        return self.steps[k - self.first]

    def params(self, k: int) -> Any:
        """The params after step k; those of the start before the first one."""
        return self.start if k < self.first else self.at(k).params

    def histories(self) -> Iterator[tuple[str, list[Tensor]]]:
        """Each param's values, the first one and that after each step."""
        start, *later = map(named_leaves, (self.start, *(step.params for step in self.steps)))
        for name, first in start.items():
            yield name, [first, *(values[name] for values in later)]

    def values(self, k: int, kind: str, origin: Leaves | None = None) -> Leaves:
        """The values of a kind in step k. Those of the start are the params themselves, or, where
        a run is resumed after step k, how far they are from the origin."""
        if kind == "updates":
            return differences(*map(named_leaves, (self.params(k), self.params(k - 1))))
        if kind == "start":
            params = named_leaves(self.params(k))
            return params if k < 0 else differences(params, origin or self.start)
        return named_leaves(self.at(k).others.get(kind, {}))

    def known(self, k: int, kind: str) -> Leaves:
        """The values of a kind in step k, float64 or complex128; of "params" those before it. Empty
        where there are none."""
        if kind == "start" or not self.first <= k < self.first + len(self.steps):
            return {}
        found = named_leaves(self.params(k - 1)) if kind == "params" else self.values(k, kind)
        return wide_values(found)

    def repeats(self, other: Recording) -> bool:
        """Whether all results are those of another run, to the bit."""
        ours, theirs = (optree.tree_leaves(run.steps) for run in (self, other))
        return all(apart(a, b) == 0 for a, b in zip(ours, theirs, strict=True))
