"""Flats that are found again, and leaves that no longer lie where they lay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import functorch_zero as fz
from functorch_zero import optim
from tests.tiers import thinned, tiers


def loss_of(params: Any, buffers: Any, batch: Tensor) -> Tensor:
    return ((batch @ params["a"])[:, :3] * params["b"]).square().mean()


def check_steps(
    level: int, at: int, change: Callable[[fz.State], fz.State], metrics: Sequence[str]
) -> None:
    """Three steps, sharded and not, of which the `at`-th is given a changed state, end in the same
    params and state."""
    # In float64, where the sums of another order stay far below what is compared
    params = {
        "a": torch.randn(4, 4, dtype=torch.float64),
        "b": torch.randn(3, dtype=torch.float64),
    }
    step = fz.train_step(
        loss_of, optim.adamw(0.1), trainable=lambda path, leaf: True, metrics=metrics
    )
    sharded = fz.shard(step, level=level, group=fz.groups.SingleRank())
    expected, got = step.init(params), sharded.init(params)
    for i in range(3):
        batch = torch.randn(5, 4, dtype=torch.float64)
        if i == at:
            expected, got = change(expected), change(got)
        old = expected.params
        (expected, _), (got, _) = step(expected, batch), sharded(got, batch)
    whole = sharded.unshard(got)
    for name in params:
        assert torch.count_nonzero(expected.params[name] - old[name])
        torch.testing.assert_close(whole.params[name], expected.params[name])
        torch.testing.assert_close(whole.opt_state[0].mu[name], expected.opt_state[0].mu[name])


@pytest.mark.parametrize("level", thinned([3, 2, 1, 0]))
@pytest.mark.parametrize("name", tiers(["a"], ["b"]))
@pytest.mark.parametrize("metrics", [(), ("update_norm",)])  # with the fused kernel, and without
def test_a_leaf_that_was_written_to_is_what_was_written(
    level: int, name: str, metrics: tuple[str, ...]
) -> None:
    def write(state: fz.State) -> fz.State:
        with torch.no_grad():
            for leaf, value in ((state.params[name], 1.0), (state.opt_state[0].mu[name], 0.5)):
                leaf.copy_(torch.full_like(leaf, value))
        return state

    check_steps(level, 2, write, metrics)


MOVES: dict[str, Callable[[Tensor], Any]] = {
    "data is assigned to": lambda leaf: setattr(leaf, "data", torch.zeros(4, 4)),
    "t_.default moves them": Tensor.t_,
    "unsqueeze_.default moves them": lambda leaf: leaf.unsqueeze_(0),
    "set_.source_Tensor moves them": lambda leaf: leaf.set_(torch.zeros(4, 4)),
}


@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize("move", MOVES)
def test_a_leaf_stays_where_it_lies(level: int, move: str) -> None:
    """So a tree, or a state, needs no look at where its leaves lie."""
    step = fz.train_step(loss_of, optim.adamw(0.1))
    params = {"a": torch.ones(4, 4, requires_grad=True), "b": torch.ones(3)}
    state = fz.shard(step, level=level, group=fz.groups.SingleRank()).init(params)
    for leaf in (state.params["a"], state.opt_state[0].mu["a"]):
        with torch.no_grad(), pytest.raises(fz.errors.StructureError, match="Remedy"):
            MOVES[move](leaf)


@pytest.mark.parametrize("level", tiers([3], [0]))
@pytest.mark.parametrize("metrics", [(), ("update_norm",)])  # with the fused kernel, and without
def test_two_states_that_are_one_tree_part(level: int, metrics: tuple[str, ...]) -> None:
    def join(state: fz.State) -> fz.State:
        adam, *rest = state.opt_state
        return state.replace(opt_state=(adam._replace(mu=adam.nu), *rest))

    check_steps(level, 1, join, metrics)
