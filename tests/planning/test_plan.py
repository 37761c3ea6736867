"""What a plan predicts is what a run does: bytes of state, collectives and peaks; and planning
allocates nothing.

The quick tier runs a few combinations of models, levels and options, and the thorough tier more of
them; the full tier runs all.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import optim, plan
from functorch_zero.errors import StructureError, TransformError
from functorch_zero.groups import CountingGroup
from functorch_zero.groups.counting import Call, counted
from functorch_zero.groups.mesh import axes_of
from functorch_zero.optim import Needs
from functorch_zero.params import Params, UnitSpec
from functorch_zero.planning import Collective, Plan, zero_bytes
from functorch_zero.planning.imagined_ranks import imagined, lone_rank
from functorch_zero.planning.watch import MemoryWatch
from functorch_zero.testing import models, run_ranks
from tests.conformance.gpt import gpt_tree
from tests.conformance.table import TABLE
from tests.local import local_leaves, published
from tests.modules import Net
from tests.tiers import FULL, THOROUGH, thinned, tiers

ROWS = 2  # of a rank's batch
CASES: dict[str, Callable[[], models.Case]] = {
    "mlp": models.mlp,
    "frozen_mlp": models.frozen_mlp,
    "gpt": models.gpt,
    "convnet": models.convnet,
    "shared": models.shared,
    "unused": models.unused,
    "scalars": models.scalars,
    "mixed": models.mixed,
}


def calls_of(made: Plan | list[Collective]) -> list[Call]:
    """A plan's collectives as a group counts them."""
    collectives = made.collectives if isinstance(made, Plan) else made
    return [Call(c.kind, c.dtype, c.num_elements, c.sent_bytes) for c in collectives]


def held(tree: Any) -> int:
    """Bytes of the distinct storages of a tree."""
    leaves = [x for x in local_leaves(tree) if isinstance(x, Tensor)] + published(tree)
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in leaves}.values())


def run(
    step: Any, params: Any, buffers: Any, batches: list[Any], ranks: int, **options: Any
) -> list[tuple[Any, ...]]:
    """Each rank's last state, bytes of its first state, and the collectives of its last step."""

    def on_rank(group: Any) -> tuple[Any, ...]:
        group = counted(group)
        sharded = fz.shard(step, group=group, **options)
        state = sharded.init(params, buffers)
        first = held(state.opt_state)
        for _ in range(3):  # from the second on, the order of units is known
            group.reset()
            state, _ = sharded(state, batches[group.rank])
        return state, first, list(group.calls)

    return run_ranks(on_rank, ranks)


ON_ALL_RANKS = [(name, level, True) for name in CASES for level in range(4)]
ON_THE_LAST = [(name, k % 4, False) for k, name in enumerate(CASES)]
AT_BOTH_ENDS = [("mlp", 0, False), ("mlp", 3, False)]


@pytest.mark.parametrize("chosen", tiers(AT_BOTH_ENDS, ON_THE_LAST[1:], ON_ALL_RANKS), ids=str)
def test_collectives_and_bytes_are_those_of_a_run(chosen: tuple[str, int, bool]) -> None:
    name, level, every_rank = chosen
    case = CASES[name]()
    ranks = 2 + level % 2
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.lamb(1e-3))
    step, params, buffers = case.step(optimizer, weighted=level == 2)
    rows = max(ROWS, case.min_rows)
    batches = case.batches(ranks, rows)
    made = run(step, params, buffers, batches, ranks, level=level)
    for rank, (state, first, calls) in enumerate(made):
        if rank < ranks - 1 and not every_rank:
            continue
        options: dict[str, Any] = {"level": level, "ranks": ranks, "rank": rank}
        planned = plan(params, step, batch=batches[rank], buffers=buffers, **options)
        assert calls_of(planned) == calls
        assert planned.params == held(state.params)
        assert planned.state == first == held(state.opt_state)
        assert planned.buffers == sum(b.nbytes for b in optree.tree_leaves(buffers))


OPTIONS: list[dict[str, Any]] = [{}, {"reshard_after_forward": False}, {"accumulate": 2}]


