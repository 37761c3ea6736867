"""`shard`: donation, random numbers, gather and scatter, evaluation, and wrong input on ranks."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from optree import tree_map
from torch import Tensor, nn

from functorch_zero import optim
from functorch_zero.errors import DonatedError, StructureError
from functorch_zero.groups import run_ranks
from functorch_zero.groups.single import SingleRank
from functorch_zero.model.functionalize import functionalize
from functorch_zero.sharded.api import shard
from functorch_zero.sharded.program.step import ShardedStep
from functorch_zero.step.evaluate import EvalStep, eval_step
from functorch_zero.step.loss import Aux
from functorch_zero.step.program import PART, Part
from functorch_zero.step.state import State
from functorch_zero.step.train import train_step
from tests.compare import (
    Run,
    assert_close,
    assert_equal_updates,
    train,
    train_by_rank,
    train_sharded,
)
from tests.local import local_leaves
from tests.models import ZOO, Batch, even, split, uneven
from tests.modules import Net, seeded
from tests.tiers import crossed, thinned, tiers

LEVELS = (0, 1, 2, 3)


def build(name: str = "mlp", optimizer: Any = None, **options: Any) -> tuple[Any, Any, Any]:
    loss_fn, params, buffers = ZOO[name].build(**options)
    return train_step(loss_fn, optimizer or optim.adamw(0.01)), params, buffers


def batch_for(group: Any, name: str = "mlp", n: int = 12, number: int = 0) -> Batch:
    return split(ZOO[name].batches(number + 1, n)[number], even(n, group.size))[group.rank]


def equal_trees(a: Any, b: Any) -> bool:
    """Bit for bit, with the same structure."""
    assert optree.tree_structure(a) == optree.tree_structure(b)
    return all(torch.equal(x, y) for x, y in zip(local_leaves(a), local_leaves(b), strict=True))


@pytest.mark.parametrize("level", [None, *tiers([3], [0], [1, 2])])
@pytest.mark.parametrize("call", ["init", "step"])
def test_inference_mode_around_a_step_is_refused(level: int | None, call: str) -> None:
    """Nothing has a gradient in it, though the loss does depend on the params."""

    def run(group: Any) -> None:
        step, params, buffers = build("convnet")
        batch = batch_for(group, "convnet")
        if level is not None:
            step = shard(step, level=level, group=group)
        state = step.init(params, buffers)
        with (
            torch.inference_mode(),
            pytest.raises(StructureError, match=r"inference_mode\(\).* leave that mode"),
        ):
            # Of a first state that is made in it, one process can still evaluate
            step(step.init(params, buffers) if call == "init" else state, batch)

    run_ranks(run, 2)


# donation


@pytest.mark.parametrize("level", tiers([3], [2, 0], [1]))
def test_a_donated_state_says_which_step_took_it(level: int) -> None:
    def run(group: Any) -> None:
        step, params, buffers = build("convnet")
        sharded = shard(step, level=level, group=group)
        evaluate = shard(eval_step(lambda p, b, x: {"one": 1.0}), level=level, group=group)
        batch = batch_for(group, "convnet")
        first = sharded.init(params, buffers)
        second, _ = sharded(first, batch)
        sharded(second, batch)
        for use in (sharded, evaluate, lambda state, _: sharded.unshard(state)):
            with pytest.raises(DonatedError, match=r"state of step 1 was donated.*Remedy"):
                use(second, batch)
            with pytest.raises(DonatedError, match=r"state of step 0"):
                use(first.replace(seed=None), batch)

    run_ranks(run, 2)


def the_same(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf, tree)


# Made of a state before it is donated, and on its storage
AGAIN: dict[str, Callable[[Any], Any]] = {
    "another step number": lambda state: state.replace(step=torch.tensor(0)),
    "a tree_map": the_same,
    "a tree_map, another step number": lambda s: the_same(s).replace(step=torch.tensor(0)),
    "other params": lambda s: s.replace(params=the_same(s.params), step=torch.tensor(0)),
    "one other param": lambda s: s.replace(
        step=torch.tensor(0),
        params=tree_map(lambda p: p.clone() if p.ndim == 2 else p, s.params),
        opt_state=tree_map(torch.clone, s.opt_state),
    ),
}
RESTARTED = {
    "adamw": lambda: optim.adamw(0.01),
    "momentum alone": lambda: optim.chain(optim.trace(0.9), optim.scale(-0.01)),
    "no state": lambda: optim.scale(-0.01),
}


@pytest.mark.parametrize(("level", "again", "optimizer"), crossed(LEVELS, AGAIN, RESTARTED, n=3))
def test_storage_that_was_donated_is_refused_in_another_state(
    level: int, again: str, optimizer: str
) -> None:
    def run(group: Any) -> None:
        step, params, buffers = build("convnet", RESTARTED[optimizer]())
        sharded = shard(step, level=level, group=group)
        evaluate = shard(eval_step(lambda p, b, x: {"one": 1.0}), level=level, group=group)
        state, _ = sharded(sharded.init(params, buffers), batch_for(group, "convnet"))
        other = AGAIN[again](state)
        sharded(state, batch_for(group, "convnet"))
        for use in (sharded, evaluate, lambda state, _: sharded.unshard(state)):
            with pytest.raises(DonatedError, match=r"was donated.*Remedy"):
                use(other, batch_for(group, "convnet"))

    run_ranks(run, 2)


@pytest.mark.parametrize("level", tiers([3], [0, 1], [2]))
def test_a_donated_optimizer_state_is_refused_beside_other_params(level: int) -> None:
    """As put back to forget the moments."""

    def run(group: Any) -> None:
        step, params, buffers = build()
        sharded = shard(step, level=level, group=group)
        state = sharded.init(params, buffers)
        first = state.opt_state
        kept = tree_map(torch.clone, first)
        for _ in range(2):
            state, _ = sharded(state, batch_for(group))
        with pytest.raises(DonatedError, match="was donated"):
            sharded(state.replace(opt_state=first), batch_for(group))
        state, _ = sharded(state.replace(opt_state=kept), batch_for(group))
        assert int(state.step) == 3

    run_ranks(run, 2)


@pytest.mark.parametrize("level", thinned([3, 2, 1, 0]))
def test_a_donated_optimizer_state_is_refused_when_detached(level: int) -> None:
    """Detached counters are other objects, with the counters' storage."""

    def run(group: Any) -> None:
        step, params, buffers = build()
        sharded = shard(step, level=level, group=group)
        state = sharded.init(params, buffers)
        first = tree_map(Tensor.detach, state.opt_state)
        for _ in range(2):
            # Of the newest state nothing is taken
            state = state.replace(opt_state=tree_map(Tensor.detach, state.opt_state))
            state, _ = sharded(state, batch_for(group))
        with pytest.raises(DonatedError, match="was donated"):
            sharded(state.replace(opt_state=first), batch_for(group))

    run_ranks(run, 2)


