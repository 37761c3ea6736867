"""Levels 1 and 2 where leaves are gathered in fewer bytes than they are stored in: masters in
pieces, and whole flats as they were published, which nobody takes for the params that are now."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from optree import tree_map, tree_map_with_path
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import checkpoint, optim
from functorch_zero.compress import Blocks
from functorch_zero.errors import GroupError, NonFiniteError, StructureError
from functorch_zero.groups import CountingGroup, counted, launch, run_ranks
from functorch_zero.places import File
from functorch_zero.testing import (
    Equality,
    assert_equal_updates,
    assert_equal_values,
    assert_sharded_equals_unsharded,
)
from tests.local import part, published
from tests.modules import seeded
from tests.tiers import crossed, thinned, tiers

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
UNITS = 3
# Stored in float64: gathers in float32, so that sums in another order change no rounded leaf
POLICIES = {
    "gather": fz.Precision(gather=F32),
    "codec": fz.Precision(gather=Blocks(torch.int8, 64)),
    "mixed": {"0": fz.Precision(gather=F32), "1": fz.Precision(gather=Blocks(torch.int8, 48))},
}
LEVELS: tuple[Any, ...] = (1, 2, {"": 2, "0": 3, "1.weight": 1, "2.bias": 0})


def built(
    policy: Any = POLICIES["gather"], optimizer: Any = None, dtype: Any = F64, **options: Any
) -> Any:
    """A step, params whose leaves are cut on up to three ranks, and batches."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(UNITS))).to(dtype)
        xs = torch.randn(6, 12, 24, dtype=dtype)
    apply, params, _ = fz.functionalize(model, units=nn.Linear, precision=policy)

    def loss_fn(params: Any, buffers: Any, x: Tensor) -> Tensor:
        return (apply(params, buffers, x)[0] - x.sin()).square().mean()

    return fz.train_step(loss_fn, optimizer or optim.sgd(0.5), **options), params, [*xs]


@pytest.mark.parametrize(("level", "policy", "ranks"), crossed(LEVELS, POLICIES, (1, 2, 3)))
def test_as_the_unsharded_step(level: Any, policy: str, ranks: int) -> None:
    options: list[dict[str, Any]] = [{}, {"donate": False}, {"overlap": "time"}]
    step, params, batches = built(POLICIES[policy], optim.sgd(0.5, momentum=0.9))
    for chosen in options[ranks - 1 :: 2]:
        assert_sharded_equals_unsharded(
            step, params, {}, batches[:3], levels=(level,), ranks=(ranks,), **chosen
        )


@pytest.mark.parametrize(
    "options",
    thinned(
        [
            {"levels": (2,), "optimizer": optim.muon(0.01), "ranks": (2,)},
            {"levels": (1, 2), "ranks": (6,), "shard_size": 3, "state_axes": "both"},
            {"levels": (1,), "reduce_bucket": 2**20},
            {"levels": (2,), "accumulate": 2, "reduce_gradients": "once"},
            {"levels": (1, 2), "accumulate": 2, "reshard_after_forward": False},
            {"levels": (2,), "ranks": (4,), "shard_size": 2, "same_data": "replicate"},
            {"levels": (1, 2), "ranks": (3,), "shard_size": 1},
            {"levels": (1,), "optimizer": optim.lamb(0.01)},
        ]
    ),
    ids=str,
)
def test_beside_other_options(options: Any) -> None:
    options = {"ranks": (3,), **options}
    step, params, batches = built(
        optimizer=options.pop("optimizer", None), accumulate=options.pop("accumulate", 1)
    )
    assert_sharded_equals_unsharded(step, params, {}, batches[:2], **options)


def test_halves_to_the_bit_what_they_were() -> None:
    """Leaves that are rounded where they are used, or when they are published: the same numbers."""
    policies = [fz.Precision(compute=BF16), fz.Precision(compute=BF16, gather=F32)]

    def run(group: Any) -> None:
        found = []
        for policy in policies:
            step, params, batches = built(policy, optim.adamw(0.1), F32)
            sharded = fz.shard(step, level=2, group=group)
            state = sharded.init(params)
            for x in batches:
                state, _ = sharded(state, part(x, group))
            assert bool(published(state)) == (policy is policies[0])
            found.append(dict(sharded.unshard(state).params))
        assert_equal_values(*found, grade=Equality("bitwise"))

    run_ranks(run, 3)


