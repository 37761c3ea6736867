"""Wrappers: masks, labels, hyperparameters in the state, skipped and gathered steps, averages; also
sharded."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from optree import tree_map
from torch import Tensor

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import StructureError
from functorch_zero.groups.threads import run_ranks
from functorch_zero.optim.claims.check import check_claims
from functorch_zero.optim.local import Local
from functorch_zero.tree import named_leaves, paths
from tests.parity.cases import assert_close, decayed_matrices, gradients, hostile_tree, run
from tests.tiers import thinned, tiers


def by_shape(path: str, leaf: Tensor) -> str:
    return "matrices" if leaf.ndim >= 2 else "rest"


def layer_of(path: str, leaf: Tensor) -> int:
    return 1 + int(path.split(".")[1]) if path.startswith("layers") else 0


# Wrappers around transforms of every kind.
WRAPPED: dict[str, Callable[[], optim.Transform]] = {
    "masked": lambda: optim.chain(
        optim.masked(optim.trace(0.9), decayed_matrices), optim.scale(-0.1)
    ),
    "masked statistics": lambda: optim.chain(
        optim.masked(optim.clip_by_global_norm(0.1), decayed_matrices), optim.sgd(0.1)
    ),
    "partition": lambda: optim.partition(
        {"matrices": optim.adamw(0.1, weight_decay=0.1), "rest": optim.sgd(0.1, 0.9)}, by_shape
    ),
    "partition of all kinds": lambda: optim.partition(
        {
            "matrices": optim.lamb(0.1),
            "rest": optim.chain(optim.clip_by_global_norm(0.5), optim.sgd(0.1)),
        },
        by_shape,
    ),
    "nested": lambda: optim.chain(
        optim.partition(
            {
                "matrices": optim.masked(
                    optim.adam(1.0),
                    {
                        "turned": True,
                        "kernel": True,
                        "layers": False,
                        "scale": True,
                        "nothing": True,
                    },
                ),
                "rest": optim.scale(0.5),
            },
            by_shape,
        ),
        optim.scale_by_learning_rate(0.1),
    ),
    "scale_by_label": lambda: optim.chain(
        optim.adam(0.1),
        optim.scale_by_label({0: 1.0, 1: optim.linear_schedule(1.0, 0.5, 3), 2: 0.25}, layer_of),
    ),
    "inject": lambda: optim.inject_hyperparams(optim.lamb)(
        optim.linear_schedule(0.2, 0.1, 3), weight_decay=0.1
    ),
    "apply_if_finite": lambda: optim.apply_if_finite(optim.adam(0.1), 3),
    "multi_steps": lambda: optim.multi_steps(
        optim.chain(optim.clip_by_global_norm(0.5), optim.adam(0.1)), 2
    ),
    "multi_steps of labels": lambda: optim.multi_steps(
        optim.partition({"matrices": optim.adam(0.1), "rest": optim.lamb(0.1)}, by_shape), 2
    ),
    "maybe_update": lambda: optim.chain(
        optim.maybe_update(optim.clip_by_global_norm(0.5), lambda step: step % 2 == 0),
        optim.adam(0.1),
    ),
    "lookahead": lambda: optim.lookahead(optim.lamb(0.1), 2, 0.5),
    "params_ema": lambda: optim.params_ema(optim.lamb(0.1), optim.linear_schedule(0.0, 0.9, 3)),
    "schedule_free": lambda: optim.schedule_free(
        optim.chain(optim.clip_by_global_norm(0.5), optim.sgd(0.1)), 0.1
    ),
    "sam": lambda: optim.sam(optim.adam(0.1), 0.1),
    "from_torch": lambda: optim.from_torch(torch.optim.Adamax, lr=0.1, weight_decay=0.1),
    "reduce_on_plateau": lambda: optim.chain(optim.lamb(0.1), optim.reduce_on_plateau()),
}


@pytest.mark.parametrize("name", thinned(WRAPPED, 12))
def test_pure_and_as_claimed(name: str) -> None:
    transform, params = WRAPPED[name](), hostile_tree()
    check_claims(transform, params)
    state = transform.init(params, Local(params))
    for grad in gradients(params, 3):
        before = [(x, x.clone(), x._version) for x in optree.tree_leaves((grad, state, params))]
        updates, new = transform.update(grad, state, params, Local(params))
        assert optree.tree_structure(updates) == optree.tree_structure(params)
        assert optree.tree_structure(new) == optree.tree_structure(state)
        for x, value, version in before:
            assert torch.equal(x, value) and x._version == version
        state = new


def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
    """Every sample pulls every leaf towards another place, so that no gradient is zero."""
    total = torch.zeros((), dtype=torch.float64)
    for i, p in enumerate(optree.tree_leaves(params)):
        if p.numel():
            places = batch.reshape(-1, *[1] * p.ndim) * (i + 1)
            total = (
                total
                + ((p - places) ** 2 * (1 + torch.arange(p.numel()).reshape(p.shape) % 3)).mean()
            )
    return total


PLACES = [(0, 2), (1, 2), (3, 3)]  # level and number of ranks
ONE_PLACE_EACH = [(name, PLACES[i % 3]) for i, name in enumerate(WRAPPED)]
OTHER_PLACES = [(name, PLACES[(i + k) % 3]) for i, name in enumerate(WRAPPED) for k in (1, 2)]


@pytest.mark.parametrize(
    "case",
    tiers(thinned(ONE_PLACE_EACH), full=OTHER_PLACES),
    ids=str,
)
def test_sharded_is_unsharded(case: tuple[str, tuple[int, int]]) -> None:
    name, (level, ranks) = case
    params = tree_map(lambda p: p.contiguous().requires_grad_(), hostile_tree())
    step = fz.train_step(loss_fn, WRAPPED[name]())
    batches = torch.randn(4, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    whole = step.init(params)
    for batch in batches:
        whole, _ = step(whole, batch)

    def one_rank(group: Any) -> fz.State:
        sharded = fz.shard(fz.train_step(loss_fn, WRAPPED[name]()), level=level, group=group)
        state = sharded.init(params)
        for batch in batches:
            state, _ = sharded(state, batch.chunk(ranks)[group.rank])
        return sharded.unshard(state)

    for got in run_ranks(one_rank, ranks):
        moved = tree_map(lambda new, old: (new - old).detach(), got.params, params)
        assert_close(moved, tree_map(lambda new, old: (new - old).detach(), whole.params, params))
        for a, b in zip(
            optree.tree_leaves(got.opt_state), optree.tree_leaves(whole.opt_state), strict=True
        ):
            assert torch.allclose(a, b, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("level", tiers([3], [0, 1]))
def test_all_ranks_skip_what_one_cannot_use(level: int) -> None:
    """A NaN in one rank's batch: no rank moves, and the next step is as if nothing had been."""
    params = tree_map(lambda p: p.contiguous().requires_grad_(), hostile_tree())
    batches = torch.randn(3, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    batches[1, 5] = math.nan

    def one_rank(group: Any) -> tuple[fz.State, fz.State]:
        optimizer = optim.apply_if_finite(optim.lamb(0.1), 3)
        sharded = fz.shard(fz.train_step(loss_fn, optimizer), level=level, group=group)
        states = []
        for chosen in ([0, 1, 2], [0, 2]):
            state = sharded.init(params)
            for i in chosen:
                state, _ = sharded(state, batches[i].chunk(3)[group.rank])
            states.append(sharded.unshard(state))
        return states[0], states[1]

    for skipped, clean in run_ranks(one_rank, 3):
        assert skipped.opt_state.total_notfinite == 1
        for a, b in zip(
            optree.tree_leaves(skipped.params), optree.tree_leaves(clean.params), strict=True
        ):
            assert torch.equal(a, b)


def test_masked_leaves_pass() -> None:
    params = hostile_tree()
    (grad,) = gradients(params, 1)
    (updates,), _, state = run(optim.masked(optim.adam(0.1), decayed_matrices), params, [grad])
    inner, _, _ = run(optim.adam(0.1), params, [grad])
    for path, u in named_leaves(updates).items():
        expected = inner[0] if named_leaves(params)[path].ndim >= 2 else grad
        assert torch.equal(u, named_leaves(expected)[path]), path
    assert state[0].mu["scale"] is None
    assert set(paths(state[0].mu)) == {p for p, x in named_leaves(params).items() if x.ndim >= 2}


def test_partition_is_each_alone() -> None:
    params = hostile_tree()
    grads = gradients(params, 3)
    parts = {"matrices": optim.adamw(0.1), "rest": optim.sgd(0.1, 0.9)}
    got, _, state = run(optim.partition(parts, by_shape), params, grads)
    alone = {label: run(part, params, grads)[0] for label, part in parts.items()}
    for i, updates in enumerate(got):
        for path, u in named_leaves(updates).items():
            label = by_shape(path, named_leaves(params)[path])
            assert torch.equal(u, named_leaves(alone[label][i])[path])
    assert set(state) == set(parts)


def test_labels_see_whole_shapes_once() -> None:
    """The label function is asked once per leaf, about meta tensors of the whole shape."""
    asked: list[tuple[str, tuple[int, ...], str]] = []

    def label(path: str, leaf: Tensor) -> str:
        asked.append((path, tuple(leaf.shape), leaf.device.type))
        return "all"

    params = hostile_tree()
    run(optim.partition({"all": optim.sgd(0.1)}, label), params, gradients(params, 3))
    assert asked == [(path, tuple(x.shape), "meta") for path, x in named_leaves(params).items()]


def test_masks_may_be_prefixes() -> None:
    params = hostile_tree()
    (grad,) = gradients(params, 1)
    mask = {"kernel": False, "layers": True, "scale": False, "nothing": False, "turned": False}
    (updates,), _, _ = run(optim.freeze(mask), params, [grad])
    assert (updates["layers"][0]["bias"] == 0).all() and (updates["layers"][1]["weight"] == 0).all()
    assert torch.equal(updates["kernel"], grad["kernel"])
    (updates,), _, _ = run(optim.freeze(True), params, [grad])
    assert all((u == 0).all() for u in optree.tree_leaves(updates))


@pytest.mark.parametrize(
    "mask",
    [
        lambda path, leaf: re.search("kernel|bias", path),
        lambda path, leaf: path.endswith(("kernel", "bias")) and leaf.ndim,
        lambda path, leaf: torch.tensor(path.endswith(("kernel", "bias"))),
    ],
)
def test_masks_go_by_truth(mask: Any) -> None:
    """In all that takes a mask: a function may return a match, a number, a tensor."""
    params = {"kernel": torch.ones(2, 3), "bias": torch.ones(3), "other": torch.ones(2)}
    (grad,) = gradients(params, 1)
    (updates,), _, state = run(optim.masked(optim.trace(0.9), mask), params, [grad])
    assert sorted(named_leaves(state.trace)) == ["bias", "kernel"]
    (updates,), _, _ = run(optim.masked(optim.scale(2.0), mask), params, [grad])
    (frozen,), _, _ = run(optim.freeze(mask), params, [grad])
    (decayed,), _, _ = run(optim.add_decayed_weights(0.5, mask), params, [grad])
    for path in params:
        chosen = path != "other"
        assert torch.equal(updates[path], grad[path] * 2) == chosen
        assert bool((frozen[path] == 0).all()) == chosen
        assert torch.equal(decayed[path], grad[path]) != chosen
    step = fz.train_step(lambda p, b, x: p["bias"].sum(), optim.sgd(0.1), trainable=mask)
    trained_leaves = step.init(params).params
    assert {path: p.requires_grad for path, p in trained_leaves.items()} == {
        "kernel": True,
        "bias": True,
        "other": False,
    }


def test_freeze_stands_last() -> None:
    """Before a transform that decays weights it does not keep leaves as they are."""
    params, mask = {"w": torch.ones(2), "b": torch.ones(2)}, {"w": True, "b": False}
    (grad,) = gradients(params, 1)
    decays = optim.adamw(0.1, weight_decay=0.1)
    (first,), _, _ = run(optim.chain(optim.freeze(mask), decays), params, [grad])
    (last,), _, _ = run(optim.chain(decays, optim.freeze(mask)), params, [grad])
    assert first["w"].all() and not last["w"].any() and last["b"].all()
    assert "Last in a chain" in (optim.freeze.__doc__ or "")


def test_mistakes_in_masks_and_labels() -> None:
    params = hostile_tree()
    with pytest.raises(ValueError, match=r"path layers\.0\.bias.*got 'biases'"):
        labels = lambda path, leaf: "biases" if path.endswith("bias") else "rest"
        optim.partition({"rest": optim.sgd(0.1)}, labels).init(params, Local(params))
    with pytest.raises(
        StructureError, match=r"do not fit the params.*dict of .*got dict of kernel\."
    ):
        optim.masked(optim.sgd(0.1), {"kernel": True}).init(params, Local(params))
    with pytest.raises(ValueError, match=r"path kernel.*got 3"):
        optim.scale_by_label({1: 1.0}, lambda path, leaf: 3).init(params, Local(params))
    with pytest.raises(ValueError, match="different names"):
        optim.named_chain(("a", optim.scale(1.0)), ("a", optim.scale(1.0)))


def test_scale_by_label() -> None:
    params = hostile_tree()
    grads = gradients(params, 2)
    history, _, _ = run(
        optim.scale_by_label({0: 1.0, 1: lambda count: count + 2.0, 2: 0.5}, layer_of),
        params,
        grads,
    )
    for i, (updates, grad) in enumerate(zip(history, grads, strict=True)):
        assert torch.equal(updates["scale"], grad["scale"])
        assert torch.equal(updates["layers"][0]["weight"], grad["layers"][0]["weight"] * (i + 2))
        assert torch.equal(updates["layers"][1]["weight"], grad["layers"][1]["weight"] * 0.5)


def test_needs_is_the_most_inside() -> None:
    whole = optim.with_whole_leaves(lambda p: (), lambda u, s: (u, s))
    statistics, plain = optim.clip_by_global_norm(1.0), optim.sgd(0.1)
    assert optim.masked(plain, True).needs == optim.Needs.POINTWISE
    assert (
        optim.partition({"a": plain, "b": whole, "c": statistics}, "a").needs
        == optim.Needs.WHOLE_LEAF
    )
    assert optim.apply_if_finite(plain, 1).needs == optim.Needs.STATISTICS
    assert optim.apply_if_finite(whole, 1).needs == optim.Needs.WHOLE_LEAF
    assert optim.sam(plain).needs == optim.Needs.STATISTICS
    assert optim.lookahead(whole, 2, 0.5).needs == optim.Needs.WHOLE_LEAF
    assert optim.inject_hyperparams(optim.clip_by_global_norm)(1.0).needs == optim.Needs.STATISTICS


def test_named_chain_is_chain() -> None:
    params = hostile_tree()
    grads = gradients(params, 2)
    got, _, state = run(
        optim.named_chain(("clip", optim.clip(0.5)), ("adam", optim.adam(0.1))), params, grads
    )
    expected, _, _ = run(optim.chain(optim.clip(0.5), optim.adam(0.1)), params, grads)
    assert list(state) == ["clip", "adam"]
    assert all(
        torch.equal(a, b)
        for a, b in zip(optree.tree_leaves(got), optree.tree_leaves(expected), strict=True)
    )


def test_hyperparameters_are_read_and_changed() -> None:
    params = {"a": torch.ones(3, dtype=torch.float64)}
    grad = {"a": torch.full((3,), 2.0, dtype=torch.float64)}
    optimizer = optim.chain(
        optim.clip(9.0),
        optim.inject_hyperparams(optim.sgd)(
            learning_rate=0.5, weight_decay=lambda count: 0.1 * count.double()
        ),
    )
    state = optimizer.init(params, Local(params))
    assert {k: v.item() for k, v in optim.hyperparams(state).items()} == {
        "learning_rate": 0.5,
        "dampening": 0.0,
        "weight_decay": 0.0,
    }
    updates, state = optimizer.update(grad, state, params, Local(params))
    assert torch.equal(updates["a"], torch.full((3,), -1.0, dtype=torch.float64))
    changed = optim.with_hyperparams(state, learning_rate=0.25)
    assert optim.hyperparams(state)["learning_rate"] == 0.5, "with_hyperparams changed its argument"
    updates, state = optimizer.update(grad, changed, params, Local(params))
    assert torch.allclose(
        updates["a"], torch.full((3,), -0.25 * 2.1, dtype=torch.float64), rtol=1e-15
    )
    assert optim.hyperparams(state)["weight_decay"] == 0.1
    # Written to on one rank, the state's own would silently be another one there
    optim.hyperparams(state)["learning_rate"].fill_(9.0)
    assert optim.hyperparams(state)["learning_rate"] == 0.25
    with pytest.raises(ValueError, match="'lr'"):
        optim.with_hyperparams(state, lr=0.1)
    with pytest.raises(ValueError, match="got 0"):
        optim.hyperparams(())


@pytest.mark.parametrize(
    "clip", [optim.clip(9.0), optim.clip_by_global_norm(9.0)], ids=["pointwise", "statistics"]
)
def test_injecting_inside_of_injecting_is_refused(clip: optim.Transform) -> None:
    """The inner numbers would be out of reach of `hyperparams`, and keep their first values."""
    params = {"a": torch.ones(3)}

    def inside(learning_rate: Any) -> optim.Transform:
        return optim.chain(clip, optim.inject_hyperparams(optim.sgd)(learning_rate))

    nested = optim.inject_hyperparams(inside)(learning_rate=0.5)
    with pytest.raises(ValueError, match=r"inject_hyperparams inside of another.*Remedy: one"):
        nested.init(params, Local(params))
    # Side by side they stay allowed
    several = optim.chain(inside(0.5), inside(0.25))
    state = optim.with_hyperparams(several.init(params, Local(params)), learning_rate=0.125)
    assert [optim.hyperparams(part)["learning_rate"] for part in state] == [0.125, 0.125]


def test_injected_static_and_masked_arguments() -> None:
    """Masks, ints and bools stay; static_args too; the result is what the plain factory gives."""
    params = hostile_tree()
    grads = gradients(params, 3)
    make = optim.inject_hyperparams(optim.adamw, static_args=("b2",))
    got, _, state = run(make(0.1, mask=decayed_matrices, weight_decay=0.1), params, grads)
    expected, _, _ = run(optim.adamw(0.1, mask=decayed_matrices, weight_decay=0.1), params, grads)
    assert set(optim.hyperparams(state)) == {
        "learning_rate",
        "b1",
        "eps",
        "eps_root",
        "weight_decay",
    }
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b)


