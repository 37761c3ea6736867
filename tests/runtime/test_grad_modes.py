"""Params that a loss takes in hand in one grad mode, and uses in another."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.precision import Precision
from tests.compare import (
    assert_equal_on_ranks,
    train,
)
from tests.models import even
from tests.modules import seeded
from tests.tiers import crossed

LEVELS = (0, 1, 2, 3)
RATE = 0.1

Mode = Callable[[], AbstractContextManager[Any]]
Given = Callable[[Mode, Callable[[Any, Tensor], Tensor], Any, Tensor], Tensor]


def mean_square(x: Tensor) -> Tensor:
    return x.square().mean()


def all_whole(mode: Mode, call: Any, params: Any, x: Tensor) -> Tensor:
    with mode():
        whole = fz.unshard(params)
    return mean_square(call(whole, x) - 1) + params["2.bias"].square().sum()


def one_whole(mode: Mode, call: Any, params: Any, x: Tensor) -> Tensor:
    with mode():
        weight = fz.unshard(params["0.weight"])
    return mean_square(call(params, x) - 1) + mean_square(x @ weight)


def the_same_dtype(mode: Mode, call: Any, params: Any, x: Tensor) -> Tensor:
    """Operators that give the leaf itself."""
    with mode():
        first, second = params["0.weight"].to(x.dtype), params["2.weight"].contiguous()
    return mean_square((x @ first.t()).tanh() @ second.t() - 1) + mean_square(call(params, x))


def a_view(mode: Mode, call: Any, params: Any, x: Tensor) -> Tensor:
    with mode():
        view = params["0.weight"].t()
    return mean_square(x @ view.clone()) + mean_square(call(params, x) - 1)


def a_number(mode: Mode, call: Any, params: Any, x: Tensor) -> Tensor:
    with mode():
        norm = float(params["0.weight"].norm())
    return mean_square(norm * call(params, x) - 1)


def teacher(mode: Mode, call: Any, params: Any, x: Tensor) -> Tensor:
    with mode():
        target = call(params, x)
    return mean_square(call(params, 2 * x) - target.clone() - 1)


def teacher_after(mode: Mode, call: Any, params: Any, x: Tensor) -> Tensor:
    found = call(params, 2 * x)
    with mode():
        target = call(params, x)
    return mean_square(found - target.clone() - 1)


def gradients_in_it(mode: Mode, call: Any, params: Any, x: Tensor) -> Tensor:
    with mode():
        target = call(params, x).clone()
        with torch.inference_mode(False), torch.enable_grad():
            found = call(params, 2 * x)
    return mean_square(found - target.clone() - 1)


def transformed(mode: Mode, call: Any, params: Any, x: Tensor) -> Tensor:
    with mode():
        whole = fz.unshard(params)
    slopes = grad(lambda p: mean_square(call(p, x)))(whole)
    return mean_square(call(params, x) - 1) + mean_square(slopes["0.weight"])


GIVEN: list[Given] = [
    all_whole,
    one_whole,
    the_same_dtype,
    a_view,
    a_number,
    teacher,
    teacher_after,
    gradients_in_it,
    transformed,
]
MODES: list[Mode] = [torch.no_grad, torch.inference_mode]
# Leaves that are cast on use, without any rounding that a sum's order would change
PRECISIONS = [None, Precision(reduce=torch.float64)]


def model(dtype: torch.dtype) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(dtype))


def dtype_of(precision: Any) -> torch.dtype:
    return torch.float64 if precision is None else torch.float32


def step_of(given: Given, mode: Mode, precision: Any) -> tuple[Any, Any, Any]:
    apply, params, buffers = fz.functionalize(model(dtype_of(precision)), precision=precision)

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
        return given(mode, lambda p, x: apply(p, buffers, x)[0], params, batch["x"])

    return fz.train_step(loss_fn, optim.sgd(RATE)), params, buffers


def batches(precision: Any) -> list[dict[str, Tensor]]:
    """The same rows twice: each rank has all of them, so that any loss has the mean of its
    values."""
    generator, dtype = torch.Generator().manual_seed(1), dtype_of(precision)
    rows = [torch.randn(3, 4, generator=generator, dtype=dtype) for _ in range(2)]
    return [{"x": torch.cat([x, x])} for x in rows]


def by_torch(given: Given, mode: Mode, precision: Any) -> dict[str, Tensor]:
    """The params after a plain loop."""
    net = model(dtype_of(precision))
    optimizer = torch.optim.SGD(net.parameters(), RATE)
    for batch in batches(precision):
        optimizer.zero_grad()
        params = dict(net.named_parameters())
        given(
            mode, lambda p, x: torch.func.functional_call(net, p, (x,)), params, batch["x"]
        ).backward()
        optimizer.step()
    return dict(net.named_parameters())


@pytest.mark.parametrize(("given", "mode", "precision"), crossed(GIVEN, MODES, PRECISIONS))
def test_one_process(given: Given, mode: Mode, precision: Any) -> None:
    found = train(*step_of(given, mode, precision), batches(precision)).states[-1].params
    for path, expected in by_torch(given, mode, precision).items():
        torch.testing.assert_close(found[path], expected)


@pytest.mark.parametrize(
    ("given", "mode", "precision", "level"), crossed(GIVEN, MODES, PRECISIONS, LEVELS, quick=2)
)
def test_every_level(given: Given, mode: Mode, precision: Any, level: int) -> None:
    tolerance = 1e-12 if precision is None else 1e-5
    assert_equal_on_ranks(
        lambda: step_of(given, mode, precision),
        batches(precision),
        even(6, 2),
        level=level,
        tolerance=tolerance,
    )