# Bytes


def train(group: Any, step: Any, params: Any, x: Any, steps: int = 2, **options: Any) -> Any:
    sharded = fz.shard(step, group=group, **options)
    state = sharded.init(params)
    for _ in range(steps):
        group.reset()
        state, _ = sharded(state, x)
    return sharded, state


def sent(group: Any) -> float:
    """Without metrics and words."""
    return float(group.sent_bytes() - group.sent_bytes("all_reduce"))


@pytest.mark.parametrize(("level", "accumulate"), crossed((1, 2), (1, 4)))
def test_bytes_with_halves(level: int, accumulate: int) -> None:
    """In units of S: 0.5 to publish, and 1 for each sum; of the plan, the same. A rank holds S/N of
    masters and S/2."""
    whole = UNITS * (24 * 24 + 128) * 4  # padding included: a bias takes 256 bytes of bfloat16
    step, params, xs = built(fz.Precision(compute=BF16), dtype=F32, accumulate=accumulate)
    group = CountingGroup(4)
    sharded, state = train(group, step, params, xs[0], level=level)
    sums = 1 if level == 1 else accumulate
    assert sent(group) == (0.5 + sums) * whole * 3 / 4
    assert (group.num_calls("all_gather"), group.num_calls("all_to_all")) == (UNITS, 0)

    planned = fz.plan(params, step, level=level, ranks=4)
    assert planned.sent_bytes == group.sent_bytes()
    described = fz.describe(sharded, state)
    rows = [row for row in described.rows if row.leaves]
    assert planned.params == sum(row.nbytes for row in rows) == whole / 4 + whole / 2
    assert {row.where for row in rows} == {"1/4, whole as bfloat16"}


def test_bytes_with_a_codec() -> None:
    """Of int8 by 64 in float32: 1/4 + 1/64 of the bytes, as they were sent."""
    step, params, xs = built(fz.Precision(gather=Blocks(torch.int8, 64)), dtype=F32)
    group = CountingGroup(4)
    sharded, state = train(group, step, params, xs[0], level=2)
    numel = UNITS * 768  # 576 + 24, at 64, padded to four pieces of whole blocks
    assert group.sent_bytes("all_gather") == numel * (1 + 4 / 64) * 3 / 4
    assert sum(x.nbytes for x in published(state)) == numel * (1 + 4 / 64)
    assert "publish int8 by 64" in str(fz.describe(sharded, state))
    assert "publish int8 by 64" in str(fz.plan(params, step, level=2, ranks=4))


def test_without_a_policy_nothing_is_published() -> None:
    for policy in (None, fz.Precision(reduce=BF16), fz.Precision(compute=BF16, gather=F32)):
        step, params, xs = built(policy, dtype=F32)
        _, state = train(CountingGroup(4), step, params, xs[0], level=2)
        assert not published(state) and state.params["0.weight"].is_whole


@pytest.mark.parametrize("donate", [True, False])
def test_old_flats_are_let_go_of_before_new_ones_are_made(donate: bool) -> None:
    """So that a step that donates has them once."""
    alive = []

    def update(updates: Any, state: Any, params: Any, across: Any) -> Any:
        alive.append(sum(ref() is not None for ref in old))
        return tree_map(lambda u: -0.1 * u, updates), state

    optimizer = optim.pointwise(lambda params: (), update)
    step, params, xs = built(optimizer=optimizer)
    sharded = fz.shard(step, level=2, group=CountingGroup(4), donate=donate)
    old: list[Any] = []
    state = sharded.init(params)
    old = [weakref.ref(flat.untyped_storage()) for flat in published(state)]
    alive.clear()
    sharded(state, xs[0])
    assert alive == [0 if donate else UNITS]


# Between steps

Script = Callable[[Any, Any, Callable[[int], Any]], Iterator[Any]]


@torch.no_grad()
def scaled(state: Any) -> Any:
    return state.replace(params=tree_map(lambda p: p * 0.5, state.params))


def averages(step: Any, state: Any, batch: Any) -> Iterator[Any]:
    """An average by `tree_map`, which takes the params' place at the end."""
    mean = tree_map(torch.clone, state.params)
    for k in range(3):
        state, _ = step(state, batch(k))
        with torch.no_grad():
            mean = tree_map(lambda m, p: 0.7 * m + 0.3 * p, mean, state.params)
        yield state
    state = state.replace(params=mean)
    yield state
    yield step(state, batch(3))[0]


