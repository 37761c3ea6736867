"""Part C: two processes as ranks, with the tensors of a GPU. They train alike, and one of them
fails."""

from __future__ import annotations

import itertools
import json
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.groups import ProcessGroup, launch
from tests.gpu.measure import synchronize
from tests.gpu.report import CUDA, DEVICE, Report

RANKS = 2
LIMIT = 60.0  # seconds for two ranks to start and to end
# Seconds in which a rank must hear of another's failure. Over NCCL its host waits for its device.
SOON = {"gloo": 2.0, "nccl": 8.0}


def backends(report: Report) -> list[str]:
    """The backends over which this machine can run two ranks."""
    # NCCL takes two ranks of one GPU from 2.30 on
    if CUDA and (torch.cuda.device_count() >= RANKS or torch.cuda.nccl.version() >= (2, 30)):
        return ["gloo", "nccl"]
    report.needs("two ranks over NCCL", "two GPUs, or NCCL 2.30")
    return ["gloo"]


def on_ranks(fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Its results on two ranks, whose world is over gloo."""
    return launch(fn, RANKS, *args, timeout=LIMIT, backend="gloo")


def group_over(backend: str) -> ProcessGroup:
    """In such a rank: the group that trains."""
    if CUDA:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    parent = dist.new_group(backend="cpu:gloo,cuda:nccl") if backend == "nccl" else None
    return ProcessGroup(parent, timeout=20)


# ---- A model, and a loss that fails when it is told to ----


@dataclass(frozen=True)
class Fault:
    """How rank 1 fails in its second step."""

    where: str  # "start" of the loss, before a unit is used, its end ("loss"), or "backward"
    killed: bool  # else it raises

    def __str__(self) -> str:
        return f"{'killed' if self.killed else 'raises'} in {self.where}"

    def happen(self) -> None:
        if self.killed:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ArithmeticError("on purpose")


RAISED = tuple(Fault(where, killed=False) for where in ("start", "loss", "backward"))
KILLED = Fault("backward", killed=True)


class Failing(torch.autograd.Function):
    """The identity, whose backward has a fault."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: Fault) -> Tensor:
        ctx.fault = fault
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.fault.happen()


class Training:
    """A rank's steps, or those of one process on the whole batch (no group)."""

    def __init__(self, group: Any, level: int, optimizer: optim.Transform | None = None) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 3))
        apply, params, _ = fz.functionalize(model.to(DEVICE))
        whole = torch.randn(8, 6).to(DEVICE)
        self.batch = whole if group is None else whole.chunk(RANKS)[group.rank]
        self.fault: Fault | None = None

        def loss_fn(params: Any, buffers: Any, x: Tensor) -> Tensor:
            if self.fault is not None and self.fault.where == "start":
                self.fault.happen()
            loss = apply(params, buffers, x)[0].square().mean()
            loss.item()  # the host waits for the device, also where that waits for another rank
            if self.fault is not None and self.fault.where == "backward":
                return Failing.apply(loss, self.fault)
            if self.fault is not None:
                self.fault.happen()
            return loss

        step = fz.train_step(loss_fn, optimizer or optim.adamw(1e-2))
        self.step: Any = step if group is None else fz.shard(step, level=level, group=group)
        self.state = self.step.init(params)

    def take(self) -> None:
        self.state, _ = self.step(self.state, self.batch)

    def whole_params(self) -> list[Tensor]:
        params: list[Tensor] = optree.tree_leaves(fz.unshard(self.state.params))
        return [param.detach().clone() for param in params]


def taken(training: Training, steps: int) -> list[Tensor]:
    for _ in range(steps):
        training.take()
    return training.whole_params()


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ---- One of two ranks fails ----


def faults(report: Report) -> None:
    """The other rank hears of it soon, and a step that is tried again goes on as if nothing had
    been."""
    for backend in backends(report):
        with report.failing(f"{backend}: a rank raises"):
            raised(report, backend)
        end = survivor(backend, KILLED)
        name, lost = f"{backend}, {KILLED}", end["error"] == "LostPeerError"
        report.check_result(f"{name}: error", end, lost, "LostPeerError")
        soon = lost and end["seconds"] < SOON[backend]
        report.check_on_cuda(f"{name}: seconds", end.get("seconds"), soon, f"< {SOON[backend]}")


