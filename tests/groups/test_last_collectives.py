"""The ring of a rank's last collectives: its order and bounds, in errors, and on a signal."""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from functorch_zero import optim
from functorch_zero.errors import GroupError
from functorch_zero.groups import (
    CheckedGroup,
    CountingGroup,
    HybridGroup,
    ProcessGroup,
    counted,
    dump_on_signal,
    labelled,
    last_collectives,
    launch,
    run_ranks,
)
from functorch_zero.groups.forwarding import ring_of
from functorch_zero.groups.last_collectives import Entry, Ring
from functorch_zero.sharded.api import shard
from functorch_zero.step.train import train_step
from tests.faults import outcome, survivors
from tests.models import ZOO, even, split
from tests.scripts import run_in_fork

SECONDS = 10.0  # that a rank may take to do its part, on a busy machine


def take_steps(group: Any, num_steps: int) -> None:
    """Steps at level 3."""
    loss_fn, params, buffers = ZOO["mlp"].build()
    step = shard(train_step(loss_fn, optim.adamw(0.01)), level=3, group=group)
    state = step.init(params, buffers)
    for batch in ZOO["mlp"].batches(num_steps, 12):
        state, _ = step(state, split(batch, even(12, group.size))[group.rank])


def phases(entries: list[Entry]) -> list[str]:
    return [entry.label.partition("/")[2] for entry in entries]


def test_a_step_is_in_the_ring_in_order() -> None:
    def run(group: Any) -> tuple[list[Entry], list[Any]]:
        seen = counted(group)
        take_steps(seen, 1)
        return list(ring_of(seen).entries), seen.calls

    for entries, calls in run_ranks(run, 2):
        assert [(entry.call.kind, entry.call.dtype or torch.uint8) for entry in entries] == [
            (call.kind, call.dtype) for call in calls
        ]
        assert [entry.number for entry in entries] == list(range(1, len(calls) + 1))
        assert {entry.state for entry in entries} == {"ended"}
        assert {tuple(entry.ranks) for entry in entries} == {(0, 1)}
        step = [entry for entry in entries if not entry.label.startswith("init/")]
        found = phases(step)
        assert found.index("gather") < found.index("metrics") < found.index("reduce")
        assert found.count("metrics") == 2 and found[-1] == "metrics", "values, then words"
        first = next(entry for entry in step if entry.label.endswith("/reduce"))
        assert first.label.startswith("layers.") and "[float64]/reduce" in first.label
        assert first.call.dtype is torch.float64 and first.call.num_elements


def test_the_ring_is_bounded() -> None:
    def run(group: Any) -> tuple[int, int, int]:
        take_steps(group, 10)
        numbers = [entry.number for entry in group.ring.entries]
        return len(numbers), numbers[0], numbers[-1]

    for length, first, last in run_ranks(run, 2):
        assert length == 64 and last - first == 63 and first > 1


def test_both_axes_of_a_mesh_are_in_one_ring() -> None:
    """Also of a checked one, whose collectives are in it once."""

    def run(group: Any) -> list[list[Entry]]:
        rings = []
        for checked in (False, True):
            mesh = HybridGroup(CheckedGroup(group) if checked else group, shard_size=2)
            ring_of(mesh).forget()
            take_steps(mesh, 1)
            rings.append(list(ring_of(mesh).entries))
        return rings

    for rank, (plain, checked) in enumerate(run_ranks(run, 4)):
        row, column = (rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2)
        assert {tuple(entry.ranks) for entry in plain} == {row, column, (0, 1, 2, 3)}
        assert [entry.number for entry in plain] == list(range(1, len(plain) + 1))
        reduced = [tuple(entry.ranks) for entry in plain if entry.label.endswith("/reduce")]
        units = len(reduced) // 2
        assert reduced == [row, column] * units, "over the replicas before the next unit"
        assert told(plain) == told(checked)


def told(entries: list[Entry]) -> list[str]:
    """Without the numbers, and the comparison of uses, which a checked group has no need of."""
    lines = [
        f"{entry.label}: {entry.call.kind} of {entry.call.num_elements} on {entry.ranks}"
        for entry in entries
    ]
    return [line for line in lines if not line.startswith("loss/uses")]


def test_entries_keep_no_tensor_alive() -> None:
    ring = ring_of(group := CountingGroup(2))
    named = labelled(group, "a/gather")
    out, piece, whole = torch.zeros(6), torch.ones(3), torch.ones(2)
    gone = [weakref.ref(x) for x in (out, piece, whole)]
    named.all_gather(out, piece).wait()
    named.all_reduce(whole)  # nobody waits for it
    del out, piece, whole
    assert [ref() for ref in gone] == [None] * 3
    ended, started = list(ring.entries)[-2:]
    assert (ended.state, started.state) == ("ended", "started")
    assert str(ended) == f"  {ended.number} a/gather: all_gather of 3 float32 on ranks 0, 1"
    assert str(started).startswith(f"> {started.number} a/gather: all_reduce of 2 float32 on ")


