"""What a program's step is given: the arguments of `init` and `refit`, and states."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.testing import assert_equal_values

sgd = optim.sgd(0.1)
apply, PARAMS, _ = fz.functionalize(nn.Linear(3, 2))
X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


class Value(NamedTuple):
    net: Any
    other: Any  # which no step changes
    seen: Any


def first_value(net: Any, other: Any, seen: Any) -> Value:
    return Value(net, other, seen)


def program(value: Value, x: Tensor) -> Any:
    def loss(net: Any, x: Tensor) -> Tensor:
        return apply(net, {}, x)[0].square().mean()

    found, grads = fz.value_and_grad(loss)(value.net, x)
    net, _ = sgd.apply(grads, sgd.init(value.net), value.net)
    return value._replace(net=net), {"loss": found}


step = fz.program_step(program, init=first_value, buffers=["seen"])


def trees() -> dict[str, Any]:
    return {"net": PARAMS, "other": {"a": torch.ones(2)}, "seen": {"n": torch.zeros(3)}}


def test_arguments_by_their_names() -> None:
    given = trees()
    by_place, by_name = step.init(*given.values()), step.init(**given)
    assert_equal_values(by_place.value, by_name.value, grade="bitwise")
    new = {"a": torch.zeros(2), "b": torch.zeros(1)}
    one, other = step.refit(by_name, None, new), step.refit(by_name, other=new)
    assert_equal_values(one.value, other.value, grade="bitwise")
    assert other.value.other["a"].tolist() == [1, 1]  # what the state has counts
    with pytest.raises(TypeError, match=r"other arguments than it takes.*multiple values.*'net'"):
        step.refit(by_name, PARAMS, net=PARAMS)


def test_leaves_that_stay_are_the_states_own() -> None:
    state = step.init(**trees())
    after, _ = step(state, X)
    assert after.value.other["a"] is state.value.other["a"]
    assert after.value.net["weight"] is not state.value.net["weight"]
