"""The language model of the stages, and those who train it: this library, plain torch and
`fully_shard`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.testing import Wire
from tests.gpu.report import CUDA, DEVICE

Run = Callable[[], object]  # one training step

SIZES = {  # width, layers, vocab, length, batch
    "tiny": (32, 2, 64, 16, 2),
    "small": (768, 12, 50304, 1024, 4),  # 124 M parameters: the host is the limit
    "large": (2048, 24, 50304, 2048, 4),  # 1.3 G: the device is
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


# ---- Who trains it ----


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


def plain(size: str, *, autocast: bool, compiled: bool = False) -> Run:
    """One process with torch's fused AdamW."""
    model, ids = model_and_batch(size)
    compile_blocks(model, compiled=compiled)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def run() -> None:
        optimizer.zero_grad()
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
            loss = model(ids)
        loss.backward()
        optimizer.step()

    return run


def fully_sharded(
    size: str,
    *,
    ranks: int,
    wire: Wire | None = None,
    compiled: bool = False,
    reshard_after_forward: bool = True,
) -> Run:
    """torch's `fully_shard` in bfloat16. The default process group has so many ranks; with a wire,
    it is a fake one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(DEVICE.type, (ranks,))
    model, ids = model_and_batch(size)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if wire is not None:
        for module in (*model.blocks, model):
            module.set_custom_all_gather(Gather(wire, ranks))
            module.set_custom_reduce_scatter(Scatter(wire, ranks))
    compile_blocks(model, compiled=compiled)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def run() -> None:
        optimizer.zero_grad()
        model(ids).backward()
        optimizer.step()

    return run


def compile_blocks(model: GPT, *, compiled: bool) -> None:
    if compiled:
        for block in model.blocks:
            block.compile()


# ---- fully_shard's collectives over a simulated wire ----


def _classes() -> tuple[type, type]:
    """The bases of custom collectives, which have no public name."""
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

    return AllGather, ReduceScatter


class _OverWire:
    """A collective on the stream that `fully_shard` calls it on. `wire` carries one at a time, as
    its one communicator would."""

    def __init__(self, wire: Wire, ranks: int) -> None:
        self.wire, self.ranks = wire, ranks

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def carry(self, whole: Tensor, move: Callable[[], object]) -> None:
        num_bytes = whole.nbytes * (self.ranks - 1) / self.ranks
        if whole.is_cuda:
            with self.wire.carrying(num_bytes, whole.device):
                move()
        else:
            self.wire.start(num_bytes, move).wait()


class Gather(_OverWire, _classes()[0]):  # type: ignore[misc]
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> None:
        def move() -> None:
            for row in output_tensor.view(self.ranks, -1):
                if row.data_ptr() != input_tensor.data_ptr():  # the rank's own part of the output
                    row.copy_(input_tensor.view(-1))

        self.carry(output_tensor, move)


class Scatter(_OverWire, _classes()[1]):  # type: ignore[misc]
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        own = input_tensor.view(self.ranks, -1)[0]
        # The mean of equal terms
        self.carry(input_tensor, lambda: output_tensor.view(-1).copy_(own))


# ---- Process groups ----


def start_fake_ranks(ranks: int) -> None:
    """A default process group of so many ranks, of which only this one exists."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())


def start_one_rank() -> None:
    """A default process group of this process alone, over NCCL on a GPU."""
    backend = "cpu:gloo,cuda:nccl" if CUDA else "gloo"
    options: dict[str, Any] = {"device_id": torch.device("cuda", 0)} if CUDA else {}
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore(), **options)
