"""States of a program that a step has not made by its own init: whole ones, another step's, pickled
ones, and those that users put together."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import StructureError
from functorch_zero.groups import SingleRank, run_ranks
from functorch_zero.testing import assert_equal_values
from tests.sharded.program.test_declared import only, rows, seen, step_of, weights
from tests.tiers import thinned

LEVELS = [0, 1, 2, 3]


@pytest.mark.parametrize("level", thinned(LEVELS))
def test_whole_states_are_cut_without_an_init(level: int) -> None:
    step = step_of()
    whole, _ = step(step.init(weights("a", "b"), seen()), rows())
    expected, _ = step(whole, rows())

    def run(group: Any) -> Any:
        sharded = fz.shard(step, level=level, group=group)
        own, _ = sharded(sharded.shard(whole), rows(group))
        return sharded.unshard(own)

    for found in run_ranks(run, 2):
        assert_equal_values(expected.value, found.value)
        assert found.trained == expected.trained


def test_an_init_that_asks_for_values_comes_before_shard() -> None:
    def init(net: Any) -> Any:
        return {"net": net, "sum": float(fz.unshard(net)["a"].sum())}

    step = fz.program_step(lambda value: (value, {}), init=init)
    sharded = fz.shard(step, level=3, group=SingleRank())
    whole = step.init(weights("a"))
    with pytest.raises(StructureError, match=r"before init.*Remedy"):
        sharded.shard(whole)
    sharded.init(weights("a"))
    assert_equal_values(whole, sharded.unshard(sharded.shard(whole)))


@pytest.mark.parametrize("level", thinned(LEVELS))
def test_a_state_of_another_step(level: int) -> None:
    """One that trains the same leaves at the same level goes on with it."""

    def run(group: Any) -> None:
        first, other = (fz.shard(step_of(), level=level, group=group) for _ in range(2))
        state, _ = first(first.init(weights("a", "b"), seen()), rows(group))
        other.init(weights("a"), seen())
        found = [step.unshard(step(state, rows(group))[0]) for step in (first, other)]
        assert_equal_values(*found, grade="bitwise")
        rules = fz.shard(step_of(trainable=only("a")), level=level, group=group)
        with pytest.raises(StructureError, match=r"trains other leaves.*path b,.*expected frozen"):
            rules(state, rows(group))
        with pytest.raises(StructureError, match=r"another level.*Remedy"):
            fz.shard(step_of(), level=(level + 1) % 4, group=group)(state, rows(group))

    run_ranks(run, 2)


@pytest.mark.parametrize("level", thinned(LEVELS))
def test_trees_that_users_put_together(level: int) -> None:
    """Of a state's own leaves, also after a pickle."""

    def run(group: Any) -> None:
        sharded = fz.shard(step_of(), level=level, group=group)
        state, _ = sharded(sharded.init(weights("a", "b"), seen()), rows(group))
        expected = sharded.unshard(sharded(state, rows(group))[0])
        for given in (
            state.replace(opt=state.value.opt.tree),
            pickle.loads(pickle.dumps(state)),
        ):
            found, _ = sharded(given, rows(group))
            assert_equal_values(expected, sharded.unshard(found), grade="bitwise")
        other = optim.sgd(0.1, momentum=0.9).init(state.value.net).tree
        with pytest.raises(StructureError, match=r"state\.opt does not have the tree structure"):
            sharded(state.replace(opt=other), rows(group))
        for use in (lambda given: sharded(given, rows(group)), sharded.unshard):
            with pytest.raises(StructureError, match=r"state\.net has been replaced by a whole"):
                use(state.replace(net=weights("a", "b")))

    run_ranks(run, 2)


def test_a_whole_state_that_has_lost_its_precision() -> None:
    model = nn.Linear(3, 2, dtype=torch.float64)
    _, params, _ = fz.functionalize(model, precision=fz.Precision(compute=torch.float32))
    step = fz.program_step(lambda value: (value, {}), init=lambda net: {"net": net})
    whole = step.init(params)
    with pytest.raises(StructureError, match=r"lost the model's Precision.*path net\.weight"):
        lost = whole.replace(value={"net": dict(whole.value["net"])})
        fz.shard(step, level=1, group=SingleRank()).shard(lost)
