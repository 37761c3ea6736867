"""`fz.host`: metrics as numbers, and no wait before they are read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import StructureError
from functorch_zero.step.host import HostMetrics, _Number


def test_numbers_are_those_of_the_tensors() -> None:
    given = {
        "loss": torch.tensor(0.1, dtype=torch.float64),
        "half": torch.tensor(0.5, dtype=torch.bfloat16),
        "count": torch.tensor(2**40 + 1),
        "rate": 0.3,
    }
    got = fz.host(given)
    assert got.is_here
    assert dict(got) == {"loss": 0.1, "half": 0.5, "count": 2**40 + 1, "rate": 0.3}
    assert len(got) == 4 and "other" not in got
    with pytest.raises(KeyError, match="other"):
        got["other"]
    assert dict(fz.host({})) == {}


@pytest.mark.parametrize("metric", [torch.ones(2), torch.tensor(1j), "0.5"])
def test_what_is_no_real_number_is_refused(metric: Any) -> None:
    """A complex one would have lost its imaginary part."""
    with pytest.raises(StructureError, match="a metric is no real number"):
        fz.host({"loss": 0.5, "accuracy": metric})


@pytest.mark.parametrize("metric", [2**70, 2**63, -(2**63) - 1])
def test_an_int_that_no_tensor_holds_is_refused(metric: int) -> None:
    """By name, here and in a step."""
    with pytest.raises(StructureError, match=r"path accuracy.*int64"):
        fz.host({"loss": 0.5, "accuracy": metric})
    assert fz.host({"accuracy": float(metric)})["accuracy"] == float(metric)

    def loss(params: Any, buffers: Any, batch: Any) -> Any:
        return params["w"].sum(), fz.Aux(metrics={"accuracy": metric})

    step = fz.train_step(loss, optim.sgd(0.1))
    with pytest.raises(StructureError, match=r"path accuracy.*int64"):
        step(step.init({"w": torch.ones(3, requires_grad=True)}), None)
    evaluate = fz.eval_step(lambda params, buffers, batch: {"accuracy": metric})
    with pytest.raises(StructureError, match=r"path accuracy.*int64"):
        evaluate(step.init({"w": torch.ones(3, requires_grad=True)}), None)


def test_the_largest_ints_are_metrics() -> None:
    assert dict(fz.host({"a": 2**63 - 1, "b": -(2**63)})) == {"a": 2.0**63, "b": -(2.0**63)}


def test_later_writes_are_not_seen() -> None:
    loss = torch.tensor(1.0, dtype=torch.float64)
    got = fz.host({"loss": loss})
    loss.fill_(2.0)
    assert got["loss"] == 1.0


def test_a_steps_metrics() -> None:
    step = fz.train_step(lambda params, buffers, x: params["w"].square().sum() * x, optim.sgd(0.1))
    _, metrics = step(step.init({"w": torch.ones(3, requires_grad=True)}), 2.0)
    assert fz.host(metrics)["loss"] == 6.0


class _Event:
    """Stands for a device's event."""

    def __init__(self) -> None:
        self.has_come, self.waits = False, 0

    def query(self) -> bool:
        return self.has_come

    def synchronize(self) -> None:
        self.has_come = True
        self.waits += 1


def test_a_devices_numbers_are_waited_for_when_read() -> None:
    late, numbers = _Event(), torch.zeros(2, dtype=torch.float64)
    found = {name: _Number(numbers, n, late) for n, name in enumerate(("loss", "norm"))}
    got = HostMetrics(found | fz.host({"rate": 0.5})._numbers)
    assert [*got] == ["loss", "norm", "rate"] and not got.is_here
    assert repr(got) == "HostMetrics(['loss', 'norm', 'rate'] to come)"
    assert got["rate"] == 0.5 and late.waits == 0
    numbers += 1  # they come
    assert got["norm"] == 1.0 and late.waits == 1
    assert got.is_here and repr(got) == "HostMetrics({'loss': 1.0, 'norm': 1.0, 'rate': 0.5})"


def test_a_loss_that_is_still_with_its_metrics_is_taken_apart() -> None:
    def program(params: Any, batch: Any) -> Any:
        loss, _ = fz.value_and_grad(lambda p: (p["w"].sum(), fz.Aux(metrics={"n": 1})))(params)
        return params, {"loss": loss}

    step = fz.program_step(program, init=lambda params: params)
    state = step.init({"w": torch.ones(3, requires_grad=True)})
    with pytest.raises(StructureError, match=r"got tuple.*\(\(value, metrics\), grads\)"):
        step(state, None)
