"""`optim.to_torch`: a transform as a torch.optim.Optimizer gives the params that the unsharded step
gives, on plain models, under DDP, `fully_shard`, HSDP and tensor parallelism."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from optree import tree_map
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import StructureError, TransformError
from functorch_zero.groups import launch
from tests.tiers import THOROUGH, thinned, tiers

F64 = torch.float64
VOCAB, DIM, INNER, ROWS, STEPS = 13, 8, 12, 16, 5
Tensors = dict[str, Tensor]


class Block(nn.Module):
    """A gated MLP behind a norm, as Llama's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM, eps=1e-6)
        self.gate = nn.Linear(DIM, INNER, bias=False)
        self.up = nn.Linear(DIM, INNER, bias=False)
        self.down = nn.Linear(INNER, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Tiny(nn.Module):
    """Two blocks between an embedding and a head of three rows, fewer than four ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return torch.tanh(self.head(h))


def build() -> Tiny:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Tiny().double()


def batches(num: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [
        (
            torch.randint(VOCAB, (ROWS, 3), generator=g),
            torch.randn(ROWS, 3, 3, generator=g, dtype=F64),
        )
        for _ in range(num)
    ]


def loss_of(model: Callable[..., Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x), y)


def mixed(matrices: optim.Transform) -> optim.Transform:
    """The blocks' matrices by one optimizer, and all else by AdamW."""

    def label(path: str, leaf: Tensor) -> str:
        return "matrix" if leaf.ndim == 2 and path.startswith("blocks.") else "rest"

    return optim.partition({"matrix": matrices, "rest": optim.adamw(1e-2)}, label)


# name -> transform, and the bound of an update's error: 1e-9 where roots enlarge the last bits
TRANSFORMS: dict[str, tuple[Callable[[], optim.Transform], float]] = {
    "clip+adamw": (
        lambda: optim.chain(optim.clip_by_global_norm(0.05), optim.adamw(1e-2)),
        1e-11,
    ),
    "lion": (lambda: optim.lion(1e-2), 1e-11),
    "lamb": (lambda: optim.lamb(1e-2, weight_decay=0.1), 1e-11),
    "lars": (lambda: optim.lars(1.0), 1e-11),
    "adafactor": (lambda: optim.adafactor(1e-2, min_dim_size_to_factor=4), 1e-11),
    "muon": (lambda: mixed(optim.muon(1e-2)), 1e-11),
    "shampoo": (lambda: mixed(optim.shampoo(1e-2)), 1e-9),
    "soap": (lambda: mixed(optim.soap(1e-2)), 1e-9),
    "prodigy": (lambda: optim.prodigy(1.0, estim_lr0=1e-3), 1e-11),
    "schedule-free": (lambda: optim.schedule_free_adamw(1e-2), 1e-11),
    "average": (lambda: optim.params_ema(optim.adamw(1e-2), 0.9), 1e-11),
}


@cache
def expected(name: str, steps: int = STEPS) -> Tensors:
    """The params of the unsharded step, by name."""
    apply, params, buffers = fz.functionalize(build())
    step = fz.train_step(
        lambda p, b, batch: loss_of(lambda x: apply(p, b, x)[0], batch), TRANSFORMS[name][0]()
    )
    state = step.init(params, buffers)
    for batch in batches(steps):
        state, _ = step(state, batch)
    return dict(fz.named_leaves(state.params))


def whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def error_of(model: nn.Module, wanted: Tensors) -> float:
    """The largest error of a leaf's update, relative to its largest element."""
    first = dict(build().named_parameters())
    errors = []
    for name, param in model.named_parameters():
        name = name.removeprefix("module.")
        moved = (wanted[name] - first[name]).abs().max()
        assert moved > 0, name
        errors.append(float(((whole(param) - wanted[name]).abs().max() / moved).detach()))
    return max(errors)


def shard(model: Tiny, mesh: Any) -> Tiny:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, ranks: int, steps: range
) -> None:
    for batch in batches(steps.stop)[steps.start :]:
        own: Any = tuple(x.chunk(ranks)[rank] for x in batch)
        optimizer.zero_grad()
        loss_of(model, own).backward()
        optimizer.step()


