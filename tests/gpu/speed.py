"""Part B: steps beside torch's, in milliseconds and gigabytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

import functorch_zero as fz
from functorch_zero import optim
from tests.benchmarks.simulated import SimulatedGroup, Wire
from tests.gpu.collectives import SentToItself
from tests.gpu.measure import (
    FEW,
    MANY,
    Steps,
    cuda_calls,
    forget_peaks,
    looked_at_ms,
    noting_waits,
    of_update,
    profiled,
    rounded,
    times,
    warm_up,
)
from tests.gpu.model import (
    BF16,
    Run,
    ours,
    size_of,
    start_fake_ranks,
    start_one_rank,
)
from tests.gpu.peers import fully_sharded, plain
from tests.gpu.report import CUDA, Report

Found = dict[str, Any]
RANKS = 8
GB = 1e9
# Bytes per second; None: no wire. In this order, since the stage may run out of time.
RATES = (None, 100 * GB, 400 * GB, 50 * GB, 200 * GB)
LATENCY = 20e-6  # seconds per collective


# ---- Rank 0 of 8 over a wire ----


def overlap(report: Report) -> None:
    """A step of 8 simulated ranks by the rate of the wire, ours beside `fully_shard`'s."""
    start_fake_ranks(RANKS)
    without: dict[str, Found] = {}
    for rate in (None, 1 * GB) if report.tiny else RATES:
        name = "no wire" if rate is None else f"{rate / GB:.0f} GB/s"
        found: dict[str, Found] = {}
        for kind in KINDS:
            with report.failing(f"{name}: {kind}"):
                found[kind] = timed(report, kind, rate, name)
        with report.failing(f"{name}: beside fully_shard"):
            beside_fully_shard(report, name, found)
        if rate is None:
            without = found
            continue
        with report.failing(f"{name}: added by the wire"):
            added_by_wire(report, name, found, without)
    dist.destroy_process_group()


# Options of `shard`; None: `fully_shard`
KINDS: dict[str, dict[str, Any] | None] = {
    "fully_shard": None,
    "level 3, time": {"level": 3, "overlap": "time"},
    "level 3, memory": {"level": 3, "overlap": "memory"},
    "level 3, kept": {"level": 3, "overlap": "time", "reshard_after_forward": False},
    "level 1": {"level": 1, "overlap": "time"},
}
BEST = "level 3, time"  # which the bounds are for


def timed(report: Report, kind: str, rate: float | None, name: str) -> Found:
    options, size = KINDS[kind], size_of(tiny=report.tiny)
    wire = Wire(rate, 0.0 if rate is None else LATENCY)
    forget_peaks()
    if options is None:
        run = fully_sharded(size, ranks=RANKS, wire=wire)
    else:
        group = SimulatedGroup(RANKS, wire=wire)
        run = ours(size, group=group, precision=BF16, **options)
    count = sum(FEW)
    warm_up(run, count)
    wire.reset()
    found: Found = times(run, FEW)
    found["wire ms"] = 1e3 * wire.busy_seconds / count
    # fully_shard waits by itself, so that its exposed time shows in its steps alone
    if options is not None:
        found["exposed ms"] = 1e3 * wire.exposed_seconds / count
    report.measured(f"{name}: {kind}", rounded(found))
    return found


def measured_of(kind: str, found: dict[str, Found]) -> Found:
    """The numbers of a kind, unless its run has failed."""
    if kind not in found:
        raise LookupError(
            f"no numbers of {kind}, whose own line says why; there are those of "
            f"{', '.join(found) or 'none'}"
        )
    return found[kind]


def beside_fully_shard(report: Report, name: str, found: dict[str, Found]) -> None:
    """The bounds that the library sets itself for level 3."""
    mine, theirs = measured_of(BEST, found), measured_of("fully_shard", found)
    for what, bound in (("step ms", 0.98), ("peak GiB", 0.95), ("host ms", 0.5)):
        if what in theirs:
            ratio = mine[what] / theirs[what]
            wanted = f"at most {bound} of fully_shard's"
            report.check_on_cuda(f"{name}: {what}", round(ratio, 3), ratio <= bound, wanted)
        else:
            report.needs(f"{name}: {what}")


def added_by_wire(
    report: Report, name: str, found: dict[str, Found], without: dict[str, Found]
) -> None:
    """The milliseconds of communication that a step does not hide: by how much the wire makes it
    longer."""
    mine, theirs = (
        measured_of(kind, found)["step ms"] - measured_of(kind, without)["step ms"]
        for kind in (BEST, "fully_shard")
    )
    wanted = f"at most fully_shard's {theirs:.2f}"
    report.check_on_cuda(f"{name}: ms added by the wire", round(mine, 2), mine <= theirs, wanted)


# ---- One rank ----


