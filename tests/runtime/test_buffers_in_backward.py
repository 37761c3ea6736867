"""Buffers that are written to in backward, when a loss has returned its new ones."""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import StructureError
from functorch_zero.groups import run_ranks
from tests.modules import Net, seeded
from tests.tiers import crossed, thinned

LEVELS = (None, 0, 1, 2, 3)  # None: a step for one process


class Amax(torch.autograd.Function):
    """x -> x, and the largest gradient so far to a buffer, as fp8 layers keep it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, amax: Tensor, saves: bool) -> Tensor:
        if saves:  # by which autograd holds the buffer
            ctx.save_for_backward(amax)
        ctx.amax = None if saves else amax
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        amax = ctx.saved_tensors[0] if ctx.amax is None else ctx.amax
        amax.copy_(torch.maximum(amax, grad.abs().max()))
        return grad, None, None


def net(kind: str) -> Net:
    """`kind`: who writes to `amax`."""

    def forward(net: Any, x: Tensor) -> Any:
        hidden = net.first(x)
        if kind == "checkpoint":
            hidden = checkpoint(net.norm, hidden, use_reentrant=False)
        if kind == "also in forward":
            net.amax.mul_(0.5)
        if kind in ("also in forward", "function", "saved"):
            hidden = Amax.apply(hidden, net.amax, kind == "saved")
        return net.last(hidden)

    def see(net: Any, module: nn.Module, given: Any, grads: Any) -> None:
        if kind == "module hook":
            net.amax.add_(grads[0].abs().max())

    first, last, norm = nn.Linear(4, 4), nn.Linear(4, 1), nn.BatchNorm1d(4)
    model = Net(forward, first=first, last=last, norm=norm, amax=torch.zeros(()))
    if kind in ("module hook", "a hook and a checkpoint"):
        last.register_full_backward_hook(MethodType(see, model))
    if kind == "logging hook":
        last.register_full_backward_hook(lambda module, given, grads: None)
    return model


def step_of(kind: str) -> tuple[Any, Any, Any]:
    apply, params, buffers = seeded(lambda: fz.functionalize(net(kind).double()))

    def loss_fn(params: Any, buffers: Any, x: Tensor) -> Any:
        if kind == "by the loss":
            out = Amax.apply(apply(params, buffers, x)[0], buffers["amax"], False)
            return (out - 1).square().mean()
        out, buffers = apply(params, buffers, x)
        return (out - 1).square().mean(), fz.Aux(buffers=buffers)

    return fz.train_step(loss_fn, optim.sgd(0.1), accumulate=2), params, buffers


def one_step(kind: str, level: int | None) -> Any:
    """The buffers after a step on the same examples for both ranks."""
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def run(group: Any) -> Any:
        step, params, buffers = step_of(kind)
        step = step if group is None else fz.shard(step, level=level, group=group)
        return step(step.init(params, buffers), x.clone())[0].buffers

    return run(None) if level is None else run_ranks(run, 2)[0]


@pytest.mark.parametrize(
    ("kind", "level"), crossed(["function", "saved", "module hook", "by the loss"], LEVELS)
)
def test_a_write_that_would_be_lost_is_refused(kind: str, level: int | None) -> None:
    with pytest.raises(StructureError, match=r"amax[\s\S]*in forward"):
        one_step(kind, level)


@pytest.mark.parametrize("level", thinned([None, 1, 2, 3, 0]))
def test_a_buffer_that_forward_writes_to_as_well(level: int | None) -> None:
    """It is among the new buffers already."""
    assert float(one_step("also in forward", level)["amax"]) > 0


@pytest.mark.parametrize(("kind", "level"), crossed(["checkpoint", "logging hook"], LEVELS))
def test_what_backward_does_to_copies_of_its_own(kind: str, level: int | None) -> None:
    """A forward that runs again counts once; a hook may look."""
    buffers = one_step(kind, level)
    assert int(buffers["norm.num_batches_tracked"]) == (2 if kind == "checkpoint" else 0)


def metric_after(kind: str, level: int | None) -> float:
    """A metric that a hook writes to in backward, after a step."""

    def loss_fn(params: Any, buffers: Any, x: Tensor) -> Any:
        seen = torch.zeros(())
        y = fz.unshard(params)["w"] * x

        def see(grad: Tensor) -> None:
            (seen.data if kind == "past its version" else seen).copy_(grad.norm())

        y.register_hook(see)
        return y.square().mean(), fz.Aux(metrics={"seen": seen})

    def run(group: Any) -> float:
        step = fz.train_step(loss_fn, optim.sgd(0.1))
        step = step if group is None else fz.shard(step, level=level, group=group)
        state = step.init({"w": torch.ones(4, requires_grad=True)})
        return float(step(state, torch.ones(4))[1]["seen"])

    return run(None) if level is None else run_ranks(run, 2)[0]


@pytest.mark.parametrize("level", thinned(LEVELS))
def test_metrics_are_those_that_the_loss_returned(level: int | None) -> None:
    """Ranks send them before backward."""
    with pytest.raises(StructureError, match=r"a metric .* was written to in backward.*path seen"):
        metric_after("seen by its version", level)
    assert metric_after("past its version", level) == 0
