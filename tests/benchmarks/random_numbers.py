"""Random numbers of leaves beside `torch.randn`: `python tests/benchmarks/random_numbers.py`. Half
a minute.

25 million float32 on one thread, by kind, whole and in the pieces of four ranks. In turn with
`torch.randn`; each number is the median of the ratios of processor time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from functorch_zero.layout.extent import Extent
from functorch_zero.optim.random_numbers import Kind, draw_leaf

NUM, RANKS = 25_000_000, 4
KINDS: tuple[Kind, ...] = ("normal", "uniform", "rademacher")


def whole(kind: Kind) -> Callable[[], object]:
    like = torch.empty(NUM)
    return lambda: draw_leaf(kind, 0, "w", like)


def piece(kind: Kind) -> Callable[[], object]:
    """The second rank's, from inside of a block to inside of another."""
    start, stop = NUM // RANKS + 1, 2 * NUM // RANKS + 1
    like, extent = torch.empty(stop - start), Extent((NUM,), start, stop)
    return lambda: draw_leaf(kind, 0, "w", like, extent)


def seconds(run: Callable[[], object]) -> float:
    start = time.thread_time()
    run()
    return time.thread_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(f"times torch.randn, median of {rounds} (least, most)")
    for name, make, num in (("whole", whole, NUM), ("piece", piece, NUM // RANKS)):
        for kind in KINDS:
            draw, ratios = make(kind), []
            for _ in range(rounds):
                beside = seconds(lambda num=num: torch.randn(num))
                ratios.append(seconds(draw) / beside)
            low, high = min(ratios), max(ratios)
            print(f"{name:6} {kind:11} {statistics.median(ratios):.2f} ({low:.2f}, {high:.2f})")


if __name__ == "__main__":
    main()