def placed_on(kind: str) -> tuple[nn.Module, int, int]:
    """The model on these ranks; this rank's part of the batch, and the number of parts."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if kind == "plain":
        return build(), 0, 1
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(build()), rank, ranks
    if kind == "fully_shard":
        return shard(build(), init_device_mesh("cpu", (ranks,))), rank, ranks
    if kind == "tp alone":  # the embedding and the head stay plain
        return split(build(), init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))), 0, 1
    names = {"hsdp": ("replicate", "shard"), "tp": ("dp", "tp")}[kind]
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=names)
    if kind == "hsdp":
        return shard(build(), mesh), rank, ranks
    return shard(split(build(), mesh["tp"]), mesh["dp"]), mesh.get_local_rank("dp"), 2


def split(model: Tiny, mesh: Any) -> Tiny:
    """By torch's tensor parallelism."""
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return model


def errors(kinds: list[str], names: list[str], wanted: dict[str, Tensors]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for kind in kinds:
        for name in names:
            model, rank, ranks = placed_on(kind)
            optimizer = optim.to_torch(TRANSFORMS[name][0](), model)
            train(model, optimizer, rank, ranks, range(STEPS))
            found[kind, name] = error_of(model, wanted[name])
    return found


FEW = ("clip+adamw", "lamb", "adafactor", "muon", "soap", "schedule-free")
OTHERS = [name for name in TRANSFORMS if name not in FEW]


@pytest.mark.parametrize(
    ("ranks", "kinds", "names"),
    tiers(
        thorough=[
            (2, ["ddp", "fully_shard", "tp alone"], FEW),
            (2, ["fully_shard"], OTHERS),
            (4, ["hsdp", "tp"], FEW),
            (4, ["fully_shard"], ("lamb", "muon")),  # some ranks have no row of the head
        ],
        full=[(2, ["ddp", "tp alone"], OTHERS)],
        rows=True,
    ),
    ids=str,
)
def test_the_params_of_one_process(ranks: int, kinds: list[str], names: list[str]) -> None:
    wanted = {name: expected(name) for name in names}
    for found in launch(errors, ranks, kinds, names, wanted, start_method="fork", timeout=100):
        for (kind, name), error in found.items():
            assert error < TRANSFORMS[name][1], (kind, name)


# State dicts

SAVED = ("clip+adamw", "adafactor", "soap", "schedule-free")
HALF = 3  # steps before the save


def save(folder: str, kind: str) -> None:
    """A checkpoint of each transform after some steps."""
    for name in SAVED:
        model, rank, ranks = placed_on(kind)
        optimizer = optim.to_torch(TRANSFORMS[name][0](), model)
        train(model, optimizer, rank, ranks, range(HALF))
        dcp.save(entries(model, optimizer), checkpoint_id=f"{folder}/{name}")


def load(folder: str, kind: str) -> dict[str, Tensors]:
    """The params after the other steps."""
    found = {}
    for name in SAVED:
        model, rank, ranks = placed_on(kind)
        optimizer = optim.to_torch(TRANSFORMS[name][0](), model)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(2.0)
        saved = entries(model, optimizer)
        dcp.load(saved, checkpoint_id=f"{folder}/{name}")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optim"])
        train(model, optimizer, rank, ranks, range(HALF, STEPS))
        found[name] = {path: whole(p) for path, p in model.named_parameters()}
    return found


def entries(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optim": optimizer.state_dict()}


@THOROUGH
def test_two_ranks_and_one_load_what_four_save(tmp_path: Path) -> None:
    """State at owners included; and the four along two axes."""
    launch(save, 4, str(tmp_path), "fully_shard", start_method="fork", timeout=100)
    for ranks, kind in ((2, "tp alone"), (1, "plain"), (4, "tp")):
        found = launch(load, ranks, str(tmp_path), kind, start_method="fork", timeout=100)[0]
        for name, params in found.items():
            for path, first in build().named_parameters():
                wanted = expected(name)[path].detach()
                bound = TRANSFORMS[name][1] * float((wanted - first.detach()).abs().max())
                assert float((params[path] - wanted).abs().max()) < bound, (kind, name, path)


def by_torchs_functions(options: list[dict[str, bool]], wanted: Tensors) -> list[float]:
    """`get_optimizer_state_dict` and its inverse, and more steps; the errors."""
    found = []
    for option in options:
        first, rank, ranks = placed_on("fully_shard")
        optimizer = optim.to_torch(TRANSFORMS["soap"][0](), first)
        train(first, optimizer, rank, ranks, range(HALF))
        chosen = StateDictOptions(**option)
        saved = get_optimizer_state_dict(first, optimizer, options=chosen)
        second, _, _ = placed_on("fully_shard")
        second.load_state_dict(first.state_dict())
        again = optim.to_torch(TRANSFORMS["soap"][0](), second)
        set_optimizer_state_dict(second, again, saved, options=chosen)
        train(second, again, rank, ranks, range(HALF, STEPS))
        found.append(error_of(second, wanted))
    return found


@THOROUGH
def test_torchs_functions_of_state_dicts() -> None:
    options: list[dict[str, bool]] = [
        {},
        {"flatten_optimizer_state_dict": True},
        {"full_state_dict": True},
    ]
    for found in launch(
        by_torchs_functions, 2, options, expected("soap"), start_method="fork", timeout=100
    ):
        assert max(found) < TRANSFORMS["soap"][1]


# What ranks do by themselves


def accumulated() -> dict[str, float]:
    """Errors of accumulation in two passes, and of a param that rests."""
    found = {}
    model, rank, ranks = placed_on("fully_shard")
    optimizer = optim.to_torch(TRANSFORMS["clip+adamw"][0](), model)
    for batch in batches():
        own: Any = tuple(x.chunk(ranks)[rank] for x in batch)
        optimizer.zero_grad()
        for n in range(2):
            model.set_requires_gradient_sync(n == 1)  # type: ignore[operator]
            (loss_of(model, tuple(x.chunk(2)[n] for x in own)) / 2).backward()  # type: ignore[arg-type]
        optimizer.step()
    found["in two passes"] = error_of(model, expected("clip+adamw"))
    runs = []
    for kind in ("fully_shard", "plain"):
        model, rank, ranks = placed_on(kind)
        optimizer = optim.to_torch(TRANSFORMS["lamb"][0](), model)
        for batch in batches():
            own = tuple(x.chunk(ranks)[rank] for x in batch)
            optimizer.zero_grad()
            loss_of(model, own).backward()
            model.embed.weight.grad = None  # type: ignore[union-attr]
            optimizer.step()
        runs.append([whole(param) for param in model.parameters()])
    found["with one that rests"] = max(
        float((p - q).abs().max()) for p, q in zip(*runs, strict=True)
    )
    return found


@THOROUGH
def test_accumulation_and_rest_on_ranks() -> None:
    for found in launch(accumulated, 2, start_method="fork", timeout=100):
        assert max(found.values()) < 1e-12, found


def infinite_gradients() -> None:
    """The same on all replicas: what a step makes of them is the transform's."""
    model, _, _ = placed_on("ddp")
    optimizer = optim.to_torch(optim.adamw(0.1), model)
    loss_of(model, batches(1)[0]).backward()
    for param in model.parameters():
        param.grad.view(-1)[:2] = torch.tensor([torch.inf, -torch.inf])  # type: ignore[union-attr]
    optimizer.step()


@THOROUGH
def test_replicas_may_have_infinite_gradients() -> None:
    launch(infinite_gradients, 2, start_method="fork", timeout=100)


def other_transforms(rank: int) -> None:
    model, _, _ = placed_on("fully_shard")
    optim.to_torch(optim.adamw(0.1 * (rank + 1)), model)


def other_values(rank: int) -> None:
    model, _, _ = placed_on("ddp")
    with torch.no_grad():
        model.module.head.bias.add_(rank)  # type: ignore[union-attr,operator]
    optim.to_torch(optim.adamw(0.1), model)


def other_replicas(rank: int) -> None:
    model = build()
    with torch.no_grad():
        model.head.bias.add_(rank)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    optim.to_torch(optim.adamw(0.1), shard(model, mesh))


def partial_param(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    made = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    optim.to_torch(optim.adamw(0.1), {"w": nn.Parameter(made)})


def two_meshes(rank: int) -> None:
    meshes = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1))
    made = [distribute_tensor(torch.ones(4), m, [Replicate()] * m.ndim) for m in meshes]
    optim.to_torch(optim.adamw(0.1), {f"w{n}": nn.Parameter(x) for n, x in enumerate(made)})


def partial_gradient(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    param = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
    param.grad = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    optim.to_torch(optim.adamw(0.1), {"w": param}).step()


def failing_alone(rank: int) -> None:
    model, _, _ = placed_on("fully_shard")
    optimizer = optim.to_torch(TRANSFORMS["clip+adamw"][0](), model)
    loss_of(model, batches(1)[0]).backward()
    bias: Any = model.head.bias
    if rank == 1:
        bias.grad = DTensor.from_local(torch.ones(3, dtype=F64), bias.device_mesh, [Partial()])
    optimizer.step()


def ignored_params(rank: int) -> None:
    """torch doesn't sum their gradients over ranks, and clipping by the norm would differ."""
    model, ranks = build(), 2
    ignored = {model.blocks[0].norm.weight}
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)), ignored_params=ignored)
    optimizer = optim.to_torch(TRANSFORMS["clip+adamw"][0](), model)
    train(model, optimizer, rank, ranks, range(1))