WITH_OPTIONS = [(level, k) for level in range(4) for k in range(len(OPTIONS))]
ONE_EACH = [(level, level % len(OPTIONS)) for level in range(4)]
AT_LEVEL_3 = [(level, k) for level, k in WITH_OPTIONS if level == 3 and k != level % len(OPTIONS)]


@pytest.mark.parametrize(
    ("chosen", "depth"),
    [
        *(pytest.param(case, 2, marks=THOROUGH) for case in ONE_EACH),
        *(pytest.param(case, 3, marks=THOROUGH) for case in AT_LEVEL_3),
        *(pytest.param(case, 3, marks=FULL) for case in WITH_OPTIONS),
    ],
    ids=str,
)
def test_without_a_batch_a_chain_of_units_is_planned_as_it_runs(
    chosen: tuple[int, int], depth: int
) -> None:
    level, options = chosen[0], dict(OPTIONS[chosen[1]])
    batch, parts = tokens(), options.pop("accumulate", 1)
    apply, params, buffers = fz.functionalize(decoder(depth=depth), "blocks.*")
    step = fz.train_step(
        lambda p, b, batch: apply(p, b, *batch)[0], optim.adamw(1e-3), accumulate=parts
    )
    known = plan(params, step, level=level, ranks=3, batch=batch, **options)
    unknown = plan(decoder(depth=depth), step, level=level, ranks=3, units="blocks.*", **options)
    assert unknown.collectives == known.collectives
    for _, _, calls in run(step, params, buffers, [batch] * 3, 3, level=level, **options):
        assert calls_of(known) == calls


BY_PATH: dict[str, Any] = {
    "a unit": {"": 3, "blocks.1": 1},
    "all but a unit": {"": 1, "blocks.1": 3},
    "norms": lambda path, leaf: 3 if "norm" in path else 1,
    "all but norms": lambda path, leaf: 1 if "norm" in path else 3,
    "weights": lambda path, leaf: 3 if path.endswith("weight") else 1,
}


@pytest.mark.parametrize("rule", thinned(BY_PATH))
@pytest.mark.parametrize("reshard", thinned([True, False]))
def test_without_a_batch_levels_may_differ(rule: str, reshard: bool) -> None:
    options: dict[str, Any] = {"level": BY_PATH[rule], "reshard_after_forward": reshard}
    apply, params, _ = fz.functionalize(decoder(depth=2), "blocks.*")
    step = fz.train_step(lambda p, b, batch: apply(p, b, *batch)[0], optim.adamw(1e-3))
    known = plan(params, step, ranks=3, batch=tokens(), **options)
    unknown = plan(decoder(depth=2), step, ranks=3, units="blocks.*", **options)
    assert unknown.collectives == known.collectives


def test_without_a_batch_a_unit_that_is_whole_is_not_gathered() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    made = plan(model, optim.adamw(1e-3), level={"": 3, "1": 1}, ranks=8)
    gathered = set()
    for call in made.collectives:
        if call.kind == "all_gather" and call.phase in ("forward", "backward"):
            gathered.add(call.unit)
    assert gathered == {"0"}


HARD = [
    "adafactor",
    "muon",
    "shampoo, blocks",
    "scale_by_soap",
    "lbfgs",
    "with_whole_tree",
    "partition, of every kind",
]
HARD += [
    "apply_if_finite, whole leaf",
    "lookahead, pointwise",
    "schedule_free, statistics",
    "sam",
    "lamb",
    "apply_if_nonzero",
]


QUICK_ROWS = ["sgd", "muon"]
FEW_ROWS = [name for i, name in enumerate(TABLE) if name in HARD or i % 24 == 0]
SOME_ROWS = [name for i, name in enumerate(TABLE) if name not in HARD and i % 6 == 0]


