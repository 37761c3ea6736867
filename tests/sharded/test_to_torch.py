"""`optim.to_torch`: a transform as a torch.optim.Optimizer gives the params that the unsharded step
gives, on plain models, under DDP, `fully_shard`, HSDP and tensor parallelism."""

from __future__ import annotations

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
from torch import Tensor, nn
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
from functorch_zero.groups import launch
from tests.modules import Net
from tests.tiers import THOROUGH, tiers

F64 = torch.float64
VOCAB, DIM, INNER, ROWS, STEPS = 13, 8, 12, 16, 5
Tensors = dict[str, Tensor]


def block() -> Net:
    """A gated MLP behind a norm, as Llama's."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.norm(x)
        return x + net.down(F.silu(net.gate(h)) * net.up(h))

    return Net(
        forward,
        norm=nn.RMSNorm(DIM, eps=1e-6),
        gate=nn.Linear(DIM, INNER, bias=False),
        up=nn.Linear(DIM, INNER, bias=False),
        down=nn.Linear(INNER, DIM, bias=False),
    )


def build() -> Net:
    """Two blocks between an embedding and a head of three rows, fewer than four ranks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Net(
            lambda net, x: torch.tanh(net.head(net.blocks(net.embed(x)))),
            embed=nn.Embedding(VOCAB, DIM),
            blocks=nn.Sequential(block(), block()),
            head=nn.Linear(DIM, 3),
        )
        return model.double()


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


def shard(model: Net, mesh: Any) -> Net:
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


def split(model: Net, mesh: Any) -> Net:
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
    other_rates: ("MismatchError", r"lr in param_groups is 0\.1 on rank 0 and 0\.05 on .*the mean"),
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
