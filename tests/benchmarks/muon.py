"""Muon's wall time on 2 ranks beside one: `python tests/benchmarks/muon.py`. About a minute on a calm machine.

The optimizer alone, for 24 equal matrices in float32, one thread a rank, over gloo. Each rank owns half of the
matrices and does half of the Newton-Schulz work; two all-to-alls carry the momentum there and the directions back.
In each round, rank 0 first does the whole work by itself, while the other sleeps, then both do it together.
"""

from __future__ import annotations

import argparse
import statistics
import struct
import sys
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from optree import tree_map

from functorch_zero import optim
from functorch_zero.collectives import slice_tree
from functorch_zero.groups import Group, ProcessGroup, launch
from functorch_zero.groups.solo import Solo
from functorch_zero.layout import make_layout
from functorch_zero.sharded import Sharded

NUM_MATRICES = 24
BAR = 0.65


class Times(NamedTuple):
    """Seconds a step, by round."""

    alone: list[float]
    together: list[float]
    cpu_alone: list[float]
    cpu_together: list[float]  # of the busier rank


class Update:
    """Muon's update of some ranks' pieces."""

    def __init__(self, group: Group, size: int):
        g = torch.Generator().manual_seed(0)
        params = {f"matrix{i:02}": torch.randn(size, size, generator=g) for i in range(NUM_MATRICES)}
        layout = make_layout(params, group.size, trainable=lambda path, leaf: True)
        self.across: Any = Sharded(layout, group)
        self.params = slice_tree(params, layout, group.rank)
        self.optimizer = optim.muon(0.02)
        self.state = self.optimizer.init(self.params, self.across)

    def __call__(self) -> None:
        grads = tree_map(torch.clone, self.params)
        _, self.state = self.optimizer.update(grads, self.state, self.params, self.across)


def clocks() -> tuple[float, float]:
    """Wall time and this process's CPU time."""
    return time.perf_counter(), time.process_time()


def since(start: tuple[float, float]) -> tuple[float, float]:
    now = clocks()
    return now[0] - start[0], now[1] - start[1]


def measure(size: int, rounds: int) -> Times:
    """One rank's clock; rank 0's counts."""
    warnings.filterwarnings("ignore")
    group = ProcessGroup()
    alone = Update(Solo(), size) if group.rank == 0 else None
    together = Update(group, size)
    times = Times([], [], [], [])
    for k in range(rounds + 1):  # the first one warms up
        group.barrier()
        start = clocks()
        if alone is not None:
            alone()
        own = since(start)
        group.barrier()
        start = clocks()
        together()
        cpu = max(struct.unpack("d", c)[0] for c in group.exchange(struct.pack("d", since(start)[1])))
        wall = since(start)[0]  # the slower rank's
        if k > 0:
            for row, value in zip(times, (own[0], wall, own[1], cpu), strict=True):
                row.append(value)
    return times


def main() -> None:
    """Print a table, and whether the bar is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    print(f"24 matrices, float32, 2 gloo processes of one thread, medians of {args.rounds} rounds.\n")
    print("| matrix | one rank | two ranks | ratio | of the fastest | of CPU time |\n|---|---|---|---|---|---|")
    met = True
    for size in args.sizes:
        times = launch(measure, 2, size, args.rounds, timeout=600)[0]
        alone, together, cpu_alone, cpu_together = (statistics.median(t) for t in times)
        ratios = together / alone, min(times.together) / min(times.alone), cpu_together / cpu_alone
        met &= ratios[0] <= BAR
        cells = f"{size} x {size}", *(f"{1000 * t:.0f} ms" for t in (alone, together)), *(f"{r:.2f}" for r in ratios)
        print("| " + " | ".join(cells) + " |", flush=True)
    print(f"\nThe bar, a ratio of medians of at most {BAR}, is {'met' if met else 'not met'}.")


if __name__ == "__main__":
    main()
