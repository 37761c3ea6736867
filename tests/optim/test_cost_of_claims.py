"""How much `check_claims` runs: in calls, elements and operators, since times depend on the
machine. docs/decisions.md says why it is more than three calls."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from optree import tree_map
from torch.utils._python_dispatch import TorchDispatchMode

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.optim import Transform, pointwise, with_statistics
from functorch_zero.optim.base import init_empty
from functorch_zero.optim.claims.check import check_claims
from functorch_zero.sharded.program import engine
from tests.tiers import THOROUGH, tiers

STEPS = 4  # of each run; of an `in_place` 3
OF_OURS = 8 * STEPS  # calls on leaves of our own: five cuts, and three at other magnitudes
OF_PARAMS = 4 * STEPS  # calls on blocks of the params: whole, two pieces, joined
MOST = 4096  # elements of a leaf in a call, where leaves aren't joined


class Calls:
    """The sizes of the leaves of each call of an author's update."""

    def __init__(self) -> None:
        self.sizes: list[list[int]] = []

    def note(self, updates: Any) -> None:
        self.sizes.append([x.numel() for x in optree.tree_leaves(updates)])

    def pointwise(self, updates: Any, state: Any, params: Any) -> Any:
        self.note(updates)
        return updates, state

    def with_norms(self, updates: Any, state: Any, params: Any, across: Any) -> Any:
        self.note(updates)
        return tree_map(torch.mul, updates, across.norm(updates)), state


def model_of(num_layers: int) -> dict[str, Any]:
    layer = {"w": torch.zeros(256, 64), "b": torch.zeros(64)}
    return {"layers": [layer] * num_layers, "head": torch.zeros(64, 10)}


def test_the_calls_of_a_pointwise_update() -> None:
    calls = Calls()
    check_claims(pointwise(init_empty, calls.pointwise), {"w": torch.zeros(128, 128)})
    ours, of_params = calls.sizes[:OF_OURS], calls.sizes[OF_OURS:]
    # 86 elements are those of all small leaves of our own
    assert max(map(sum, ours)) <= MOST + 86
    assert len(of_params) == OF_PARAMS and max(map(max, of_params)) == MOST
    # Both pieces together are one leaf, so in each step it is tried three times
    assert sum(map(sum, of_params)) == 3 * STEPS * MOST


def test_no_more_calls_for_more_leaves() -> None:
    """Two leaves are tried of all of a kind; leaves that are joined have their elements."""
    totals = []
    for num_layers in (2, 12, 400):
        calls = Calls()
        check_claims(pointwise(init_empty, calls.pointwise), model_of(num_layers))
        of_params = calls.sizes[OF_OURS:]
        assert len(of_params) == OF_PARAMS
        assert max(map(max, (sizes for sizes in of_params if len(sizes) > 1))) == MOST
        totals.append(sum(map(sum, of_params)))
    assert totals == [3 * STEPS * (2 * MOST + 2 * 64 + 640)] * 3


@pytest.mark.parametrize("num_layers", tiers([2], [400]))
def test_the_calls_of_an_update_with_statistics(num_layers: int) -> None:
    """Whole leaves and two pieces of them, and nothing else."""
    calls = Calls()
    check_claims(with_statistics(init_empty, calls.with_norms), model_of(num_layers))
    assert len(calls.sizes) == 3 * STEPS and max(map(max, calls.sizes)) == MOST
    assert sum(map(sum, calls.sizes)) == 2 * STEPS * (2 * MOST + 2 * 64 + 640)


def test_in_a_chain_for_many_leaves_the_parts_are_tried_too() -> None:
    """With a chain a mask may choose none of the few leaves."""
    calls = Calls()
    both = optim.chain(optim.scale(2.0), with_statistics(init_empty, calls.with_norms))
    check_claims(both, model_of(400))
    assert len(calls.sizes) == 2 * 3 * STEPS


def test_the_calls_of_an_in_place_update() -> None:
    """In both dtypes, on as many elements as are tried of a leaf, and on few."""
    calls, in_place = Calls(), Calls()
    check_claims(
        pointwise(init_empty, calls.pointwise, in_place=in_place.pointwise),
        {"w": torch.zeros(128, 128)},
    )
    assert len(calls.sizes) == OF_OURS + OF_PARAMS + 2 * 3
    assert in_place.sizes == [[MOST, 5]] * 2 * 3


class Operators(TorchDispatchMode):
    """Counts the operators that run inside."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        return func(*args, **(kwargs or {}))


CLIPPED = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3))


@THOROUGH
@pytest.mark.parametrize(
    ("optimizer", "most"),
    tiers(
        thorough=[(CLIPPED, 14_000), (optim.lamb(1e-3), 15_000), (optim.muon(1e-3), 26_500)],
        rows=True,
    ),
)
def test_the_operators_of_the_first_init(
    optimizer: Transform, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check's are as many for 400 layers as for 40, and `init` runs few more per leaf."""
    of_check = []
    for num_layers in (40, 400):
        params = model_of(num_layers)
        with Operators() as ran:
            check_claims(optimizer, params)
        of_check.append(ran.num)
    assert of_check[0] == of_check[1] <= most
    monkeypatch.setattr(engine, "check_claims", check_claims)  # tests check ours once only
    step = fz.train_step(lambda params, buffers, x: x, optimizer)
    sharded = fz.shard(step, level=3, group=fz.groups.SingleRank())
    params = tree_map(lambda x: x.clone().requires_grad_(), model_of(40))
    with Operators() as ran:
        sharded.init(params)
    assert of_check[0] < ran.num <= of_check[0] + 50 * len(optree.tree_leaves(params))