@pytest.mark.parametrize(
    "name",
    tiers(QUICK_ROWS, [n for n in FEW_ROWS + SOME_ROWS if n not in QUICK_ROWS], TABLE),
)
def test_every_optimizer_keeps_and_sends_what_is_planned(name: str) -> None:
    """In its first step, on one of three ranks."""
    optimizer = TABLE[name].make()
    params = gpt_tree(5, 2, 1, 3) if optimizer.needs == Needs.WHOLE_TREE else gpt_tree(30, 8, 2, 6)
    level = 1 + list(TABLE).index(name) % 3

    def loss_fn(params: Any, buffers: Any, batch: Tensor) -> Any:
        return sum(((p - batch.mean()) ** 2).mean() for p in optree.tree_leaves(fz.unshard(params)))

    rank = list(TABLE).index(name) // 3 % 3
    group = CountingGroup(3, rank)
    sharded = fz.shard(fz.train_step(loss_fn, optimizer), level=level, group=group)
    state = sharded.init(params)
    made = plan(params, optimizer, level=level, ranks=3, rank=rank)
    assert made.state == held(state.opt_state)
    group.reset()
    sharded(state, torch.randn(3))
    after = calls_of([c for c in made.collectives if c.phase in ("optimizer", "publish")])
    words = next(i for i, call in enumerate(group.calls) if call.dtype == torch.int64)
    assert group.calls[words + 1 :] == after


