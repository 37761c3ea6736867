"""No storage is looked up to find out which flat leaves lie in, and little is copied."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.layout import flat_buffers, sharded_tree
from functorch_zero.layout.home import Home, Homes
from functorch_zero.sharded import publish
from functorch_zero.sharded_optim import pointwise
from functorch_zero.testing import assert_equal_updates
from tests.tiers import tiers

PARAMS = {f"w{i}": torch.randn(64, 64) for i in range(2)} | {
    f"b{i}": torch.randn(64) for i in range(2)
}


def loss_of(params: Any, x: Tensor) -> Tensor:
    for i in range(2):
        x = torch.tanh(x @ params[f"w{i}"] + params[f"b{i}"])
    return x.square().mean()


def adam_chain() -> optim.Transform:
    return optim.chain(
        optim.clip_by_global_norm(1.0),
        optim.scale_by_adam(),
        optim.add_decayed_weights(0.01),
        optim.scale(-1e-3),
    )


# Of muon some updates come leaf by leaf
OPTIMIZERS = {
    "adamw": lambda: optim.adamw(1e-3),
    "chain": adam_chain,
    "params_ema": lambda: optim.params_ema(optim.adamw(1e-3), 0.99),
    "muon": lambda: optim.muon(1e-2),
}


def build(kind: str, optimizer: optim.Transform) -> Any:
    if kind == "train":
        return fz.train_step(lambda p, b, x: loss_of(p, x), optimizer)

    def program(value: Any, x: Tensor) -> Any:
        loss, grads = fz.value_and_grad(loss_of)(value[0], x)
        return optimizer.apply(grads, value[1], value[0]), {"loss": loss}

    return fz.program_step(program, init=lambda p: (p, optimizer.init(p)))


@pytest.mark.parametrize("level", tiers([3], [1]))
@pytest.mark.parametrize("kind", ["train", "program"])
@pytest.mark.parametrize("name", tiers(["params_ema", "muon"], ["adamw", "chain"]))
def test_flats_are_known(monkeypatch: pytest.MonkeyPatch, name: str, kind: str, level: int) -> None:
    group = fz.groups.CountingGroup(2)
    step = fz.shard(build(kind, OPTIMIZERS[name]()), level=level, group=group, donate=True)
    state = step.init({path: p.clone().requires_grad_() for path, p in PARAMS.items()})
    batch = torch.randn(4, 64)
    for _ in range(3):
        state, _ = step(state, batch)

    called = []

    def counted(name: str, real: Any) -> Any:
        return lambda *args: (called.append(name), real(*args))[1]

    modules = (flat_buffers, sharded_tree, pointwise, publish)
    for lookup in ("flat_of_pieces", "flat_of_leaves", "pack_pieces"):
        own = counted(lookup, getattr(flat_buffers, lookup))
        for module in modules:
            if hasattr(module, lookup):
                monkeypatch.setattr(module, lookup, own)
    step(state, batch)
    assert not called


def test_leaves_from_elsewhere_lie_in_no_flat() -> None:
    flat = torch.arange(8.0)
    leaves = [flat[:3], flat[3:]]
    home = Home(flat, leaves=leaves)
    homes = Homes([home])

    def flat_of(own: Any) -> Any:
        found = homes.home_of(own)
        return None if found is None else found.flat

    assert flat_of(leaves) is flat
    assert all(flat_of([leaf]) is leaf for leaf in leaves)
    others = [leaves[::-1], [flat[:3]], [*leaves, flat[:0]], [leaves[0], flat[3:]]]
    assert all(flat_of(own) is None for own in others)
    new = flat[3:].clone()
    homes.replace(leaves[1:], new, [new])
    assert flat_of(leaves[1:]) is None and flat_of([new]) is new
    assert [home.flat for home in homes.among([new]).values()] == [new]


def of_first(updates: Any, state: Any, params: Any, across: Any) -> Any:
    """The first leaf's update for all others, too."""
    first = optree.tree_leaves(updates)[0]
    return optree.tree_map(lambda _: first, updates), state


def of_first_views(updates: Any, state: Any, params: Any, across: Any) -> Any:
    first, *rest = optree.tree_leaves(updates)
    leaves = [first, *(first.view_as(x) for x in rest)]
    return optree.tree_structure(updates).unflatten(leaves), state


def with_one_state() -> optim.Transform:
    """Two averages, of which the second goes on with the first one's state."""
    first, second = optim.scale_by_adam(), optim.scale_by_adam()

    def init(params: Any, across: Any) -> Any:
        return first.init(params, across), second.init(params, across)

    def update(updates: Any, state: Any, params: Any, across: Any) -> Any:
        updates, one = first.update(updates, state[0], params, across)
        updates, _ = second.update(updates, state[1], params, across)
        return updates, (one, one)

    return optim.Transform(init, update, first.needs)


AUTHORS = {
    "one update": lambda: optim.with_statistics(lambda params: (), of_first),
    "views of one update": lambda: optim.with_statistics(lambda params: (), of_first_views),
    "one state": with_one_state,
}


@pytest.mark.parametrize("level", tiers([3], [0]))
@pytest.mark.parametrize("name", AUTHORS)
def test_a_tensor_that_an_author_returns_twice(name: str, level: int) -> None:
    """What is made of one of both isn't written over the other."""
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(2)))
    apply, params, _ = fz.functionalize(model, units=torch.nn.Linear)
    optimizer = optim.chain(AUTHORS[name](), optim.scale_by_adam(), optim.scale(-0.1))
    step = fz.train_step(lambda p, b, x: apply(p, b, x)[0].square().mean(), optimizer)
    sharded = fz.shard(step, level=level, group=fz.groups.SingleRank())
    expected, got = step.init(params), sharded.init(params)
    for i in range(4):
        old, batch = expected.params, torch.full((4, 8), 0.1 * (i + 1))
        (expected, _), (got, _) = step(expected, batch), sharded(got, batch)
    assert_equal_updates(
        dict(old), dict(expected.params), dict(sharded.unshard(got).params), grade="reordered"
    )


@pytest.mark.parametrize("level", [0, 3])
def test_what_an_update_passes_on_stays_the_old_state_s(level: int) -> None:
    """That of a step which doesn't donate is valid, and one that does takes the next state."""

    def init(params: Any) -> Any:
        return torch.tensor(0), optree.tree_map(torch.clone, params)

    def update(updates: Any, state: Any, params: Any) -> Any:
        count, anchor = state
        if int(count) % 2:
            anchor = optree.tree_map(torch.clone, params)
        return optree.tree_map(lambda g: -0.1 * g, updates), (count + 1, anchor)

    step = build("train", optim.pointwise(init, update))
    group = fz.groups.SingleRank()
    keeps, takes = (fz.shard(step, level=level, group=group, donate=on) for on in (False, True))
    params = {name: leaf.clone().requires_grad_() for name, leaf in PARAMS.items()}
    first = keeps.init(params)
    second, _ = keeps(first, torch.ones(2, 64))
    third, _ = takes(second, torch.ones(2, 64))
    for name in PARAMS:
        assert torch.equal(keeps.unshard(first).opt_state[1][name], PARAMS[name])
        assert not torch.equal(takes.unshard(third).opt_state[1][name], PARAMS[name])
