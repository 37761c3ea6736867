"""Part A: steps on ranks, which are threads of one GPU, beside the unsharded step there."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import checkpoint, optim, testing
from functorch_zero.compress import Blocks
from functorch_zero.groups import run_ranks
from functorch_zero.precision import short
from tests.conformance.table import TABLE
from tests.conformance.tree import batches, hostile
from tests.gpu.report import DEVICE, Report
from tests.models import ZOO, Block, Case
from tests.programs.cases import CASES as PROGRAM_CASES

# Rows of the conformance table: pointwise, by sums, by dims, whole matrices, the whole tree
OPTIMIZERS = (
    "adamw", "lion", "schedule_free_adamw", "clip_by_global_norm", "lamb", "lars", "adafactor",
    "adafactor, momentum", "sm3", "muon", "shampoo", "soap", "lbfgs", "prodigy",
)  # fmt: skip
TINY_OPTIMIZERS = ("adafactor", "muon")
# Several networks, displaced params, a teacher, second derivatives
PROGRAMS = ("gan", "sam", "byol", "adahessian")
TINY_PROGRAMS = ("gan",)
TINY_MODELS = ("mlp", "convnet", "frozen")
E4M3 = torch.float8_e4m3fn


def suite(report: Report) -> None:
    levels = (3,) if report.tiny else (0, 1, 2, 3)
    for name in TINY_MODELS if report.tiny else ZOO:
        check(report, f"model {name}", lambda name=name: of_model(ZOO[name], levels))
    check(report, "tied leaves, remat", lambda: of_model(ZOO["gpt"], levels, remat=Block))
    check(report, "accumulation", lambda: of_model(ZOO["mlp"], levels, accumulate=2))
    check(report, "a loss scale", lambda: of_model(ZOO["mlp"], levels, loss_scale=fz.LossScale()))
    check(report, "non-finite skipped", lambda: of_model(ZOO["mlp"], levels, nonfinite="skip"))
    check(report, "torch.func in the loss", lambda: of_derivative(levels))
    check(report, "replicas of shards", lambda: of_replicas(levels))
    check(report, "rows of all ranks", lambda: of_all_rows(levels))
    check(report, "BatchNorm of all rows", lambda: of_all_normed(levels))
    for dtype in (torch.int8,) if report.tiny else (torch.int8, E4M3, torch.float8_e5m2):
        check(report, f"codecs, {short(dtype)}", lambda dtype=dtype: of_codec(dtype, levels))
    check(report, "gradients summed together", lambda: of_reduce_bucket(levels))
    for name in TINY_OPTIMIZERS if report.tiny else OPTIMIZERS:
        check(report, f"optimizer {name}", lambda name=name: of_optimizer(name, levels))
    for name in TINY_PROGRAMS if report.tiny else PROGRAMS:
        check(report, f"program {name}", lambda name=name: of_program(name, levels))
    check(report, "random numbers", dropout_repeats)
    check(report, "deferred initialisation", of_deferred_init)
    check(report, "whole state to pieces", of_whole_state)
    for level in levels:
        check(report, f"checkpoint, level {level}", lambda level=level: of_checkpoint(level))


def check(report: Report, name: str, run: Callable[[], object]) -> None:
    """Whether something holds, which raises where it doesn't."""
    with report.failing(name):
        run()
        report.check_result(name, "equal", True, "as in one process")


def on_device(tree: Any) -> Any:
    """A tree of tensors there, trained where it was."""
    return optree.tree_map(lambda x: x.detach().to(DEVICE).requires_grad_(x.requires_grad), tree)


# ---- Cases ----


def of_model(case: Case, levels: tuple[int, ...], remat: Any = False, **options: Any) -> None:
    """`options`: of `train_step`."""
    loss_fn, params, buffers = built(case, remat)
    rate = 1e-2
    testing.assert_sharded_equals_unsharded(
        fz.train_step(loss_fn, optim.adamw(rate), **options),
        on_device(params),
        on_device(buffers),
        on_device(case.batches(2, 8)),
        levels=levels,
        ranks=(2,),
        per_rank=case.by_rank,
        unused=case.unused,
    )


def built(case: Case, remat: Any) -> tuple[Any, Any, Mapping[str, Tensor]]:
    if not remat:
        return case.build()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        apply, params, buffers = fz.functionalize(
            case.model().double(), units=case.units, remat=remat
        )

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
        return case.criterion(apply(params, buffers, batch["x"])[0], batch["y"])

    return loss_fn, params, buffers


