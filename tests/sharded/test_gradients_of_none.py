"""`optim.to_torch` counts the steps of each param as torch does, where gradients of None come and
go."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from functorch_zero import optim
from functorch_zero.groups import launch
from tests.sharded.test_to_torch import (
    batches,
    build,
    loss_of,
    placed_on,
    train,
    whole,
)
from tests.tiers import THOROUGH, thinned

STEPS = 8
# name -> the steps in which a param has a gradient; the others have one in all but step 2
WITH_GRADIENT: dict[str, set[int]] = {
    "head.bias": {0, 1, 4, 5, 7},
    "embed.weight": {3, 4, 6},  # begins late
    "blocks.0.norm.weight": {0, 2, 7},  # also where no other has one
    "blocks.1.up.weight": set(),
}

# name -> ours, of the learning rate; torch's; both at 0.1
OPTIMIZERS: dict[str, tuple[Callable[[Any], optim.Transform], Callable[..., Any]]] = {
    "adamw": (
        lambda lr: optim.adamw(lr, weight_decay=0.1),
        lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.1),
    ),
    "adamw without a kernel": (
        lambda lr: optim.adamw(lr, weight_decay=0.1, mask=lambda path, leaf: True),
        lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.1),
    ),
    "adamw of some, adam of others": (
        lambda lr: optim.partition(
            {"adamw": optim.adamw(lr, weight_decay=0.0), "adam": optim.adam(lr)},
            lambda path, leaf: "adamw" if path.endswith("bias") else "adam",
        ),
        lambda params: torch.optim.Adam(params, lr=0.1),
    ),
    "momentum": (
        lambda lr: optim.sgd(lr, 0.9, weight_decay=0.1),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
    ),
    "amsgrad": (
        lambda lr: optim.amsgrad(lr),
        lambda params: torch.optim.Adam(params, lr=0.1, amsgrad=True),
    ),
}


def come_and_go(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range = range(STEPS),
    rank: int = 0,
    ranks: int = 1,
) -> None:
    for n, batch in [*enumerate(batches(steps.stop))][steps.start :]:
        own: Any = tuple(x.chunk(ranks)[rank] for x in batch)
        optimizer.zero_grad()
        loss_of(model, own).backward()
        for name, param in model.named_parameters():
            name = name.removeprefix("module.")
            if n not in WITH_GRADIENT.get(name, {*range(STEPS)} - {2}):
                param.grad = None
        optimizer.step()


def as_torch(name: str) -> list[Tensor]:
    model = build()
    come_and_go(model, OPTIMIZERS[name][1](model.parameters()))
    return [param.detach() for param in model.parameters()]


def assert_moved_alike(model: nn.Module, wanted: list[Tensor]) -> None:
    for (name, p), q, first in zip(
        model.named_parameters(), wanted, build().parameters(), strict=True
    ):
        moved = (q - first).abs().max()
        assert (moved > 0) == (WITH_GRADIENT.get(name.removeprefix("module.")) != set()), name
        assert (whole(p) - q).abs().max() <= 1e-11 * moved, name


@pytest.mark.parametrize("name", thinned(OPTIMIZERS, 3))
def test_as_torchs_optimizers(name: str) -> None:
    model = build()
    come_and_go(model, optim.to_torch(OPTIMIZERS[name][0], model, lr=0.1))
    assert_moved_alike(model, as_torch(name))


@pytest.mark.parametrize("at", thinned([*range(1, STEPS, 2)][::-1]))
def test_a_state_dict_has_the_counts_of_each_param(at: int) -> None:
    """And one that was written in place, as DCP does, none of another param's."""
    make, first = OPTIMIZERS["adamw"][0], build()
    optimizer = optim.to_torch(make, first, lr=0.1)
    come_and_go(first, optimizer, range(at))
    saved = copy.deepcopy(optimizer.state_dict())
    second = build()
    second.load_state_dict(first.state_dict())
    again = optim.to_torch(make, second, lr=0.1)
    given = again.state_dict()
    for n, tensors in saved["state"].items():
        for key, x in tensors.items():
            given["state"][n][key].copy_(x)
    again.load_state_dict(given)
    come_and_go(second, again, range(at, STEPS))
    assert_moved_alike(second, as_torch("adamw"))


def test_a_param_called_count_is_no_count() -> None:
    """The state has a leaf of that path: `0.count`."""

    def run(optimizer: torch.optim.Optimizer, params: dict[str, Tensor]) -> list[Tensor]:
        for n in range(STEPS):
            for k, param in enumerate(params.values()):
                param.grad = torch.full_like(param, n + 1.0) if (n + k) % 3 else None
            optimizer.step()
        return [*params.values()]

    def params() -> dict[str, Tensor]:
        return {name: nn.Parameter(torch.ones(2)) for name in ("count", "other", "w")}

    ours, theirs = params(), params()
    make, torchs = OPTIMIZERS["adamw"]
    pairs = zip(
        run(optim.to_torch(make, ours, lr=0.1), ours),
        run(torchs([*theirs.values()]), theirs),
        strict=True,
    )
    for p, q in pairs:
        torch.testing.assert_close(p, q)


def test_experts_in_ever_new_combinations() -> None:
    """Plans of few combinations are kept, and params whose counts have met go on together."""
    names = [f"expert.{k}" for k in range(6)]
    made = [{name: nn.Parameter(torch.ones(3)) for name in names} for _ in range(2)]
    make, torchs = OPTIMIZERS["adamw"]
    optimizers = optim.to_torch(make, made[0], lr=0.1), torchs([*made[1].values()])
    for n in range(40):
        for params, optimizer in zip(made, optimizers, strict=True):
            for k, param in enumerate(params.values()):
                param.grad = torch.full_like(param, k + 1.0) if (5 * n + 1) >> k & 1 else None
            optimizer.step()
    for name in names:
        torch.testing.assert_close(made[0][name], made[1][name])


def on_ranks(wanted: dict[str, list[Tensor]]) -> None:
    for kind in ("ddp", "fully_shard"):
        for name in wanted:
            model, rank, ranks = placed_on(kind)
            optimizer = optim.to_torch(OPTIMIZERS[name][0], model, lr=0.1)
            come_and_go(model, optimizer, rank=rank, ranks=ranks)
            assert_moved_alike(model, wanted[name])


@THOROUGH
def test_on_ranks() -> None:
    wanted = {name: as_torch(name) for name in ("adamw", "momentum")}
    launch(on_ranks, 2, wanted, start_method="fork", timeout=100)


def test_a_state_dict_from_before_a_param_began() -> None:
    """All counts alike: those of a new optimizer."""
    model = build()
    optimizer = optim.to_torch(OPTIMIZERS["adamw"][0], model, lr=0.1)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other = build()
    train(model, optimizer, 0, 1, range(3))
    train(other, OPTIMIZERS["adamw"][1](other.parameters()), 0, 1, range(3))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)
