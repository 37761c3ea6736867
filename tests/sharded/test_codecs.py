"""Codecs on ranks: sharded = unsharded where leaves and gradients travel by blocks, the bytes that
are sent, and what is refused."""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from optree import tree_map
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import checkpoint, optim
from functorch_zero.compress import Blocks
from functorch_zero.groups import CountingGroup, HybridGroup, counted, run_ranks
from functorch_zero.layout.build import make_layout
from functorch_zero.runtime.reduce import SUMMED, Summed
from functorch_zero.testing import Equality, assert_equal_values, assert_sharded_equals_unsharded
from functorch_zero.testing.runs import Start, run_in_parts
from tests.modules import Net, in_turn, seeded
from tests.sharded.test_processes import on_processes
from tests.tiers import FULL, THOROUGH, crossed, thinned

INT8, E4M3 = Blocks(torch.int8, 64), Blocks(torch.float8_e4m3fn, 64)
GATHER, REDUCE = fz.Precision(gather=INT8), fz.Precision(reduce=INT8)
BOTH = fz.Precision(gather=INT8, reduce=INT8)
LEVELS = (0, 1, 2, 3)
# Of SGD; AdamW divides by gradients, which may be small
EXACT = Equality("approximate", 1e-12, "blocks are the same ones, and sums in another order")
ADAM = Equality("approximate", 1e-11, "the same, divided by small gradients")


@dataclass(frozen=True)
class Steps:
    """A codec as a user writes one: 31 equal steps to either side of 0, in bytes of their own."""

    block: int = 48

    def encode(self, x: Tensor) -> Tensor:
        blocks = x.unflatten(1, (-1, self.block))
        scale = blocks.abs().amax(-1, keepdim=True) / 31
        steps = (blocks / scale).nan_to_num(0.0).round()
        return torch.cat([steps, scale], -1).flatten(1)

    def decode(self, messages: Tensor, dtype: torch.dtype) -> Tensor:
        steps, scale = messages.unflatten(1, (-1, self.block + 1)).split([self.block, 1], -1)
        return (steps * scale).to(dtype).flatten(1)


def net() -> Net:
    """A layer that is used twice; the leaves have 1,517, 37, 1,369, 37, 592 and 16 elements, of
    which none is a multiple of a block."""
    return Net(
        lambda net, x: net.last(in_turn((net.first, net.twice, net.twice), x)),
        first=nn.Linear(41, 37),
        twice=nn.Linear(37, 37),
        last=nn.Linear(37, 16),
    )