def gradient_on_one_rank(rank: int) -> None:
    model, _, _ = placed_on("fully_shard")
    optimizer = optim.to_torch(optim.adamw(0.1), model)
    loss_of(model, batches(1)[0]).backward()
    if rank == 1:
        model.head.bias.grad = None  # type: ignore[union-attr]
    optimizer.step()


def other_counts(rank: int) -> None:
    """In a step in which ranks compare nothing."""
    model, _, ranks = placed_on("fully_shard")
    optimizer = optim.to_torch(optim.adamw(0.1), model)
    for n, batch in enumerate(batches(8)):
        optimizer.zero_grad()
        own: Any = tuple(x.chunk(ranks)[rank] for x in batch)
        loss_of(model, own).backward()
        if n == 5 and rank == 1:
            model.head.bias.grad = None  # type: ignore[union-attr]
        optimizer.step()


def other_rates(rank: int) -> None:
    """As a scheduler sets them that sees each rank's own loss."""
    model, _, ranks = placed_on("fully_shard")
    optimizer = optim.to_torch(optim.adamw, model, lr=0.1)
    train(model, optimizer, rank, ranks, range(2))
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + rank)
    train(model, optimizer, rank, ranks, range(2, 3))


def first_fsdp(rank: int) -> None:
    model = FullyShardedDataParallel(build(), use_orig_params=True, device_id=torch.device("cpu"))
    optim.to_torch(optim.adamw(0.1), model)


