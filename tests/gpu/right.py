"""Part A, by one process: the machine, results beside the unsharded step, the device thread, waits,
races."""

from __future__ import annotations

import itertools
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.groups import CountingGroup, SingleRank
from functorch_zero.testing import SimulatedGroup, Wire
from tests.gpu.measure import cuda_calls, noting_waits, profiled, synchronize, warm_up
from tests.gpu.model import BF16, our_step, ours
from tests.gpu.report import CUDA, DEVICE, Report

LEVELS = (0, 1, 2, 3)


def env(report: Report) -> None:
    """Versions, and whether the simulated wire takes the time that it should."""
    report.measured("python", platform.python_version())
    report.measured("torch", torch.__version__)
    if CUDA:
        report.measured("GPU", f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}")
        report.measured("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    for beside in ("nothing", "products"):
        took = seconds_of_wire(0.02, repeats=5, products=beside == "products")
        # On a CPU the copies and the products run on one core in turn
        ok = abs(took / 0.02 - 1) < 0.05
        name = f"a collective of 20 ms beside {beside}: ms"
        report.check_on_cuda(name, round(1e3 * took, 2), ok, "20 ± 1")


def seconds_of_wire(seconds: float, *, repeats: int, products: bool) -> float:
    """The seconds that a collective of so many takes."""
    group = SimulatedGroup(2, wire=Wire(latency=seconds))
    x, a = torch.zeros(8, device=DEVICE), torch.randn(1024, 1024, device=DEVICE)
    group.all_reduce(x).wait()
    synchronize()
    start = time.perf_counter()
    works = [group.all_reduce(x.clone()) for _ in range(repeats)]
    for _ in range(repeats if products else 0):
        a = torch.mm(a, a).clamp_(-1, 1)
    for work in works:
        work.wait()
    synchronize()
    return (time.perf_counter() - start) / repeats


# ---- Results ----


@dataclass(frozen=True)
class Kind:
    """A way to run the tiny model."""

    bf16: bool
    compiled: bool
    level: int

    def __str__(self) -> str:
        dtype = "bf16" if self.bf16 else "fp32"
        return f"{dtype}{', compiled' if self.compiled else ''}, level {self.level}"

    def train(self, shard: Callable[[Any], Any]) -> tuple[float, list[Tensor]]:
        """The loss of the third step, and copies of what this rank holds of the params then."""
        compile = "blocks.*" if self.compiled else False
        step, params, ids = our_step("tiny", precision=BF16 if self.bf16 else None, compile=compile)
        step = shard(step)
        state = step.init(params)
        for _ in range(3):
            state, metrics = step(state, ids)
        held = [leaf.detach().clone() for leaf in optree.tree_leaves(state.params)]
        return float(metrics["loss"]), held


def smoke(report: Report) -> None:
    """Levels 0 to 3: one rank beside the unsharded step, and four simulated ones, whose collectives
    are late at random, beside the same four without streams or waiting."""
    # Atomic sums would differ between two runs of anything
    torch.use_deterministic_algorithms(True, warn_only=True)
    compiling = (False, True) if CUDA else (False,)
    for bf16, compiled, level in itertools.product((False, True), compiling, LEVELS):
        kind = Kind(bf16, compiled, level)
        one_rank(report, kind)
        simulated_ranks(report, kind, jitter=2e-4 if report.tiny else 2e-3)
    torch.use_deterministic_algorithms(False)


def train_on(kind: Kind, group: Any) -> tuple[float, list[Tensor]]:
    return kind.train(lambda step: fz.shard(step, level=kind.level, group=group))


def one_rank(report: Report, kind: Kind) -> None:
    expected, _ = kind.train(lambda step: step)
    found, _ = train_on(kind, SingleRank())
    bound = 2e-2 if kind.bf16 else 1e-5
    apart = abs(found - expected)
    report.check(f"{kind}: one rank's loss, apart", apart, apart < bound, f"< {bound}")


def simulated_ranks(report: Report, kind: Kind, jitter: float) -> None:
    _, expected = train_on(kind, CountingGroup(4, 1))
    _, found = train_on(kind, SimulatedGroup(4, 1, wire=Wire(latency=1e-4, jitter=jitter)))
    name = f"{kind}: params of a simulated rank"
    if same(expected, found):
        report.check(name, "equal", True, "equal to the bit")
    # Nothing is read, written or freed too early if the numbers differ without a wire as well
    elif same(expected, train_on(kind, CountingGroup(4, 1))[1]):
        report.check(name, "differ", False, "equal to the bit")
    else:
        report.check(name, "not repeatable", False, "the same numbers in two runs")


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ---- The device thread ----


class Residual(nn.Module):
    """Three units, whose derivative is part of a loss."""

    def __init__(self) -> None:
        super().__init__()
        make = lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.blocks = nn.ModuleList(make() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def threads(report: Report) -> None:
    """A loss with an inner backward: the same collectives on the GPU as on the CPU, in the same
    order, also once the GPU's thread has made many autograd nodes."""
    expected = collectives_of_penalty(torch.device("cpu"))
    report.measured("collectives per step", [str(call) for call in expected[-1]])
    for name, num_nodes in (("fresh", 0), ("with 10,000 nodes", 10_000)):
        backward_of_chain(num_nodes)
        found = collectives_of_penalty(DEVICE)
        report.check_on_cuda(
            f"device thread, {name}: collectives",
            [len(calls) for calls in found],
            found == expected,
            f"as on the CPU: {[len(calls) for calls in expected]}",
        )


def collectives_of_penalty(device: torch.device) -> list[list[tuple[str, int]]]:
    """By step, the kind and the size of each collective."""
    torch.manual_seed(0)
    apply, params, _ = fz.functionalize(Residual().to(device), units=nn.Sequential)

    def loss_fn(params: Any, buffers: Any, x: Tensor) -> Tensor:
        first, inner = apply(params, buffers, x)[0], x.clone().requires_grad_()
        output = apply(params, buffers, inner)[0].sum()
        (slope,) = torch.autograd.grad(output, inner, create_graph=True)
        return first.square().mean() + slope.square().mean()

    group = CountingGroup(2)
    step = fz.shard(fz.train_step(loss_fn, optim.adamw(1e-3)), level=3, group=group)
    state, x = step.init(params), torch.randn(4, 16).to(device)
    calls = []
    for _ in range(3):
        group.reset()
        state, _ = step(state, x)
        calls.append([(call.kind, call.num_elements) for call in group.calls])
    return calls


def backward_of_chain(num_nodes: int) -> None:
    """Let the thread that runs backward make nodes: those of a gradient's own graph."""
    x = torch.ones((), device=DEVICE, requires_grad=True)
    y = x
    for _ in range(num_nodes // 4):  # each has a few in its derivative
        y = y * x
    torch.autograd.grad(y, x, create_graph=True)


# ---- Waits ----


def syncs(report: Report) -> None:
    """The lines at which the host waits for the device in a step, and the calls of CUDA."""
    clipped = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3))
    kinds: dict[str, dict[str, Any]] = {
        "level 0": {"level": 0},
        "level 3": {"level": 3},
        "level 3, clipping": {"level": 3, "optimizer": clipped},
        "level 3, overlap time": {"level": 3, "overlap": "time"},
    }
    for name, options in kinds.items():
        run = ours("tiny", group=CountingGroup(2), **options)
        warm_up(run)
        with noting_waits() as found:
            run()
        report.check_on_cuda(f"{name}: waits of the host, by line", dict(found), not found, "none")
        report.measured(f"{name}: calls of CUDA in a step", cuda_calls(profiled(run)))


# ---- Races ----


def races(report: Report) -> None:
    """Steps of simulated ranks under torch's race detector, which the variable
    TORCH_CUDA_SANITIZER turns on before torch is imported. It raises."""
    for level in LEVELS:
        kind = Kind(bf16=False, compiled=False, level=level)
        train_on(kind, SimulatedGroup(4, 1))
        watched = CUDA and "TORCH_CUDA_SANITIZER" in os.environ
        report.check_on_cuda(f"{kind}: races", "none", watched, "none, with the detector on")
    if CUDA:
        found = caught_race()
        report.check("a planted race", found, found.startswith("CUDASanitizer"), "an error")
    else:
        report.needs("a planted race")


def caught_race() -> str:
    """The error for a tensor that two streams write to, and neither waits."""
    x, stream = torch.zeros(1 << 20, device=DEVICE), torch.cuda.Stream()
    try:
        x.add_(1)
        with torch.cuda.stream(stream):
            x.mul_(2)
    except Exception as error:
        return type(error).__name__
    return "no error"