def assigns(step: Any, state: Any, batch: Any) -> Iterator[Any]:
    state, _ = step(state, batch(0))
    yield state
    for k in (1, 2):
        state = scaled(state)
        yield state
        state, _ = step(state, batch(k))
        yield state


def some_leaves(step: Any, state: Any, batch: Any) -> Iterator[Any]:
    state, _ = step(state, batch(0))

    def change(path: Any, leaf: Any) -> Any:
        return leaf.clamp(-0.1, 0.1) if "1.weight" in path else leaf

    with torch.no_grad():
        state = state.replace(params=tree_map_with_path(change, state.params))
    yield state
    yield step(state, batch(1))[0]


def writing(write: Callable[[Any], Any]) -> Script:
    def script(step: Any, state: Any, batch: Any) -> Iterator[Any]:
        for k in range(2):
            state, _ = step(state, batch(k))
            yield state
            with torch.no_grad():
                write(state.params)
            yield state
        yield step(state, batch(2))[0]

    return script


def in_inference_mode(params: Any) -> None:
    with torch.inference_mode():
        params["0.weight"].mul_(0.5)


def kept_leaf(params: Any) -> None:
    """By an alias that was made before."""
    alias = params["1.weight"].detach()
    assert params["1.bias"] is not None
    alias.copy_(alias * 0.5)


WRITES: dict[str, Callable[[Any], Any]] = {
    "mul_": lambda params: params["1.weight"].mul_(0.5),
    "a bias": lambda params: params["2.bias"].add_(1.0),
    "foreach": lambda params: torch._foreach_mul_([*params.values()], 0.5),
    "data": lambda params: params["0.weight"].data.mul_(0.5),
    "alias": kept_leaf,
    "fill": lambda params: params["1.weight"].fill_(0.25),
    "zero and add": lambda params: params["1.weight"].zero_().add_(0.125),
    "where": lambda params: params["0.weight"].copy_(
        torch.where(params["0.weight"] > 0, params["0.weight"], 0.25)
    ),
    "inference": in_inference_mode,
}
SCRIPTS: dict[str, Script] = {
    "averages": averages,
    "assigns": assigns,
    "some leaves": some_leaves,
    **{name: writing(write) for name, write in WRITES.items()},
}


@pytest.mark.parametrize(
    ("name", "donate", "level", "ranks"), crossed(SCRIPTS, (True, False), (1, 2), (2, 3), quick=3)
)
def test_changes_between_steps(name: str, donate: bool, level: int, ranks: int) -> None:
    """Losses see params as they are, and not as they were published."""
    step, params, batches = built()
    expected = [
        dict(tree_map(torch.clone, state.params))
        for state in SCRIPTS[name](step, step.init(params), batches.__getitem__)
    ]

    def run(group: Any) -> None:
        sharded = fz.shard(step, level=level, group=group, donate=donate)

        def batch(k: int) -> Any:
            return part(batches[k], group)

        script = SCRIPTS[name](sharded, sharded.init(params), batch)
        for state, new in zip(script, expected, strict=True):
            assert_equal_updates(dict(params), new, dict(sharded.unshard(state).params))

    run_ranks(run, ranks)


@pytest.mark.parametrize("level", thinned([2, 1]))
def test_reading_on_one_rank_changes_nothing(level: int) -> None:
    """The next step sends what it would have sent."""
    step, params, batches = built()

    def run(group: Any) -> list[int]:
        group = counted(group)
        sharded = fz.shard(step, level=level, group=group)
        state, calls = sharded.init(params), []
        for x in batches[:3]:
            if group.rank == 0:
                assert "Piece" in repr(state.params["0.weight"])
                tree_map(torch.clone, state)
                fz.describe(sharded, state)
                pickle.dumps(state)
            group.reset()
            state, _ = sharded(state, part(x, group))
            calls.append(group.num_calls("all_gather"))
        return calls

    assert run_ranks(run, 2) == [[UNITS] * 3] * 2


def change_on_one_rank(group: Any, first: int) -> str:
    step, params, batches = built()
    sharded = fz.shard(step, level=1, group=group)
    state = sharded.init(params)
    for k in range(3):
        if k == first and group.rank == 1:
            state = scaled(state)
        try:
            state, _ = sharded(state, part(batches[k], group))
        except GroupError as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize("first", [0, 1])
