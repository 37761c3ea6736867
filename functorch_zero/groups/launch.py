"""Ranks as local processes: starts them, watches them, and brings back their results or errors.

A rank's report comes through a pipe, pickled. Parent and ranks run the same code, so that is no
risk here; ranks never pickle for each other.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import faulthandler
import math
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing

from ..errors import GroupError, PeerError
from .board import publish_end
from .checks import failure_text, ranks_text
from .launchers import LOOPBACK, TORCHRUN, Task, this_task
from .rendezvous import init, join_world, wait_for_all
from .thread_settings import Settings, settings_here
from .torch_distributed import torchs_store

T = TypeVar("T")

_SECONDS_AFTER_FAILURE = 2.0  # for the other ranks to report, once one has failed
_SECONDS_AFTER_INTERRUPT = 30.0  # for the ranks to save and end
_SECONDS_TO_EXIT = 2.0  # for a process to end after it has reported
_INTERFACE = "lo"  # of Linux, for LOOPBACK
_PR_SET_PDEATHSIG = 1  # of Linux's prctl


def launch(
    fn: Callable[..., T],
    ranks: int | None = None,
    *args: Any,
    timeout: float | None = None,
    start_method: Literal["spawn", "fork"] = "spawn",
    backend: str | None = None,
    threads_per_rank: int = 1,
) -> list[T]:
    """Call `fn(*args)` in each of `ranks` new local processes and return the results in rank order.

    Inside, torch.distributed is initialised, so `ProcessGroup()` works. The ranks meet at a
    TCPStore of this process, at a free port of 127.0.0.1.

    In a script that torchrun, srun, mpirun or Kubernetes started, no process is started. fn runs
    here, and the list holds this rank's result. `start_method` and `threads_per_rank` are then the
    launcher's business. `ranks` is torchrun's number; with other launchers it must be theirs, or
    None. Where they have started one process alone, it may start `ranks` local ones. The ranks meet
    at MASTER_ADDR and MASTER_PORT. Under srun, and mpirun on one machine, these need not be set.

    Args:
        fn: the ranks' function.
        ranks: how many processes to start.
        args: for `fn`.
        timeout: seconds for all ranks to end. None: no limit. Apart from it, ranks wait 5 minutes
            for each other at the start (30 where only RANK and WORLD_SIZE tell of them), and a
            `ProcessGroup` 5 minutes for each collective.
        start_method: "spawn" needs fn, args and results that can be pickled and a main module
            guarded by `if __name__ == "__main__"`. "fork" takes lambdas and closures and starts in
            milliseconds. But it is for CPUs only, and safe only as long as the parent has no busy
            threads, nor, before Python 3.13, any that have just ended. Its ranks have the caller's
            context variables, default device, grad mode and inference mode.
        backend: by default gloo. For CUDA tensors it is NCCL when there is a GPU for each rank,
            which is then rank i's current device.
        threads_per_rank: of torch, for operators on a CPU.

    When one rank has failed the others have 2 s to report, then they are killed. At Ctrl-C `fn`
    gets a KeyboardInterrupt in each rank, once, or its own handler of SIGINT is called. The ranks
    have 30 s to save and to end; a second Ctrl-C kills them at once. No process and no file is left
    behind, and on Linux the ranks die with the parent.

    Raises:
        Exception: the first failing rank's, of its own type where it can be pickled, with a note
            that carries its rank and traceback.
        GroupError: a process died (killed, say) without a word. Or a launcher's ranks can't meet:
            all of them raise, and say why.
        TimeoutError: names the ranks that still ran after `timeout` seconds. A launcher's rank
            prints it, with its threads' stacks, and ends with exit code 1.
        KeyboardInterrupt: this process was interrupted, and all ranks have ended.
    """
    task = this_task()
    if task is not None and _takes_part(task, ranks):
        with _time_limit(timeout, task):
            return [_call_here(task, fn, args, backend)]
    if ranks is None or ranks < 1:
        raise ValueError(
            f"ranks must be the number of processes to start, got {ranks}. Remedy: launch(fn, 2)"
        )
    if start_method == "spawn":
        _check_importable(fn)
    _check_loopback(backend)
    with socket.create_server((LOOPBACK, 0)) as listener:  # 0: any free port
        port = listener.getsockname()[1]
        meet = partial(_meet, ranks, port, backend, threads_per_rank)
        # The ranks queue at the listening socket; the store answers once they all have started
        serving = _store_served(listener)
        with _started(ranks, meet, partial(fn, *args), start_method) as members, serving:
            try:
                reports = _watch(members, timeout, _SECONDS_AFTER_FAILURE)
            except KeyboardInterrupt:
                _interrupt(members)
                raise
            # Those that have not reported are killed at once
            _let_exit(members, reports)
    # Several ranks fail when one does: the cause is raised, not a consequence
    failed = [report for report in reports if report.error is not None]
    if failed:
        raise min(failed, key=_steps_from_cause).error  # type: ignore[misc]  # it is not None
    return [report.result for report in sorted(reports, key=lambda report: report.rank)]


def _check_importable(fn: Callable[..., Any]) -> None:
    """Refuse a main module that a new process can't import: a notebook, a prompt, standard
    input."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)  # None: at a prompt, and after python -c
    # A new process runs the main module's file, if it has one, whatever it is to call
    is_gone = file is not None and not os.path.exists(file) and main.__spec__ is None
    if is_gone or (file is None and getattr(fn, "__module__", None) == "__main__"):
        raise TypeError(
            f"launch can't start {getattr(fn, '__qualname__', fn)} in new processes, which can't "
            "import the main module: a notebook, a prompt or standard input. Remedy: "
            'launch(fn, ranks, start_method="fork") (on CPUs), or write it to a file and run that'
        )