def built(precision: Any, *, weighted: bool = False, **options: Any) -> tuple[Any, Any, Any]:
    """The loss, the params, and the batches of 24."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = net().double()
        xs = torch.randn(2, 24, 41, dtype=torch.float64)
    apply, params, _ = fz.functionalize(model, units=nn.Linear, precision=precision, **options)

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
        loss = (apply(params, {}, batch["x"])[0] - batch["y"]).square().mean()
        # One rank's and micro-batch's weighs nothing
        weight = (batch["x"][0, 0] > -0.5).double() * 3 if weighted else None
        return loss, fz.Aux(weight=weight)

    return loss_fn, params, [{"x": x, "y": x[:, :16].sin()} for x in xs]


def check(
    precision: Any,
    levels: Sequence[Any] = LEVELS,
    ranks: Sequence[int] = (3,),
    optimizer: Any = None,
    grade: Equality = EXACT,
    accumulate: int = 1,
    weighted: bool = False,
    model: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    loss_fn, params, batches = built(precision, weighted=weighted, **(model or {}))
    optimizer = optimizer or optim.chain(optim.clip_by_global_norm(0.1), optim.sgd(0.5))
    step = fz.train_step(loss_fn, optimizer, accumulate=accumulate)
    assert_sharded_equals_unsharded(
        step, params, {}, batches, levels=levels, ranks=ranks, grade=grade, per_rank=True, **options
    )


POLICIES = {
    "gather": GATHER,
    "reduce": REDUCE,
    "both": BOTH,
    "fp8": fz.Precision(gather=E4M3, reduce=Blocks(torch.float8_e5m2, 96)),
    "own": fz.Precision(gather=Steps(), reduce=Steps(36)),
}
OPTIMIZERS = {"sgd": (None, EXACT), "adamw": (optim.adamw(0.01), ADAM)}
# Ranks, and how many of them lie along the shard axis
WORLDS = ((1, None), (2, None), (3, None), (6, 3))


@pytest.mark.parametrize(
    ("level", "name", "world", "optimizer"), crossed(LEVELS, POLICIES, WORLDS, OPTIMIZERS, quick=2)
)
def test_sharded_is_unsharded(level: int, name: str, world: Any, optimizer: str) -> None:
    (ranks, shard_size), (made, grade) = world, OPTIMIZERS[optimizer]
    check(POLICIES[name], [level], [ranks], made, grade, shard_size=shard_size)


@pytest.mark.parametrize(
    "options",
    thinned(
        [
            {"levels": [{"": 3, "twice": 1, "last.bias": 0, "first": 2}]},
            {"reduce_gradients": "once", "levels": [2, 3]},
            {"levels": LEVELS},
            {"levels": [3], "reshard_after_forward": False, "donate": False},
            {"levels": [3], "overlap": "time", "weighted": True},
            {"levels": [0, 1], "overlap": "time", "ranks": [2]},
        ]
    ),
    ids=str,
)
def test_accumulation(options: Any) -> None:
    """Gradients that add up whole are rounded once, those in pieces at each use."""
    check(BOTH, accumulate=2, **options)


def test_a_proof_tells_rounded_sums_from_sums_of_rounded() -> None:
    """What makes the proofs above hold at levels 0 and 1 is no matter of tolerance."""
    loss_fn, params, batches = built(REDUCE)
    step = fz.train_step(loss_fn, optim.sgd(0.5), accumulate=2)
    start, parts = Start((params, {}), 0), [[batches[0]]]
    by_use, at_once, some = (
        run_in_parts(step, start, parts, sums=sums)[0].known(0, "updates")
        for sums in ([], [True] * 6, [True, True, False, False, True, True])
    )
    for path, update in by_use.items():
        apart = (update - at_once[path]).abs().max() / update.abs().max()
        assert apart > 1e-4, path
        same = by_use if path.startswith("twice") else at_once
        assert torch.equal(some[path], same[path])


@pytest.mark.parametrize(
    "options",
    thinned(
        [
            {"levels": [3], "shard_size": 2, "state_axes": "both"},
            {"levels": [0, 1], "shard_size": 2, "same_data": "replicate"},
            {"levels": [2, 3], "shard_size": 2, "same_data": "shard"},
            {"levels": [0, 3], "shard_size": 1},
            {"levels": [1, 2], "shard_size": 2, "state_axes": "both", "weighted": True},
            {"levels": [0], "shard_size": 2, "same_data": "shard"},
        ]
    ),
    ids=str,
)
def test_replicas_of_shards(options: Any) -> None:
    check(BOTH, ranks=[4], **options)


@THOROUGH
def test_recomputed_units() -> None:
    check(BOTH, [3], model={"remat": True})


@THOROUGH
@pytest.mark.parametrize("level", LEVELS)
def test_weights_of_zero(level: int) -> None:
    check(BOTH, [level], weighted=True, accumulate=2)


def test_some_leaves_are_frozen_or_have_no_codec() -> None:
    policy = {"first": BOTH, "last": fz.Precision(reduce=E4M3)}
    check(policy, [{"": 3, "last": 0}], [2])
    loss_fn, params, batches = built(BOTH)
    frozen = fz.train_step(
        loss_fn, optim.sgd(0.5), trainable=lambda path, leaf: "first" not in path
    )
    assert_sharded_equals_unsharded(
        frozen, params, {}, batches, levels=[0, 3], ranks=[2], grade=EXACT, per_rank=True
    )


@pytest.mark.parametrize("level", thinned(LEVELS))
def test_programs(level: int) -> None:
    """Of two trees with codecs of their own."""
    loss_fn, params, batches = built(BOTH)
    other_loss, other, _ = built(fz.Precision(gather=E4M3))

    def moved(tree: Any, grads: Any) -> Any:
        return fz.apply_updates(tree, tree_map(lambda g: -0.5 * g, grads))

    def step(value: Any, batch: Any) -> Any:
        first, second = value
        found, grads = fz.value_and_grad(lambda p, b: loss_fn(p, {}, b)[0])(first, batch)
        _, of_second = fz.value_and_grad(lambda p, b: other_loss(p, {}, b)[0])(second, batch)
        return (moved(first, grads), moved(second, of_second)), {"loss": found}

    program = fz.program_step(step, init=lambda first, second: (first, second))
    assert_sharded_equals_unsharded(
        program, params, other, batches, levels=[level], ranks=[2], grade=EXACT, per_rank=True
    )


def test_padding_does_not_count() -> None:
    """An optimizer leaves NaN in the padding of flats, here 0/0, which is nobody's number."""
    careless = optim.chain(optim.scale_by_adam(eps=0.0), optim.scale(-0.01))
    check(GATHER, [1, 3], [2], careless, Equality("approximate", 1e-9, "divided by gradients"))