def decoder(width: int = 12, depth: int = 2, vocab: int = 24) -> Net:
    """`forward(tokens, targets)` is the loss."""

    def forward(net: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = net.head(net.norm(net.blocks(net.embed(tokens))))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    torch.manual_seed(0)
    return Net(
        forward,
        embed=nn.Embedding(vocab, width),
        blocks=nn.Sequential(*(models.Block(width, 2) for _ in range(depth))),
        norm=nn.LayerNorm(width),
        head=nn.Linear(width, vocab, bias=False),
    )


def tokens(rows: int = 4, length: int = 8, vocab: int = 24) -> tuple[Tensor, Tensor]:
    data = torch.arange(rows * (length + 1)).view(rows, -1) % vocab
    return data[:, :-1].contiguous(), data[:, 1:].contiguous()


OPTIMIZERS = {"adamw": optim.adamw, "lamb": optim.lamb, "muon": optim.muon}
PRECISIONS = {"float32": None, "bfloat16": fz.Precision(compute=torch.bfloat16)}
# (model, batch)
SIZES = {
    "wide": ((128, 4, 512), (1, 16, 512)),
    "deep": ((64, 5, 128), (8, 64, 128)),
}


def measured_peaks(rows: list[tuple[Any, ...]]) -> list[int]:
    """On a real rank over gloo: the most bytes of tensors in a step, by torch's own allocator."""
    torch.set_num_threads(1)
    return [measured_peak(*row) for row in rows]


def measured_peak(
    size: str, level: int, optimizer: str, precision: str, donate: bool | None = None
) -> int:
    apply, params, buffers = fz.functionalize(
        decoder(*SIZES[size][0]), "blocks.*", precision=PRECISIONS[precision]
    )
    batch = tokens(*SIZES[size][1])
    step = fz.train_step(lambda p, b, batch: apply(p, b, *batch)[0], OPTIMIZERS[optimizer](1e-3))
    sharded = fz.shard(step, level=level, donate=donate)
    state = sharded.init(params, buffers)
    del params
    for _ in range(2):
        state, _ = sharded(state, batch)
    before, peaks = held((state.params, state.opt_state)), []
    for _ in range(
        2
    ):  # gloo's threads may hold tensors a little longer than the step does: the least counts
        gc.collect()
        events: list[int] = []
        with allocations(events):
            state, _ = sharded(state, batch)
        peaks.append(before + max(accumulate(events)))
    return min(peaks)


class allocations:
    """Bytes allocated (and freed, negative) in order, by torch's profiler."""

    def __init__(self, events: list[int]):
        self.events = events
        self.profiler = torch.autograd.profiler.profile(profile_memory=True)

    def __enter__(self) -> None:
        self.profiler.__enter__()

    def __exit__(self, *args: Any) -> None:
        self.profiler.__exit__(*args)
        found = [e for e in self.profiler.kineto_results.events() if e.name() == "[memory]"]
        self.events += [e.nbytes() for e in sorted(found, key=lambda e: e.start_ns())]


ONE_PEAK = [("wide", 3, "adamw", "bfloat16")]
FEW_PEAKS = [("wide", 0, "adamw", "float32"), ("wide", 2, "muon", "float32")]
KEPT_PEAKS = [("wide", 1, "adamw", "float32", False)]  # a step that donates nothing
SOME_PEAKS = [("wide", level, "adamw", "float32") for level in (1, 2, 3)] + [
    ("deep", 3, "adamw", "float32")
]
MORE_PEAKS = [("deep", level, "adamw", "float32") for level in range(3)] + [
    ("wide", 3, "lamb", "float32")
]


@pytest.mark.parametrize(
    "rows",
    tiers(thorough=[ONE_PEAK, FEW_PEAKS, KEPT_PEAKS], full=[SOME_PEAKS, MORE_PEAKS]),
    ids=len,
)
def test_the_peak_is_that_of_a_run_on_real_ranks(rows: list[tuple[Any, ...]]) -> None:
    for row, most in zip(
        rows, fz.launch(measured_peaks, 2, rows, timeout=100, start_method="fork")[0], strict=True
    ):
        size, level, optimizer, precision, *donate = row
        options: dict[str, Any] = {"donate": donate[0]} if donate else {}
        options |= {"units": "blocks.*", "precision": PRECISIONS[precision]}
        options |= {"level": level, "ranks": 2, "batch": tokens(*SIZES[size][1])}
        made = plan(decoder(*SIZES[size][0]), OPTIMIZERS[optimizer](1e-3), **options)
        assert made.peak.total == pytest.approx(most, rel=0.1), row


def test_a_large_layout_for_many_ranks_is_planned_without_allocating() -> None:
    """200 leaves, 4 GB. How long ten times as many take is tests/benchmarks/plan_speed.py's
    business."""
    params, events = many_leaves(20, 10, 2240), []  # type: tuple[Params, list[int]]
    with allocations(events):
        made = plan(params, optim.adamw(1e-3), level=3, ranks=4096)
    assert made.num_params == 200 * 2240 * 2240
    assert sum(n for n in events if n > 0) < 1e5  # counters


@pytest.mark.parametrize("name", tiers(thorough=["muon", "lamb", "adafactor"]))
def test_whoever_asks_across_ranks_is_planned_without_allocating(name: str) -> None:
    params, events = many_leaves(5, 4, 1000), []  # type: tuple[Params, list[int]]
    with allocations(events):
        plan(params, getattr(optim, name)(1e-3), level=3, ranks=4096)
    assert sum(n for n in events if n > 0) < 1e5  # of 80 MB


def many_leaves(num_units: int, num_leaves: int, side: int = 500) -> Params:
    """Leaves on the meta device."""
    leaves = {
        f"{u}.{i}": torch.empty(side, side, device="meta", requires_grad=True)
        for u in range(num_units)
        for i in range(num_leaves)
    }
    units = tuple(
        UnitSpec(str(u), (str(u),), tuple(f"{u}.{i}" for i in range(num_leaves)))
        for u in range(num_units)
    )
    return Params(leaves, units)


@pytest.mark.parametrize("ranks", tiers([1, 7], [100_000]))
def test_any_number_of_ranks(ranks: int) -> None:
    params = many_leaves(3, 2)
    made = plan(params, optim.muon(1e-3), level=3, ranks=ranks)
    assert made.params * ranks >= 4 * made.num_params
    assert made.sent_bytes == 0 if ranks == 1 else made.sent_bytes > 0
    assert json.loads(made.to_json())["num_ranks"] == ranks


def test_pieces_at_each_level_are_within_padding_of_the_zero_formula() -> None:
    params, ranks = many_leaves(3, 4), 16
    for level in range(4):
        made = plan(params, optim.adam(1e-3), level=level, ranks=ranks)
        formula = zero_bytes(made.num_params, ranks, level=level, params=4, gradients=4, state=8)
        kept = formula if level in (0, 2, 3) else formula - 4 * made.num_params * (1 - 1 / ranks)
        assert made.params + made.gradients + made.state == pytest.approx(kept, rel=0.01)


@pytest.mark.parametrize(("num_leaves", "side", "copies"), [(4, 100, 2), (1, 2048, 1)])
def test_gradients_are_packed_where_a_step_packs_them(
    num_leaves: int, side: int, copies: int
) -> None:
    """A unit's gradients leaf by leaf, and the flat they are copied to; a large leaf's gradient is
    its flat."""
    made = plan(many_leaves(3, num_leaves, side), optim.adamw(1e-3), level=2, ranks=2)
    unit = 4 * num_leaves * side**2
    first = next(sample for sample in made.samples if sample.moment.startswith("backward of"))
    assert first.activations + first.gradients == pytest.approx(copies * unit + unit / 2, rel=0.02)


# Rajbhandari et al., "ZeRO" (2020), table 1: GB a device, of stages 1, 2 and 3
PAPER = {
    (7.5e9, 1): (120, 120, 120),
    (7.5e9, 4): (52.5, 41.3, 30),
    (7.5e9, 16): (35.6, 21.6, 7.5),
    (7.5e9, 64): (31.4, 16.6, 1.88),
    (7.5e9, 256): (30.4, 15.4, 0.47),
    (7.5e9, 1024): (30.1, 15.1, 0.12),
    (128e9, 1): (2048, 2048, 2048),
    (128e9, 4): (896, 704, 512),
    (128e9, 16): (608, 368, 128),
    (128e9, 64): (536, 284, 32),
    (128e9, 256): (518, 263, 8),
    (128e9, 1024): (513, 257, 2),
    (1e12, 1): (16000, 16000, 16000),
    (1e12, 4): (7000, 5500, 4000),
    (1e12, 16): (4750, 2875, 1000),
    (1e12, 64): (4187, 2218, 250),
    (1e12, 256): (4046, 2054, 62.5),
    (1e12, 1024): (4011, 2013, 15.6),
}


@pytest.mark.parametrize("row", PAPER, ids=str)
def test_the_zero_papers_table(row: tuple[float, int]) -> None:
    for level, gb in enumerate(PAPER[row], start=1):
        assert zero_bytes(*row, level=level) / 1e9 == pytest.approx(gb, rel=3e-3, abs=0.006)


def test_the_zero_papers_example() -> None:
    assert [round(zero_bytes(7.5e9, 64, level=level) / 1e9, 1) for level in range(4)] == [
        120,
        31.4,
        16.6,
        1.9,
    ]


@THOROUGH
def test_a_compiled_chain_is_not_compiled_for_a_plan() -> None:
    plain, compiled = (
        plan(decoder(depth=1), made(optim.adamw(1e-3)), level=2, ranks=2, batch=tokens())
        for made in (lambda optimizer: optimizer, optim.compiled)
    )
    assert compiled == plain


@THOROUGH
def test_compiled_units_are_planned_as_they_are() -> None:
    plans = []
    for chosen in (False, "blocks.*"):
        apply, params, _ = fz.functionalize(decoder(), "blocks.*", compile=chosen)
        step = fz.train_step(
            lambda p, b, batch, apply=apply: apply(p, b, *batch)[0], optim.adamw(1e-3)
        )
        plans.append(plan(params, step, level=3, ranks=2, batch=tokens()))
    assert plans[0] == plans[1]


FAR_APART, ALL = (0, 3), (0, 1, 2, 3)  # ranks; 0 and 3 differ along both axes


@pytest.mark.parametrize(
    ("level", "over", "planned"),
    tiers(
        thorough=[
            (3, "both", FAR_APART),
            (0, "shard", ALL),
            (2, "shard", ALL),
            (3, "both", ALL),
        ],
        rows=True,
    ),
)
def test_a_mesh_of_two_axes(level: int, over: Any, planned: tuple[int, ...]) -> None:
    depth = 1 if planned == FAR_APART else 3
    apply, params, buffers = fz.functionalize(decoder(depth=depth), "blocks.*")
    step = fz.train_step(lambda p, b, batch: apply(p, b, *batch)[0], optim.muon(1e-3))

    def on_rank(group: Any) -> tuple[Any, ...]:
        sharded = fz.shard(
            step, level=level, group=fz.HybridGroup(group, shard_size=2), state_axes=over
        )
        state = sharded.init(params, buffers)
        first = held(state.opt_state)
        return held(state.params), first, sharded.options.axes

    for rank, (bytes_of_params, first, axes) in enumerate(run_ranks(on_rank, 4)):
        own = axes_of(lone_rank(rank, 4, 2, None), both=over == "both")
        recorded = imagined(own, MemoryWatch(None, {}), swaps=True)
        assert axes.optimizer.rank == recorded.optimizer.rank
        if rank not in planned:  # a plan takes a second
            continue
        options: dict[str, Any] = {
            "level": level,
            "ranks": 4,
            "rank": rank,
            "shard_size": 2,
            "state_axes": over,
        }
        made = plan(params, step, batch=tokens(), **options)
        assert (made.params, made.state) == (bytes_of_params, first), rank
        groups = {c.group for c in made.collectives}
        assert groups == ({"all 4"} if level == 0 else {"all 4", "shard 2", "replicate 2"})


@pytest.mark.parametrize(
    ("level", "same_data"), tiers([(3, "shard")], [(2, "replicate")], rows=True)
)
def test_an_axis_of_the_same_data(level: int, same_data: Any) -> None:
    """With buffers, which are averaged over the other axis."""
    case = CASES["convnet"]()
    step, params, buffers = case.step(optim.lamb(1e-3))
    (batch,) = case.batches(1, max(ROWS, case.min_rows))

    def on_rank(group: Any) -> list[Call]:
        watched = counted(group)
        mesh = fz.HybridGroup(watched, shard_size=2, same_data=same_data)
        sharded = fz.shard(step, level=level, group=mesh)
        state = sharded.init(params, buffers)
        for _ in range(3):
            watched.reset()
            state, _ = sharded(state, batch)
        return list(watched.calls)

    options: dict[str, Any] = {"level": level, "ranks": 4, "same_data": same_data}
    for rank, calls in enumerate(run_ranks(on_rank, 4)):
        if rank in FAR_APART:
            more = {"shard_size": 2, "rank": rank, "batch": batch, "buffers": buffers}
            assert calls_of(plan(params, step, **options, **more)) == calls
    with pytest.raises(ValueError, match="there is one axis only"):
        plan(params, step, **options)


@THOROUGH
def test_measured_metrics_are_among_the_collectives() -> None:
    apply, params, buffers = fz.functionalize(decoder(depth=1), "blocks.*")

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
        return apply(params, buffers, *batch)[0], fz.Aux(
            weight=(batch[1] > 3).sum(), metrics={"a": torch.ones(())}
        )

    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3))
    step = fz.train_step(loss_fn, optimizer, metrics=["grad_norm", "update_norm"])
    made = plan(params, step, level=3, ranks=2, batch=tokens())
    for _, _, calls in run(step, params, buffers, [tokens()] * 2, 2, level=3):
        assert calls_of(made) == calls
    assert [c.kind for c in made.collectives if c.phase == "optimizer"] == ["all_reduce"] * 2