def _check_loopback(backend: str | None) -> None:
    """Refuse a host whose loopback has another name than the one that gloo is told."""
    if sys.platform != "linux" or backend == "nccl" or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    names = [name for _, name in socket.if_nameindex()]
    if _INTERFACE not in names:
        raise GroupError(
            f"this host has no network interface for gloo: expected {_INTERFACE}, got {names}. "
            "Remedy: set GLOO_SOCKET_IFNAME to the one that ranks of this host can meet on"
        )


def _takes_part(task: Task, ranks: int | None) -> bool:
    """Whether this process is one of the ranks, and not their parent."""
    # torchrun's number may change with each restart
    if task.launcher == TORCHRUN or ranks in (None, task.size):
        return True
    if task.size == 1:  # nobody beside it would start ranks, too
        return False
    raise ValueError(
        f"launch was given ranks={ranks}, and by {task.launcher} there are {task.size}: "
        f"{task.said}. Remedy: launch(fn) or launch(fn, {task.size}) to be one of those; unset the "
        "variables if they are left over"
    )


def _call_here(task: Task, fn: Callable[..., T], args: tuple[Any, ...], backend: str | None) -> T:
    """Call `fn` in this process, which is a rank already."""
    # The script has set up torch.distributed itself, or an earlier `launch` has
    if not dist.is_initialized():
        if task.launcher == TORCHRUN:
            _die_with_parent(os.getppid())  # else a killed agent would leave this rank training
        join_world(task, backend)
    return fn(*args)


@contextlib.contextmanager
def _time_limit(timeout: float | None, task: Task) -> Iterator[None]:
    """End this process if the block takes longer. The launcher then ends the other ranks, which
    have the same limit."""
    if timeout is None:
        yield
        return

    def end() -> None:
        text = f"rank {task.rank} of {task.size} still ran after timeout={timeout:g} s"
        stderr = 2
        os.write(stderr, f"TimeoutError: {text}\n".encode())
        faulthandler.dump_traceback(stderr)
        os._exit(1)

    # An exception would not reach a rank that waits inside of torch
    timer = threading.Timer(timeout, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class _Member(NamedTuple):
    """One rank's process, and the pipe that brings its report."""

    rank: int
    process: Any  # multiprocessing's, of either start method
    pipe: Connection  # the end to read from


class _Report(NamedTuple):
    """A rank's last word: its result, or its exception with the traceback's text."""

    rank: int
    result: Any = None
    error: BaseException | None = None
    trace: str = ""  # text, as tracebacks can't be pickled
    died: bool = False  # the parent's word, for a rank that left none


@contextlib.contextmanager
def _started(
    ranks: int, meet: Callable[[int], None], task: Callable[[], Any], start_method: str
) -> Iterator[list[_Member]]:
    """The ranks' processes, started from a thread that has done nothing else, and killed at the
    end.

    OpenMP keeps a pool of threads for each thread that has computed with it. A process that is
    forked there waits for the pool, for good, as it has only a copy of the thread that forked.
    """
    members: list[_Member] = []  # in rank order
    started: Future[None] = Future()
    over = threading.Event()
    if start_method == "fork":
        task = partial(_with_settings, settings_here(), task)

    def run() -> None:
        try:
            for rank in range(ranks):
                if not over.is_set():
                    members.append(_start(rank, meet, task, start_method))
            started.set_result(None)
        except BaseException as error:
            started.set_exception(error)
        # The kernel kills the ranks when the thread that started them ends
        over.wait()

    # What else is kept per thread, and spawned ranks don't have
    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(run,), name="launch")
    try:
        thread.start()
        started.result()
        yield members
    finally:
        over.set()
        if thread.ident is not None:  # None: it has not begun
            thread.join()
        _kill(members)


