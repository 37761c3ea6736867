"""Times, memory, launches and waits of training steps."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from functorch_zero.model.untouched import is_looked_at
from tests.gpu.model import Run
from tests.gpu.report import CUDA


class Steps(NamedTuple):
    """How many steps are timed, once a run is warm.

    Attributes:
        in_a_row: whose mean is a step's time.
        apart: that find an idle device each, as does the first in a row: their median is the host's
            time. In a row the host would wait where the device has enough to do.
    """

    in_a_row: int
    apart: int


FEW, MANY = Steps(3, 2), Steps(10, 3)
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


def usual_steps(first: int, count: int) -> int:
    """The number of the first of `count` steps, from `first` on, none of which is looked at.

    A library's step is looked at in the powers of two and some others (`is_looked_at`): then it
    asks slow questions, for which the host waits. Users meet few of them, and a mean over the first
    steps would be one of these.
    """
    starts = itertools.count(first)
    return next(n for n in starts if not any(is_looked_at(n + k) for k in range(count)))


def warm_up(run: Run, count: int) -> int:
    """Run steps until they are as most later ones, in memory of their own: what made the model is
    given back. None of the next `count` is looked at. Returns the number of the first of them."""
    forget_peaks()
    number = usual_steps(WARM_UP, count)
    for _ in range(number):
        run()
    synchronize()
    return number


def times(run: Run, steps: Steps) -> dict[str, float]:
    """Of a run that is warm: milliseconds per step, milliseconds until a call returns (the host's),
    and peaks of memory."""
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    run()
    host = [time.perf_counter() - start]
    for _ in range(steps.in_a_row - 1):
        run()
    synchronize()
    per_step = (time.perf_counter() - start) / steps.in_a_row
    for _ in range(steps.apart):
        called = time.perf_counter()
        run()
        host.append(time.perf_counter() - called)
        synchronize()
    found = {"step ms": 1e3 * per_step, "host ms": 1e3 * statistics.median(host)}
    if CUDA:
        found["peak GiB"] = torch.cuda.max_memory_allocated() / GIB
        found["reserved GiB"] = torch.cuda.max_memory_reserved() / GIB
    return found


def looked_at_ms(run: Run, number: int) -> float:
    """Milliseconds of the next step that is looked at, where `number` is that of the next one."""
    while not is_looked_at(number):
        run()
        number += 1
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    return 1e3 * (time.perf_counter() - start)


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


LAUNCHES = ("cudaLaunch", "cuLaunch")  # the second: Triton's
CALLS = (*LAUNCHES, "cudaMemcpy", "cudaMemset", "cudaStreamWaitEvent")


def cuda_calls(events: Sequence[Any]) -> dict[str, int]:
    """The calls of CUDA by name: launches, copies, waits of streams and of the host."""
    names = Counter(event.name for event in events)
    wanted = {k: n for k, n in names.items() if k.startswith(CALLS) or "Synchronize" in k}
    return dict(sorted(wanted.items()))


def of_update(events: Sequence[Any]) -> dict[str, float]:
    """Of the step's update alone, which the step marks by a range: milliseconds in which the device
    runs its kernels and copies, and milliseconds of the host; launches; operators."""
    named = [e for e in events if e.name == "fz.update"]
    (update,) = (e for e in named if e.device_type.name == "CPU")
    start, end = update.time_range.start, update.time_range.end
    inside = [e for e in events if start <= e.time_range.start and e.time_range.end <= end]
    return {
        "device ms": sum(map(_us_of, _on_device(events, named))) / 1e3,
        "host ms": _us_of(update) / 1e3,
        "launches": sum(event.name.startswith(LAUNCHES) for event in inside),
        "operators": sum(event.name.startswith("aten::") for event in inside),
    }


def _on_device(events: Sequence[Any], named: Sequence[Any]) -> list[Any]:
    """The kernels and copies that were started in a range of the host's.

    The device has the range once per stream, each from the first to the last that was started
    there: that of a stream for collectives may have a single copy.
    """
    spans = [e.time_range for e in named if e.device_type.name == "CUDA"]
    if not spans:
        return []
    start, end = min(span.start for span in spans), max(span.end for span in spans)
    return [
        e
        for e in events
        if e.device_type.name == "CUDA"
        and not e.is_user_annotation
        and start <= e.time_range.start
        and e.time_range.end <= end
    ]


def _us_of(event: Any) -> float:
    return float(event.time_range.elapsed_us())
