"""Gradients of small units summed together: `python tests/benchmarks/small_units.py`.

60 units of 64 x 64 and 8 of 512 x 512, SGD, two gloo ranks of a thread each. The steps without
`reduce_bucket`, with 1 MiB and with 25 MiB take turns in the same processes. Milliseconds of a
step by rank 0's clock, from a barrier on, and of its CPU: medians over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import nn

MODELS = ((60, 64), (8, 512))
BUCKETS = (None, 2**20, 25 * 2**20)
WARM_UP = 3


def measure(num: int, dim: int, level: int, rounds: int) -> list[tuple[float, float, int]]:
    """Seconds, seconds of the CPU, and collectives of a step, for each of `BUCKETS`."""
    import functorch_zero as fz
    from functorch_zero import optim
    from functorch_zero.groups import ProcessGroup, counted

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(dim, dim) for _ in range(num)))
    apply, params, _ = fz.functionalize(model, units=nn.Linear)

    def loss_fn(params: Any, buffers: Any, x: torch.Tensor) -> torch.Tensor:
        return apply(params, buffers, x)[0].square().mean()

    step, group, x = (
        fz.train_step(loss_fn, optim.sgd(0.1)),
        counted(ProcessGroup()),
        torch.randn(8, dim),
    )
    steps = [fz.shard(step, level=level, group=group, reduce_bucket=n) for n in BUCKETS]
    states = [made.init(params) for made in steps]
    found: list[list[tuple[float, float, int]]] = [[] for _ in steps]
    for _ in range(rounds + WARM_UP):
        for k, made in enumerate(steps):
            group.barrier()
            group.reset()
            begin, cpu = time.perf_counter(), time.process_time()
            states[k], _ = made(states[k], x)
            seconds = time.perf_counter() - begin, time.process_time() - cpu
            found[k].append((*seconds, group.num_calls()))
    return [
        (*(statistics.median(column) for column in zip(*rows[WARM_UP:], strict=True)),)  # type: ignore[misc]
        for rows in found
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()

    import functorch_zero as fz

    print("| units | level | reduce_bucket | collectives | ms | ms of the CPU |")
    print("|---|---:|---:|---:|---:|---:|")
    for num, dim in MODELS:
        for level in (0, 1, 2):
            rows = fz.launch(measure, 2, num, dim, level, args.rounds, timeout=300)[0]
            for nbytes, (wall, cpu, calls) in zip(BUCKETS, rows, strict=True):
                bucket = "-" if nbytes is None else f"{nbytes >> 20} MiB"
                print(
                    f"| {num} of {dim} x {dim} | {level} | {bucket} | {calls:.0f} "
                    f"| {1e3 * wall:.1f} | {1e3 * cpu:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
