"""How long a plan takes: `python tests/benchmarks/plan_speed.py`. 10,000 leaves in 1,000 units for
4,096 ranks."""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from functorch_zero import optim, plan
from functorch_zero.layout.build import make_layout
from functorch_zero.params import Params, UnitSpec


def many_leaves(num_units: int, num_leaves: int) -> Params:
    """Square leaves on the meta device: 40 GB of them."""
    names = [[f"{u}.{i}" for i in range(num_leaves)] for u in range(num_units)]
    leaves = {
        name: torch.empty(1000, 1000, device="meta", requires_grad=True)
        for unit in names
        for name in unit
    }
    return Params(
        leaves, tuple(UnitSpec(str(u), (str(u),), tuple(unit)) for u, unit in enumerate(names))
    )


def main() -> None:
    torch.set_num_threads(1)
    print(
        "| units | leaves | ranks | level | seconds for the layout | the plan (median of 5) | CPU "
        "seconds |"
    )
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for num_units, ranks in ((10, 4096), (100, 4096), (1000, 4096), (1000, 100_000)):
        params = many_leaves(num_units, 10)
        began = time.perf_counter()
        make_layout(params, ranks, trainable=lambda path, leaf: True)
        layout = f"{time.perf_counter() - began:.2f}"
        for level in (1, 3):
            wall, cpu = [], []
            for _ in range(5):
                began = time.perf_counter(), time.process_time()
                plan(params, optim.adamw(1e-3), level=level, ranks=ranks)
                wall.append(time.perf_counter() - began[0])
                cpu.append(time.process_time() - began[1])
            took = f"{layout} | {statistics.median(wall):.2f} | {statistics.median(cpu):.2f}"
            print(
                f"| {num_units:,} | {10 * num_units:,} | {ranks:,} | {level} | {took} |", flush=True
            )


if __name__ == "__main__":
    main()
