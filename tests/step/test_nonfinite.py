"""Numbers that are not finite: decided by all ranks together, counted; the loss scale's history is
one process's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import functorch_zero as fz
from functorch_zero import checkpoint, optim
from functorch_zero.errors import MismatchError, NonFiniteError, StructureError
from functorch_zero.groups import ProcessGroup, counted, launch, run_ranks
from functorch_zero.precision import Precision
from functorch_zero.sharded.api import shard
from functorch_zero.step.nonfinite import LossScale, NonFinitePolicy, NonFiniteState, all_finite
from functorch_zero.step.state import State
from functorch_zero.step.train import train_step
from functorch_zero.testing import Equality, assert_sharded_equals_unsharded, models
from tests.local import local_leaves
from tests.modules import Net
from tests.tiers import THOROUGH, crossed, drawn, thinned, tiers

LEVELS = (0, 1, 2, 3)
F16 = torch.float16
BAD = {"nan": torch.nan, "inf": torch.inf}


def build(**options: Any) -> tuple[Any, Any, Any]:
    """An MLP with a buffer that counts calls, whose loss adds a row's `bad` to what it sees."""

    def forward(net: Any, x: Tensor) -> Any:
        net.calls = net.calls + 1
        return net.inner(x)

    calls = torch.zeros((), dtype=torch.float64)

    apply, params, buffers = fz.functionalize(
        Net(forward, inner=models.mlp().module(), calls=calls)
    )

    def loss_fn(params: Any, buffers: Any, batch: Any) -> tuple[Tensor, fz.Aux]:
        output, new = apply(params, buffers, batch["x"])
        return ((output - batch["y"]) * (1 + batch["bad"])).square().mean(), fz.Aux(buffers=new)

    return train_step(loss_fn, optim.adamw(0.1), **options), params, buffers


def batch_of(bad: float = 0.0, rows: int = 6) -> dict[str, Tensor]:
    x, y = (models.mlp().batches(1, rows)[0][key] for key in "xy")
    return {"x": x, "y": y, "bad": torch.full((rows, 1), bad, dtype=torch.float64)}


