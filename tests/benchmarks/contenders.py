"""The model and the peers that `peers.py` runs: DDP, DDP + ZeroRedundancyOptimizer and
`fully_shard`, with fused AdamW.

A contender is built inside an initialised default process group of gloo; `step(batch)` is a whole
training step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

ADAMW: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.01,
    "fused": True,
}


class Size(NamedTuple):
    """A model's and a batch's size."""

    layers: int
    dim: int
    vocab: int
    seq: int
    batch: int  # sequences a rank
    heads: int


SIZES = {
    "tiny": Size(layers=2, dim=64, vocab=256, seq=32, batch=2, heads=2),
    "small": Size(layers=4, dim=256, vocab=2048, seq=128, batch=4, heads=4),  # 4.2 M parameters
    "medium": Size(layers=8, dim=512, vocab=8192, seq=128, batch=2, heads=8),  # 33.7 M parameters
}


class Block(nn.Module):
    """A transformer block, without biases."""

    def __init__(self, size: Size):
        super().__init__()
        self.heads = size.heads
        self.norm1 = nn.LayerNorm(size.dim, bias=False)
        self.qkv = nn.Linear(size.dim, 3 * size.dim, bias=False)
        self.proj = nn.Linear(size.dim, size.dim, bias=False)
        self.norm2 = nn.LayerNorm(size.dim, bias=False)
        self.up = nn.Linear(size.dim, 4 * size.dim, bias=False)
        self.down = nn.Linear(4 * size.dim, size.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (
            z.view(b, t, self.heads, -1).transpose(1, 2)
            for z in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LanguageModel(nn.Module):
    """`forward(tokens, targets)` is the mean cross-entropy of the rank's batch."""

    def __init__(self, size: Size):
        super().__init__()
        self.embed = nn.Embedding(size.vocab, size.dim)
        self.pos = nn.Embedding(size.seq, size.dim)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.dim, bias=False)
        self.head = nn.Linear(size.dim, size.vocab, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens) + self.pos(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def model_fn(size: str) -> Callable[[], nn.Module]:
    """Makes the model, with the same weights every time."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return LanguageModel(SIZES[size])

    return make


def batch_of(size: str, rank: int, index: int) -> tuple[Tensor, Tensor]:
    """A rank's batch number `index`."""
    s = SIZES[size]
    generator = torch.Generator().manual_seed(1000 * index + rank)
    data = torch.randint(s.vocab, (s.batch, s.seq + 1), generator=generator)
    return data[:, :-1].contiguous(), data[:, 1:].contiguous()


class Wrapped:
    """A step of a wrapped module with its optimizer."""

    model: nn.Module
    optimizer: Any

    def step(self, batch: Any) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss: Tensor = self.model(*batch)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


class DDP(Wrapped):
    def __init__(self, model_fn: Callable[[], nn.Module], world: int):
        self.model = DistributedDataParallel(model_fn(), gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **ADAMW)


class Zero(Wrapped):
    def __init__(self, model_fn: Callable[[], nn.Module], world: int):
        # Which warns when it is imported
        from torch.distributed.optim import (
            ZeroRedundancyOptimizer,
        )

        self.model = DistributedDataParallel(model_fn(), gradient_as_bucket_view=True)
        self.optimizer = ZeroRedundancyOptimizer(
            self.model.parameters(),
            optimizer_class=torch.optim.AdamW,
            parameters_as_bucket_view=True,
            **ADAMW,
        )


class FullyShard(Wrapped):
    reshard = True

    def __init__(self, model_fn: Callable[[], nn.Module], world: int):
        mesh = init_device_mesh("cpu", (world,))
        self.model = model_fn()
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=self.reshard)
        fully_shard(self.model, mesh=mesh, reshard_after_forward=self.reshard)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **ADAMW)


class FullyShardKeep(FullyShard):
    reshard = False


PEERS = {
    "fully_shard": FullyShard,
    "fully_shard_keep": FullyShardKeep,
    "zero_redundancy": Zero,
    "ddp": DDP,
}