def test_the_gradient_of_a_derivative() -> None:
    """A loss that differentiates the model by its input, by torch.func, also in one process."""
    _, params, batches = built(BOTH)
    apply, _, _ = fz.functionalize(net().double(), units=nn.Linear, precision=BOTH)

    def slopes(params: Any, buffers: Any, batch: Any) -> Tensor:
        value = lambda x: apply(params, {}, x)[0].square().sum()
        return torch.func.vmap(torch.func.grad(value))(batch["x"]).square().mean()

    assert_sharded_equals_unsharded(
        fz.train_step(slopes, optim.sgd(0.5)), params, {}, batches, levels=[0, 3], ranks=[2],
        grade=EXACT, per_rank=True,
    )  # fmt: skip


@pytest.mark.parametrize("level", [0, 3])
def test_a_product_with_the_hessian(level: int) -> None:
    """The vector is rounded as params are, on ranks as in one process."""
    loss_fn, params, batches = built(GATHER)
    loss = lambda p, b: loss_fn(p, {}, b)[0]

    def run(group: Any) -> Any:
        sharded = fz.shard_tree(params, level=level, group=group)
        vector = fz.random.normal(fz.zero_updates(sharded), seed=1)
        value, grads, product = fz.hvp(loss)(sharded, vector, batches[0])
        return value, fz.unshard(grads), fz.unshard(product)

    expected = fz.hvp(loss)(params, fz.random.normal(fz.zero_updates(params), seed=1), batches[0])
    for found in run_ranks(run, 2):
        assert_equal_values(expected, found)


# Layouts


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("policy", [BOTH, fz.Precision(gather=INT8, reduce=Blocks(block=96))])
def test_leaves_and_pieces_begin_at_blocks(policy: Any, num_ranks: int, aligned: bool) -> None:
    _, params, _ = built(policy)
    layout = make_layout(params, num_ranks, trainable=lambda p, leaf: True, aligned=aligned)
    block = 64 if policy is BOTH else 192
    for bucket in layout.buckets:
        starts = [*bucket.offsets, *map(bucket.first, range(num_ranks))]
        assert not any(start % block for start in starts) and bucket.piece % block == 0
    # And leaves are cut, which small ones of aligned layouts needn't be
    weights = [bucket for bucket in layout.buckets if max(bucket.numels) > 1000]
    for bucket in weights:
        holders = [r for r in range(num_ranks) if bucket.extent(0, r).numel]
        assert len(holders) > 1 or num_ranks == 1


# What is sent, planned and described


def one_layer(precision: Any, level: int, ranks: int, **options: Any) -> tuple[Any, Any, float]:
    """A plan and a description of an MLP's step of 260 k elements, and the bytes that it sends."""
    apply, params, _ = fz.functionalize(
        nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4))),
        units=nn.Linear,
        precision=precision,
    )
    step = fz.train_step(lambda p, b, x: apply(p, b, x)[0].square().mean(), optim.sgd(0.1))
    group = CountingGroup(ranks)
    sharded = fz.shard(step, level=level, group=group, **options)
    state, x = sharded.init(params), torch.ones(1, 256)
    # From the second step on the order of units is known, and nobody is looked at
    for _ in range(2):
        group.reset()
        state, _ = sharded(state, x)
    planned = fz.plan(params, step, level=level, ranks=ranks, batch=x, **options)
    return planned, str(fz.describe(sharded, state)), group.sent_bytes()


BYTES = Blocks(torch.int8, 256)