def test_a_change_on_one_rank(first: int) -> None:
    """Its gathers would meet the others' reductions."""
    for text in run_ranks(partial(change_on_one_rank, first=first), 2):
        assert "params" in text and "between steps" in text
        assert "publish 0[float64" in text


@pytest.mark.thorough
def test_a_change_on_one_process() -> None:
    for text in launch(change_on_one_process, 2, start_method="fork", timeout=60):
        assert "between steps" in text


def change_on_one_process() -> str:
    from functorch_zero.sharded.publish import SamePublished

    SamePublished.patience = 1.0
    return change_on_one_rank(fz.ProcessGroup(), 1)


def test_a_change_now_and_then_costs_a_gather() -> None:
    """Each gathers all units once more, and no step goes unit by unit."""
    step, params, batches = built()

    def run(group: Any) -> list[int]:
        group = counted(group)
        sharded = fz.shard(step, level=2, group=group)
        state, calls = sharded.init(params), []
        for k in range(6):
            state = scaled(state) if k in (2, 3) else state
            group.reset()
            state, _ = sharded(state, part(batches[k], group))
            calls.append(group.num_calls("all_gather"))
        return calls

    assert run_ranks(run, 2)[0] == [3, 3, 6, 6, 3, 3]


@pytest.mark.parametrize("way", ["pickle", "deepcopy", "tree_map"])
def test_copies_have_none(way: str) -> None:
    step, params, _ = built()
    sharded = fz.shard(step, level=2, group=CountingGroup(4))
    state = sharded.init(params)
    assert len(published(state)) == UNITS
    copies = {
        "pickle": lambda: pickle.loads(pickle.dumps(state)),
        "deepcopy": lambda: copy.deepcopy(state),
        "tree_map": lambda: tree_map(torch.clone, state),
    }
    assert not published(copies[way]())


@pytest.mark.parametrize("donate", thinned([True, False]))
def test_a_skipped_step(donate: bool) -> None:
    """Nothing is sent to publish what has not changed, and the next step goes on."""
    step, params, batches = built(nonfinite="skip")
    spoilt = [batches[0], batches[1] * torch.inf, batches[2]]
    whole = step.init(params)
    for x in spoilt:
        whole, _ = step(whole, x)

    def run(group: Any) -> list[int]:
        group = counted(group)
        sharded = fz.shard(step, level=2, group=group, donate=donate)
        state, calls = sharded.init(params), []
        for x in spoilt:
            group.reset()
            state, _ = sharded(state, part(x, group))
            calls.append(group.num_calls("all_gather"))
        got = dict(sharded.unshard(state).params)
        assert_equal_updates(dict(params), dict(whole.params), got)
        return calls

    assert run_ranks(run, 3) == [[UNITS, 0, UNITS]] * 3


def test_a_failed_step_leaves_the_state() -> None:
    step, params, batches = built(nonfinite="raise")
    whole, _ = step(step.init(params), batches[0])

    def run(group: Any) -> None:
        sharded = fz.shard(step, level=2, group=group)
        state = sharded.init(params)
        with pytest.raises(NonFiniteError):
            sharded(state, part(batches[0] * torch.nan, group))
        state, _ = sharded(state, part(batches[0], group))
        got = dict(sharded.unshard(state).params)
        assert_equal_updates(dict(params), dict(whole.params), got)

    run_ranks(run, 2)


def test_a_loss_that_writes_to_what_was_published() -> None:
    """It is refused, and the step that is tried again doesn't see it. In bfloat16 losses use the
    published flats themselves."""
    step, params, batches = built(fz.Precision(compute=BF16), dtype=F32)

    def run(group: Any) -> None:
        def after(flags: list[bool]) -> Any:
            """A step's params; the loss writes where a flag, taken from the end, says so."""

            def loss(params: Any, buffers: Any, x: Any) -> Any:
                if flags.pop():
                    with torch.no_grad():
                        fz.unshard(params["1.weight"]).mul_(2)
                return step.loss_fn(params, buffers, x)

            sharded = fz.shard(fz.train_step(loss, optim.sgd(0.5)), level=2, group=group)
            state = sharded.init(params)
            if len(flags) > 1:
                with pytest.raises(StructureError, match="in place"):
                    sharded(state, part(batches[0], group))
                group.rejoin()
            return dict(sharded.unshard(sharded(state, part(batches[0], group))[0]).params)

        assert_equal_values(after([False]), after([False, True]), grade=Equality("bitwise"))

    run_ranks(run, 2)


