"""Muon's wall time on 2 ranks beside one: `python tests/benchmarks/muon.py`. About a minute on a
calm machine.

The optimizer alone, for 24 equal matrices in float32, one thread a rank, over gloo. Each rank owns
half of the matrices and does half of the Newton-Schulz work; two all-to-alls carry the momentum
there and the directions back. In each round, rank 0 first does the whole work by itself, while the
other sleeps, then both do it together. Then the same with nothing but the Newton-Schulz products,
which no exchange can beat: what the machine lets two processes do.
"""

from __future__ import annotations

import argparse
import statistics
import struct
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from optree import tree_map

from functorch_zero import optim
from functorch_zero.groups import Group, ProcessGroup, launch
from functorch_zero.groups.single import SingleRank
from functorch_zero.layout.build import make_layout
from functorch_zero.optim.optimizers.muon import newton_schulz
from functorch_zero.sharded_optim.across import Sharded
from functorch_zero.testing.slicing import slice_tree

NUM_MATRICES = 24
BAR = 0.65


class Seconds(NamedTuple):
    """Of one rank doing all the work, and of two doing half each, in one round."""

    alone: float
    together: float  # the slower rank's
    cpu_alone: float
    cpu_together: float  # the busier rank's


class Update:
    """Muon's update of some ranks' pieces."""

    def __init__(self, group: Group, size: int):
        g = torch.Generator().manual_seed(0)
        params = {
            f"matrix{i:02}": torch.randn(size, size, generator=g) for i in range(NUM_MATRICES)
        }
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


def compare(group: Group, all_of_it: Callable[[], object], half: Callable[[], object]) -> Seconds:
    """First rank 0 by itself, while the other sleeps, then both. Rank 0's clock counts."""
    group.barrier()
    start = clocks()
    if group.rank == 0:
        all_of_it()
    own = since(start)
    group.barrier()
    start = clocks()
    half()
    cpu = max(struct.unpack("d", c)[0] for c in group.exchange(struct.pack("d", since(start)[1])))
    return Seconds(own[0], since(start)[0], own[1], cpu)


def measure(size: int, rounds: int) -> tuple[list[Seconds], list[Seconds]]:
    """Round by round, Muon's updates, and the matrix products in them with nothing else around."""
    warnings.filterwarnings("ignore")
    group = ProcessGroup()
    alone, together = Update(SingleRank(), size), Update(group, size)
    stack = torch.randn(NUM_MATRICES, size, size)
    updates, products = [], []
    for _ in range(rounds + 1):
        updates.append(compare(group, alone, together))
        products.append(
            compare(
                group,
                lambda: newton_schulz(stack),
                lambda: newton_schulz(stack[: NUM_MATRICES // group.size]),
            )
        )
    return updates[1:], products[1:]  # the first one warms up


def fastest(rounds: list[Seconds]) -> float:
    """The ratio of the fastest rounds."""
    return min(r.together for r in rounds) / min(r.alone for r in rounds)


def main() -> None:
    """Print a table, and whether the bar is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    print(
        f"24 matrices, float32, 2 gloo processes of one thread, medians of {args.rounds} rounds.\n"
    )
    print(
        "| matrix | one rank | two ranks | ratio | of the fastest | of CPU time | products alone, "
        "ratio | fastest |"
    )
    print("|---|---|---|---|---|---|---|---|")
    met = True
    for size in args.sizes:
        updates, products = launch(measure, 2, size, args.rounds, timeout=600)[0]
        middle = Seconds(*map(statistics.median, zip(*updates, strict=True)))
        limit = Seconds(*map(statistics.median, zip(*products, strict=True)))
        ratio = middle.together / middle.alone
        met &= ratio <= BAR
        ratios = (
            ratio,
            fastest(updates),
            middle.cpu_together / middle.cpu_alone,
            limit.together / limit.alone,
            fastest(products),
        )
        times = (f"{1000 * t:.0f} ms" for t in (middle.alone, middle.together))
        print(
            "| " + " | ".join([f"{size} x {size}", *times, *(f"{r:.2f}" for r in ratios)]) + " |",
            flush=True,
        )
    print(f"\nThe bar, a ratio of medians of at most {BAR}, is {'met' if met else 'not met'}.")


if __name__ == "__main__":
    main()
