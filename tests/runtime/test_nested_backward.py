"""Custom functions that run modules again in their backward, and take gradients by a backward of
their own: reversible layers, and checkpoints that libraries write themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import StructureError
from functorch_zero.groups import run_ranks
from functorch_zero.precision import Precision
from tests.compare import (
    assert_equal_on_ranks,
    train,
)
from tests.models import even
from tests.modules import Net
from tests.tiers import crossed, thinned, tiers

LEVELS = (0, 1, 2, 3)


class RunAgain(torch.autograd.Function):
    """x -> f(x), of which nothing is kept: backward runs it again, and a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.f = f
        ctx.save_for_backward(x)
        with torch.no_grad():
            return f(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            torch.autograd.backward(ctx.f(x), grad)
        assert x.grad is not None
        return x.grad, None


class RunInBackwardOnly(RunAgain):
    """The same, with a forward that doesn't run the function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.f = f
        ctx.save_for_backward(x)
        return x.clone()


def model(kind: str, function: type[RunAgain] = RunAgain) -> nn.Module:
    """`kind`: the use of the layer that runs again. `function` is applied to it."""
    run_again = function.apply

    def forward(net: Any, x: Tensor) -> Any:
        x = run_again(net.first(x), net.again)
        if kind == "twice":
            x = run_again(x.square(), net.again)
        if kind == "beside":  # its leaves have a gradient of the usual way, too
            x = x + net.again(x)
        if kind == "nested":
            x = run_again(x, lambda v: run_again(v, net.again) + v)
        return net.last(x)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        again = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        return Net(forward, first=nn.Linear(4, 4), again=again, last=nn.Linear(4, 1)).double()


def mean_square(x: Tensor) -> Tensor:
    return (x - 1).square().mean()


def step_of(kind: str, precision: Any = None, **options: Any) -> tuple[Any, Any, Any]:
    apply, params, buffers = fz.functionalize(model(kind), precision=precision)

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
        return mean_square(apply(params, buffers, batch["x"])[0].double())

    return fz.train_step(loss_fn, optim.sgd(0.1), **options), params, buffers


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(12, 4, generator=generator, dtype=torch.float64)} for _ in range(2)]


def by_torch(kind: str) -> dict[str, Tensor]:
    """The params after a plain loop over the batches."""
    module = model(kind)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for batch in batches():
        optimizer.zero_grad()
        mean_square(module(batch["x"])).backward()
        optimizer.step()
    return {path: p.detach() for path, p in module.named_parameters()}


KINDS = ("once", "twice", "beside", "nested")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accumulate", tiers([1], [2]))
def test_one_process_trains_as_torch_does(kind: str, accumulate: int) -> None:
    run = train(*step_of(kind, accumulate=accumulate), batches())
    torch.testing.assert_close(dict(run.states[-1].params), by_torch(kind))


def test_with_a_policy_in_one_process() -> None:
    """Uses in backward are cast, and their gradients come to the stored leaves."""
    cast = train(*step_of("beside", Precision(compute=torch.float32)), batches())
    got = dict(cast.states[-1].params)
    torch.testing.assert_close(got, by_torch("beside"), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "level", "accumulate"), crossed(KINDS, LEVELS, (1, 2), quick=1))
def test_every_level(kind: str, level: int, accumulate: int) -> None:
    check(kind, level, accumulate=accumulate)


@pytest.mark.parametrize("level", tiers([3], [2]))
def test_gradients_reduced_once(level: int) -> None:
    check("twice", level, accumulate=2, reduce_gradients="once")


def check(kind: str, level: int, *, accumulate: int, **options: Any) -> None:
    assert_equal_on_ranks(
        lambda: step_of(kind, accumulate=accumulate), batches(), even(12, 2), level=level, **options
    )


@pytest.mark.parametrize("level", thinned([3, 2, 1, 0]))
def test_a_unit_that_runs_in_backward_only(level: int) -> None:
    """Levels 0 and 1 have reduced it by then. Levels 2 and 3 reduce it where it runs."""

    def step_and_tree() -> tuple[Any, Any, Any]:
        apply, params, buffers = fz.functionalize(model("once", RunInBackwardOnly))

        def loss_fn(params: Any, buffers: Any, x: Tensor) -> Tensor:
            return mean_square(apply(params, buffers, x)[0])

        return fz.train_step(loss_fn, optim.sgd(0.1)), params, buffers

    def run(group: Any) -> Any:
        step, params, buffers = step_and_tree()
        sharded = fz.shard(step, level=level, group=group)
        x = batches()[0]["x"].chunk(2)[group.rank]
        state, _ = sharded(sharded.init(params, buffers), x)
        return params, sharded.unshard(state).params

    if level < 2:
        with pytest.raises(StructureError, match=r"again.*Remedy"):
            run_ranks(run, 2)
        return
    (before, after), _ = run_ranks(run, 2)
    assert not torch.equal(before["again.0.weight"], after["again.0.weight"])
