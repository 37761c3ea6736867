"""Ranks whose losses use other units: an error on every rank, before collectives don't meet. Where
all ranks change alike, the numbers of one process."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import GroupError, PeerError
from functorch_zero.groups import HybridGroup, ProcessGroup, counted, launch, run_ranks
from functorch_zero.runtime import same_uses
from functorch_zero.sharded.api import shard
from functorch_zero.step.train import train_step
from tests import modules
from tests.compare import (
    assert_equal_on_ranks,
    assert_equal_updates,
    assert_same_on_all_ranks,
    train,
    train_sharded,
)
from tests.models import even, rows, split
from tests.runtime.test_skipped_units import half_chosen, skipping, skipping_net
from tests.runtime.test_unit import batches_of, build
from tests.tiers import THOROUGH, crossed, tiers

Route = Sequence[int]
LEVELS: dict[str, Any] = {
    "2": 2,
    "3": 3,
    "mixed": {"": 3, "layers.0": 1, "layers.1": 2},
}
RANKS = 3
USUAL = (0, 1, 2)


def routed(routes: Callable[[int], Route], **options: Any) -> tuple[Any, Any, Any, Any]:
    """(the step, an evaluation, params, buffers): the n-th call of either takes the n-th route."""
    apply, params, buffers = build(lambda: modules.routed(4, 7, 3), nn.Linear)
    num_calls = 0

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        output = apply(params, buffers, batch["x"], routes(num_calls - 1))[0]
        return (output - batch["y"]).square().mean()

    step = train_step(loss_fn, optim.sgd(0.05, momentum=0.9), **options)
    evaluation = fz.eval_step(lambda *given: {"loss": loss_fn(*given)})
    return step, evaluation, params, buffers


# Ranks that differ

# The route of rank 1, where all others take the usual one, and words of the error
OTHERS = {
    "another": ((0, 3, 2), "layers.3"),
    "one less": ((0, 1), "head"),
    "one more": ((0, 1, 2, 3), "layers.3"),
    "none": ((), "head"),
    "another order": ((0, 2, 1), "layers.2"),
    "one again": ((0, 1, 2, 2), "layers.2"),
}
FOUND_AT = (0, 2)  # a first pass, and one that follows another


def told(group: Any, other: Route, at: int, level: Any, call: str = "step") -> tuple[Any, ...]:
    """This rank's error in call `at`, its seconds, and the state after the same call once more,
    where all take the usual route."""
    failed = False

    def routes(number: int) -> Route:
        return other if number == at and group.rank == 1 and not failed else USUAL

    step, evaluation, params, buffers = routed(routes)
    sharded = shard(step, level=level, group=group)
    evaluated = shard(evaluation, level=level, group=group)
    batches = batches_of(rows(7, 3), num=at + 1)
    state = sharded.init(params, buffers)
    for number, batch in enumerate(batches):
        part = split(batch, even(12, group.size))[group.rank]
        text, begin = "", time.monotonic()
        if number == at:
            with pytest.raises(GroupError) as caught:
                sharded(state, part) if call == "step" else evaluated(state, part)
            text = f"{type(caught.value).__name__}: {caught.value}"
            failed = True
        if call == "step":
            state, _ = sharded(state, part)
        else:
            evaluated(state, part)
    return text, time.monotonic() - begin, sharded.unshard(state)


def check_told(found: Sequence[tuple[Any, ...]], at: int, word: str) -> None:
    """Every rank has an error that says all, and the numbers of one process after it."""
    for text, _, _ in found:
        assert "use" in text and "path " in text and "expected " in text, text
        assert word in text and "on rank " in text and "Remedy: " in text, text
    step, _, params, buffers = routed(lambda number: USUAL)
    expected = train(step, params, buffers, batches_of(rows(7, 3), num=at + 1)).states[-1]
    for _, _, state in found:
        if int(state.step):
            leaves = zip(
                optree.tree_leaves(expected.params), optree.tree_leaves(state.params), strict=True
            )
            for want, have in leaves:
                torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("other", "level", "at"), crossed(OTHERS, LEVELS, FOUND_AT, n=3, quick=2))
def test_ranks_that_use_other_units_are_told(other: str, level: str, at: int) -> None:
    route, word = OTHERS[other]
    found = run_ranks(lambda group: told(group, route, at, LEVELS[level]), RANKS)
    check_told(found, at, word)


@pytest.mark.parametrize(
    ("other", "at"), crossed(["another", "one less", "one more"], FOUND_AT, n=2)
)
def test_evaluations_that_use_other_units_are_told(other: str, at: int) -> None:
    route, word = OTHERS[other]
    found = run_ranks(lambda group: told(group, route, at, 3, "evaluation"), 2)
    check_told(found, at, word)


@pytest.mark.parametrize("at", tiers([2], [0]))
def test_ranks_of_a_mesh_that_use_other_units_are_told(at: int) -> None:
    def run(group: Any) -> Any:
        return told(HybridGroup(group, shard_size=2), OTHERS["another"][0], at, 3)

    check_told(run_ranks(run, 4), at, "layers.3")


def test_ranks_that_leave_the_last_way_to_different_units_are_told() -> None:
    def run(group: Any) -> str:
        def routes(number: int) -> Route:
            return (0, 2 + group.rank) if number else USUAL

        step, _, params, buffers = routed(routes)
        sharded, (batch,) = shard(step, level=3, group=group), batches_of(rows(7, 3), num=1)
        state, _ = sharded(sharded.init(params, buffers), batch)
        with pytest.raises(GroupError) as caught:
            sharded(state, batch)
        return str(caught.value)

    texts = run_ranks(run, 2)
    assert "expected layers.1, as in the last pass, got layers.2" in texts[0]


@pytest.mark.parametrize("level", tiers([1], [0]))
def test_at_levels_0_and_1_ranks_may_use_other_units(level: int) -> None:
    def run(group: Any) -> Any:
        routes = [USUAL, (0, 3, 2) if group.rank else USUAL, (1,) if group.rank else ()]
        step, _, params, buffers = routed(lambda number: routes[number])
        batches = batches_of(rows(7, 3), num=3)
        return train_sharded(group, step, params, buffers, batches, even(12, 2), level=level)

    assert_same_on_all_ranks(run_ranks(run, 2))


@pytest.mark.parametrize("at", FOUND_AT)
def test_programs_whose_ranks_use_other_units_are_told(at: int) -> None:
    def run(group: Any) -> Any:
        tree = {name: torch.ones(3, 3, requires_grad=True) for name in "abc"}
        params = fz.shard_tree({n: {"w": leaf} for n, leaf in tree.items()}, level=3, group=group)

        def loss(params: Any, names: str) -> Tensor:
            x = torch.ones(2, 3)
            for name in names:
                x = torch.tanh(x @ fz.unshard(params[name])["w"])
            return x.mean()

        for _ in range(at):
            fz.value_and_grad(loss)(params, "ab")
        with pytest.raises(GroupError, match=r"path .*Remedy"):
            fz.value_and_grad(loss)(params, "ac" if group.rank else "ab")
        return fz.value_and_grad(loss)(params, "ab")[0]

    assert len(set(map(float, run_ranks(run, 2)))) == 1


def test_units_of_earlier_micro_batches_count() -> None:
    """The sums of micro-batches are reduced in the last one's backward."""

    def run(group: Any) -> str:
        def routes(number: int) -> Route:
            return (0, 3) if number == 0 and group.rank else (0,)

        step, _, params, buffers = routed(routes, accumulate=2)
        sharded = shard(step, level=2, group=group, reduce_gradients="once")
        (batch,) = batches_of(rows(7, 3), num=1)
        with pytest.raises(GroupError) as caught:
            sharded(sharded.init(params, buffers), batch)
        return str(caught.value)

    for text in run_ranks(run, 2):
        assert "rank 1: layers.3, used in an earlier micro-batch only" in text, text


