"""AdamW as `optim.to_torch` makes it beside torch's fused one: CPU time of a step, in pairs.

`python tests/benchmarks/torch_optimizer.py` prints the median ratio, plain and under `fully_shard`
on 2 ranks.
"""

from __future__ import annotations

import statistics
import time
import warnings
from typing import Any

import torch
from torch import nn

import functorch_zero as fz
from functorch_zero import optim

WIDTHS = (64, 256, 512)
LAYERS, ROWS, PAIRS = 12, 1000, 40


def build(width: int) -> nn.Module:
    layers = [
        nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, width, bias=False),
            nn.Linear(width, 4 * width, bias=False),
            nn.Linear(4 * width, width, bias=False),
        )
        for _ in range(LAYERS)
    ]
    return nn.Sequential(nn.Embedding(ROWS, width), *layers)


def adamw(lr: Any) -> optim.Transform:
    return optim.adamw(lr, weight_decay=0.01)


def compare(width: int, sharded: bool) -> str:
    torch.set_num_threads(1)
    models: list[Any] = [build(width), build(width)]
    if sharded:
        from torch.distributed.fsdp import fully_shard

        models = [fully_shard(model) for model in models]
    for model in models:
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.1)
    theirs = torch.optim.AdamW(models[1].parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    optimizers = optim.to_torch(adamw, models[0], lr=1e-3), theirs
    ratios = []
    for pair in range(PAIRS + 3):
        taken = [0.0, 0.0]
        for k in (0, 1) if pair % 2 else (1, 0):
            start = time.process_time()
            optimizers[k].step()
            taken[k] = time.process_time() - start
        ratios.append(taken[0] / taken[1])
    numel = sum(param.numel() for param in models[0].parameters())
    number = len([*models[0].parameters()])
    where = "fully_shard, 2 ranks" if sharded else "plain"
    ratio = statistics.median(ratios[3:])
    return f"{where}: {number} leaves, {numel / 1e6:.1f}M elements: {ratio:.2f} of torch's"


def on_ranks() -> list[str]:
    warnings.simplefilter("ignore")
    return [compare(width, sharded=True) for width in WIDTHS]


if __name__ == "__main__":
    for width in WIDTHS:
        print(compare(width, sharded=False))
    print(*fz.launch(on_ranks, 2)[0], sep="\n")
