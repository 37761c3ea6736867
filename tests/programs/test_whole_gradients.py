"""In a sharded step a gradient by what isn't sharded is refused: it is that of one rank's batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from optree import tree_map
from torch import Tensor

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import StructureError
from functorch_zero.groups import run_ranks
from functorch_zero.testing import assert_sharded_equals_unsharded
from tests.tiers import crossed, thinned

LEVELS = [0, 1, 2, 3]
X = torch.randn(8, 70, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
sgd = optim.sgd(0.1)


def first() -> Any:
    """More elements than ranks compare in a step that is not looked at."""
    return {"w": torch.full((70, 70), 0.1, dtype=torch.float64, requires_grad=True)}


def loss(params: Any, x: Tensor) -> Tensor:
    return (x @ params["w"]).square().mean()


def of_helper(net: Any, helper: Tensor, x: Tensor) -> Tensor:
    return fz.value_and_grad(loss)({"w": helper.detach().requires_grad_()}, x)[1]["w"]


def of_leaf(net: Any, helper: Tensor, x: Tensor) -> Tensor:
    return fz.value_and_grad(lambda w, x: loss({"w": w}, x))(net["w"], x)[1]


def of_copy(net: Any, helper: Tensor, x: Tensor) -> Tensor:
    return fz.value_and_grad(loss)(fz.unshard(net), x)[1]["w"]


def of_step(net: Any, helper: Tensor, x: Tensor) -> Tensor:
    step = fz.train_step(lambda params, buffers, x: loss(params, x), sgd)
    state = step.init({"w": helper.detach().requires_grad_()}, {})
    return step(state, x)[0].params["w"] - helper


def product(net: Any, helper: Tensor, x: Tensor) -> Tensor:
    own = {"w": helper.detach().requires_grad_()}
    return fz.hvp(loss)(own, {"w": helper}, x)[2]["w"]


WHOLE: dict[str, Callable[..., Tensor]] = {
    "helper": of_helper, "leaf": of_leaf, "copy": of_copy, "train step": of_step, "hvp": product,
}  # fmt: skip


@pytest.mark.parametrize("since", [0, 5])  # the step 5 is not looked at closely
@pytest.mark.parametrize(("name", "level"), crossed([*WHOLE], LEVELS, quick=2))
def test_a_gradient_by_what_is_not_sharded_is_refused(name: str, level: int, since: int) -> None:
    def program(value: Any, x: Tensor) -> Any:
        net, helper, number = value
        if number >= since:
            helper = helper - 0.1 * WHOLE[name](net, helper, x).detach()
        return (net, helper, number + 1), {}

    step = fz.program_step(program, init=lambda net: (net, torch.ones_like(first()["w"]), 0))

    def run(group: Any) -> None:
        own = step if group is None else fz.shard(step, level=level, group=group)
        state, x = own.init(first()), X if group is None else X.chunk(group.size)[group.rank]
        for _ in range(6):
            state, _ = own(state, x)

    run(None)  # right in one process
    story = r"in a sharded step: .* on rank \d.*Remedy: pass the tree to the program's init"
    with pytest.raises(StructureError, match=story):
        run_ranks(run, 2)


@pytest.mark.parametrize("level", thinned(LEVELS))
def test_the_remedies(level: int) -> None:
    """A temperature, of one element: in a tree of its own, or by torch.func."""

    def program(value: Any, x: Tensor) -> Any:
        net, heat, other = value
        found, grads = fz.value_and_grad(loss)(net, x)
        net = fz.apply_updates(net, tree_map(lambda g: -0.1 * g, grads))
        by_tree = fz.value_and_grad(lambda heat, gap: heat["log"].exp() * gap)(heat, found - 1)[1]
        heat = fz.apply_updates(heat, tree_map(lambda g: -0.1 * g, by_tree))
        by_torch = torch.func.grad(lambda other, gap: other.exp() * gap)(other, found - 1)
        return (net, heat, other - 0.1 * by_torch), {"loss": found, "slope": by_torch}

    def log() -> Tensor:
        return torch.tensor(0.5, dtype=torch.float64, requires_grad=True)

    step = fz.program_step(program, init=lambda net, heat, other: (net, heat, other))
    assert_sharded_equals_unsharded(
        step, first(), {"log": log()}, log().detach(), [X, X], levels=[level], ranks=[1, 2]
    )
