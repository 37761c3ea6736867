"""What a unit costs in host work: `python tests/benchmarks/step_overhead.py`. CPU time of steps of
10 to 1,000 units.

Units are linear maps of 8 x 8, so that there is hardly any arithmetic. Two ranks: one of a
`CountingGroup`, which has no other rank and copies what it would send, and both as threads, which
also wait for each other.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.testing import run_ranks

STEPS = 5


def microseconds_a_unit(group: Any, num_units: int, level: int) -> float:
    """CPU time of this process, the median of a few steps, divided by units and ranks that run in
    it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(num_units)))
    apply, params, buffers = fz.functionalize(model, units=nn.Linear)
    step = fz.train_step(lambda p, b, x: apply(p, b, x)[0].square().mean(), optim.adamw(1e-3))
    sharded = fz.shard(step, level=level, group=group)
    state, x, took = sharded.init(params, buffers), torch.ones(4, 8), []
    for _ in range(2 + STEPS):
        group.barrier()
        began = time.process_time()
        state, _ = sharded(state, x)
        group.barrier()
        took.append(time.process_time() - began)
    num_here = 1 if isinstance(group, fz.groups.CountingGroup) else group.size
    return statistics.median(took[2:]) / num_units / num_here * 1e6


def main() -> None:
    torch.set_num_threads(1)
    print("| level | ranks | 10 units | 100 units | 1,000 units |\n|---:|---|---:|---:|---:|")
    for level in range(4):
        counted = [
            microseconds_a_unit(fz.groups.CountingGroup(2), n, level) for n in (10, 100, 1000)
        ]
        print(
            f"| {level} | one, counting | " + " | ".join(f"{t:.0f}" for t in counted) + " |",
            flush=True,
        )
        threads = [
            run_ranks(lambda g, n=n, lv=level: microseconds_a_unit(g, n, lv), 2)[0]
            for n in (10, 100, 1000)
        ]
        print(
            f"| {level} | two threads | " + " | ".join(f"{t:.0f}" for t in threads) + " |",
            flush=True,
        )


if __name__ == "__main__":
    main()