# Whoever must see masters


@pytest.mark.parametrize("level", thinned([2, 1], 2))
def test_pieces_and_whole_copies_are_of_masters(level: int) -> None:
    step, params, batches = built()

    def run(group: Any) -> None:
        sharded = fz.shard(step, level=level, group=group)
        state = sharded.init(params)
        state, _ = sharded(state, part(batches[0], group))
        whole = sharded.unshard(state).params
        assert not torch.equal(whole["0.weight"], whole["0.weight"].float().double())
        again = dict(fz.unshard(fz.pieces(state.params)))
        assert_equal_values(dict(whole), again, grade=Equality("bitwise"))
        assert_equal_values(dict(whole), dict(fz.unshard(state.params)), grade=Equality("bitwise"))
        assert not state.params["0.weight"].is_whole

    run_ranks(run, 2)


ENDS = [(1, 2), (2, 2), (2, 3), (3, 2), (0, 3)]


@pytest.mark.parametrize(("before", "after"), crossed(ENDS, ENDS, n=5, quick=1))
def test_checkpoints(before: Any, after: Any, tmp_path: Path) -> None:
    """From one level and number of ranks to others, masters to the bit; and the run goes on."""
    step, params, batches = built(optimizer=optim.adamw(0.01))

    def save(group: Any) -> Any:
        sharded = fz.shard(step, level=before[0], group=group)
        state = sharded.init(params)
        for x in batches[:2]:
            state, _ = sharded(state, part(x, group))
        checkpoint.save(tmp_path, sharded, state)
        saved = dict(sharded.unshard(state).params)
        return saved, dict(sharded.unshard(sharded(state, part(batches[2], group))[0]).params)

    saved, expected = run_ranks(save, before[1])[0]

    def load(group: Any) -> None:
        sharded = fz.shard(step, level=after[0], group=group)
        # The state of another run, which the load writes over
        state, _ = sharded(sharded.init(params), part(batches[4], group))
        state = checkpoint.load(tmp_path, sharded, like=state).state
        assert_equal_values(saved, dict(sharded.unshard(state).params), grade=Equality("bitwise"))
        state, _ = sharded(state, part(batches[2], group))
        assert_equal_updates(saved, expected, dict(sharded.unshard(state).params))

    run_ranks(load, after[1])


def test_a_load_that_writes_over_params(tmp_path: Path) -> None:
    """The step computes with the file's numbers, and the old tree is used up."""
    step, params, batches = built()

    def run(group: Any) -> None:
        sharded = fz.shard(step, level=2, group=group)
        state = sharded.init(params)
        for x in batches[:2]:
            state, _ = sharded(state, part(x, group))
        checkpoint.save(tmp_path, sharded, state)
        saved = dict(sharded.unshard(state).params)
        start = step.init(tree_map(lambda p: p.detach().clone().requires_grad_(), saved))
        expected, _ = step(start, batches[3])

        state, _ = sharded(state, part(batches[2], group))
        old = state.params
        new = checkpoint.load(tmp_path, sharded, like=state).state.params
        with pytest.raises(fz.errors.DonatedError):
            sharded(sharded.init(params).replace(params=old), part(batches[3], group))
        state, _ = sharded(sharded.init(params).replace(params=new), part(batches[3], group))
        got = dict(sharded.unshard(state).params)
        assert_equal_updates(saved, dict(expected.params), got, old_got=saved)

    run_ranks(run, 2)


def test_frozen_leaves_are_published_once() -> None:
    """Also those of a file, and those that have been changed."""
    step, params, batches = built()
    chosen = fz.train_step(
        step.loss_fn, optim.sgd(0.5), trainable=lambda path, leaf: path[0] == "1"
    )
    whole, expected = chosen.init(params), []
    for k in range(4):
        whole = scaled(whole) if k == 2 else whole
        before = dict(whole.params)
        whole, _ = chosen(whole, batches[k])
        expected.append((before, dict(whole.params)))

    def run(group: Any) -> list[int]:
        group = counted(group)
        sharded = fz.shard(chosen, level=2, group=group)
        state, calls = sharded.init(params), []
        for k in range(4):
            state = scaled(state) if k == 2 else state
            group.reset()
            state, _ = sharded(state, part(batches[k], group))
            calls.append(group.num_calls("all_gather"))
            got = dict(sharded.unshard(state).params)
            before, after = expected[k]
            trained = {path: path.startswith("1.") for path in after}
            assert_equal_values(before["0.weight"], got["0.weight"])
            assert_equal_updates(before, after, got, trained=trained, old_got=before)
        return calls

    assert run_ranks(run, 2)[0] == [1, 1, UNITS + 1, 1]


