"""A program beside a loop in plain torch that shares no code with the library."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero.step.program_step import ProgramStep

Batch = dict[str, Tensor]
STEPS = 3


class Plain(NamedTuple):
    """The result of a loop in plain torch."""

    modules: dict[str, nn.Module]  # by the name of the program's tree
    metrics: list[dict[str, Tensor]]  # of each step


class Case(NamedTuple):
    """A program and its oracle.

    Attributes:
        step: the program, for one process.
        modules: those that `init` is given as trees, by name.
        widths: of the batch's entries, by name.
        plain: trains copies of the modules, named as the trees of the value, on whole batches.
        by_rank: whether a loss couples a rank's rows. Then `plain` is given the number of ranks.
    """

    step: ProgramStep
    modules: dict[str, nn.Module]
    widths: dict[str, int]
    plain: Callable[..., Plain]
    dtypes: tuple[torch.dtype, ...] = ()  # that losses compute in, beside float64
    rows: int = 60  # of a batch, over all ranks: 2, 3 and 5 divide it, into even parts
    by_rank: bool = False

    def batches(self) -> list[Batch]:
        made = torch.Generator().manual_seed(7)
        found = []
        for _ in range(STEPS):
            batch = {}
            for name, width in self.widths.items():
                batch[name] = torch.randn(self.rows, width, generator=made, dtype=torch.float64)
            found.append(batch)
        return found

    def trees(self) -> list[Any]:
        """The arguments of `init`."""
        return [fz.functionalize(module, units=nn.Linear)[1] for module in self.modules.values()]

    def run_plain(self, ranks: int) -> Plain:
        parts = {"ranks": ranks} if self.by_rank else {}
        return self.plain(self.batches(), **parts, **copy.deepcopy(self.modules))


def net(seed: int, *widths: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Linear layers with tanh between them."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).to(dtype)


def applied(module: nn.Module) -> Callable[[Any, Tensor], Tensor]:
    """`f(params, x)` of a module."""
    apply, _, _ = fz.functionalize(module, units=nn.Linear)
    return lambda params, x: apply(params, {}, x)[0]


def descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """A step of plain torch's."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
