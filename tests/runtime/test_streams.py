"""A loss that runs units on several streams of a GPU. Names stand for streams."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import StructureError
from functorch_zero.groups import CountingGroup
from functorch_zero.runtime import unit
from tests.modules import Net
from tests.tiers import tiers

LEVELS = (0, 1, 2, 3)


class Streams:
    """The stream that is current, as torch keeps one per thread and device."""

    def __init__(self) -> None:
        self.current = "default"

    @contextlib.contextmanager
    def use(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def __deepcopy__(self, memo: Any) -> Streams:
        return self  # a model's copy runs on the same device

    def of_device(self, device: torch.device) -> str:
        return self.current


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    streams = Streams()
    monkeypatch.setattr(unit, "current_stream", streams.of_device)
    return streams


def net(streams: Streams, side: str) -> Net:
    """Two units; the second is called on `side`, or its weight is used there."""

    def forward(net: Any, x: Tensor) -> Any:
        x = net.first(x)
        with streams.use(side):
            return net.second(x)

    return Net(forward, first=nn.Linear(4, 4), second=nn.Linear(4, 1))


def train(model: nn.Module, level: int) -> Any:
    apply, params, buffers = fz.functionalize(model, units=nn.Linear)

    def loss(params: Any, buffers: Any, x: Tensor) -> Tensor:
        return apply(params, buffers, x)[0].square().mean()

    step = fz.shard(fz.train_step(loss, optim.sgd(0.1)), level=level, group=CountingGroup(2))
    return step(step.init(params, buffers), torch.ones(2, 4))


@pytest.mark.parametrize("level", LEVELS)
def test_a_unit_on_another_stream_is_refused(streams: Streams, level: int) -> None:
    words = "another stream.*path second, expected default, got side.*Remedy"
    with pytest.raises(StructureError, match=words):
        train(net(streams, "side"), level)
    assert streams.current == "default"


@pytest.mark.parametrize("level", tiers([1, 3], [0, 2]))
@pytest.mark.parametrize("name", ["default", "side"])
def test_all_on_one_stream(streams: Streams, level: int, name: str) -> None:
    with streams.use(name):
        state, _ = train(net(streams, name), level)
    assert int(state.step) == 1


def test_a_leaf_used_on_another_stream_is_found_in_backward(streams: Streams) -> None:
    """There the engine goes on on the stream of forward, and asks for the leaf there."""

    class Inside(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            # The node below runs first in backward, and sets the stream of those before it
            out.register_hook(lambda grad: setattr(streams, "current", "side"))
            return out

    model = nn.Sequential(nn.Linear(4, 4), Inside(4, 1))
    with pytest.raises(StructureError, match="another stream"):
        train(model, 3)


def test_devices_without_streams() -> None:
    assert unit.current_stream(torch.device("cpu")) is None
    assert unit.current_stream(torch.device("meta")) is None


def test_the_stream_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    assert unit.current_stream(torch.device("cuda:1")) == "stream of cuda:1"
