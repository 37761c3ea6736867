"""torch.distributed for `ProcessGroup`, besides collectives: making and destroying a group, and
torch's store."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .deadline import Overdue, await_ends, started, within
from .store import SECONDS_TO_ANSWER, Store

# The methods of torch groups for 1-D tensors. Newer releases give them public names besides,
# `all_gather_single` and `reduce_scatter_single`.
ALL_GATHER, REDUCE_SCATTER = "_allgather_base", "_reduce_scatter_base"
ALL_TO_ALL = "alltoall_base"

# torch waits for collectives under way, perhaps for their whole time limit; nobody waits so long
_SECONDS_TO_DESTROY = 1.0
_SECONDS_TO_ABORT = 30.0  # for all communicators; an abort that hangs goes on by itself

# torch reads it when it makes a group over NCCL
_ON_NCCL_ERROR = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_SETTING = threading.Lock()  # for that variable, and for this number:
_num_making = 0  # threads that make a group and need it

_DEFAULT_LIMIT = timedelta(minutes=5)  # as `ProcessGroup`'s
_TAG_OF_PROBES = 0x5EAF  # no other message from rank to rank has it


def parent_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    """The torch group that a user means; an error with a remedy when there is none."""
    if group is not None and not isinstance(group, (dist.ProcessGroup, DeviceMesh)):
        raise TypeError(
            "group must be a functorch_zero Group, a torch ProcessGroup or DeviceMesh that this "
            f"rank belongs to, or None for all ranks; got {group!r}. Remedy: to start ranks, "
            "fz.launch(fn, 2); inside them, fz.ProcessGroup()"
        )
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialised in this process. Remedy: start the ranks with "
            "fz.launch(fn, ranks), or start the script by torchrun, srun or mpirun. "
            "fz.groups.SingleRank() is a group of one rank, and fz.testing.run_ranks(fn, ranks) "
            "starts ranks that are threads"
        )
    if group is None:
        return _world_group()
    if isinstance(group, dist.ProcessGroup):
        return group
    if group.ndim != 1:
        raise NotImplementedError(
            f"a DeviceMesh of {group.ndim} dims ({group.mesh_dim_names}) is not one group of "
            "ranks. Remedy: pass one axis, as in mesh['shard'], or, to `shard`, two: "
            "mesh['replicate', 'shard']"
        )
    return group.get_group()


def num_processes() -> int:
    """How many processes have met by torch.distributed; 1 where it isn't initialised."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _world_group() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None  # torch.distributed is initialised
    return world


def part_of(
    parent: dist.ProcessGroup, ranks: Sequence[int], timeout: timedelta = _DEFAULT_LIMIT
) -> dist.ProcessGroup:
    """The torch group of these ranks (numbers of the world), of the parent's backend; each of them
    calls it.

    The parent itself, when it has just these ranks.
    """
    # No new group: each holds sockets and threads
    if list(ranks) == dist.get_process_group_ranks(parent):
        return parent
    return _new_group(list(ranks), timeout, backends_of(parent))


def _new_group(
    ranks: list[int], timeout: timedelta, backends: dict[str, str], **options: Any
) -> dist.ProcessGroup:
    # Only these ranks call it, and not the whole world, as torch wants for a name of its own
    if len(ranks) < dist.get_world_size():
        return _made(timeout, lambda: _named(ranks, _next_name(ranks), timeout, backends))
    # Without the option torch takes the world's backends
    if backends != backends_of(_world_group()):
        options["backend"] = _config_of(backends)
    return _made(timeout, lambda: dist.new_group(ranks, timeout=timeout, **options))


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """The backend for each device type, such as {"cpu": "gloo", "cuda": "nccl"}."""
    # torch writes it as "cpu:gloo,cuda:nccl"
    rows = str(dist.get_backend_config(group)).split(",")
    return {device: backend for device, backend in (row.split(":") for row in rows)}


def own_backends(parent: dist.ProcessGroup) -> dict[str, str]:
    """The backends of a group of our own: the parent's, and gloo for the CPU where it has none.

    Flags, failures and saves go from host to host, and a group for NCCL alone can't carry them.
    """
    backends = backends_of(parent)
    return backends if "cpu" in backends else {"cpu": "gloo"} | backends


def accelerated(backends: dict[str, str]) -> dict[str, str]:
    """Of the backends, those that queue collectives on a device: all but gloo."""
    return {device: backend for device, backend in backends.items() if backend != "gloo"}


def of_device(backends: dict[str, str]) -> dict[str, str]:
    """Of the backends, the one that queues collectives on this machine's accelerator, if any."""
    # torch names NCCL for CUDA on machines without it, too
    return {
        device: name for device, name in accelerated(backends).items() if device == accelerator()
    }