@pytest.mark.parametrize("level", tiers(thorough=[2, 0, 1, 3]))
def test_precision(level: int) -> None:
    precision = fz.Precision(compute=torch.bfloat16, reduce=torch.bfloat16 if level == 2 else None)
    apply, params, buffers = fz.functionalize(decoder(depth=1), "blocks.*", precision=precision)
    step = fz.train_step(
        lambda p, b, batch: apply(p, b, *batch)[0].float(), optim.lamb(1e-3), nonfinite="skip"
    )
    made = plan(params, step, level=level, ranks=2, batch=tokens())
    for state, first, calls in run(step, params, buffers, [tokens()] * 2, 2, level=level)[:1]:
        assert calls_of(made) == calls
        # Beside the optimizer's, the count of skipped steps
        assert (made.params, made.state) == (held(state.params), first + held(state.finite))
    assert made.assumed == 1
    unknown = plan(
        decoder(depth=1),
        optim.lamb(1e-3),
        level=level,
        ranks=2,
        units="blocks.*",
        precision=precision,
    )
    sizes = [
        [(c.kind, c.unit, c.dtype, c.nbytes) for c in p.collectives if c.unit]
        for p in (made, unknown)
    ]
    assert sizes[0] == sizes[1]


def test_owners_balance() -> None:
    params = {
        f"w{i}": torch.empty(8 * (i + 1), 8, device="meta", requires_grad=True) for i in range(6)
    }
    made = plan(params, optim.muon(1e-3), level=1, ranks=3)
    assert made.balance is not None
    assert {leaf.path for leaf in made.balance.leaves} == set(params)
    assert sum(made.balance.loads()) == pytest.approx(
        sum(leaf.cost for leaf in made.balance.leaves)
    )
    assert 1 <= made.balance.imbalance < 1.5
    assert "owners of 6 leaves" in str(made)
    assert plan(params, optim.adam(1e-3), level=1, ranks=3).balance is None


