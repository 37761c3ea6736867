"""Weights that a model's forward gives to a child for one call, by `torch.func.functional_call`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.precision import Precision
from tests.compare import (
    REORDERED,
    assert_equal_on_ranks,
    train,
)
from tests.models import even
from tests.modules import Net
from tests.tiers import crossed

LEVELS = (0, 1, 2, 3)
RATE = 0.1


def generated(net: Net, x: Tensor) -> Tensor:
    weights = {"weight": net.gate.weight.tanh(), "bias": net.body.bias}
    return functional_call(net.body, weights, (x,)) + net.body(2 * x)


def of_another_unit(net: Net, x: Tensor) -> Tensor:
    return functional_call(net.body, {"weight": net.gate.weight}, (x,)) + net.body(x)


def frozen(net: Net, x: Tensor) -> Tensor:
    weights = {name: p.detach() for name, p in net.body.named_parameters()}
    return functional_call(net.body, weights, (x,)) + net.body(x)


def perturbed(net: Net, x: Tensor) -> Tensor:
    def called(shift: Tensor) -> Tensor:
        weights = {"weight": net.body.weight + shift, "bias": net.body.bias}
        return functional_call(net.body, weights, (x,))

    return vmap(called)(torch.arange(3, dtype=x.dtype)).mean(0)


def scaled(net: Net, x: Tensor) -> Tensor:
    return functional_call(net.body, {"weight": 0.5 * net.body.weight}, (x,))


def without_and_with_gradients(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = functional_call(net.body, {"bias": net.gate.bias}, (x,))
    return net.body(x) - target


CALLS = [generated, of_another_unit, frozen, perturbed, scaled, without_and_with_gradients]


def model(call: Callable[[Net, Tensor], Tensor]) -> Net:
    """(n, 4) -> (n, 1); `call` runs the child `body`, a unit, on weights of its own choice."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Net(
            lambda net, x: net.head(call(net, net.gate(x)).tanh()),
            body=nn.Linear(4, 4),
            gate=nn.Linear(4, 4),
            head=nn.Linear(4, 1),
        )
        return net.double()


def step_of(call: Any, **options: Any) -> tuple[Any, Any, Any]:
    apply, params, buffers = fz.functionalize(model(call), **options)

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
        return (apply(params, buffers, batch["x"])[0] - 1).square().mean()

    return fz.train_step(loss_fn, optim.sgd(RATE)), params, buffers


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(8, 4, generator=generator, dtype=torch.float64)} for _ in range(2)]


def by_torch(call: Any) -> dict[str, Tensor]:
    """The params after a plain loop."""
    net = model(call)
    optimizer = torch.optim.SGD(net.parameters(), RATE)
    for batch in batches():
        optimizer.zero_grad()
        (net(batch["x"]) - 1).square().mean().backward()
        optimizer.step()
    return dict(net.named_parameters())


# A policy makes leaves lazy in a step for one process, too
ROUNDED = Precision(reduce=torch.float32)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"remat": True},
    {"precision": ROUNDED},
    {"precision": ROUNDED, "remat": True},
]


@pytest.mark.parametrize(("call", "options"), crossed(CALLS, [*OPTIONS]))
def test_weights_of_the_call_are_used(call: Any, options: dict[str, Any]) -> None:
    found = train(*step_of(call, **options), batches()).states[-1].params
    for path, expected in by_torch(call).items():
        torch.testing.assert_close(found[path], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("call", "options", "level"), crossed(CALLS, OPTIONS, LEVELS, n=4))
def test_weights_of_the_call_are_used_at_every_level(
    call: Any, options: dict[str, Any], level: int
) -> None:
    # Each rank's gradients are rounded to float32 by a policy
    tolerance = 1e-6 if "precision" in options else REORDERED
    assert_equal_on_ranks(
        lambda: step_of(call, **options), batches(), even(8, 2), level=level, tolerance=tolerance
    )
