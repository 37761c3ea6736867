"""The language model of the stages, and this library's steps of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import optim
from tests.gpu.report import CUDA, DEVICE

Run = Callable[[], object]  # one training step

SIZES = {  # width, layers, vocab, length, batch
    "tiny": (32, 2, 64, 16, 2),
    "small": (768, 12, 50304, 1024, 4),  # 163.0 M parameters: the host is the limit
    # Its backward takes longer than copies of a whole state to the host
    "small, 16 rows": (768, 12, 50304, 1024, 16),
    "large": (2048, 24, 50304, 2048, 4),  # 1.418 G: the device is
}
BF16 = fz.Precision(compute=torch.bfloat16, output=torch.float32)


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_heads = max(1, width // 64)
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.num_heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # (batch, heads, length, width of a head) each
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder language model, whose `forward(ids)` is its loss."""

    def __init__(self, size: str) -> None:
        super().__init__()
        width, layers, vocab, length, _ = SIZES[size]
        self.embed, self.place = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        seen, wanted = ids[:, :-1], ids[:, 1:]  # (batch, length) int64 each
        x = self.embed(seen) + self.place.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), wanted.flatten())


def model_and_batch(size: str, device: torch.device = DEVICE) -> tuple[GPT, Tensor]:
    """The same values each time."""
    _, _, vocab, length, batch = SIZES[size]
    torch.manual_seed(0)
    with device:
        return GPT(size), torch.randint(vocab, (batch, length + 1))


def size_of(*, tiny: bool) -> str:
    return "tiny" if tiny else "large"


# ---- Steps ----


def our_step(
    size: str, optimizer: optim.Transform | None = None, *, autocast: bool = False, **options: Any
) -> tuple[Any, Any, Tensor]:
    """The unsharded step, params, and a batch. `options`: of `functionalize`."""
    model, ids = model_and_batch(size)
    apply, params, _ = fz.functionalize(model, units=Block, **options)

    def loss_fn(params: Any, buffers: Any, ids: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
            loss: Tensor = apply(params, buffers, ids)[0]
        return loss

    return fz.train_step(loss_fn, optimizer or optim.adamw(1e-4, weight_decay=0.01)), params, ids


def ours(
    size: str,
    *,
    level: int,
    group: Any,
    optimizer: optim.Transform | None = None,
    autocast: bool = False,
    compiled: bool = False,
    precision: fz.Precision | None = None,
    **options: Any,
) -> Run:
    """`options`: of `shard`."""
    step, params, ids = our_step(
        size,
        optimizer,
        autocast=autocast,
        compile=Block if compiled else False,
        precision=precision,
    )
    sharded = fz.shard(step, level=level, group=group, **options)
    held = [sharded.init(params)]
    del params

    def run() -> None:
        held[0], _ = sharded(held[0], ids)

    return run


# ---- Process groups ----


def start_fake_ranks(ranks: int) -> None:
    """A default process group of so many ranks, of which only this one exists."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())


def start_one_rank(backend: str = "cpu:gloo,cuda:nccl" if CUDA else "gloo") -> None:
    """A default process group of this process alone, over NCCL on a GPU."""
    options: dict[str, Any] = {"device_id": torch.device("cuda", 0)} if CUDA else {}
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore(), **options)