@pytest.mark.parametrize("level", tiers([None, 3], [0, 1, 2]))
def test_step_and_seed_may_be_ints(level: int | None) -> None:
    def run(group: Any) -> State:
        step, params, buffers = build()
        made: Any = step if level is None else shard(step, level=level, group=group)
        batch = batch_for(group)
        state, _ = made(made.init(params, buffers).replace(step=3, seed=7), batch)
        tensors = made.init(params, buffers).replace(step=torch.tensor(3), seed=torch.tensor(7))
        assert equal_trees(state, made(tensors, batch)[0])
        assert int(state.step) == 4
        return state

    run_ranks(run, 1 if level is None else 2)


@pytest.mark.parametrize("level", tiers([1], [3, 0], [2]))
def test_a_schedule_starts_anew(level: int) -> None:
    """The last state may be given another step number, or leaves of its own, and goes on."""

    def run(group: Any) -> None:
        step, params, buffers = build(optimizer=optim.inject_hyperparams(optim.sgd)(0.1))
        sharded = shard(step, level=level, group=group)
        state = sharded.init(params, buffers)
        for k in range(3):
            state, _ = sharded(state.replace(step=torch.tensor(7)), batch_for(group))
            state, _ = sharded(the_same(state), batch_for(group))
            copy = tree_map(torch.clone, state)
            state, _ = sharded(state, batch_for(group))
            state, _ = sharded(copy.replace(step=torch.tensor(k)), batch_for(group))
            assert int(state.step) == k + 1

    run_ranks(run, 2)


