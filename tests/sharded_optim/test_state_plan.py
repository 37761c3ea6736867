"""Which leaves of an optimizer's state follow a parameter, and their way to ranks and back."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from functorch_zero import optim
from functorch_zero.errors import TransformError
from functorch_zero.groups import run_ranks
from functorch_zero.layout.build import make_layout
from functorch_zero.sharded.api import shard
from functorch_zero.sharded_optim.state_plan import StatePlan, assign_owners, plan_state
from functorch_zero.step.train import train_step
from tests.local import local_leaves
from tests.tiers import crossed, drawn

PARAMS = {
    "matrix": torch.zeros(3, 4),
    "vector": torch.zeros(5),
    "same": torch.zeros(5),
    "one": torch.zeros(1),
    "zero": torch.zeros(()),
}


def plan(transform: optim.Transform, num_ranks: int = 3, mask: Any = None) -> StatePlan:
    layout = make_layout(PARAMS, num_ranks, trainable=lambda path, leaf: True)
    everything = layout.treedef.unflatten([True] * len(PARAMS))
    return plan_state(transform.init, layout, everything if mask is None else mask, num_ranks)


def kinds(transform: optim.Transform) -> list[str]:
    return [leaf.kind for leaf in plan(transform).leaves]


def test_momentum_follows_and_counts_do_not() -> None:
    assert "follows" not in kinds(optim.sgd(0.1))
    assert kinds(optim.sgd(0.1, momentum=0.9)).count("follows") == len(PARAMS)
    adam = plan(optim.adamw(0.1))
    assert sorted((leaf.slot, leaf.leaf) for leaf in adam.leaves if leaf.kind == "follows") == [
        (slot, leaf) for slot in (0, 1) for leaf in range(5)
    ]
    assert [leaf.kind for leaf in adam.leaves].count("replicated") == len(adam.leaves) - 10


def test_an_init_that_chooses_the_device_itself_is_named() -> None:
    """Torch would say that it can't allocate terabytes; so many here that no machine can."""

    def init(params: Any) -> Any:
        return optree.tree_map(lambda p: torch.zeros(*p.shape, 2**18), params)

    with pytest.raises(TransformError, match=r"torch\.zeros_like") as caught:
        plan(optim.pointwise(init, lambda u, s, p: (u, s)))
    assert "allocate" in str(caught.value)


def test_statistics_are_replicated_whatever_their_shape() -> None:
    """Factored moments have fewer elements than any leaf, or as many by accident: names and shapes
    don't matter."""

    def init(params: Any, across: Any) -> Any:
        return {
            "lucky": {name: torch.zeros(5) for name in params},
            "moment": optree.tree_map(torch.zeros_like, params),
        }

    strange = optim.with_statistics(init, lambda u, s, p, across: (u, s))
    found = plan(strange)
    assert [leaf.kind for leaf in found.leaves] == ["replicated"] * 5 + ["follows"] * 5


def test_whole_leaf_state_is_owned() -> None:
    shampoo_like = optim.with_whole_leaves(
        lambda p: {"left": p.new_zeros(p.shape[:1] * 2 if p.dim() else ())}, lambda u, s: (u, s)
    )
    found = plan(shampoo_like, num_ranks=2)
    assert {leaf.kind for leaf in found.leaves} == {"owned"}
    by_leaf = dict(zip(sorted(PARAMS), found.leaves, strict=True))
    assert by_leaf["matrix"].shape == (3, 3) and by_leaf["zero"].shape == ()
    assert {leaf.owner for leaf in found.leaves} == {0, 1}


def test_masked_out_leaves_have_no_state() -> None:
    mask = {name: name == "vector" for name in PARAMS}
    (leaf,) = [
        leaf
        for leaf in plan(optim.sgd(0.1, momentum=0.9), mask=mask).leaves
        if leaf.kind == "follows"
    ]
    assert leaf.leaf == sorted(PARAMS).index("vector")


@drawn(st.lists(st.floats(0, 100), max_size=20), st.integers(1, 6))
def test_owners_are_balanced(costs: list[float], num_ranks: int) -> None:
    owners = assign_owners(costs, num_ranks)
    assert owners == assign_owners(list(costs), num_ranks) and all(
        0 <= owner < num_ranks for owner in owners
    )
    loads = [
        sum(c for c, owner in zip(costs, owners, strict=True) if owner == rank)
        for rank in range(num_ranks)
    ]
    assert max(loads) <= sum(costs) / num_ranks + max(costs, default=0) + 1e-9


OPTIMIZERS = {
    "sgd": lambda: optim.sgd(0.1, momentum=0.9),
    "adamw": lambda: optim.adamw(0.1),
    "adafactor": lambda: optim.adafactor(0.1),
    "muon": lambda: optim.muon(0.1),
    "owned": lambda: optim.with_whole_leaves(
        lambda p: {"sum": torch.zeros_like(p), "count": torch.zeros(())},
        lambda u, s: (-0.1 * u, {"sum": s["sum"] + u, "count": s["count"] + 1}),
    ),
    "masked": lambda: optim.masked(optim.sgd(0.1, momentum=0.9), lambda path, leaf: leaf.dim() > 1),
}


@pytest.mark.parametrize(("name", "level"), crossed(OPTIMIZERS, [0, 1, 2, 3], quick=2))
def test_gather_and_scatter_are_inverse(name: str, level: int) -> None:
    """Bitwise, on 3 ranks, after two steps; and the pieces hold no more than their part."""
    g = torch.Generator().manual_seed(0)
    params = {k: torch.randn(p.shape, generator=g, dtype=torch.float64) for k, p in PARAMS.items()}

    def loss_fn(p: Any, b: Any, x: Tensor) -> Tensor:
        return sum((leaf * x).square().sum() for leaf in optree.tree_leaves(p))

    def run(group: Any) -> tuple[list[Any], int]:
        step = shard(
            train_step(loss_fn, OPTIMIZERS[name](), trainable=lambda path, leaf: True),
            level=level,
            group=group,
        )
        state = step.init(params)
        for x in (1.0, 2.0):
            state, _ = step(state, torch.tensor(x, dtype=torch.float64))
        whole = step.unshard(state)
        back = step.shard(whole)
        assert optree.tree_structure(back) == optree.tree_structure(state)
        for a, b in zip(local_leaves(back), local_leaves(state), strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
        again = step.unshard(back)
        for a, b in zip(optree.tree_leaves(whole), optree.tree_leaves(again), strict=True):
            assert torch.equal(a, b)
        return optree.tree_leaves(whole), sum(x.numel() for x in local_leaves(state.opt_state))

    results = run_ranks(run, 3)
    for other, _ in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0][0], other, strict=True))
    if level > 0 and name in ("sgd", "adamw"):
        elements = sum(p.numel() for p in PARAMS.values())
        per_param = {"sgd": 1, "adamw": 2}[name]
        assert sum(held for _, held in results) <= per_param * elements + 3 * 4, (
            "each element is held once"
        )