def test_apply_if_finite_skips_all_or_nothing() -> None:
    params = hostile_tree()
    grads = gradients(params, 4)
    bad = tree_map(torch.clone, grads[1])
    bad["layers"][0]["bias"][3] = math.nan
    optimizer = optim.apply_if_finite(optim.adam(0.1), 5)
    history, _, state = run(optimizer, params, [grads[0], bad, grads[2]])
    clean, _, _ = run(optimizer, params, [grads[0], grads[2]])
    assert all((u == 0).all() for u in optree.tree_leaves(history[1]))
    assert torch.equal(history[2]["kernel"], clean[1]["kernel"])
    assert (state.total_notfinite, state.notfinite_count, state.last_finite) == (1, 0, True)


def test_multi_steps_is_one_step_on_the_mean() -> None:
    params = hostile_tree()
    grads = gradients(params, 6)
    optimizer = optim.multi_steps(optim.adam(0.1), 3)
    history, _, state = run(optimizer, params, grads)
    means = [tree_map(lambda *g: sum(g) / 3, *grads[i : i + 3]) for i in (0, 3)]
    expected, _, _ = run(optim.adam(0.1), params, means)
    assert_close(history[2], expected[0])
    assert_close(history[5], expected[1])
    assert all((u == 0).all() for i in (0, 1, 3, 4) for u in optree.tree_leaves(history[i]))
    assert (state.mini_step, state.gradient_step) == (0, 2)
    sums, _, _ = run(optim.multi_steps(optim.sgd(1.0), 2, use_grad_mean=False), params, grads[:2])
    assert_close(sums[1], tree_map(lambda a, b: -(a + b), *grads[:2]))


