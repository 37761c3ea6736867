"""Times, memory, launches and waits of training steps."""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.gpu.model import Run
from tests.gpu.report import CUDA

GIB = 2**30
WARM_UP = 4  # steps: the order of gathers is known, compiled code is there, the allocator has grown


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def forget_peaks() -> None:
    """Give memory back, and let peaks count from here."""
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def warm_up(run: Run) -> None:
    """Run steps until they are as all later ones, in memory of their own: what made the model is
    given back."""
    forget_peaks()
    for _ in range(WARM_UP):
        run()
    synchronize()


def times(run: Run, repeats: int) -> dict[str, float]:
    """Of a step that is warm: milliseconds of many in a row, milliseconds until the call returns
    (the host's), and peaks of memory."""
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    host = []
    start = time.perf_counter()
    for _ in range(repeats):
        called = time.perf_counter()
        run()
        host.append(time.perf_counter() - called)
    synchronize()
    whole = (time.perf_counter() - start) / repeats
    found = {"step ms": 1e3 * whole, "host ms": 1e3 * statistics.median(host)}
    if CUDA:
        found["peak GiB"] = torch.cuda.max_memory_allocated() / GIB
        found["reserved GiB"] = torch.cuda.max_memory_reserved() / GIB
    return found


def rounded(found: dict[str, Any]) -> dict[str, Any]:
    return {k: round(v, 3) if isinstance(v, float) else v for k, v in found.items()}


# ---- Waits ----


@contextmanager
def noting_waits() -> Iterator[Counter[str]]:
    """Where the host waits for the device meanwhile, by line; empty without CUDA."""
    found: Counter[str] = Counter()
    if not CUDA:
        yield found
        return
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            yield found
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for warning in seen:
        if "synchronizing CUDA operation" in str(warning.message):
            found[f"{Path(warning.filename).name}:{warning.lineno}"] += 1


# ---- Launches ----


def profiled(run: Run) -> Sequence[Any]:
    """The profiler's events of one step."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if CUDA:
        activities.append(ProfilerActivity.CUDA)
    # Without `acc_events` torch 2.11 warns that it keeps the events of one cycle
    with profile(activities=activities, acc_events=True) as found:
        run()
        synchronize()
    events: Sequence[Any] = found.events()
    return events


CALLS = ("cudaLaunch", "cudaMemcpy", "cudaMemset", "cudaStreamWaitEvent")


def cuda_calls(events: Sequence[Any]) -> dict[str, int]:
    """The calls of CUDA by name: launches, copies, waits of streams and of the host."""
    names = Counter(event.name for event in events)
    wanted = {k: n for k, n in names.items() if k.startswith(CALLS) or "Synchronize" in k}
    return dict(sorted(wanted.items()))


def of_update(events: Sequence[Any]) -> dict[str, float]:
    """Of the step's update alone, which the step marks by a range: milliseconds of the device, from
    its first kernel to its last, and of the host; launches; operators."""
    ranges = {e.device_type.name: e for e in events if e.name == "fz.update"}
    update = ranges["CPU"]
    start, end = update.time_range.start, update.time_range.end
    inside = [e for e in events if start <= e.time_range.start and e.time_range.end <= end]
    return {
        "device ms": ranges["CUDA"].time_range.elapsed_us() / 1e3 if CUDA else 0.0,
        "host ms": update.time_range.elapsed_us() / 1e3,
        "launches": sum(event.name.startswith("cudaLaunch") for event in inside),
        "operators": sum(event.name.startswith("aten::") for event in inside),
    }