def test_an_error_shows_what_is_near() -> None:
    """The collective that failed is among the lines, also where many were started after it."""
    ring = Ring(3)
    named = labelled(WithRing(ring), "a/publish")
    works = [named.all_reduce(torch.ones(1)) for _ in range(60)]
    assert numbers(ring.near(math.inf)) == [54, 55, 56, 57, 58, 59, 60]
    works[59].wait()
    assert [line[0] for line in ring.near(math.inf).splitlines()] == ["T", *">>>>>>", " "]
    assert numbers(ring.near(20)) == [17, 18, 19, 20, 21, 22, 23]
    assert numbers(ring.near(2)) == [1, 2, 3, 4, 5]
    for _ in range(60):
        named.all_reduce(torch.ones(1))
    assert numbers(ring.near(2)) == numbers(ring.near(math.inf)), "it is no longer in the ring"


class WithRing(CountingGroup):
    """A group whose ring is given."""

    def __init__(self, ring: Ring) -> None:
        super().__init__(2)
        self._own = ring

    @property
    def ring(self) -> Ring:
        return self._own


def numbers(text: str) -> list[int]:
    title, *lines = text.splitlines()
    assert title == "The last collectives of rank 3, oldest first (> has not ended):"
    return [int(line[2:].split()[0]) for line in lines]


def test_a_rank_that_does_not_come() -> None:
    """The other's error tells what it has done, and what it waits for."""

    def run(group: ProcessGroup) -> Any:
        for unit in range(10):
            labelled(group, f"layers.{unit}/gather").all_gather(
                torch.empty(6), torch.ones(3)
            ).wait()
        if group.rank == 1:
            time.sleep(2)
            return None
        labelled(group, "layers.9/reduce").reduce_scatter(torch.empty(2), torch.ones(4))
        last = labelled(group, "layers.8/gather").all_gather(torch.empty(6), torch.ones(3))
        return outcome(last.wait)

    error, text, _ = survivors(run, 2, timeout=0.7)[0].result[1:]
    assert error == "LostPeerError"
    assert text.startswith("lost peer in layers.8/gather: all_gather on rank 0 took longer than")
    title, *lines = text.splitlines()[-8:]
    assert title == "The last collectives of rank 0, oldest first (> has not ended):"
    assert lines == [
        *(
            f"  {n} layers.{n - 1}/gather: all_gather of 3 float32 on ranks 0, 1"
            for n in range(6, 11)
        ),
        "> 11 layers.9/reduce: reduce_scatter of 4 float32 on ranks 0, 1 (started)",
        "> 12 layers.8/gather: all_gather of 3 float32 on ranks 0, 1 (waiting)",
    ]


def test_thread_ranks_have_rings_of_their_own() -> None:
    def run(group: Any) -> list[str]:
        try:
            for i in range(3 - group.rank):
                labelled(group, f"rank {group.rank}/{i}").barrier()
        except GroupError:
            pass  # rank 1 does not come
        return [str(entry) for entry in group.ring.entries]

    assert run_ranks(run, 2) == [
        [
            "  1 rank 0/0: barrier on ranks 0, 1",
            "  2 rank 0/1: barrier on ranks 0, 1",
            "> 3 rank 0/2: barrier on ranks 0, 1 (waiting)",
        ],
        ["  1 rank 1/0: barrier on ranks 0, 1", "  2 rank 1/1: barrier on ranks 0, 1"],
    ]


@pytest.fixture
def no_other_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork has the rings of this process's earlier ranks, as long as something refers to them."""
    rings = [(reference, reference()) for reference in last_collectives._rings]
    own = {reference for reference, ring in rings if ring is not None and ring._rank is None}
    monkeypatch.setattr(last_collectives, "_rings", own)