def _with_settings(settings: Settings, task: Callable[[], T]) -> T:
    with settings():
        return task()


def _start(
    rank: int, meet: Callable[[int], None], task: Callable[[], Any], start_method: str
) -> _Member:
    """Start one rank's process, which calls `meet(rank)`, then `task()`, and reports through a
    pipe."""
    context: Any = torch.multiprocessing.get_context(start_method)
    pipe, rank_end = context.Pipe(duplex=False)
    process = context.Process(target=_run_rank, args=(os.getpid(), rank, meet, task, rank_end))
    with rank_end, warnings.catch_warnings():  # a pipe ends when nobody holds its writing end
        # Python warns of a fork beside threads: `launch` says when it is safe
        warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
        try:
            # "spawn" pickles in `start`: that is where a lambda or closure turns up
            process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            if start_method == "fork":
                raise
            raise TypeError(
                f"launch can't pickle its function or arguments for a new process: {error}. "
                "Remedy: define the function at the top of a module, or use "
                'start_method="fork" (on CPUs)'
            ) from error
    return _Member(rank, process, pipe)


@contextlib.contextmanager
def _store_served(listener: socket.socket) -> Iterator[None]:
    """Serve torch's store at a socket to which the ranks connect already.

    The store has a thread. So it starts after the ranks, since a fork beside a busy thread may
    hang. And it ends here, not with the last traceback that holds it: a rank forked later would
    crash when it collects a store whose thread it lacks. By itself torch would listen to the whole
    network.
    """
    host, port = listener.getsockname()
    # It takes over the listening socket, and with it the connections that wait there
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    try:
        yield
    finally:
        del store


def _watch(members: list[_Member], timeout: float | None, after_failure: float) -> list[_Report]:
    """Wait for all ranks, but after a failure for a while only; return reports as they arrived."""
    reports: list[_Report] = []
    failed = False
    running = members  # those that have yet to report
    give_up = math.inf if timeout is None else time.monotonic() + timeout
    while running and (seconds := give_up - time.monotonic()) > 0:
        pipes = [member.pipe for member in running]
        # Until a rank reports or its pipe ends, or the time is over
        ready = wait(pipes, None if seconds == math.inf else seconds)
        new = [_read_report(member) for member in running if member.pipe in ready]
        running = [member for member in running if member.pipe not in ready]
        reports += sorted(new, key=lambda report: not report.died)  # of one moment, deaths first
        # The first failure: the rest get seconds to report, as one of them may be its cause
        if not failed and any(report.error for report in new):
            failed = True
            give_up = min(give_up, time.monotonic() + after_failure)
    if running and not failed:  # the time was over before anyone failed
        names = ranks_text([member.rank for member in running])
        raise TimeoutError(
            f"{names} of {len(members)} still ran after {timeout:g} s; all ranks were killed"
        )
    return reports


def _interrupt(members: list[_Member]) -> None:
    """Interrupt all ranks, and wait a while for them to end. Nobody asks what they report."""
    for member in members:
        if member.process.is_alive():
            os.kill(member.process.pid, signal.SIGINT)
    with contextlib.suppress(TimeoutError):
        reports = _watch(members, _SECONDS_AFTER_INTERRUPT, _SECONDS_AFTER_INTERRUPT)
        _let_exit(members, reports)


def _read_report(member: _Member) -> _Report:
    """The report of a rank that writes one or has ended."""
    try:
        report: _Report = pickle.loads(member.pipe.recv_bytes())
    except (EOFError, OSError):  # there is none, or not all of it
        member.process.join(_SECONDS_TO_EXIT)
        text = _exit_text(member.process.exitcode)
        error = GroupError(f"rank {member.rank} died without a word: {text}")
        return _Report(member.rank, error=error, died=True)
    if report.error is not None:
        # As a note: the type and args stay those that callers may catch
        source = f"rank {member.rank}, in process {member.process.pid}"
        report.error.add_note(f"Raised on {source}:\n{report.trace}")
    return report


