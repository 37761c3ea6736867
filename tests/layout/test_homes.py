"""Leaves know the flat that they are cut from: trees of the same leaves have the same flats, and
nothing is read that a step has written over."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from optree import tree_map
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import checkpoint, optim
from functorch_zero.errors import DonatedError, StructureError
from functorch_zero.testing import assert_equal_updates
from tests.places import Away
from tests.tiers import tiers

NAMES = ("0.weight", "1.weight")
# A unit each, and so a bucket
MODEL = nn.Sequential(*(nn.Linear(8, 8, bias=False, dtype=torch.float64) for _ in NAMES))
APPLY, PARAMS, _ = fz.functionalize(MODEL, units=nn.Linear)


def loss_of(params: Any, buffers: Any, batch: Tensor) -> Tensor:
    return torch.tanh(APPLY(params, buffers, batch)[0]).square().mean()


def built(level: int | None) -> Any:
    """A step, and a first state."""
    step = fz.train_step(loss_of, optim.adamw(0.1))
    if level is not None:
        step = fz.shard(step, level=level, group=fz.groups.SingleRank())
    return step, step.init(PARAMS)


@pytest.mark.parametrize("level", [0, 3])
def test_what_a_step_has_written_over_is_not_read(level: int) -> None:
    step, state = built(level)
    leaves = [state.params[NAMES[0]], state.opt_state[0].mu[NAMES[0]]]
    leaves.append(leaves[0].detach())
    others = [tree_map(torch.detach, tree) for tree in (state.params, state.opt_state)]
    kept = tree_map(torch.clone, state.params)
    step(state, torch.randn(4, 8, dtype=torch.float64))
    for leaf in leaves:
        assert "donated" in repr(leaf)
        for read in (torch.neg, torch.detach, torch.clone, pickle.dumps):
            with pytest.raises(DonatedError, match=r"Remedy: .*leaf\.clone"):
                read(leaf)
    for other in others:
        with pytest.raises(DonatedError, match="was donated"):
            tree_map(torch.neg, other)
    assert torch.equal(kept[NAMES[0]].local.view(8, 8), PARAMS[NAMES[0]])


@pytest.mark.parametrize("level", [0, 3])
def test_trees_that_share_some_flats_are_used_up_together(level: int) -> None:
    step, state = built(level)
    first, second = (state.params[name] for name in NAMES)
    leaves = iter([first.detach().requires_grad_(), (2 * second.detach()).requires_grad_()])
    some = state.replace(params=tree_map(lambda _: next(leaves), state.params))
    step(some, torch.ones(4, 8, dtype=torch.float64))
    for tree in (state.params, some.params):
        with pytest.raises(DonatedError):
            fz.unshard(tree)
    # Of its flat the step was given a copy of the double
    assert torch.equal(second.local.view(8, 8), PARAMS[NAMES[1]])


CHANGES = {
    "the same": lambda first, second: (first, second),
    "swapped": lambda first, second: (second, first),
    "twice": lambda first, second: (second, second),
    "detached": lambda first, second: (first.detach().requires_grad_(), second),
}


@pytest.mark.parametrize("level", tiers([3], [0]))
@pytest.mark.parametrize("change", CHANGES)
def test_leaves_in_other_places(change: str, level: int) -> None:
    """Of two equal shapes: a flat is that of its own bucket alone, and written to once."""

    def changed(tree: Any) -> Any:
        leaves = iter(CHANGES[change](*(tree[name] for name in NAMES)))
        return tree_map(lambda _: next(leaves), tree)

    found = []
    for at in (None, level):
        step, state = built(at)
        for i in range(3):
            old = state if at is None else step.unshard(state)
            if i == 1:
                adam, *rest = state.opt_state
                adam = adam._replace(mu=changed(adam.mu), nu=changed(adam.nu))
                params = changed(state.params)
                state = state.replace(params=params, opt_state=(adam, *rest))
            state, _ = step(state, torch.full((4, 8), 0.1 * (i + 1), dtype=torch.float64))
        whole = state if at is None else step.unshard(state)
        found.append((dict(old.params), dict(whole.params)))
    (old, expected), (old_got, got) = found
    assert_equal_updates(old, expected, got, old_got=old_got)


@pytest.mark.parametrize("level", [0, 3])
def test_a_write_to_a_copy_of_what_lies_in_a_place_raises(level: int) -> None:
    step = fz.train_step(loss_of, optim.adamw(0.1))
    group = fz.groups.SingleRank()
    state = fz.shard(step, level=level, group=group, place={"state": Away()}).init(PARAMS)
    leaf = state.opt_state[0].mu[NAMES[0]]
    with pytest.raises(StructureError, match="copy of a leaf, which lies in a place"):
        leaf.add_(1)
    assert not torch.count_nonzero(leaf.local)


@pytest.mark.parametrize("level", [0, 3])
def test_a_load_uses_up_leaves_of_frozen_flats(level: int, tmp_path: Path) -> None:
    """Which go from state to state, and are written over by a load alone."""

    def loss(params: Any, buffers: Any, x: Tensor) -> Tensor:
        return (params["w"] * params["frozen"] * x).sum()

    def first(value: float) -> Any:
        w = torch.ones(71, requires_grad=True)
        return step.init({"w": w, "frozen": torch.full((71,), value)})

    group = fz.groups.SingleRank()
    step = fz.shard(fz.train_step(loss, optim.adam(0.1)), level=level, group=group)
    checkpoint.save(tmp_path, step, first(7.0))
    state = first(1.0)
    frozen = state.params["frozen"]
    state, _ = step(state, torch.ones(71))
    assert torch.equal(frozen.local, torch.ones(71))
    checkpoint.load(tmp_path, step, like=state)
    with pytest.raises(DonatedError, match="was read that was donated"):
        torch.neg(frozen)


@pytest.mark.parametrize("at", [(0, None), (3, None), (3, Away())], ids=["0", "3", "3 in a place"])
def test_a_leaf_that_is_assigned_to_a_state_counts(at: Any) -> None:
    """The dicts that users see of a state are theirs: what they put there is what a step takes."""
    level, place = at
    train = fz.train_step(loss_of, optim.adamw(0.1))
    group = fz.groups.SingleRank()
    step = fz.shard(train, level=level, group=group, place={"state": place} if place else None)
    found = []
    for own in (train, step):
        state = own.init(PARAMS)
        for i in range(3):
            if i:
                mu = state.opt_state[0].mu
                mu[NAMES[0]] = mu[NAMES[0]] * 2 + 1
            old = state if own is train else step.unshard(state)
            state, _ = own(state, torch.full((4, 8), 0.1 * (i + 1), dtype=torch.float64))
        whole = state if own is train else step.unshard(state)
        found.append((dict(old.params), dict(whole.params)))
    (old, expected), (old_got, got) = found
    assert_equal_updates(old, expected, got, old_got=old_got)


@pytest.mark.parametrize(
    "change",
    [
        lambda mu: mu.pop(NAMES[0]),
        lambda mu: mu.update(z=torch.ones(2)),
        lambda mu: mu.update(z=mu.pop(NAMES[-1])),  # in the same order
    ],
)
def test_a_state_with_other_entries_is_refused(change: Any) -> None:
    step = fz.shard(fz.train_step(loss_of, optim.adamw(0.1)), level=3, group=fz.groups.SingleRank())
    state = step.init(PARAMS)
    change(state.opt_state[0].mu)
    for call in (step.unshard, lambda state: step(state, torch.ones(4, 8, dtype=torch.float64))):
        with pytest.raises(StructureError, match=r"does not have the tree structure.*path 0\.mu"):
            call(state)
