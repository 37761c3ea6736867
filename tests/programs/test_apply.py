"""`Transform.apply` on sharded trees: the fused kernel, and no argument written to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optree import tree_map
from torch import Tensor

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.groups import run_ranks
from functorch_zero.testing import assert_equal_values, assert_sharded_equals_unsharded
from tests.local import part
from tests.tiers import crossed, tiers

torch.manual_seed(0)
FIRST = {
    "w": torch.randn(5, 3, requires_grad=True),
    "b": torch.randn(3, requires_grad=True),
    "frozen": torch.randn(3),
}
BATCHES = [torch.randn(8, 5) for _ in range(3)]

adamw = optim.adamw(0.1)


def loss(params: Any, x: Tensor) -> Tensor:
    return ((x @ params["w"] + params["b"]) * params["frozen"]).square().mean()


@pytest.mark.parametrize("level", tiers([3], [0, 1]))
def test_no_argument_is_written_to(level: int) -> None:
    def run(group: Any) -> None:
        params = fz.shard_tree(FIRST, level=level, group=group)
        state = adamw.init(params)
        for x in BATCHES[:2]:
            _, grads = fz.value_and_grad(loss)(params, part(x, group))
            given = grads, state, params
            before = tree_map(torch.clone, given)
            applied = adamw.apply(*given)
            assert_equal_values(before, given, grade="bitwise")
            again, after = adamw.apply(*given)
            assert_equal_values(applied, (again, after), grade="bitwise")
            params, state = again, after

    run_ranks(run, 2)


def keeps_its_input(kind: str, kept: str) -> Any:
    """A transform whose next state is the very params, or updates, that it was given."""

    def init(params: Any) -> Any:
        return tree_map(torch.clone, params)

    def update(updates: Any, before: Any, params: Any) -> Any:
        changed = tree_map(lambda u, b: u + 0.1 * b, updates, before)
        return changed, params if kept == "params" else updates

    if kind == "pointwise":
        return optim.pointwise(init, update)
    if kind == "statistics":
        return optim.with_statistics(init, lambda u, s, p, across: update(u, s, p))
    return optim.with_whole_tree(init, update)


@pytest.mark.parametrize(
    ("kind", "kept"), crossed(["pointwise", "statistics", "whole tree"], ["params", "updates"])
)
def test_a_state_may_be_what_its_transform_was_given(kind: str, kept: str) -> None:
    """Nobody who writes to params or gradients later changes it: not the kernel behind it in the
    chain, and not the program."""
    optimizer = optim.chain(keeps_its_input(kind, kept), optim.adamw(0.1))

    def program(value: Any, x: Tensor) -> Any:
        params, state = value
        mean, grads = fz.value_and_grad(loss)(params, x)
        new = optimizer.apply(grads, state, params)
        for grad in grads.values():
            if grad is not None:
                grad.mul_(7.0)
        return new, {"loss": mean}

    step = fz.program_step(program, init=lambda params: (params, optimizer.init(params)))
    assert_sharded_equals_unsharded(step, FIRST, BATCHES, levels=[0, 1, 3], ranks=[2])
