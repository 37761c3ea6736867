"""The part of communication that a step's computing does not hide, by a clock that stands still but
for the wire and for layers of a known length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from functorch_zero import optim
from functorch_zero.groups import Group, HybridGroup
from functorch_zero.model.functionalize import functionalize
from functorch_zero.sharded.api import shard
from functorch_zero.step.train import train_step
from tests.benchmarks import simulated
from tests.benchmarks.simulated import SimulatedGroup, Wire
from tests.modules import Net
from tests.tiers import tiers

WIDTH, LAYERS, UNITS = 64, 3, 6
FORWARD, BACKWARD = 3.0, 6.0  # seconds of one unit, of which each layer takes its part
UNIT_BYTES = LAYERS * WIDTH * WIDTH * 8


class Clock:
    """Stands for the module `time`: only those who sleep or compute let time pass."""

    now = computed = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def compute(self, seconds: float) -> None:
        self.now += seconds
        self.computed += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(simulated, "time", made)
    return made


class Computing(torch.autograd.Function):
    """The same tensor, after the seconds that a layer takes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        simulated.time.compute(FORWARD / LAYERS)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        simulated.time.compute(BACKWARD / LAYERS)
        return grad


def layers() -> Net:
    """A unit. In backward each layer asks for its weight, then takes its time."""

    def forward(net: Any, x: Tensor) -> Tensor:
        for linear in net.maps:
            x = torch.tanh(linear(Computing.apply(x)))
        return x

    maps = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
    return Net(forward, maps=nn.ModuleList(maps))


def exposed_seconds(clock: Clock, group: Group, level: int = 3, **options: Any) -> float:
    """The seconds of a warm step in which nothing is computed."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layers() for _ in range(UNITS))).double()
    apply, params, buffers = functionalize(model)
    loss_fn = lambda p, b, x: apply(p, b, x)[0].square().mean()
    step = shard(train_step(loss_fn, optim.sgd(0.1)), level=level, group=group, **options)
    state, x = step.init(params, buffers), torch.ones(2, WIDTH, dtype=torch.float64)
    for _ in range(6):  # in step 5 no layer's backward runs aside, as it does where a step looks
        before = clock.now - clock.computed
        state, _ = step(state, x)
    return clock.now - clock.computed - before


def unit_takes(seconds: float, ranks: int) -> Wire:
    """A wire on which a unit's gather, and its reduction, take so long."""
    return Wire(bandwidth=UNIT_BYTES * (ranks - 1) / ranks / seconds)


def test_time_hides_a_reduction_behind_a_whole_units_backward(clock: Clock) -> None:
    """A gather and a reduction together take 5 of a unit's 6 seconds of backward. The first gather
    and the last reduction of a step have nothing to hide behind."""
    exposed = {}
    for overlap in ("memory", "time"):
        group = SimulatedGroup(4, wire=unit_takes(2.5, ranks=4))
        exposed[overlap] = exposed_seconds(clock, group, overlap=overlap)
    assert exposed["time"] == pytest.approx(2 * 2.5, abs=0.3), "and some messages of metrics"
    # The second of three asks comes after 2 seconds, and there the reduction is waited for
    assert exposed["memory"] == pytest.approx(exposed["time"] + 5 * 0.5)


@pytest.mark.parametrize(
    ("state_axes", "exposed"),
    tiers(
        [("both", 3 * 0.75 + UNITS * 0.75)],  # and after the update, all pieces travel back
        [("shard", 3 * 1.5)],
        rows=True,
    ),
)
def test_sums_over_replicas_run_beside_backward(
    clock: Clock, state_axes: Any, exposed: float
) -> None:
    """But for three units': backward ends with two reductions under way, and one just over."""
    group = HybridGroup(SimulatedGroup(4, wire=unit_takes(1.5, ranks=2)), shard_size=2)
    found = exposed_seconds(clock, group, overlap="time", state_axes=state_axes)
    assert found == pytest.approx(2 * 1.5 + exposed, abs=0.3)


@pytest.mark.parametrize("level", tiers([3], [0]))
def test_metrics_travel_beside_backward(clock: Clock, level: int) -> None:
    """Each collective takes a second. Exposed are the first gather, the last reduction and the
    words of the hosts, and no values."""
    group = SimulatedGroup(4, wire=Wire(latency=1.0))
    found = exposed_seconds(clock, group, level=level, overlap="time")
    assert found == {0: 2.0, 3: 3.0}[level]
