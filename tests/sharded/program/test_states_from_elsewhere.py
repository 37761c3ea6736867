"""States of a program that a step has not made by its own init: pickled ones, and those that users
put together."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import StructureError
from functorch_zero.groups import SingleRank, run_ranks
from functorch_zero.testing import assert_equal_values
from tests.sharded.program.test_declared import rows, seen, step_of, weights
from tests.tiers import thinned

LEVELS = [0, 1, 2, 3]


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
        for use in (
            lambda given: sharded(given, rows(group)),
            sharded.unshard,
            lambda given: fz.describe(sharded, given),
        ):
            with pytest.raises(StructureError, match=r"state\.net has been replaced by a whole"):
                use(state.replace(net=weights("a", "b")))

    run_ranks(run, 2)


def test_a_state_that_trains_other_leaves_is_refused_each_time() -> None:
    def loss(params: Any, buffers: Any, x: Any) -> Any:
        return (params["a"] * params["b"] * x).sum()

    def step_that_trains(names: str) -> Any:
        step = fz.train_step(loss, optim.sgd(0.1), trainable=lambda path, leaf: path in names)
        return fz.shard(step, level=3, group=SingleRank())

    state, step = step_that_trains("ab").init(weights("a", "b")), step_that_trains("a")
    for _ in range(2):
        with pytest.raises(StructureError, match=r"trains other leaves: path b"):
            step(state, 1.0)