def accelerator() -> str | None:
    """The type of this machine's accelerator; None without one."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def _config_of(backends: dict[str, str]) -> str:
    """As torch writes it: "cpu:gloo,cuda:nccl"."""
    # Where the world was given a device, torch looks for its backend in each group
    if {*backends.values()} == {"gloo"}:
        return "gloo"  # for all devices
    return ",".join(f"{device}:{backend}" for device, backend in backends.items())


def own_group(
    parent: dist.ProcessGroup, timeout: timedelta, backends: dict[str, str]
) -> dist.ProcessGroup:
    """A new torch group of the parent's ranks, in their order; every one of them calls it, and
    nobody else."""
    ranks = dist.get_process_group_ranks(parent)
    # Group ranks must be as in the parent, whatever the order of their world ranks. Older torch
    # lacks the option and sorts every group: there no parent is out of order
    order = {} if ranks == sorted(ranks) else {"sort_ranks": False}
    return _new_group(ranks, timeout, backends, group_desc="functorch_zero", **order)


def named_group(
    parent: dist.ProcessGroup, name: str, timeout: timedelta, backends: dict[str, str]
) -> dist.ProcessGroup:
    """As `own_group`, under a name that the ranks have agreed upon before."""
    ranks = dist.get_process_group_ranks(parent)
    return _made(timeout, lambda: _named(ranks, name, timeout, backends))


def _next_name(ranks: list[int]) -> str:
    """That of the next group of these ranks, a part of the world: all of them count alike how many
    they have made, in torch's store, with which a new world begins anew."""
    number = _default_store().add(f"functorch_zero/parts/{ranks}/{dist.get_rank()}", 1)
    return f"functorch_zero/{ranks}/{number}"


def _named(
    ranks: list[int], name: str, timeout: timedelta, backends: dict[str, str]
) -> dist.ProcessGroup:
    """A group of these ranks, in their order, under a name that all of them give it.

    torch's own names count the groups that a rank has made, or has at the moment. Ranks that fail
    at different moments may count differently, and a name that comes back finds the addresses of
    those who had it before.
    """
    c10d: Any = dist.distributed_c10d
    # By torch's internals: no public function takes a name; see Note [eras] in `membership`
    made: dist.ProcessGroup = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        c10d.Backend(_config_of(backends)),
        _default_store(),
        name,
        timeout=timeout,
        group_desc="functorch_zero",
    )[0]
    # dist.get_rank and the like look here, and so does destroying the group
    c10d._world.pg_group_ranks[made] = {rank: i for i, rank in enumerate(ranks)}
    return made


def _made(timeout: timedelta, make: Callable[[], Any]) -> dist.ProcessGroup:
    """The group that `make` returns. Its ranks meet at torch's store, which may never answer."""
    # torch waits up to three times, and raises by itself where the store answers
    with _process_outlives_errors():
        made = within(3 * timeout.total_seconds() + SECONDS_TO_ANSWER, "make group", make)
    assert isinstance(made, dist.ProcessGroup)  # this rank is one of them
    return made


@contextlib.contextmanager
def _process_outlives_errors() -> Iterator[None]:
    """Inside, a group over NCCL is made so that its watchdog doesn't end the process.

    After an error or its time limit the watchdog then aborts the communicator (2), and no more. The
    user's own setting stays.
    """
    global _num_making
    # No lock is held meanwhile: other ranks may make their groups in another order of threads
    with _SETTING:
        is_ours = _num_making > 0 or _ON_NCCL_ERROR not in os.environ
        if is_ours:
            os.environ[_ON_NCCL_ERROR] = "2"
            _num_making += 1
    try:
        yield
    finally:
        with _SETTING:
            if is_ours:
                _num_making -= 1
                if not _num_making:
                    del os.environ[_ON_NCCL_ERROR]


def destroy(holder: list[dist.ProcessGroup]) -> None:
    """Destroy the groups in `holder`, which must be the last references to them, and empty
    `holder`.

    gloo closes its connections when the last reference goes. Before that it waits for this rank's
    own collectives under way, which may take until the other ranks call them. So it is a thread
    that waits.
    """
    # Time enough when nothing is under way; else the thread goes on by itself
    with contextlib.suppress(Overdue):
        within(_SECONDS_TO_DESTROY, "destroy group", lambda: _destroy_now(holder))


def _destroy_now(holder: list[dist.ProcessGroup]) -> None:
    # By position: a name would be one more reference
    for i in range(len(holder)):
        with contextlib.suppress(Exception):  # ValueError when the user has destroyed all groups
            only_gloo = not accelerated(backends_of(holder[i]))
            # NCCL's destroy waits for kernels that may never end; abort ends them
            abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
            (dist.destroy_process_group if only_gloo or not abort else abort)(holder[i])
    holder.clear()


def abort(holder: list[dist.ProcessGroup]) -> None:
    """End all that the groups in `holder` have under way on a device, and empty `holder`."""
    calls = [partial(_destroy_now, [group]) for group in holder]
    # First, so that a thread has the last reference
    holder.clear()
    # At once: the queue of one communicator may wait for another's
    await_ends([started("abort group", call) for call in calls], _SECONDS_TO_ABORT)


def is_gone(group: dist.ProcessGroup, rank: int) -> bool:
    """Whether gloo's connection to a rank is broken, as when its process has been killed."""
    # gloo tells by refusing messages. This one is never sent, and nothing waits for it.
    try:
        group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], rank, _TAG_OF_PROBES)
    except RuntimeError:
        return True
    return False


def own_store() -> Store:
    """torch's store, over a connection of its own: on torch's, a call would wait while another
    thread of this process makes a torch group, say."""
    return Store(lambda: _default_store().clone())


def torchs_store() -> Store:
    """torch's store, over torch's own connection: for a last word."""
    return Store(_default_store)


def _default_store() -> Any:
    return dist.distributed_c10d._get_default_store()
