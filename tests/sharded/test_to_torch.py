"""`optim.to_torch`: a transform as a torch.optim.Optimizer gives the params that the unsharded step
gives, on plain models, under DDP, `fully_shard`, HSDP and tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.groups import launch
from tests.tiers import THOROUGH

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
    names = {"hsdp": ("replicate", "shard"), "tp": ("dp", "tp")}[kind]
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=names)
    if kind == "hsdp":
        return shard(build(), mesh), rank, ranks
    model = build()
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], plan)
    return shard(model, mesh["dp"]), mesh.get_local_rank("dp"), 2


def errors(kinds: list[str], names: list[str], wanted: dict[str, Tensors]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for kind in kinds:
        for name in names:
            model, rank, ranks = placed_on(kind)
            optimizer = optim.to_torch(TRANSFORMS[name][0](), model)
            train(model, optimizer, rank, ranks, range(STEPS))
            found[kind, name] = error_of(model, wanted[name])
    return found


@THOROUGH
@pytest.mark.parametrize(
    ("ranks", "kinds"),
    [(2, ["ddp", "fully_shard"]), (4, ["fully_shard", "hsdp"]), (4, ["tp"])],
    ids=["2", "4", "4, two axes"],
)
def test_the_params_of_one_process(ranks: int, kinds: list[str]) -> None:
    names = [*TRANSFORMS]
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


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_plain_model(name: str) -> None:
    model = build()
    train(model, optim.to_torch(TRANSFORMS[name][0](), model), 0, 1, range(STEPS))
    assert error_of(model, expected(name)) < TRANSFORMS[name][1]