def smooth() -> nn.Module:
    """A function of two numbers, with derivatives of every order."""
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def of_derivative(levels: tuple[int, ...]) -> None:
    """A loss of the model's derivative by its input, by grad and vmap."""
    torch.manual_seed(0)
    apply, params, buffers = fz.functionalize(smooth().double())

    def loss_fn(params: Any, buffers: Any, x: Tensor) -> Tensor:
        value = lambda point: apply(params, buffers, point)[0].sum()
        slopes = torch.func.vmap(torch.func.grad(value))(x)
        return (slopes - x).square().mean()

    testing.assert_sharded_equals_unsharded(
        fz.train_step(loss_fn, optim.adamw(1e-2)),
        on_device(params),
        buffers,
        [torch.randn(8, 2, dtype=torch.float64).to(DEVICE)],
        levels=levels,
        ranks=(2,),
        unused=("4.bias",),  # a constant, which no derivative sees
    )


def of_replicas(levels: tuple[int, ...]) -> None:
    case = ZOO["mlp"]
    loss_fn, params, buffers = case.build()
    testing.assert_sharded_equals_unsharded(
        fz.train_step(loss_fn, optim.adamw(1e-2)),
        on_device(params),
        on_device(buffers),
        on_device(case.batches(2, 8)),
        levels=levels,
        ranks=(4,),
        shard_size=2,
    )


def of_all_rows(levels: tuple[int, ...]) -> None:
    """A contrastive loss of the whole batch, in chunks, and a mean of it: gathers, sums, and those
    that they owe."""
    torch.manual_seed(0)
    apply, params, _ = fz.functionalize(smooth().double(), units=nn.Linear)

    def loss_fn(params: Any, buffers: Any, x: Tensor) -> Any:
        own = fz.batch.in_chunks(lambda rows: apply(params, {}, rows)[0], 2)(x)
        rows = fz.batch.all_rows(torch.cat([own, x], 1))
        logits = rows @ rows.roll(1, 0).T - fz.batch.mean(own).square().sum()
        labels = torch.arange(len(rows), device=rows.device)
        contrast = torch.nn.functional.cross_entropy(logits, labels)
        return contrast + fz.batch.mean(own.square()).sum(), fz.Aux(weight=1.0)

    testing.assert_sharded_equals_unsharded(
        fz.train_step(loss_fn, optim.sgd(0.1)),
        on_device(params),
        {},
        [torch.randn(5, 2, dtype=torch.float64).to(DEVICE) for _ in range(2)],
        levels=levels,
        ranks=(2, 3),
    )