@pytest.mark.thorough
@pytest.mark.parametrize(("level", "share"), [(3, 0.26), (0, 0.63), (1, 0.26), (2, 0.26)])
def test_bytes(level: int, share: float) -> None:
    """A quarter of all. The sums of level 0 come back as they are: a quarter of one half, and the
    other half."""
    plain = one_layer(None, level, 4)[-1]
    policy = fz.Precision(gather=BYTES, reduce=BYTES)
    planned, described, sent = one_layer(policy, level, 4)
    assert 0.25 * plain < sent <= share * plain
    assert planned.sent_bytes == pytest.approx(sent, rel=0.001)
    messages = {0: ["reduce"], 3: ["gather", "reduce"]}.get(level, ["reduce", "publish"])
    names = ", ".join(f"{message} int8 by 256" for message in messages)
    assert names in described
    assert f"by codecs: {names}\n" in str(planned) and "uint8" in str(planned)
    # Without a batch, too
    without = fz.plan(
        fz.functionalize(nn.Linear(256, 256, bias=False), precision=policy)[1],
        optim.sgd(0.1),
        level=level,
        ranks=4,
    )
    kinds = {call.kind for call in without.collectives if call.dtype == torch.uint8}
    assert kinds == ({"all_to_all", "all_gather"} if level else {"all_to_all"})


def test_replicas_sum_what_was_rounded_as_it_is() -> None:
    """Along the replicate axis nothing is encoded."""
    loss_fn, params, batches = built(REDUCE)
    step = fz.train_step(loss_fn, optim.sgd(0.5))

    def run(group: Any) -> list[tuple[str, torch.dtype]]:
        watched = counted(group)
        mesh = HybridGroup(watched, shard_size=2)
        sharded = fz.shard(step, level=1, group=mesh)
        state = sharded.init(params)
        watched.reset()
        sharded(state, batches[0])
        return [(c.kind, c.dtype) for c in watched.calls if c.kind in ("all_to_all", "all_reduce")]

    calls = run_ranks(run, 4)[0]
    assert calls.count(("all_to_all", torch.uint8)) == 3
    assert calls.count(("all_reduce", torch.float64)) >= 3


# Around the step


@pytest.mark.parametrize("policy", ["skip", "raise"])
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_stays_so(policy: Any, bad: float) -> None:
    """One element of one rank's batch is seen by all."""
    loss_fn, params, batches = built(BOTH)
    step = fz.train_step(loss_fn, optim.sgd(0.5), nonfinite=policy)
    spoiled = {name: x.clone() for name, x in batches[0].items()}
    spoiled["x"][0, 0] = bad

    def run(group: Any) -> None:
        sharded = fz.shard(step, level=3, group=group)
        state = sharded.init(params)
        before = tree_map(torch.clone, sharded.unshard(state).params)
        batch = spoiled if group.rank == 1 else batches[0]
        if policy == "raise":
            with pytest.raises(fz.errors.NonFiniteError):
                sharded(state, batch)
            return
        state, metrics = sharded(state, batch)
        assert metrics["skipped"] == 1
        assert_equal_values(before, sharded.unshard(state).params, grade="bitwise")

    run_ranks(run, 2)


def test_evaluations_and_averages_round_as_training() -> None:
    loss_fn, params, batches = built(GATHER)
    step = fz.train_step(loss_fn, optim.params_ema(optim.sgd(0.5), decay=0.5))
    score = lambda p, b, batch: {"loss": loss_fn(p, b, batch)[0]}
    evaluations = [
        fz.eval_step(score, params=read) for read in (None, lambda s, p: optim.ema_params(s))
    ]

    def run(group: Any, level: int | None) -> list[Tensor]:
        shard = (lambda s: s) if level is None else lambda s: fz.shard(s, level=level, group=group)
        sharded = shard(step)
        state, _ = sharded(sharded.init(params), batches[0])
        return [shard(evaluate)(state, batches[1])["loss"] for evaluate in evaluations]

    alone = run(None, None)
    assert alone[0] != alone[1]
    for level in LEVELS:
        for found in run_ranks(lambda group, level=level: run(group, level), 2):
            torch.testing.assert_close(found, alone, rtol=1e-12, atol=0.0)


def test_checkpoints_hold_the_masters(tmp_path: Path) -> None:
    """Exact ones, of which no rank's numbers depend: saved on two ranks, loaded on three."""
    loss_fn, params, batches = built(BOTH)
    step = fz.train_step(loss_fn, optim.adamw(0.01))

    def save(group: Any) -> Any:
        sharded = fz.shard(step, level=3, group=group)
        state, _ = sharded(sharded.init(params), batches[0])
        checkpoint.save(tmp_path, sharded, state)
        return sharded.unshard(state)

    def load(group: Any, level: int) -> Any:
        sharded = fz.shard(step, level=level, group=group)
        return sharded.unshard(checkpoint.load(tmp_path, sharded, like=sharded.init(params)).state)

    saved = run_ranks(save, 2)[0]
    for level in (1, 3):
        for found in run_ranks(lambda group, level=level: load(group, level), 3):
            assert_equal_values(saved, found, grade="bitwise")


