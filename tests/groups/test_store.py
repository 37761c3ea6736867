"""A store that never answers: each rank that needs it raises all the same, within its deadline."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from functorch_zero.groups import ProcessGroup, launch, membership, torch_distributed
from functorch_zero.groups.addresses import way_to
from functorch_zero.groups.board import Board, publish
from functorch_zero.groups.members import Member, culprits, without_store
from functorch_zero.groups.store import Store, StoreError
from tests.groups.hanging import on_device
from tests.tiers import THOROUGH

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the ranks are forked")

DEADLINE = 0.1  # seconds, of the stores here
SOON = 1.0  # seconds, beside deadlines and time limits
HOST = socket.gethostname()


class Silent:
    """A connection to a store that doesn't answer until it is told to."""

    def __init__(self) -> None:
        self.wakes = threading.Event()

    def _wait(self, *arguments: Any) -> bytes:
        self.wakes.wait(20.0)
        return b"3"

    check = get = append = compare_set = _wait


def silent() -> Store:
    return Store(Silent, DEADLINE)


CALLS: dict[str, Callable[[Store], object]] = {
    "connect": lambda store: store.connect(),
    "read": lambda store: store.read("a", "b"),
    "write_once": lambda store: store.write_once("a", "text"),
    "append": lambda store: store.append("a", "text"),
}


def test_each_call_has_its_deadline() -> None:
    own = {name for name, value in vars(Store).items() if callable(value) and name[0] != "_"}
    assert own == {*CALLS, "cut_off"}  # which is for the end of the process


@pytest.mark.parametrize("name", CALLS)
def test_a_call_ends_at_its_deadline(name: str) -> None:
    connection = Silent()

    def connect() -> Silent:
        if name == "connect":
            connection.wakes.wait(20.0)
        return connection

    store = Store(connect, DEADLINE)
    with pytest.raises(StoreError, match=f"has not answered for {DEADLINE} s"):
        CALLS[name](store)
    threads = threading.active_count()
    for other in CALLS.values():  # at once, and with no further thread
        begin = time.monotonic()
        with pytest.raises(StoreError, match="does not answer"):
            other(store)
        assert time.monotonic() - begin < DEADLINE / 2
        assert threading.active_count() == threads
    connection.wakes.set()
    while threading.active_count() == threads:
        time.sleep(0.001)
    assert store.read("a") == "3"  # it answers again


def test_a_thread_does_not_wait_for_another_ones_deadline() -> None:
    connection = Silent()
    store = Store(lambda: connection, DEADLINE)

    def patient() -> None:
        assert store.read("a", seconds=20.0) == "3"

    thread = threading.Thread(target=patient)
    thread.start()
    while not store._asking.locked():
        time.sleep(0.001)
    with pytest.raises(StoreError, match="has not answered another call"):
        store.read("a")
    connection.wakes.set()
    thread.join()


def test_errors_of_torch_are_of_one_type() -> None:
    class Broken(Silent):
        def _wait(self, *arguments: Any) -> bytes:
            raise RuntimeError("Connection reset by peer\nException raised from recvBytes ...")

        check = _wait

    with pytest.raises(StoreError) as caught:
        Store(Broken).read("a")
    assert str(caught.value) == "torch's store can't be reached: Connection reset by peer"


@contextmanager
def served() -> Iterator[Any]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    yield dist.PrefixStore("prefix", store)  # type: ignore[attr-defined]


def test_words_in_torchs_store() -> None:
    """On a connection of its own: on torch's, calls wait until another thread's have ended."""
    with served() as torchs:
        store = Store(torchs.clone)
        assert store.read("a") is None
        store.write_once("a", "first")
        store.write_once("a", "second")
        store.append("b", "1")
        store.append("b", "2")
        assert (store.read("none", "b"), store.read("a")) == ("12", "first")
        assert store.is_here and store.address.startswith("127.0.0.1:")

        def wait() -> None:
            with pytest.raises(RuntimeError, match="timeout"):
                torchs.wait(["never"], timedelta(seconds=0.1))

        thread = threading.Thread(target=wait)
        thread.start()
        while thread.is_alive():
            assert store.read("a") == "first"


@pytest.mark.parametrize(
    ("host", "is_here"),
    [
        ("localhost", True),
        ("127.0.1.1", True),  # as Debian calls a machine
        ("192.0.2.1", False),  # for documentation: nobody has it
        ("no.such.name.invalid", False),
    ],
)
def test_whether_the_store_is_served_on_this_machine(host: str, is_here: bool) -> None:
    way = way_to(host)
    assert (way is not None and way.is_here) == is_here


