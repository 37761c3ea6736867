"""Steps of everyone in turn, in the same two processes: `python tests/benchmarks/pairs.py --size
small --rounds 30`.

`peers.py` gives each contender fresh processes, and so measures memory; between them the machine
may have changed. Here all contenders' models are there at once, and each round takes one step of
each (A B C ... A B C ...), from a barrier on, by the slower rank's clock. What is printed is the
median over rounds of the ratio of two steps of one round. Two gloo ranks, a thread each, fused
AdamW. `plain` and `fz_alone` don't communicate: plain torch, and `shard` at level 0 for one rank.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch import nn

RANKS = 2
AGAINST = [  # ours, theirs, and the ratio asked for: small, medium
    ("fz_level3", "fully_shard", 0.78, 0.68),
    ("fz_level3_keep", "fully_shard_keep", 0.85, 0.80),
    ("fz_level1", "zero_redundancy", 0.97, 0.93),
    ("fz_level0", "ddp", 1.00, 1.00),
    ("fz_alone", "plain", 1.03, 1.03),
]


def contenders(size: str) -> dict[str, Any]:
    sys.path.insert(0, str(Path(__file__).parent))
    from adapters import ADAPTERS
    from contenders import ADAMW, PEERS, Wrapped, model_fn

    class Plain(Wrapped):
        def __init__(self, model_fn: Callable[[], nn.Module], world: int):
            self.model = model_fn()
            self.optimizer = torch.optim.AdamW(self.model.parameters(), **ADAMW)

    make = model_fn(size)
    made = {name: peer(make, RANKS) for name, peer in {**PEERS, "plain": Plain}.items()}
    return made | {ours: ADAPTERS[ours](make, ADAMW["lr"], RANKS, "fused") for ours, *_ in AGAINST}


def measure(size: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of each contender's steps, round by round."""
    from contenders import batch_of

    warnings.filterwarnings("ignore")
    everyone, rank = contenders(size), dist.get_rank()
    seconds: dict[str, list[float]] = {name: [] for name in everyone}
    for k in range(rounds + 2):
        for name, contender in everyone.items():
            dist.barrier()
            start = time.perf_counter()
            contender.step(batch_of(size, rank, k))
            slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if k >= 2:  # the first two warm up
                seconds[name].append(slowest.item())
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="small", choices=["tiny", "small", "medium"])
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()

    import functorch_zero as fz

    seconds = fz.launch(measure, RANKS, args.size, args.rounds, start_method="fork", timeout=1800)[
        0
    ]
    print(
        f"\n{args.size}, {args.rounds} rounds; median of the rounds' ratios (first and third "
        "quartile).\n"
    )
    print("| | against | ratio of step times | asked for |\n|---|---|---|---|")
    for ours, theirs, small, medium in AGAINST:
        ratios = [a / b for a, b in zip(seconds[ours], seconds[theirs], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        asked = {"small": small, "medium": medium}.get(args.size)
        print(
            f"| {ours} | {theirs} | {middle:.2f} ({low:.2f}-{high:.2f}) | "
            f"{'' if asked is None else f'{asked:.2f}'} |"
        )


if __name__ == "__main__":
    main()
