"""The walk of a state through one step, counted: docs/maintain/architecture.md tells it, and it has
at most 50 stays."""

from __future__ import annotations

import re
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import functorch_zero
from functorch_zero import optim
from functorch_zero.groups import run_ranks
from functorch_zero.layout.home import Home
from functorch_zero.model.functionalize import functionalize
from functorch_zero.params import OnEngine, nodes_of
from functorch_zero.sharded.api import shard
from functorch_zero.sharded.program.value import Nodes
from functorch_zero.step.state import State, TrainValue
from functorch_zero.step.train import train_step
from tests.profiling import profiled

PACKAGE = Path(functorch_zero.__file__).parent
ARCHITECTURE = PACKAGE.parent / "docs" / "maintain" / "architecture.md"
MOST = 50
GENERATOR = 0x20  # of `co_flags`


class Stays:
    """The functions that are given a state, or a part of it, in the order of their first calls.

    A part is the value, a node, a flat's home, or a tensor in the state's storage; by itself, or in
    lists, tuples and dicts. A function whose answer is yes, no or nothing isn't counted, but for
    constructors; nor are `groups/`, and methods that read their own node without making another.

    Args:
        state: before the step.
    """

    def __init__(self, state: State):
        nodes = [node for node in nodes_of(state.value) if isinstance(node, OnEngine)]
        tensors = [x for node in nodes for x in node.tensors if x.dim()]
        self._storages = {x.untyped_storage().data_ptr() for x in tensors}
        # Files and names
        self._order: list[tuple[str, str]] = []
        self._counted: set[tuple[str, str]] = set()
        self._running: dict[int, tuple[str, str]] = {}  # by the id of a frame
        self._is_looking = False

    @property
    def given(self) -> set[tuple[str, str]]:
        """Files and names of all that are given a part, stays or not."""
        return {*self._order}

    @property
    def names(self) -> list[str]:
        return [*dict.fromkeys(name for file, name in self._order if (file, name) in self._counted)]

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self._counted}

    def see(self, frame: FrameType, event: str, result: Any) -> None:
        if self._is_looking:  # what the look itself calls
            return
        self._is_looking = True
        if event == "call":
            self._call(frame)
        elif event == "return" and id(frame) in self._running:
            self._return(frame, result)
        self._is_looking = False

    def _call(self, frame: FrameType) -> None:
        path = Path(frame.f_code.co_filename)
        if not path.is_relative_to(PACKAGE) or path.parent == PACKAGE / "groups":
            return
        if any(map(self._is_part, _arguments(frame).values())):
            call = path.relative_to(PACKAGE).as_posix(), _name(frame)
            self._running[id(frame)] = call
            self._order.append(call)

    def _return(self, frame: FrameType, result: Any) -> None:
        call, code = self._running.pop(id(frame)), frame.f_code
        given = _arguments(frame)
        own = given.pop("self", None)
        if code.co_name == "__init__" or code.co_flags & GENERATOR:
            counts = True
        elif any(map(self._is_part, given.values())):
            counts = not (result is None or isinstance(result, bool))
        else:
            counts = isinstance(result, _OF_STATES) and result is not own
        if counts:
            self._counted.add(call)

    def _is_part(self, x: Any) -> bool:
        if type(x) is Tensor:
            return bool(x.dim()) and x.untyped_storage().data_ptr() in self._storages
        if isinstance(x, OnEngine | Home):
            # Without its properties, and it may be half made
            return any(self._is_part(vars(x).get(name)) for name in ("flat", "_homes", "_local"))
        if isinstance(x, dict):
            return any(map(self._is_part, x.values()))
        if isinstance(x, list | tuple) and not isinstance(x, TrainValue):
            return any(map(self._is_part, x))
        return isinstance(x, State | TrainValue | Nodes)


_OF_STATES = State, Nodes, OnEngine, Home


def _arguments(frame: FrameType) -> dict[str, Any]:
    code = frame.f_code
    num_starred = bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)
    num = code.co_argcount + code.co_kwonlyargcount + num_starred
    return {name: frame.f_locals.get(name) for name in code.co_varnames[:num]}


def _name(frame: FrameType) -> str:
    """That of the function; of one inside of another, the outer one's; of a constructor, the
    class."""
    if frame.f_code.co_name == "__init__":
        return type(frame.f_locals["self"]).__name__
    return frame.f_code.co_qualname.partition(".<locals>")[0]


def stays_of_one_step(group: Any) -> Stays:
    apply, params, buffers = functionalize(
        nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3)), units=nn.Linear
    )

    def loss_fn(params: Any, buffers: Any, x: Tensor) -> Tensor:
        return apply(params, buffers, x)[0].square().mean()

    step = shard(train_step(loss_fn, optim.adamw(0.1)), level=3, group=group)
    state = step.init(params, buffers)
    # Step 12 isn't looked at closely
    for _ in range(12):
        state, _ = step(state, torch.ones(4, 7))
    stays = Stays(state)
    with profiled(stays.see):
        step(state, torch.ones(4, 7))
    return stays


def test_the_page_tells_the_walk_of_a_state() -> None:
    stays = run_ranks(stays_of_one_step, 2)[0]
    text = ARCHITECTURE.read_text().partition("## One step's state")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in text.splitlines() if re.match(r"\| \d", line)]
    told = [name for row in rows for name in re.findall(r"`([\w./]+)`", row[3])]
    files = {name for name in told if name.endswith(".py")}
    assert [name for name in told if name not in files] == stays.names
    assert files == stays.files
    assert f"{len(stays.names)} stays in {len(files)} files" in text
    assert f"{len(stays.given)} functions in {len({file for file, _ in stays.given})} files" in text
    assert len(stays.names) <= MOST
