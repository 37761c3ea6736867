"""Transforms of torch.func around a program's functions are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import functorch_zero as fz
from functorch_zero.errors import StructureError
from functorch_zero.groups import run_ranks
from tests.tiers import thinned

LEVELS = thinned([0, 1, 2, 3])
FIRST = {"w": torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)}
SCALES = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)


def loss(params: Any, scale: Tensor) -> Tensor:
    return ((params["w"] ** 3) * scale).sum()


def slope(tree: Any, scale: Tensor) -> Any:
    return fz.value_and_grad(loss)(tree, scale)[1]["w"]


def product(tree: Any, scale: Tensor) -> Any:
    return fz.hvp(loss)(tree, fz.zero_updates(tree), scale)[2]["w"]


AROUND: dict[str, Callable[[Any], Any]] = {
    "fz.value_and_grad": lambda tree: torch.func.vmap(lambda s: slope(tree, s))(SCALES),
    "fz.hvp": lambda tree: torch.func.vmap(lambda s: product(tree, s))(SCALES),
    "fz.value_and_grad was": lambda tree: torch.func.grad(lambda s: slope(tree, s).sum())(
        SCALES[0]
    ),
}


@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("level", [None, *LEVELS])
def test_a_transform_around_a_gradient_is_refused(name: str, level: int | None) -> None:
    def run(group: Any) -> None:
        tree = FIRST if level is None else fz.shard_tree(FIRST, level=level, group=group)
        story = rf"{name}.* inside of a transform of torch\.func.*Remedy: put the transform inside"
        with pytest.raises(StructureError, match=story) as caught:
            AROUND[name](tree)
        assert ("on rank" in str(caught.value)) == (level is not None)

    run_ranks(run, 1 if level is None else 2)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("are_read", [False, True])
def test_a_sharded_tree_in_a_transform_is_refused(level: int, are_read: bool) -> None:
    """Also one whose leaves somebody has read before: a gradient by whole leaves would be that of
    one rank's batch."""

    def run(group: Any) -> None:
        tree = fz.shard_tree(FIRST, level=level, group=group)
        if are_read:
            assert tree["w"].requires_grad
        story = r"given to a transform of torch\.func.* on rank .*Remedy: fz\.value_and_grad"
        with pytest.raises(StructureError, match=story):
            torch.func.grad(loss)(tree, SCALES[group.rank])

    run_ranks(run, 2)