def test_multi_steps_by_schedule() -> None:
    params = {"a": torch.zeros(2)}
    history, _, _ = run(
        optim.multi_steps(optim.sgd(1.0), lambda done: 1 + done), params, gradients(params, 6)
    )
    assert [bool((u["a"] != 0).any()) for u in history] == [True, False, True, False, False, True]


def test_maybe_update() -> None:
    params = {"a": torch.zeros(2)}
    grads = gradients(params, 4)
    history, _, state = run(
        optim.maybe_update(optim.trace(0.5), lambda step: step >= 2), params, grads
    )
    assert all(torch.equal(history[i]["a"], grads[i]["a"]) for i in range(3))
    assert torch.allclose(history[3]["a"], grads[3]["a"] + 0.5 * grads[2]["a"])
    assert state.inner_state.count == 2


def test_params_ema() -> None:
    params = {"a": torch.ones(2, dtype=torch.float64), "b": None}
    optimizer = optim.chain(optim.params_ema(optim.sgd(0.1), 0.9))
    state, mean = optimizer.init(params, Local(params)), params["a"]
    for grad in gradients(params, 3):
        updates, state = optimizer.update(grad, state, params, Local(params))
        params = tree_map(torch.add, params, updates)
        mean = 0.9 * mean + 0.1 * params["a"]
    assert torch.allclose(optim.ema_params(state)["a"], mean, rtol=1e-14)
    with pytest.raises(ValueError, match="got 0"):
        optim.ema_params(())


