"""Frozen leaves and a level for each part: equal to the unsharded step, and what is not trained
costs nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from optree import tree_leaves
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import StructureError
from functorch_zero.groups import CountingGroup, counted, run_ranks
from functorch_zero.layout.levels import LevelRule
from functorch_zero.testing import assert_sharded_equals_unsharded
from functorch_zero.testing import strategies as fst
from tests.compare import Run, assert_equal_updates, assert_same_on_all_ranks, train, train_sharded
from tests.local import local_leaves
from tests.models import even
from tests.modules import Adapted, seeded
from tests.runtime.test_memory import LiveBytes
from tests.sharded.test_processes import on_processes
from tests.tiers import drawn, tiers

WIDTH, DEPTH, SMALL = 32, 4, 2


def is_adapter(path: str, leaf: Any) -> bool:
    return path.endswith((".down", ".up"))


BASE = DEPTH * (WIDTH * WIDTH + WIDTH) * 8  # bytes
ADAPTERS = DEPTH * 2 * SMALL * WIDTH * 8


def build(
    optimizer: optim.Transform | None = None, trainable: Any = is_adapter
) -> tuple[Any, Any, Any]:
    apply, params, buffers = seeded(
        lambda: fz.functionalize(
            nn.Sequential(*(Adapted(WIDTH, SMALL) for _ in range(DEPTH))).double()
        )
    )

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
        return (apply(params, buffers, batch["x"])[0] - batch["y"]).square().mean()

    return (
        fz.train_step(loss_fn, optimizer or optim.adamw(0.01), trainable=trainable),
        params,
        buffers,
    )


def make_batches(num: int = 2, rows: int = 12) -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(1)
    drawn = torch.randn(num, 2, rows, WIDTH, generator=g, dtype=torch.float64)
    return [{"x": x, "y": y} for x, y in drawn]


RULES: dict[str, LevelRule] = {
    "base 3, adapters 1": {"": 3, "*.down": 1, "*.up": 1},
    "base whole, adapters 3": {"": 0, "*.up": 3, "*.down": 2},
    "each other": lambda path, leaf: len(path) % 4,
}


def some_levels(seed: int) -> LevelRule:
    """A level for each leaf, drawn."""
    return lambda path, leaf: random.Random(f"{seed} {path}").randrange(4)


@drawn(data=st.data())
def test_any_level_for_any_leaf_and_any_of_them_frozen(data: Any) -> None:
    case = data.draw(fst.modules())
    ranks = data.draw(st.sampled_from([1, 2, 3, 4]))
    optimizer = data.draw(
        fst.optimizers(
            ["adamw", "sgd, momentum", "clip + lamb", "adafactor", "muon", "lion", "lbfgs"]
        )
    )
    step, params, buffers = case.step(optimizer.make(), weighted=True)
    seed = data.draw(st.integers(0, 99))
    used = [p for p in params if not any(p.startswith(u.rstrip("*")) for u in case.unused)]
    kept = {
        p for p in used if params[p].requires_grad and random.Random(f"{seed} {p}").random() < 0.7
    }
    if any(params[p].numel() for p in kept):
        step = fz.train_step(
            step.loss_fn, step.optimizer, trainable=lambda path, leaf: path in kept
        )
    assert_sharded_equals_unsharded(
        step,
        params,
        buffers,
        data.draw(fst.batches(case, ranks, weighted=True)),
        levels=(some_levels(seed),),
        ranks=(ranks,),
        per_rank=case.per_rank,
        unused=case.unused,
        donate=data.draw(st.booleans()),
        reshard_after_forward=data.draw(st.booleans()),
        reduce_gradients=data.draw(st.sampled_from([None, "every_microbatch", "once"])),
        allow_round_off=True,
    )


EVERY, SOME_ODD = slice(None), slice(1, None, 4)


@pytest.mark.parametrize(
    ("ranks", "part"), tiers(thorough=[(3, SOME_ODD)], full=[(2, EVERY), (3, EVERY)], rows=True)
)
def test_on_processes(ranks: int, part: slice) -> None:
    optimizers = {
        "adamw": lambda: optim.adamw(0.01),
        "clip+lamb": lambda: optim.chain(optim.clip_by_global_norm(0.1), optim.lamb(0.01)),
        "muon": lambda: optim.muon(0.02),
    }
    trained = (is_adapter, lambda path, leaf: True)
    cases = [(o, rule, t) for t in trained for o in optimizers for rule in RULES][part]

    def run(group: Any) -> list[Run]:
        return [
            train_sharded(
                group,
                *build(optimizers[o](), t),
                make_batches(),
                even(12, ranks),
                level=RULES[rule],
            )
            for o, rule, t in cases
        ]

    runs = on_processes(run, ranks)
    for i, (o, _, t) in enumerate(cases):
        assert_same_on_all_ranks([r[i] for r in runs])
        assert_equal_updates(train(*build(optimizers[o](), t), make_batches()), runs[0][i])


def sent(level: LevelRule, **options: Any) -> dict[str, float]:
    """Bytes a rank of 2 sends in a step, by kind, in units of (N-1)/N; without the metrics'
    all-reduce."""

    def run(group: Any) -> dict[str, float]:
        watched = counted(group)
        step, params, buffers = build()
        sharded = fz.shard(step, level=level, group=watched, **options)
        state = sharded.init(params, buffers)
        for batch in make_batches(3):
            watched.reset()
            state, _ = sharded(state, {name: x.chunk(2)[group.rank] for name, x in batch.items()})
        return {kind: watched.sent_bytes(kind) * 2 for kind in ("all_gather", "reduce_scatter")}

    first, second = run_ranks(run, 2)
    assert first == second
    return first


def test_what_is_sent_for_a_frozen_base() -> None:
    assert sent({"": 0, "*.up": 1, "*.down": 1}) == {
        "all_gather": ADAPTERS,
        "reduce_scatter": ADAPTERS,
    }
    apart = sent(RULES["base 3, adapters 1"])
    assert apart["reduce_scatter"] == ADAPTERS and apart["all_gather"] <= 2 * BASE + ADAPTERS
    kept = sent(RULES["base 3, adapters 1"], reshard_after_forward=False)
    assert kept == {"all_gather": BASE + ADAPTERS, "reduce_scatter": ADAPTERS}
    assert sent(3)["reduce_scatter"] == ADAPTERS


def test_a_frozen_base_has_no_state_and_no_gradient_memory() -> None:
    """Frozen, a step needs no more room than activations and the adapters' gradients take."""
    peaks = {}
    for trainable in (is_adapter, lambda path, leaf: True):
        step, params, buffers = build(trainable=trainable)
        sharded = fz.shard(step, level=0, group=CountingGroup(2))
        state = sharded.init(params, buffers)
        held = sum(leaf.nbytes for leaf in tree_leaves(state.opt_state))
        assert held == pytest.approx(
            2 * (ADAPTERS + (0 if trainable is is_adapter else BASE)), abs=64
        )
        for _ in range(5):  # the sixth isn't looked at
            state, _ = sharded(state, make_batches(1, 2)[0])
        with torch.autograd.set_multithreading_enabled(False), LiveBytes() as live:
            state, _ = sharded(state, make_batches(1, 2)[0])
        peaks[trainable is is_adapter] = live.peak
    assert peaks[True] < peaks[False] - 0.9 * BASE and peaks[True] < BASE / 2