def of_all_normed(levels: tuple[int, ...]) -> None:
    """BatchNorm over the whole batch, recomputed in backward."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Sequential(nn.Linear(2, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh()), nn.Linear(8, 1)
    )
    model = fz.batch.sync_batch_norm(model).double()
    apply, params, buffers = fz.functionalize(model, units=["0"], remat=True)

    def loss_fn(params: Any, buffers: Any, x: Tensor) -> Any:
        y, buffers = apply(params, buffers, x)
        error = (y - x.prod(1, keepdim=True)).square().mean()
        return error, fz.Aux(buffers=buffers, weight=len(x))

    testing.assert_sharded_equals_unsharded(
        fz.train_step(loss_fn, optim.sgd(0.1)),
        on_device(params),
        on_device(buffers),
        [torch.randn(7, 2, dtype=torch.float64).to(DEVICE) for _ in range(2)],
        levels=levels,
        ranks=(2, 3),
    )


def of_codec(dtype: torch.dtype, levels: tuple[int, ...]) -> None:
    """Leaves and gradients in 8 bits, which the GPU rounds on ranks as in one process."""
    torch.manual_seed(0)
    codec = Blocks(dtype, 16)
    policy = fz.Precision(gather=codec, reduce=codec)
    apply, params, _ = fz.functionalize(smooth().double(), units=nn.Linear, precision=policy)

    def loss_fn(params: Any, buffers: Any, x: Tensor) -> Tensor:
        return (apply(params, {}, x)[0] - x.prod(1, keepdim=True)).square().mean()

    testing.assert_sharded_equals_unsharded(
        fz.train_step(loss_fn, optim.sgd(0.1)),
        on_device(params),
        {},
        [torch.randn(6, 2, dtype=torch.float64).to(DEVICE) for _ in range(2)],
        levels=levels,
        ranks=(3,),
        per_rank=True,
    )


def of_reduce_bucket(levels: tuple[int, ...]) -> None:
    """Joined in one collective, to the bit what unit by unit gives."""
    apply, params, buffers = fz.functionalize(smooth().to(DEVICE), units=nn.Linear)
    step = fz.train_step(lambda p, b, x: apply(p, b, x)[0].square().mean(), optim.adamw(1e-2))
    x = torch.randn(8, 2, device=DEVICE)

    def run(group: Any, level: int, num_bytes: int | None) -> Any:
        sharded = fz.shard(step, level=level, group=group, reduce_bucket=num_bytes)
        state = sharded.init(params, buffers)
        for _ in range(3):
            state, _ = sharded(state, x.chunk(2)[group.rank])
        return sharded.unshard(state).params

    for level in {*levels} - {3}:
        apart = run_ranks(partial(run, level=level, num_bytes=None), 2)[0]
        joined = run_ranks(partial(run, level=level, num_bytes=2**20), 2)[0]
        testing.assert_equal_values(apart, joined, grade="bitwise")


def of_program(name: str, levels: tuple[int, ...]) -> None:
    case = PROGRAM_CASES[name]()
    testing.assert_sharded_equals_unsharded(
        case.step,
        *on_device(case.trees()),
        on_device(case.batches()[:2]),
        levels=levels,
        ranks=(2,),
    )


def of_optimizer(name: str, levels: tuple[int, ...]) -> None:
    """On the tree of the conformance table."""
    row = TABLE[name]
    params, loss_fn = hostile(torch.float64)
    testing.assert_sharded_equals_unsharded(
        fz.train_step(loss_fn, row.make()),
        on_device(params),
        {},
        [on_device(batch) for batch in batches(params, 2, torch.float64)],
        levels=levels,
        ranks=(2,),
        # A fused kernel rounds otherwise than the chain that it stands for
        grade=row.grade or "reordered",
        allow_round_off=name in ("shampoo", "soap"),
    )


def dropout_repeats() -> None:
    """A step draws the same numbers each time, and leaves the generators as they were."""
    apply, params, buffers = fz.functionalize(nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5)))
    step = fz.train_step(lambda p, b, x: apply(p, b, x)[0].square().mean(), optim.sgd(0.1))
    state, x = step.init(on_device(params), buffers, seed=3), torch.ones(8, 4, device=DEVICE)
    torch.manual_seed(1)
    expected = torch.rand(4, device=DEVICE)
    torch.manual_seed(1)
    losses = {float(step(state, x)[1]["loss"]) for _ in range(3)}
    assert len(losses) == 1, losses
    assert torch.equal(torch.rand(4, device=DEVICE), expected), "the generator has moved on"


def of_deferred_init() -> None:
    """Values that are made a bucket at a time, on the device."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 3))
    _, params, buffers = fz.functionalize(model)
    values = fz.deferred_init(model, seed=0, device=DEVICE)
    step = fz.train_step(lambda p, b, x: p, optim.adamw(1e-2))
    alone = step.init(params, buffers, values=values).params

    def run(group: Any) -> Any:
        sharded = fz.shard(step, level=3, group=group)
        return sharded.unshard(sharded.init(params, buffers, values=values)).params

    for whole in run_ranks(run, 2):
        for path, leaf in alone.items():
            assert leaf.device.type == DEVICE.type and torch.equal(whole[path], leaf)


def of_whole_state() -> None:
    """A whole state from elsewhere, cut by two ranks and made whole again."""
    loss_fn, params, buffers = ZOO["mlp"].build()
    step = fz.train_step(loss_fn, optim.adamw(1e-2))
    (batch,) = on_device(ZOO["mlp"].batches(1, 6))
    whole, _ = step(step.init(on_device(params), on_device(buffers)), batch)

    def run(group: Any) -> Any:
        sharded = fz.shard(fz.train_step(loss_fn, optim.adamw(1e-2)), level=3, group=group)
        return sharded.unshard(sharded.shard(whole))

    for again in run_ranks(run, 2):
        pairs = zip(optree.tree_leaves(whole), optree.tree_leaves(again), strict=True)
        assert all(a.device == b.device and torch.equal(a, b) for a, b in pairs)


def of_checkpoint(level: int) -> None:
    """Saved by two ranks, loaded by three, and each leaf has the same bits."""
    case = ZOO["mlp"]
    loss_fn, params, buffers = case.build()
    params, buffers = on_device(params), on_device(buffers)
    (batch,) = on_device(case.batches(1, 6))

    def step_of(group: Any) -> Any:
        return fz.shard(fz.train_step(loss_fn, optim.adamw(1e-2)), level=level, group=group)

    with tempfile.TemporaryDirectory() as folder:

        def save(group: Any) -> Any:
            step = step_of(group)
            state, _ = step(step.init(params, buffers), batch)
            checkpoint.save(folder, step, state)
            return step.unshard(state)

        def load(group: Any) -> Any:
            step = step_of(group)
            restored = checkpoint.load(folder, step, like=step.init(params, buffers))
            return step.unshard(restored.state)

        saved, loaded = run_ranks(save, 2)[0], run_ranks(load, 3)[0]
    leaves, again = optree.tree_leaves(saved), optree.tree_leaves(loaded)
    assert len(leaves) == len(again) > len(optree.tree_leaves(params))
    for a, b in zip(leaves, again, strict=True):
        assert a.device == b.device and torch.equal(a, b)
