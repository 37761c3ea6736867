"""One rank of one measurement of `peers.py`, in a process of its own: `python rank.py JSON`. Rank 0
writes out.json."""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import resource
import socket
import statistics
import struct
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def _status(key: str) -> int:
    """A line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


def reset_peak() -> None:
    """The most memory resident so far is what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def sent_bytes() -> int:
    """What this process's TCP sockets have sent since they were opened, by the kernel's count."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as s:
                info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:  # closed meanwhile, or no TCP
            continue
        total += struct.unpack_from("Q", info, 200)[0]  # tcpi_bytes_sent
    return total


def cpu_seconds() -> tuple[float, float]:
    """(busy CPU seconds of the whole machine, of this process)."""
    fields = [int(x) for x in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    own = resource.getrusage(resource.RUSAGE_SELF)
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf(
        "SC_CLK_TCK"
    ), own.ru_utime + own.ru_stime


def everyone(value: Any, world: int) -> list[Any]:
    import torch.distributed as dist

    out: list[Any] = [None] * world
    dist.all_gather_object(out, value)
    return out


def measure_time(
    build: Callable[[], Any], batches: list[Any], spec: dict[str, Any], world: int
) -> dict[str, Any]:
    """The slowest rank's seconds of each step, from a barrier on; and what share of the machine
    others used."""
    import torch.distributed as dist

    contender = build()
    for batch in batches[: spec["warmup"]]:
        contender.step(batch)
    times, start, cpu = [], time.perf_counter(), cpu_seconds()
    for batch in batches[spec["warmup"] :]:
        dist.barrier()
        began = time.perf_counter()
        contender.step(batch)
        times.append(time.perf_counter() - began)
    dist.barrier()
    wall, now = time.perf_counter() - start, cpu_seconds()
    ours = sum(everyone(now[1] - cpu[1], world))
    seconds = [max(step) for step in zip(*everyone(times, world), strict=True)]
    foreign = max(0.0, now[0] - cpu[0] - ours) / (wall * (os.cpu_count() or 1))
    return {"seconds": statistics.median(seconds), "foreign": foreign}


def measure_size(
    build: Callable[[], Any], batches: list[Any], warm: Callable[[], None], world: int
) -> dict[str, Any]:
    """The most memory resident in steady state, above that before building; bytes sent a step; the
    mean loss."""
    import torch.distributed as dist

    warm()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = _status("VmRSS")
    contender = build()
    losses = []
    for i, batch in enumerate(batches):
        if i == 3:
            gc.collect()
            reset_peak()
        losses.append(float(contender.step(batch)))
    peak = _status("VmHWM") - before
    dist.barrier()
    sent = sent_bytes()
    for batch in batches[:3]:
        contender.step(batch)
    dist.barrier()
    sent = sent_bytes() - sent
    return {
        "peak": max(everyone(peak, world)),
        "sent": max(everyone(sent, world)) / 3,
        "state": max(
            everyone(contender.state_bytes() if hasattr(contender, "state_bytes") else 0, world)
        ),
        "losses": [sum(step) / world for step in zip(*everyone(losses, world), strict=True)],
    }


def main() -> None:
    spec = json.loads(sys.argv[1])
    sys.path.insert(0, str(ROOT))
    import torch
    import torch.distributed as dist

    from tests.benchmarks import adapters, contenders, optimizers

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", init_method=f"file://{spec['dir']}/store", rank=rank, world_size=world
    )
    name, size = spec["name"], spec["size"]
    make = contenders.model_fn(size)
    batches = [contenders.batch_of(size, rank, i) for i in range(spec["warmup"] + spec["steps"])]

    def build() -> Any:
        if ":" in name:
            return optimizers.build(name, make)
        if name in contenders.PEERS:
            return contenders.PEERS[name](make, world)
        return adapters.ADAPTERS[name](make, contenders.ADAMW["lr"], world, "fused")

    def warm() -> None:
        """What every contender will load and allocate anyway."""
        model = make()
        model(*batches[0]).backward()
        torch.optim.AdamW([torch.zeros(1, requires_grad=True)], **contenders.ADAMW).step()

    if spec["mode"] == "errors":
        out = optimizers.errors(name, size, rank)
    elif spec["mode"] == "time":
        out = measure_time(build, batches, spec, world)
    else:
        out = measure_size(build, batches, warm, world)
    if rank == 0:
        Path(spec["dir"], "out.json").write_text(json.dumps(out))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