# Ranks that change alike

STEPS = 7
# All layers first, so that each leaf has moved
DROPPED: list[Route] = [range(4)]
DROPPED += [[i for i in range(4) if (n * 5 + i * 3) % 7 % 3] for n in range(1, STEPS)]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "kept": {"reshard_after_forward": False},
    "over time": {"overlap": "time"},
    "once": {"reduce_gradients": "once"},
}


@pytest.mark.parametrize(
    ("variant", "level", "accumulate"), crossed(VARIANTS, ["2", "3", "mixed"], (1, 2), n=6)
)
def test_layers_dropped_by_a_common_seed(variant: str, level: str, accumulate: int) -> None:
    """Each step uses other layers, the same on all ranks."""
    batches = batches_of(rows(7, 3), num=STEPS)

    def given() -> tuple[Any, Any, Any]:
        route_of = lambda number: DROPPED[number // accumulate]
        step, _, params, buffers = routed(route_of, accumulate=accumulate)
        return step, params, buffers

    assert_equal_on_ranks(given, batches, even(12, RANKS), level=LEVELS[level], **VARIANTS[variant])


# Costs


def exchanges(group: Any, routes: Sequence[Route], level: Any) -> list[int]:
    """The number of exchanges in each step."""
    step, _, params, buffers = routed(routes.__getitem__)
    watched = counted(group)
    sharded, (batch,) = shard(step, level=level, group=watched), batches_of(rows(7, 3), num=1)
    state, found = sharded.init(params, buffers), []
    for _ in routes:
        watched.reset()
        state, _ = sharded(state, batch)
        found.append(Counter(call.kind for call in watched.calls)["exchange"])
    return found


@pytest.mark.parametrize(
    ("level", "first", "left"), tiers([(3, 5, 3)], [(0, 0, 0), (1, 0, 0), (2, 1, 0)], rows=True)
)
def test_steps_that_follow_the_last_one_exchange_nothing(level: int, first: int, left: int) -> None:
    """`left`: those of a step after the place where it leaves the last one's way. After it ranks
    compare all uses, until 8 steps in a row were equal."""
    routes = [USUAL] * 3 + [(0, 3, 2)] * 10
    for found in run_ranks(lambda group: exchanges(group, routes, level), 2):
        assert found == [first, 0, 0, left] + [first] * 8 + [0]


def test_groups_that_can_not_ask_compare_nothing() -> None:
    """One rank that only imagines the others, or a group of the user's."""
    counting = fz.groups.CountingGroup(4)
    step, _, params, buffers = routed([USUAL, (0, 3)].__getitem__)
    sharded, (batch,) = shard(step, level=3, group=counting), batches_of(rows(7, 3), num=1)
    state = sharded.init(params, buffers)
    counting.reset()
    for _ in range(2):
        state, _ = sharded(state, batch)
    assert not counting.num_calls("exchange")


# Processes

SECONDS = 1.0  # that a question waits here


def over_gloo(fn: Callable[[Any], Any], ranks: int) -> list[Any]:
    def run() -> Any:
        same_uses.SameUses.patience = SECONDS  # in a process of its own
        return fn(ProcessGroup(timeout=40))

    return launch(run, ranks, start_method="fork", timeout=60)


@pytest.mark.parametrize(
    ("other", "level", "at"),
    tiers(
        thorough=[("another", "3", 2), ("one less", "2", 0), ("one more", "mixed", 2)],
        full=[
            (other, level, at)
            for other in ("another", "one less", "one more")
            for level in LEVELS
            for at in FOUND_AT
        ],
        rows=True,
    ),
)
def test_processes_that_use_other_units_are_told(other: str, level: str, at: int) -> None:
    """No process ends by a signal, as gloo would have it."""
    route, word = OTHERS[other]
    found = over_gloo(lambda group: told(group, route, at, LEVELS[level]), RANKS)
    check_told(found, at, word)
    assert all(seconds < 10 for _, seconds, _ in found)
    assert any(not text.startswith(PeerError.__name__) for text, _, _ in found)


@THOROUGH
def test_processes_whose_own_backwards_reach_other_units_are_told() -> None:
    """A backward inside of the loss gathers only where it comes."""

    def run(group: Any) -> str:
        apply, params, buffers = build(lambda: skipping_net("a b? c"))
        step = train_step(skipping(apply, inner=True), optim.sgd(0.05))
        (batch,) = batches_of(half_chosen, num=1)
        sharded = shard(step, level=3, group=group)
        with pytest.raises(GroupError) as caught:
            sharded(sharded.init(params, buffers), split(batch, even(12, 2))[group.rank])
        return str(caught.value)

    for text in over_gloo(run, 2):
        assert "units.b, in a backward of the loss's own" in text, text


@THOROUGH
@pytest.mark.parametrize("level", [2, 3])
def test_processes_that_drop_layers_alike(level: int) -> None:
    batches = batches_of(rows(7, 3), num=STEPS)

    def given() -> tuple[Any, Any, Any]:
        step, _, params, buffers = routed(DROPPED.__getitem__)
        return step, params, buffers

    runs = over_gloo(
        lambda group: train_sharded(group, *given(), batches, even(12, 2), level=level), 2
    )
    assert_same_on_all_ranks(runs)
    assert_equal_updates(train(*given(), batches), runs[0])