@THOROUGH
def test_nothing_given_is_changed_and_meta_does() -> None:
    model = decoder(depth=1)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    whole = plan(model, optim.adamw(1e-3), level=3, ranks=2, units="blocks.*", batch=tokens())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    with torch.device("meta"):
        empty = decoder(depth=1)
    batch = tuple(x.to("meta") for x in tokens())
    assert plan(empty, optim.adamw(1e-3), level=3, ranks=2, units="blocks.*", batch=batch) == whole


def test_json_and_table() -> None:
    model = decoder(depth=1)
    made = plan(model, optim.lamb(1e-3), level=3, ranks=2, units="blocks.*", batch=tokens())
    data = json.loads(made.to_json())
    assert data["peak"]["bytes"] == made.peak.total == max(sample.total for sample in made.samples)
    assert len(data["collectives"]) == len(made.collectives)
    assert (
        data["collectives"][0]["unit"] == "embed" and data["collectives"][0]["phase"] == "forward"
    )
    assert sum(c["sent_bytes"] for c in data["collectives"]) == made.sent_bytes
    text = str(made)
    assert repr(made) == text, "at a prompt"
    assert made.peak.moment in text and "reduce_scatter" in text and "activations" in text
    assert made.seconds(1e9) == made.sent_bytes / 1e9


