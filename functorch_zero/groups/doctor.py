"""`python -m functorch_zero doctor --ranks 8`: whether this machine can run that many ranks, what
is missing, and what to do about it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import optree
import torch
import torch.distributed as dist

from ..version import __version__
from .launch import launch
from .process import ProcessGroup
from .protocol import Group
from .rendezvous import trouble_of_gloo
from .threads import run_ranks

Verdict = Literal["ok", "warning", "error"]
Results = dict[str, list[Any]]  # of collectives on one rank, by name

_SECONDS = 120.0  # for all ranks to start, to talk and to end
_SHARED_MEMORY = "/dev/shm"
_LEAST_SHARED = 256 << 20  # bytes; a container's usual 64 MiB is too little for loaders and NCCL
_SPARE_FILES = 256  # open at once, besides the groups': checkpoints, loaders' pipes, libraries


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        verdict: "ok"; "warning": a run may be slow, or fail later; "error": it can't be made.
        found: facts, in words.
        remedy: where the verdict isn't "ok".
    """

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        text = f"{self.verdict:8} {self.name}: {self.found}"
        return f"{text}\n{'':9}Remedy: {self.remedy}" if self.remedy else text


def judged(name: str, found: str, *complaints: tuple[bool, Verdict, str]) -> Finding:
    """What was found, with the first complaint that applies: (applies, verdict, remedy)."""
    for applies, verdict, remedy in complaints:
        if applies:
            return Finding(name, verdict, found, remedy)
    return Finding(name, "ok", found)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `doctor`."""
    parser = commands.add_parser(
        "doctor",
        help="whether this machine can run so many ranks, and what is missing",
        description="Looks at versions, devices, backends, threads, interfaces and shared memory; "
        "then starts local ranks, which try each collective. Exit status: 1 where something is an "
        "error.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("--ranks", type=int, default=2, help="local ranks to start (default: 2)")
    parser.add_argument("--json", action="store_true", help="the findings as JSON")


def run(args: argparse.Namespace) -> int:
    """Look, print what was found, and return the exit status."""
    if args.ranks < 1:
        raise ValueError(f"--ranks must be at least 1, got {args.ranks}")
    findings = examine(args.ranks)
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        print(*findings, sep="\n")
    return int(any(finding.verdict == "error" for finding in findings))


def examine(ranks: int) -> list[Finding]:
    """All findings, for so many local ranks, which are started at the end."""
    return [
        versions(),
        devices(ranks),
        backends(),
        threads(ranks),
        interfaces(),
        shared_memory(),
        *collectives(ranks),
    ]


def versions() -> Finding:
    system = platform.system()
    names = {
        "functorch_zero": __version__,
        "torch": torch.__version__,
        "optree": optree.__version__,
        "Python": platform.python_version(),
        system: platform.release(),
    }
    found = ", ".join(f"{name} {version}" for name, version in names.items())
    remedy = "Linux: the library runs there alone"
    return judged("versions", found, (system != "Linux", "warning", remedy))


def devices(ranks: int) -> Finding:
    names = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    found = f"{_num_cores()} CPU cores, {', '.join(names) or 'no GPU'}, for {ranks} ranks"
    remedy = "as many ranks as GPUs; ranks that share one talk over gloo, by way of the CPU"
    return judged("devices", found, (0 < len(names) < ranks, "warning", remedy))


def backends() -> Finding:
    has_gloo = dist.is_available() and dist.is_gloo_available()
    has_nccl = dist.is_available() and dist.is_nccl_available()
    found = f"{'gloo' if has_gloo else 'no gloo'}, {'nccl' if has_nccl else 'no nccl'}"
    lacks_nccl = torch.cuda.is_available() and not has_nccl
    return judged(
        "backends",
        found,
        (not has_gloo, "error", "a build of torch with gloo, which all ranks agree over"),
        (lacks_nccl, "warning", "a build of torch with NCCL, for its GPUs"),
    )


def threads(ranks: int) -> Finding:
    cores = _num_cores()
    setting = os.environ.get("OMP_NUM_THREADS", "not set")
    each = torch.get_num_threads()  # which the variable decides, as the process starts
    found = f"{each} a process, OMP_NUM_THREADS {setting}, {cores} cores"
    remedy = (
        f"OMP_NUM_THREADS={max(1, cores // ranks)} where a launcher starts {ranks} ranks; "
        "fz.launch gives each one thread"
    )
    return judged("threads", found, (each * ranks > cores and ranks > 1, "warning", remedy))


def interfaces() -> Finding:
    names = [name for _, name in socket.if_nameindex()]
    chosen, trouble = os.environ.get("GLOO_SOCKET_IFNAME", ""), trouble_of_gloo()
    found = f"{', '.join(names)}; {trouble.why or f'GLOO_SOCKET_IFNAME={chosen}'}"
    # Ranks of this machine meet there; other machines' ranks would look on their own
    among_machines = "for ranks on several machines: GLOO_SOCKET_IFNAME, the interface between them"
    return judged(
        "interfaces",
        found,
        (trouble.everywhere, "error", f"GLOO_SOCKET_IFNAME={names[-1]}, or another of these"),
        (bool(trouble.why) and not chosen, "warning", among_machines),
    )


def shared_memory() -> Finding:
    # Without it nothing is free there
    free = shutil.disk_usage(_SHARED_MEMORY).free if os.path.isdir(_SHARED_MEMORY) else 0
    remedy = "more for a DataLoader's workers and NCCL; in a container --shm-size or --ipc=host"
    found = f"{free / 2**20:,.0f} MiB free in {_SHARED_MEMORY}"
    return judged("shared memory", found, (free < _LEAST_SHARED, "warning", remedy))


def collectives(ranks: int) -> list[Finding]:
    """Start the ranks, and try each collective on them; ranks that are threads know the results."""
    kind = "cuda" if ranks <= torch.cuda.device_count() else "cpu"
    name = f"collectives of {ranks} ranks over {'NCCL' if kind == 'cuda' else 'gloo'}"
    began = time.monotonic()
    try:
        by_rank = launch(on_rank, ranks, kind, timeout=_SECONDS)
    except Exception as error:  # whatever stands between ranks
        remedy = "the findings above; docs: Reliability, for what the error says"
        return [Finding(name, "error", f"{type(error).__name__}: {error}", remedy)]
    took = f"{time.monotonic() - began:.1f} s with the start of the processes"
    right = run_ranks(results, ranks)
    wrong = wrong_collectives([found for found, _, _ in by_rank], right)
    if wrong:
        found = f"wrong results of {', '.join(wrong)}"
        return [Finding(name, "error", found, "another release of torch, or of the driver")]
    opened, limit = max((files, limit) for _, files, limit in by_rank)
    found = f"{opened} of a rank, with {ranks} ranks; the limit is {limit}"
    needed = opened + _SPARE_FILES
    remedy = f"ulimit -n {1 << needed.bit_length()}"
    return [
        Finding(name, "ok", f"{', '.join(right[0])}; {took}"),
        judged("open files", found, (limit < needed, "warning", remedy)),
    ]


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def wrong_collectives(by_rank: Sequence[Results], right: Sequence[Results]) -> list[str]:
    """The collectives that have other results than they must have on some rank."""
    pairs = list(zip(by_rank, right, strict=True))
    return [name for name in right[0] if any(ours[name] != its[name] for ours, its in pairs)]


def on_rank(kind: str) -> tuple[Results, int, int]:
    """The collectives' results here, the files that are open, and how many may be."""
    import resource  # of Unix

    device = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else None
    group = ProcessGroup(timeout=30.0)
    try:
        found = results(group, device)
        num_open = len(os.listdir("/proc/self/fd"))
        return found, num_open, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    finally:
        group.close()


def results(group: Group, device: torch.device | None = None) -> Results:
    """Of each collective, of numbers that differ by rank. All ranks call this."""
    own = torch.arange(2.0 * group.size, device=device or "cpu") + 100 * group.rank
    gathered, part, traded = (own.new_zeros(n) for n in (group.size * len(own), 2, len(own)))
    total, most, sent = (own.clone() for _ in range(3))
    runs = [2] * group.size
    group.all_gather(gathered, own).wait()
    group.reduce_scatter(part, own.clone()).wait()
    group.all_reduce(total, "sum").wait()
    group.all_reduce(most, "max").wait()
    group.all_to_all(traded, runs, own, runs).wait()
    group.broadcast(sent, group.size - 1).wait()
    return {
        "all_gather": gathered.tolist(),
        "reduce_scatter": part.tolist(),
        "all_reduce": [*total.tolist(), *most.tolist()],
        "all_to_all": traded.tolist(),
        "broadcast": sent.tolist(),
        "exchange": group.exchange(b"x" * (group.rank + 1)),
    }
