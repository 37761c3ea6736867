"""Programs whose trees are on the meta device, and get their values rank by rank."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import StructureError
from functorch_zero.groups import CountingGroup, run_ranks
from functorch_zero.testing import assert_equal_values
from tests.local import part
from tests.tiers import tiers

X = torch.randn(8, 3, dtype=torch.float64)
optimizer = optim.adamw(0.1)


def on_meta(*widths: int) -> nn.Module:
    with torch.device("meta"):
        layers = [nn.Linear(*pair) for pair in pairwise(widths)]
        return nn.Sequential(*layers).double()


STUDENT, TEACHER = on_meta(3, 16, 2), on_meta(3, 5, 2)
apply, student, _ = fz.functionalize(STUDENT)
teach, teacher, _ = fz.functionalize(TEACHER)
VALUES = {"student": fz.deferred_init(STUDENT, 3), "teacher": fz.deferred_init(TEACHER, 4)}


def loss(student: Any, teacher: Any, x: Tensor) -> Tensor:
    return (apply(student, {}, x)[0] - teach(teacher, {}, x)[0]).square().mean()


def program(value: Any, x: Tensor) -> Any:
    student, teacher, state = value
    mean, grads = fz.value_and_grad(loss)(student, teacher, x)
    student, state = optimizer.apply(grads, state, student)
    return (student, teacher, state), {"loss": mean}


def init(student: Any, teacher: Any) -> Any:
    return student, teacher, optimizer.init(student)


step = fz.program_step(program, init=init)


@pytest.mark.parametrize("level", tiers([{"student": 3, "teacher": 0}], [0, 1, 3]), ids=str)
def test_values_are_the_same_at_every_level(level: Any) -> None:
    first = step.init(student, teacher, values=VALUES)
    expected, _ = step(first, X)

    def run(group: Any) -> Any:
        sharded = fz.shard(step, level=level, group=group)
        state = sharded.init(student, teacher, values=VALUES)
        after, _ = sharded(state, part(X, group))
        return sharded.unshard(state), sharded.unshard(after)

    for whole, after in run_ranks(run, 2):
        assert_equal_values(first.value, whole.value, grade="bitwise")
        assert_equal_values(expected.value, after.value)


def test_one_tree_may_have_its_values() -> None:
    values = {"student": VALUES["student"]}
    whole = VALUES["teacher"].fill(teacher)
    first = step.init(student, whole, values=values)

    def run(group: Any) -> Any:
        sharded = fz.shard(step, level=3, group=group)
        return sharded.unshard(sharded.init(student, whole, values=values))

    for got in run_ranks(run, 2):
        assert_equal_values(first.value, got.value, grade="bitwise")


def test_wrong_values_are_refused() -> None:
    for made in (step, fz.shard(step, level=3, group=CountingGroup(2))):
        with pytest.raises(
            ValueError, match=r"names among \['student', 'teacher'\], got \['disc'\]"
        ):
            made.init(student, teacher, values={"disc": VALUES["student"]})
        with pytest.raises(TypeError, match=r"or by their names.*deferred_init.*got a list"):
            made.init(student, teacher, values=[VALUES["student"]])  # type: ignore[arg-type]
        for values in ({"student": VALUES["teacher"]}, VALUES["teacher"]):
            with pytest.raises(StructureError, match="another shape"):
                made.init(student, teacher, values=values)