def raised(report: Report, backend: str) -> None:
    first, second = on_ranks(_raise_and_retry, backend)
    for name, end in first.items():
        ends = [end, second[name]]
        good, seconds = all(end["good"] for end in ends), [end["seconds"] for end in ends]
        wanted = "ArithmeticError and PeerError, then the same params"
        report.check_result(f"{backend}, {name}: errors", ends, good, wanted)
        soon = max(seconds) < SOON[backend]
        report.check_on_cuda(f"{backend}, {name}: seconds", seconds, soon, f"< {SOON[backend]}")


def _raise_and_retry(backend: str) -> dict[str, dict[str, Any]]:
    """Each fault at each level in turn, in the same processes."""
    group = group_over(backend)
    ends = {}
    for level, fault in itertools.product((1, 3), RAISED):
        expected = taken(Training(group, level), 3)
        training = Training(group, level)
        training.take()
        guilty = group.rank == 1
        training.fault = fault if guilty else None
        end = how_it_ends(training.take)
        training.fault = None
        repeats = same(taken(training, 2), expected)
        wanted = "ArithmeticError" if guilty else "PeerError"
        good = end["error"] == wanted and repeats
        ends[f"level {level}, {fault}"] = {**end, "same params": repeats, "good": good}
    return ends


def survivor(backend: str, fault: Fault) -> dict[str, Any]:
    """How rank 0 ends when rank 1 is killed."""
    with tempfile.TemporaryDirectory() as folder:
        # It raises, of the rank that was killed
        with suppress(Exception):
            on_ranks(_lose_a_rank, backend, fault, folder)
        file = Path(folder) / "0.json"
        return json.loads(file.read_text()) if file.exists() else {"error": "none reported"}


def _lose_a_rank(backend: str, fault: Fault, folder: str) -> None:
    group = group_over(backend)
    training = Training(group, level=3)
    training.take()
    training.fault = fault if group.rank == 1 else None
    end = how_it_ends(training.take)
    (Path(folder) / f"{group.rank}.json").write_text(json.dumps(end))


def how_it_ends(call: Callable[[], object]) -> dict[str, Any]:
    start = time.monotonic()
    try:
        call()
        synchronize()
        error = ""
    except Exception as caught:
        error = type(caught).__name__
    return {"error": error, "seconds": round(time.monotonic() - start, 3)}


# ---- Two ranks train as one ----


def two_ranks(report: Report) -> None:
    """Two ranks beside one process on the whole batch, and the whole state of optimizers whose
    leaves have owners."""
    for backend in backends(report):
        with report.failing(f"{backend}: params"):
            found = on_ranks(_differences, backend)
            for level in range(4):
                apart = max(by_level[level] for by_level in found)
                name = f"{backend}, level {level}: params, apart"
                report.check_result(name, apart, apart < 1e-5, "< 1e-5")
        # By itself: where devices differ, ranks may wait for each other until the time is over
        name = f"{backend}: devices of a whole optimizer state"
        with report.failing(name):
            first, second = on_ranks(_devices_of_state, backend)
            counts = [Counter(devices) for devices in (first, second)]
            report.check_result(name, counts, first == second, "alike on both ranks")


def _differences(backend: str) -> list[float]:
    """By level, the largest difference of a param after three steps."""
    group = group_over(backend)
    expected = taken(Training(None, 0), 3)
    found = []
    for level in range(4):
        params = taken(Training(group, level), 3)
        apart = [float((a - b).abs().max()) for a, b in zip(expected, params, strict=True)]
        found.append(max(apart))
    return found


def _devices_of_state(backend: str) -> list[str]:
    """Of the leaves of Shampoo's state and SOAP's, made whole."""
    group = group_over(backend)
    devices = []
    for optimizer in (optim.shampoo(1e-3), optim.soap(1e-3)):
        training = Training(group, 3, optimizer)
        training.take()
        whole = training.step.unshard(training.state)
        devices += [x.device.type for x in optree.tree_leaves(whole.opt_state)]
    return devices
