"""This library beside what torch itself carries: `python tests/benchmarks/peers.py --size small
--rounds 5`.

One GPT-like model, float32, fused AdamW, ranks over gloo with a thread each, all on this machine.
The contenders take turns (A B C ... A B C ...), each time in fresh processes; a turn that other
programs disturbed is taken again, and the calmest counts. What is measured:

- step: the slowest rank's time from a barrier on; the median of a turn's steps, and of the turns.
- peak: the most memory resident in a step (VmHWM, reset through clear_refs), above what was
  resident before building; malloc is told to map each tensor by itself, so that freed ones count no
  more. In a process of its own, not timed.
- sent: what a rank's sockets have sent a step, by the kernel's count (TCP_INFO). gloo's
  reduce-scatter, which `fully_shard` uses, moves what an all-reduce moves.

Ratios of steps are taken within a turn, which cancels slow drift of the machine. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.benchmarks.options import add_some_of, parser_of

HERE = Path(__file__).parent
OURS = ("fz_level3", "fz_level3_keep", "fz_level2", "fz_level1", "fz_level0")
PEERS = ("fully_shard", "fully_shard_keep", "zero_redundancy", "ddp")
LABELS = {
    "fz_level3": "**level 3**",
    "fz_level3_keep": "**level 3**, without resharding",
    "fz_level2": "**level 2**",
    "fz_level1": "**level 1**",
    "fz_level0": "**level 0**",
    "fully_shard": "`fully_shard`",
    "fully_shard_keep": "`fully_shard`, without resharding",
    "zero_redundancy": "DDP + ZeroRedundancyOptimizer",
    "ddp": "DDP",
}


class Bar(NamedTuple):
    """What a level is held to: ratios at most."""

    ours: str
    peer: str
    step: dict[str, float]
    peak: float
    sent: float


BARS = [
    Bar("fz_level3", "fully_shard", {"small": 0.78, "medium": 0.68}, 0.85, 0.76),
    Bar("fz_level3_keep", "fully_shard_keep", {"small": 0.85, "medium": 0.80}, 1.00, 0.67),
    Bar("fz_level1", "zero_redundancy", {"small": 0.97, "medium": 0.93}, 0.88, 0.68),
    Bar("fz_level0", "ddp", {"small": 1.00, "medium": 1.00}, 0.90, 1.00),
]


def launch(name: str, mode: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run one contender on fresh processes. Returns what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        spec = {
            "name": name,
            "mode": mode,
            "size": args.size,
            "warmup": args.warmup,
            "steps": args.steps,
        }
        env = {
            **os.environ,
            "WORLD_SIZE": str(args.ranks),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        if mode == "size":
            env |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
        command = [sys.executable, str(HERE / "rank.py"), json.dumps({**spec, "dir": folder})]
        log = Path(folder, "log")
        with log.open("w") as out:
            ranks = [
                subprocess.Popen(command, env={**env, "RANK": str(r)}, stdout=out, stderr=out)
                for r in range(args.ranks)
            ]
            try:
                deadline = time.monotonic() + args.timeout
                while any(r.poll() is None for r in ranks) and not any(r.poll() for r in ranks):
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"{name} took longer than {args.timeout} s")
                    time.sleep(0.05)
            finally:
                for r in ranks:
                    r.kill()
                    r.wait()
        written = Path(folder, "out.json")
        if not written.exists():
            raise RuntimeError(f"{name} failed:\n{log.read_text()[-2000:]}")
        return dict(json.loads(written.read_text()))


def take_turns(names: list[str], args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """The timings of each contender, a turn each."""
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for i in range(args.rounds):
        first = i % len(names)  # nobody is always the first
        for name in names[first:] + names[:first]:
            taken = launch(name, "time", args)
            for _ in range(args.retries):
                if taken["foreign"] > args.max_foreign:
                    taken = min(taken, launch(name, "time", args), key=lambda t: t["foreign"])
            turns[name].append(taken)
            say(
                f"round {i + 1}: {name} {1e3 * taken['seconds']:.1f} ms, others' share "
                f"{taken['foreign']:.0%}"
            )
    return turns


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def ratio(turns: dict[str, list[dict[str, float]]], name: str, base: str) -> list[float]:
    """Of steps, a turn each."""
    return [a["seconds"] / b["seconds"] for a, b in zip(turns[name], turns[base], strict=True)]


def spread(values: list[float]) -> str:
    """The median and the range."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def table(
    names: list[str], turns: dict[str, list[dict[str, float]]], sizes: dict[str, dict[str, Any]]
) -> str:
    """All contenders, as Markdown; ratios to the first `fully_shard` and to DDP where they are
    among them."""
    bases = [base for base in ("fully_shard", "ddp") if base in names]
    head = [
        "",
        "step ms",
        *(f"step ÷ {b}" for b in bases),
        "peak MB",
        *(f"peak ÷ {b}" for b in bases),
    ]
    head += ["sent MB", *(f"sent ÷ {b}" for b in bases)]
    rows = [head, ["---", *["---:"] * (len(head) - 1)]]
    for name in names:
        row = [LABELS[name]]
        row += (
            [f"{1e3 * statistics.median(t['seconds'] for t in turns[name]):.1f}"]
            if turns[name]
            else ["-"]
        )
        row += [spread(ratio(turns, name, base)) if turns[name] else "-" for base in bases]
        for kind in ("peak", "sent"):
            row.append(f"{sizes[name][kind] / 1e6:.1f}")
            row += [f"{sizes[name][kind] / sizes[base][kind]:.2f}" for base in bases]
        rows.append(row)
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def bars(
    args: argparse.Namespace,
    turns: dict[str, list[dict[str, float]]],
    sizes: dict[str, dict[str, Any]],
) -> str:
    """What issue 6 asks for, beside what was measured."""
    rows = [
        "| level / peer | step | at most | peak | at most | sent | at most |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for bar in BARS:
        if bar.ours not in sizes or bar.peer not in sizes or bar.step.get(args.size) is None:
            continue
        step = (
            statistics.median(ratio(turns, bar.ours, bar.peer)) if turns[bar.ours] else float("nan")
        )
        peak, sent = (sizes[bar.ours][kind] / sizes[bar.peer][kind] for kind in ("peak", "sent"))
        pairs = [(step, bar.step[args.size]), (peak, bar.peak), (sent, bar.sent)]
        cells = " | ".join(
            f"{x:.2f}{' (missed)' if x > most + 0.005 else ''} | {most:.2f}" for x, most in pairs
        )
        rows.append(f"| {LABELS[bar.ours]} / {LABELS[bar.peer]} | {cells} |")
    return "\n".join(rows)


def main() -> None:
    parser = parser_of(__doc__, ["tiny", "small", "medium"], default="small")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--rounds", type=int, default=5, help="turns for timing; 0: memory and traffic only"
    )
    parser.add_argument("--steps", type=int, default=10, help="timed steps a turn")
    parser.add_argument("--warmup", type=int, default=3)
    add_some_of(parser, "--only", OURS + PEERS)
    parser.add_argument(
        "--max-foreign",
        type=float,
        default=0.1,
        help="share of the machine others may use in a turn",
    )
    parser.add_argument(
        "--retries", type=int, default=4, help="how often to take a disturbed turn again"
    )
    parser.add_argument("--timeout", type=float, default=180, help="seconds a turn")
    args = parser.parse_args()
    # So that `launch` kills its ranks
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    names = args.only
    sizes = {}
    for name in names:
        sizes[name] = launch(name, "size", args)
        say(
            f"{name}: peak {sizes[name]['peak'] / 1e6:.1f} MB, sent "
            f"{sizes[name]['sent'] / 1e6:.1f} MB a step"
        )
    turns = take_turns(names, args)
    losses = [sizes[name]["losses"] for name in names]
    apart = max(max(abs(a - b) for a, b in zip(one, losses[0], strict=True)) for one in losses)
    foreign = max((t["foreign"] for name in names for t in turns[name]), default=0.0)
    import torch

    command = " ".join(["python tests/benchmarks/peers.py", *sys.argv[1:]])
    print(
        f"`{command}`: {time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, {platform.machine()}, "
        "torch"
    )
    print(
        f"{torch.__version__}; {args.ranks} ranks, {args.rounds} turns of {args.steps} steps; "
        "others used at most"
    )
    print(
        f"{foreign:.0%} of the machine in a turn that counts; losses of all contenders within "
        f"{apart:.0e}.\n"
    )
    print(table(names, turns, sizes))
    print("\nAgainst the same level, ratios of medians:\n")
    print(bars(args, turns, sizes))


if __name__ == "__main__":
    main()
