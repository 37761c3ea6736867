"""Tables: rows that lie on several ranks, and travel when a loss looks them up. Equal to the
unsharded step, whose tables are whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed

import functorch_zero as fz
from functorch_zero import checkpoint, optim, testing
from functorch_zero.errors import NonFiniteError, StructureError
from functorch_zero.groups import SingleRank, counted, run_ranks
from functorch_zero.model.untouched import is_looked_at
from functorch_zero.testing import Equality, assert_sharded_equals_unsharded
from tests.compare import (
    Run,
    assert_equal_updates,
    assert_same_on_all_ranks,
    train,
    train_sharded,
)
from tests.conformance.table import TABLE as CONFORMANCE
from tests.modules import Net, seeded
from tests.planning.test_plan import allocations
from tests.runtime.test_exchange import Summing
from tests.sharded.test_seams import Rounded
from tests.tiers import THOROUGH, thinned, tiers

D = torch.float64
ROWS, COLUMNS = 13, 4  # which 2 and 3 ranks don't divide
TABLE = {"": 3, "emb": "table"}
Loss = Callable[..., Any]


def made(rows: int = ROWS, *, trained: bool = True, **options: Any) -> tuple[Any, Any]:
    """A net, and params with a table beside it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(COLUMNS, 5), nn.Tanh(), nn.Linear(5, 1)).to(D)
        apply, params, _ = fz.functionalize(net, **options)
        emb = torch.randn(rows, COLUMNS, dtype=D).requires_grad_(trained)
    return apply, {"emb": emb, "net": params}


def make_batches(num: int = 3, size: int = 12, rows: int = ROWS, *, width: int = 3) -> list[Any]:
    """Ids of which small ones are frequent, and numbers to predict."""
    g = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(num):
        ids = torch.randint(0, rows, (size, width), generator=g) ** 2 // rows
        batches.append({"ids": ids, "y": torch.randn(size, dtype=D, generator=g)})
    return batches


def predicting(apply: Any, look_up: Callable[[Any, Any], Tensor], weighted: bool = False) -> Loss:
    """The loss of a net on what a lookup gives, (rows of the batch, COLUMNS)."""

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
        out, _ = apply(params["net"], {}, look_up(params, batch))
        loss = (out[:, 0] - batch["y"]).square().mean()
        return (loss, fz.Aux(weight=float(len(batch["y"])))) if weighted else loss

    return loss_fn


def summed(params: Any, batch: Any) -> Tensor:
    return F.embedding(batch["ids"], params["emb"]).sum(1)


def adamw() -> Any:
    return optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(1e-2))


def prove(
    look_up: Callable[[Any, Any], Tensor] = summed,
    *,
    level: Any = TABLE,
    rows: int = ROWS,
    optimizer: Any = None,
    batches: Sequence[Any] | None = None,
    weighted: bool = False,
    accumulate: int = 1,
    of_step: Mapping[str, Any] | None = None,
    of_model: Mapping[str, Any] | None = None,
    trained: bool = True,
    **options: Any,
) -> None:
    apply, params = made(rows, trained=trained, **of_model or {})
    loss_fn = predicting(apply, look_up, weighted)
    step = fz.train_step(loss_fn, optimizer or adamw(), accumulate=accumulate, **of_step or {})
    options = {"ranks": (2, 3), "levels": (level,), **options}
    batches = make_batches(rows=rows) if batches is None else batches
    assert_sharded_equals_unsharded(step, params, {}, batches, **options)


KINDS = ("lion", "schedule_free_adamw", "lars", "sm3", "lbfgs", "shampoo", "prodigy", "adagrad")
FIRST = ("adafactor", "lamb", "muon")
REST = [name for name in CONFORMANCE if name not in {*FIRST, *KINDS}]


