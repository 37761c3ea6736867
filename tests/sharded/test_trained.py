"""The state says what is trained, whatever becomes of its leaves' `requires_grad` between steps.

Each run is compared with a plain torch loop, which shares nothing with the library.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import optree
import pytest
import torch
from optree import tree_map
from torch import Tensor

import functorch_zero as fz
from functorch_zero import checkpoint, optim
from functorch_zero.errors import DonatedError, StructureError
from functorch_zero.groups import run_ranks
from functorch_zero.testing import assert_equal_values
from tests.tiers import crossed, thinned, tiers

Change = Callable[[Tensor], Tensor]
FROZEN = "embed"


def values() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"up": (5, 3), "embed": (3, 5), "bias": (5,), "scale": ()}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def loss_of(p: Any, x: Tensor) -> Tensor:
    return ((x @ p["embed"] @ p["up"] * p["scale"]) ** 2).mean() + p["bias"].square().sum()


def loss_fn(params: Any, buffers: Any, x: Tensor) -> Tensor:
    return loss_of(fz.unshard(params), x)


def batches() -> Tensor:
    return torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def without_grad(change: Change) -> Change:
    def run(leaf: Tensor) -> Tensor:
        with torch.no_grad():
            return change(leaf)

    return run


def in_place(leaf: Tensor, *, requires: bool) -> Tensor:
    return leaf.requires_grad_(requires)


# Made of each leaf between two steps
CHANGES: dict[str, Change] = {
    "nothing": lambda leaf: leaf,
    "detached": lambda leaf: leaf.detach(),
    "clamped": lambda leaf: leaf.clamp(-0.5, 0.5),
    "clamped without grad": without_grad(lambda leaf: leaf.clamp(-0.5, 0.5)),
    "averaged": without_grad(lambda leaf: (leaf + leaf * 0.5) / 2),
    "all require grad": lambda leaf: leaf.detach().clone().requires_grad_(),
    "all require grad, in place": lambda leaf: in_place(leaf, requires=True),
    "none requires grad, in place": lambda leaf: in_place(leaf.detach(), requires=False),
    "in a graph": lambda leaf: leaf.clone().requires_grad_() * 1.0,
    "from numpy": lambda leaf: torch.from_numpy(leaf.detach().numpy().copy()),
    "copied": deepcopy,
}
LEVELS = (None, 0, 1, 2, 3)  # None: unsharded
OPTIMIZERS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "adamw": (
        lambda: optim.adamw(0.1, weight_decay=0.1),
        lambda leaves: torch.optim.AdamW(leaves, 0.1, weight_decay=0.1),
    ),
    "sgd": (lambda: optim.sgd(0.1), lambda leaves: torch.optim.SGD(leaves, 0.1)),
}


def by_torch(optimizer: str, change: Change) -> dict[str, Tensor]:
    params = values()
    leaves = [p.requires_grad_() for name, p in params.items() if name != FROZEN]
    steps = OPTIMIZERS[optimizer][1](leaves)
    for k, x in enumerate(batches()):
        steps.zero_grad()
        loss_of(params, x).backward()
        steps.step()
        if k == 1:
            for p in params.values():
                p.data.copy_(change(p.detach().clone()).detach())
    return params


def step_of(optimizer: str, level: int | None, group: Any) -> Any:
    step = fz.train_step(
        loss_fn, OPTIMIZERS[optimizer][0](), trainable=lambda path, leaf: path != FROZEN
    )
    return step if level is None else fz.shard(step, level=level, group=group)


def share(x: Tensor, level: int | None, group: Any) -> Tensor:
    return x if level is None else x.chunk(group.size)[group.rank]


def whole_params(step: Any, level: int | None, state: Any) -> Any:
    return state.params if level is None else step.unshard(state).params


def check_against_torch(
    optimizer: str, level: int | None, ranks: int, change: Change, edit: Callable[..., Any]
) -> None:
    expected = by_torch(optimizer, change)

    def run(group: Any) -> Any:
        step = step_of(optimizer, level, group)
        state = step.init(values())
        for k, x in enumerate(batches()):
            state, _ = step(state, share(x, level, group))
            if k == 1:
                state = edit(state, step)
        return tree_map(torch.detach, dict(whole_params(step, level, state)))

    for got in run_ranks(run, ranks):
        assert_equal_values(tree_map(torch.detach, expected), got, grade="reordered")
        assert not torch.equal(got["up"], values()["up"])


@pytest.mark.parametrize(
    ("change", "level", "optimizer", "ranks"),
    crossed(CHANGES, LEVELS, OPTIMIZERS, (1, 2), n=5),
)
def test_leaves_with_or_without_grad_train_the_same(
    change: str, level: int | None, optimizer: str, ranks: int
) -> None:
    make = CHANGES[change]

    def edit(state: Any, step: Any) -> Any:
        params = state.params
        if change == "from numpy" and level == 3:  # whose parts users can not read
            return state.replace(params=params.with_local(tree_map(make, params.local_tree)))
        return state.replace(params=tree_map(make, params))

    check_against_torch(optimizer, level, ranks, make, edit)


def handed_over(state: Any, step: Any) -> Any:
    """The params of a state that trains the other leaf only."""
    level = None if state.sharding is None else 0
    other = fz.train_step(loss_fn, optim.sgd(0.1), trainable=lambda path, leaf: path == FROZEN)
    whole = state if level is None else step.unshard(state)
    theirs = other.init(whole.params)
    mine = whole.replace(params=theirs.params)
    return mine if level is None else step.shard(mine)


def pickled(state: Any, step: Any) -> Any:
    whole = state if state.sharding is None else step.unshard(state)
    whole = pickle.loads(pickle.dumps(whole.replace(params=tree_map(torch.detach, whole.params))))
    return whole if state.sharding is None else step.shard(whole)


def and_back(state: Any, step: Any) -> Any:
    """Whole, without any flag, and sharded again."""
    if state.sharding is None:
        return tree_map(lambda x: x.detach(), state)
    return step.shard(tree_map(lambda x: x.detach(), step.unshard(state)))


@pytest.mark.parametrize("edit", [handed_over, pickled, and_back])
@pytest.mark.parametrize("level", thinned([None, 1, 2, 3, 0]))
def test_states_that_went_elsewhere_train_the_same(edit: Any, level: int | None) -> None:
    check_against_torch("adamw", level, 2, lambda leaf: leaf, edit)


@pytest.mark.parametrize("level", tiers([None, 3], [1]))
def test_a_checkpoint_trains_what_its_state_trained(level: int | None, tmp_path: Any) -> None:
    def edit(state: Any, step: Any) -> Any:
        checkpoint.save(tmp_path, step, state)
        return checkpoint.load(tmp_path, step, like=tree_map(Tensor.detach, state)).state

    check_against_torch("adamw", level, 2 if level else 1, lambda leaf: leaf, edit)


def test_users_see_what_is_trained_on_the_leaves() -> None:
    """As ever: after a step of an unsharded state, and on a state made whole."""
    step = step_of("adamw", None, None)
    state, _ = step(step.init(values()), batches()[0])
    flags = {name: name != FROZEN for name in values()}
    assert {name: p.requires_grad for name, p in state.params.items()} == flags
    bare = state.replace(params=tree_map(torch.detach, state.params))
    state, _ = step(bare, batches()[1])
    assert {name: p.requires_grad for name, p in state.params.items()} == flags
    assert optree.tree_structure(state) == optree.tree_structure(bare)


def test_evaluations_choose_the_trained_leaves() -> None:
    optimizer = optim.params_ema(optim.sgd(0.1), 0.5)
    step = fz.train_step(loss_fn, optimizer, trainable=lambda path, leaf: path != FROZEN)
    state, _ = step(step.init(values()), batches()[0])
    evaluate = fz.eval_step(lambda p, b, x: {"loss": loss_of(p, x)}, params=optim.ema_params)
    expected = evaluate(state, batches()[1])
    bare = state.replace(params=tree_map(torch.detach, state.params))
    assert evaluate(bare, batches()[1]) == expected


def test_a_leaf_that_the_state_does_not_know_says_itself() -> None:
    """A program's own state, or one with another model's params."""
    step = fz.train_step(lambda p, b, x: (p["w"] * p["v"] * x).sum(), optim.sgd(0.1))
    state = step.init({"w": torch.ones(2, requires_grad=True), "v": torch.ones(2)})
    renamed = {"w": state.params["w"].detach(), "v": torch.ones(2).requires_grad_(), "u": None}
    after, _ = step(state.replace(params=renamed), torch.ones(2))
    assert torch.equal(after.params["v"], renamed["v"])
    assert not torch.equal(after.params["w"], renamed["w"])


def alternating(make: Any, x: Any, carry: Any, num: int = 2) -> Any:
    """Two steps over one tree, each of which trains a leaf of its own."""
    params = {k: torch.eye(4, dtype=torch.float64).requires_grad_() for k in "dg"}

    def loss(params: Any, buffers: Any, x: Tensor) -> Any:
        return (x @ params["g"] @ params["d"] + x).square().mean()

    def only(name: str) -> Any:
        return make(fz.train_step(loss, optim.sgd(1e-2), trainable=lambda path, leaf: path == name))

    train_d, train_g = only("d"), only("g")
    of_d, of_g = train_d.init(params), train_g.init(params)
    for _ in range(num):
        of_d, _ = train_d(of_d, x)
        of_g, _ = train_g(of_g.replace(params=carry(of_g.params, of_d.params)), x)
        of_d = of_d.replace(params=carry(of_d.params, of_g.params))
    return tree_map(lambda leaf: leaf.detach() - torch.eye(4), fz.unshard(of_g.params))


@pytest.mark.parametrize("donate", thinned([False, True]))
@pytest.mark.parametrize("level", thinned([3, 2, 1, 0]))
def test_params_go_from_a_step_to_another_that_trains_other_leaves(
    level: int, donate: bool
) -> None:
    """As they are, and leaf by leaf; the second step trained nothing."""
    x = torch.arange(24, dtype=torch.float64).view(6, 4) / 24

    def as_they_are(mine: Any, others: Any) -> Any:
        return others

    def by_leaf(mine: Any, others: Any) -> Any:
        return tree_map(lambda _, leaf: leaf, mine, others)

    expected = alternating(lambda step: step, x, as_they_are)
    assert all(leaf.abs().max() > 1e-4 for leaf in expected.values())
    for carry in (as_they_are, by_leaf):

        def on_rank(group: Any, carry: Any = carry) -> Any:
            def make(step: Any) -> Any:
                return fz.shard(step, level=level, group=group, donate=donate)

            return alternating(make, x.chunk(2)[group.rank], carry)

        for moved in run_ranks(on_rank, 2):
            assert_equal_values(expected, moved)


def apart(params: Any, buffers: Any, x: Tensor) -> Tensor:
    return ((params["w"] - x) ** 2).mean()


@pytest.mark.parametrize("level", thinned([3, 2, 1, 0]))
def test_leaves_in_two_states_are_not_written_over(level: int) -> None:
    """`tree_map` puts one state's leaves into another, which a step then takes, and both are used
    up."""

    def run(group: Any) -> None:
        step = fz.shard(fz.train_step(apart, optim.sgd(0.1)), level=level, group=group)
        first = {"w": torch.zeros(5, dtype=torch.float64).requires_grad_()}
        one, _ = step(step.init(first), torch.ones(5, dtype=torch.float64))
        other = step.init(first)
        other = other.replace(params=tree_map(lambda _, leaf: leaf, other.params, one.params))
        step(other, torch.ones(5, dtype=torch.float64))
        with pytest.raises(DonatedError):
            fz.unshard(one.params)

    run_ranks(run, 2)


def test_params_of_another_level_are_refused() -> None:
    """By steps; an evaluation reads them as they are cut."""

    def run(group: Any, before: int, after: int) -> None:
        params = {"w": torch.arange(5, dtype=torch.float64).requires_grad_()}
        steps = [
            fz.shard(fz.train_step(apart, optim.sgd(0.1)), level=level, group=group)
            for level in (before, after)
        ]
        one, other = (step.init(params) for step in steps)
        with pytest.raises(StructureError, match=rf"as level {before};.*as level {after};"):
            steps[1](other.replace(params=one.params), torch.ones(5, dtype=torch.float64))
        evaluate = fz.eval_step(lambda params, buffers, x: {"sum": params["w"].sum()})
        found = fz.shard(evaluate, level=after, group=group)(other.replace(params=one.params), ())
        assert found["sum"] == 10

    for before, after in itertools.permutations(range(4), 2):
        run_ranks(lambda group, b=before, a=after: run(group, b, a), 2)


@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize("level", [0, 3])
def test_what_tree_map_made_of_donated_params_is_refused(level: int, read: bool) -> None:
    """On the same storage, whether it was read before or not."""

    def run(group: Any) -> None:
        first = {"w": torch.zeros(6, dtype=torch.float64).requires_grad_()}
        x = torch.ones(6, dtype=torch.float64)
        step = fz.shard(fz.train_step(apart, optim.sgd(0.1)), level=level, group=group)
        other = fz.shard(fz.train_step(apart, optim.sgd(0.2)), level=level, group=group)
        state, second = step.init(first), other.init(first)
        alias = tree_map(Tensor.detach, state.params)
        if read:
            fz.unshard(alias)
        step(state, x)
        for use in (
            lambda: fz.unshard(alias),
            lambda: alias["w"],
            lambda: other(second.replace(params=alias), x),
        ):
            with pytest.raises(DonatedError):
                use()

    run_ranks(run, 2)


@pytest.mark.parametrize("level", thinned([3, 0, 1]))
def test_a_copy_that_shares_only_frozen_leaves_is_kept(level: int) -> None:
    """Nobody writes to a frozen leaf, so that a copy may have it in common with donated params."""
    copies = {
        "params + updates": lambda p: fz.apply_updates(p, fz.zero_updates(p)),
        "clones of trained leaves": lambda p: tree_map(
            lambda leaf: leaf.detach().clone().requires_grad_() if leaf.requires_grad else leaf, p
        ),
    }

    def loss(params: Any, buffers: Any, x: Tensor) -> Tensor:
        return ((params["w"] * params["frozen"] - x) ** 2).mean()

    def run(group: Any) -> None:
        step = fz.shard(fz.train_step(loss, optim.sgd(0.1)), level=level, group=group)
        first = {
            "w": torch.ones(6, dtype=torch.float64).requires_grad_(),
            "frozen": torch.full((6,), 2.0, dtype=torch.float64),
        }
        x = torch.arange(6.0, dtype=torch.float64)
        for name, copy in copies.items():
            state = step.init(first)
            kept = copy(state.params)
            for _ in range(2):
                state, _ = step(state, x)
            assert_equal_values(first, fz.unshard(kept), grade="bitwise", what=name)
            assert not torch.equal(fz.unshard(state.params)["w"], first["w"])

    run_ranks(run, 2)


def test_leaves_that_a_caller_joined_are_not_written_over() -> None:
    """One vector of the caller's own, of which each leaf is a part."""

    def loss(params: Any, buffers: Any, x: Tensor) -> Tensor:
        return sum(((leaf - x) ** 2).mean() for leaf in params.values())

    def run(group: Any) -> None:
        first = {n: torch.zeros(8, dtype=torch.float64).requires_grad_() for n in "ab"}
        step = fz.shard(fz.train_step(loss, optim.sgd(0.1)), level=3, group=group)
        state = step.init(first)
        leaves, treedef = optree.tree_flatten(state.params.local_tree)
        joined = torch.cat(leaves)
        parts = treedef.unflatten(joined.split([leaf.numel() for leaf in leaves]))
        params = tree_map(torch.Tensor.requires_grad_, state.params.with_local(parts))
        step(state.replace(params=params), torch.ones(8, dtype=torch.float64))
        assert not joined.any()

    run_ranks(run, 2)


@pytest.mark.parametrize("level", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("way", ["by identity", "by numpy"])
def test_a_rule_that_cannot_be_asked_again(way: str, level: int | None) -> None:
    """Its answers at init hold: a step asks again with tensors without values."""
    params = values()
    flags = {id(leaf): name != FROZEN for name, leaf in params.items()}

    def chosen(path: str, leaf: Tensor) -> bool:
        if way == "by identity":
            return flags[id(leaf)]
        return not np.array_equal(leaf.detach().numpy(), params[FROZEN].numpy())

    def run(group: Any) -> Any:
        step: Any = fz.train_step(loss_fn, optim.sgd(0.1), trainable=chosen)
        if level is not None:
            step = fz.shard(step, level=level, group=group)
        state, _ = step(step.init(params), batches()[0])
        return state.params if level is None else step.unshard(state).params

    new = run_ranks(run, 1 if level is None else 2)[0]
    for name, old in params.items():
        assert torch.equal(new[name].detach(), old) == (name == FROZEN)
