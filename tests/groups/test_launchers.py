"""Ranks that torchrun, Slurm, MPI or Kubernetes start: what their variables say, and where the
ranks meet. The variables are set by hand, in forks of this process."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from functorch_zero.groups import ProcessGroup, launch, rendezvous
from functorch_zero.groups.addresses import Way, way_to
from functorch_zero.groups.launchers import Task, this_task
from tests.tiers import THOROUGH, thinned, tiers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the ranks are forked")

Environment = dict[str, str]


def slurm(rank: int, size: int = 2, **more: str) -> Environment:
    """In a step of one machine."""
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_NNODES": "1",
        "SLURM_JOB_ID": str(os.getpid()),  # beside other workers' jobs
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "vm",
        **more,
    }


def open_mpi(rank: int, size: int = 2, **more: str) -> Environment:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(size),
        **more,
    }


def mpich(rank: int, size: int = 2, **more: str) -> Environment:
    return {
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(size),
        "MPI_LOCALRANKID": str(rank),
        "MPI_LOCALNRANKS": str(size),
        **more,
    }


def by_name(rank: int, size: int = 2, **more: str) -> Environment:
    """As Kubernetes and Ray set them."""
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", **more}


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def run_as(environment: Environment, fn: Callable[[], Any], pipe: Any) -> None:
    os.environ.update(environment)
    try:
        pipe.send(fn())
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")


def started(fn: Callable[[], Any], *environments: Environment) -> list[Any]:
    """What `fn()` returns, or its error in words, in a process for each environment."""
    context: Any = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in environments]
    processes = [
        context.Process(target=run_as, args=(environment, fn, write))
        for environment, (_, write) in zip(environments, pipes, strict=True)
    ]
    try:
        for process in processes:
            process.start()
        for _, write in pipes:
            write.close()
        return [read.recv() if read.poll(30) else "nothing" for read, _ in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def total() -> tuple[int, int, float]:
    group = ProcessGroup()
    group.all_reduce(sum_ := torch.tensor([group.rank + 1.0])).wait()
    return group.rank, group.size, sum_.item()


BOTH = [(0, 2, 3.0), (1, 2, 3.0)]
LAUNCHERS = {"slurm": slurm, "open mpi": open_mpi, "mpich": mpich, "by name": by_name}


@pytest.mark.parametrize("launcher", thinned(LAUNCHERS))
def test_tasks_are_the_ranks_of_one_job(launcher: str) -> None:
    more = {"MASTER_PORT": free_port()} if launcher == "by name" else {}
    environments = [LAUNCHERS[launcher](rank, **more) for rank in range(2)]
    assert started(lambda: launch(total, 2, timeout=30.0), *environments) == [[b] for b in BOTH]


@pytest.mark.parametrize(
    "launcher", tiers(["mpich"], [name for name in LAUNCHERS if name != "mpich"])
)
def test_a_group_initialises_the_world(launcher: str) -> None:
    more = {"MASTER_PORT": free_port()} if launcher == "by name" else {}
    environments = [LAUNCHERS[launcher](rank, **more) for rank in range(2)]
    assert started(total, *environments) == BOTH


def test_two_launches_in_one_job() -> None:
    def twice() -> list[list[int]]:
        return [launch(dist.get_rank), launch(dist.get_rank)]

    assert started(twice, slurm(0), slurm(1)) == [[[0], [0]], [[1], [1]]]


NO_LAUNCHERS: list[tuple[Environment, int | None, list[int]]] = [
    # Left over, or of a single pod: nobody beside it would start ranks, too
    (by_name(0, 1), 2, [2, 2]),
    (by_name(0, 1, MASTER_ADDR=""), None, [1]),
    ({"RANK": "", "WORLD_SIZE": ""}, 2, [2, 2]),
    ({"RANK": "16"}, 2, [2, 2]),  # a script's own
    ({"WORLD_SIZE": "1"}, 2, [2, 2]),
    (slurm(0, 1), 2, [2, 2]),  # srun --pty bash
    (slurm(0, 1), 1, [1]),
    # salloc's shell, sbatch's script
    ({"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}, 2, [2, 2]),
    ({"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}, 2, [2, 2]),
]


@pytest.mark.parametrize(
    ("environment", "ranks", "expected"),
    [
        *thinned(NO_LAUNCHERS, 5, rows=True),
        # Equal or an error
        (slurm(1, 4), 2, "ValueError: .*ranks=2.*Slurm.*4.*SLURM_STEP_NUM_TASKS=4.*Remedy"),
        (by_name(1, 4), 2, "ValueError: .*ranks=2.*RANK=1 and WORLD_SIZE=4.*left over"),
        (by_name(0, 2, MASTER_ADDR=""), 2, "GroupError.*Remedy: set MASTER_ADDR.*MASTER_PORT"),
        (open_mpi(1, 4, OMPI_COMM_WORLD_LOCAL_SIZE="2"), None, "Open MPI.*set MASTER_ADDR"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, None, "PMI_SIZE=2.*set MASTER_ADDR"),
        (
            {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "7"},
            None,
            "STEP_NUM_TASKS=2.*where to meet.*SLURM_STEP_ID.*set MASTER_ADDR",
        ),
        (slurm(1, MASTER_ADDR="no.invalid"), None, "can't resolve 'no.invalid'.*set MASTER_ADDR"),
        # Each of several would train by itself
        (slurm(1) | by_name(0, 1), None, "one rank, and Slurm has started 2.*unset RANK"),
        ({"WORLD_SIZE": "2"}, 2, "WORLD_SIZE=2 .*RANK is not set"),
        (by_name(2, 2), None, "RANK=2 and WORLD_SIZE=2 contradict"),
        ({"RANK": "a", "WORLD_SIZE": "2"}, None, "RANK must be a whole number, got 'a'"),
    ],
)
def test_ranks_beside_a_launchers_number(
    environment: Environment, ranks: int | None, expected: Any
) -> None:
    def sizes() -> list[int]:
        return launch(dist.get_world_size, ranks, timeout=30.0, start_method="fork")

    (result,) = started(sizes, environment)
    if isinstance(expected, str):
        assert isinstance(result, str)
        with pytest.raises(AssertionError, match=expected):
            raise AssertionError(result)
    else:
        assert result == expected


def read(*environments: Mapping[str, str]) -> Task:
    task = this_task({key: value for each in environments for key, value in each.items()})
    assert task is not None
    return task


def test_where_a_slurm_job_meets() -> None:
    several = {"SLURM_NNODES": "3", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}
    nodes = {"SLURM_STEP_NODELIST": "gpu[03-07,9],cpu1"}
    task = read(slurm(3, 5, SLURM_LOCALID="1"), several, nodes)
    assert (task.rank, task.size, task.local_rank, task.local_size) == (3, 5, 1, 2)
    assert task.host == "gpu03"
    assert read(slurm(0), several, {"SLURM_STEP_NODELIST": "r[1-2]n[3,5],x"}).host == "r1n3"
    # One machine needs no name; others' variables are taken
    assert read(slurm(0)).host == "127.0.0.1"
    named = read(slurm(0), {"MASTER_ADDR": "gpu9", "MASTER_PORT": "29500"})
    assert (named.host, named.port) == ("gpu9", 29500)
    # Each task of srun --gpus-per-task sees its GPUs alone
    alone = read(slurm(1), {"SLURM_GPUS_PER_TASK": "1"})
    assert (alone.local_rank, alone.local_size) == (0, 1)


def test_ports_differ_by_job_and_are_no_outgoing_connections() -> None:
    jobs = [{"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": step} for job in range(50) for step in "01"]
    ports = [read(slurm(0), job).port for job in jobs]
    assert len(set(ports)) > 95 and all(
        port is not None and 20000 <= port < 32000 for port in ports
    )
    assert (
        read(open_mpi(0), {"PMIX_NAMESPACE": "7"}).port
        == read(open_mpi(1, OMPI_COMM_WORLD_LOCAL_SIZE="1"), {"PMIX_NAMESPACE": "7"}).port
    )


def test_the_innermost_launcher_counts() -> None:
    helpers = slurm(0, 1, SLURM_NTASKS="2")  # of mpiexec, as in an sbatch script
    assert read(helpers, mpich(1)).launcher == "MPI"
    assert read(helpers, open_mpi(1)).launcher == "Open MPI"
    assert read(slurm(1), mpich(1)).launcher == "Slurm"  # srun --mpi=pmi2
    torchrun = by_name(3, 8) | {"TORCHELASTIC_RUN_ID": "a"}
    assert read(slurm(0), torchrun).launcher == "torchrun"
    # srun may start several torchruns of one rank
    assert read(slurm(1), by_name(0, 1), {"TORCHELASTIC_RUN_ID": "a"}).size == 1


def test_tasks_of_a_step_without_its_number_are_ranks() -> None:
    """A port tells them apart from another step of the job."""
    unnamed = {"SLURM_STEP_ID": "", "SLURM_STEP_NODELIST": "", "MASTER_PORT": free_port()}
    assert started(total, *(slurm(rank) | unnamed for rank in range(2))) == BOTH


def test_a_pod_that_has_no_name_yet_is_a_warning() -> None:
    with pytest.warns(UserWarning, match="can't resolve 'no.invalid'.*Else set MASTER_ADDR"):
        rendezvous._check_resolves(read(by_name(0, MASTER_ADDR="no.invalid", MASTER_PORT="1")))


@pytest.fixture
def occupied() -> Iterator[str]:
    """A port where a program takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield str(server.getsockname()[1])


