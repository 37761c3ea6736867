"""Starting ranks as local processes, watching them, and bringing back what they return or raise.

A child's result comes through a pipe, pickled by value: this is between a parent and its own children, which run the
parent's code anyway. Ranks never pickle for each other.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ..errors import GroupError, PeerError
from .checks import failure_text, ranks_text
from .torch_group import WORLD_FAILURE_KEY, publish_failure

T = TypeVar("T")

_SECONDS_AFTER_FAILURE = 2.0  # given to the other ranks to report, once one has failed
_SECONDS_TO_EXIT = 2.0  # given to a process to end after it has reported
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

    Inside, torch.distributed is initialised, so `ProcessGroup()` works. The processes find each other by a file,
    without a port. In a script that torchrun started, no process is started: `ranks`, `timeout`,
    `start_method` and `threads_per_rank` are torchrun's business, fn runs here, and the list holds this rank's result.

    backend: by default gloo, and for CUDA tensors NCCL when there is a GPU for each rank, which is then rank i's
    current device. start_method: "spawn" needs fn, args and results that can be pickled and a main module guarded by
    `if __name__ == "__main__"`; "fork" takes lambdas and closures and starts in milliseconds, but is for CPUs only and
    safe only as long as the parent has no busy threads. Interrupts from the keyboard reach the parent alone.

    Raises the first failing rank's exception, of its own type where it can be pickled, with a note that carries its
    rank and traceback; `GroupError` when a process died (killed, say) without a word; `TimeoutError` naming the ranks
    that still ran after `timeout` seconds. When one rank has failed the others have 2 s to report, then they are
    killed. No process and no file is left behind, and on Linux the ranks die with the parent.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return [_call_under_torchrun(fn, args, backend)]
    if ranks is None or ranks < 1:
        raise ValueError(f"ranks must be the number of processes to start, got {ranks}. Remedy: launch(fn, 2)")
    with _meeting_place() as store:
        place = _Place(ranks, store, backend or _default_backend(ranks), threads_per_rank, os.getpid())
        family = _Family(place)
        try:
            family.start(start_method, fn, args)
            family.watch(timeout)
        finally:
            family.end()
    return family.results()


def _call_under_torchrun(fn: Callable[..., T], args: tuple[Any, ...], backend: str | None) -> T:
    if dist.is_initialized():
        return fn(*args)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _die_with_parent(os.getppid())  # an agent that is killed would leave this rank training, and hold up the others
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    _take_device(backend or _default_backend(local_ranks), int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
    dist.init_process_group(backend or _default_backend(local_ranks), **_store_of_this_attempt())
    result = fn(*args)
    dist.destroy_process_group()  # not after an exception: then torchrun ends this process, and destroying could wait
    return result


def _store_of_this_attempt() -> dict[str, Any]:
    """Where ranks that torchrun has restarted meet: not where the attempt before left its addresses.

    torchrun's agent keeps one store for all attempts. Attempts are numbered by each agent for itself, so this helps on
    one machine only; on several, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 makes torchrun use a new store each time.
    """
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    if not attempt or not one_machine or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), ranks, is_master=False)  # type: ignore[attr-defined]
    return {"store": dist.PrefixStore(f"attempt {attempt}", store), "rank": rank, "world_size": ranks}  # type: ignore[attr-defined]


@contextlib.contextmanager
def _meeting_place() -> Iterator[str]:
    """The path of an empty file for a FileStore. On Linux a file without a name, which goes even if we are killed."""
    if sys.platform == "linux":
        descriptor = os.memfd_create("functorch_zero store")
        try:
            yield f"/proc/{os.getpid()}/fd/{descriptor}"
        finally:
            os.close(descriptor)
    else:
        with tempfile.TemporaryDirectory(prefix="functorch_zero_", ignore_cleanup_errors=True) as folder:
            yield str(Path(folder) / "store")


def _default_backend(local_ranks: int) -> str:
    nccl = torch.cuda.is_available() and dist.is_nccl_available() and torch.cuda.device_count() >= local_ranks
    return "cpu:gloo,cuda:nccl" if nccl else "gloo"


def _take_device(backend: str, local_rank: int) -> None:
    if "nccl" in backend:
        torch.cuda.set_device(local_rank)


@dataclass(frozen=True)
class _Place:
    """Where the ranks meet, and how each is set up."""

    ranks: int
    store: str  # path of the FileStore
    backend: str
    threads: int
    parent: int  # process id


class _Report(NamedTuple):
    """What a child says at its end: its result, or what it raised and from where."""

    result: Any
    error: BaseException | None
    trace: str


@dataclass
class _Member:
    """One rank, as its parent sees it."""

    rank: int
    process: BaseProcess
    pipe: Connection
    result: Any = None
    error: BaseException | None = None
    ended: bool = False  # it has reported, or died
    died: bool = False  # it has ended without a report

    def take_report(self) -> None:
        """Read the report; a process that ends without one, or in the midst of it, has died."""
        self.ended = True
        try:
            if not self.pipe.poll():
                raise EOFError
            report: _Report = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.process.join(_SECONDS_TO_EXIT)
            self.died = True
            self.error = GroupError(f"rank {self.rank} died without a word: {_exit_text(self.process.exitcode)}")
            return
        self.result, self.error = report.result, report.error
        if self.error is not None:
            self.error.add_note(f"Raised on rank {self.rank}, in process {self.process.pid}:\n{report.trace}")


class _Family:
    """The processes of one `launch`."""

    def __init__(self, place: _Place) -> None:
        self._place = place
        self._members: list[_Member] = []
        self._failed: list[_Member] = []  # in the order in which it was noticed

    def start(self, start_method: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        context: Any = multiprocessing.get_context(start_method)
        for rank in range(self._place.ranks):
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(
                target=_child, args=(writer, self._place, rank, fn, args), name=f"rank {rank}", daemon=False
            )
            with writer, warnings.catch_warnings():  # our copy of the writer must close, or its end is never noticed
                warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
                self._start_one(process, start_method)
            self._members.append(_Member(rank, process, reader))

    def watch(self, timeout: float | None) -> None:
        """Return when every rank has ended, or a while after the first has failed."""
        give_up = math.inf if timeout is None else time.monotonic() + timeout
        while (running := self._running()) and not self._failed:
            if time.monotonic() >= give_up:
                names = ranks_text([member.rank for member in running])
                raise TimeoutError(
                    f"{names} of {self._place.ranks} still ran after {timeout:g} s; all ranks were killed"
                )
            self._take_reports(running, give_up)
        give_up = time.monotonic() + _SECONDS_AFTER_FAILURE
        while (running := self._running()) and time.monotonic() < give_up:
            self._take_reports(running, give_up)

    def end(self) -> None:
        """Leave no process behind: those that have reported get time to end, the others are killed."""
        give_up = time.monotonic() + _SECONDS_TO_EXIT
        for member in self._members:
            if member.ended:
                member.process.join(max(0.0, give_up - time.monotonic()))
            if member.process.is_alive():
                member.process.kill()
        for member in self._members:
            member.process.join()
            member.process.close()
            member.pipe.close()

    def results(self) -> list[Any]:
        """The results, or the failure that came first of those which another failure does not explain."""
        if not self._failed:
            return [member.result for member in self._members]
        error = min(self._failed, key=_indirectness).error
        self._failed.clear()
        assert error is not None
        try:
            raise error
        finally:
            del error

    def _start_one(self, process: Any, start_method: str) -> None:
        try:
            process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            if start_method == "fork":
                raise
            raise TypeError(
                f"launch can't pickle its function or arguments for a new process: {error}. Remedy: define the "
                'function at the top of a module, or use start_method="fork" (on CPUs)'
            ) from error

    def _running(self) -> list[_Member]:
        return [member for member in self._members if not member.ended]

    def _take_reports(self, running: list[_Member], give_up: float) -> None:
        """Wait until at least one rank reports or dies, and note which of them failed: the dead first."""
        seconds = None if give_up == math.inf else max(0.0, give_up - time.monotonic())
        ready = set(wait([end for m in running for end in (m.pipe, m.process.sentinel)], seconds))
        ended = [member for member in running if ready & {member.pipe, member.process.sentinel}]
        for member in ended:
            member.take_report()
        failed = [member for member in ended if member.error is not None]
        self._failed += sorted(failed, key=lambda member: not member.died)


def _indirectness(member: _Member) -> int:
    """0 for a cause, more for what another rank's failure brings about; sorting keeps the order in time."""
    if isinstance(member.error, PeerError):
        return 2
    return int(isinstance(member.error, GroupError) and not member.died)


