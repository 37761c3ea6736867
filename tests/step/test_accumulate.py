"""Gradient accumulation: k micro-batches inside a step are one batch, at every level."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from optree import tree_map
from torch import nn

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import StructureError
from functorch_zero.groups import CountingGroup, SingleRank, counted, run_ranks
from functorch_zero.testing import assert_sharded_equals_unsharded
from tests.models import Shared
from tests.runtime.test_memory import LiveBytes
from tests.tiers import THOROUGH, drawn, thinned, tiers


def make(weighted, accumulate, dropout=0.0):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 7), nn.Tanh(), nn.Dropout(dropout), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 2)
    )
    apply, params, buffers = fz.functionalize(model.double())

    def loss_fn(params, buffers, batch):
        out, buffers = apply(params, buffers, batch["x"])
        size = len(batch["x"]) if weighted else None
        return F.mse_loss(out, batch["y"]), fz.Aux(
            buffers=buffers, metrics={"out": out.mean()}, weight=size
        )

    step = fz.train_step(loss_fn, optim.adamw(1e-2), accumulate=accumulate)
    return step, params, buffers


def weighing(dtype):
    """A step whose micro-batches weigh 100 times their number, as tensors of this dtype."""

    def loss_fn(params, buffers, batch):
        weight = torch.tensor(100 * len(batch), dtype=dtype)
        return F.mse_loss(fz.unshard(params)["w"] * batch, batch + 1), fz.Aux(weight=weight)

    return fz.train_step(loss_fn, optim.sgd(0.1), accumulate=2)


@pytest.mark.parametrize("dtype", thinned([torch.uint8, torch.int16, torch.int64, torch.float16]))
def test_weights_add_up_in_any_dtype(dtype):
    """The sum of two weights of 200 is none that fits into uint8."""
    params = {"w": torch.ones((), dtype=torch.float64, requires_grad=True)}
    batches = [torch.arange(4.0, dtype=torch.float64), torch.arange(1.0, 5.0, dtype=torch.float64)]
    assert_sharded_equals_unsharded(
        weighing(dtype), params, {}, batches, ranks=(1, 2), levels=(0, 3)
    )


WEIGHED = "some micro-batches have a weight"
DIFFERENT = r"different metrics: expected \[.*\], as from micro-batch 0, got \["
PARTLY = {
    "no weight first": (lambda i: fz.Aux(weight=3.0 if i else None), WEIGHED),
    "a weight first": (lambda i: fz.Aux(weight=None if i else 2.0), WEIGHED),
    "no metric first": (lambda i: fz.Aux(metrics={"seen": 1.0} if i else {}), DIFFERENT),
    "a metric first": (lambda i: fz.Aux(metrics={} if i else {"seen": 1.0}), DIFFERENT),
}


@pytest.mark.parametrize("name", PARTLY)
def test_what_some_micro_batches_only_have_is_refused(name):
    """It has no mean over the batch, and must not be dropped in silence."""
    aux_of, story = PARTLY[name]

    def loss_fn(params, buffers, batch):
        return fz.unshard(params)["w"].square() * batch.sum(), aux_of(int(batch[0] != 0))

    step = fz.train_step(loss_fn, optim.sgd(0.1), accumulate=2)
    params = {"w": torch.ones((), requires_grad=True)}
    for made in (step, fz.shard(step, level=3, group=SingleRank())):
        with pytest.raises(StructureError, match=f"{story}.*Remedy"):
            made(made.init(params), torch.arange(4.0))


def make_batches(size, count=3):
    torch.manual_seed(1)
    draw = [{"x": torch.randn(size, 3), "y": torch.randn(size, 2)} for _ in range(count)]
    return tree_map(torch.Tensor.double, draw)


@pytest.mark.parametrize(
    ("weighted", "accumulate", "size"),
    thinned([(True, 3, 17), (False, 2, 12), (True, 4, 12)], rows=True),
)
def test_micro_batches_are_the_whole_batch(weighted, accumulate, size):
    whole, params, buffers = make(weighted, 1)
    cut, _, _ = make(weighted, accumulate)
    one, many = whole.init(params, buffers), cut.init(params, buffers)
    for batch in make_batches(size):
        before = one.params
        (one, seen), (many, also_seen) = whole(one, batch), cut(many, batch)
        for path, old in before.items():
            update = one.params[path] - old
            assert (update != 0).any()
            torch.testing.assert_close(many.params[path] - old, update, rtol=1e-12, atol=1e-15)
        assert {k: pytest.approx(v.item(), rel=1e-12) for k, v in seen.items()} == {
            k: v.item() for k, v in also_seen.items()
        }


@pytest.mark.parametrize(
    ("weighted", "accumulate", "size", "ranks"),
    tiers([(True, 2, 13, (2,))], [(True, 2, 13, (1, 3)), (False, 3, 36, (1, 2, 3))], rows=True),
)
def test_sharded_equals_unsharded(weighted, accumulate, size, ranks):
    step, params, buffers = make(weighted, accumulate)
    assert_sharded_equals_unsharded(
        step, params, buffers, make_batches(size), levels=(0, 1, 2, 3), ranks=ranks
    )


def test_levels_0_and_1_reduce_once_and_2_and_3_in_every_micro_batch():
    step, params, buffers = make(True, 4)
    (batch,) = make_batches(16, 1)

    def on_a_rank(group):
        calls = {}
        for level in range(4):
            watched = counted(group)
            sharded = fz.shard(step, level=level, group=watched)
            state = sharded.init(params, buffers)
            watched.reset()
            sharded(state, tree_map(lambda x: x.tensor_split(group.size)[group.rank], batch))
            calls[level] = {
                kind: watched.num_calls(kind)
                for kind in ("all_reduce", "reduce_scatter", "all_gather")
            }
        return calls

    units = 3
    for calls in run_ranks(on_a_rank, 2):
        # And two at the end, of values and of words
        assert calls[0] == {
            "all_reduce": units + 2,
            "reduce_scatter": 0,
            "all_gather": 0,
        }
        assert calls[1] == {"all_reduce": 2, "reduce_scatter": units, "all_gather": units}
        assert calls[2] == {"all_reduce": 2, "reduce_scatter": 4 * units, "all_gather": units}
        assert calls[3]["reduce_scatter"] == 4 * units


@pytest.mark.parametrize(("level", "reduced_before"), [(1, 0), (2, 3), (3, 3)])
def test_metrics_set_out_between_the_last_loss_and_its_backward(level, reduced_before):
    """Three units are reduced in the first micro-batch's backward, and three in the last one's."""
    step, params, buffers = make(True, 2)
    group = CountingGroup(2)
    sharded = fz.shard(step, level=level, group=group)
    state = sharded.init(params, buffers)
    group.reset()
    sharded(state, make_batches(4, 1)[0])
    kinds = [call.kind for call in group.calls]
    values, words = (n for n, kind in enumerate(kinds) if kind == "all_reduce")
    assert kinds[:values].count("reduce_scatter") == reduced_before
    assert kinds[values:words].count("reduce_scatter") == 3


def test_buffers_go_from_one_micro_batch_to_the_next():
    apply, params, buffers = fz.functionalize(
        nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
    )

    def loss_fn(params, buffers, batch):
        out, buffers = apply(params, buffers, batch)
        return (out**2).mean(), fz.Aux(buffers=buffers)

    step = fz.train_step(loss_fn, optim.sgd(0.1), accumulate=4)
    state, _ = step(step.init(params, buffers), make_batches(8, 1)[0]["x"])
    assert state.buffers["0.num_batches_tracked"] == 4


def test_dropout_differs_between_micro_batches_and_a_step_replays_bit_for_bit():
    step, params, buffers = make(False, 2, dropout=0.5)
    (batch,) = make_batches(4, 1)
    twice = tree_map(lambda x: torch.cat([x[:2], x[:2]]), batch)
    state = step.init(params, buffers, seed=3)
    first, metrics = step(state, twice)
    again, _ = step(state, twice)
    tree_map(
        lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=0), again.params, first.params
    )
    half = fz.train_step(step.loss_fn, step.optimizer)
    assert half(state, tree_map(lambda x: x[:2], batch))[1]["loss"] != metrics["loss"], (
        "both halves drew the same"
    )


def test_wrong_counts_are_refused():
    step, params, buffers = make(True, 5)
    with pytest.raises(StructureError, match=r"too small: path x, expected 5 rows or more.* got 4"):
        step(step.init(params, buffers), make_batches(4, 1)[0])
    with pytest.raises(ValueError, match="accumulate"):
        make(True, 0)


def test_a_share_of_a_third_is_not_rounded_to_the_precision_of_a_bfloat16_loss():
    def loss_fn(params, buffers, batch):
        return (params["w"] * batch).mean().bfloat16()

    step = fz.train_step(loss_fn, optim.sgd(1.0))
    params = {"w": torch.zeros(4, requires_grad=True)}
    batch = torch.ones(3, 4)

    def on_a_rank(group):
        sharded = fz.shard(step, level=3, group=group)
        state, _ = sharded(sharded.init(params), batch[group.rank])
        return sharded.unshard(state).params["w"]

    for w in run_ranks(on_a_rank, 3):
        torch.testing.assert_close(w.detach(), torch.full((4,), -0.25), rtol=1e-6, atol=0)


def test_in_pieces_or_whole():
    """Volumes: whole gradients are reduced once a step; params that stay gathered are gathered once
    a step, too."""
    step, params, buffers = make(True, 4)
    (batch,) = make_batches(16, 1)
    size = sum(leaf.numel() for leaf in params.values()) * 8

    def on_a_rank(group):
        sent = {}
        for level in (2, 3):
            for kind in ("every_microbatch", "once"):
                watched = counted(group)
                sharded = fz.shard(
                    step,
                    level=level,
                    group=watched,
                    reduce_gradients=kind,
                    reshard_after_forward=False,
                )
                state = sharded.init(params, buffers)
                watched.reset()
                sharded(state, tree_map(lambda x: x.tensor_split(group.size)[group.rank], batch))
                calls = {c: watched.num_calls(c) for c in ("reduce_scatter", "all_gather")}
                sent[level, kind] = (watched.sent_bytes("reduce_scatter") * 2 / size, calls)
        return sent

    units = 3
    for sent in run_ranks(on_a_rank, 2):
        for level in (2, 3):
            volume, calls = sent[level, "every_microbatch"]
            assert 4 <= volume < 16 and calls == {
                "reduce_scatter": 4 * units,
                "all_gather": units,
            }, "padded leaves"
            assert sent[level, "once"] == (
                volume / 4,
                {"reduce_scatter": units, "all_gather": units},
            )


@pytest.mark.parametrize("level", tiers([3], [2]))
def test_a_unit_that_is_entered_twice_is_reduced_once_when_whole(level):
    torch.manual_seed(0)
    apply, params, buffers = fz.functionalize(Shared().double())
    step = fz.train_step(
        lambda p, b, x: apply(p, b, x)[0].square().mean(), optim.adamw(1e-2), accumulate=2
    )
    x = torch.randn(12, 5, dtype=torch.float64)
    assert_sharded_equals_unsharded(
        step, params, buffers, [x], levels=(level,), ranks=(3,), reduce_gradients="once"
    )

    def on_a_rank(group):
        watched = counted(group)
        sharded = fz.shard(step, level=level, group=watched, reduce_gradients="once")
        state = sharded.init(params, buffers)
        watched.reset()
        sharded(state, x[:6])
        return watched.num_calls("reduce_scatter")

    assert run_ranks(on_a_rank, 2) == [len(params.units)] * 2


def test_whole_gradients_stay_and_pieces_do_not():
    def peak(kind):
        apply, params, _ = fz.functionalize(
            nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8))).double()
        )
        step = fz.train_step(
            lambda p, b, x: apply(p, b, x)[0].square().mean(), optim.sgd(0.1), accumulate=2
        )
        sharded = fz.shard(step, level=2, group=fz.groups.CountingGroup(16), reduce_gradients=kind)
        state = sharded.init(params)
        with torch.autograd.set_multithreading_enabled(False), LiveBytes() as live:
            sharded(state, torch.ones(4, 64, dtype=torch.float64))
        return live.peak / (64 * 64 * 8)

    assert peak("every_microbatch") < 5 and peak("once") > 8


@THOROUGH
@drawn(data=st.data())
def test_any_data_on_any_rank_at_any_level(data):
    """Ranks that have run out pass an empty batch; some_rows of each rank and step are drawn, none
    included."""
    ranks, level = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 3))
    accumulate = data.draw(st.sampled_from([1, 2, 3]))
    kind = data.draw(st.sampled_from([None, "once"] + ["every_microbatch"] * (level > 1)))
    counts = st.sampled_from([0, 0, accumulate, accumulate + 1, 5])
    sizes = data.draw(
        st.lists(
            st.lists(counts, min_size=ranks, max_size=ranks).filter(any), min_size=2, max_size=3
        )
    )
    step, params, buffers = make(True, accumulate)
    whole = [make_batches(sum(row), 1)[0] for row in sizes]
    parts = [
        tree_map(lambda x, row=row: x.split(row), batch)
        for batch, row in zip(whole, sizes, strict=True)
    ]

    def on_a_rank(group):
        sharded = fz.shard(step, level=level, group=group, reduce_gradients=kind)
        state = sharded.init(params, buffers)
        for part in parts:
            state, metrics = sharded(state, {name: x[group.rank] for name, x in part.items()})
        return sharded.unshard(state).params, metrics

    oracle, _, _ = make(True, 1)
    state = oracle.init(params, buffers)
    for batch in whole:
        state, metrics = oracle(state, batch)
    for found, seen in run_ranks(on_a_rank, ranks):
        for path, old in params.items():
            torch.testing.assert_close(
                found[path] - old, state.params[path] - old, rtol=1e-9, atol=1e-12
            )
        torch.testing.assert_close(seen, metrics, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("levels", tiers(thorough=[(0, 3), (1, 2)]), ids=str)
def test_an_empty_batch_on_real_processes(levels):
    step, params, buffers = make(True, 2)
    batches = make_batches(9, 3)

    def on_a_rank():
        group, found = fz.ProcessGroup(), []
        for level in levels:
            sharded = fz.shard(step, level=level, group=group)
            state = sharded.init(params, buffers)
            for i, batch in enumerate(batches):
                rows = slice(0, 9) if i != group.rank else slice(0, 0)
                state, _ = sharded(state, {name: x[rows] for name, x in batch.items()})
            found.append(sharded.unshard(state).params)
        return found

    state = step.init(params, buffers)
    for batch in batches:
        state, _ = step(state, batch)
    for found in fz.launch(on_a_rank, 3, start_method="fork", timeout=100):
        for params_there in found:
            for path, old in params.items():
                torch.testing.assert_close(
                    params_there[path] - old, state.params[path] - old, rtol=1e-9, atol=1e-13
                )


def test_an_empty_batch_without_a_weight_is_refused():
    step, params, buffers = make(False, 1)
    (batch,) = make_batches(4, 1)

    def on_a_rank(group):
        sharded = fz.shard(step, level=3, group=group)
        state = sharded.init(params, buffers)
        sharded(state, tree_map(lambda x: x[: 4 * (group.rank == 0)], batch))

    with pytest.raises(StructureError, match=r"batch is empty.*on rank 1.*Aux\(weight"):
        run_ranks(on_a_rank, 2)


@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize("program", [False, True])
def test_a_metric_that_is_the_mean_of_nothing_is_refused(program, level):
    """It would be NaN on all ranks, where one process has a number, beside a finite loss."""

    def loss_fn(params, batch):
        w = fz.unshard(params)["w"]
        return (w * batch).sum(), fz.Aux(metrics={"rows": 1.0, "mean": (w * batch).mean()})

    def descend(params, batch):
        (_, metrics), grads = fz.value_and_grad(loss_fn)(params, batch)
        return tree_map(lambda p, g: p - 0.1 * g, params, grads), metrics

    step = fz.train_step(lambda params, _, batch: loss_fn(params, batch), optim.sgd(0.1))
    if program:
        step = fz.program_step(descend, init=lambda params: params)

    def on_a_rank(group):
        sharded = fz.shard(step, level=level, group=group)
        state = sharded.init({"w": torch.ones(3, requires_grad=True)})
        sharded(state, torch.ones(4 * (group.rank == 0), 3))

    with pytest.raises(StructureError, match=r"batch is empty, and its mean NaN.*on rank 1"):
        run_ranks(on_a_rank, 2)


def test_the_empty_leaf_of_a_batch_is_named():
    step, params, buffers = make(False, 1)
    (batch,) = make_batches(4, 1)

    def on_a_rank(group):
        sharded = fz.shard(step, level=0, group=group)
        own = tree_map(lambda x: x[:0], batch) if group.rank == 1 else batch
        sharded(sharded.init(params, buffers), {"negatives": torch.ones(2), **own})

    with pytest.raises(StructureError, match=r"batch is empty.*path x, on rank 1"):
        run_ranks(on_a_rank, 2)


def test_pieces_at_a_level_without_them_are_refused():
    step, _, _ = make(True, 2)
    for level in (0, 1):
        with pytest.raises(ValueError, match="level 2"):
            fz.shard(
                step,
                level=level,
                group=fz.groups.CountingGroup(2),
                reduce_gradients="every_microbatch",
            )
    with pytest.raises(ValueError, match="reduce_gradients must be"):
        fz.shard(step, level=2, group=fz.groups.CountingGroup(2), reduce_gradients="both")
