"""The pointwise transforms: the papers' numbers, the same bits however elements are cut, and
purity."""

from __future__ import annotations

import math
from typing import Any

import optree
import pytest
import torch
from optree import tree_map
from torch import Tensor

from functorch_zero import optim
from functorch_zero.errors import StructureError, TransformError
from functorch_zero.optim.apply_updates import apply_updates
from functorch_zero.optim.claims.check import check_claims
from functorch_zero.optim.local import Local
from functorch_zero.optim.naming import described
from functorch_zero.sharded_optim import pointwise
from functorch_zero.testing import check_transform
from functorch_zero.testing.transforms import hostile_params
from tests.conformance.table import TABLE
from tests.parity.cases import (
    NUM_STEPS,
    RATE,
    assert_close,
    decayed_matrices,
    gradients,
    hostile_tree,
    run,
    stacked,
)
from tests.reference.pointwise import ORACLES
from tests.tiers import crossed, thinned, tiers

# Pointwise whatever the grouping: rows of the conformance table, and other arguments
POINTWISE = {name: row.make for name, row in TABLE.items() if row.make().plain is not None} | {
    "adam eps_root": lambda: optim.adam(RATE, eps_root=1e-6),
    "rmsprop centred": lambda: optim.rmsprop(RATE, centered=True, momentum=0.9, nesterov=True),
    "rmsprop optax": lambda: optim.rmsprop(
        RATE, 0.9, initial_scale=1.0, eps_in_sqrt=True, bias_correction=True
    ),
    "ademamix, b3": lambda: optim.contrib.ademamix(
        RATE, b3=optim.linear_schedule(0.9, 0.99, 4), weight_decay=0.1
    ),
    "ema biased": lambda: optim.ema(0.9, debias=False),
    "nan_to_num, numbers": lambda: optim.nan_to_num(1.0, 2.0, 3.0),
    "inject_hyperparams adamw": lambda: optim.inject_hyperparams(optim.adamw)(
        RATE, b1=0.8, weight_decay=0.1
    ),
    "inject_hyperparams all": lambda: optim.inject_hyperparams(optim.rmsprop)(
        0.1, initial_scale=0.1, momentum=0.9, centered=True, weight_decay=0.1
    ),
    "inject_hyperparams sgd": lambda: optim.inject_hyperparams(optim.sgd)(
        RATE, momentum=0.9, dampening=0.3
    ),
    "inject_hyperparams nadam": lambda: optim.inject_hyperparams(optim.nadam)(RATE),
    "inject_hyperparams radam": lambda: optim.inject_hyperparams(optim.radam)(RATE, b2=0.6),
    "inject_hyperparams yogi": lambda: optim.inject_hyperparams(optim.contrib.yogi)(RATE),
    "inject_hyperparams rprop": lambda: optim.inject_hyperparams(optim.contrib.rprop)(0.01),
    "inject_hyperparams adagrad": lambda: optim.inject_hyperparams(optim.adagrad)(
        0.1, lr_decay=0.1
    ),
    "inject_hyperparams ademamix": lambda: optim.inject_hyperparams(optim.contrib.ademamix)(RATE),
    "inject_hyperparams lion": lambda: optim.inject_hyperparams(optim.lion)(RATE),
    "inject_hyperparams clip": lambda: optim.inject_hyperparams(optim.clip)(0.5),
    "inject_hyperparams free": lambda: optim.inject_hyperparams(optim.schedule_free_sgd)(
        0.1, warmup_steps=2
    ),
}


@pytest.mark.parametrize("name", ORACLES)
def test_updates_are_the_papers(name: str) -> None:
    transform, oracle = ORACLES[name]
    params = {"a": hostile_tree()["layers"][1]["weight"], "b": hostile_tree()["scale"]}
    grads = gradients(params, 7)
    got, _, _ = run(transform, params, grads)

    def expected(p: Tensor, *steps: Tensor) -> Tensor:
        elements = zip(
            p.reshape(-1).tolist(),
            torch.stack(steps).reshape(len(steps), -1).T.tolist(),
            strict=True,
        )
        return torch.tensor([oracle(x, g) for x, g in elements], dtype=p.dtype).T.reshape(
            len(steps), *p.shape
        )

    # the oracle's moves of y are differences of numbers near 1
    assert_close(
        stacked(got), tree_map(expected, params, *grads), 1e-11 if name == "lookahead" else 1e-12
    )