@pytest.mark.parametrize("name", tiers(FIRST, KINDS, REST))
def test_every_optimizer(name: str) -> None:
    """Of the conformance table; pointwise ones, sums, dims, whole matrices, the whole tree."""
    row = CONFORMANCE[name]
    grade = row.grade if row.grade and row.grade.grade == "approximate" else "reordered"
    # Of matrices without full rank, and of values that cancel
    allow_round_off = any(kind in name for kind in ("shampoo", "soap", "stddev"))
    prove(optimizer=row.make(), ranks=(2,), grade=grade, allow_round_off=allow_round_off)


@pytest.mark.parametrize("level", thinned([0, 1, 2, 3]))
def test_beside_every_level(level: int) -> None:
    prove(level={"": level, "emb": "table"})


@pytest.mark.parametrize("rows", thinned([2, 5, 12, 64]))
def test_uneven_tables(rows: int) -> None:
    prove(rows=rows, unused=["emb"] if rows == 2 else [])


def bag(**options: Any) -> Callable[[Any, Any], Tensor]:
    return lambda params, batch: F.embedding_bag(batch["ids"], params["emb"], **options)


def bags_by_offsets(params: Any, batch: Any, **options: Any) -> Tensor:
    """Bags of 0 to 3 ids."""
    chosen = batch["ids"] % 3 > 0
    ends = chosen.sum(1).cumsum(0)
    offsets = torch.cat([ends.new_zeros(1), ends])
    if not options.get("include_last_offset"):
        offsets = offsets[:-1]
    return F.embedding_bag(batch["ids"][chosen], params["emb"], offsets, **options)


def bags_of_small_numbers(params: Any, batch: Any) -> Tensor:
    batch = {**batch, "ids": batch["ids"].int()}
    return bags_by_offsets(params, batch, include_last_offset=True, mode="sum")


def weighted_bags(params: Any, batch: Any) -> Tensor:
    weights = (params["net"]["0.weight"].sum() * batch["ids"]).sin()
    return F.embedding_bag(batch["ids"], params["emb"], mode="sum", per_sample_weights=weights)


def twice(params: Any, batch: Any) -> Tensor:
    ids, emb = batch["ids"], params["emb"]
    return F.embedding(ids[:, :2], emb).sum(1) * F.embedding(ids[:, 2], emb)


def by_itself(params: Any, batch: Any) -> Tensor:
    """Ids that follow from rows."""
    first = F.embedding(batch["ids"][:, 0], params["emb"])
    with torch.no_grad():
        again = (first.sum(1).abs() * 7).long() % ROWS
    return first + F.embedding(again, params["emb"])


def without_gradients(params: Any, batch: Any) -> Tensor:
    with torch.no_grad():
        fixed = F.embedding(batch["ids"][:, 1], params["emb"])
    return summed(params, batch) + fixed


def hot(params: Any, batch: Any) -> Tensor:
    return F.embedding(batch["ids"].clamp(max=0) + 7, params["emb"]).sum(1) + summed(params, batch)


def in_checkpoint(params: Any, batch: Any) -> Tensor:
    found: Tensor = recomputed(lambda: summed(params, batch).sin(), use_reentrant=False)
    return found


def slopes(params: Any, batch: Any) -> Tensor:
    """The gradient by what was looked up, which stays on the rank."""
    rows = summed(params, batch)
    (slope,) = torch.autograd.grad(rows.sin().square().sum(), rows, create_graph=True)
    return rows + slope


def written_to(params: Any, batch: Any) -> Tensor:
    rows = F.embedding(batch["ids"], params["emb"])
    rows[:, 0] *= 2
    return rows.sum(1)


