"""Steps of everyone in turn, in the same two processes: `python tests/benchmarks/pairs.py --size
small --rounds 30`.

`peers.py` gives each contender fresh processes, and so measures memory; between them the machine
may have changed. Here all contenders' models are there at once, and each round takes one step of
each (A B C ... A B C ...), from a barrier on, by the slower rank's clock. What is printed is the
median over rounds of the ratio of two steps of one round, and what a step costs rank 0: CPU time of
all its threads, and page faults. Two gloo ranks, a thread each, fused AdamW. `plain` and `fz_alone`
don't communicate: plain torch, and `shard` at level 0 for one rank.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch import nn

RANKS = 2
AGAINST = {  # theirs by ours
    "fz_level3": "fully_shard",
    "fz_level3_keep": "fully_shard_keep",
    "fz_level1": "zero_redundancy",
    "fz_level0": "ddp",
    "fz_alone": "plain",
}


class Cost(NamedTuple):
    """Of one step on this rank; `seconds` is the slower rank's."""

    seconds: float
    cpu_seconds: float
    page_faults: int


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
    return made | {ours: ADAPTERS[ours](make, ADAMW["lr"], RANKS, "fused") for ours in AGAINST}


def measure(size: str, rounds: int) -> dict[str, list[Cost]]:
    """The costs of each contender's steps, round by round."""
    from contenders import batch_of

    warnings.filterwarnings("ignore")
    everyone, rank = contenders(size), dist.get_rank()
    costs: dict[str, list[Cost]] = {name: [] for name in everyone}
    for k in range(rounds + 2):
        for name, contender in everyone.items():
            batch = batch_of(size, rank, k)
            dist.barrier()
            before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
            contender.step(batch)
            slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            after = resource.getrusage(resource.RUSAGE_SELF)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if k >= 2:  # the first two warm up
                cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
                faults = after.ru_minflt - before.ru_minflt
                costs[name].append(Cost(slowest.item(), cpu, faults))
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="small", choices=["tiny", "small", "medium"])
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()

    import functorch_zero as fz

    ranks = fz.launch(measure, RANKS, args.size, args.rounds, start_method="fork", timeout=1800)
    costs = ranks[0]
    print(
        f"\n{args.size}, {args.rounds} rounds; median of the rounds' ratios (first and third "
        "quartile).\n"
    )
    print("| | against | ratio of step times |\n|---|---|---|")
    for ours, theirs in AGAINST.items():
        pairs = zip(costs[ours], costs[theirs], strict=True)
        ratios = [a.seconds / b.seconds for a, b in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"| {ours} | {theirs} | {middle:.2f} ({low:.2f}-{high:.2f}) |")
    print("\n| a step, medians | ms | CPU ms | page faults |\n|---|---|---|---|")
    for name, rows in costs.items():
        seconds, cpu, faults = map(statistics.median, zip(*rows, strict=True))
        print(f"| {name} | {1e3 * seconds:.0f} | {1e3 * cpu:.0f} | {faults:.0f} |")


if __name__ == "__main__":
    main()
