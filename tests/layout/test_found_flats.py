"""Flats that are found again, and leaves that no longer lie where they lay."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.layout.flat_buffers import Recall
from tests.tiers import thinned


def views_and_finder() -> tuple[Tensor, list[Tensor], Recall, list[int]]:
    flat, asked = torch.arange(8.0), [0]

    def find(leaves: Sequence[Tensor]) -> list[Tensor]:
        asked[0] += 1
        return [
            flat
            if all(x._base is flat for x in leaves)
            else torch.cat([x.reshape(-1) for x in leaves])
        ]

    return flat, [flat[:4].view(2, 2), flat[4:]], Recall(find), asked


def test_flats_of_the_same_leaves_are_found_once() -> None:
    flat, leaves, recall, asked = views_and_finder()
    assert all(recall(leaves)[0] is flat for _ in range(3)) and asked == [1]


@pytest.mark.parametrize(
    "change",
    [
        lambda leaves: leaves.pop(),
        lambda leaves: leaves.reverse(),
        lambda leaves: leaves.append(torch.zeros(1)),
        lambda leaves: leaves.__setitem__(0, leaves[0].clone()),
        lambda leaves: setattr(leaves[0], "data", torch.ones(2, 2)),
        lambda leaves: setattr(leaves[0], "data", leaves[0].data.view(torch.int32)),
        lambda leaves: leaves[0].t_(),
        lambda leaves: leaves[0].unsqueeze_(0),
    ],
)
def test_other_leaves_are_looked_at(change: Any) -> None:
    _, leaves, recall, asked = views_and_finder()
    recall(leaves)
    change(leaves)
    recall(leaves)
    assert asked == [2]


def test_what_is_remembered_keeps_nothing_alive() -> None:
    flat, leaves, recall, _ = views_and_finder()
    recall(leaves)
    gone = weakref.ref(leaves[0])
    leaves.clear()
    gc.collect()
    assert gone() is None and recall([flat[:4], flat[4:]])[0] is flat


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
@pytest.mark.parametrize("name", ["a", "b"])
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


@pytest.mark.parametrize("level", [0, 3])
def test_data_of_a_leaf_is_not_replaced(level: int) -> None:
    step = fz.train_step(loss_of, optim.adamw(0.1))
    params = {"a": torch.ones(4, 4, requires_grad=True), "b": torch.ones(3)}
    state = fz.shard(step, level=level, group=fz.groups.SingleRank()).init(params)
    with pytest.raises(fz.errors.StructureError, match=r"data is assigned to.*Remedy"):
        state.params["a"].data = torch.zeros(4, 4)


@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize("metrics", [(), ("update_norm",)])  # with the fused kernel, and without
def test_two_states_that_are_one_tree_part(level: int, metrics: tuple[str, ...]) -> None:
    def join(state: fz.State) -> fz.State:
        adam, *rest = state.opt_state
        return state.replace(opt_state=(adam._replace(mu=adam.nu), *rest))

    check_steps(level, 1, join, metrics)