FAULTS: dict[Callable[[int], None], tuple[str, str]] = {
    other_transforms: ("MismatchError", r"learning_rate is 0\.1 on rank 0 and 0\.2 on rank 1"),
    other_values: ("MismatchError", r"param: path head\.bias, .*on rank 1 the same as on rank 0"),
    other_replicas: ("MismatchError", r"param: path head\.bias, .*on rank 1 the same as on rank 0"),
    partial_param: ("StructureError", r"path w, .*Partial"),
    two_meshes: ("StructureError", r"different meshes: .*path w0"),
    partial_gradient: ("StructureError", r"path w, .*Partial"),
    ignored_params: ("MismatchError", r"gradient: path blocks\.0\.norm\.weight.*sum the gradients"),
    other_rates: ("MismatchError", r"lr in param_groups is 0\.1 on rank 0 and 0\.05 on rank 1"),
    other_counts: ("MismatchError", r"num_steps\.head\.bias is 7 on rank 0 and 6 on rank 1"),
    first_fsdp: ("StructureError", "FSDP's first version .*fully_shard"),
    gradient_on_one_rank: ("MismatchError", r"path head\.bias, .*got None and \["),
}


def each_fault() -> list[tuple[str, str]]:
    found = []
    rank = torch.distributed.get_rank()
    for fault in (*FAULTS, failing_alone):
        start = time.monotonic()
        try:
            fault(rank)
        except Exception as error:
            found.append((type(error).__name__, str(error)))
        assert time.monotonic() - start < 20
    return found