LOOKUPS: dict[str, Callable[[Any, Any], Tensor]] = {
    "padding": lambda p, b: F.embedding(b["ids"], p["emb"], padding_idx=0).sum(1),
    "padding from the end": lambda p, b: F.embedding(b["ids"], p["emb"], -13).sum(1),
    "padding that no id names": lambda p, b: F.embedding(b["ids"], p["emb"], 12).sum(1),
    "sparse": lambda p, b: F.embedding(b["ids"], p["emb"], sparse=True).sum(1),
    "no ids": lambda p, b: summed(p, b) + F.embedding(b["ids"][:, :0], p["emb"]).sum(1),
    "sum of bags": bag(mode="sum", padding_idx=0),
    "mean of bags": bag(mode="mean"),
    "max of bags": bag(mode="max", padding_idx=2),
    "bags by offsets": lambda p, b: bags_by_offsets(p, b, mode="mean", padding_idx=1),
    "bags of int32": bags_of_small_numbers,
    "weights in bags": weighted_bags,
    "twice": twice,
    "ids of rows": by_itself,
    "without gradients": without_gradients,
    "hot": hot,
    "in a checkpoint": in_checkpoint,
    "gradients by rows": slopes,
    "written to": written_to,
}


@pytest.mark.parametrize("name", thinned(LOOKUPS, len(LOOKUPS)))
def test_lookups(name: str) -> None:
    prove(LOOKUPS[name], batches=make_batches(2))


MESHES: dict[str, dict[str, Any]] = {
    "replicas": {},
    "both": {"state_axes": "both"},
    "same data along shard": {"same_data": "shard"},
    "same data along replicate": {"same_data": "replicate"},
    "same data, both": {"same_data": "shard", "state_axes": "both"},
}


@pytest.mark.parametrize("name", thinned(MESHES))
def test_on_a_mesh(name: str) -> None:
    prove(ranks=(4,), shard_size=2, **MESHES[name])


SETTINGS: dict[str, dict[str, Any]] = {
    "clipping, with the norm among the metrics": {"of_step": {"metrics": ["grad_norm"]}},
    "accumulation": {"accumulate": 2},
    "reduced once": {"accumulate": 2, "reduce_gradients": "once"},
    "kept flats": {"accumulate": 2, "reshard_after_forward": False},
    "weights": {"weighted": True, "batches": make_batches(2, 13)},
    "weights and accumulation": {"weighted": True, "accumulate": 2, "batches": make_batches(2, 13)},
    "donated": {"donate": True},
    "frozen": {"trained": False},
    "skipped steps": {"of_step": {"nonfinite": "skip"}},
    "recomputed": {"of_model": {"remat": True}},
    "one rank": {"ranks": (1,)},
    "a loss scale": {"of_step": {"loss_scale": fz.LossScale()}, "ranks": (2,)},
    "gradients summed together": {"level": {"": 1, "emb": "table"}, "reduce_bucket": 1000},
    # Which keeps what it has rounded: nothing
    "a reduction, weights": {
        "level": {"": 1, "emb": "table"},
        "reduction": Rounded(D),
        "weighted": True,
        "accumulate": 2,
        "batches": make_batches(2, 13),
        "ranks": (2,),
    },
}


@pytest.mark.parametrize("name", thinned(SETTINGS, len(SETTINGS)))
def test_settings(name: str) -> None:
    prove(**SETTINGS[name])


def apart(of_table: optim.Transform) -> optim.Transform:
    """A table's optimizer beside that of the other leaves."""
    by_kind = {"table": of_table, "net": optim.adamw(1e-2)}
    return optim.partition(by_kind, lambda path, leaf: "table" if path == "emb" else "net")


