"""Starting ranks as processes: results, exceptions, deaths, time limits, and nothing left
behind."""

from __future__ import annotations

import contextlib
import contextvars
import faulthandler
import gc
import importlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from functorch_zero.errors import GroupError, PeerError
from functorch_zero.groups import ProcessGroup, launch
from tests.tiers import THOROUGH, thinned, tiers

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the ranks are forked")


def forked(
    fn: Callable[..., Any], ranks: int, *args: Any, timeout: float = 20.0, **options: Any
) -> list[Any]:
    return launch(fn, ranks, *args, timeout=timeout, start_method="fork", **options)


@pytest.fixture(autouse=True)
def no_temporary_files(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Any:
    folder = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert list(folder.iterdir()) == []


def test_results_come_in_rank_order_and_the_ranks_are_set_up() -> None:
    def fn(a: int, b: str) -> tuple[Any, ...]:
        return dist.get_rank(), dist.get_world_size(), a, b, torch.get_num_threads(), os.getpid()

    results = forked(fn, 3, 1, "b", threads_per_rank=2)
    assert [result[:-1] for result in results] == [(rank, 3, 1, "b", 2) for rank in range(3)]
    assert len({result[-1] for result in results} | {os.getpid()}) == 4


def test_large_results_and_tensors_come_by_value() -> None:
    results = forked(lambda: torch.full((500_000,), float(dist.get_rank())), 2)
    assert [result.sum().item() for result in results] == [0.0, 500_000.0]


def test_backward_works_in_forked_ranks() -> None:
    def fn() -> float:
        x = torch.ones(2, requires_grad=True)
        (x * x).sum().backward()
        return x.grad.sum().item()

    assert fn() == 4.0  # the parent has used autograd before
    assert forked(fn, 2) == [4.0, 4.0]


def test_forked_ranks_compute_in_parallel_after_their_parent_has() -> None:
    """The parent's OpenMP has a pool of threads, which a process that is forked beside it lacks."""

    def fn() -> bool:
        return bool((torch.ones(400, 400) @ torch.ones(400, 400)).eq(400).all())

    def parent() -> None:
        torch.set_num_threads(2)
        assert fn() and forked(fn, 2, threads_per_rank=2) == [True, True]

    # In a process of its own, since the pool stays
    process = multiprocessing.get_context("fork").Process(target=parent)
    process.start()
    process.join(60)
    process.kill()  # if it hangs
    assert process.exitcode == 0


def test_forked_ranks_have_the_callers_settings() -> None:
    variable = contextvars.ContextVar("variable", default=0)

    def fn() -> tuple[bool, str, int]:
        return torch.is_grad_enabled(), torch.empty(0).device.type, variable.get()

    token = variable.set(1)
    with torch.no_grad(), torch.device("meta"):
        assert forked(fn, 2) == [(False, "meta", 1)] * 2
    variable.reset(token)
    assert forked(fn, 2) == [(True, "cpu", 0)] * 2


class OddError(ValueError):
    """Can be pickled, but not read again."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    thinned(
        [
            (ValueError("bad batch"), ValueError, "bad batch"),
            (KeyError("k"), KeyError, "k"),
            (OddError(1, 2), RuntimeError, "OddError: 1 and 2"),
            (SystemExit(0), RuntimeError, r"rank 1 ended early: SystemExit\(0\)"),
            (KeyboardInterrupt(), RuntimeError, "rank 1 ended early"),
        ],
        2,
        rows=True,
    ),
    ids=lambda value: type(value).__name__,
)
def test_an_exception_keeps_its_type_and_brings_its_traceback(
    error: Any, kind: Any, text: str
) -> None:
    def the_culprit() -> None:
        if dist.get_rank() == 1:
            raise error

    with pytest.raises(kind, match=text) as caught:
        forked(the_culprit, 2)
    assert type(caught.value) is kind
    (note,) = caught.value.__notes__
    assert note.startswith("Raised on rank 1, in process ")
    assert "in the_culprit" in note


def test_the_cause_is_preferred_to_what_it_brings_about() -> None:
    def fn() -> None:
        group = ProcessGroup()
        try:
            if group.rank == 2:
                raise ValueError("bad batch")
            group.barrier()
        except ValueError as error:
            group.fail(error)
            time.sleep(0.5)  # the others report first
            raise

    with pytest.raises(ValueError, match="bad batch") as caught:
        forked(fn, 3)
    assert "rank 2" in caught.value.__notes__[0]


def test_peers_errors_are_raised_when_there_is_no_other() -> None:
    def fn() -> None:
        group = ProcessGroup()
        if group.rank == 1:
            group.fail(ValueError("bad batch"))
            return
        group.barrier()

    with pytest.raises(PeerError, match="rank 1 failed: ValueError: bad batch"):
        forked(fn, 2)


def test_a_result_that_cannot_be_pickled() -> None:
    with pytest.raises(TypeError, match="the result of rank 0 can't be pickled"):
        forked(lambda: lambda: None, 1)


@pytest.mark.parametrize(
    ("die", "text", "meanwhile"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "killed by SIGKILL", lambda: time.sleep(60)),
        (lambda: os._exit(0), "exit code 0", dist.barrier),
        (
            lambda: (faulthandler.disable(), os.abort()),
            "killed by SIGABRT.*fz.groups.CheckedGroup",
            dist.barrier,
        ),
    ],
    ids=["kill", "exit", "abort"],
)
def test_a_death_ends_the_others(
    die: Callable[[], None], text: str, meanwhile: Callable[[], None]
) -> None:
    """Those that are busy are killed after 2 s; errors about the lost connection come second."""

    def fn() -> None:
        if dist.get_rank() == 1:
            die()
        meanwhile()

    start = time.monotonic()
    with pytest.raises(GroupError, match=f"rank 1 died without a word: {text}"):
        forked(fn, 3)
    assert time.monotonic() - start < 6


def test_the_time_limit_names_who_still_ran() -> None:
    def fn() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # nobody is asked politely
        time.sleep(60 if dist.get_rank() else 0)

    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"ranks 1, 2 of 3 still ran after 1 s"):
        forked(fn, 3, timeout=1.0)
    assert time.monotonic() - start < 6


def test_ranks_that_will_not_end_after_their_result_are_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = importlib.import_module("functorch_zero.groups.launch")  # the name is a function's
    monkeypatch.setattr(module, "_SECONDS_TO_EXIT", 0.5)

    def fn() -> int:
        import threading

        threading.Thread(target=time.sleep, args=(60,)).start()
        return dist.get_rank()

    assert forked(fn, 2) == [0, 1]


def test_the_ranks_die_with_their_parent(tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("needs prctl")

    def parent() -> None:
        def fn() -> None:
            (tmp_path / f"pid{dist.get_rank()}").write_text(str(os.getpid()))
            dist.barrier()
            if dist.get_rank() == 0:
                os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)

        launch(fn, 2, start_method="fork")

    child = os.fork()
    if child == 0:
        try:
            parent()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    pids = [int(path.read_text()) for path in tmp_path.glob("pid*")]
    assert len(pids) == 2
    give_up = time.monotonic() + 5
    while any(map(alive, pids)) and time.monotonic() < give_up:
        time.sleep(0.02)
    assert not any(map(alive, pids))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_no_file_or_socket_stays_open() -> None:
    """Not even as long as the exceptions are held, which hold the frames that they came through."""

    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    forked(int, 1)  # libuv, below torch's store, opens a pipe for good
    before = open_files()
    forked(int, 2)
    with pytest.raises(ZeroDivisionError) as failed:
        forked(lambda: 1 // 0, 2)
    with pytest.raises(TimeoutError) as late:
        forked(time.sleep, 2, 60, timeout=0.1)
    assert open_files() == before
    del failed, late


def test_garbage_of_an_earlier_launch_does_no_harm() -> None:
    """A rank that inherits a store and collects it would crash: the store's thread isn't there."""
    gc.collect()
    gc.disable()  # until the rank does it
    try:
        with contextlib.suppress(ZeroDivisionError):
            # The exception and the frames that it came through are a cycle
            forked(lambda: 1 // 0, 1)
        assert forked(gc.collect, 1)[0] > 0
    finally:
        gc.enable()


@pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 is no address elsewhere")
def test_the_ranks_store_listens_to_this_machine_alone() -> None:
    def fn() -> tuple[bool, bool]:
        store = dist.distributed_c10d._get_default_store()
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        return answers("127.0.0.1", store.port), answers("127.0.0.2", store.port)

    def answers(host: str, port: int) -> bool:
        try:
            socket.create_connection((host, port)).close()
        except ConnectionRefusedError:
            return False
        return True

    assert forked(fn, 1) == [(True, False)]


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match=r"number of processes.*Remedy"):
        launch(int)
    with pytest.raises(ValueError, match="number of processes"):
        launch(int, 0)
    with pytest.raises(TypeError, match=r"can't pickle.*Remedy.*fork"):
        launch(lambda: None, 1, timeout=30.0)


SCRIPT = """
import torch
from functorch_zero.groups import ProcessGroup, launch

def fn(start):
    group = ProcessGroup()
    group.all_reduce(tensor := torch.tensor([start + group.rank])).wait()
    return group.rank, group.size, tensor.item()

if __name__ == "__main__":
    print(launch(fn, 2, 10))
"""


def test_a_main_module_without_a_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """New processes can't run it again, whatever they are to call."""
    main = types.SimpleNamespace(__file__="<stdin>", __spec__=None)
    monkeypatch.setitem(sys.modules, "__main__", main)
    with pytest.raises(TypeError, match=r'standard input.*start_method="fork"'):
        launch(dist.get_rank, 2, timeout=30.0)


@THOROUGH
def test_a_script_on_standard_input() -> None:
    code = """
import torch.distributed as dist
import functorch_zero as fz
print(fz.launch(lambda: 1, 2, start_method="fork"))
for fn in (fz.launch, dist.get_rank):
    try:
        fz.launch(fn, 2, timeout=30.0)
    except TypeError as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        input=code,
        capture_output=True,
        text=True,
        timeout=60,
    )
    first, *errors = done.stdout.splitlines()
    assert (first, len(errors), done.stderr) == ("[1, 1]", 2, "")
    assert all("standard input" in text and 'start_method="fork"' in text for text in errors)


@pytest.mark.parametrize("ranks", tiers(thorough=[1, 2]))  # each imports torch
def test_spawned_ranks(ranks: int) -> None:
    assert launch(dist.get_rank, ranks, timeout=60.0) == [*range(ranks)]


@THOROUGH
def test_a_script_that_torchrun_started(tmp_path: Path) -> None:
    """Its environment is all that matters of torchrun; the number of ranks is torchrun's, not the
    script's."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks["TORCHELASTIC_RUN_ID"] = "a"  # without it, they may be left over
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **ranks},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[(0, 1, 10)]", "")