@THOROUGH
def test_errors_come_on_all_ranks_within_seconds() -> None:
    first, second = launch(each_fault, 2, start_method="fork", timeout=100)
    for found in (first, second):
        assert len(found) == len(FAULTS) + 1
        for (name, text), (kind, pattern) in zip(found, FAULTS.values(), strict=False):
            assert name == kind, text
            assert re.search(pattern, text), text
    assert (first[-1][0], second[-1][0]) == ("PeerError", "StructureError")
    assert "path head.bias" in first[-1][1]


@pytest.mark.parametrize("name", thinned(TRANSFORMS))
def test_a_plain_model(name: str) -> None:
    model = build()
    train(model, optim.to_torch(TRANSFORMS[name][0](), model), 0, 1, range(STEPS))
    assert error_of(model, expected(name)) < TRANSFORMS[name][1]


# In one process: no ranks are needed for these


def adamw(lr: Any) -> optim.Transform:
    return optim.adamw(lr, weight_decay=0.1)


def torch_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)


def leaves_of(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def assert_like_torch(ours: nn.Module, theirs: nn.Module) -> None:
    for p, q, first in zip(
        ours.parameters(), theirs.parameters(), build().parameters(), strict=True
    ):
        torch.testing.assert_close(p - first, q - first, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=2),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.1, total_steps=9, cycle_momentum=False
        ),
    ],
    ids=["step", "one cycle"],
)
def test_torchs_schedulers_change_the_rate(scheduler: Any) -> None:
    models = build(), build()
    optimizers = optim.to_torch(adamw, models[0], lr=0.1), torch_adamw(models[1])
    for model, optimizer in zip(models, optimizers, strict=True):
        schedule = scheduler(optimizer)
        for batch in batches():
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            schedule.step()
    assert_like_torch(*models)


def test_a_closure() -> None:
    models = build(), build()
    optimizers = optim.to_torch(adamw, models[0], lr=0.1), torch_adamw(models[1])
    for model, optimizer in zip(models, optimizers, strict=True):

        def closure(model: nn.Module = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batches(1)[0])
            loss.backward()
            return loss

        assert optimizer.step(closure) > 0
    assert_like_torch(*models)


def test_params_without_gradients_rest_as_in_torch() -> None:
    """Some never have one; one has none any more; and a step without any is none."""
    models = build(), build()
    optimizers = optim.to_torch(adamw, models[0], lr=0.1), torch_adamw(models[1])
    for model, optimizer in zip(models, optimizers, strict=True):
        for n, batch in enumerate(batches()):
            optimizer.zero_grad()
            if n != 1:
                loss_of(model, batch).backward()
            model.blocks[0].gate.weight.grad = None
            if n > 2:
                model.head.bias.grad = None
            optimizer.step()
    assert_like_torch(*models)


