"""Those who train the same model beside this library: plain torch and `fully_shard`."""

from __future__ import annotations

import torch

from tests.benchmarks.simulated import Wire
from tests.gpu.model import GPT, Run, model_and_batch
from tests.gpu.report import DEVICE


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
    compile_blocks(model, compiled=compiled)  # first, so that collectives stay outside
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if wire is not None:
        from tests.gpu.fsdp_wire import Gather, Scatter

        for module in (*model.blocks, model):
            module.set_custom_all_gather(Gather(wire, ranks))
            module.set_custom_reduce_scatter(Scatter(wire, ranks))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def run() -> None:
        optimizer.zero_grad()
        model(ids).backward()
        optimizer.step()

    return run


def compile_blocks(model: GPT, *, compiled: bool) -> None:
    for i, block in enumerate(model.blocks if compiled else ()):
        model.blocks[i] = torch.compile(block)
