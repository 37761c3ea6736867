"""A case: one program, drawn from an integer, and described in one line."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch

from tests.fuzz import losses, models
from tests.fuzz.losses import LOSSES, Batch
from tests.fuzz.models import BLOCKS, COUNTING, INPUTS, OUTPUTS
from tests.fuzz.optimizers import TABLED, TWINS

T = TypeVar("T")

BUFFERED = {
    "batch norm", "running mean", "reassigned", "counter", "complex buffer", "buffer is leaf",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One program. The defaults are the plainest, and what `shrink` goes back to.

    Attributes:
        seed: of the values of leaves and batches.
        blocks: the network's, names of `models.BLOCKS`.
        loss: a name of `losses.LOSSES`.
        optimizer: a name of `optimizers.TWINS` or of the conformance table.
        rows: of the ranks' parts of a batch: as many each, or not ("uneven"), or none on one rank
            ("empty"). Where they differ the loss has a weight.
        level: 0 to 3; "mixed": by a mapping; "by dims": by a function.
        mesh: whether the ranks are a mesh of 2 x 2.
        nonfinite: the step's policy; with "skip" one rank's second batch holds a NaN.
        between: what a user does after the first step.
        attempt: the number of invalid cases that were drawn for this seed before.
    """

    seed: int
    blocks: tuple[str, ...] = ("plain",)
    loss: str = "plain"
    optimizer: str = "sgd"
    dtype: str = "float64"
    rows: str = "even"
    weight_of_row: float = 1.0
    trainable: str = "all"
    units: str = "children"
    remat: bool = False
    precision: str = "none"
    level: int | str = 0
    ranks: int = 2
    mesh: bool = False
    donate: bool = True
    sync_buffers: str = "mean"
    reshard: bool = True
    accumulate: int = 1
    reduce_gradients: str | None = None
    overlap: str = "memory"
    reduce_bucket: int | None = None
    nonfinite: str = "pass"
    loss_scale: bool = False
    between: str = "nothing"
    steps: int = 2
    attempt: int = 0

    def __repr__(self) -> str:
        """The fields that differ from the plainest case's."""
        plain = Case(self.seed)
        different = [
            f.name for f in fields(self) if getattr(self, f.name) != getattr(plain, f.name)
        ]
        told = [f"{name}={getattr(self, name)!r}" for name in ["seed", *different]]
        return f"Case({', '.join(told)})"

    def weight(self, batch: Batch) -> float | None:
        """The weight that the loss gives a batch, if it gives one."""
        return None if self.rows == "even" else self.weight_of_row * len(batch["x"])

    @property
    def coupled(self) -> bool:
        """Whether parts of a batch give other results than the whole."""
        # Where ranks count their own calls, or rows share another part's call
        differ = self.rows == "empty" and self.ranks > 1 and self.sync_buffers != "mean"
        counts = differ or self.accumulate > 1
        return (
            bool(models.COUPLING & {*self.blocks})
            or self.loss in losses.COUPLING
            or (counts and bool(COUNTING & {*self.blocks}))
        )

    @property
    def tolerance(self) -> float:
        """Of a difference, beside the largest element of a leaf's update."""
        if "half" in self.blocks:
            return 0.1  # bfloat16's own last place is 0.004 of a value
        low = self.dtype == "float32" or self.precision != "none" or "single" in self.blocks
        return 2e-3 if low else 1e-8

    def parts(self, number: int) -> list[Batch]:
        """Each rank's part of the batch of this number."""
        generator = torch.Generator().manual_seed(1000 * self.seed + number)
        dtype = getattr(torch, self.dtype)
        parts = []
        for rows in self._rows_by_rank():
            x = torch.randn(rows, INPUTS, generator=generator, dtype=torch.float64)
            y = torch.randn(rows, OUTPUTS, generator=generator, dtype=torch.float64)
            parts.append({"x": x.to(dtype), "y": y.to(dtype)})
        if self.nonfinite == "skip" and number == 1:
            parts[-1]["x"][-1, 0] = float("nan")
        return parts

    def _rows_by_rank(self) -> list[int]:
        fewest = 2 * self.accumulate  # BatchNorm wants two rows
        if self.rows == "even":
            return [fewest] * self.ranks
        uneven = [fewest + rank for rank in range(self.ranks)]
        return [0, *uneven[1:]] if self.rows == "empty" and self.ranks > 1 else uneven