def test_what_a_rank_holds() -> None:
    def run(group: Any) -> tuple[int, int]:
        step, params, buffers = build()
        state = fz.shard(step, level=RULES["base 3, adapters 1"], group=group).init(params, buffers)
        held = {path: leaf.numel() * 8 for path, leaf in state.params.local_tree.items()}
        return sum(held[p] for p in held if not is_adapter(p, None)), sum(
            x.nbytes for x in local_leaves(state.opt_state)
        )

    for base, moments in run_ranks(run, 4):
        assert base == BASE / 4 and moments == pytest.approx(2 * ADAPTERS / 4, abs=64)


def test_a_level_0_leaf_is_asked_about_without_communication() -> None:
    def run(group: Any) -> tuple[int, int]:
        watched, found = counted(group), []
        for rule in (0, {"": 0, "0": 1}):
            step, params, buffers = build(optim.lamb(0.01), lambda path, leaf: True)
            sharded = fz.shard(step, level=rule, group=watched)
            state = sharded.init(params, buffers)
            watched.reset()
            sharded(state, make_batches(1)[0])
            found.append(watched.num_calls("all_reduce"))
        return found[0], found[1]

    alone, mixed = run_ranks(run, 2)[0]
    assert alone == DEPTH + 2 and mixed == (DEPTH - 1) + 3, (
        "gradients, metrics and words, and one question for all cut leaves"
    )


def test_eval_steps_take_the_same_levels() -> None:
    step, params, buffers = build()
    check = fz.eval_step(lambda p, b, batch: {"loss": step.loss_fn(p, b, batch)})
    (batch,) = make_batches(1)
    expected = check(step.init(params, buffers), batch)["loss"]

    def run(group: Any) -> Tensor:
        rule = RULES["each other"]
        state = fz.shard(step, level=rule, group=group).init(params, buffers)
        return fz.shard(check, level=rule, group=group)(
            state, {k: x.chunk(2)[group.rank] for k, x in batch.items()}
        )["loss"]

    for loss in run_ranks(run, 2):
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


def test_wrong_levels_are_refused() -> None:
    step, params, buffers = build()
    group = CountingGroup(2)
    for rule in ({"0": 1}, {"": 3, "*.middle": 1}):
        with pytest.raises(StructureError, match=r"pattern.*path.*Remedy"):
            fz.shard(step, level=rule, group=group).init(params, buffers)
    for bad in ({"": 4}, {}, "fdsp", 7):
        with pytest.raises(ValueError, match="level"):
            fz.shard(step, level=bad, group=group)
    with pytest.raises(ValueError, match="level must be one of"):
        fz.shard(step, level=lambda path, leaf: 9, group=group).init(params, buffers)
    state = fz.shard(step, level={"": 3}, group=group).init(params, buffers)
    with pytest.raises(StructureError, match="got levels by leaf, all of them 3, "):
        fz.shard(step, level=3, group=group)(state, make_batches(1)[0])


def test_a_later_pattern_counts_and_an_inner_one_first() -> None:
    step, params, buffers = build()
    sharded = fz.shard(
        step, level={"0": 2, "*.up": 1, "": 3, "*": 0, "0.up": 2}, group=CountingGroup(2)
    )
    layout = sharded.init(params, buffers).sharding.layout
    found = {leaf.path: leaf.cut.level for leaf in layout.leaves}
    assert found["0.up"] == 2 and found["1.up"] == 1, "a leaf's own"
    assert found["0.down"] == found["1.down"] == 0, "of two that name the same tree the later"