def one_matrix(**options: Any) -> Plan:
    """Of 16,384 bytes, on 4 ranks at level 3."""
    model = nn.Linear(64, 64, bias=False, device="meta")
    return plan(model, optim.sgd(1.0), level=3, ranks=4, **options)


def test_seconds_of_one_link_by_hand() -> None:
    # A gather and a reduction, and two sums of metrics of 256 bytes
    sent = (2 * 16_384 + 2 * 2 * 256) * 3 / 4
    assert one_matrix().seconds(1_000.0) == sent / 1_000
    made = one_matrix(bandwidth=1_000.0)
    assert made.seconds() == 25.344
    assert "at least     25.3 s of communication per step" in str(made)
    assert json.loads(made.to_json())["seconds"] == 25.344
    assert "at least" not in str(one_matrix()) and "seconds" not in one_matrix().to_json()
    # A mesh whose axes share the links
    on_mesh = one_matrix(shard_size=2)
    assert on_mesh.seconds(1_000.0) == (3 * 8_192 + 768) / 1_000


@pytest.mark.parametrize(
    ("links", "seconds"),
    [
        # Along shard 8,192 bytes are gathered and as many reduced, along replicate pieces of 8,192
        # are summed, and metrics of 768 by the slower axis
        ({"shard": 8_192.0, "replicate": 1_024.0}, (8_192 + 768) / 1_024),
        ({"shard": 1_024.0, "replicate": 8_192.0}, (2 * 8_192 + 768) / 1_024),
    ],
)
def test_seconds_of_two_axes_by_hand(links: dict[str, float], seconds: float) -> None:
    made = one_matrix(shard_size=2, bandwidth=links)
    assert made.seconds() == seconds
    assert json.loads(made.to_json())["bandwidth"] == links