@pytest.mark.parametrize("name", ["clip+adamw", "adafactor", "soap", "lamb"])
def test_resting_params_are_as_if_frozen(name: str) -> None:
    """In no norm, and with no count."""
    make, _ = TRANSFORMS[name]
    frozen, resting = build(), build()
    frozen.embed.requires_grad_(False)
    for model in (frozen, resting):
        optimizer = optim.to_torch(make(), model)
        for batch in batches():
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            resting.embed.weight.grad = None
            optimizer.step()
    for p, q in zip(leaves_of(frozen), leaves_of(resting), strict=True):
        assert torch.equal(p, q)


def test_a_param_that_comes_back_is_refused_where_all_share_a_norm() -> None:
    model = build()
    optimizer = optim.to_torch(TRANSFORMS["clip+adamw"][0](), model)
    for n, batch in enumerate(batches(3)):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        if n == 1:
            model.head.bias.grad = None
        if n < 2:
            optimizer.step()
    before = leaves_of(model)
    with pytest.raises(StructureError, match=r"path head\.bias.*none in 1 of them.*apply_if_nonz"):
        optimizer.step()
    assert all(map(torch.equal, before, leaves_of(model)))


@pytest.mark.parametrize("name", thinned(TRANSFORMS))
def test_params_and_gradients_stay_torchs_own(name: str) -> None:
    """Users look at gradients after a step, and may write to both: no state lies in them."""
    model = build()
    optimizer = optim.to_torch(TRANSFORMS[name][0](), model)
    params: list[Any] = [*model.parameters()]
    for batch in batches(2):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        before = [param.grad.clone() for param in params]
        optimizer.step()
        assert all(torch.equal(p.grad, grad) for p, grad in zip(params, before, strict=True))
        theirs = [x.untyped_storage().data_ptr() for p in params for x in (p, p.grad)]
        for tensors in optimizer.state.values():
            for key, x in tensors.items():
                assert x.untyped_storage().data_ptr() not in theirs, key


def test_params_that_lie_otherwise_in_memory() -> None:
    """A piece is a copy then, to which no kernel may write."""
    models = build(), build()
    for model in models:
        weight = model.blocks[0].gate.weight
        weight.data = weight.data.t().contiguous().t()
    optimizers = optim.to_torch(adamw, models[0], lr=0.1), torch_adamw(models[1])
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 0, 1, range(STEPS))
    assert_like_torch(*models)


# Hooks


def test_hooks_of_state_dicts_are_called_as_torchs() -> None:
    """In torch's order; a hook may give another state dict."""
    seen: list[str] = []

    def note(word: str, result: Any = None) -> Callable[..., Any]:
        def hook(optimizer: Any, *saved: Any) -> Any:
            seen.append(f"{word} {len(saved)}")
            return result

        return hook

    def with_hooks(optimizer: torch.optim.Optimizer) -> list[str]:
        train(model, optimizer, 0, 1, range(1))
        seen.clear()
        optimizer.register_state_dict_pre_hook(note("before"))
        optimizer.register_state_dict_post_hook(note("second"))
        optimizer.register_state_dict_post_hook(note("first"), prepend=True)
        handle = optimizer.register_state_dict_post_hook(note("other", {"of": "a hook"}))
        assert optimizer.state_dict() == {"of": "a hook"}
        handle.remove()
        saved = optimizer.state_dict()
        saved["param_groups"][0]["lr"] = 0.5
        optimizer.register_load_state_dict_pre_hook(note("load"))
        optimizer.register_load_state_dict_pre_hook(note("load it", saved))
        optimizer.register_load_state_dict_post_hook(note("loaded"))
        given = {"of": "a hook"}
        optimizer.load_state_dict(given)
        assert optimizer.param_groups[0]["lr"] == 0.5 and given == {"of": "a hook"}
        return [*seen]

    model = build()
    expected = with_hooks(torch_adamw(model))
    for name in ("clip+adamw", "soap"):
        rate = optim.to_torch(lambda lr, name=name: TRANSFORMS[name][0](), model, lr=0.1)
        assert with_hooks(rate) == expected