@pytest.mark.parametrize("level", tiers([3], [2, 0], [1]))
def test_without_donation_the_old_state_stays(level: int) -> None:
    def run(group: Any) -> None:
        step, params, buffers = build("convnet")
        sharded = shard(step, level=level, group=group, donate=False)
        state = sharded.init(params, buffers)
        leaves = local_leaves(state)
        before = [(x._version, x.clone()) for x in leaves]
        batch = batch_for(group, "convnet")
        one, _ = sharded(state, batch)
        two, _ = sharded(state, batch)
        assert equal_trees(one, two)
        for x, (version, value) in zip(leaves, before, strict=True):
            assert x._version == version and torch.equal(x, value)

    run_ranks(run, 2)


def by_torch_save(state: Any) -> Any:
    torch.save(state, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "tree_map": lambda state: tree_map(torch.clone, state),
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
    "torch.save": by_torch_save,
    "deepcopy": deepcopy,
}


@pytest.mark.parametrize(("how", "level"), crossed(COPIES, LEVELS, quick=1))
def test_a_state_can_be_copied_in_any_way(how: str, level: int) -> None:
    """A copy is a state like any other, whatever became of the one that it was made of."""

    def run(group: Any) -> None:
        step, params, buffers = build("convnet")
        sharded = shard(step, level=level, group=group)
        state, _ = sharded(sharded.init(params, buffers), batch_for(group, "convnet"))
        copy = COPIES[how](state)
        first, _ = sharded(state, batch_for(group, "convnet", number=1))
        second, _ = sharded(copy, batch_for(group, "convnet", number=1))
        assert equal_trees(first, second)

    run_ranks(run, 2)


@pytest.mark.parametrize("level", tiers([1], [3, 0], [2]))
def test_donation_uses_the_old_storage(level: int) -> None:
    def run(group: Any) -> None:
        step, params, buffers = build()
        sharded = shard(step, level=level, group=group)
        state = sharded.init(params, buffers)
        places = [x.data_ptr() for x in local_leaves((state.params, state.opt_state)) if x.dim()]
        for number in range(3):
            state, _ = sharded(state, batch_for(group, number=number))
        after = [x.data_ptr() for x in local_leaves((state.params, state.opt_state)) if x.dim()]
        assert after == places
        assert all(
            not torch.equal(params[name].reshape(-1)[:1], p[:1]) or p.numel() == 0
            for name, p in sharded.unshard(state).params.items()
            if p.dim() == 1
        )

    run_ranks(run, 2)


@pytest.mark.parametrize("level", tiers([3], [2, 0], [1]))
def test_a_failed_step_takes_nothing(level: int) -> None:
    """The state is still good when the loss, or the optimizer's update, has raised."""
    step, params, buffers = build(optimizer=optim.sgd(0.1))

    def loss_fn(p: Any, b: Any, batch: Batch) -> Any:
        loss = step.loss_fn(p, b, batch)
        if batch["x"].isnan().any():
            raise ArithmeticError("bad batch")
        return loss

    sharded = shard(train_step(loss_fn, optim.sgd(0.1)), level=level, group=SingleRank())
    state = sharded.init(params, buffers)
    (batch,) = ZOO["mlp"].batches(1, 8)
    with pytest.raises(ArithmeticError):
        sharded(state, {**batch, "x": batch["x"] * float("nan")})
    new, _ = sharded(state, batch)
    expected = train(step, params, buffers, [batch])
    assert_equal_updates(
        expected._replace(metrics=[]), Run([expected.states[0], sharded.unshard(new)], [])
    )


# random numbers


def dropping(apply: Any) -> Callable[[Any, Any, Any], Tensor]:
    return lambda p, b, batch: (
        (apply(p, b, F.dropout(batch["x"], 0.5))[0] - batch["y"]).square().mean()
    )


def dropping_net() -> Net:
    """Dropout between two units."""
    forward = lambda net, x: net.b(net.drop(torch.tanh(net.a(x))))
    return Net(forward, a=nn.Linear(7, 5), drop=nn.Dropout(0.5), b=nn.Linear(5, 3))