def bench(report: Report) -> None:
    """One rank beside plain torch and `fully_shard`: eager and compiled, in bfloat16. Its
    collectives are copies, or go to itself over NCCL."""
    start_one_rank()
    # Eager first, since the stage may run out of time
    for compiled in (False, True) if CUDA else (False,):
        for size in ("tiny",) if report.tiny else ("small", "large"):
            how = f"{size}, {'compiled' if compiled else 'eager'}"
            bench_one(report, size, how, compiled=compiled)
    dist.destroy_process_group()


def bench_one(report: Report, size: str, how: str, *, compiled: bool) -> None:
    group = fz.ProcessGroup()
    # bfloat16 by autocast, as plain torch has it; at level 3 by a policy, as fully_shard has it
    makers: dict[str, Callable[[], Run]] = {
        "plain": lambda: plain(size, autocast=True, compiled=compiled),
        "level 0": lambda: ours(size, level=0, group=group, autocast=True, compiled=compiled),
        "level 1": lambda: ours(size, level=1, group=group, autocast=True, compiled=compiled),
        "level 2": lambda: ours(size, level=2, group=group, autocast=True, compiled=compiled),
        "level 3": lambda: ours(size, level=3, group=group, precision=BF16, compiled=compiled),
        "level 3, sent to itself": lambda: ours(
            size, level=3, group=SentToItself(), precision=BF16, compiled=compiled
        ),
        "fully_shard": lambda: fully_sharded(size, ranks=1, compiled=compiled),
    }
    found: dict[str, Found] = {}
    for kind, make in makers.items():
        with report.failing(f"{how}: {kind}"):
            found[kind] = one_of_bench(
                report, f"{how}: {kind}", make, MANY if size == "small" else FEW
            )
    with report.failing(f"{how}: beside the others"):
        beside_peers(report, how, found)


def one_of_bench(report: Report, name: str, make: Callable[[], Run], steps: Steps) -> Found:
    forget_peaks()
    run = make()
    count = sum(steps) + 1  # the last one is profiled
    number = warm_up(run, count)
    found: Found = times(run, steps)
    calls = cuda_calls(profiled(run))
    # With the library's slow questions, which come in its first steps and now and then
    found["looked at ms"] = looked_at_ms(run, number + count)
    report.measured(name, rounded(found) | {"calls": calls})
    return found


def beside_peers(report: Report, how: str, found: dict[str, Found]) -> None:
    """The bounds that the library sets itself for one rank."""
    for kind, peer, what, bound in (
        ("level 0", "plain", "step ms", 1.02),
        ("level 1", "plain", "step ms", 1.02),
        ("level 2", "plain", "step ms", 1.02),
        ("level 3", "fully_shard", "step ms", 1.03),
        ("level 3", "fully_shard", "host ms", 0.5),
    ):
        ratio = measured_of(kind, found)[what] / measured_of(peer, found)[what]
        wanted = f"at most {bound} of {peer}'s"
        report.check_on_cuda(f"{how}: {kind}, {what}", round(ratio, 3), ratio <= bound, wanted)


# ---- The update alone ----


def optimizers(report: Report) -> None:
    """Updates of one rank's eighth of the params."""
    clip = optim.clip_by_global_norm(1.0)
    makers: dict[str, Callable[[], optim.Transform]] = {
        "adamw": lambda: optim.adamw(1e-4),
        "clipping, adamw": lambda: optim.chain(clip, optim.adamw(1e-4)),
        "lion": lambda: optim.lion(1e-4),
        "lamb": lambda: optim.lamb(1e-3),
        "adafactor": lambda: optim.adafactor(1e-3),
        "muon": lambda: optim.muon(1e-3),
    }
    if CUDA:
        makers["lion, compiled"] = lambda: optim.compiled(optim.lion(1e-4))
    found: dict[str, Found] = {}
    for name, make in makers.items():
        with report.failing(name):
            found[name], waits = update_of(make(), size_of(tiny=report.tiny))
            report.measured(name, rounded(found[name]))
            report.check_on_cuda(f"{name}: waits of the host, by line", waits, not waits, "none")
    with report.failing("clipping beside adamw"):
        clipping, alone = measured_of("clipping, adamw", found), measured_of("adamw", found)
        for what in ("device ms", "host ms"):
            ratio = clipping[what] / max(alone[what], 1e-9)
            wanted = "<= 1.2 of adamw's"
            report.check_on_cuda(f"clipping, {what}", round(ratio, 2), ratio <= 1.2, wanted)


def update_of(optimizer: optim.Transform, size: str) -> tuple[Found, dict[str, int]]:
    """The numbers of an update, and the waits of its step by line."""
    forget_peaks()
    run = ours(size, level=3, group=SimulatedGroup(RANKS), optimizer=optimizer, precision=BF16)
    warm_up(run, 2)  # a step that is looked at may wait
    with noting_waits() as waits:
        run()
    return of_update(profiled(run)), dict(waits)