def test_refit() -> None:
    """To a model with one layer more; elements that change ranks are masters."""
    step, params, batches = built(optimizer=optim.adamw(0.01))
    layers = lambda: nn.Sequential(*(nn.Linear(24, 24) for _ in range(UNITS + 1)))
    larger = seeded(layers, 1).double()
    apply, more, _ = fz.functionalize(larger, units=nn.Linear, precision=POLICIES["gather"])

    def loss_fn(params: Any, buffers: Any, x: Any) -> Any:
        return (apply(params, buffers, x)[0] - x.sin()).square().mean()

    grown = fz.train_step(loss_fn, optim.adamw(0.01))
    state, _ = step(step.init(params), batches[0])
    start = grown.refit(state, more)
    expected, _ = grown(start, batches[1])

    def run(group: Any) -> None:
        first, second = (fz.shard(s, level=2, group=group) for s in (step, grown))
        state, _ = first(first.init(params), part(batches[0], group))
        state = second.refit(state, more)
        assert_equal_values(dict(start.params), dict(second.unshard(state).params))
        state, _ = second(state, part(batches[1], group))
        got = dict(second.unshard(state).params)
        assert_equal_updates(dict(start.params), dict(expected.params), got)

    run_ranks(run, 3)


@pytest.mark.parametrize("level", thinned([1, 2], 2))
def test_evaluations(level: int) -> None:
    """Between steps, of params as they are, changed ones too, and of an average."""
    step, params, batches = built(optimizer=optim.params_ema(optim.sgd(0.5), 0.5))

    def fn(params: Any, buffers: Any, x: Any) -> Any:
        return {"loss": step.loss_fn(params, buffers, x)}

    evaluations = [fz.eval_step(fn), fz.eval_step(fn, params=optim.ema_params)]

    def script(run: Any, tests: Any, state: Any, batch: Any) -> Iterator[Any]:
        for k in range(2):
            state, _ = run(state, batch(k))
            for test in tests:
                yield test(state, batch(k))
            state = scaled(state)
            for test in tests:
                yield test(state, batch(k))

    expected = [*script(step, evaluations, step.init(params), batches.__getitem__)]

    def on_rank(group: Any) -> None:
        sharded = fz.shard(step, level=level, group=group)
        tests = [fz.shard(test, level=level, group=group) for test in evaluations]
        got = script(sharded, tests, sharded.init(params), lambda k: part(batches[k], group))
        assert_equal_values(expected, [*got])

    run_ranks(on_rank, 2)


# Programs


def averaging(optimizer: Any, *, writes: bool = False) -> Any:
    """A program whose teacher is an average of its params, made by `tree_map`."""
    step, params, batches = built(optimizer=optimizer)

    def loss(net: Any, mean: Any, x: Tensor) -> Tensor:
        return step.loss_fn(net, {}, x) + 0.1 * step.loss_fn(mean, {}, x) * net["0.bias"].sum()

    def program(value: Any, x: Tensor) -> Any:
        net, mean, state = value
        found, grads = fz.value_and_grad(loss)(net, mean, x)
        if writes:
            net = tree_map(lambda p: (0.9 * p.detach()).requires_grad_(), net)
        net, state = optimizer.apply(grads, state, net)
        # Of the new params, in the same step
        again, _ = fz.value_and_grad(loss)(net, mean, x)
        mean = tree_map(lambda m, p: 0.5 * (m + p), mean, net)
        return (net, mean, state), {"loss": found, "again": again}

    def init(net: Any) -> Any:
        return net, tree_map(lambda p: 0.5 * p.detach(), net), optimizer.init(net)

    return fz.program_step(program, init=init), params, batches


