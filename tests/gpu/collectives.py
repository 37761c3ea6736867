"""Part A: `ProcessGroup` on the tensors of a GPU, over NCCL and over gloo."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from functorch_zero.errors import GroupError
from functorch_zero.groups import ProcessGroup, Work, launch
from tests.collectives import CHECKS, check_all
from tests.gpu.measure import synchronize
from tests.gpu.model import start_one_rank
from tests.gpu.report import CUDA, DEVICE, Report

SPIN = 500_000_000  # cycles: about a quarter of a second


def collectives(report: Report) -> None:
    two_ranks_over_gloo(report)
    torch.set_default_device(DEVICE)
    # With gloo for the CPU beside it, and without
    for backend in ("cpu:gloo,cuda:nccl", "nccl") if CUDA else ("gloo",):
        start_one_rank(backend)
        one_rank(report, backend)
        dist.destroy_process_group()
    if not CUDA:
        report.needs("one rank over NCCL")
    torch.set_default_device("cpu")


def two_ranks_over_gloo(report: Report) -> None:
    """Of tensors on a GPU, which go by way of the CPU."""
    name = "two ranks over gloo, staged: collectives"
    with report.failing(name):
        names = launch(_check_all, 2, backend="gloo", timeout=60)[0]
        report.check_result(name, names, names == [c.__name__ for c in CHECKS], "all of them")


def _check_all() -> list[str]:
    torch.set_default_device(DEVICE)
    return check_all(ProcessGroup(timeout=20))


class SentToItself(ProcessGroup):
    """A group of one rank whose collectives go over the backend all the same.

    Attributes:
        launched: the collectives that the backend was given.
    """

    _copies_alone = False

    def __init__(self) -> None:
        self.launched = 0
        super().__init__(timeout=20)

    def _launch(self, kind: str, method: str, tensor: Tensor, *arguments: Any) -> Work:
        self.launched += 1
        return super()._launch(kind, method, tensor, *arguments)


def one_rank(report: Report, backend: str) -> None:
    group = SentToItself()
    all_checks(report, group, backend)
    # Reduce-scatters on a communicator of their own
    group.reduce_apart()
    all_checks(report, group, f"{backend}, reductions apart")
    if CUDA:
        asynchronous(report, group)
    else:
        report.needs("one rank: nothing waits for the device")
    abort_and_rejoin(report, group)


def all_checks(report: Report, group: SentToItself, what: str) -> None:
    for check in CHECKS:
        before = group.launched
        name = f"one rank over {what}: {check.__name__}, collectives of the backend"
        with report.failing(name):
            check(group)
            synchronize()
            num_started = group.launched - before
            report.check(name, num_started, num_started > 0, "some")


def asynchronous(report: Report, group: ProcessGroup) -> None:
    """Neither the start of a collective nor `wait` keeps the host waiting for the device."""
    piece, out = torch.ones(1024), torch.zeros(1024)
    synchronize()
    start = time.perf_counter()
    torch.cuda._sleep(SPIN)
    group.all_gather(out, piece).wait()
    host = time.perf_counter() - start
    synchronize()
    whole = time.perf_counter() - start
    ok = host < whole / 4 and torch.equal(out, piece)
    name = "one rank: nothing waits for the device; the host's seconds, the device's"
    report.check(name, [host, whole], ok, "at most a quarter")


def abort_and_rejoin(report: Report, group: ProcessGroup) -> None:
    start = time.perf_counter()
    group.fail(ValueError("on purpose"))
    try:
        group.all_reduce(torch.ones(4))
        refused = False
    except GroupError:
        refused = True
    group.rejoin()
    x, out = torch.full((4,), 3.0), torch.zeros(4)
    group.all_reduce(x).wait()
    group.reduce_scatter(out, x).wait()
    took = time.perf_counter() - start
    ok = refused and x.tolist() == out.tolist() == [3.0] * 4 and took < 10
    report.check("one rank: fail and rejoin, seconds", took, ok, "an error, then results")
