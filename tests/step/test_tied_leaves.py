"""Leaves of a tree that share elements: copies would part them, so they are refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import StructureError
from functorch_zero.groups import run_ranks
from functorch_zero.shared_elements import sharing_pairs
from tests.tiers import THOROUGH, tiers


def same(w: Tensor) -> Any:
    return {"a": w, "inner": {"b": w}}


def transposed(w: Tensor) -> Any:
    return {"a": w, "inner": {"b": w.detach().t().requires_grad_()}}


def rows(w: Tensor) -> Any:
    return {"a": w, "inner": {"b": w.detach()[1:].requires_grad_()}}


def half_frozen(w: Tensor) -> Any:
    return {"a": w, "inner": {"b": w.detach()}}


def conjugated(w: Tensor) -> Any:
    w = torch.complex(w.detach(), w.detach()).requires_grad_()
    return {"a": w, "inner": {"b": w.detach().conj().requires_grad_()}}


SHARED = [same, transposed, rows, half_frozen, conjugated]
APART: dict[str, Callable[[Tensor], Any]] = {
    "cloned": lambda w: {"a": w, "b": w.detach().clone().requires_grad_()},
    "of one flat": lambda w: {"a": w.detach()[0].requires_grad_(), "b": w.detach()[1:]},
    "columns": lambda w: {
        "a": w.detach()[:, 0].requires_grad_(),
        "b": w.detach()[:, 1].requires_grad_(),
    },
    "frozen": lambda w: {"a": w, "b": (table := torch.ones(3)), "c": table},
    "empty": lambda w: {"a": w, "b": w.detach()[:0].requires_grad_()},
}


def loss(params: Any, x: Tensor) -> Tensor:
    return params["a"].abs().sum() * x.sum()


def train(params: Any, level: int | None, group: Any) -> None:
    step = fz.train_step(lambda params, buffers, x: loss(params, x), optim.sgd(0.1))
    made: Any = step if level is None else fz.shard(step, level=level, group=group)
    made(made.init(params), torch.ones(2))


def program(params: Any, level: int | None, group: Any) -> None:
    optimizer = optim.sgd(0.1)

    def init(params: Any, scale: float) -> Any:
        return {"params": params, "opt": optimizer.init(params)}

    def run(value: Any, x: Tensor) -> Any:
        loss_value, grads = fz.value_and_grad(loss)(value["params"], x)
        new, state = optimizer.apply(grads, value["opt"], value["params"])
        return {"params": new, "opt": state}, {"loss": loss_value}

    step = fz.program_step(run, init=init)
    made: Any = step if level is None else fz.shard(step, level=level, group=group)
    made(made.init(params, 1.0), torch.ones(2))


def tree(params: Any, level: int | None, group: Any) -> None:
    fz.shard_tree(params, level=level, group=group)


# A whole tree is the user's own: only `shard_tree` copies it
USES = tiers(
    [*itertools.product([train, program], [None, 3]), (tree, 3)],
    [(train, 0), (program, 0), (tree, 0)],
    rows=True,
)


@pytest.mark.parametrize(("use", "level"), USES)
@pytest.mark.parametrize("make", SHARED)
def test_shared_elements_are_refused(make: Any, use: Any, level: int | None) -> None:
    def on_rank(group: Any) -> str:
        with pytest.raises(StructureError) as caught:
            use(make(torch.randn(4, 4).requires_grad_()), level, group)
        return str(caught.value)

    for said in run_ranks(on_rank, 1 if level is None else 2):
        for part in ("path inner.b", "got elements of a", "one leaf", "twice in the loss", "clone"):
            assert part in said


def test_leaves_that_are_trained_by_name() -> None:
    w = torch.zeros(3)
    step = fz.train_step(
        lambda params, buffers, x: loss(params, x),
        optim.sgd(0.1),
        trainable=lambda path, leaf: True,
    )
    with pytest.raises(StructureError, match=r"path b.*elements of a"):
        step.init({"a": w, "b": w})


@pytest.mark.parametrize(("use", "level"), USES)
@pytest.mark.parametrize("kind", APART)
def test_others_are_not(kind: str, use: Any, level: int | None) -> None:
    params = APART[kind](torch.randn(4, 4).requires_grad_())
    run_ranks(lambda group: use(params, level, group), 1 if level is None else 2)


@THOROUGH
def test_many_views_of_one_flat() -> None:
    leaves = list(torch.zeros(20_000).split(2))
    assert list(sharing_pairs(leaves)) == []
    assert list(sharing_pairs([*leaves, leaves[7][1:], None])) == [(7, 10_000)]