@pytest.mark.parametrize("name", thinned(TRANSFORMS))
def test_a_state_dict_goes_on(name: str) -> None:
    make, bound = TRANSFORMS[name]
    first = build()
    optimizer = optim.to_torch(make(), first)
    train(first, optimizer, 0, 1, range(HALF))
    saved = copy.deepcopy(optimizer.state_dict())
    second = build()
    second.load_state_dict(first.state_dict())
    again = optim.to_torch(make(), second)
    again.load_state_dict(saved)
    train(second, again, 0, 1, range(HALF, STEPS))
    assert error_of(second, expected(name)) < bound


def test_a_state_dict_has_torchs_form() -> None:
    model = build()
    optimizer = optim.to_torch(adamw, model, lr=0.1)
    train(model, optimizer, 0, 1, range(2))
    saved = optimizer.state_dict()
    (group,) = saved["param_groups"]
    names = [name for name, _ in model.named_parameters()]
    assert (group["lr"], group["param_names"]) == (0.1, names)
    for n, param in enumerate(model.parameters()):
        assert saved["state"][n]["0.mu"].shape == param.shape
        assert int(saved["state"][n]["num_steps"]) == 2
        # Each param may have counts of its own
        assert int(saved["state"][n]["0.count"]) == 2
    model = build()
    saved = optim.to_torch(TRANSFORMS["clip+adamw"][0](), model).state_dict()
    # Here they are of all params, and lie under the first one in the order of paths
    (first,) = [n for n, tensors in saved["state"].items() if "1.0.count" in tensors]
    assert first == names.index("blocks.0.down.weight")


def without(saved: dict[str, Any], key: str) -> dict[str, Any]:
    del saved["state"][0][key]
    return saved


def of_another_shape(saved: dict[str, Any], key: str) -> dict[str, Any]:
    saved["state"][0][key] = saved["state"][0][key][:1]
    return saved


def of_another_dtype(saved: dict[str, Any], key: str) -> dict[str, Any]:
    saved["state"][0][key] = saved["state"][0][key].float()
    return saved


def with_one_more(saved: dict[str, Any], key: str) -> dict[str, Any]:
    saved["state"][0]["nu"] = saved["state"][0][key]
    return saved


