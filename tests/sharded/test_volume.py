"""Bytes and collectives per step and rank, counted: those that the pages on levels state."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from optree import tree_map
from torch import Tensor, nn

from functorch_zero import apply_updates, optim, program_step, value_and_grad
from functorch_zero.groups import CountingGroup, counted, run_ranks
from functorch_zero.layout.build import make_layout
from functorch_zero.model.functionalize import functionalize
from functorch_zero.sharded.api import shard
from functorch_zero.step.loss import Aux
from functorch_zero.step.train import train_step
from tests.models import GPT, Block, tokens
from tests.modules import Net, in_turn, seeded
from tests.tiers import thinned, tiers

RANKS = 2
STEPS = 3
WORDS_AND_VALUES = 2  # small all-reduces at the end of a step
# bytes: more than the all-reduce of metrics and an optimizer's scalars, less than any unit
SMALL = 4096


class Counts:
    """One step's collectives: data ones by kind, in units of the params' bytes * (N-1)/N; the small
    ones by number. Exchanges of words, which compare the uses of a first pass, are apart."""

    def __init__(self, calls: Any, whole: int):
        self.exchanges = sum(call.kind == "exchange" for call in calls)
        calls = [call for call in calls if call.kind != "exchange"]
        data = [
            call
            for call in calls
            if call.sent_bytes > SMALL or call.kind in ("all_gather", "reduce_scatter")
        ]
        share = whole * (RANKS - 1) / RANKS
        self.small = len(calls) - len(data)
        self.num = Counter(call.kind for call in data)
        self.volume = {
            kind: sum(c.sent_bytes for c in data if c.kind == kind) / share for kind in self.num
        }
        self.total = sum(self.volume.values())


def build(depth: int = 4) -> tuple[Any, Any, Any]:
    model = seeded(lambda: GPT(vocab=40, width=16, depth=depth, length=40, tied=False))
    apply, params, buffers = functionalize(model.double(), units=Block)

    def loss_fn(params: Any, buffers: Any, batch: Any) -> tuple[Tensor, Aux]:
        output, _ = apply(params, buffers, batch["x"])
        loss = nn.functional.cross_entropy(output.flatten(0, 1), batch["y"].flatten())
        return loss, Aux(metrics={"a": 1.0}, weight=5)

    return loss_fn, params, buffers


@cache
def plain_counts(level: int, depth: int = 4) -> tuple[list[Counts], Any]:
    """The counts of AdamW, which several tests look at."""
    return step_counts(level, depth=depth)


def step_counts(
    level: int, optimizer: optim.Transform | None = None, *, depth: int = 4, **options: Any
) -> tuple[list[Counts], Any]:
    """The counts of each of a few steps on one rank, and the layout."""
    loss_fn, params, buffers = build(depth)
    layout = make_layout(params, RANKS if level else 1, trainable=lambda path, leaf: True)
    whole = sum(b.piece * layout.num_ranks * b.dtype.itemsize for b in layout.buckets)

    def run(group: Any) -> list[Counts]:
        watched = counted(group)
        step = shard(
            train_step(loss_fn, optimizer or optim.adamw(0.01)),
            level=level,
            group=watched,
            **options,
        )
        state, found, batch = step.init(params, buffers), [], tokens(2)
        for _ in range(STEPS):
            watched.reset()
            state, _ = step(state, batch)
            found.append(Counts(list(watched.calls), whole))
        return found

    results = run_ranks(run, RANKS)
    for first, *others in results:
        compared = {0: 0, 1: 0, 2: 1, 3: len(layout.units) + 1}[level]  # each gather, and the end
        assert first.exchanges == compared and not any(counts.exchanges for counts in others)
    for mine, theirs in zip(*results, strict=True):
        assert (mine.num, mine.volume, mine.small) == (theirs.num, theirs.volume, theirs.small)
    return results[0], layout


def test_level_0() -> None:
    for counts in plain_counts(0)[0]:
        assert set(counts.num) == {"all_reduce"}
        assert counts.total == pytest.approx(2) and counts.small == WORDS_AND_VALUES


DEPTHS = tiers([4], [6])


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("level", thinned([1, 2]))
def test_levels_1_and_2(level: int, depth: int) -> None:
    found, layout = plain_counts(level, depth)
    for counts in found:
        assert counts.num == {
            "reduce_scatter": len(layout.buckets),
            "all_gather": len(layout.buckets),
        }
        assert counts.volume == {"reduce_scatter": pytest.approx(1), "all_gather": pytest.approx(1)}
        assert counts.small == WORDS_AND_VALUES


@pytest.mark.parametrize("depth", DEPTHS)
def test_level_3(depth: int) -> None:
    """Forward gathers each unit once; backward all but the embedding, which needs no params, and
    the last one, kept."""
    found, layout = plain_counts(3, depth)
    num = len(layout.units)
    for number, counts in enumerate(found):
        assert counts.num["reduce_scatter"] == num and counts.volume[
            "reduce_scatter"
        ] == pytest.approx(1)
        assert counts.num["all_gather"] <= 2 * num - 1 and counts.total < 3
        if number:
            assert counts.num["all_gather"] <= 2 * num - 2, "known from the step before"
        assert (
            set(counts.num) == {"reduce_scatter", "all_gather"} and counts.small == WORDS_AND_VALUES
        )


@pytest.mark.parametrize("depth", DEPTHS)
def test_level_3_without_regathering(depth: int) -> None:
    found, layout = step_counts(3, depth=depth, reshard_after_forward=False)
    for counts in found:
        assert counts.num == {"reduce_scatter": len(layout.units), "all_gather": len(layout.units)}
        assert counts.total == pytest.approx(2) and counts.small == WORDS_AND_VALUES


@pytest.mark.thorough
@pytest.mark.parametrize("level", [3, 1, 2])
def test_the_optimizers_own(level: int) -> None:
    """Clipping asks once, LAMB once more; Muon sends matrices to their owners and back: 2S/N at
    most."""
    plain, _ = plain_counts(level)
    asking, _ = step_counts(level, optim.chain(optim.clip_by_global_norm(1.0), optim.lamb(0.01)))
    for a, b in zip(plain, asking, strict=True):
        assert b.num == a.num and b.small == a.small + 2
    owned, _ = step_counts(level, optim.muon(0.01))
    for a, b in zip(plain, owned, strict=True):
        assert b.num["all_to_all"] == 2 and b.volume["all_to_all"] <= 2
        for found, expected in ((b.num, a.num), (b.volume, a.volume)):
            assert {kind: n for kind, n in found.items() if kind != "all_to_all"} == expected


@pytest.mark.thorough
def test_level_0_needs_nothing_for_an_optimizer() -> None:
    for optimizer in (optim.lamb(0.01), optim.muon(0.01), optim.adafactor(0.01)):
        for counts in step_counts(0, optimizer)[0]:
            assert (
                set(counts.num) == {"all_reduce"}
                and counts.total == pytest.approx(2)
                and counts.small == WORDS_AND_VALUES
            )


def test_two_models_in_a_tree_are_gathered_unit_by_unit() -> None:
    """As if they were one: no unit twice in forward."""
    loss_fn, params, _ = build(depth=3)
    tree = {"one": params, "two": {name: p.clone() for name, p in params.items()}}
    tree["two"] = type(params)(tree["two"], params.units)

    def both(p: Any, buffers: Any, batch: Any) -> Tensor:
        return loss_fn(p["one"], buffers, batch)[0] + loss_fn(p["two"], buffers, batch)[0]

    def run(group: Any) -> tuple[int, int]:
        watched = counted(group)
        step = shard(
            train_step(both, optim.sgd(0.1), trainable=lambda path, leaf: True),
            level=3,
            group=watched,
        )
        state = step.init(tree, {})
        watched.reset()
        step(state, tokens(2))
        return watched.num_calls("all_gather"), watched.num_calls("reduce_scatter")

    gathers, reductions = run_ranks(run, 2)[0]
    assert reductions == 2 * len(params.units) and gathers <= 4 * len(params.units)


def in_order(order: list[int]) -> Net:
    """Blocks, each used as often as `order` says."""
    block = lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    return Net(
        lambda net, x: in_turn((net.blocks[i] for i in order), x),
        blocks=nn.ModuleList(block() for _ in range(3)),
    )


@pytest.mark.parametrize(
    "order",
    thinned(
        [[0, 1, 0, 1, 2], [0, 1, 2], [0, 0, 1, 2], [0, 1, 2, 2], [0, 1, 0, 2], [0, 0, 1, 1, 2, 2]],
    ),
)
def test_units_used_more_than_once(order: list[int]) -> None:
    """Gathered once for uses in a row, and for each use in backward but the first, which finds it
    from forward."""
    apply, params, buffers = functionalize(in_order(order), units="blocks.*")
    group = CountingGroup(4)
    step = shard(
        train_step(lambda p, b, x: apply(p, b, x)[0].square().mean(), optim.sgd(0.1)),
        level=3,
        group=group,
    )
    state = step.init(params, buffers)
    for _ in range(STEPS):
        group.reset()
        state, _ = step(state, torch.ones(2, 4))
    in_a_row = sum(a != b for a, b in pairwise([-1, *order]))
    assert group.num_calls("all_gather") == in_a_row + len(order) - 1
    assert group.num_calls("reduce_scatter") == len(order)


# Programs


def calls_of(step: Any, level: int, *trees: Any) -> Counter[tuple[str, int]]:
    """A sharded step's collectives in its sixth call, by kind and length. Nobody looks at it
    closely."""
    group = CountingGroup(RANKS)
    sharded = shard(step, level=level, group=group)
    state = sharded.init(*trees)
    for _ in range(6):
        group.reset()
        state, _ = sharded(state, tokens(2))
    return Counter((call.kind, call.num_elements) for call in group.calls)


def program_calls(train: Counter[Any], level: int, gradients: int, publishes: int) -> Counter[Any]:
    """The collectives of a program, from those of a training step.

    Each gradient has the step's, metrics among them, but for the all-reduce of its words: one of
    all words ends the step. Params are published as often as updates are applied.
    """
    found = Counter({("all_reduce", 32): 1 - gradients})
    for call, num in train.items():
        is_publish = level in (1, 2) and call[0] == "all_gather"
        found[call] += num * (publishes if is_publish else gradients)
    return found


def train_calls(level: int) -> Counter[tuple[str, int]]:
    loss_fn, params, buffers = build()
    return calls_of(train_step(loss_fn, optim.sgd(0.1)), level, params, buffers)


@pytest.mark.thorough
@pytest.mark.parametrize("level", [0, 3, 1, 2])
@pytest.mark.parametrize("num", [2, 1, 3])
def test_a_program_of_several_gradients(num: int, level: int) -> None:
    """No gather and no scatter of a state beside those of its gradients and updates."""
    loss_fn, params, _ = build()

    def loss(params: Any, batch: Any) -> Any:
        return loss_fn(params, {}, batch)

    def walk(params: Any, batch: Any) -> Any:
        """Each gradient is taken where the one before has led."""
        for _ in range(num):
            _, grads = value_and_grad(loss)(params, batch)
            params = apply_updates(params, tree_map(lambda g: -0.1 * g, grads))
        return params, {}

    def stay(params: Any, batch: Any) -> Any:
        found = [value_and_grad(loss)(params, batch)[1] for _ in range(num)]
        return apply_updates(params, tree_map(lambda *grads: -0.1 * sum(grads), *found)), {}

    train = train_calls(level)
    assert {0: "all_reduce"}.get(level, "reduce_scatter") in {kind for kind, _ in train}
    for program, publishes in ((walk, num), (stay, 1)):
        step = program_step(program, init=lambda params: params)
        assert calls_of(step, level, params) == program_calls(train, level, num, publishes)


@pytest.mark.parametrize("level", tiers([3], [0, 1, 2]))
def test_a_tree_that_is_only_read(level: int) -> None:
    """It is gathered at level 3, and nothing of it is reduced or published."""
    loss_fn, params, _ = build()

    def loss(params: Any, teacher: Any, batch: Any) -> Any:
        known, _ = loss_fn(teacher, {}, batch)
        value, aux = loss_fn(params, {}, batch)
        return value + known, aux

    def program(value: Any, batch: Any) -> Any:
        _, grads = value_and_grad(loss)(value["params"], value["teacher"], batch)
        return {**value, "params": apply_updates(value["params"], grads)}, {}

    def init(params: Any, teacher: Any) -> Any:
        return {"params": params, "teacher": teacher}

    found = calls_of(program_step(program, init=init), level, params, params)
    expected = program_calls(train_calls(level), level, 1, 1)
    gathers = [found[call] - expected[call] for call in expected if call[0] == "all_gather"]
    assert sum(gathers) == (len(params.units) if level == 3 else 0)
    for call in found | expected:
        assert call[0] == "all_gather" or found[call] == expected[call], call
