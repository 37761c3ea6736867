"""Two versions of this library, step by step in turn: `python tests/benchmarks/against.py OLD NEW
--size small`.

OLD and NEW are each a checkout's folder or a wheel. For every row, each version gets two fresh gloo
ranks over sockets with a thread each, and both pairs are there at once. In each round one pair
takes a few steps while the other waits, and then the other pair does; who begins changes from round
to round. A turn's time is the median of its steps, a step's time that of the slower rank, from a
barrier on. What is printed is the median over rounds of new / old, with quartiles: the machine's
drift cancels in a round's ratio. "By CPU time" is the same of both ranks' CPU seconds, which other
programs on the machine disturb less.

The model and the optimizer are those of `peers.py`: a GPT-like model, float32, fused AdamW.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import inspect
import json
import os
import platform
import select
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

RANKS = 2
WARMUP = 9  # steps of each pair before the first round: those that ranks look at closely
ROWS: dict[str, dict[str, Any]] = {  # options of `shard`
    "fz_level0": {"level": 0},
    "fz_level1": {"level": 1},
    "fz_level2": {"level": 2},
    "fz_level3": {"level": 3},
    "fz_level3_keep": {"level": 3, "reshard_after_forward": False},
    "fz_alone": {"level": 0},  # each process by itself
    "fz_program_of_2": {"level": 3},
    "fz_program_of_3": {"level": 3},
}
GRADIENTS = {"fz_program_of_2": 2, "fz_program_of_3": 3}  # of a step
# Today's name -> the one it had; others are what they were
NAMES_BEFORE_2026_11_22 = {"groups.SingleRank": "Solo"}


def named(library: Any, name: str) -> Any:
    """What the library has under a name of today, or under the one before."""
    for candidate in (name, NAMES_BEFORE_2026_11_22.get(name, name)):
        try:
            return reduce(getattr, candidate.split("."), library)
        except AttributeError:
            continue
    raise AttributeError(
        f"{library.__file__} has no {name}. Remedy: add its other name to NAMES_BEFORE_2026_11_22"
    )


class Version(NamedTuple):
    """One side of the comparison."""

    side: str  # "old" or "new"
    folder: Path  # that holds the package
    label: str  # for people


def version_of(side: str, given: str, scratch: Path) -> Version:
    """A checkout, or a wheel unpacked into `scratch`."""
    path = Path(given).resolve()
    if path.suffix == ".whl" and path.is_file():
        folder = scratch / side
        with zipfile.ZipFile(path) as wheel:
            wheel.extractall(folder)
        label = path.name
    else:
        folder, label = path, commit_of(path)
    if not (folder / "functorch_zero" / "__init__.py").is_file():
        raise SystemExit(
            f"{side.upper()} must be a checkout or a wheel of functorch_zero, got {given}"
        )
    return Version(side, folder, label)


def commit_of(folder: Path) -> str:
    """The commit that a checkout is at, if it is one."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*"]
    found = subprocess.run(command, capture_output=True, text=True)
    return found.stdout.strip() or "no commit"


class Step(NamedTuple):
    """One step of a rank; or of a pair: the slower rank's seconds, the sum of CPU seconds, the mean
    loss."""

    seconds: float
    cpu: float
    loss: float

    @classmethod
    def of_pair(cls, ranks: tuple[Step, ...]) -> Step:
        """The pair's, from its ranks'."""
        seconds, cpu, losses = zip(*ranks, strict=True)
        return cls(max(seconds), sum(cpu), statistics.fmean(losses))