def cut(tree: Any, seed: int) -> Any:
    """The same elements in other leaves: every leaf flat and cut at random places, into a dict in
    random order."""
    g = torch.Generator().manual_seed(seed)
    pieces = []
    for leaf in optree.tree_leaves(tree):
        places = sorted(torch.randint(0, leaf.numel() + 1, (5,), generator=g).tolist())
        pieces += torch.tensor_split(leaf.reshape(-1), places)
    order = torch.randperm(len(pieces), generator=g).tolist()
    return {str(rank): pieces[i].clone() for rank, i in enumerate(order)}


@pytest.mark.parametrize(
    ("name", "dtype"), crossed(POINTWISE, [torch.float32, torch.float64, torch.bfloat16], n=6)
)
def test_the_same_bits_however_cut(name: str, dtype: torch.dtype) -> None:
    if name == "from_torch" and dtype == torch.bfloat16:
        pytest.xfail(
            "torch's own add with alpha rounds a tensor's tail differently; from_torch says so"
        )
    transform = POINTWISE[name]()
    assert transform.needs == optim.Needs.POINTWISE and transform.plain is not None
    params = hostile_tree(dtype)
    grads = gradients(params, 3)
    whole, _, state = run(transform, params, grads)
    pieces, _, state_of_pieces = run(transform, cut(params, 7), [cut(grad, 7) for grad in grads])
    for a, b in zip(whole, pieces, strict=True):
        for x, y in zip(optree.tree_leaves(cut(a, 7)), optree.tree_leaves(b), strict=True):
            assert x.dtype == y.dtype == dtype
            assert torch.equal(x, y)
    if dtype == torch.float32:  # then float64 and int64 leaves are numbers, not 0-d params
        numbers = [
            [x.item() for x in optree.tree_leaves(s) if x.dtype != dtype]
            for s in (state, state_of_pieces)
        ]
        assert numbers[0] == numbers[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [1, 37, 4099])
def test_adam_in_place_has_the_same_bits(n: int, dtype: torch.dtype) -> None:
    part = optim.chain(optim.scale_by_adam(), optim.scale_by_learning_rate(0.1)).plain
    assert part is not None and part.in_place is not None
    params = {"": torch.randn(n, generator=torch.Generator().manual_seed(0)).to(dtype)}
    state, other = part.init(params), part.init(params)
    for grads in gradients(params, 3):
        own: Any = tree_map(torch.clone, grads)
        before = [own[""].data_ptr(), other[0].mu[""].data_ptr(), other[0].nu[""].data_ptr()]
        expected, state = part.update(grads, state, params)
        got, other = part.in_place(own, other, params)
        for x, y in zip(
            optree.tree_leaves((expected, state)), optree.tree_leaves((got, other)), strict=True
        ):
            assert torch.equal(x, y) and (x != 0).any()
        assert [
            own[""].data_ptr(),
            other[0].mu[""].data_ptr(),
            other[0].nu[""].data_ptr(),
        ] == before


def test_what_is_not_the_same_in_place_is_found() -> None:
    def update(updates: Any, state: Any, params: Any) -> Any:
        return tree_map(lambda u: u * 2, updates), state + 1

    def another_number(updates: Any, state: Any, params: Any) -> Any:
        return tree_map(lambda u: u.mul_(2.5), updates), state

    def writes_params(updates: Any, state: Any, params: Any) -> Any:
        tree_map(lambda p: p.mul_(0.99), params)
        return tree_map(lambda u: u.mul_(2), updates), state

    def counts_in_place(updates: Any, state: Any, params: Any) -> Any:
        return tree_map(lambda u: u.mul_(2), updates), state.add_(1)

    def forgets_to_count(updates: Any, state: Any, params: Any) -> Any:
        return tree_map(lambda u: u.mul_(2), updates), state

    for in_place, text in {
        another_number: "in_place and update differ",
        writes_params: "in_place writes over params",
        counts_in_place: "in_place writes over params, or over a state leaf",
        forgets_to_count: "in_place and update differ",
    }.items():
        transform = optim.pointwise(lambda params: torch.zeros(()), update, in_place=in_place)
        with pytest.raises(TransformError, match=text):
            check_claims(transform)  # as `shard` does
        with pytest.raises(TransformError, match=text):
            check_transform(transform)