@pytest.mark.parametrize("level", tiers([3], [0, 1], [2]))
def test_dropout_is_a_function_of_seed_step_and_rank(level: int) -> None:
    def make() -> Any:
        apply, params, buffers = seeded(lambda: functionalize(dropping_net().double()))
        return train_step(dropping(apply), optim.sgd(0.1)), params, buffers

    batches = ZOO["mlp"].batches(2, 12)
    same = {name: x[:6].repeat(2, 1) for name, x in batches[0].items()}
    expected = train_by_rank(*make(), batches, [6, 6])

    def run(group: Any) -> Any:
        before = torch.get_rng_state()
        got = train_sharded(group, *make(), batches, [6, 6], level=level)
        step, params, buffers = make()
        sharded = shard(step, level=level, group=group, donate=False)
        state = sharded.init(params, buffers)
        torch.manual_seed(group.rank)
        mine = torch.get_rng_state()
        one, metrics = sharded(state, split(same, [6, 6])[group.rank])
        torch.rand(group.rank + 3)
        two, _ = sharded(state, split(same, [6, 6])[group.rank])
        assert equal_trees(one, two), "replayed bit for bit"
        torch.set_rng_state(mine)
        sharded(state, split(same, [6, 6])[group.rank])
        assert torch.equal(torch.get_rng_state(), mine), "the global random state is as before"
        torch.set_rng_state(before)
        other, _ = sharded(state.replace(seed=torch.tensor(5)), split(same, [6, 6])[group.rank])
        assert not equal_trees(other.params, one.params)
        return got, metrics

    runs = run_ranks(run, 2)
    assert_equal_updates(expected, runs[0][0])
    step, params, buffers = make()
    whole = step.init(params, buffers)
    losses: list[Tensor] = []  # of each part

    def noted(grads: Any, outcome: Any) -> Any:
        losses.append(outcome.loss)
        return grads, outcome

    for rank, part in enumerate(split(same, [6, 6])):
        token = PART.set(Part(rank, noted))
        step(whole, part)
        PART.reset(token)
    assert losses[0] != losses[1], "ranks draw different numbers for equal batches"


@pytest.mark.parametrize("level", tiers([1], [3, 0], [2]))
def test_without_a_seed_the_global_random_state_is_used(level: int) -> None:
    def run(group: Any) -> None:
        apply, params, buffers = functionalize(dropping_net().double())
        sharded = shard(
            train_step(dropping(apply), optim.sgd(0.1)), level=level, group=group, donate=False
        )
        state = sharded.init(params, buffers, seed=None)
        batch = batch_for(group)
        torch.manual_seed(3 + group.rank)
        one, _ = sharded(state, batch)
        two, _ = sharded(state, batch)
        torch.manual_seed(3 + group.rank)
        again, _ = sharded(state, batch)
        assert equal_trees(one, again) and not equal_trees(one.params, two.params)

    torch.manual_seed(0)
    run_ranks(run, 2)


# gather and scatter


@pytest.mark.parametrize(
    ("name", "optimizer", "back"),
    crossed(["convnet", "scalars"], ["adamw", "adafactor", "muon"], [(0, 1), (1, 2), (3, 4)]),
)
def test_training_goes_on_at_another_level_and_world_size(
    name: str, optimizer: str, back: tuple[int, int]
) -> None:
    make = {"adamw": optim.adamw, "adafactor": optim.adafactor, "muon": optim.muon}[optimizer]
    case = ZOO[name]
    loss_fn, params, buffers = case.build(weighted=True)
    step = train_step(loss_fn, make(0.01))
    batches = case.batches(4, 12)
    level, ranks = back

    def first(group: Any) -> Any:
        sharded = shard(step, level=3, group=group)
        state = sharded.init(params, buffers)
        for batch in batches[:2]:
            state, _ = sharded(state, batch)
        return sharded.unshard(state)

    def then(group: Any) -> Any:
        sharded = shard(step, level=level, group=group)
        state = sharded.shard(whole[0])
        assert equal_trees(sharded.unshard(state), whole[0])
        for batch in batches[2:]:
            state, _ = sharded(state, batch)
        return sharded.unshard(state)

    whole = run_ranks(first, 3)
    assert all(equal_trees(whole[0], other) for other in whole[1:])
    end = run_ranks(then, ranks)
    # Each rank has had the same batch: BatchNorm's too
    expected = train(step, params, buffers, batches)
    states = [expected.states[0], expected.states[2], expected.states[4]]
    got = [expected.states[0], whole[0], end[0]]
    for want, have in zip(states, got, strict=True):
        for what in ("params", "buffers", "opt_state"):
            a, b = (optree.tree_leaves(getattr(s, what)) for s in (want, have))
            named = [{str(i): x.detach() for i, x in enumerate(leaves)} for leaves in (a, b)]
            assert_close(*named, 1e-11, what)
    whole_again, _ = step(end[0], batches[0])
    assert int(whole_again.step) == 5, "what gather gives is a state of the unsharded step"