class Pair:
    """The ranks of one version."""

    def __init__(self, version: Version, row: str, scratch: Path, args: argparse.Namespace):
        self._timeout = args.timeout
        self._log = scratch / f"{row}.{version.side}.log"
        spec = {"row": row, "size": args.size, "folder": str(version.folder)}
        spec["rendezvous"] = str(scratch / f"{row}.{version.side}.store")
        python_path = os.pathsep.join(
            [str(version.folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        env = {
            **os.environ,
            "PYTHONPATH": python_path,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        with self._log.open("w") as log:
            self._ranks = [
                subprocess.Popen(
                    [sys.executable, __file__, "--rank", json.dumps({**spec, "rank": rank})],
                    env=env,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    bufsize=0,
                )
                for rank in range(RANKS)
            ]

    def take_steps(self, number: int) -> list[Step]:
        """The pair's next steps, one by one."""
        for rank in self._ranks:
            assert rank.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended, as its reply will say
                rank.stdin.write(f"{number}\n".encode())
        return [Step.of_pair(ranks) for ranks in zip(*self._replies(), strict=True)]

    def _replies(self) -> list[list[Step]]:
        """What each rank says; the first that ends, or none that speaks in time, is an error."""
        waiting = {rank.stdout: number for number, rank in enumerate(self._ranks)}
        replies: dict[int, list[Step]] = {}
        while waiting:
            ready = select.select(list(waiting), [], [], self._timeout)[0]
            if not ready:
                raise self._failed(
                    f"ranks {sorted(waiting.values())} said nothing for {self._timeout:g} s"
                )
            for pipe in ready:
                rank, line = waiting.pop(pipe), pipe.readline()
                if not line:
                    raise self._failed(f"rank {rank} ended")
                replies[rank] = [Step(*step) for step in json.loads(line)]
        return [replies[rank] for rank in range(RANKS)]

    def _failed(self, story: str) -> SystemExit:
        return SystemExit(f"{story}; the log of the ranks ends:\n{self._log.read_text()[-3000:]}")

    def close(self) -> None:
        """End the processes."""
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.communicate()


@contextlib.contextmanager
def pairs(versions: list[Version], row: str, args: argparse.Namespace) -> Iterator[dict[str, Pair]]:
    """Both pairs, for one row."""
    made: dict[str, Pair] = {}
    with tempfile.TemporaryDirectory() as scratch:
        try:
            for version in versions:
                made[version.side] = Pair(version, row, Path(scratch), args)
            yield made
        finally:
            for pair in made.values():
                pair.close()


class Measured(NamedTuple):
    """One row's rounds."""

    turns: dict[str, list[Step]]  # by side, each the medians of a turn's steps
    apart: float  # the largest difference of two losses, relative


def measure(versions: list[Version], row: str, args: argparse.Namespace) -> Measured:
    """Turns of both pairs, round by round."""
    turns: dict[str, list[Step]] = {version.side: [] for version in versions}
    losses: dict[str, list[float]] = {version.side: [] for version in versions}
    with pairs(versions, row, args) as sides:
        for pair in sides.values():
            pair.take_steps(WARMUP)
        for number in range(args.rounds):
            order = list(sides) if number % 2 == 0 else list(reversed(sides))
            for side in order:
                steps = sides[side].take_steps(args.steps)
                turns[side].append(Step(*map(statistics.median, zip(*steps, strict=True))))
                losses[side] += [step.loss for step in steps]
    apart = max(abs(a - b) / abs(a) for a, b in zip(*losses.values(), strict=True))
    return Measured(turns, apart)


def spread(values: list[float]) -> str:
    """The median and the quartiles."""
    low, middle, high = (
        statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    )
    return f"{middle:.3f} ({low:.3f}-{high:.3f})"


def line_of(row: str, measured: Measured) -> str:
    """A row of the table."""
    rounds = list(zip(measured.turns["old"], measured.turns["new"], strict=True))
    by_time = spread([new.seconds / old.seconds for old, new in rounds])
    by_cpu = spread([new.cpu / old.cpu for old, new in rounds])
    times = " | ".join(
        f"{1e3 * statistics.median(s.seconds for s in side):.1f}"
        for side in measured.turns.values()
    )
    return f"| {row} | {by_time} | {by_cpu} | {times} | {measured.apart:.0e} |"


def machine() -> str:
    """What this runs on, in words."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), ""
    )
    words = [model or platform.machine(), f"{os.cpu_count()} cores", platform.system()]
    return ", ".join([*words, f"Python {platform.python_version()}"])


def torch_version() -> str:
    """Torch's, without importing it."""
    return importlib.metadata.version("torch")


def compare(args: argparse.Namespace) -> None:
    rows = args.only.split(",") if args.only else list(ROWS)
    unknown = [row for row in rows if row not in ROWS]
    if unknown:
        raise SystemExit(f"--only takes some of {', '.join(ROWS)}, got {', '.join(unknown)}")
    with tempfile.TemporaryDirectory() as scratch:
        versions = [version_of(side, getattr(args, side), Path(scratch)) for side in ("old", "new")]
        print(
            f"`{shlex.join(['python', 'tests/benchmarks/against.py', *sys.argv[1:]])}`: "
            f"{time.strftime('%Y-%m-%d')},"
        )
        print(
            f"{machine()}, torch {torch_version()}; old: {versions[0].label}, new: "
            f"{versions[1].label};"
        )
        print(
            f"{RANKS} gloo ranks, {args.rounds} rounds of {args.steps} steps; medians "
            "(quartiles).\n"
        )
        print(
            f"| {args.size} | new / old | by CPU time | old ms | new ms | losses apart "
            "|\n|---|---|---|---:|---:|---:|",
            flush=True,
        )
        for row in rows:
            print(line_of(row, measure(versions, row, args)), flush=True)


def build(library: Any, row: str, size: str) -> tuple[Any, Any]:
    """(the sharded step, its first state), by nothing but the library's public names."""
    from contenders import ADAMW, model_fn

    apply, params, buffers = named(library, "functionalize")(model_fn(size)(), units="blocks.*")
    b1, b2 = ADAMW["betas"]
    optimizer = named(library, "optim.adamw")(
        ADAMW["lr"], b1=b1, b2=b2, eps=ADAMW["eps"], weight_decay=ADAMW["weight_decay"]
    )
    loss_fn = lambda p, b, batch: apply(p, b, *batch)[0]
    if row in GRADIENTS:
        step = program(library, loss_fn, optimizer, GRADIENTS[row])
    else:
        step = named(library, "train_step")(loss_fn, optimizer)
    if row == "fz_alone":
        group = named(library, "groups.SingleRank")()
    else:
        make = named(library, "ProcessGroup")
        over_sockets = (
            {"cross_memory": False} if "cross_memory" in inspect.signature(make).parameters else {}
        )
        group = make(**over_sockets)
    run = named(library, "shard")(step, group=group, **ROWS[row])
    return run, run.init(params, buffers, seed=None)


def program(library: Any, loss_fn: Any, optimizer: Any, gradients: int) -> Any:
    """Sharpness-aware: each gradient but the first is taken a little up the one before."""
    from optree import tree_map

    value_and_grad = named(library, "value_and_grad")(loss_fn)
    apply_updates = named(library, "apply_updates")

    def init(params: Any, buffers: Any) -> Any:
        return params, buffers, optimizer.init(params)

    def step(value: Any, batch: Any) -> Any:
        params, buffers, state = value
        loss, grads = value_and_grad(params, buffers, batch)
        for _ in range(gradients - 1):
            up = tree_map(lambda g: 1e-3 * g, grads)
            loss, grads = value_and_grad(apply_updates(params, up), buffers, batch)
        params, state = optimizer.apply(grads, state, params)
        return (params, buffers, state), {"loss": loss}

    return named(library, "program_step")(step, init=init)


def serve(spec: dict[str, Any]) -> None:
    """One rank: for every number read, take so many steps and say what each took, and its loss."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed goes to the log
    warnings.filterwarnings("ignore")
    import torch
    import torch.distributed as dist
    from contenders import batch_of

    import functorch_zero as library

    found, rank = Path(str(library.__file__)).resolve(), spec["rank"]
    assert found.is_relative_to(spec["folder"]), (
        f"{found} was imported, which is not in {spec['folder']}"
    )
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{spec['rendezvous']}", rank=rank, world_size=RANKS
    )
    run, state = build(library, spec["row"], spec["size"])
    index = 0
    for line in sys.stdin:
        steps = []
        for _ in range(int(line)):
            batch = batch_of(spec["size"], rank, index)
            dist.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            state, metrics = run(state, batch)
            seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
            steps.append((seconds, cpu, float(metrics["loss"])))
            index += 1
        replies.write(json.dumps(steps) + "\n")
    os._exit(0)


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        serve(json.loads(sys.argv[2]))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", help="a checkout's folder, or a wheel")
    parser.add_argument("new", help="the same of the version to compare with it")
    parser.add_argument("--size", default="small", choices=["tiny", "small", "medium"])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=3, help="steps a turn")
    parser.add_argument("--only", help=f"some of {', '.join(ROWS)}, with commas between")
    parser.add_argument("--timeout", type=float, default=300, help="seconds a turn may take")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that the ranks are ended
    compare(parser.parse_args())


if __name__ == "__main__":
    main()
