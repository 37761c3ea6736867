"""`fz.pieces`: params that a program combines with gradients, in one process and on ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optree import tree_leaves, tree_map
from torch import Tensor

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import DonatedError, StructureError
from functorch_zero.groups import run_ranks
from functorch_zero.testing import assert_equal_values, assert_sharded_equals_unsharded
from tests.local import part
from tests.tiers import crossed, thinned, tiers

LEVELS = [0, 1, 2, 3]
DRAWN = torch.Generator().manual_seed(0)
FIRST = {
    "w": torch.randn(5, 3, generator=DRAWN, dtype=torch.float64, requires_grad=True),
    "scale": torch.tensor(0.5, dtype=torch.float64, requires_grad=True),
    "frozen": torch.randn(3, generator=DRAWN, dtype=torch.float64),
    "b": torch.randn(3, generator=DRAWN, dtype=torch.float64, requires_grad=True),
}
BATCHES = [torch.randn(12, 5, generator=DRAWN, dtype=torch.float64) for _ in range(4)]
adamw = optim.adamw(0.1)


def loss(params: Any, x: Tensor) -> Tensor:
    made = (x @ params["w"] + params["b"]) * params["frozen"] * params["scale"]
    return made.square().mean()


def pulled(value: Any, x: Tensor) -> Any:
    """A decay of weights, and a pull towards the first params: FedProx's term."""
    params, first, state = value
    found, grads = fz.value_and_grad(loss)(params, x)
    own = fz.pieces(params)
    away = tree_map(torch.sub, own, first)
    grads = tree_map(lambda g, p, d: g + 0.1 * p + 0.3 * d, grads, own, away)
    params, state = adamw.apply(grads, state, params)
    metrics = {"loss": found, "norm": fz.dot(own, own).sqrt(), "away": fz.dot(away, away)}
    return (params, first, state), metrics


STEP = fz.program_step(pulled, init=lambda params: (params, fz.pieces(params), adamw.init(params)))


def run_plain(step: Any, batches: list[Tensor]) -> Any:
    state = step.init(FIRST)
    for x in batches:
        state, metrics = step(state, x)
    return state.value, metrics


@pytest.mark.parametrize("level", tiers([1], [{"": 1, "params.w": 3}, 0, 2, 3]))
def test_sharded_equals_unsharded(level: Any) -> None:
    assert_sharded_equals_unsharded(STEP, FIRST, BATCHES, levels=[level], ranks=[1, 2, 3])


@pytest.mark.parametrize(("level", "state_axes"), crossed([1, 3], ["shard", "both"]))
def test_over_a_mesh(level: int, state_axes: Any) -> None:
    options: dict[str, Any] = {"shard_size": 2, "state_axes": state_axes}
    assert_sharded_equals_unsharded(STEP, FIRST, BATCHES, levels=[level], ranks=[4], **options)


@pytest.mark.parametrize("level", tiers([3], [0, 1, 2]))
def test_params_that_are_donated_stay_in_the_copies(level: int) -> None:
    """And the copies keep no params from being written over."""

    def program(value: Any, x: Tensor) -> Any:
        params, before, state = value
        own = fz.pieces(params)
        grads = fz.value_and_grad(loss)(params, x)[1]
        params, state = adamw.apply(grads, state, params)
        moved = tree_map(torch.sub, fz.pieces(params), own)
        # One of the value before, and one of the params before
        return (params, own, state), {"moved": fz.dot(moved, moved), "old": fz.dot(before, own)}

    step = fz.program_step(
        program, init=lambda params: (params, fz.pieces(params), adamw.init(params))
    )
    expected = run_plain(step, BATCHES)

    def run(group: Any) -> Any:
        sharded = fz.shard(step, level=level, group=group, donate=True)
        state = sharded.init(FIRST)
        for x in BATCHES:
            before = state
            state, metrics = sharded(state, part(x, group))
        with pytest.raises(DonatedError):
            sharded.unshard(before)
        return sharded.unshard(state).value, metrics

    for found in run_ranks(run, 2):
        assert_equal_values(expected, found)


@pytest.mark.parametrize("level", [None, *LEVELS])
def test_they_are_copies_like_the_gradients(level: int | None) -> None:
    def run(group: Any) -> None:
        whole = tree_map(lambda p: p.detach().clone().requires_grad_(p.requires_grad), FIRST)
        params = whole if level is None else fz.shard_tree(whole, level=level, group=group)
        found, grads = fz.pieces(params), fz.value_and_grad(loss)(params, BATCHES[0])[1]
        alike = tree_map(lambda p, g: (p.shape, p.dtype) == (g.shape, g.dtype), found, grads)
        assert tree_leaves(alike) == [True] * 3
        assert not any(leaf.requires_grad for leaf in tree_leaves(found))
        for leaf in tree_leaves(found):
            leaf.mul_(2)
        assert_equal_values(fz.unshard(params), FIRST, grade="bitwise")
        twice = {n: 2 * p.detach() if p.requires_grad else None for n, p in FIRST.items()}
        assert_equal_values(fz.unshard(found), twice, grade="bitwise")
        # Of one tree in a structure; of a tree of which no leaf is trained
        (other,) = fz.pieces([params])
        assert_equal_values(tree_map(lambda p: 2 * p, other), found, grade="bitwise")
        with torch.no_grad():
            assert tree_leaves(fz.pieces(tree_map(torch.clone, params))) == []

    run_ranks(run, 1 if level is None else 2)


def test_held_params_are_refused_by_name() -> None:
    def run(group: Any) -> None:
        params = fz.shard_tree(FIRST, level=1, group=group)
        with pytest.raises(StructureError, match=r"Remedy: .*fz\.pieces\(params\)"):
            fz.dot(params, params)
        fz.dot(fz.pieces(params), fz.pieces(params))
        with pytest.raises(StructureError, match=r"held as params are, got .* in pieces"):
            fz.pieces(fz.pieces(params))
        assert "fz." not in repr(params)

    run_ranks(run, 2)


@pytest.mark.parametrize("level", thinned(LEVELS))
def test_in_a_loss_and_an_evaluation_leaves_are_whole(level: int) -> None:
    def reading(params: Any, buffers: Any, x: Tensor) -> Any:
        return {"norm": fz.dot(fz.pieces(params), fz.pieces(params))}

    step = fz.train_step(lambda params, buffers, x: loss(params, x), optim.sgd(0.1))

    def run(group: Any) -> None:
        params = fz.shard_tree(FIRST, level=level, group=group)
        for call in (lambda p: fz.pieces(p), lambda p: fz.pieces(params)):
            with pytest.raises(StructureError, match="use the params as they are"):
                fz.value_and_grad(lambda p, x, call=call: loss(call(p), x))(params, BATCHES[0])
        state = fz.shard(step, level=level, group=group).init(FIRST, {})
        with pytest.raises(StructureError, match=r"evaluation.*use the params as they are"):
            fz.shard(fz.eval_step(reading), level=level, group=group)(state, BATCHES[0])

    run_ranks(run, 2)
