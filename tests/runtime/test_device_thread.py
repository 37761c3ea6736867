"""Backward of a GPU's tensors, which torch runs in a thread of the device: a step runs its own in
the thread of the loss. So nodes are numbered, and collectives ordered, as on a CPU; and what a
checkpoint runs again knows the batch that it is in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import StructureError
from functorch_zero.groups import CountingGroup
from functorch_zero.runtime.unshard import GatheredFlats
from functorch_zero.testing import (
    Equality,
    assert_equal_values,
    assert_sharded_equals_unsharded,
)
from tests.modules import Net, Residual, seeded
from tests.tiers import crossed, thinned, tiers

NUM_STEPS = 3


def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        # Of different sizes, so that the collectives of one are not another's
        blocks = [Residual(8, width) for width in (8, 16, 24)]
        return nn.Sequential(*blocks, nn.Tanh(), nn.Linear(8, 1)).double()


def batch() -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class DeviceThread:
    """torch's engine, as it is for tensors of an accelerator: backward runs in one thread of the
    device, unless the calling thread has switched that off."""

    def __init__(self) -> None:
        self.num_jobs = 0  # backwards that have run there
        self._thread = ThreadPoolExecutor(1, "device")
        self._engine = torch.autograd._engine_run_backward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch._C._is_multithreading_enabled():
            return self._engine(*args, **kwargs)
        grad = torch.is_grad_enabled()

        def backward() -> Any:
            with torch.set_grad_enabled(grad):
                return self._engine(*args, **kwargs)

        self.num_jobs += 1
        return self._thread.submit(backward).result()

    def make_nodes(self, number: int) -> None:
        """Make nodes there, as a backward of the user's own does beside the step."""

        def double() -> None:
            x = torch.ones(1, requires_grad=True)
            for _ in range(number):
                x = (2 * x.detach()).requires_grad_() * 2

        self._thread.submit(double).result()

    def end(self) -> None:
        self._thread.shutdown()


@pytest.fixture
def device_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceThread]:
    thread = DeviceThread()
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", thread)
    yield thread
    thread.end()


def with_slope(apply: Callable[..., Any], params: Any, x: Tensor) -> Tensor:
    """A loss with a gradient penalty: the units' backwards make nodes of their own."""
    plain, _ = apply(params, {}, x)
    x = (x + 1).requires_grad_()
    again, _ = apply(params, {}, x)
    (slope,) = torch.autograd.grad(again.sum(), x, create_graph=True)
    return plain.square().mean() + slope.square().mean()


def calls_of_training(level: int) -> list[Any]:
    """The collectives of all steps, in order."""
    apply, params, buffers = fz.functionalize(model(), units=Residual)

    def loss(params: Any, buffers: Any, x: Tensor) -> Tensor:
        return with_slope(apply, params, x)

    group = CountingGroup(2)
    step = fz.shard(fz.train_step(loss, optim.adamw(1e-2)), level=level, group=group)
    state = step.init(params, buffers)
    group.reset()
    for _ in range(NUM_STEPS):
        state, _ = step(state, batch())
    return list(group.calls)


def calls_of_a_program(level: int) -> list[Any]:
    apply, params, _ = fz.functionalize(model(), units=Residual)
    group = CountingGroup(2)
    sharded = fz.shard_tree(params, level=level, group=group)
    group.reset()
    for _ in range(NUM_STEPS):
        fz.value_and_grad(lambda params, x: with_slope(apply, params, x))(sharded, batch())
    return list(group.calls)


