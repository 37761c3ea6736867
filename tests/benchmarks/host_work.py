"""What a step costs beside its tensors' arithmetic: `python tests/benchmarks/host_work.py --size
small`; with `--programs`, of our training steps and of the same steps written as programs.

For each contender, in two fresh processes (gloo ranks, a thread each): the bytecodes that Python
runs in a step of rank 0, the C functions that it calls, and the page faults of a step, a median of
8 after 4 that warm up.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

import torch.distributed as dist
from contenders import ADAMW, PEERS, batch_of, model_fn

RANKS = 2
OURS = ("fz_level0", "fz_level1", "fz_level2", "fz_level3")
NAMES = ("ddp", "zero_redundancy", "fully_shard", *OURS)
PROGRAMS = ("program_level0", "program_level1", "program_level2", "program_level3")


def measure(name: str, size: str) -> tuple[int, int, int]:
    """Bytecodes, C calls and page faults of a step of this rank."""
    warnings.filterwarnings("ignore")
    if name in PEERS:
        contender: Any = PEERS[name](model_fn(size), RANKS)
    else:
        from adapters import ADAPTERS

        contender = ADAPTERS[name](model_fn(size), ADAMW["lr"], RANKS, "fused")
    rank, counts, faults = dist.get_rank(), {"opcode": 0, "c_call": 0}, []

    def count(frame: Any, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        counts[event] = counts.get(event, 0) + 1
        return count

    for k in range(14):
        batch = batch_of(size, rank, k)
        dist.barrier()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        sys.settrace(count if k == 12 else None)
        sys.setprofile(count if k == 13 else None)
        contender.step(batch)
        sys.settrace(None)
        sys.setprofile(None)
        if 4 <= k < 12:
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return counts["opcode"], counts["c_call"], int(statistics.median(faults))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="small", choices=["tiny", "small", "medium"])
    parser.add_argument("--programs", action="store_true", help="training steps, and as programs")
    args = parser.parse_args()

    import functorch_zero as fz

    print("| | bytecodes | C calls | page faults |\n|---|---:|---:|---:|")
    for name in (*OURS, *PROGRAMS) if args.programs else NAMES:
        bytecodes, calls, faults = fz.launch(measure, RANKS, name, args.size, timeout=300)[0]
        print(f"| {name} | {bytecodes:,} | {calls:,} | {faults:,} |", flush=True)


if __name__ == "__main__":
    main()