IN_ROWS: dict[str, dict[str, Any]] = {
    "masked": {
        "optimizer": optim.chain(
            optim.masked(optim.add_decayed_weights(0.1), lambda path, leaf: path != "emb"),
            optim.inject_hyperparams(optim.rows.adagrad_by_row)(0.1),
        ),
        "accumulate": 2,
    },
    "of one kind": {
        "optimizer": optim.chain(optim.clip_by_global_norm(0.1), optim.rows.sgd(0.1)),
        "weighted": True,
        "accumulate": 2,
        "batches": make_batches(2, 13),
    },
    "beside others": {
        "optimizer": optim.chain(
            optim.clip_by_global_norm(0.1), apart(optim.rows.lazy_adam(0.1)), optim.scale(0.5)
        ),
        "of_step": {"metrics": ["grad_norm", "update_norm"], "nonfinite": "skip"},
        "donate": True,
    },
    "one rank": {"optimizer": apart(optim.rows.adagrad(0.1)), "ranks": (1,), "donate": True},
    "dense ones behind": {
        "optimizer": optim.chain(
            optim.rows.adagrad(0.1), optim.add_decayed_weights(0.1), optim.trace(0.9)
        ),
    },
    "a norm in front": {
        "optimizer": optim.chain(optim.contrib.clip_by_block_rms(0.1), optim.rows.adagrad(0.1)),
    },
}


@pytest.mark.parametrize("name", thinned(IN_ROWS))
def test_gradients_in_rows(name: str) -> None:
    """Optimizers that see rows alone, among others that are given dense updates."""
    prove(**IN_ROWS[name])


@pytest.mark.parametrize("nonfinite", thinned(["skip", "raise"], 2))
def test_rows_that_are_not_finite(nonfinite: str) -> None:
    apply, params = made()
    step = fz.train_step(
        predicting(apply, summed),
        apart(optim.rows.sgd(0.1)),
        metrics=["update_norm", "grad_norm"],
        nonfinite=nonfinite,
    )
    batch = make_batches(1)[0]
    batch["y"][0] = torch.inf

    def run(group: Any) -> Any:
        sharded = fz.shard(step, level=TABLE, group=group)
        return sharded(sharded.init(params, {}), halves(batch, group))[1]

    if nonfinite == "raise":
        with pytest.raises(NonFiniteError, match=r"gradients of .*\bemb,"):
            run_ranks(run, 2)
        return
    for metrics in run_ranks(run, 2):
        assert metrics["update_norm"] == 0 and metrics["skipped"] == 1


def test_a_norm_that_is_no_number_reaches_all_rows() -> None:
    """As it does in one process, where nothing is asked of non-finite gradients."""
    apply, params = made()
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), apart(optim.rows.sgd(0.1)))
    step = fz.train_step(predicting(apply, summed), optimizer)
    batch = make_batches(1)[0]
    batch["y"][0] = torch.inf

    def run(group: Any) -> Any:
        sharded = fz.shard(step, level=TABLE, group=group)
        state, _ = sharded(sharded.init(params, {}), halves(batch, group))
        return sharded.unshard(state).params

    whole, _ = step(step.init(params, {}), batch)
    assert all(bool(leaf.isnan().all()) for leaf in optree.tree_leaves(whole.params["emb"]))
    for found in run_ranks(run, 2):
        ours = fz.named_leaves(found)
        for path, leaf in fz.named_leaves(whole.params).items():
            assert torch.equal(leaf.isnan(), ours[path].isnan()), path


def test_no_tensor_is_as_large_as_the_piece() -> None:
    """From the ids to the params that are written over, of one rank."""
    step, params, ids = large(4_000, 50)
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), apart(optim.rows.adagrad(0.1)))
    step = fz.train_step(step.loss_fn, optimizer, nonfinite="raise", metrics=["update_norm"])
    sharded = fz.shard(step, level=TABLE, group=SingleRank())
    state, events = sharded.init(params, {}), list[int]()
    for _ in range(5):
        state, _ = sharded(state, {"ids": ids[0], "y": torch.zeros(10)})
    assert not is_looked_at(int(state.step))
    with allocations(events):
        sharded(state, {"ids": ids[0], "y": torch.zeros(10)})
    assert 0 < max(events) < 4_000 * 16 * 4 / 4


@pytest.mark.parametrize("kind", tiers(["params"], ["state", "gradients", "saved"]))
def test_in_a_place(kind: str, tmp_path: Path) -> None:
    prove(place={kind: fz.places.File(tmp_path)}, accumulate=2, ranks=(2,))