LAST = """
import os, signal, sys, time
from pathlib import Path
import torch.distributed as dist
from functorch_zero.groups.store import Store, StoreError

pid, port = map(int, sys.argv[1:])
torchs = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
store = Store(torchs.clone, 0.3)
store.connect()
os.kill(pid, signal.SIGSTOP)
# Its threads stop one after the other, and one may answer until then
while not all("State:\\tT" in x.read_text() for x in Path(f"/proc/{pid}/task").glob("*/status")):
    time.sleep(0.01)
try:
    store.read("a")
except StoreError as error:
    print(error)
class Last:
    # Collected after all that is registered with atexit
    def __del__(self, pid=pid, kill=os.kill, sleep=time.sleep):
        kill(pid, 9)
        sleep(0.3)
sys.last = Last()
sys.exit(7)
"""


@THOROUGH
def test_a_process_ends_as_it_wants_beside_a_store_that_breaks() -> None:
    """Python ends daemon threads by force, and one inside of torch would take the process along."""
    reader, writer = os.pipe()
    server = os.fork()
    if not server:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        os.write(writer, str(store.port).encode())
        while True:
            signal.pause()
    try:
        port = os.read(reader, 10).decode()
        command = [sys.executable, "-c", LAST, str(server), port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    finally:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
        os.close(reader)
        os.close(writer)
    assert "has not answered for 0.3 s" in done.stdout
    assert done.returncode == 7, done.stderr


def on_ranks(fn: Callable[..., Any], ranks: int) -> list[Any]:
    return launch(fn, ranks, timeout=30.0, start_method="fork")


def outcome(fn: Callable[[], object]) -> tuple[str, str, float]:
    """The type and text of what `fn` raises, and after how many seconds."""
    begin = time.monotonic()
    try:
        fn()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "", "", time.monotonic() - begin


def test_a_rank_is_lost_and_nobody_can_be_asked() -> None:
    """The cause is looked for in the store."""
    limit = 0.3

    def fn() -> Any:
        group = ProcessGroup(timeout=limit)
        group._store = silent()
        if group.rank == 1:
            time.sleep(limit + 0.2)  # late
            return outcome(group.barrier)
        return outcome(group.barrier), outcome(group.rejoin)

    (error, text, seconds), again = on_ranks(fn, 2)[0]
    assert error == again[0] == "LostPeerError" and seconds < limit + DEADLINE + SOON
    assert f"Torch's store has not answered for {DEADLINE} s. The other rank is rank 1 on" in text


def test_a_rank_fails_and_can_tell_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connections close all the same."""
    monkeypatch.setattr(membership, "_SECONDS_FOR_ROLL_CALL", 0.3)

    def fn() -> Any:
        group = ProcessGroup(timeout=20.0)
        if group.rank == 1:
            group._store = silent()
            failed = outcome(lambda: group.fail(ValueError("bad batch")))
            return failed, outcome(group.barrier)
        return outcome(group.barrier)

    (error, text, seconds), (failed, own) = on_ranks(fn, 2)
    assert error == "LostPeerError" and seconds < DEADLINE + 0.3 + SOON
    assert f"No word came from rank 1 on {HOST}" in text
    assert failed[0] == "" and failed[2] < DEADLINE + SOON
    assert own[:2] == (
        "GroupError",
        "rank 1 failed: ValueError: bad batch, and so left this group. Remedy: call rejoin() on "
        "all ranks",
    )


def test_a_question_that_nobody_hears() -> None:
    limit = 0.4

    def fn() -> Any:
        group = ProcessGroup(timeout=limit)
        group._store = silent()
        return outcome(lambda: group.all_say("words", 20.0))

    for error, text, seconds in on_ranks(fn, 2):
        assert error == "LostPeerError" and limit <= seconds < limit + SOON
        assert "could not ask the others: torch's store has not answered for 0.4 s" in text


def test_nobody_comes_back_without_a_store() -> None:
    def fn() -> Any:
        group = ProcessGroup(timeout=20.0)
        group.fail(ValueError("bad batch"))
        group._store = silent()
        return outcome(group.rejoin)

    for error, text, seconds in on_ranks(fn, 2):
        assert error == "LostPeerError" and "does not answer" in text and seconds < SOON


def test_a_device_hangs_and_nobody_can_be_asked() -> None:
    """The time limit holds, of which a thread takes care that asks the store, too."""
    limit = 0.3

    def fn() -> Any:
        group = on_device(timeout=limit)
        group._store = silent()
        if group.rank == 0:
            return outcome(lambda: group.all_reduce(torch.ones(3)).wait() or group.barrier())
        time.sleep(limit + SOON)  # it never starts that collective
        return None

    error, text, seconds = on_ranks(fn, 2)[0]
    assert error == "LostPeerError" and seconds < limit + 4 * DEADLINE + SOON
    assert "the device has waited for longer than" in text
    assert f"The other rank is rank 1 on {HOST}" in text


def test_a_group_is_not_made_without_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's ranks meet there, and wait for good."""
    monkeypatch.setattr(torch_distributed, "SECONDS_TO_ANSWER", 0.0)
    limit = timedelta(seconds=0.05)

    def fn() -> Any:
        world, go_on = torch_distributed.parent_group(None), threading.Event()
        never = lambda *arguments, **options: go_on.wait(20.0)
        monkeypatch.setattr(dist, "new_group", never)
        monkeypatch.setattr(dist.distributed_c10d, "_new_process_group_helper", never)
        found = [
            outcome(lambda: torch_distributed.own_group(world, limit, {"cpu": "gloo"})),
            outcome(lambda: torch_distributed.named_group(world, "name", limit, {"cpu": "gloo"})),
            outcome(lambda: torch_distributed.part_of(world, [dist.get_rank()], limit)),
            outcome(lambda: ProcessGroup(timeout=limit)),
        ]
        go_on.set()
        return found

    for *parts, whole in on_ranks(fn, 2):
        for error, text, seconds in parts:
            assert error == "Overdue" and "make group" in text and seconds < SOON
        assert whole[0] == "LostPeerError" and "could not connect to all ranks" in whole[1]


def test_a_failure_is_heard_of_after_a_store_was_slow() -> None:
    """A text that came too late for its own rank is there for the others."""
    connection = Silent()
    written: list[tuple[Any, ...]] = []

    class Slow(Silent):
        def compare_set(self, *arguments: Any) -> None:
            connection.wakes.wait(20.0)
            written.append(arguments)

    store = Store(Slow, DEADLINE)
    publish(store, "key", "why")
    assert not written
    connection.wakes.set()
    while store._late is None or store._late.is_alive():
        time.sleep(0.001)
    assert written == [("key", "", "why")]


def test_a_store_that_ends_in_the_middle_of_a_roll_call() -> None:
    """With the rank that serves it, which has heard enough."""

    class Ending(Silent):
        num_left = 3

        def _next(self, keys: Any) -> bytes:
            self.num_left -= 1
            if not self.num_left:
                raise RuntimeError("Connection reset by peer")
            return b"0:7 2:6 "

        check = get = _next

        def append(self, *arguments: Any) -> None:
            """Answers."""

    found = Board(Store(Ending), "name", 2, 3).roll_call("key", 20.0)
    assert found == ({0: 7, 2: 6}, None)


def test_who_is_lost() -> None:
    members = [Member(0, "m0", True), Member(2, "m0", True), Member(4, "m1", False)]
    assert culprits(members, {0: 7}) == "No word came from rank 2 on m0 and rank 4 on m1"
    assert culprits(members, {2: 7}) == "No word came from ranks 0, 2 on m0"
    assert culprits(members, {0: 7, 1: 7, 2: 7}).startswith("All ranks have started 7 collectives")
    assert culprits(members, {0: 7, 1: 7, 2: 6}) == (
        "Behind: rank 4 on m1, with 6 collectives of this group started; the others: up to 7"
    )
    assert without_store(members, 2, "torch's store is silent") == (
        "Torch's store is silent. It is served on the machine of ranks 0, 2 on m0, which has ended "
        "or can't be reached from rank 4 on m1"
    )
    assert without_store(members, 0, "torch's store is silent") == "Torch's store is silent"
    unmet = [Member(rank, "", False) for rank in (0, 3)]
    assert without_store(unmet, 0, "it is silent") == "It is silent. The other rank is rank 3"


def test_a_lost_rank_is_named_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three, one of which is late."""
    monkeypatch.setattr(membership, "_SECONDS_FOR_ROLL_CALL", 0.3)

    def fn() -> Any:
        group = ProcessGroup(timeout=0.3)
        if group.rank != 2:
            return outcome(group.barrier)
        time.sleep(0.9)
        return None

    for error, text, _ in on_ranks(fn, 3)[:2]:
        assert error == "LostPeerError"
        assert text.endswith(f"No word came from rank 2 on {HOST}")