@pytest.mark.parametrize("chunk", tiers(thorough=[3, 8]))
def test_chunks(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flat's chunks make the same as the flat. The leaves are small, since a chunk is a few
    elements here."""
    monkeypatch.setattr(pointwise, "IN_CACHE", chunk)
    params = hostile_params(large=False)
    for transform in (
        optim.adam(0.1),
        optim.sgd(0.1, momentum=0.9),
        optim.lion(0.1, weight_decay=0.2),
    ):
        check_transform(transform, params=params, seeds=(0,))


@pytest.mark.parametrize("name", thinned(POINTWISE))
def test_purity(name: str) -> None:
    """Inputs keep their values and versions; the state shares no memory with params or updates."""
    transform = POINTWISE[name]()
    params = hostile_tree()
    state = transform.init(params, Local(params))
    for grad in gradients(params, 2):
        inputs = [x for x in optree.tree_leaves((grad, state, params)) if isinstance(x, Tensor)]
        before = [(x.clone(), x._version) for x in inputs]
        updates, new = transform.update(grad, state, params, Local(params))
        assert optree.tree_structure(updates) == optree.tree_structure(params)
        assert optree.tree_structure(new) == optree.tree_structure(state)
        for x, (value, version) in zip(inputs, before, strict=True):
            assert torch.equal(x, value) and x._version == version
        for a, b in zip(optree.tree_leaves(state), optree.tree_leaves(new), strict=True):
            assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
        memory = {
            x.untyped_storage().data_ptr()
            for x in optree.tree_leaves((grad, updates, params))
            if x.numel()
        }
        assert not memory & {
            x.untyped_storage().data_ptr() for x in optree.tree_leaves(new) if x.numel()
        }
        state = new


@pytest.mark.parametrize("name", thinned(POINTWISE, 45))
def test_claims(name: str) -> None:
    check_claims(POINTWISE[name](), hostile_tree())


@pytest.mark.parametrize("name", POINTWISE)
def test_description_tells_hyperparameters_apart(name: str) -> None:
    assert described(POINTWISE[name]()) == described(POINTWISE[name]())
    optimizer = POINTWISE[name]()
    assert described(optim.chain(optimizer, optim.scale(2.0))) != described(optimizer)


def test_descriptions_differ() -> None:
    assert described(optim.adamw(1e-3)) != described(optim.adamw(2e-3))
    assert described(optim.adamw(1e-3, mask=decayed_matrices)) != described(optim.adamw(1e-3))
    assert described(optim.from_torch(torch.optim.Adamax)) != described(
        optim.from_torch(torch.optim.RAdam)
    )
    assert described(optim.lookahead(optim.sgd(0.1), 2, 0.5)) != described(
        optim.lookahead(optim.sgd(0.1), 3, 0.5)
    )


def test_hyperparameters_do_not_promote() -> None:
    """A 0-d float32 leaf stays float32 beside float64 numbers, and gets what it would get in a
    bucket."""
    params = {"scale": torch.tensor(0.5)}
    history, _, state = run(
        optim.adamw(lambda count: torch.tensor(0.1, dtype=torch.float64)), params, gradients(params)
    )
    assert all(u["scale"].dtype == torch.float32 and u["scale"].shape == () for u in history)
    assert state[0].mu["scale"].dtype == torch.float32


def test_several_numbers_for_each_element_of_a_0d_leaf() -> None:
    """On ranks such a state is refused with a reason; one process keeps it as it is made."""

    def update(updates: Any, state: Any, params: Any) -> Any:
        state = tree_map(lambda s, u: torch.stack([s[0] + u, s[1] + u * u]), state, updates)
        return tree_map(lambda s: s[0] / s[1], state), state

    transform = optim.pointwise(
        lambda params: tree_map(lambda p: p.new_zeros(2, *p.shape), params), update
    )
    params = {"scale": torch.tensor(0.5)}
    (_, second), _, _ = run(transform, params, [{"scale": torch.tensor(2.0)}] * 2)
    assert torch.equal(second["scale"], torch.tensor(0.5))


def test_clip_and_nan_to_num() -> None:
    params = {"a": torch.zeros(4)}
    updates = {"a": torch.tensor([math.nan, math.inf, -3.0, 0.25])}
    assert run(optim.clip(0.5), params, [updates])[0][0]["a"][1:].tolist() == [0.5, -0.5, 0.25]
    assert run(optim.zero_nans(), params, [updates])[0][0]["a"].tolist() == [
        0.0,
        math.inf,
        -3.0,
        0.25,
    ]
    assert run(optim.nan_to_num(1.0, 2.0), params, [updates])[0][0]["a"].tolist() == [
        1.0,
        2.0,
        -3.0,
        0.25,
    ]
    assert run(optim.set_to_zero(), params, [updates])[0][0]["a"].tolist() == [0.0] * 4


def test_decay_mask() -> None:
    params = hostile_tree()
    zero = tree_map(torch.zeros_like, params)
    (updates,), _, _ = run(optim.add_decayed_weights(0.5, decayed_matrices), params, [zero])
    expected = tree_map(lambda p: 0.5 * p if p.ndim >= 2 else torch.zeros_like(p), params)
    assert all(
        torch.equal(a, b)
        for a, b in zip(optree.tree_leaves(updates), optree.tree_leaves(expected), strict=True)
    )


def test_ema_is_the_mean() -> None:
    params = {"a": torch.zeros(3, dtype=torch.float64)}
    grads = gradients(params, NUM_STEPS)
    history, _, _ = run(optim.ema(0.9), params, grads)
    weights = torch.tensor([0.9**k for k in range(NUM_STEPS)], dtype=torch.float64).flip(0)
    mean = sum(w * g["a"] for w, g in zip(weights, grads, strict=True)) / weights.sum()
    assert torch.allclose(history[-1]["a"], mean, rtol=1e-12, atol=0)


def test_schedule_free_evaluates_at_the_average() -> None:
    params = {"a": torch.full((3,), 2.0, dtype=torch.float64)}
    optimizer = optim.schedule_free_sgd(0.1, b1=0.9)
    state, z, zs = optimizer.init(params, Local(params)), params["a"], []
    for grad in gradients(params, 4):
        updates, state = optimizer.update(grad, state, params, Local(params))
        params = tree_map(torch.add, params, updates)
        z = z - 0.1 * grad["a"]
        zs.append(z)
    average = optim.schedule_free_eval_params((state,), params)["a"]
    assert torch.allclose(average, torch.stack(zs).mean(0), rtol=1e-12, atol=0)
    with pytest.raises(ValueError, match="got 0"):
        optim.schedule_free_eval_params((), params)


def test_an_update_of_another_shape_is_not_broadcast() -> None:
    """In one process either of the two would be, without a word."""
    params = {"w": torch.ones(3, requires_grad=True), "x": None}
    for other in (torch.ones(1), torch.ones(3, 1), torch.ones(())):
        with pytest.raises(StructureError, match=r"another shape than its leaf: path w"):
            apply_updates(params, {"w": other, "x": None})

    def mean(updates: Any, state: Any, params: Any) -> Any:
        return {"w": updates["w"].mean(0, keepdim=True)}, state

    optimizer, own = optim.pointwise(lambda params: (), mean), {"w": params["w"]}
    with pytest.raises(StructureError, match=r"path w, expected \(3,\), got \(1,\)"):
        optimizer.apply({"w": torch.ones(3)}, optimizer.init(own), own)