@THOROUGH
@pytest.mark.parametrize("level", [0, 3])
def test_processes_give_what_threads_give(level: int) -> None:
    loss_fn, params, batches = built(BOTH)
    step = fz.train_step(loss_fn, optim.sgd(0.5))

    def run(group: Any) -> Any:
        sharded = fz.shard(step, level=level, group=group)
        state = sharded.init(params)
        for batch in batches:
            own = {name: x.chunk(group.size)[group.rank] for name, x in batch.items()}
            state, _ = sharded(state, own)
        return sharded.unshard(state).params

    expected = run_ranks(run, 3)[0]
    for found in on_processes(run, 3):
        assert_equal_values(expected, found, grade="bitwise")


# What is refused


def test_a_reduction_beside_a_codec_is_refused() -> None:
    loss_fn, params, _ = built(REDUCE)
    step = fz.train_step(loss_fn, optim.sgd(0.5))
    sharded = fz.shard(step, level=3, group=CountingGroup(2), reduction=Summed())
    with pytest.raises(ValueError, match=r"Summed.*int8 by 64.*path first\.weight.*Remedy"):
        sharded.init(params)
    with pytest.raises(ValueError, match="both say how gradients travel"):
        fz.plan(params, step, level=3, ranks=2, reduction=Summed())
    program = fz.program_step(lambda p, b: (p, {}), init=lambda p: p)
    with pytest.raises(ValueError, match="both say how gradients travel"):
        fz.shard(program, level=3, group=CountingGroup(2), reduction=Summed()).init(params)
    # The default, and gathers, are no second way
    fz.shard(step, level=3, group=CountingGroup(2), reduction=SUMMED).init(params)
    fz.shard(step, level=3, group=CountingGroup(2), reduction=Summed()).init(built(GATHER)[1])


# Training


@FULL
def test_train_lm_learns_as_well() -> None:
    """The example's smallest model: within 0.5% of its held-out loss after 300 steps."""
    example = runpy.run_path("examples/train_lm.py")
    size = example["SIZES"]["tiny"]

    def train(group: Any, precision: Any) -> float:
        model = seeded(lambda: example["GPT"](size))
        apply, params, buffers = fz.functionalize(
            model, units=example["Block"], precision=precision
        )
        text, held_out = example["read_text"]()

        def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
            logits, _ = apply(params, buffers, batch["x"])
            return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())

        step = fz.train_step(loss_fn, example["make_optimizer"]("adamw", 300))
        step = fz.shard(step, level=3, group=group)
        state = step.init(params, buffers)
        for i in range(300):
            state, _ = step(state, example["draw"](text, size.batch, 1 + i, group, "cpu"))
        score = fz.eval_step(lambda p, b, x: fz.Aux(metrics={"loss": loss_fn(p, b, x)}))
        exam = example["draw"](held_out, 16 * size.batch, 0, group, "cpu")
        return float(fz.shard(score, level=3, group=group)(state, exam)["loss"])

    found = {}
    for codec in (None, BYTES, Blocks(torch.float8_e4m3fn, 256)):
        policy = None if codec is None else fz.Precision(gather=codec, reduce=codec)
        found[str(codec)] = run_ranks(lambda group, p=policy: train(group, p), 2, timeout=600)[0]
    plain = found.pop("None")
    assert plain < 2.5
    for name, loss in found.items():
        assert abs(loss / plain - 1) < 0.005, (name, loss, plain)


@pytest.mark.parametrize("reduce", [INT8, torch.bfloat16])
@pytest.mark.parametrize("level", thinned([3, 2, 1, 0]))
def test_sparse_gradients_are_rounded_as_dense_ones(level: int, reduce: Any) -> None:
    """The parts of a row add up before."""
    model = seeded(nn.Embedding(5, 41, sparse=True).double)
    policy = fz.Precision(reduce=reduce)
    apply, params, _ = fz.functionalize(model, precision=policy)

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
        return apply(params, buffers, batch)[0].sin().mean()

    step = fz.train_step(loss_fn, optim.sgd(0.5))
    whole = torch.tensor([[0, 0, 1], [3, 0, 1]] * 2)
    # A sum over ranks in bfloat16 is another one
    ranks = (1,) if reduce == torch.bfloat16 else (1, 2)
    assert_sharded_equals_unsharded(
        step, params, {}, [whole], levels=({"weight": level},), ranks=ranks, grade=EXACT,
        per_rank=True,
    )  # fmt: skip
