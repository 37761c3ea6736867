"""Tensors that are lazily conjugated or negated lie where others lie, and have other values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from optree import tree_leaves, tree_map
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import checkpoint, optim
from functorch_zero.groups import CheckedGroup, SingleRank, run_ranks
from functorch_zero.sharded.api import shard
from functorch_zero.step.state import State
from functorch_zero.step.train import TrainStep
from functorch_zero.tree import is_flagged
from tests.local import local_leaves
from tests.modules import Unit
from tests.tiers import crossed, thinned

COMPLEX = torch.complex128
BATCHES = torch.randn(3, 4, 3, dtype=COMPLEX, generator=torch.Generator().manual_seed(1))
LEVELS_AND_RANKS = [(0, 2), (1, 2), (2, 2), (3, 1), (3, 2)]

Change = Callable[[State], State]


def nothing(state: State) -> State:
    return state


def assert_same(
    make: Callable[[], tuple[TrainStep, Any]],
    level: int,
    num_ranks: int,
    change: Change = nothing,
    **options: Any,
) -> None:
    """Three steps give what the unsharded ones give; `change` is applied after the second."""

    def train(step: Any, state: State, part: slice) -> State:
        for k, batch in enumerate(BATCHES):
            state, _ = step(change(state) if k == 2 else state, batch[part])
        return state

    def on_rank(group: Any) -> State:
        step, params = make()
        sharded = shard(step, level=level, group=CheckedGroup(group), **options)
        each = len(BATCHES[0]) // num_ranks
        part = slice(group.rank * each, (group.rank + 1) * each)
        return sharded.unshard(train(sharded, sharded.init(params), part))

    step, params = make()
    start = step.init(params)
    expected = train(step, start, slice(None))
    got = run_ranks(on_rank, num_ranks)[0]
    assert not torch.equal(tree_leaves(expected.params)[0], tree_leaves(start.params)[0])
    for x, y in zip(tree_leaves(got), tree_leaves(expected), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


# ---- Saved for backward ----

USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "conj": lambda w, x: x @ w.conj(),
    "mH": lambda w, x: x @ w.mH,
    "row": lambda w, x: x * w[0].conj(),
    "negated": lambda w, x: torch.complex(x.real * w[0].conj().imag, x.imag),
    "negated and conjugated": lambda w, x: x * torch._neg_view(w.conj())[1],
    "einsum": lambda w, x: torch.einsum("bi,ij->bj", x, w.conj()),
}


def layer(use: Callable[[Tensor, Tensor], Tensor]) -> Unit:
    weight, bias = torch.randn(3, 3, dtype=COMPLEX), torch.randn(3, dtype=COMPLEX)
    return Unit(lambda net, x: use(net.w, x) + net.b, w=nn.Parameter(weight), b=nn.Parameter(bias))


@pytest.mark.parametrize(
    ("use", "level_and_ranks"), crossed(USES, [(3, 1), (3, 2), (2, 2), (0, 2)], n=4)
)
def test_saved_for_backward(use: str, level_and_ranks: tuple[int, int]) -> None:
    def make() -> tuple[TrainStep, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(layer(lambda w, x: x @ w), layer(USES[use]), layer(USES[use]))
        apply, params, _ = fz.functionalize(model, units=Unit)

        def loss(params: Any, buffers: Any, x: Tensor) -> Tensor:
            return (apply(params, buffers, x)[0] - 0.3j).abs().square().mean()

        return fz.train_step(loss, optim.sgd(0.1)), params

    assert_same(make, *level_and_ranks)


# ---- Returned by optimizers, and given in states ----


def turned(tree: Any) -> Any:
    return tree_map(torch.conj, tree)


def negated(tree: Any) -> Any:
    return tree_map(torch._neg_view, tree)


def zeros(params: Any) -> Any:
    return tree_map(torch.zeros_like, params)


def copies(params: Any) -> Any:
    return tree_map(torch.clone, params)


def added(updates: Any, state: Any) -> Any:
    return tree_map(lambda u, s: u + 0.1 * s, updates, state)


def across_too(update: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
    return lambda updates, state, params, across: update(updates, state, params)


def both_are_the_mean(updates: Any, state: Any, params: Any) -> Any:
    mean = turned(added(updates, state))
    return mean, mean


AUTHORS: dict[str, Callable[[], Any]] = {
    "turns updates": lambda: optim.pointwise(lambda p: (), lambda u, s, p: (turned(u), s)),
    "negates updates": lambda: optim.pointwise(lambda p: (), lambda u, s, p: (negated(u), s)),
    "turns its state": lambda: optim.pointwise(
        copies, lambda u, s, p: (added(u, s), turned(s))
    ),
    "keeps updates turned": lambda: optim.pointwise(
        zeros, lambda u, s, p: (added(u, s), turned(u))
    ),
    "keeps what it returns, turned": lambda: optim.pointwise(zeros, both_are_the_mean),
    "returns params turned": lambda: optim.pointwise(lambda p: (), lambda u, s, p: (turned(p), s)),
    "turns updates, across": lambda: optim.with_statistics(
        lambda p: (), across_too(lambda u, s, p: (turned(u), s))
    ),
    "turns its state, across": lambda: optim.with_statistics(
        copies, across_too(lambda u, s, p: (added(u, s), turned(s)))
    ),
    "turns whole leaves": lambda: optim.with_whole_leaves(
        lambda p: (), lambda u, s: (u.conj(), s)
    ),
    "turns its state of whole leaves": lambda: optim.with_whole_leaves(
        torch.clone, lambda u, s: (u + 0.1 * s, s.conj())
    ),
}  # fmt: skip


def simple_step(
    optimizer: Callable[[], Any], names: str = "ab", dtype: torch.dtype = COMPLEX
) -> Callable[[], tuple[TrainStep, Any]]:
    """A step whose leaves get lazily conjugated gradients."""

    def make() -> tuple[TrainStep, Any]:
        g = torch.Generator().manual_seed(0)
        params = {
            name: torch.randn(3, 3 + k, dtype=dtype, generator=g).requires_grad_()
            for k, name in enumerate(names)
        }

        def loss(params: Any, buffers: Any, x: Tensor) -> Tensor:
            y: Any = sum(
                (x.to(dtype) @ w.conj() - 1j).abs().square().mean() for w in params.values()
            )
            return y

        return fz.train_step(loss, optimizer()), params

    return make


@pytest.mark.parametrize(
    ("author", "level_and_ranks", "last"), crossed(AUTHORS, LEVELS_AND_RANKS, [True, False], n=5)
)
def test_returned_by_a_transform(author: str, level_and_ranks: tuple[int, int], last: bool) -> None:
    parts = [optim.scale(-0.1), AUTHORS[author]()]
    assert_same(simple_step(lambda: optim.chain(*parts[:: 1 if last else -1])), *level_and_ranks)


@pytest.mark.parametrize("author", thinned(AUTHORS))
def test_with_states_that_stay(author: str) -> None:
    make = simple_step(lambda: optim.chain(AUTHORS[author](), optim.scale(-0.1)))
    assert_same(make, 1, 2, donate=False)


def momentum() -> Any:
    return optim.chain(optim.trace(0.9), optim.scale(-0.1))


def of_complex(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda tree: tree_map(lambda x: change(x) if x.is_complex() else x, tree)


CHANGES: dict[str, Change] = {
    "params": lambda state: state.replace(params=turned(state.params)),
    "params negated": lambda state: state.replace(params=negated(state.params)),
    "momenta": lambda state: state.replace(opt_state=of_complex(torch.conj)(state.opt_state)),
    "all": lambda state: tree_map(lambda x: x.conj() if x.is_complex() else x, state),
}


@pytest.mark.parametrize(("names", "change", "at"), crossed(["ab", "a"], CHANGES, LEVELS_AND_RANKS))
def test_given_in_a_state(names: str, change: str, at: tuple[int, int]) -> None:
    def detached(state: State) -> State:
        return CHANGES[change](tree_map(Tensor.detach, state))

    assert_same(simple_step(momentum, names), *at, change=detached)


@pytest.mark.parametrize("level", [0, 3])
def test_moved_in_place(level: int) -> None:
    """The same objects, at the same place."""

    def change(state: State) -> State:
        with torch.no_grad():
            for leaf in tree_leaves(state.params):
                leaf.copy_(leaf.conj())
        return state

    assert_same(simple_step(momentum), level, 2, change=change)


# ---- In checkpoints ----


@pytest.mark.parametrize("level", [None, 0, 3])
def test_saved_and_loaded(tmp_path: Path, level: int | None) -> None:
    # Checkpoints hold no complex128
    step, params = simple_step(momentum, dtype=torch.complex64)()
    if level is not None:  # its states are donated: loaded into the tensors of `like`
        step = shard(step, level=level, group=SingleRank())

    def turn(state: State) -> State:
        return tree_map(lambda x: x.detach().conj() if x.is_complex() else x, state)

    state = turn(step(step.init(params), BATCHES[0])[0])
    # Pieces have their values in memory
    assert any(map(is_flagged, local_leaves(state))) == (level is None)
    expected = [x.clone() for x in local_leaves(state)]
    checkpoint.save(tmp_path, step, state)
    loaded = checkpoint.load(tmp_path, step, like=turn(step.init(params))).state
    assert all(map(torch.equal, local_leaves(loaded), expected))
