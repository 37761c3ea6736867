"""The walk of one unit's gradient through the package's files, counted:
docs/maintain/architecture.md tells it, and no file is entered more than three times."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functorch_zero
from functorch_zero import optim
from functorch_zero.groups import run_ranks
from functorch_zero.model.functionalize import functionalize
from functorch_zero.runtime.reduce import GradientReduction
from functorch_zero.runtime.unit import Enter, PassHooks, UnitEntrance
from functorch_zero.sharded.api import shard
from functorch_zero.step.train import train_step
from tests.modules import Unit
from tests.profiling import profiled
from tests.tiers import tiers

PACKAGE = Path(functorch_zero.__file__).parent
ARCHITECTURE = PACKAGE.parent / "docs" / "maintain" / "architecture.md"
MOST = 3  # times that a file may be entered

# Where the model, autograd and the step come in. What runs between them is not the runtime's: the
# model's forward, the loss's seed, and what is done once per pass rather than once per unit.
DOORS = {
    UnitEntrance.enter: "enter",
    UnitEntrance.watch: "watch",
    PassHooks.remember: "save",
    UnitEntrance.leave: "leave",
    PassHooks.recall: "ask",
    Enter.backward: "backward",
    GradientReduction.finish: "finish",
}
COLLECTIVES = ("all_gather", "reduce_scatter")


class Walk:
    """The files of the functions that are called behind the doors, in order.

    Collectives are where the walk leaves the runtime: it notes them, and does not follow them into
    `groups/`.
    """

    def __init__(self) -> None:
        self.doors: list[str] = []
        self.collectives: list[str] = []
        self._files: list[str] = []
        self._names = {door.__code__: name for door, name in DOORS.items()}
        self._depth = 0  # of calls behind a door
        self._beyond = 0  # of calls in groups

    @property
    def files(self) -> list[str]:
        """Calls of functions of the same file in a row are one entry."""
        return [file for file, _ in groupby(self._files)]

    def see(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self._call(frame)
        elif event == "return":
            self._beyond = max(self._beyond - 1, 0)
            self._depth = max(self._depth - 1, 0)

    def _call(self, frame: FrameType) -> None:
        if not self._depth and frame.f_code not in self._names:
            return
        self._depth += 1
        door = self._names.get(frame.f_code)
        if door is not None:
            self.doors.append(door)
        path = Path(frame.f_code.co_filename)
        inside = path.is_relative_to(PACKAGE)
        if self._beyond or (inside and path.parent == PACKAGE / "groups"):
            if not self._beyond and frame.f_code.co_name in COLLECTIVES:
                self.collectives.append(frame.f_code.co_name)
            self._beyond += 1
        elif inside:
            self._files.append(path.relative_to(PACKAGE).as_posix())


def walk_of_one_unit(group: Any) -> Walk:
    """Of the only unit, when nobody knows what comes next: gathered, freed and gathered again."""
    forward = lambda net, x: net.b(torch.tanh(net.a(x)))
    half = Unit(forward, a=nn.Linear(7, 7), b=nn.Linear(7, 3))
    apply, params, buffers = functionalize(nn.Sequential(half), units=Unit)

    def loss_fn(params: Any, buffers: Any, x: Tensor) -> Tensor:
        return apply(params, buffers, x)[0].square().mean()

    step = shard(train_step(loss_fn, optim.sgd(0.1)), level=3, group=group)
    state = step.init(params, buffers)
    # Layouts remember what they have worked out, and step 5 asks no slow questions
    for _ in range(5):
        state, _ = step(state, torch.ones(4, 7))
    _, order = step.engine.join([state.params.holding], [True])
    order.record([])
    walk = Walk()
    with profiled(walk.see):
        step(state, torch.ones(4, 7))
    return walk


@pytest.mark.parametrize("ranks", tiers([2], [1]))
def test_no_file_is_entered_often(ranks: int) -> None:
    for walk in run_ranks(walk_of_one_unit, ranks):
        assert walk.collectives == ["all_gather", "all_gather", "reduce_scatter"]
        doors = [name for name, _ in groupby(walk.doors)]
        assert doors == ["enter", "watch", "save", "leave", "ask", "backward", "finish"]
        entries = Counter(walk.files)
        assert entries["runtime/unit.py"] > 1 and entries["runtime/reduce.py"] > 1
        often = {file: num for file, num in entries.items() if num > MOST}
        assert not often, f"{often} of {walk.files}"


def test_the_page_tells_this_walk() -> None:
    (walk,) = run_ranks(walk_of_one_unit, 1)
    told = [
        line.split("|")[2].strip().strip("`")
        for line in ARCHITECTURE.read_text().splitlines()
        if line.startswith("| ") and line.split("|")[1].strip().isdigit()
    ]
    assert told == walk.files
