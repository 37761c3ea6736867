"""Training loops in other engines, as their users write them, in processes; and mistakes that are
made there."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.testing import Recorder
from tests.modules import Residual

torch.manual_seed(0)
BATCHES = [
    {"x": torch.randn(12, 6, dtype=torch.float64), "y": torch.randint(4, (12,))} for _ in range(4)
]


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    block = lambda: Residual(6, 10, norm=True)
    return nn.Sequential(block(), block(), nn.Linear(6, 4)).double()


class Engine:
    """One process."""

    def __call__(self, record: Recorder) -> None:
        self.group = record.group
        self.model = self.wrapped(make_model())
        self.optimizer = self.make_optimizer()
        if record.load_from:
            self.load(f"{record.load_from}/{self.group.rank}")
        record.start(self.model)
        for batch in record.batches(BATCHES, **self.parts()):
            loss = self.backward(batch)
            record.gradients(self.model)
            norm = self.clip()
            self.optimizer.step()
            record.step(self.model, self.recorded(), loss=loss, norm=norm)
            self.optimizer.zero_grad()
        if record.save_to:
            self.save(f"{record.save_to}/{self.group.rank}")

    def wrapped(self, model: nn.Module) -> nn.Module:
        return model

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def recorded(self) -> torch.optim.Optimizer:
        return self.optimizer

    def parts(self) -> dict[str, int]:
        return {}

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self.model(batch["x"]), batch["y"])

    def backward(self, batch: dict[str, Tensor]) -> Tensor:
        loss = self.loss(batch)
        loss.backward()
        return loss

    def clip(self) -> Any:
        return nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)

    # Each rank its own file, as it is

    def save(self, path: str) -> None:
        torch.save((self.model.state_dict(), self.optimizer.state_dict()), path)

    def load(self, path: str) -> None:
        model, optimizer = torch.load(path, weights_only=False)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)


class Momentum(Engine):
    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.9, weight_decay=0.1)


class DataParallel(Engine):
    def wrapped(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model)


class Accumulating(DataParallel):
    num_micro = 3

    def backward(self, batch: dict[str, Tensor]) -> Tensor:
        parts = zip(*(x.chunk(3) for x in batch.values()), strict=True)
        micro = [dict(zip(batch, part, strict=True)) for part in parts]
        total = torch.zeros((), dtype=torch.float64)
        for n, part in enumerate(micro):
            last = n == len(micro) - 1
            with contextlib.nullcontext() if last else self.model.no_sync():
                loss = self.loss(part) / self.num_micro
                loss.backward()
            total += loss.detach()
        return total


class Zero1(DataParallel):
    """The optimizer's state lies on one rank per param."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(self.model.parameters(), torch.optim.AdamW, lr=1e-2)

    def recorded(self) -> torch.optim.Optimizer:
        return self.optimizer.optim


class Sharded(Engine):
    """`fully_shard`, by blocks."""

    def mesh(self) -> Any:
        return init_device_mesh("cpu", (self.group.size,), mesh_dim_names=("dp",))

    def wrapped(self, model: nn.Module) -> nn.Module:
        mesh = self.mesh()
        for module in (*model[:2], model):
            fully_shard(module, mesh=mesh)
        return model


class ShardedMomentum(Sharded, Momentum):
    pass


class Owners(Engine):
    """SOAP, whose matrices lie at owners."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        def label(path: str, leaf: Tensor) -> str:
            return "soap" if leaf.ndim == 2 else "adamw"

        def transform(lr: Any) -> optim.Transform:
            both = {"soap": optim.soap(lr), "adamw": optim.adamw(lr)}
            return optim.partition(both, label)

        return optim.to_torch(transform, self.model, lr=1e-2)


class ShardedOwners(Sharded, Owners):
    pass


class Replicated(Sharded):
    """Replicas of shards."""

    def mesh(self) -> Any:
        shape = (2, self.group.size // 2)
        return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


class TensorParallel(Engine):
    """All ranks have the same rows."""

    def wrapped(self, model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (self.group.size,), mesh_dim_names=("tp",))
        self.split(model, mesh)
        return model

    def split(self, model: nn.Module, mesh: Any) -> None:
        for block in model[:2]:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def parts(self) -> dict[str, int]:
        return {"part": 0, "parts": 1}

    def clip(self) -> Any:
        """torch's own can't mix DTensors and plain tensors."""
        grads = [p.grad for p in self.model.parameters()]
        whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]
        norm = torch.stack([g.norm() for g in whole]).norm()
        for grad in grads:
            grad *= min(1.0, 0.1 / (float(norm) + 1e-6))  # as torch has it
        return norm


class TwoAxes(TensorParallel):
    """Tensor parallelism inside of `fully_shard`."""

    def wrapped(self, model: nn.Module) -> nn.Module:
        shape = (self.group.size // 2, 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        self.split(model, mesh["tp"])
        for module in (*model[:2], model):
            fully_shard(module, mesh=mesh["dp"])
        return model

    def parts(self) -> dict[str, int]:
        return {"part": self.group.rank // 2, "parts": self.group.size // 2}


class OwnLibrary:
    """This library's step, whose state is made whole."""

    def __init__(self, level: int) -> None:
        self.level = level

    def __call__(self, record: Recorder) -> None:
        apply, params, buffers = fz.functionalize(make_model())

        def loss_fn(params: Any, buffers: Any, batch: dict[str, Tensor]) -> Tensor:
            return F.cross_entropy(apply(params, buffers, batch["x"])[0], batch["y"])

        step = fz.train_step(loss_fn, optim.chain(optim.clip_by_global_norm(0.1), optim.lamb(1e-2)))
        if record.group.size > 1:
            step = fz.shard(step, level=self.level, group=record.group)
        state = step.init(record.start(params), buffers)
        for batch in record.batches(BATCHES):
            state, metrics = step(state, batch)
            whole = step.unshard(state) if record.group.size > 1 else state
            record.step(whole.params, whole.opt_state, loss=metrics["loss"])


# Mistakes


class NormOfItsPiece(Sharded):
    """Each rank clips by the norm of its own piece."""

    def clip(self) -> Any:
        grads = [p.grad.to_local() for p in self.model.parameters()]
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        for grad in grads:
            grad *= min(1.0, 0.1 / (float(norm) + 1e-6))
        return norm


class NotDivided(Accumulating):
    num_micro = 1


class Diverges(DataParallel):
    """Rank 1 has another learning rate."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        lr = 2e-2 if self.group.rank == 1 else 1e-2
        return torch.optim.AdamW(self.model.parameters(), lr=lr)


class LosesItsState(Sharded):
    def load(self, path: str) -> None:
        model, _ = torch.load(path, weights_only=False)
        self.model.load_state_dict(model)


class Hangs(DataParallel):
    def backward(self, batch: dict[str, Tensor]) -> Tensor:
        if self.group.rank == 1:
            time.sleep(1000)
        return super().backward(batch)


class Fails(DataParallel):
    def backward(self, batch: dict[str, Tensor]) -> Tensor:
        if self.group.rank == 1:
            raise KeyError("a mistake of rank 1")
        return super().backward(batch)


class Dies(DataParallel):
    def backward(self, batch: dict[str, Tensor]) -> Tensor:
        if self.group.rank == 1:
            os._exit(3)
        return super().backward(batch)