def test_a_bandwidth_that_is_none() -> None:
    made = one_matrix()
    for wrong in (0.0, -1.0, math.nan, {"shard": 1.0}, {"shard": 1.0, "all": 1.0}):
        with pytest.raises(ValueError, match=r"replicate 2 x shard 2.*of each axis: {'shard'"):
            one_matrix(shard_size=2, bandwidth=wrong)
        with pytest.raises(ValueError, match="a plan for 4 ranks"):
            made.seconds(wrong)
    with pytest.raises(TypeError, match="takes a bandwidth"):
        made.seconds()


def test_errors_say_what_to_do() -> None:
    _, params, _ = fz.functionalize(decoder(), "blocks.*")
    with pytest.raises(StructureError, match="pass train_step"):
        plan(params, optim.sgd(0.1), level=3, ranks=2, batch=tokens())
    with pytest.raises(StructureError, match="units and precision are of a module"):
        plan(params, optim.sgd(0.1), level=3, ranks=2, units="blocks.*")
    with pytest.raises(TypeError, match=r"before its step: expected fz\.plan\(params, step"):
        plan(optim.sgd(0.1), params, level=3, ranks=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got rank 0 of 0 ranks"):
        plan(params, optim.sgd(0.1), level=3, ranks=0)
    with pytest.raises(ValueError, match="got rank 2 of 2 ranks"):
        plan(params, optim.sgd(0.1), level=3, ranks=2, rank=2)
    with pytest.raises(ValueError, match="level must be one of"):
        plan(params, optim.sgd(0.1), level=4, ranks=2)
    with pytest.raises(ValueError, match="level from 0 to 3"):
        zero_bytes(1, 1, level=4)


def test_an_optimizer_that_reads_values_is_refused() -> None:
    def update(updates: Any, state: Any, params: Any, across: Any) -> Any:
        return (updates if float(across.total(updates)) > 1 else params), state

    optimizer = optim.with_statistics(lambda params: (), update)
    with pytest.raises(TransformError, match="reads values of tensors on the host"):
        plan(decoder(), optimizer, level=2, ranks=2)


AXES: dict[str, Callable[[Any], Any]] = {
    "one axis": lambda group: group,
    "replicas": lambda group: fz.HybridGroup(group, shard_size=2),
    "same data": lambda group: fz.HybridGroup(group, shard_size=2, same_data="shard"),
}


@pytest.mark.parametrize("axes", tiers(["same data"], ["one axis", "replicas"]))
def test_a_sharded_step_has_its_options(axes: str) -> None:
    case = models.mlp()
    step, params, buffers = case.step(optim.adamw(1e-3))
    batch = case.batches(1, 2)[0]
    options: dict[str, Any] = {"level": 2, "donate": False, "reduce_bucket": 2**10}
    mesh = {} if axes == "one axis" else {"shard_size": 2}
    if axes == "replicas":
        options["state_axes"] = "both"
    if axes == "same data":
        mesh["same_data"] = "shard"

    def planned(group: Any) -> Plan | None:
        sharded = fz.shard(step, group=AXES[axes](group), **options)
        if group.rank not in FAR_APART:
            return None
        return plan(params, sharded, batch=batch, buffers=buffers, bandwidth=1e9)

    plans = run_ranks(planned, 4)
    for rank in FAR_APART:
        made, told = plans[rank], {**options, **mesh, "ranks": 4, "rank": rank, "bandwidth": 1e9}
        assert made == plan(params, step, batch=batch, buffers=buffers, **told)
    sharded = fz.shard(step, group=CountingGroup(4), level=3)
    with pytest.raises(TypeError, match=r"takes level from the sharded step.*Remedy"):
        plan(params, sharded, level=2)
    with pytest.raises(TypeError, match=r"level=.* and ranks=.*, or a step that shard has made"):
        plan(params, step, level=2)