def test_states_for_another_level_group_or_kind_are_refused() -> None:
    step, params, buffers = build()

    def run(group: Any) -> None:
        state = shard(step, level=1, group=group).init(params, buffers)
        other = shard(step, level=3, group=group)
        with pytest.raises(
            StructureError, match=r"another level.*expected level 3.*got level 1.*Remedy"
        ):
            other(state, batch_for(group))
        with pytest.raises(StructureError, match="sharded already"):
            other.shard(state)

    run_ranks(run, 1)


# evaluation


@pytest.mark.parametrize(("weighted", "level"), crossed([False, True], LEVELS))
def test_eval_steps(level: int, weighted: bool) -> None:
    case = ZOO["mlp"]
    loss_fn, params, buffers = case.build()
    (batch,) = case.batches(1, 12)

    def fn(params: Any, buffers: Any, batch: Batch) -> Any:
        loss, _ = loss_fn(params, buffers, batch)
        metrics = {
            "loss": loss,
            "rows": 1.0 * len(batch["x"]),
            "big": params["layers.0.weight"].abs().max(),
        }
        return Aux(metrics=metrics, weight=len(batch["x"])) if weighted else metrics

    step = train_step(loss_fn, optim.sgd(0.1))
    expected = eval_step(fn)(step.init(params, buffers), batch)
    sizes = uneven(12, 3) if weighted else even(12, 3)

    def run(group: Any) -> Any:
        state = shard(step, level=level, group=group).init(params, buffers)
        evaluate = shard(eval_step(fn), level=level, group=group)
        first = evaluate(state, split(batch, sizes)[group.rank])
        with torch.inference_mode():
            second = evaluate(state, split(batch, sizes)[group.rank])
        assert all(torch.equal(first[name], second[name]) for name in first)
        return first

    for got in run_ranks(run, 3):
        assert torch.allclose(got["loss"], expected["loss"], rtol=1e-12) and torch.equal(
            got["big"], expected["big"]
        )
        assert float(got["rows"]) == pytest.approx(
            sum(s * (s / 12 if weighted else 1 / 3) for s in sizes)
        )


# weights


@pytest.mark.parametrize(
    ("kind", "finite", "level"), crossed([int, torch.tensor], [True, False], LEVELS)
)
def test_a_rank_of_weight_zero_counts_for_nothing(kind: Any, finite: bool, level: int) -> None:
    """Its loss may be NaN, as the mean over no tokens is."""
    case = ZOO["mlp"]
    batches = case.batches(2, 12)
    loss_fn, params, buffers = case.build(weighted=True)
    first = [split(batch, [7, 5])[0] for batch in batches]
    expected = train(train_step(loss_fn, optim.sgd(0.1)), params, buffers, first)

    def run(group: Any) -> Run:
        def zero_on_one(p: Any, b: Any, batch: Batch) -> Any:
            loss, aux = loss_fn(p, b, batch)
            if group.rank == 1 and not finite:
                loss = loss * torch.full((), float("nan"))
            return loss, Aux(aux.buffers, aux.metrics, kind(7 if group.rank == 0 else 0))

        step = train_step(zero_on_one, optim.sgd(0.1))
        return train_sharded(group, step, params, buffers, batches, [7, 5], level=level)

    assert_equal_updates(expected, run_ranks(run, 2)[0])


@pytest.mark.parametrize(("accumulate", "level"), crossed([1, 2], LEVELS))
def test_when_all_weigh_nothing_nothing_moves(accumulate: int, level: int) -> None:
    """In one process, too."""

    def run(group: Any) -> None:
        loss_fn, params, buffers = ZOO["mlp"].build()

        def weightless(p: Any, b: Any, batch: Batch) -> Any:
            return loss_fn(p, b, batch)[0] * float("nan"), Aux(
                metrics={"a": float("nan")}, weight=0.0
            )

        step = train_step(weightless, optim.sgd(0.1), accumulate=accumulate)
        sharded = shard(step, level=level, group=group)
        one = sharded(sharded.init(params, buffers), batch_for(group))
        two = step(step.init(params, buffers), batch_for(group))
        for state, metrics in ((sharded.unshard(one[0]), one[1]), two):
            assert all(torch.equal(state.params[name], p) for name, p in params.items())
            assert metrics["loss"] == 0 and metrics["a"] == 0

    run_ranks(run, 2)


