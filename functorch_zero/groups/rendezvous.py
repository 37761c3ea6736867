"""Ranks that a launcher has started meet at a store, and become the world of torch.distributed.

torch waits for ranks that don't come for half an hour, also for those that have failed on their
way. So the ranks first say at the store that they are there, or what is wrong.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import warnings
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..errors import GroupError
from .addresses import address_of, is_loopback, way_to
from .deadline import Overdue, within
from .launchers import BY_NAME, LOOPBACK, SLURM, Task, this_task

# For all ranks to come. Kubernetes and scripts start them one by one, the others all at once.
_SECONDS_TO_MEET, _SECONDS_BY_NAME = 300.0, 1800.0
_SECONDS_TO_HEAR = 10.0  # for the others to hear of a failure, before rank 0 and its store go
_ALL_HERE = "all here"
_IN_A_STEP = "pass SLURM_JOB_ID, SLURM_STEP_ID and SLURM_STEP_NODELIST on to the ranks, or "


def join_launched_world() -> None:
    """Initialise torch.distributed if a launcher has started this process, and it isn't yet."""
    if not dist.is_initialized() and (task := this_task()) is not None:
        join_world(task, None)


def join_world(task: Task, backend: str | None) -> None:
    """Initialise torch.distributed with the other ranks of this task's job, until the script ends.

    Raises:
        GroupError: where rank 0 is isn't known; its store can't be opened or reached; not all ranks
            came; or gloo would listen on a host where other hosts can't reach it. The last is
            raised on all ranks.
    """
    seconds = _SECONDS_BY_NAME if task.launcher == BY_NAME else _SECONDS_TO_MEET
    store = _store_of(task, seconds)
    # Each call may wait for good, if the machine that serves the store is lost
    try:
        come = partial(_come, store, task, seconds)
        within(seconds + 2 * _SECONDS_TO_HEAR, "meet ranks", come)
        init(backend, store, task)
        within(seconds, "wait for connections", partial(wait_for_all, store, task))
    except Overdue as error:
        raise GroupError(
            f"rank {task.rank} of {task.size} has lost the store at {task.host}:{task.port}, where "
            f"the ranks meet: {error}. Remedy: look for rank 0's process, or torchrun's agent"
        ) from None
    atexit.register(_leave_world, os.getpid())


def _leave_world(pid: int) -> None:
    """At the script's end: torch's threads may abort a process that ends without it."""
    # Not in a fork, which lacks these threads. And not after an exception: it could wait for
    # collectives that no rank will call.
    if os.getpid() == pid and dist.is_initialized() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()


def init(backend: str | None, store: Any, task: Task) -> None:
    """Initialise torch.distributed; with NCCL, the task's number on this machine is the current
    device's."""
    if backend is None:
        nccl = torch.cuda.is_available() and dist.is_nccl_available()
        # A GPU for each rank of this machine, or gloo alone
        enough = nccl and torch.cuda.device_count() >= task.local_size
        backend = "cpu:gloo,cuda:nccl" if enough else "gloo"
    # Before the group is made, since NCCL takes the current device
    if "nccl" in backend:
        torch.cuda.set_device(task.local_rank)
    dist.init_process_group(backend, store=store, rank=task.rank, world_size=task.size)


def wait_for_all(store: Any, task: Task) -> None:
    """Return when all ranks have connected; on rank 0, when they know it."""
    if store.add("connected/count", 1) == task.size:
        store.set("connected/all", "")
    store.wait(["connected/all"])
    _keep_rank_0(store, "connected/know", task)


def _keep_rank_0(store: Any, name: str, task: Task, *limit: timedelta) -> None:
    """On rank 0, which may serve the store and end at once, return when all ranks have come
    here."""
    if store.add(f"{name}/count", 1) == task.size:
        store.set(f"{name}/all", "")
    if task.rank == 0:
        store.wait([f"{name}/all"], *limit)


def _store_of(task: Task, seconds: float) -> Any:
    """The store where the ranks of this job meet. Rank 0 serves it, or torchrun's agent."""
    if task.host is None or task.port is None:
        raise GroupError(
            f"by {task.launcher} there are {task.size} ranks ({task.said}), and they don't know "
            f"where to meet. Remedy: {_IN_A_STEP if task.launcher == SLURM else ''}set MASTER_ADDR "
            f"to the host of rank 0 ({LOOPBACK} on one machine) and MASTER_PORT to a free port "
            "there, the same for all ranks"
        )
    _check_resolves(task)
    serves = task.rank == 0 and not _agent_serves()
    options: dict[str, Any] = {"timeout": timedelta(seconds=seconds)}
    host, port = task.host, task.port
    try:
        # By itself torch would listen to the whole network. But MASTER_ADDR may be loopback on rank
        # 0's machine alone.
        if serves and host == LOOPBACK and (task.job or task.size == 1):
            listener = socket.create_server((LOOPBACK, port))
            port = listener.getsockname()[1]
            options["master_listen_fd"] = listener.detach()
        elif serves:
            # As torch does: other stores of this process may be there
            options["multi_tenant"] = True

        def store() -> Any:
            return dist.TCPStore(  # type: ignore[attr-defined]
                host, port, is_master=serves, wait_for_workers=False, **options
            )

        return _part_of_this_attempt(task, within(seconds, "connect to store", store))
    except (OSError, RuntimeError) as error:
        does = "serve" if serves else "reach"
        raise GroupError(
            f"rank {task.rank} of {task.size} could not {does} the store at {host}:{port}, "
            f"where the ranks of {task.launcher} meet: {str(error) or 'no answer'}. "
            "Remedy: if another program has that port, set MASTER_PORT to a free one, the same for "
            "all ranks; if rank 0 is on another host, set MASTER_ADDR to that"
        ) from error