# Refused in every program, with a reason and a way: `KEPT` in test_fuzz.py has a case of each
REFUSED = {
    "writes leaf", "writes leaf data", "leaf gradient", "leaf hook", "in tuple", "buffer is leaf",
}  # fmt: skip

# The values of each axis. A value that is there twice is drawn twice as often.
AXES: dict[str, Sequence[Any]] = {
    "loss": [*(loss for loss in LOSSES if loss not in REFUSED), "plain", "metrics"],
    "dtype": ["float64"] * 7 + ["float32"],
    "rows": ["even", "even", "uneven", "empty"],
    "weight_of_row": [1.0, 1.0, 0.1],
    "trainable": ["all"] * 4 + ["matrices"],
    "units": ["children", "blocks", "linears", "pattern", "nested"],
    "remat": [False, False, True],
    "precision": ["none"] * 9 + ["compute float32", "gather float32", "reduce float32"],
    "level": [0, 1, 2, 3, 3, "mixed", "by dims"],
    "ranks": [1, 2, 2, 2, 3, 3, 4],
    "mesh": [False] * 7 + [True],
    "donate": [True, False],
    "sync_buffers": ["mean", "mean", "rank0", "local"],
    "reshard": [True, False],
    "accumulate": [1, 1, 1, 1, 2, 3],
    "reduce_gradients": [None, None, "once", "every_microbatch"],
    "overlap": ["memory", "time"],
    "reduce_bucket": [None, None, 1000, 2**20],
    "nonfinite": ["pass"] * 5 + ["skip", "raise"],
    "loss_scale": [False] * 5 + [True],
    "between": [
        "nothing", "nothing", "relevel", "shrink", "shrink in place", "whole leaves", "set step",
        "checkpoint", "evaluate", "init again", "twice",
    ],
    "steps": [2, 2, 2, 2, 3],
}  # fmt: skip


def draw(seed: int, attempt: int = 0) -> Case:
    """The case of this seed. Seeds in a row go through all values of each axis, shuffled anew each
    time, so that features are covered evenly."""
    number = seed + 7919 * attempt  # a redrawn case is that of a far seed
    chosen = {name: _turn(name, values, number) for name, values in AXES.items()}
    names = [name for name in BLOCKS if name not in REFUSED]
    first = _turn("first", names, number)
    second = _turn("second", [*names, *[""] * 20], number)
    blocks = (first, second) if second else (first,)
    tabled = number % 2 == 0
    optimizer = _turn("optimizer", TABLED if tabled else [*TWINS], number // 2)
    case = Case(seed, blocks, optimizer=optimizer, attempt=attempt, **chosen)
    return _consistent(case)


def _turn(axis: str, values: Sequence[T], number: int) -> T:
    """The value whose turn it is."""
    cycle, place = divmod(number, len(values))
    shuffled = random.Random(f"{axis} {cycle}").sample(values, len(values))
    return shuffled[place]


def _consistent(case: Case) -> Case:
    """The case, with what doesn't go together made to."""
    changes: dict[str, Any] = {}
    if case.mesh:
        changes["ranks"] = 4
    if case.loss_scale and case.nonfinite == "raise":
        changes["nonfinite"] = "pass"  # a scale needs steps to be skipped
    if case.between == "twice":
        changes["donate"] = False  # the state is used twice
    if case.between == "checkpoint" and case.sync_buffers == "local":
        changes["sync_buffers"] = "mean"  # a rank's own buffers are not saved
    if case.reduce_gradients == "every_microbatch" and case.level not in (2, 3):
        changes["reduce_gradients"] = None
    if case.loss == "func.jvp":
        changes |= {"ranks": 1, "mesh": False}  # thread ranks can't take turns inside of it
    if case.loss == "writes buffers" and not BUFFERED & {*case.blocks}:
        changes["blocks"] = (*case.blocks, "counter")
    if case.loss == "recomputed" and COUNTING & {*case.blocks}:
        changes["loss"] = "plain"  # in plain torch, too, the second run has other numbers
    return replace(case, **changes)