def test_sam_descends_from_where_it_began() -> None:
    """Two steps are one: to w + rho g / norm(g) and back, with the gradient from there (Foret et
    al., 2021, eq. 3)."""
    params = {
        "a": torch.tensor([3.0, 4.0], dtype=torch.float64),
        "b": torch.tensor(0.0, dtype=torch.float64),
    }
    optimizer = optim.sam(optim.sgd(0.1), 0.5)
    state = optimizer.init(params, Local(params))
    at = params
    for _ in range(2):
        grad = tree_map(lambda p: 2 * p, at)  # of the sum of squares
        updates, state = optimizer.update(grad, state, at, Local(params))
        at = tree_map(torch.add, at, updates)
    worst = params["a"] * (1 + 0.5 / 5)
    assert torch.allclose(at["a"], params["a"] - 0.1 * 2 * worst, rtol=1e-12)


def test_frozen_trees_are_empty_for_no_one() -> None:
    """A tree of None and empty leaves goes through every wrapper."""
    params = {"none": None, "empty": torch.zeros(0, 3, dtype=torch.float64)}
    for make in (optim.adamw, optim.sgd, lambda lr: optim.apply_if_finite(optim.adam(lr), 1)):
        history, _, _ = run(make(0.1), params, gradients(params, 2))
        assert history[-1]["none"] is None and history[-1]["empty"].shape == (0, 3)