@pytest.mark.usefixtures("no_other_rings")
def test_a_blocked_process_prints_its_ring_on_a_signal(tmp_path: Path) -> None:
    """Twice; and then it goes on."""
    printed = tmp_path / "stderr"

    def run() -> None:
        group = ProcessGroup(timeout=3 * SECONDS)
        if group.rank == 0:
            os.dup2(os.open(printed, os.O_CREAT | os.O_WRONLY), 2)
            dump_on_signal(signal.SIGUSR1)
            dump_on_signal(signal.SIGUSR2)
        pid = int(group.exchange(str(os.getpid()).encode())[0])
        labelled(group, "root/gather").all_gather(torch.empty(6), torch.ones(3)).wait()
        if group.rank == 1:
            time.sleep(0.3)
            for i, number in enumerate((signal.SIGUSR1, signal.SIGUSR2), 1):
                os.kill(pid, number)
                wait_until_printed(i)
        labelled(group, "root[float32]/reduce").all_reduce(torch.ones(5)).wait()

    def wait_until_printed(times: int) -> None:
        give_up = time.monotonic() + SECONDS
        while printed.read_text().count("(waiting)\n") < times:
            assert time.monotonic() < give_up, printed.read_text()
            time.sleep(0.01)

    launch(run, 2, start_method="fork", timeout=4 * SECONDS)
    first, *lines = printed.read_text().splitlines()
    assert first.startswith("Process ")
    assert first.endswith(". The last collectives of rank 0, oldest first (> has not ended):")
    assert lines == [
        "  1 root/gather: all_gather of 3 float32 on ranks 0, 1",
        "> 2 root[float32]/reduce: all_reduce of 5 float32 on ranks 0, 1 (waiting)",
        first,
        "  1 root/gather: all_gather of 3 float32 on ranks 0, 1",
        "> 2 root[float32]/reduce: all_reduce of 5 float32 on ranks 0, 1 (waiting)",
    ]


FORKS = """
import os, signal, sys, time, warnings
from functorch_zero.groups import CountingGroup, dump_on_signal, labelled

def hear(label):
    labelled(CountingGroup(2), label).barrier()
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(0.3)

assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL, "nothing is installed on import"
assert signal.set_wakeup_fd(-1) == -1
dump_on_signal(signal.SIGUSR1)
hear("parent/1")
warnings.filterwarnings("ignore", message=".*fork")  # of Python 3.12: there is a thread
child = os.fork()
if not child:
    hear("child/unheard")  # nobody has asked for it, and the parent is not to print
    dump_on_signal(signal.SIGUSR1)
    hear("child/heard")
    sys.exit(0)
os.waitpid(child, 0)
hear("parent/2")
"""


@pytest.mark.usefixtures("no_other_rings")
def test_a_forked_process_has_a_ring_and_a_thread_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "forks.py"
    script.write_text(FORKS)
    ended = run_in_fork(script, folder=tmp_path)
    ended.check()
    parent, child, again = ended.stderr.split("Process ")[1:]
    title = " The last collectives of this process, oldest first (> has not ended):"
    for text in (parent, child, again):
        assert text.splitlines()[0].partition(".")[2] == title
    assert parent.splitlines()[1:] == ["  1 parent/1: barrier on ranks 0, 1"]
    assert child.splitlines()[1:] == [
        "  1 child/unheard: barrier on ranks 0, 1",
        "  2 child/heard: barrier on ranks 0, 1",
    ]
    assert again.splitlines()[1:] == [
        "  1 parent/1: barrier on ranks 0, 1",
        "  2 parent/2: barrier on ranks 0, 1",
    ]


@pytest.fixture
def signals_as_before() -> Iterator[None]:
    handler, wakeup = signal.getsignal(signal.SIGUSR1), signal.set_wakeup_fd(-1)
    yield
    signal.set_wakeup_fd(wakeup)
    signal.signal(signal.SIGUSR1, handler)


@pytest.mark.usefixtures("signals_as_before")
def test_a_handler_that_is_there_stays() -> None:
    def own(*_: Any) -> None: ...

    for there in (own, signal.SIG_IGN):
        signal.signal(signal.SIGUSR1, there)
        with pytest.raises(ValueError, match=r"has a handler.*Remedy: pass another signal"):
            dump_on_signal(signal.SIGUSR1)
        assert signal.getsignal(signal.SIGUSR1) is there


def test_a_handler_in_c_stays() -> None:
    """Of which Python's `getsignal` knows nothing."""
    faulthandler.register(signal.SIGUSR1, file=2)
    try:
        with pytest.raises(ValueError, match=r"has a handler: one in C, as by faulthandler"):
            dump_on_signal(signal.SIGUSR1)
    finally:
        assert faulthandler.unregister(signal.SIGUSR1)


@pytest.mark.usefixtures("signals_as_before")
def test_a_wakeup_file_that_is_in_use_stays() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        signal.set_wakeup_fd(ours.fileno())
        with pytest.raises(RuntimeError, match=r"set_wakeup_fd is in use.*Remedy"):
            dump_on_signal(signal.SIGUSR1)
        assert signal.set_wakeup_fd(-1) == ours.fileno()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_only_the_main_thread_may_ask() -> None:
    heard: list[tuple[str, str]] = []
    thread = threading.Thread(
        target=lambda: heard.append(outcome(lambda: dump_on_signal(signal.SIGUSR1))[1:3])
    )
    thread.start()
    thread.join()
    assert heard[0][0] == "RuntimeError" and "outside the main thread" in heard[0][1]