def test_an_occupied_port_is_an_error_on_all_ranks(
    occupied: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_SECONDS_TO_MEET", 1.0)
    start = time.monotonic()
    first, second = started(total, *(slurm(rank, MASTER_PORT=occupied) for rank in range(2)))
    assert "could not serve the store" in first and "set MASTER_PORT to a free one" in first
    assert "could not reach the store" in second and "no answer" in second
    assert time.monotonic() - start < 10


def test_a_port_of_another_job_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its store has no ranks of this job. And a rank too many of one name is an error, too."""
    monkeypatch.setattr(rendezvous, "_SECONDS_TO_MEET", 1.0)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (alone,) = started(total, slurm(1, MASTER_PORT=str(store.port)))
    assert "not all 2 ranks have come" in alone and "rank 1 (SLURM_PROCID=1" in alone
    store.add(f"functorch_zero/meeting/Slurm {os.getpid()}.0/count", 1)
    (third,) = started(total, slurm(1, MASTER_PORT=str(store.port)))
    assert "more than 2 ranks meet" in third and "another job uses that port" in third


def test_a_time_limit_holds_under_a_launcher(tmp_path: Path) -> None:
    """The rank says so and ends, though it waits where no exception reaches it."""

    def rank() -> None:
        os.environ.update(slurm(0, 1))
        os.dup2(os.open(tmp_path / "errors", os.O_CREAT | os.O_WRONLY), 2)
        launch(threading.Event().wait, timeout=0.3)

    process = multiprocessing.get_context("fork").Process(target=rank)
    process.start()
    process.join(30)
    process.kill()
    assert process.exitcode == 1
    errors = (tmp_path / "errors").read_text()
    assert "TimeoutError: rank 0 of 1 still ran after timeout=0.3 s" in errors
    assert "in _call_here" in errors


# Hosts that other hosts can't reach


@pytest.mark.parametrize("bad", thinned([0, 1]))  # rank 0 serves the store
@pytest.mark.parametrize(
    ("found", "told", "text"),
    [
        (None, None, "name resolves to nothing"),
        ("127.0.1.1", None, r"name resolves to 127\.0\.1\.1"),
        ("10.77.0.2", "lo", "GLOO_SOCKET_IFNAME=lo"),
        ("10.77.0.2", "eth77", "GLOO_SOCKET_IFNAME=eth77, and its interfaces are"),
    ],
)
def test_a_host_that_others_cannot_reach(
    bad: int, found: str | None, told: str | None, text: str
) -> None:
    def fn() -> Any:
        rank = int(os.environ["RANK"])
        rendezvous.way_to = lambda host: Way("10.77.0.2", is_here=rank == 0)
        rendezvous.address_of = lambda host: found if rank == bad else "10.77.0.9"
        if told is not None and rank == bad:
            os.environ["GLOO_SOCKET_IFNAME"] = told
        return total()

    port = free_port()
    start = time.monotonic()
    said = started(fn, *(by_name(rank, MASTER_PORT=port) for rank in range(2)))
    assert time.monotonic() - start < 10
    for words in said:
        with pytest.raises(AssertionError, match=text):
            raise AssertionError(words)
        assert words.startswith(f"GroupError: rank {bad} on host ")
        assert words.endswith("GLOO_SOCKET_IFNAME to the interface that has the address 10.77.0.2")


def test_one_host_may_be_named_loopback() -> None:
    def fn() -> Any:
        rendezvous.address_of = lambda host: "127.0.1.1"
        return total()

    port = free_port()
    assert started(fn, *(by_name(rank, MASTER_PORT=port) for rank in range(2))) == BOTH


def test_the_way_to_another_host() -> None:
    """A UDP socket tells the address, and sends nothing."""
    way = way_to("192.0.2.77")  # for documentation: nobody has it
    if way is None:
        pytest.skip("this host has no way to other hosts")
    assert not way.is_here
    assert way_to(way.own) == Way(way.own, is_here=True)
    assert way_to("127.0.0.1") == Way("127.0.0.1", is_here=True)


HOSTS = "fzhost0", "fzhost1"  # network namespaces


def enter(host: int) -> None:
    """Move this process to a host of its own: its network, and its name, which nobody knows."""
    libc = ctypes.CDLL(None, use_errno=True)
    name = HOSTS[host].encode()
    with Path(f"/run/netns/{HOSTS[host]}").open() as network:
        done = libc.setns(network.fileno(), 0x40000000)  # CLONE_NEWNET
    done |= libc.unshare(0x04000000) | libc.sethostname(name, len(name))  # CLONE_NEWUTS
    assert not done, os.strerror(ctypes.get_errno())


@pytest.fixture
def two_hosts() -> Iterator[None]:
    """Joined by a cable, at 10.77.0.1 and 10.77.0.2."""
    cable = ["link", "add", "eth0", "netns", HOSTS[0], "type", "veth", "peer", "eth0"]
    lines = [["netns", "add", host] for host in HOSTS] + [[*cable, "netns", HOSTS[1]]]
    for i, host in enumerate(HOSTS):
        lines += [["-n", host, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "eth0"]]
        lines += [["-n", host, "link", "set", device, "up"] for device in ("lo", "eth0")]
    try:
        for line in lines:
            done = subprocess.run(["ip", *line], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"can't make network namespaces: ip {' '.join(line)}: {done.stderr}")
        yield
    except FileNotFoundError as error:
        pytest.skip(f"can't make network namespaces: {error}")
    finally:
        for host in HOSTS:
            with contextlib.suppress(FileNotFoundError):
                subprocess.run(["ip", "netns", "del", host], capture_output=True)


@THOROUGH
@pytest.mark.parametrize("told", ["neither", "rank 0", "rank 1", "both"])
def test_two_hosts_whose_names_resolve_to_nothing(two_hosts: None, told: str) -> None:
    def fn() -> Any:
        rank = int(os.environ["RANK"])
        enter(rank)
        if told in (f"rank {rank}", "both"):
            os.environ["GLOO_SOCKET_IFNAME"] = "eth0"  # the remedy
        return total()

    start = time.monotonic()
    hosts = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500"}
    said = started(fn, by_name(0, **hosts), by_name(1, **hosts))
    assert time.monotonic() - start < 10
    if told == "both":
        assert said == BOTH
        return
    for words in said:
        assert "resolves to nothing" in words and "that has the address 10.77.0." in words
