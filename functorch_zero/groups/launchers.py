"""This process among those that a launcher has started: torchrun, Kubernetes, Slurm or MPI.

Each of them starts every rank by itself, and tells it its number by environment variables.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from ..errors import GroupError

Default = TypeVar("Default")

LOOPBACK = "127.0.0.1"
TORCHRUN, BY_NAME, SLURM = "torchrun", "RANK and WORLD_SIZE", "Slurm"

# Of each MPI: rank, number of ranks, and both among the ranks of this machine
_MPI = {
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    # MPICH, Intel MPI and others that start processes by Hydra
    "MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}

# Ports for jobs that are given none. Linux takes those of outgoing connections from 32768 on.
_FIRST_PORT, _NUM_PORTS = 20_000, 12_000


@dataclass(frozen=True)
class Task:
    """This process, as the rank that a launcher has made it."""

    launcher: str
    said: str  # the variables: "SLURM_PROCID=0 and SLURM_NTASKS=2"
    rank: int
    size: int
    local_rank: int  # among the ranks of this machine
    local_size: int
    host: str | None = None  # rank 0's, where all ranks meet; None: unknown
    port: int | None = None  # 0: any free one, for a single rank
    job: str = ""  # the same on all ranks of this job, and on no others; "" where nothing tells


def this_task(environ: Mapping[str, str] = os.environ) -> Task | None:
    """This process by its launcher's variables; None where no launcher has started it.

    Launchers start each other: a script under srun may start torchrun. The innermost counts.

    Raises:
        GroupError: the variables contradict each other.
    """
    task = _by_mpi(environ)
    slurm = _by_slurm(environ)
    # mpirun starts its own helpers by srun, and their children have Slurm's numbers of those. Where
    # both agree, srun has started the ranks, and knows where they are.
    if task is None or (slurm and (slurm.rank, slurm.size) == (task.rank, task.size)):
        task = slurm
    named = _by_name(environ)
    # Taken as they are, each of several ranks would train by itself, beside the others
    if task and named and named.launcher == BY_NAME and named.size == 1 < task.size:
        raise GroupError(
            f"{named.said} say that there is one rank, and {task.launcher} has started "
            f"{task.size}: {task.said}. Remedy: unset RANK and WORLD_SIZE, which seem to be left "
            "over"
        )
    innermost = named or task
    return innermost and _with_place(innermost, environ)


def _by_name(environ: Mapping[str, str]) -> Task | None:
    """By torchrun, whose variables Kubernetes, Ray and scripts set, too."""
    launcher = TORCHRUN if "TORCHELASTIC_RUN_ID" in environ else BY_NAME
    # Those who set two variables only have one machine, or one rank on each
    return _task(environ, launcher, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def _by_slurm(environ: Mapping[str, str]) -> Task | None:
    """By srun."""
    # The shell of salloc and the script of sbatch have the job's variables, and no step
    nodes, size_name = environ.get("SLURM_STEP_NODELIST"), "SLURM_STEP_NUM_TASKS"
    if not environ.get(size_name):
        if not nodes and not environ.get("SLURM_STEP_ID"):
            return None
        size_name = "SLURM_NTASKS"  # perhaps the whole job's, of which the step is a part
    task = _task(environ, SLURM, "SLURM_PROCID", size_name, "SLURM_LOCALID")
    if task is None:
        return None
    per_node = _tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE") or str(task.size))
    node = _number(environ, "SLURM_NODEID", 0)
    local_rank, local_size = task.local_rank, per_node[min(node, len(per_node) - 1)]
    if environ.get("SLURM_GPUS_PER_TASK"):
        local_rank, local_size = 0, 1  # among those that see the same GPUs
    num_nodes = environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES")
    # Not SLURM_LAUNCH_NODE_IPADDR: srun may run on a login node
    first = _first_host(nodes or environ.get("SLURM_JOB_NODELIST") or "")
    host = LOOPBACK if num_nodes == "1" else first
    numbers = environ.get("SLURM_JOB_ID"), environ.get("SLURM_STEP_ID")
    # Without both, other steps would meet there, too
    job = f"{SLURM} {numbers[0]}.{numbers[1]}" if all(numbers) else ""
    return replace(task, local_rank=local_rank, local_size=local_size, host=host, job=job)


def _by_mpi(environ: Mapping[str, str]) -> Task | None:
    """By mpirun or mpiexec."""
    for launcher, names in _MPI.items():
        task = _task(environ, launcher, *names)
        if task is None:
            continue
        on_one_machine = environ.get(names[-1]) == str(task.size)  # unset: nobody knows
        # Open MPI names its jobs. On one machine all ranks have one parent, mpirun or its helper.
        job = environ.get("PMIX_NAMESPACE") or (str(os.getppid()) if on_one_machine else "")
        host = LOOPBACK if on_one_machine else None
        return replace(task, host=host, job=job and f"MPI {job}")
    return None


def _with_place(task: Task, environ: Mapping[str, str]) -> Task:
    """The task, with the place where its ranks meet: that of the variables, or else the launcher's
    host, at a port that the job's name gives."""
    # A single rank meets nobody. Under torchrun the agent has a store.
    if task.size == 1 and task.launcher != TORCHRUN:
        return replace(task, host=LOOPBACK, port=0)
    port = _number(environ, "MASTER_PORT", _port_of(task.job) if task.job else None)
    return replace(task, host=environ.get("MASTER_ADDR") or task.host, port=port)


def _port_of(job: str) -> int:
    digest = hashlib.sha256(job.encode()).digest()
    return _FIRST_PORT + int.from_bytes(digest[:8], "big") % _NUM_PORTS


def _task(
    environ: Mapping[str, str],
    launcher: str,
    rank_name: str,
    size_name: str,
    local_rank_name: str,
    local_size_name: str = "",
) -> Task | None:
    """By variables of these names; None without the first two. Where the others are not set, all
    ranks are on this machine."""
    size = _number(environ, size_name, 0)
    if size > 1 and not environ.get(rank_name):
        # Each of several ranks would train by itself
        raise GroupError(
            f"{size_name}={size} says that there are {size} ranks, but {rank_name} is not set. "
            f"Remedy: set {rank_name}, from 0 to {size - 1}, or unset {size_name} where it is left "
            "over"
        )
    # A script's RANK alone may mean anything
    if not size or not environ.get(rank_name):
        return None
    rank = _number(environ, rank_name, 0)
    said = f"{rank_name}={rank} and {size_name}={size}"
    if rank >= size:
        raise GroupError(f"{said} contradict each other: ranks go from 0 to {size - 1}")
    local = _number(environ, local_rank_name, rank), _number(environ, local_size_name, size)
    return Task(launcher, said, rank, size, *local)


def _number(environ: Mapping[str, str], name: str, default: Default) -> int | Default:
    text = environ.get(name)
    if not text:  # an empty variable is none
        return default
    if not text.strip().isdecimal():
        raise GroupError(f"the variable {name} must be a whole number, got {text!r}")
    return int(text)


def _tasks_per_node(text: str) -> list[int]:
    """Slurm's "2(x3),1" -> [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in text.split(","):
        num, _, times = part.rstrip(")").partition("(x")
        counts += [int(num)] * int(times or 1)
    return counts


def _first_host(nodes: str) -> str | None:
    """The first of Slurm's list of machines: "gpu[03-07,9],cpu1" -> "gpu03"."""
    first = re.match(r"(?:[^,[]|\[[^]]*\])*", nodes)
    assert first is not None  # it matches the empty text
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", first[0]) or None