def ranker(*, sparse: bool = True, **options: Any) -> Net:
    """Two tables, of which the bags' has a padding row."""
    return Net(
        lambda net, ids: net.net(net.items(ids[:, 0]) + net.tags(ids[:, 1:] % 7))[:, 0],
        items=nn.Embedding(ROWS, COLUMNS, sparse=sparse, **options),
        tags=nn.EmbeddingBag(7, COLUMNS, mode="sum", sparse=sparse, padding_idx=0),
        net=nn.Sequential(nn.Linear(COLUMNS, 5), nn.Tanh(), nn.Linear(5, 1)),
    )


def build(*, optimizer: Any = None, inside: bool = False, **options: Any) -> tuple[Any, Any, Any]:
    model = seeded(lambda: ranker().to(D))
    apply, params, buffers = fz.functionalize(nn.Sequential(model) if inside else model, **options)

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
        out, _ = apply(params, buffers, batch["ids"])
        return (out - batch["y"]).square().mean()

    return fz.train_step(loss_fn, optimizer or adamw()), params, buffers


def levels_of(params: Any, level: Any, group: Any = None) -> dict[str, int | str]:
    """The level of each leaf."""
    step = fz.train_step(lambda p, b, x: p["w"].sum(), optim.sgd(0.1))
    state = fz.shard(step, level=level, group=group or SingleRank()).init(params, {})
    return {leaf.path: leaf.cut.level_name for leaf in state.sharding.layout.leaves}


def test_sparse_modules_are_tables_at_levels_1_to_3() -> None:
    _, params, _ = build()
    tables = {"items.weight", "tags.weight"}
    for level in (1, 2, 3, {"": 2}, {"": 0, "tags": 1, "items": 3}):
        found = levels_of(params, level)
        assert {path for path, own in found.items() if own == "table"} == tables
    assert {*levels_of(params, 0).values()} == {0}
    # Whoever names the leaf itself, or gives a function, means it
    assert levels_of(params, {"": 3, "items.weight": 3, "tags": 0})["items.weight"] == 3
    assert {*levels_of(params, lambda path, leaf: 3).values()} == {3}
    assert levels_of({"net": params}, 3)["net.items.weight"] == "table"
    assert {*levels_of(dict(params), 3).values()} == {3}  # a plain dict has forgotten its model


def test_nothing_but_a_table() -> None:
    apply, params, _ = fz.functionalize(nn.EmbeddingBag(ROWS, COLUMNS, mode="sum", sparse=True))
    params = optree.tree_map(lambda p: p.detach().double().requires_grad_(), params)

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
        return (apply(params, {}, batch["ids"])[0].sum(1) - batch["y"]).square().mean()

    step = fz.train_step(loss_fn, adamw())
    sharded = fz.shard(step, level="table", group=SingleRank())
    assert sharded.level is None and "all of them table" in repr(sharded.init(params, {}))
    options: Any = {"levels": (1, 3, "table"), "ranks": (2,)}
    assert_sharded_equals_unsharded(step, params, {}, make_batches(2), **options)


def test_what_is_no_table_by_itself() -> None:
    """Where it couldn't be one, `sparse=True` stays what it was."""
    assert "table" not in levels_of(fz.functionalize(ranker(sparse=False))[1], 3).values()
    tied = ranker()
    tied.head = nn.Linear(COLUMNS, ROWS, bias=False)
    tied.head.weight = tied.items.weight
    for model in (tied, ranker(max_norm=1.0), ranker(scale_grad_by_freq=True)):
        assert levels_of(fz.functionalize(model)[1], 3)["items.weight"] == 3
    params = fz.functionalize(ranker(), compile=True)[1]
    assert {*levels_of(params, 3).values()} == {3}
    blocks = fz.Precision(gather=fz.compress.Blocks(torch.int8, 4))
    params = fz.functionalize(ranker(), precision={"items": blocks})[1]
    assert levels_of(params, 3) | {"items.weight": 0} == levels_of(params, 3) | {"items.weight": 0}
    assert levels_of(params, 3)["items.weight"] == 3


