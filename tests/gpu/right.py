"""Part A, by one process: the machine, results beside the unsharded step, the device thread, waits,
races."""

from __future__ import annotations

import itertools
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.groups import CountingGroup, SingleRank
from tests.benchmarks.simulated import SimulatedGroup, Wire
from tests.gpu.collectives import SentToItself
from tests.gpu.measure import cuda_calls, noting_waits, profiled, synchronize, warm_up
from tests.gpu.model import BF16, Run, our_step, start_one_rank
from tests.gpu.report import CUDA, DEVICE, Report
from tests.local import local_leaves

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
    width = 4096 if CUDA else 256  # the products take less than the wire
    x, a = torch.zeros(8, device=DEVICE), torch.randn(width, width, device=DEVICE)
    took = []
    for _ in range(repeats + 2):
        synchronize()
        start = time.perf_counter()
        work = group.all_reduce(x)
        for _ in range(2 if products else 0):
            a = torch.mm(a, a).clamp_(-1, 1)
        work.wait()
        synchronize()
        took.append(time.perf_counter() - start)
    return statistics.median(took[2:])  # by then the clock has been measured under this load


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
        held = [leaf.detach().clone() for leaf in local_leaves(state.params)]
        return float(metrics["loss"]), held


KINDS = [Kind(bf16, False, level) for bf16, level in itertools.product((False, True), LEVELS)]
if CUDA:  # few, as each takes seconds
    KINDS += [Kind(False, True, 3), Kind(True, True, 0), Kind(True, True, 3)]


def smoke(report: Report) -> None:
    """Levels 0 to 3: one rank beside the unsharded step, and four simulated ones, whose collectives
    are late at random, beside the same four without streams or waiting."""
    # Atomic sums would differ between two runs of anything
    torch.use_deterministic_algorithms(True, warn_only=True)
    for kind in KINDS:
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
        report.check_result(
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
    """The lines at which the host waits for the device in a step, and the calls of CUDA.

    A CPU has neither: there the steps run, which must not raise, and no more is checked.
    """
    clipped = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3))
    runs = {
        "level 0": lambda: step_of_rows(level=0),
        "level 3": lambda: step_of_rows(),
        "level 3, overlap time": lambda: step_of_rows(overlap="time"),
        "level 3, clipping": lambda: step_of_rows(clipped),
        "level 3, weights on the device": lambda: step_of_rows(weighted=True),
        "level 3, accumulation": lambda: step_of_rows(accumulate=2),
        "level 3, buffers": lambda: step_of_rows(model=WithBuffers),
        "level 3, not donated": lambda: step_of_rows(donate=False),
        "level 3, metrics to the host": step_with_metrics_for_the_host,
        "level 3, one rank that sends to itself": lambda: step_of_rows(group=SentToItself()),
        "evaluation": evaluation_of_rows,
        "level 3, a program": program_of_rows,
    }
    start_one_rank()
    for name, make in runs.items():
        run = make()
        warm_up(run, 2)  # a step that is looked at may wait
        with noting_waits() as found:
            run()
        report.check_on_cuda(f"{name}: waits of the host, by line", dict(found), not found, "none")
        report.measured(f"{name}: calls of CUDA", cuda_calls(profiled(run)))
    numbers_on_the_host(report)
    dist.destroy_process_group()


def numbers_on_the_host(report: Report) -> None:
    metrics = step_of_rows()()
    found, read = fz.host(metrics), {name: float(metric) for name, metric in metrics.items()}
    ok = dict(found) == read
    report.check_result("metrics on the host", dict(found), ok, f"as read from the device: {read}")


def step_with_metrics_for_the_host() -> Run:
    """A step whose metrics are on their way to the host when it returns."""
    run = step_of_rows()
    return lambda: fz.host(run())


class WithBuffers(nn.Module):
    """Units with running statistics, and a table that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.residual, self.norm = Residual(), nn.BatchNorm1d(16)
        self.register_buffer("table", torch.linspace(-1, 1, 16).cos())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.residual(self.norm(x * self.table))
        return y


def step_of_rows(
    optimizer: optim.Transform | None = None,
    *,
    level: int = 3,
    weighted: bool = False,
    accumulate: int = 1,
    model: Callable[[], nn.Module] = Residual,
    group: Any = None,
    **options: Any,
) -> Callable[[], Any]:
    """A step of one of two ranks, or of the group's, with a metric. It returns its metrics.

    `options`: of `shard`.
    """
    apply, params, buffers, x = rows(model)

    def loss_fn(params: Any, buffers: Any, x: Tensor) -> Any:
        y, new = apply(params, buffers, x)
        loss = y.square().mean()
        weight = (x > 0).sum() if weighted else None
        return loss, fz.Aux(buffers=new, weight=weight, metrics={"double": 2 * loss.detach()})

    step = fz.train_step(loss_fn, optimizer or optim.adamw(1e-3), accumulate=accumulate)
    sharded = fz.shard(step, level=level, group=group or CountingGroup(2), **options)
    held = [sharded.init(params, buffers)]

    def run() -> Any:
        held[0], metrics = sharded(held[0], x)
        return metrics

    return run


def program_of_rows() -> Run:
    """The same as a program's step."""
    apply, params, _, x = rows()
    optimizer = optim.adamw(1e-3)

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        return apply(params, {}, x)[0].square().mean()

    def program(value: Any, x: Tensor) -> Any:
        params, opt_state = value
        loss, grads = fz.value_and_grad(loss_fn)(params, x)
        return optimizer.apply(grads, opt_state, params), {"loss": loss}

    step = fz.program_step(program, init=lambda params: (params, optimizer.init(params)))
    sharded = fz.shard(step, level=3, group=CountingGroup(2))
    held = [sharded.init(params)]

    def run() -> Any:
        held[0], metrics = sharded(held[0], x)
        return metrics

    return run


def evaluation_of_rows() -> Run:
    """An evaluation step on the state of such a training step."""
    apply, params, buffers, x = rows()
    loss_fn = lambda p, b, x: apply(p, b, x)[0].square().mean()
    step = fz.shard(fz.train_step(loss_fn, optim.adamw(1e-3)), level=3, group=CountingGroup(2))
    state = step.init(params, buffers)
    evaluate = fz.eval_step(lambda p, b, x: {"loss": loss_fn(p, b, x)})
    sharded = fz.shard(evaluate, level=3, group=CountingGroup(2))
    return lambda: sharded(state, x)


def rows(model: Callable[[], nn.Module] = Residual) -> tuple[Any, Any, Any, Tensor]:
    """`apply`, params, buffers and a batch."""
    torch.manual_seed(0)
    apply, params, buffers = fz.functionalize(model().to(DEVICE), units=nn.Sequential)
    return apply, params, buffers, torch.randn(4, 16, device=DEVICE)


# ---- Races ----


def races(report: Report) -> None:
    """Steps of simulated ranks under torch's race detector, which raises.

    It watches streams, which a CPU has not: there the steps run, and no more is checked.
    """
    if CUDA:
        from torch.cuda._sanitizer import enable_cuda_sanitizer

        enable_cuda_sanitizer()
    for level in LEVELS:
        kind = Kind(bf16=False, compiled=False, level=level)
        with report.failing(f"{kind}: races"):
            train_on(kind, SimulatedGroup(4, 1))
            report.check_on_cuda(f"{kind}: races", "none", True, "none")
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