def of_other_params(saved: dict[str, Any], key: str) -> dict[str, Any]:
    saved["param_groups"][0]["param_names"][0] = "token"
    return saved


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (without, r"path 0\.mu of embed\.weight, expected a tensor of shape \(13, 8\), got none"),
        (of_another_shape, r"path 0\.mu of embed\.weight, .*got shape \(1, 8\)"),
        (of_another_dtype, r"path 0\.mu of embed\.weight, .*got torch\.float32"),
        (with_one_more, r"path nu of embed\.weight"),
        (of_other_params, r"path embed\.weight"),
    ],
)
def test_another_state_is_refused(change: Any, error: str) -> None:
    model = build()
    optimizer = optim.to_torch(adamw, model, lr=0.1)
    train(model, optimizer, 0, 1, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(StructureError, match=error):
        optimizer.load_state_dict(change(copy.deepcopy(before), "0.mu"))
    after = optimizer.state_dict()
    for n, tensors in before["state"].items():
        assert all(torch.equal(x, after["state"][n][key]) for key, x in tensors.items())


def test_wrong_arguments() -> None:
    model = build()
    own: Any
    for own in (
        lambda: optim.to_torch(optim.adamw(1e-3), model, lr=0.1),
        lambda: optim.to_torch(optim.adamw, model),
        lambda: optim.to_torch(torch.optim.AdamW, model, lr=0.1),
        lambda: optim.to_torch(adamw, model.parameters(), lr=0.1),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match="Remedy"):
            own()
    twice = [("a", model.head.weight), ("b", model.head.weight)]
    with pytest.raises(StructureError, match="path b, got the same param as a"):
        optim.to_torch(adamw, twice, lr=0.1)
    same_name = [("a", model.head.weight), ("a", model.head.bias)]
    with pytest.raises(StructureError, match="path a, got the same name as a"):
        optim.to_torch(adamw, same_name, lr=0.1)
    optimizer = optim.to_torch(adamw, model, lr=0.1)
    with pytest.raises(NotImplementedError, match=r"optim\.partition"):
        optimizer.add_param_group({"params": [torch.ones(2, requires_grad=True)]})
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(optimizer)


def test_names_are_those_of_the_plain_module() -> None:
    """By which masks choose: torch.compile's and checkpointing's wrappers put others before."""
    plain = build()
    model = build()
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")  # type: ignore[assignment]
    for wrapped in (model, torch.compile(model, backend="eager")):
        optimizer = optim.to_torch(adamw, wrapped, lr=0.1)  # type: ignore[arg-type]
        names = optimizer.param_groups[0]["param_names"]
        assert names == [name for name, _ in plain.named_parameters()]


def test_a_compiled_step() -> None:
    models = build(), build()
    for model in models:
        optimizer = optim.to_torch(TRANSFORMS["clip+adamw"][0](), model)
        step = optimizer.step
        if model is models[1]:
            step = torch.compile(optimizer.step, backend="eager")
        for batch in batches(3):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            step()
    assert all(map(torch.equal, leaves_of(models[0]), leaves_of(models[1])))


def test_what_nothing_reads_is_refused() -> None:
    """Settings in param groups, an emptied state, and a rate of another kind were ignored."""
    model = build()
    optimizer = optim.to_torch(adamw, model, lr=0.1)
    train(model, optimizer, 0, 1, range(1))
    with pytest.raises(AttributeError, match="a new optimizer"):
        optimizer.state = {}  # type: ignore[assignment]
    own = optim.to_torch(optim.adamw(0.1), build())
    with pytest.raises(StructureError, match=r"path lr of param_groups, .*transform's own rate"):
        optimizer.load_state_dict(own.state_dict())
    optimizer.param_groups[0]["weight_decay"] = 0.5
    with pytest.raises(ValueError, match=r"weight_decay .*nothing reads it.*got 0\.5"):
        optimizer.step()


def test_a_lie_is_found_at_construction() -> None:
    def centre(updates: Any, state: Any, params: Any) -> Any:
        return tree_map(lambda u: u - u.mean(), updates), state

    with pytest.raises(TransformError, match="mean"):
        optim.to_torch(optim.pointwise(lambda params: (), centre), build())


def test_a_rate_of_its_own_is_not_changed_from_outside() -> None:
    model = build()
    optimizer = optim.to_torch(optim.adamw(0.1), model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    loss_of(model, batches(1)[0]).backward()
    optimizer.step()
    scheduler.step()
    with pytest.raises(ValueError, match=r"expected 1\.0, got 0\.1.*lr=\.\.\."):
        optimizer.step()


def test_a_gradient_of_a_param_that_it_lacks_is_refused() -> None:
    unfrozen = build()
    unfrozen.embed.requires_grad_(False)
    replaced = build()
    for model, path in ((unfrozen, r"embed\.weight"), (replaced, r"head\.weight")):
        optimizer = optim.to_torch(adamw, model, lr=0.1)
        model.embed.requires_grad_(True)
        if model is replaced:
            model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        loss_of(model, batches(1)[0]).backward()
        with pytest.raises(StructureError, match=f"path {path}.*optim.to_torch after"):
            optimizer.step()


def test_params_in_the_group_may_be_replaced_before_the_first_step() -> None:
    """As accelerate does; and not later."""
    model, other = build(), build()
    optimizer = optim.to_torch(adamw, dict(model.named_parameters()), lr=0.1)
    optimizer.param_groups[0]["params"] = [*other.parameters()]
    train(other, optimizer, 0, 1, range(STEPS))
    theirs = build()
    train(theirs, torch_adamw(theirs), 0, 1, range(STEPS))
    assert_like_torch(other, theirs)
    optimizer.param_groups[0]["params"] = [*model.parameters()]
    with pytest.raises(StructureError, match="after the first step"):
        optimizer.step()
