"""Places of leaves while a unit is entered."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from functorch_zero.model.lazy_param import LazyParam, make_lazy_param
from functorch_zero.model.slots import Place, entering, tensors_in


class Told:
    """An entrance that notes what it is told."""

    def __init__(self, name: str, log: list[str]):
        self.leaves = [torch.full((2,), float(i)) for i in range(3)]
        self._name, self._log = name, log

    def handle(self, number: int) -> LazyParam:
        return make_lazy_param(self, number, (2,), torch.float32, None, torch.device("cpu"))

    def enter(self, module: str) -> Sequence[Tensor]:
        self._log.append(f"enter {self._name} for {module}")
        return self.leaves

    def leave(self, module: str) -> None:
        self._log.append(f"leave {self._name} for {module}")

    def touch(self) -> Sequence[Tensor]:
        return self.leaves

    def watch(self) -> AbstractContextManager[None]:
        return nullcontext()


def test_leaves_of_several_entrances_and_whole_ones() -> None:
    """Also arguments of names that the library uses itself, and an error on the way."""
    log: list[str] = []
    first, second, plain = Told("first", log), Told("second", log), torch.ones(2)
    leaves = {"a": first.handle(2), "b": plain, "c": second.handle(1), "d": first.handle(0)}
    module: dict[str, Any] = {
        "x": leaves["a"],
        "y": plain,
        "z": leaves["c"],
        "v": leaves["d"],
        "again": leaves["a"],
    }
    names = {"x": "a", "y": "b", "z": "c", "v": "d", "again": "a"}
    places = [Place(module, name, leaf) for name, leaf in names.items()]
    before = tensors_in(places)
    seen = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        seen.append((args, kwargs, tensors_in(places)))
        raise ValueError("of the user's")

    with pytest.raises(ValueError, match="of the user's"):
        entering("block", places, leaves, forward)(1, path=2, leaves=3, forward=4)
    ((args, kwargs, inside),) = seen
    assert args == (1,) and kwargs == {"path": 2, "leaves": 3, "forward": 4}
    expected = [first.leaves[2], plain, second.leaves[1], first.leaves[0], first.leaves[2]]
    assert all(x is y for x, y in zip(inside, expected, strict=True))
    assert all(x is y for x, y in zip(tensors_in(places), before, strict=True))
    assert sorted(log[:2]) == ["enter first for block", "enter second for block"]
    assert log[2:] == [entry.replace("enter", "leave") for entry in reversed(log[:2])]


def test_whole_leaves_enter_nothing() -> None:
    leaf = torch.ones(2)
    assert entering("block", [Place({"x": leaf}, "x", "a")], {"a": leaf}, print) is print