@pytest.mark.parametrize("level", thinned([1, 2, 3, 0]))
@pytest.mark.parametrize("ranks", thinned([2, 3]))
def test_modules(level: int, ranks: int) -> None:
    step, params, buffers = build()
    assert_sharded_equals_unsharded(
        step, params, buffers, make_batches(), levels=(level,), ranks=(ranks,)
    )


@pytest.mark.parametrize("remat", tiers([True], [False]))
def test_inside_of_a_unit(remat: bool) -> None:
    """Tables are no part of the unit around them, which is gathered and computed again."""
    step, params, buffers = build(inside=True, remat=remat)
    assert_sharded_equals_unsharded(step, params, buffers, make_batches(2), levels=(3,), ranks=(2,))


@pytest.mark.parametrize("level", tiers([3], [1]))
def test_precision(level: int) -> None:
    """Rows and their gradients travel in halves of the storage's bytes, rounded as ever."""
    precision = fz.Precision(compute=torch.float32, reduce=torch.float32)
    step, params, buffers = build(precision=precision, optimizer=optim.sgd(0.1))
    grade = Equality("approximate", 3e-6, reason="float32's rounding")
    batches = make_batches(2)
    options: Any = {"levels": (level,), "ranks": (2,), "grade": grade}
    assert_sharded_equals_unsharded(step, params, buffers, batches, **options)

    def run(group: Any) -> set[torch.dtype]:
        watched = counted(group)
        sharded = fz.shard(step, level=level, group=watched)
        sharded(sharded.init(params, buffers), halves(batches[0], group))
        return {call.dtype for call in watched.calls if call.kind == "all_to_all"}

    assert run_ranks(run, 2) == [{torch.int64, torch.float32}] * 2


def test_deferred_values() -> None:
    with torch.device("meta"):
        model = ranker()
    _, params, buffers = fz.functionalize(model)
    values = fz.deferred_init(model, seed=0)
    step = fz.train_step(lambda p, b, batch: p["items.weight"].sum(), adamw())
    alone = step.init(params, buffers, values=values).params

    def run(group: Any) -> Any:
        sharded = fz.shard(step, level=3, group=group)
        return sharded.unshard(sharded.init(params, buffers, values=values)).params

    for whole in run_ranks(run, 2):
        assert all(torch.equal(whole[path], leaf) for path, leaf in alone.items())


@THOROUGH  # torch's compiler is imported
def test_a_compiled_unit_is_refused() -> None:
    apply, params, _ = fz.functionalize(ranker(sparse=False).to(D), compile="items")

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
        return (apply(params, buffers, batch["ids"])[0] - batch["y"]).square().mean()

    step = fz.train_step(loss_fn, adamw())
    sharded = fz.shard(step, level={"": 3, "items.weight": "table"}, group=SingleRank())
    with pytest.raises(StructureError, match=r"inside of a compiled unit: path items\.weight"):
        sharded(sharded.init(params, {}), make_batches(1)[0])


@pytest.mark.parametrize("ranks", thinned([2, 1]))
def test_a_program_reads_gradients_of_tables(ranks: int) -> None:
    """They are rows until it does."""
    apply, params = made()
    loss_of, optimizer = predicting(apply, summed), apart(optim.rows.adagrad(0.1))

    def program(value: Any, batch: Any) -> Any:
        params, opt, last = value
        gradient = fz.value_and_grad(lambda params, batch: loss_of(params, {}, batch))
        loss, grads = gradient(params, batch)
        found = {"loss": loss, "dot": fz.dot(grads, grads), **fz.optim.norms(grads=grads)}
        whole = fz.unshard(grads)
        found["largest"] = whole["emb"].abs().max()
        params, opt = optimizer.apply(grads, opt, params)
        grads = fz.value_and_grad(lambda params, batch: loss_of(params, {}, batch))(params, batch)[
            1
        ]
        mixed = optree.tree_map(lambda old, new: 0.5 * old + new, last, grads)
        return (*optimizer.apply(mixed, opt, params), grads), found

    step = fz.program_step(
        program, init=lambda params: (params, optimizer.init(params), fz.zero_updates(params))
    )
    assert_sharded_equals_unsharded(
        step,
        params,
        make_batches(),
        levels=({"": 3, "params.emb": "table"},),
        ranks=(ranks,),
        donate=True,
    )


