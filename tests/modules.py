"""Modules for tests that no model of `tests.models` will do for.

A `Net` says in one expression what it holds, and what it computes of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


def seeded(make: Callable[[], Any], seed: int = 0) -> Any:
    """`make()` on random numbers from this seed; the caller's go on as they were."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


class Net(nn.Module):
    """Children, leaves and buffers by name; a call computes `forward(net, ...)`.

    A tensor that is no Parameter becomes a buffer. Without a forward there is no call.
    """

    def __init__(self, forward: Callable[..., Any] | None = None, **parts: Any) -> None:
        super().__init__()
        self.compute = forward
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self.compute is not None
        return self.compute(self, *args, **kwargs)


class Unit(Net):
    """A Net that is chosen as a unit by its class."""


class Residual(nn.Module):
    """`x + down(tanh(up(x)))`, behind a LayerNorm if asked."""

    def __init__(self, width: int, hidden: int, *, norm: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.added(x)

    def added(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return out


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter beside it, then tanh."""

    def __init__(self, size: int, rank: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.down = nn.Parameter(torch.randn(rank, size))
        self.up = nn.Parameter(torch.randn(size, rank))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) + x @ self.down.T @ self.up.T)


def in_turn(layers: Iterable[nn.Module], x: Tensor) -> Tensor:
    """One layer after another, with tanh behind each."""
    for layer in layers:
        x = torch.tanh(layer(x))
    return x


def equal_layers(depth: int, width: int) -> Net:
    """Square linear layers without biases, with tanh behind each."""
    layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
    return Net(lambda net, x: in_turn(net.layers, x), layers=layers)


def routed(depth: int, width: int, classes: int) -> Net:
    """`forward(x, route)` goes through the square layers that `route` numbers, then a head."""
    return Net(
        lambda net, x, route: net.head(in_turn([net.layers[i] for i in route], x)),
        layers=nn.ModuleList(nn.Linear(width, width) for _ in range(depth)),
        head=nn.Linear(width, classes),
    )


def towers(width: int, *, bias: bool = True) -> tuple[nn.Sequential, nn.Sequential]:
    """Encoders of 6 and of 5 features; `bias`: whether outputs have one."""

    def tower(num_in: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(num_in, 16), nn.Tanh(), nn.Linear(16, width, bias=bias))

    return tower(6), tower(5)