@pytest.mark.parametrize(
    ("level", "donate", "optimizer", "writes"),
    crossed((1, 2), (True, False), ("adamw", "lamb"), (False, True)),
)
def test_programs(level: int, donate: bool, optimizer: str, writes: bool) -> None:
    made = {"adamw": optim.adamw(0.01), "lamb": optim.lamb(0.01)}[optimizer]
    program, params, batches = averaging(made, writes=writes)
    assert_sharded_equals_unsharded(
        program, params, batches[:3], levels=(level,), ranks=(3,), donate=donate
    )


@pytest.mark.thorough
def test_a_program_publishes_once_per_update() -> None:
    """The teacher, which `tree_map` makes, once per step; of the plan, the same."""
    program, params, batches = averaging(optim.adamw(0.01))
    group = CountingGroup(2)
    sharded = fz.shard(program, level=2, group=group, donate=True)
    state = sharded.init(params)
    for x in batches[:3]:
        group.reset()
        state, _ = sharded(state, x)
    assert group.num_calls("all_gather") == UNITS + UNITS
    planned = fz.plan(params, program, level=2, ranks=2, batch=batches[0], donate=True)
    assert len([c for c in planned.collectives if c.kind == "all_gather"]) == 2 * UNITS
    held = sum(row.nbytes for row in fz.describe(sharded, state).rows if row.leaves)
    # Of a first state, whose teacher is a part of it, and has whole leaves nowhere
    assert planned.params == held


@pytest.mark.parametrize("evaluates", thinned([True, False]))
def test_reading_a_teacher_on_one_rank_changes_nothing(evaluates: bool) -> None:
    """What is gathered for a tree is here for it on every rank when it is used again."""
    program, params, batches = averaging(optim.adamw(0.01))
    evaluation = fz.eval_step(lambda value, x: {"of mean": value[1]["0.weight"].sum() + x.sum()})

    def run(group: Any) -> list[int]:
        group = counted(group)
        sharded, test = (fz.shard(s, level=2, group=group) for s in (program, evaluation))
        state, calls = sharded(sharded.init(params), part(batches[0], group))[0], []
        for x in batches[1:4]:
            if group.rank == 0:
                assert "Piece" in repr(state.value[1]["0.weight"]), "the teacher's"
            for step in (test, sharded) if evaluates else (sharded, sharded):
                group.reset()
                found = step(state, part(x, group))
                calls.append(group.num_calls("all_gather"))
            state = found[0]
        return calls

    gathers = [UNITS, UNITS] if evaluates else [2 * UNITS, UNITS]
    assert run_ranks(run, 2) == [3 * gathers] * 2


@pytest.mark.parametrize("donate", tiers([True], [False]))
def test_in_files(donate: bool, tmp_path: Path) -> None:
    """Published flats lie where the params do."""
    step, params, batches = built(optimizer=optim.adamw(0.01))

    def run(group: Any) -> None:
        place, wholes = File(tmp_path), []
        for own in (None, {"params": place}):
            sharded = fz.shard(step, level=2, group=group, place=own, donate=donate)
            state = sharded.init(params)
            for k in range(4):
                state = scaled(state) if k == 2 else state
                flats = published(state)
                assert len(flats) == (0 if k == 2 else UNITS)
                assert own is None or all(map(place.holds, flats))
                state, _ = sharded(state, part(batches[k], group))
            wholes.append(dict(sharded.unshard(state).params))
        assert_equal_values(*wholes, grade=Equality("bitwise"))

    run_ranks(run, 2)


def test_two_steps_share_params() -> None:
    """Each writes to them, and the other one sees it."""
    step, params, batches = built()
    other = fz.train_step(step.loss_fn, optim.adamw(0.01))

    def script(one: Any, two: Any, batch: Any) -> Iterator[Any]:
        first, second = one.init(params), two.init(params)
        for k in range(0, 4, 2):
            first, _ = one(first, batch(k))
            second, _ = two(second.replace(params=first.params), batch(k + 1))
            first = first.replace(params=second.params)
            yield first

    expected = [dict(s.params) for s in script(step, other, batches.__getitem__)]

    def run(group: Any) -> None:
        one, two = (fz.shard(s, level=2, group=group, donate=False) for s in (step, other))
        states = script(one, two, lambda k: part(batches[k], group))
        for state, new in zip(states, expected, strict=True):
            assert_equal_updates(dict(params), new, dict(one.unshard(state).params))

    run_ranks(run, 2)