def _exit_text(code: int | None) -> str:
    """A process's end in words; negative codes are signals."""
    if code is None or code >= 0:
        return (
            f"exit code {code}. Remedy: look for its output above; with start_method='spawn' the "
            "main module must be importable and guarded by `if __name__ == '__main__'`"
        )
    if code == -signal.SIGABRT:
        return (
            "killed by SIGABRT, as by gloo where ranks' collectives differ. Remedy: "
            "fz.groups.CheckedGroup names the calls"
        )
    return f"killed by {signal.Signals(-code).name}"


def _let_exit(members: list[_Member], reports: list[_Report]) -> None:
    """Give ranks that have reported a while, so that they may flush and close what they hold."""
    give_up = time.monotonic() + _SECONDS_TO_EXIT
    for report in reports:  # the time is shared by all of them
        members[report.rank].process.join(max(0.0, give_up - time.monotonic()))


def _kill(members: list[_Member]) -> None:
    """End all processes, of which most have ended by themselves."""
    # SIGKILL: handlers that a rank may have for other signals don't run inside a collective
    for member in members:
        member.process.kill()
        member.process.join()
        member.process.close()
        member.pipe.close()


def _steps_from_cause(report: _Report) -> int:
    """How far a failed rank is from the cause: 0 is a cause itself, 1 may follow from another's
    death, 2 follows from another's error."""
    # The smallest is raised; of several, the earliest to arrive
    if isinstance(report.error, PeerError):
        return 2
    if isinstance(report.error, GroupError) and not report.died:
        return 1
    return 0


def _run_rank(
    parent: int, rank: int, meet: Callable[[int], None], task: Callable[[], Any], pipe: Connection
) -> None:
    """A rank's process, from its start to its end. `parent` is the launching process's id."""
    _die_with_parent(parent)
    threading.main_thread().name = "MainThread"  # a fork's is a copy of the one that forked it
    own_pid = os.getpid()
    try:
        _heed_interrupts(signal.SIG_DFL)  # there is nothing to save yet
        meet(rank)
        _heed_interrupts(_interrupt_once)
        report = _Report(rank, task())
    except BaseException as error:  # SystemExit too: each has to be reported
        # A child that the task has forked: the rank goes on, and speaks for itself
        if os.getpid() != own_pid:
            raise
        # A GroupError only tells of another rank's failure: the first word in the store stays
        if dist.is_initialized() and not isinstance(error, GroupError):
            publish_end(torchs_store(), failure_text(rank, error))
        report = _Report(rank, error=error, trace=traceback.format_exc())
    if os.getpid() != own_pid:  # such a child, that has returned
        os._exit(0)
    _heed_interrupts(signal.SIG_IGN)
    pipe.send_bytes(_pickled(report))
    pipe.close()
    if report.error is not None:  # end at once, which closes the connections; destroying could wait
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    dist.destroy_process_group()


def _heed_interrupts(handler: Any) -> None:
    """Handle SIGINT so from now on, unless this process ignores it from its start, as shells want
    it of programs in the background."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, handler)


def _interrupt_once(number: int, frame: object) -> None:
    """Raise KeyboardInterrupt, and ignore further ones: a terminal interrupts the ranks, and then
    the parent does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _die_with_parent(parent: int) -> None:
    """From now on, end when the parent ends, however it does (Linux only)."""
    if sys.platform != "linux":
        return
    # The kernel kills this process when the thread that made it ends; `launch` waits in that one
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def _meet(ranks: int, port: int, backend: str | None, threads: int, rank: int) -> None:
    """Initialise torch.distributed in the process of `rank`, at the parent's store."""
    torch.set_num_threads(threads)
    if sys.platform == "linux":
        # Without it gloo takes an address of the host by its name, which may be out of reach
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _INTERFACE)
    store = dist.TCPStore(LOOPBACK, port, is_master=False)  # type: ignore[attr-defined]
    task = Task("launch", "", rank, ranks, rank, ranks)
    init(backend, store, task)
    # gloo connects rank by rank: no rank may end while another still connects.
    wait_for_all(store, task)


def _pickled(report: _Report) -> bytes:
    """The report, with a stand-in for a result or exception that can't travel."""
    error = report.error
    if isinstance(error, (SystemExit, KeyboardInterrupt)):  # it would end the parent
        error = RuntimeError(f"rank {report.rank} ended early: {error!r}")
    try:
        data = pickle.dumps(report._replace(error=error))
        if error is not None:
            pickle.loads(data)  # some exceptions can be written but not read
        return data
    except Exception as problem:
        if error is None:
            error = TypeError(f"the result of rank {report.rank} can't be pickled: {problem}")
        else:
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return pickle.dumps(report._replace(result=None, error=error))