STEPS = """
import os, signal, sys, time
import functorch_zero as fz

def fn(folder, ends):
    rank = fz.ProcessGroup().rank
    try:
        open(f"{folder}/ready{rank}", "w").close()
        time.sleep(60)
    except KeyboardInterrupt:
        if not ends:
            time.sleep(60)
        time.sleep(1.0)  # a second signal would come meanwhile
        open(f"{folder}/saved{rank}", "w").close()
        raise

if __name__ == "__main__":
    fz.launch(fn, 2, sys.argv[1], sys.argv[2] == "ends", start_method=sys.argv[3])
"""


def interrupted(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """A script, in a session of its own, that was interrupted as soon as its ranks were ready."""
    script = folder / "script.py"
    script.write_text(STEPS)
    process = subprocess.Popen(
        [sys.executable, str(script), str(folder), *arguments],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    give_up = time.monotonic() + 60
    while len(list(folder.glob("ready*"))) < 2:
        assert time.monotonic() < give_up and process.poll() is None
        time.sleep(0.05)
    return process


@pytest.mark.parametrize(
    ("whom", "start"), tiers(thorough=[("all", "fork"), ("parent", "spawn")], rows=True)
)
def test_an_interrupt_lets_the_ranks_end_by_themselves(
    whom: str, start: str, tmp_path: Path
) -> None:
    """A terminal sends it to all processes, a notebook to the parent alone. Ranks raise it once."""
    process = interrupted(tmp_path, "ends", start)
    try:
        if whom == "all":
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == -signal.SIGINT and "KeyboardInterrupt" in errors
    assert {path.name for path in tmp_path.glob("saved*")} == {"saved0", "saved1"}


@THOROUGH
def test_a_second_interrupt_kills_the_ranks(tmp_path: Path) -> None:
    process = interrupted(tmp_path, "hangs", "fork")
    try:
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(1.0)
        assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=10)
    finally:
        process.kill()
    assert process.returncode == -signal.SIGINT


def test_ranks_that_do_not_end_after_an_interrupt_are_killed(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    module = importlib.import_module("functorch_zero.groups.launch")  # the name is a function's
    monkeypatch.setattr(module, "_SECONDS_AFTER_INTERRUPT", 0.5)
    # A shell's background jobs ignore it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))

    def fn() -> None:
        if dist.get_rank() == 0:
            os.kill(os.getppid(), signal.SIGINT)
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(60)
        time.sleep(60)

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        forked(fn, 2)
    assert time.monotonic() - start < 15


@pytest.mark.parametrize("end", thinned(["ValueError", "SystemExit", "return"]))
def test_a_child_that_a_rank_has_forked_is_no_rank(end: str) -> None:
    """However it leaves the rank's function, the rank itself goes on and reports."""

    def fn() -> float:
        group = ProcessGroup()
        child = os.fork()
        if child == 0:
            if end == "return":
                return -1.0
            try:
                raise SystemExit(3) if end == "SystemExit" else ValueError("the child's")
            except BaseException as error:
                group.fail(error)  # as a step around it does
                raise
        os.waitpid(child, 0)
        group.all_reduce(total := torch.ones(1)).wait()
        return total.item()

    assert forked(fn, 2) == [2.0, 2.0]
