"""Norms of a program's trees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optree import tree_map

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import StructureError
from functorch_zero.groups import counted, run_ranks
from functorch_zero.testing import assert_equal_values
from tests.tiers import crossed


def params_of() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    params = {name: torch.randn(n, generator=made).double() for name, n in (("a", 70), ("b", 5))}
    params["frozen"] = torch.ones(4).double()
    return {name: p.requires_grad_(name != "frozen") for name, p in params.items()}


def norms_of(params: Any) -> Any:
    grads = tree_map(lambda p: 2 * p, fz.pieces(params))
    updates = tree_map(lambda p: -0.1 * p, grads)
    return optim.norms(grads=grads, params=params, updates=updates)


@pytest.mark.parametrize(("level", "ranks"), crossed([0, 1, 2, 3], [1, 2, 3]))
def test_of_whole_trees(level: int, ranks: int) -> None:
    params = params_of()
    size = torch.cat([params["a"], params["b"]]).detach().norm()
    expected = {"grad_norm": 2 * size, "param_norm": size, "update_norm": 0.2 * size}
    assert_equal_values(expected, norms_of(params))

    def run(group: Any) -> Any:
        watched = counted(group)
        sharded = fz.shard_tree(params, level=level, group=watched)
        fz.pieces(sharded)
        watched.reset()
        found = norms_of(sharded)
        # One for all three, where leaves are cut
        assert watched.num_calls() == (level > 0 and ranks > 1)
        return found

    first, *others = run_ranks(run, ranks)
    assert_equal_values(expected, first)
    for other in others:
        assert_equal_values(first, other, grade="bitwise")


def test_what_is_refused() -> None:
    def check(params: Any) -> None:
        grads = fz.pieces(params)
        with torch.no_grad():
            copy = tree_map(torch.clone, params)
        with pytest.raises(StructureError, match="no leaf is trained"):
            optim.norms(params=copy)
        with pytest.raises(StructureError, match=r"no leaf is trained|place of params"):
            optim.norms(params=grads)
        assert optim.norms(grads=grads).keys() == {"grad_norm"} and optim.norms() == {}

    check(params_of())
    with pytest.raises(StructureError, match=r"the tree of param_norm.*of one tree"):
        optim.norms(grads={"other": torch.ones(3)}, params=params_of())

    def run(group: Any) -> None:
        params = fz.shard_tree(params_of(), level=3, group=group)
        other = fz.shard_tree({"other": params_of()["a"]}, level=3, group=group)
        check(params)
        with pytest.raises(StructureError, match="place of updates or gradients"):
            optim.norms(grads=params)
        with pytest.raises(StructureError, match="place of updates or gradients"):
            optim.norms(params=params, grads=fz.pieces(other))

    run_ranks(run, 2)