def same(a: Any, b: Any) -> bool:
    pairs = zip(local_leaves(a), local_leaves(b), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def kept(state: State) -> Any:
    """What a skipped step leaves as it was."""
    return state.params, state.buffers, state.opt_state, state.seed


def copied(state: State) -> Any:
    return optree.tree_map(torch.clone, kept(state))


# N1: on one rank, on none, on all


@pytest.mark.parametrize(
    ("level", "who", "kind"), crossed(LEVELS, [(), (1,), (0, 1, 2)], BAD, quick=1), ids=str
)
def test_skip(level: int, who: tuple[int, ...], kind: str) -> None:
    step, params, buffers = build(nonfinite="skip")

    def run(group: Any) -> Any:
        sharded = shard(step, level=level, group=group, donate=level % 2 == 0)
        state = sharded.init(params, buffers)
        state, _ = sharded(state, batch_of())
        before = copied(state)
        state, metrics = sharded(state, batch_of(BAD[kind] if group.rank in who else 0.0))
        assert same(before, kept(state)) == bool(who) and int(state.step) == 2
        assert metrics["skipped"] == int(state.finite.skipped) == bool(who)
        state, metrics = sharded(state, batch_of())
        assert (
            not same(before, kept(state))
            and int(state.step) == 3
            and metrics["skipped"] == bool(who)
        )
        return sharded.unshard(state)

    first, *others = run_ranks(run, 3)
    assert all(same(first, other) for other in others) and all_finite(first.params.values())


@pytest.mark.parametrize("level", thinned([3, 2, 1, 0]))
def test_raise(level: int) -> None:
    """On every rank with the same words; the state, donated or not, and the group can be used
    again."""
    step, params, buffers = build(nonfinite="raise")

    def run(group: Any) -> Any:
        sharded = shard(step, level=level, group=group)
        state, _ = sharded(sharded.init(params, buffers), batch_of())
        before = copied(state)
        with pytest.raises(NonFiniteError) as error:
            sharded(state, batch_of(torch.nan if group.rank == 1 else 0.0))
        assert same(before, kept(state))
        state, metrics = sharded(state, batch_of())
        assert "skipped" not in metrics
        return str(error.value), sharded.unshard(state)

    (told, first), *others = run_ranks(run, 3)
    assert all(words == told for words, _ in others) and all(
        same(first, other) for _, other in others
    )
    assert told.startswith(
        "step 1 is not finite: the loss is nan on rank 1; the gradients of inner.layers.0.weight"
    )
    assert "Remedy" in told
    state, _ = step(step.init(params, buffers), batch_of())
    before = copied(state)
    with pytest.raises(
        NonFiniteError, match=r"step 1 .* the loss is nan on rank 0; the gradients of inner"
    ):
        step(state, batch_of(torch.nan))
    assert same(before, kept(state))


def test_pass_looks_at_nothing() -> None:
    def run(group: Any) -> Any:
        found = {}
        for how in ("pass", "skip"):
            step, params, buffers = build(nonfinite=how)
            watched = counted(group)
            sharded = shard(step, level=3, group=watched)
            state = sharded.init(params, buffers)
            state, _ = sharded(state, batch_of())
            watched.reset()
            state, metrics = sharded(state, batch_of(torch.nan if group.rank else 0.0))
            found[how] = watched.num_calls()
            assert ("skipped" in metrics) == (state.finite is not None) == (how == "skip")
            assert all_finite(local_leaves(state.params)) == (how == "skip")
        return found

    found = run_ranks(run, 2)[0]
    assert found["skip"] == found["pass"] - 1, (
        "the decision costs no collective, and a skipped step saves the buffers'"
    )


def test_a_finite_loss_with_gradients_that_are_not() -> None:
    """The root of 0: only the gradient is infinite, and only in one leaf."""
    params = {"a": torch.zeros(5, requires_grad=True), "b": torch.ones(3, requires_grad=True)}
    step = train_step(
        lambda p, b, x: p["a"].abs().sqrt().sum() + (p["b"] * x).sum(),
        optim.sgd(0.1),
        nonfinite="skip",
    )

    def run(group: Any) -> Any:
        sharded = shard(step, level=3, group=group)
        state, metrics = sharded(sharded.init(params), torch.ones(3))
        return sharded.unshard(state).params["b"], metrics["skipped"]

    for b, skipped in (
        *run_ranks(run, 2),
        (step(step.init(params), torch.ones(3))[0].params["b"], 1),
    ):
        assert torch.equal(b, torch.ones(3)) and skipped == 1


def test_what_weighs_nothing_may_be_anything() -> None:
    step, params, buffers = build(nonfinite="raise")

    def weighted(p: Any, b: Any, batch: Any) -> Any:
        loss, aux = step.loss_fn(p, b, batch)
        return loss, fz.Aux(buffers=aux.buffers, weight=0.0 if batch["bad"].isnan().any() else 1.0)

    def run(group: Any) -> Any:
        sharded = shard(
            train_step(weighted, optim.sgd(0.1), nonfinite="raise"), level=2, group=group
        )
        state = sharded.init(params, buffers)
        return sharded(state, batch_of(torch.nan if group.rank else 0.0))[1]["loss"].isfinite()

    assert all(run_ranks(run, 2))


# The loss scale


def half_step(scale: LossScale | None, **options: Any) -> tuple[Any, Any, Any]:
    apply, params, buffers = fz.functionalize(
        models.mlp().module().float(), precision=Precision(compute=F16)
    )

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
        output, _ = apply(params, buffers, batch["x"])
        return (output.float() - batch["y"]).square().mean() * batch.get("size", torch.ones(1))[0]

    return (
        train_step(loss_fn, optim.sgd(0.01, momentum=0.9), loss_scale=scale, **options),
        params,
        buffers,
    )


def history(step: Any, state: State, batches: Any) -> tuple[list[tuple[float, float]], State]:
    found = []
    for batch in batches:
        state, metrics = step(state, batch)
        found.append((metrics["loss_scale"].item(), metrics["skipped"].item()))
    return found, state


@drawn(st.sampled_from(LEVELS), st.integers(1, 4), st.integers(8, 24), st.integers(1, 3), quick=1)
def test_the_scales_history_is_one_processs(
    level: int, ranks: int, power: int, interval: int
) -> None:
    scale = LossScale(initial=2.0**power, interval=interval)
    step, params, buffers = half_step(scale)
    batches = models.mlp().batches(12, 24)
    expected, end = history(step, step.init(params, buffers), batches)

    def run(group: Any) -> Any:
        sharded = shard(step, level=level, group=group)
        parts = [
            {k: x.chunk(group.size)[group.rank] for k, x in batch.items()} for batch in batches
        ]
        found, state = history(sharded, sharded.init(params, buffers), parts)
        return found, sharded.unshard(state)

    for found, state in run_ranks(run, ranks):
        assert found == expected
        assert same(state.finite, end.finite)
        for path, leaf in state.params.items():
            update = end.params[path] - params[path]
            assert (
                update.any() and (leaf - end.params[path]).abs().max() <= 0.02 * update.abs().max()
            )


@pytest.mark.parametrize("level", thinned([3, 2, 1, 0]))
def test_a_scale_with_weights(level: int) -> None:
    """Of which one is 0, as of a rank that has run out of data, and one a thousand times
    another."""
    plain, params, buffers = half_step(None)
    weigh = lambda p, b, x: (plain.loss_fn(p, b, x), fz.Aux(weight=x["weight"]))
    step = train_step(weigh, optim.sgd(0.01), loss_scale=LossScale(initial=2.0**8))

    def run(group: Any) -> Any:
        sharded = shard(step, level=level, group=group)
        state = sharded.init(params, buffers)
        for batch in models.mlp().batches(2, 12):
            mine = {k: x.chunk(3)[group.rank] for k, x in batch.items()}
            state, metrics = sharded(state, mine | {"weight": (1000.0, 0.0, 1.0)[group.rank]})
            assert metrics["skipped"] == 0
        return sharded.unshard(state).params

    for found in run_ranks(run, 3):
        assert all((found[path] != leaf).any() for path, leaf in params.items()) and all_finite(
            found.values()
        )


def test_the_scale_grows_falls_and_stops() -> None:
    policy = NonFinitePolicy("skip", LossScale(initial=8.0, interval=2, minimum=2.0))
    state, found = policy.init(), []
    for fine in (True, True, True, False, True, False, False, False, True, True):
        state = policy.next(state, fine=fine)
        assert isinstance(state, NonFiniteState)
        found.append((float(state.scale), int(state.good_steps), int(state.skipped)))
    assert found == [
        (8, 1, 0),
        (16, 0, 0),
        (16, 1, 0),
        (8, 0, 1),
        (8, 1, 1),
        (4, 0, 2),
        (2, 0, 3),
        (2, 0, 4),
        (2, 1, 4),
        (4, 0, 4),
    ]


def test_as_torchs_scaler() -> None:
    """The same scales and skipped steps as torch.amp.GradScaler makes of the same overflows."""
    policy = NonFinitePolicy("skip", LossScale(initial=2.0**10, interval=3, minimum=2.0**-20))
    state = policy.init()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], 0.1)
    for bad in (0, 0, 0, 0, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0):
        optimizer.zero_grad()
        scaler.scale(p.sum() * (torch.inf if bad else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        state = policy.next(state, fine=not bad)
        assert state is not None and state.scale == scaler.get_scale()


def test_gradients_that_float16_loses_without_a_scale() -> None:
    batch = models.mlp().batches(1, 12)[0] | {"size": torch.tensor([1e-7])}
    arrived = {}
    for scale in (None, LossScale(initial=2.0**16)):
        step, params, buffers = half_step(scale)
        factor = None if scale is None else scale.initial
        loss = fz.value_and_grad(step.loss_fn, scale=factor)
        _, grads = loss(params, buffers, batch)
        arrived[scale is not None] = all(g.all() for g in grads.values())
    assert arrived == {False: False, True: True}


LOST = Equality(
    "approximate", 2.0**-9, "the seed 1/3 rounds float16's gradients differently, by 2^-11 each"
)


@pytest.mark.parametrize("level", tiers([3], [1]))
@pytest.mark.parametrize(
    ("ranks", "grade"), thinned([(2, "reordered"), (4, "reordered"), (3, LOST)], rows=True)
)
def test_sharded_is_unsharded_with_a_scale(level: int, ranks: int, grade: Any) -> None:
    step, params, buffers = half_step(LossScale(initial=2.0**12, interval=2))
    batches = models.mlp().batches(3, 12)
    options = {"levels": [level], "ranks": [ranks], "grade": grade}
    assert_sharded_equals_unsharded(step, params, buffers, batches, per_rank=True, **options)


@THOROUGH
def test_overflow_on_one_process() -> None:
    """Over gloo: one rank's batch overflows, and all skip."""
    step, params, buffers = half_step(LossScale(initial=2.0**12))

    def run(group: Any) -> Any:
        found = []
        for level in LEVELS:
            sharded = shard(step, level=level, group=group)
            state = sharded.init(params, buffers)
            for k in range(3):
                size = 1e6 if k == 1 and group.rank == 1 else 1.0
                batch = models.mlp().batches(1, 6)[0] | {"size": torch.tensor([size])}
                state, metrics = sharded(state, batch)
                found.append((level, metrics["loss_scale"].item(), metrics["skipped"].item()))
        return found, sharded.unshard(state)

    (first, state), (second, other) = launch(
        lambda: run(ProcessGroup()), 2, start_method="fork", timeout=100
    )
    expected = [(2.0**12, 0.0), (2.0**11, 1.0), (2.0**11, 1.0)]
    assert first == second == [(level, *row) for level in LEVELS for row in expected]
    assert same(state, other)


@pytest.mark.parametrize(
    ("before", "after"),
    thinned([((3, 3), (1, 2)), ((3, 3), (3, 3)), ((None, 1), (3, 2))], rows=True),
)
def test_the_scale_is_in_checkpoints(tmp_path: Path, before: Any, after: Any) -> None:
    """A run that stops and goes on, at another level and number of ranks too, has the history of
    one that doesn't."""
    batches = models.mlp().batches(8, 12)
    step, params, buffers = half_step(LossScale(initial=2.0**22, interval=2))
    expected, _ = history(step, step.init(params, buffers), batches)

    def part(group: Any, level: int | None, first: int, last: int) -> Any:
        here = step if level is None else shard(step, level=level, group=group)
        state = here.init(params, buffers)
        if first:
            state = checkpoint.load(tmp_path, here, like=state).state
        mine = [
            {k: x.chunk(group.size)[group.rank] for k, x in batch.items()}
            for batch in batches[first:last]
        ]
        found, state = history(here, state, mine)
        checkpoint.save(tmp_path, here, state)
        return found, state

    (found, _), *_ = run_ranks(lambda group: part(group, before[0], 0, 4), before[1])
    assert found == expected[:4] and found[-1][1] > 0
    for rest, _ in run_ranks(lambda group: part(group, after[0], 4, 8), after[1]):
        assert rest == expected[4:]


# What can't be


def test_wrong_options_are_refused() -> None:
    loss_fn = lambda p, b, x: p["w"].sum()
    for how in ("raise", "pass"):
        with pytest.raises(
            ValueError, match=rf"loss_scale and nonfinite='{how}' exclude each other.*Remedy"
        ):
            train_step(loss_fn, optim.sgd(0.1), nonfinite=how, loss_scale=LossScale())
    with pytest.raises(ValueError, match="nonfinite must be one of"):
        train_step(loss_fn, optim.sgd(0.1), nonfinite="ignore")  # type: ignore[arg-type]
    for wrong in (
        {"initial": 0.0},
        {"growth": 0.5},
        {"backoff": 1.0},
        {"interval": 0},
        {"initial": torch.inf},
        {"minimum": 2.0**17},
    ):
        with pytest.raises(ValueError, match="expected"):
            LossScale(**wrong)


def test_a_metric_of_the_same_name_is_refused() -> None:
    def loss_fn(p: Any, b: Any, x: Any) -> Any:
        return p["w"].sum(), fz.Aux(metrics={"skipped": 1.0})

    step = train_step(loss_fn, optim.sgd(0.1), nonfinite="skip")
    with pytest.raises(StructureError, match=r"metrics named \['skipped'\]"):
        step(step.init({"w": torch.ones(2, requires_grad=True)}), None)


def test_ranks_with_other_scales_hear_of_it() -> None:
    def run(group: Any) -> str:
        step, params, buffers = half_step(LossScale(initial=2.0 ** (8 + group.rank)))
        with pytest.raises(MismatchError) as error:
            shard(step, level=3, group=group).init(params, buffers)
        return str(error.value)

    for told in run_ranks(run, 2):
        assert "finite" in told and "initial is 256.0 on rank 0 and 512.0 on rank 1" in told
