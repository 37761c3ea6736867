"""Saving and loading against raw files, and against torch.distributed.checkpoint. Ratios of one
run.

    python tests/benchmarks/checkpoint.py --mib 512 --ranks 2

Every rank is a process with one thread. `raw` writes the same bytes, 4 MiB a call, and flushes them
to disk; raw reading is from the page cache, as loading is. Of several rounds, each of which reads
five times, the best counts. A core's work is the time that a rank has run, in user and system: what
else the machine does counts less there. Extra memory is the most anonymous memory of a rank above
what it had before, sampled in a round that isn't timed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from functorch_zero import checkpoint, launch, optim, train_step
from functorch_zero.groups import ProcessGroup
from functorch_zero.sharded.api import shard

LEAVES = 64
WRITES = ("raw write", "save", "dcp save")
READS = ("raw read", "load", "dcp load")
READINGS = 5  # of what a round has written


class Memory:
    """The most resident memory above the start, in MiB, while a block runs."""

    def __enter__(self) -> Memory:
        self.extra, self._end = 0.0, threading.Event()
        self._base = resident()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(0.002):
            self.extra = max(self.extra, resident() - self._base)


def resident() -> float:
    """This process's anonymous memory in MiB: the page cache doesn't count."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise AssertionError


def raw_write(path: Path, data: memoryview) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for start in range(0, len(data), 2**22):
        os.write(file, data[start : start + 2**22])
    os.fsync(file)
    os.close(file)


def raw_read(path: Path, data: memoryview) -> None:
    file = os.open(path, os.O_RDONLY)
    for start in range(0, len(data), 2**22):
        os.preadv(file, [data[start : start + 2**22]], start)
    os.close(file)


class Timing(NamedTuple):
    seconds: float  # until the slowest rank is done
    # seconds of a core's work, of the rank with the most: what else the machine does counts less
    busy: float


def timed(group: ProcessGroup, work: Callable[[], Any]) -> Timing:
    group.barrier()
    start, busy = time.perf_counter(), time.process_time()
    work()
    busy = time.process_time() - busy
    group.barrier()
    seconds = time.perf_counter() - start
    worst = torch.tensor([busy])
    group.all_reduce(worst, "max").wait()
    return Timing(seconds, worst.item())


def watched(group: ProcessGroup, work: Callable[[], Any]) -> float:
    """Extra memory in MiB, of the rank with the most."""
    group.barrier()
    with Memory() as memory:
        work()
        group.barrier()
    worst = torch.tensor([memory.extra])
    group.all_reduce(worst, "max").wait()
    return worst.item()


def rank_main(
    folder: str, mib: int, rounds: int
) -> tuple[dict[str, list[Timing]], dict[str, float]]:
    torch.manual_seed(0)
    group = ProcessGroup()
    root = Path(folder)
    numel = mib * 2**20 // 4 // 3 // LEAVES  # Adam's state is three times the params
    params = {f"w{i}": torch.randn(numel, requires_grad=True) for i in range(LEAVES)}
    step = shard(
        train_step(lambda p, b, x: sum(w.sum() for w in p.values()), optim.adamw(0.1)),
        level=3,
        group=group,
    )
    state = step.init(params, {})
    del params
    flat = torch.randn(mib * 2**20 // 4 // group.size).view(torch.uint8)
    data = memoryview(flat.numpy())
    mesh = init_device_mesh("cpu", (group.size,))
    found: dict[str, list[Timing]] = {}
    for k in range(rounds + 1):
        at = root / f"{k}"
        kinds: dict[str, Callable[[], Any]] = {
            "raw write": lambda at=at: raw_write(root / f"raw{group.rank}", data),
            "save": lambda at=at: checkpoint.save(at, step, state),
            "dcp save": lambda at=at: dcp.save(dtensors(flat, mesh), checkpoint_id=at / "dcp"),
            "raw read": lambda at=at: raw_read(root / f"raw{group.rank}", data),
            "load": lambda at=at: loaded(at),
            "dcp load": lambda at=at: dcp.load(dtensors(flat, mesh), checkpoint_id=at / "dcp"),
        }

        def loaded(at: Path) -> None:
            nonlocal state
            state = checkpoint.load(at, step, like=state).state

        if k == 0:
            extra = {name: watched(group, work) for name, work in kinds.items()}
        for name in WRITES if k else ():
            found.setdefault(name, []).append(timed(group, kinds[name]))
        for name in READS * READINGS if k else ():  # in turn: what else the machine does changes
            found.setdefault(name, []).append(timed(group, kinds[name]))
        group.barrier()
        if group.rank == 0:
            shutil.rmtree(at)
        os.sync()
    return found, extra


def dtensors(flat: Tensor, mesh: Any) -> dict[str, Tensor]:
    """As many bytes as DTensors of equal pieces, which is what that library saves: views of `flat`,
    a copy of none."""
    pieces = flat.view(torch.float32).chunk(3 * LEAVES)
    return {
        f"w{i}": DTensor.from_local(x, mesh, [Shard(0)], run_check=False)
        for i, x in enumerate(pieces)
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=512, help="of state, over all ranks")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        found, extra = launch(rank_main, args.ranks, folder, args.mib, args.rounds, timeout=600)[0]
    size = args.mib * 2**20 / 1e9
    best = {name: Timing(*map(min, zip(*rows, strict=True))) for name, rows in found.items()}
    print(
        "| | GB/s, best round | of raw | of raw, by work | extra memory a rank, MiB "
        "|\n|---|---|---|---|---|"
    )
    for name in found:
        raw, ours = best["raw write" if name in WRITES else "raw read"], best[name]
        ratios = f"{raw.seconds / ours.seconds:.2f} | {raw.busy / ours.busy:.2f}"
        print(f"| {name} | {size / ours.seconds:.2f} | {ratios} | {extra[name]:.0f} |")


if __name__ == "__main__":
    main()