def _exit_text(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        gloo = ", as gloo does where ranks' collectives differ. Remedy: fz.CheckedGroup names the calls"
        return f"killed by {name}{gloo if -code == signal.SIGABRT else ''}"
    return (
        f"exit code {code}. Remedy: look for its output above; with start_method='spawn' the main module must be "
        "importable and guarded by `if __name__ == '__main__'`"
    )


def _child(pipe: Connection, place: _Place, rank: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """What runs in the new process."""
    _die_with_parent(place.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _enter(place, rank)
        report = _Report(fn(*args), None, "")
    except BaseException as error:
        if dist.is_initialized() and not isinstance(error, GroupError):
            publish_failure(WORLD_FAILURE_KEY, failure_text(rank, error))
        report = _Report(None, error, traceback.format_exc())
    pipe.send_bytes(_pickled(report, rank))
    pipe.close()
    if report.error is not None:  # leave at once, which closes the connections; destroying groups could wait
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    dist.destroy_process_group()


def _enter(place: _Place, rank: int) -> None:
    torch.set_num_threads(place.threads)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _take_device(place.backend, rank)
    store = dist.FileStore(place.store, place.ranks)  # type: ignore[attr-defined]
    dist.init_process_group(place.backend, store=store, rank=rank, world_size=place.ranks)
    store.set(f"connected/{rank}", "")  # gloo connects rank by rank: one must not end while another still connects
    store.wait([f"connected/{peer}" for peer in range(place.ranks)])


def _die_with_parent(parent: int) -> None:
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def _pickled(report: _Report, rank: int) -> bytes:
    """The report, or one like it that can be pickled."""
    error = report.error
    if isinstance(error, (SystemExit, KeyboardInterrupt)):  # raised again in the parent, it would end the parent
        report = report._replace(error=RuntimeError(f"rank {rank} ended early: {error!r}"))
    try:
        data = pickle.dumps(report)
        if error is not None:
            pickle.loads(data)  # some exceptions can be written but not read
        return data
    except Exception as problem:
        if error is None:
            stand_in: Exception = TypeError(f"the result of rank {rank} can't be pickled: {problem}")
        else:
            stand_in = RuntimeError(f"{type(error).__name__}: {error}")
        return pickle.dumps(_Report(None, stand_in, report.trace))