def calls_of_an_evaluation(level: int) -> list[Any]:
    apply, params, buffers = fz.functionalize(model(), units=Residual)

    def evaluate(params: Any, buffers: Any, x: Tensor) -> dict[str, Tensor]:
        with torch.enable_grad():
            x = (x + 1).requires_grad_()
            out, _ = apply(params, buffers, x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            # Of both branches: nodes with higher numbers run first
            (second,) = torch.autograd.grad(slope.square().sum() + out.square().sum(), x)
            return {"second": second.square().mean()}

    group = CountingGroup(2)
    train = fz.train_step(lambda params, buffers, x: params, optim.adamw(1e-2))
    state = fz.shard(train, level=level, group=group).init(params, buffers)
    step = fz.shard(fz.eval_step(evaluate), level=level, group=group)
    group.reset()
    for _ in range(NUM_STEPS):
        step(state, batch())
    return list(group.calls)


@pytest.mark.parametrize(
    ("run", "level"),
    crossed([calls_of_training, calls_of_a_program, calls_of_an_evaluation], [3, 0, 1, 2], quick=1),
)
def test_collectives_are_those_of_a_cpu(
    run: Callable[[int], list[Any]],
    level: int,
    device_thread: DeviceThread,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as plain:
        plain.setattr(torch.autograd, "_engine_run_backward", device_thread._engine)
        expected = run(level)
    assert expected
    assert run(level) == expected
    # The device's thread of this rank alone has done more: an evaluation with gradients, say
    device_thread.make_nodes(10_000)
    assert run(level) == expected


@pytest.mark.parametrize(
    "run", thinned([calls_of_training, calls_of_a_program, calls_of_an_evaluation])
)
def test_backward_runs_in_the_thread_of_the_loss(
    run: Callable[[int], list[Any]], device_thread: DeviceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one of the loss's own: at level 3 it gathers."""
    threads = []
    unshard = GatheredFlats.unshard

    def noting(flats: GatheredFlats) -> list[Tensor]:
        threads.append(threading.current_thread())
        return unshard(flats)

    monkeypatch.setattr(GatheredFlats, "unshard", noting)
    run(3)
    assert {*threads} == {threading.current_thread()}
    assert device_thread.num_jobs == 0
    # Afterwards it is as before
    x = torch.ones(1, requires_grad=True)
    torch.autograd.grad(x * 2, x)
    assert device_thread.num_jobs == 1


def test_the_caller_may_have_switched_it_off(device_thread: DeviceThread) -> None:
    with torch.autograd.set_multithreading_enabled(False):
        calls_of_training(3)
        assert not torch._C._is_multithreading_enabled()
    assert torch._C._is_multithreading_enabled()


# Exchanges of the loss, in regions that run again


def mixed(x: Tensor) -> Tensor:
    """All rows, own rows, a mean and a sum, of rows (n, k)."""
    rows = fz.batch.all_rows(x.sin())[fz.batch.own_rows(x)]
    return (rows - fz.batch.mean(x.cos())).tanh() * fz.batch.sum(x.sin().sum(0)).sin()


def again(fn: Callable[..., Any], *args: Any, reentrant: bool = False) -> Any:
    return checkpoint(fn, *args, use_reentrant=reentrant)


def exchanging_net() -> Net:
    """Rows of a table, exchanged in an encoder and in a recomputed unit."""

    def forward(net: Any, ids: Tensor) -> Tensor:
        rows = fz.batch.in_chunks(lambda x: net.encode(x).tanh(), 2)(again(net.table, ids))
        mixed_rows: Tensor = again(mixed, net.unit(rows))
        return mixed_rows

    return Net(
        forward,
        table=nn.Embedding(5, 4),
        encode=nn.Linear(4, 4),
        unit=nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh()),
    )


def exchanging() -> tuple[Any, Any, Any]:
    model = seeded(lambda: fz.batch.sync_batch_norm(exchanging_net()).double())
    return fz.functionalize(model, units=["encode", "unit"], remat=["unit"])


def loss_of(apply: Any) -> Any:
    def loss(params: Any, buffers: Any, ids: Tensor) -> Any:
        out, buffers = apply(params, buffers, ids)
        return out.square().mean(), fz.Aux(buffers=buffers, weight=len(ids))

    return loss


@pytest.mark.parametrize("level", tiers([3], [0, 1, 2]))
def test_exchanges_that_run_again(level: int, device_thread: DeviceThread) -> None:
    """In one process they are done again in backward; ranks receive the same once more."""
    apply, params, buffers = exchanging()
    step = fz.train_step(loss_of(apply), optim.sgd(0.1))
    ids = [torch.tensor([0, 1, 1, 4]), torch.tensor([3, 2, 4, 0])]
    rule = {"": level, "table.weight": "table"}
    assert_sharded_equals_unsharded(step, params, buffers, ids, levels=[rule], ranks=(2,))
    assert device_thread.num_jobs == 0


@pytest.mark.parametrize("how", ["remat", "checkpoint", "in_chunks"])
def test_a_loss_by_hand_runs_again_in_the_devices_thread(
    how: str, device_thread: DeviceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply, params, buffers = exchanging()
    x = torch.tensor([0, 1, 1, 4])

    def gradients() -> tuple[Tensor, ...]:
        if how == "remat":
            out, _ = apply(params, buffers, x)
            return torch.autograd.grad(out.sum(), params["encode.weight"])
        own = params["table.weight"].detach().requires_grad_()
        run = fz.batch.in_chunks(mixed, 2) if how == "in_chunks" else partial(again, mixed)
        return torch.autograd.grad(run(own).sum(), own)

    found = gradients()
    assert device_thread.num_jobs == 1
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", device_thread._engine)
    assert_equal_values(gradients(), found, grade=Equality("bitwise"))


def test_what_nobody_knows_of_is_refused_there(device_thread: DeviceThread) -> None:
    """A reentrant checkpoint has no region that could tell; never other ranks' rows left out."""
    x = torch.ones(4, 2, requires_grad=True)
    out = again(mixed, x, reentrant=True)
    with pytest.raises(StructureError, match=r"outside of a loss.*Remedy"):
        out.sum().backward()