def halves(batch: Any, group: Any, sizes: Sequence[int] | None = None) -> Any:
    """This rank's part of a batch."""
    cut = {name: x.tensor_split(group.size) for name, x in batch.items()}
    if sizes is not None:
        cut = {name: x.split(list(sizes)) for name, x in batch.items()}
    return {name: parts[group.rank] for name, parts in cut.items()}


@pytest.mark.parametrize("level", tiers([3], [0, 1]))
def test_ranks_without_rows(level: int) -> None:
    """A rank whose part is empty asks for nothing, and holds rows that others ask for."""
    apply, params = made()

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
        out, _ = apply(params["net"], {}, summed(params, batch))
        return (out[:, 0] - batch["y"]).square().mean(), fz.Aux(weight=float(len(batch["y"])))

    step, batches = fz.train_step(loss_fn, adamw()), make_batches(3, 8)
    sizes = [0, 8, 0], [3, 0, 5], [8, 0, 0]
    expected = train(step, params, {}, batches)

    def run(group: Any) -> Any:
        sharded = fz.shard(step, level={"": level, "emb": "table"}, group=group)
        state = sharded.init(params, {})
        for batch, own in zip(batches, sizes, strict=True):
            state, _ = sharded(state, halves(batch, group, own))
        return sharded.unshard(state).params

    for got in run_ranks(run, 3):
        testing.assert_equal_updates(params, expected.states[-1].params, got)


@pytest.mark.parametrize("level", thinned([3, 0, 1, 2], 4))
def test_beside_another_exchange(level: int) -> None:
    """Weights of a loss that also sums what it has looked up over the ranks: the seed carries them,
    and a rank without rows has gradients of the others' losses."""

    def step_on(group: Any) -> tuple[Any, Any]:
        apply, params = made()

        def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
            rows = summed(params, batch)
            total = Summing(group, params)(rows.sum(0))
            out, _ = apply(params["net"], {}, rows)
            apart = (out[:, 0] - batch["y"]).square() * (1 + total.square().sum())
            return apart.sum() / max(len(rows), 1), fz.Aux(weight=float(len(rows)))

        return fz.train_step(loss_fn, adamw()), params

    def run(group: Any) -> Run:
        step, params = step_on(group)
        rule = {"": level, "emb": "table"}
        return train_sharded(group, step, params, {}, batches, [2, 0, 7], level=rule)

    step, params = step_on(None)
    batches = make_batches(3, 9)
    runs = run_ranks(run, 3)
    assert_same_on_all_ranks(runs)
    assert_equal_updates(train(step, params, {}, batches), runs[0])


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [3, 1, 2])
def test_checkpoints_between_levels(tmp_path: Path, ranks: int) -> None:
    """Saved by two ranks with a table, loaded by any number at any level, and trained on."""
    apply, params = made()
    step, batches = fz.train_step(predicting(apply, summed), adamw()), make_batches(4)
    expected = train(step, params, {}, batches)

    def save(group: Any) -> None:
        sharded = fz.shard(step, level=TABLE, group=group)
        state = sharded.init(params, {})
        for batch in batches[:2]:
            state, _ = sharded(state, halves(batch, group))
        checkpoint.save(tmp_path / "first", sharded, state)

    def go_on(group: Any, level: Any, at: str, then: str) -> Any:
        sharded = fz.shard(step, level=level, group=group)
        state = checkpoint.load(tmp_path / at, sharded, like=sharded.init(params, {})).state
        if then:
            checkpoint.save(tmp_path / then, sharded, state)
            return None
        for batch in batches[2:]:
            state, _ = sharded(state, halves(batch, group))
        return sharded.unshard(state).params

    run_ranks(save, 2)
    for level in (TABLE, {"": 3, "emb": 1}, 0, 3):
        (got, *_) = run_ranks(lambda group, level=level: go_on(group, level, "first", ""), ranks)
        testing.assert_equal_updates(params, expected.states[-1].params, got)
    run_ranks(lambda group: go_on(group, 3, "first", "second"), ranks)
    (got, *_) = run_ranks(lambda group: go_on(group, TABLE, "second", ""), 2)
    testing.assert_equal_updates(params, expected.states[-1].params, got)


