"""Part C: saves beside training."""

from __future__ import annotations

import contextlib
import tempfile
import time
from typing import Any

import torch
from torch import Tensor

import functorch_zero as fz
from functorch_zero import checkpoint
from functorch_zero.groups import SingleRank
from tests.gpu.measure import WARM_UP, synchronize, usual_steps
from tests.gpu.model import our_step
from tests.gpu.report import CUDA, Report
from tests.local import local_leaves

STEPS = 4  # that are timed, or between two saves


class Training:
    """A model that trains, and is saved now and then."""

    def __init__(self, size: str, folder: str, **options: Any) -> None:
        step, params, self.ids = our_step(size)
        self.step = fz.shard(step, level=3, group=SingleRank(), **options)
        self.state = self.step.init(params)
        self.folder = folder

    def steps(self, count: int) -> float:
        """Seconds per step."""
        synchronize()
        start = time.perf_counter()
        for _ in range(count):
            self.state, _ = self.step(self.state, self.ids)
        synchronize()
        return (time.perf_counter() - start) / count

    def copies(self) -> list[Tensor]:
        return [leaf.detach().clone() for leaf in local_leaves(self.state)]

    def is_restored(self, expected: list[Tensor], count: int) -> bool:
        """Whether the save of that step has these bits."""
        like = self.step.init(self.step.unshard(self.state).params)
        restored = checkpoint.load(self.folder, self.step, like=like, count=count)
        found = local_leaves(restored.state)
        return all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def saves(report: Report) -> None:
    size = "tiny" if report.tiny else "small, 16 rows"
    pauses(report, size)
    for donate in (True, False):
        on_a_side_stream(report, "tiny", donate=donate)


def pauses(report: Report, size: str) -> None:
    """The time for which `async_save` keeps training waiting, and the speed of the save. The first
    one asks the system for pinned memory, which later ones use again."""
    with tempfile.TemporaryDirectory() as folder:
        training = Training(size, folder)
        for name in ("first", "second"):
            one_pause(report, training, f"{name} async_save", is_bound=name == "second")
    # The next update waits for the copies, where backward is shorter than they
    if not report.tiny:
        with tempfile.TemporaryDirectory() as folder:
            one_pause(report, Training("small", folder), "with 4 rows", is_bound=False)


def one_pause(report: Report, training: Training, name: str, *, is_bound: bool) -> None:
    done = int(training.state.step)
    training.steps(usual_steps(max(done, WARM_UP), STEPS + 1) - done)
    alone = training.steps(STEPS)
    expected, count = training.copies(), int(training.state.step)
    synchronize()
    start = time.perf_counter()
    saving = checkpoint.async_save(training.folder, training.step, training.state)
    called = time.perf_counter() - start
    training.steps(1)
    pause = time.perf_counter() - start - alone
    saving.result()
    took = time.perf_counter() - start
    num_gb = saving.progress.total / 1e9
    found = {"pause s": pause, "call s": called, "step s": alone}
    if is_bound:
        report.check_on_cuda(name, found, pause < 0.1 * alone, "a pause < 10% of a step")
    else:
        report.measured(name, found)
    report.measured(f"{name}: GB saved, GB per second", [num_gb, num_gb / took])
    ok = training.is_restored(expected, count)
    report.check(f"{name}: restored", "equal" if ok else "differs", ok, "equal to the bit")


def on_a_side_stream(report: Report, size: str, *, donate: bool) -> None:
    """A training loop on a stream of its own; the save's thread begins on another one."""
    stream = torch.cuda.stream(torch.cuda.Stream()) if CUDA else contextlib.nullcontext()
    with tempfile.TemporaryDirectory() as folder, stream:
        training = Training(size, folder, donate=donate)
        training.steps(STEPS)
        for _ in range(STEPS):  # many in the queue, and no wait before the save
            training.state, _ = training.step(training.state, training.ids)
        expected, count = training.copies(), int(training.state.step)
        saving = checkpoint.async_save(folder, training.step, training.state)
        training.steps(STEPS)
        saving.result()
        ok = training.is_restored(expected, count)
        found, name = "equal" if ok else "differs", f"from a side stream, donate={donate}"
        report.check_result(name, found, ok, "equal to the bit")