@pytest.mark.parametrize("level", tiers([3], [2, 0], [1]))
def test_weights_of_micro_batches(level: int) -> None:
    """Ranks, and micro-batches of a rank, of unequal weight, one of them of none."""
    case = ZOO["mlp"]
    batches = case.batches(2, 12)

    def step() -> Any:
        loss_fn, params, buffers = case.build()

        def weighted(p: Any, b: Any, batch: Batch) -> Any:
            output_of_none = len(batch["x"]) == 0
            loss = loss_fn(p, b, batch)[0]
            assert output_of_none == bool(loss.isnan())
            return loss, Aux(metrics={"loss_too": loss}, weight=len(batch["x"]))

        return weighted, params, buffers

    weighted, params, buffers = step()
    expected = train(train_step(weighted, optim.sgd(0.1)), params, buffers, batches)
    sizes = [7, 5, 0]

    def run(group: Any) -> Run:
        own, params, buffers = step()
        return train_sharded(
            group,
            train_step(own, optim.sgd(0.1), accumulate=3),
            params,
            buffers,
            batches,
            sizes,
            level=level,
        )

    assert_equal_updates(expected, run_ranks(run, 3)[0])


def test_what_shard_takes() -> None:
    step, _, _ = build()
    with pytest.raises(TypeError, match="eval_step or program_step made, got function"):
        shard(lambda state, batch: state, level=1, group=SingleRank())  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"level must be one of 0 \('replicated'\).*got 4"):
        shard(step, level=4, group=SingleRank())
    with pytest.raises(ValueError, match="a rule inside of a rule, at 'net'"):
        shard(step, level={"net": {"": 3}}, group=SingleRank())  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="buffers must be one of"):
        shard(step, level=1, group=SingleRank(), sync_buffers="sum")  # type: ignore[call-overload]
    names = {"replicated": 0, "oss": 1, "sdp": 2, "fsdp": 3}
    for name, level in names.items():
        made = shard(step, level=name, group=SingleRank())
        assert isinstance(made, ShardedStep) and made.level == level and made.group.size == 1
    assert isinstance(eval_step(lambda p, b, x: {}), EvalStep)


@pytest.mark.parametrize("level", tiers([3], [2, 1, 0]))
@pytest.mark.parametrize(
    ("name", "ranks", "optimizer"),
    tiers(
        [("mlp", 4, "lamb")],
        [("scalars", 7, "adamw"), ("scalars", 7, "lamb"), ("mlp", 4, "adamw")],
        rows=True,
    ),
)
def test_padding_stays_zero(name: str, ranks: int, level: int, optimizer: str) -> None:
    """Z1. Also where a rank has nothing but padding."""

    def run(group: Any) -> list[int]:
        loss_fn, params, buffers = ZOO[name].build(weighted=True)
        sharded = shard(
            train_step(loss_fn, getattr(optim, optimizer)(0.01)), level=level, group=group
        )
        state = sharded.init(params, buffers)
        for batch in ZOO[name].batches(3, 28):
            state, _ = sharded(state, split(batch, even(28, ranks))[group.rank])
        leaves = [x for x in local_leaves((state.params, state.opt_state)) if isinstance(x, Tensor)]
        flats = {id(x._base): x._base for x in leaves if x._base is not None and x._base.dim() == 1}
        padding = 0
        for key, flat in flats.items():
            used = torch.zeros(flat.numel(), dtype=torch.bool)
            for x in leaves:
                if id(x._base) == key and x.numel():
                    used.as_strided(
                        x.shape, x.stride(), x.storage_offset() - flat.storage_offset()
                    ).fill_(True)
            assert not flat.detach()[~used].any()
            padding += int((~used).sum())
        return [padding, sum(x.numel() for x in local_leaves(state.params))]

    results = run_ranks(run, ranks)
    assert sum(padding for padding, _ in results)
    if name == "scalars" and level == 3:
        assert not all(held for _, held in results)  # some rank has padding only