def test_states_and_evaluations() -> None:
    """`step.shard` is the inverse of `unshard`; `refit` takes a table along; evaluations look up
    the state's rows, and those of an average."""
    apply, params, _ = seeded(lambda: fz.functionalize(ranker().to(D)))

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
        return (apply(params, {}, batch["ids"])[0] - batch["y"]).square().mean()

    step = fz.train_step(loss_fn, optim.params_ema(adamw(), 0.9))
    evaluations = [
        fz.eval_step(lambda p, b, batch: {"loss": loss_fn(p, b, batch)}, params=choice)
        for choice in (None, optim.ema_params)
    ]
    batch = make_batches(1)[0]
    whole, _ = step(step.init(params, {}), batch)
    expected = [float(evaluate(whole, batch)["loss"]) for evaluate in evaluations]

    def run(group: Any) -> Any:
        sharded = fz.shard(step, level=3, group=group)
        state, _ = sharded(sharded.init(params, {}), halves(batch, group))
        again = sharded.shard(sharded.unshard(state))
        same = zip(state.params.flats(), again.params.flats(), strict=True)
        assert all(torch.equal(a, b) for a, b in same)
        sharded_too = [fz.shard(evaluate, level=3, group=group) for evaluate in evaluations]
        found = [float(each(state, halves(batch, group))["loss"]) for each in sharded_too]
        assert found == pytest.approx(expected, rel=1e-12)
        return sharded.unshard(sharded.refit(state, params, {})).params

    for got in run_ranks(run, 2):
        testing.assert_equal_updates(params, whole.params, got)


def test_trees_of_the_same_rows_make_dense_flats_of_their_own() -> None:
    """So the leaves of each stay views of the flats that it has."""
    apply, params, _ = fz.functionalize(nn.Sequential(nn.Embedding(6, 2, sparse=True)))

    def run(group: Any) -> None:
        tree = fz.shard_tree(params, level=3, group=group)
        ids = torch.tensor([1, 5])
        _, grads = fz.value_and_grad(lambda p: apply(p, {}, ids)[0].sum())(tree)
        assert grads.local_rows  # leaves that are rows, which both have
        same = grads.held_as(replace(grads.holding, name="same"))
        (flat,), (other,) = grads.flats(), same.flats()
        assert grads.flats()[0] is flat is not other and torch.equal(flat, other)

    run_ranks(run, 2)


def large(rows: int, asked: int) -> tuple[Any, Any, Tensor]:
    """A step, its params with a table, and ids of so many rows for each of two ranks."""
    apply, net, _ = fz.functionalize(nn.Linear(16, 1))
    params = {"emb": torch.zeros(rows, 16, requires_grad=True), "net": net}
    step = fz.train_step(predicting(apply, summed), optim.adamw(0.1))
    ids = torch.randperm(rows, generator=torch.Generator().manual_seed(0))[: 2 * asked]
    return step, params, ids.view(2, -1, 5)