def _check_resolves(task: Task) -> None:
    """torch would try again until the time limit, and say nothing meanwhile."""
    try:
        socket.getaddrinfo(task.host, task.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # the latter of a name that is no host's
        text = (
            f"rank {task.rank} of {task.size} can't resolve {task.host!r}, the host where the "
            f"ranks of {task.launcher} meet: {error}"
        )
        remedy = "set MASTER_ADDR to an address or a name of rank 0's host that resolves here"
        # A pod has a name once it runs, perhaps after this one
        if task.launcher != BY_NAME:
            raise GroupError(f"{text}. Remedy: {remedy}") from None
        warnings.warn(f"{text}. It may get that name yet. Else {remedy}", stacklevel=2)


def _agent_serves() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _part_of_this_attempt(task: Task, store: Any) -> Any:
    """Of a store that outlives the ranks: the part without the addresses of those that torchrun has
    restarted, whose processes have ended.

    torchrun's agent keeps one store for all attempts. Each agent numbers attempts for itself, so
    this helps on one machine only. On several, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 makes torchrun
    use a new store for each attempt.
    """
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))  # 0 at first
    if attempt and task.local_size == task.size and _agent_serves():
        return dist.PrefixStore(f"attempt {attempt}", store)  # type: ignore[attr-defined]
    return store


def _come(store: Any, task: Task, seconds: float) -> None:
    """Return when all ranks of this job have come to the store. Raise on all of them if torch can't
    connect them."""
    # By job: a port that jobs choose by themselves may be another job's
    name = f"functorch_zero/meeting/{task.job}"
    apart = f"{name}/apart"  # there are ranks on another host than rank 0
    local_only = f"{name}/local only"  # why some rank can be reached from its host alone
    outcome = f"{name}/outcome"
    if sys.platform == "linux":
        way, trouble = way_to(task.host), trouble_of_gloo()
        if trouble.everywhere or (way is not None and not way.is_here):
            store.set(apart, "")
        if trouble.why:
            which = "that other hosts reach"
            if way is not None and not is_loopback(way.own):
                which = f"that has the address {way.own}"
            text = (
                f"rank {task.rank} on host {socket.gethostname()} can't be reached by ranks of "
                f"other hosts: {trouble.why}. Remedy: on that host, set GLOO_SOCKET_IFNAME to the "
                f"interface {which}"
            )
            store.compare_set(local_only, "", text)
    num_came = store.add(f"{name}/count", 1)
    # An agent's store has the ranks of an earlier attempt, too
    if num_came > task.size and not _agent_serves():
        raise GroupError(
            f"more than {task.size} ranks meet at {task.host}:{task.port}: another job uses that "
            "port. Remedy: set MASTER_PORT to a free one, the same for all ranks"
        )
    # Of the ranks that say these, the second sees both
    if store.check([apart, local_only]):
        store.compare_set(outcome, "", store.get(local_only).decode())
    elif num_came == task.size:
        store.compare_set(outcome, "", _ALL_HERE)
    try:
        store.wait([outcome], timedelta(seconds=seconds))
    except RuntimeError as error:
        raise GroupError(
            f"not all {task.size} ranks have come to {task.host}:{task.port} within {seconds:g} s; "
            f"this is rank {task.rank} ({task.said}): {error}"
        ) from None
    text = store.get(outcome).decode()
    if text == _ALL_HERE:
        return
    with contextlib.suppress(RuntimeError):  # some may never come
        limit = timedelta(seconds=_SECONDS_TO_HEAR)
        _keep_rank_0(store, f"{name}/heard", task, limit)
    raise GroupError(text)


class Trouble(NamedTuple):
    """Why gloo's ranks on this host can't be reached from others, if so."""

    why: str = ""
    everywhere: bool = False  # nor from this host


def trouble_of_gloo() -> Trouble:
    """Where gloo will listen: at the interface that it is told, or an address of the host's name,
    or loopback."""
    told = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if told:
        there = [name for _, name in socket.if_nameindex()]
        if not set(told.split(",")) <= set(there):
            return Trouble(f"GLOO_SOCKET_IFNAME={told}, and its interfaces are {there}", True)
        return Trouble(f"GLOO_SOCKET_IFNAME={told}") if "lo" in told.split(",") else Trouble()
    host = socket.gethostname()
    address = address_of(host)
    if address is not None and not is_loopback(address):
        return Trouble()
    return Trouble(f"the host's name resolves to {address or 'nothing'}")
