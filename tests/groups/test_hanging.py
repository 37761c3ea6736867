"""Failures of ranks whose device hangs in a collective, as over NCCL: see `hanging`."""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import GroupError
from functorch_zero.groups import (
    HybridGroup,
    ProcessGroup,
    device_watch,
    labelled,
    launch,
    settle,
    torch_distributed,
)
from functorch_zero.groups.device_watch import is_reached
from functorch_zero.sharded.api import shard
from functorch_zero.step.train import train_step
from tests.collectives import check_all, several_at_once
from tests.faults import Trigger
from tests.groups.hanging import DEVICE, CurrentDevice, HangingGroup, on_device
from tests.models import ZOO, split
from tests.tiers import THOROUGH, thinned, tiers

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the ranks are forked")

SOON = 6.0  # seconds in which every rank must hear of a failure, whatever its host waits for
HOST = socket.gethostname()
AHEAD = 0.3  # seconds after which a host goes on, without the device's values


def on_ranks(fn: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    return launch(fn, ranks, *args, timeout=60.0, start_method="fork")


class Ended(NamedTuple):
    """How a call ended."""

    error: str  # its type, or nothing
    text: str
    seconds: float


def outcome(fn: Callable[[], object]) -> Ended:
    begin = time.monotonic()
    try:
        fn()
    except Exception as error:
        return Ended(type(error).__name__, str(error), time.monotonic() - begin)
    return Ended("", "", time.monotonic() - begin)


@THOROUGH
def test_collectives() -> None:
    def fn() -> Any:
        group = on_device()
        check_all(group)
        group.reduce_apart()
        check_all(group)
        return group._connections.backends, group._connections.of_device

    assert on_ranks(fn, 3) == [({"cpu": "gloo", "cuda": "hanging"}, {"cuda": "hanging"})] * 3


@pytest.mark.parametrize("patience", tiers(thorough=[AHEAD, float("inf")]))
def test_all_leave_and_come_back(patience: float) -> None:
    """Twice. The hosts wait for the device, or for each other."""

    def fn() -> Any:
        group, heard = on_device(), []
        group.reduce_apart()
        for bad in (1, 0):
            group.rejoin()
            DEVICE.patience = patience

            def collectives(bad: int = bad) -> None:
                if group.rank == bad:
                    group.fail(ValueError("bad batch"))
                group.all_reduce(torch.ones(3)).wait()
                group.reduce_scatter(torch.ones(2), torch.ones(6)).wait()
                group.barrier()

            heard.append(outcome(collectives))
            group.rejoin()
            DEVICE.patience = float("inf")
            several_at_once(group)
        return heard

    for rank, heard in enumerate(on_ranks(fn, 3)):
        for bad, ended in zip((1, 0), heard, strict=True):
            assert ended.error == ("GroupError" if rank == bad else "PeerError")
            assert f"rank {bad} failed: ValueError: bad batch" in ended.text
            assert ended.seconds < SOON


def test_earlier_calls_are_not_cut_off() -> None:
    """The devices are behind their hosts, which abort only when what all ranks have started has
    ended."""

    def fn() -> Any:
        group, x, cut = on_device(), torch.zeros(3), torch.zeros(3)
        DEVICE.patience, DEVICE.delay = 0.0, 1.5
        group.all_gather(x, torch.ones(1)).wait()
        group.rejoin()  # the next call begins
        DEVICE.delay = 0.0
        if group.rank == 1:
            group.fail(ValueError("bad batch"))
        ended = outcome(lambda: [group.all_gather(cut, torch.ones(1)).wait(), group.barrier()])
        assert ended.seconds < 1.4  # the error doesn't wait for the device
        group.rejoin()
        return x.tolist(), cut.tolist(), DEVICE.num_cut

    # The failed rank has started no second collective
    (x, cut, num_cut), failed, other = on_ranks(fn, 3)
    assert x == failed[0] == other[0] == [1.0] * 3
    assert (cut, num_cut, failed[2]) == ([0.0] * 3, [1], [0])


def test_earlier_calls_that_were_cut_off() -> None:
    """Their results are lost, so that no rank may go on with them."""

    def fn() -> Any:
        group = on_device(timeout=2.0)
        DEVICE.patience = 0.0
        if group.rank != 1:  # which has raised in its update, say
            group.all_reduce(torch.ones(3)).wait()
        group.rejoin()  # the next call begins
        if group.rank == 1:
            group.fail(ValueError("bad update"))
        heard = outcome(group.barrier)
        return heard.text, outcome(group.rejoin), outcome(group.rejoin), outcome(group.barrier)

    for heard, *after in on_ranks(fn, 3):
        assert "rank 1 failed: ValueError: bad update" in heard
        for ended in after:
            assert ended.error == "LostPeerError"
            assert "could not finish the call before the one that failed" in ended.text
            assert "last checkpoint" in ended.text


def test_a_device_that_stays_busy_after_the_abort() -> None:
    def fn() -> Any:
        device_watch._SECONDS_TO_FINISH = 0.3
        group = on_device(timeout=2.0)
        group.all_gather(torch.zeros(2), torch.ones(1)).wait()
        group.fail(ValueError("bad batch"))

        class Never:
            def __init__(self, stream: Any) -> None:
                pass

            def query(self) -> bool:
                return False

        device_watch.mark_on = Never  # type: ignore[assignment]
        return outcome(group.rejoin)

    for ended in on_ranks(fn, 2):
        assert ended.error == "LostPeerError"
        assert "still waits for collectives cut off" in ended.text


def test_marks_lie_on_the_device_of_the_tensors() -> None:
    """It need not be the rank's current device."""

    def fn() -> Any:
        group, x = on_device(), torch.zeros(2)
        group.rejoin()  # the first call begins, and no collective has been there
        group.all_gather(x, torch.ones(1)).wait()
        group.rejoin()
        group.fail(ValueError("bad batch"))
        group.rejoin()
        group.close()
        return DEVICE.streams == [x.device] * 4

    assert on_ranks(fn, 2) == [True] * 2


def test_threads_use_the_device_of_their_rank() -> None:
    """A new thread's own is the first one."""

    def fn() -> Any:
        group, device = on_device(), CurrentDevice()
        device.choose(3)
        for _ in range(2):
            group.fail(ValueError("bad batch"))
            group.rejoin()
            group.all_gather(torch.zeros(2), torch.ones(1)).wait()
        return set(device.chosen)

    own = ("let go of device", "abort group", "destroy group", "watch device")
    names = ("MainThread", *own, "make group", "ask store")
    for chosen in on_ranks(fn, 2):
        assert chosen == {(name, 3) for name in names}


def test_closing_waits_for_the_device() -> None:
    def fn() -> Any:
        group, x = on_device(), torch.zeros(2)
        DEVICE.patience, DEVICE.delay = 0.0, 0.5
        group.all_gather(x, torch.ones(1)).wait()
        group.close()
        group.close()
        thread = group._device._letting_go
        assert thread is not None
        thread.join(5.0)
        assert not thread.is_alive()
        return x.tolist(), DEVICE.num_cut, outcome(group.barrier).text

    for rank, found in enumerate(on_ranks(fn, 2)):
        assert found == ([1.0] * 2, [0], f"rank {rank} has closed this group")


def test_a_rank_that_is_busy_hears_of_a_failure() -> None:
    """Else the others, whose devices wait for it, would not abort."""

    def fn() -> Any:
        group = on_device()
        if group.rank == 1:
            group.fail(ValueError("bad batch"))
        elif group.rank == 2:
            begin = time.monotonic()
            while group._connections.host is not None and time.monotonic() < begin + SOON:
                time.sleep(0.01)
        return outcome(lambda: group.all_gather(torch.zeros(3), torch.ones(1)).wait()), outcome(
            group.barrier
        )

    for rank, (first, second) in enumerate(on_ranks(fn, 3)):
        assert (first.error or second.error) == ("GroupError" if rank == 1 else "PeerError")
        assert first.seconds + second.seconds < SOON


def test_a_world_with_a_device() -> None:
    """`init_process_group(device_id=...)`."""

    def fn() -> Any:
        world = torch.distributed.group.WORLD
        assert world is not None
        world.bound_device_id = torch.device("cuda:0")
        made = torch_distributed.own_group(world, timedelta(seconds=20), {"cpu": "gloo"})
        return torch_distributed.backends_of(made)["cpu"]

    assert on_ranks(fn, 2) == ["gloo"] * 2


@THOROUGH
def test_asking_whether_a_rank_is_there_leaves_nothing_behind() -> None:
    """Each question is a message that is never sent."""

    def fn() -> Any:
        group = on_device()
        asked = []
        for _ in range(3):
            asked += [group._news(True) for _ in range(100)]
            several_at_once(group)
        if group.rank == 1:
            group.close()
        begin = time.monotonic()
        while group.rank == 0 and group._news(True) is None and time.monotonic() < begin + SOON:
            time.sleep(0.01)
        return set(asked), group._news(True)

    first, second = on_ranks(fn, 2)
    assert first == ({None}, "rank 1 has ended or can't be reached from rank 0")
    assert second == ({None}, None)  # it has left


def test_a_watch_that_is_late_leaves_no_later_era() -> None:
    """Its thread hears of a failure, and all ranks come back before it goes on."""

    def fn() -> Any:
        group, has_heard, go_on = on_device(), threading.Event(), threading.Event()
        news = group._news

        def late(waits: bool) -> str | None:
            text = news(waits)
            if text is not None:
                has_heard.set()
                go_on.wait(SOON)
            return text

        group._news = late  # type: ignore[method-assign]
        if group.rank == 0:
            group.fail(ValueError("bad batch"))
        else:
            assert has_heard.wait(SOON)
        failed = outcome(group.barrier)
        group.rejoin()
        go_on.set()
        time.sleep(0.5)  # for the thread
        return failed.error, outcome(group.barrier)

    for rank, (failed, again) in enumerate(on_ranks(fn, 2)):
        assert failed == ("GroupError" if rank == 0 else "PeerError")
        assert again.error == "", again.text


def test_torchs_watchdog_spares_the_process() -> None:
    def fn() -> Any:
        name, found = "TORCH_NCCL_ASYNC_ERROR_HANDLING", []
        for own in (None, "1"):
            if own is not None:
                os.environ[name] = own
            group = on_device(timeout=7.0)
            for _ in range(2):
                made = group._connections.groups["device"]
                assert isinstance(made, HangingGroup)
                found.append((made.env, made.timeout.total_seconds(), os.environ.get(name)))
                group.fail(ValueError("bad batch"))
                group.rejoin()
        return found

    # torch's own limit comes after ours; the user's own setting stays
    assert on_ranks(fn, 2) == [[("2", 74.0, None)] * 2 + [("1", 74.0, "1")] * 2] * 2


def test_the_setting_for_the_watchdog_lasts_while_any_thread_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A save's thread connects again while training does."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.delenv(name, raising=False)
    first, second = (torch_distributed._process_outlives_errors() for _ in range(2))
    found = []
    for change in (first.__enter__, second.__enter__):
        change()
        found.append(os.environ.get(name))
    for made in (first, second):
        made.__exit__(None, None, None)
        found.append(os.environ.get(name))
    assert found == ["2", "2", "2", None]


def test_the_watch_ends_with_its_group() -> None:
    def fn() -> Any:
        def watches() -> int:
            names = [thread.name for thread in threading.enumerate()]
            return names.count("watch device")

        group = on_device()
        found = [watches()]
        ProcessGroup()
        found.append(watches())
        group.close()
        time.sleep(0.5)
        found.append(watches())
        forgotten = on_device()
        found.append(watches())
        del forgotten
        time.sleep(1.5)
        return [*found, watches()]

    assert on_ranks(fn, 2) == [[1, 1, 0, 1, 0]] * 2


LEAVING = """
import atexit, threading, time

@atexit.register
def last():
    print([thread.name for thread in threading.enumerate()])

from functorch_zero.groups import device_watch

asked = threading.Event()

class Group:
    def _news(self, waits):
        asked.set()
        time.sleep(0.5)  # inside of torch's store

device_watch._SECONDS_WHILE_IT_GOES_ON = 0.0
group = Group()
watch = device_watch.DeviceWatch(group, 0, 20.0)
asked.wait()
"""


@THOROUGH
def test_no_watch_runs_when_the_process_ends() -> None:
    """Python would end its thread by force, wherever it is."""
    command = [sys.executable, "-W", "error", "-c", LEAVING]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "['MainThread']\n"), done.stderr


def test_a_watch_of_a_broken_device_ends() -> None:
    """Its host sees the error, too."""

    class Broken:
        def query(self) -> bool:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    class Group:
        def _news(self, waits: bool) -> str | None:
            return None

        def _lost(self, text: str, era: int | None = None) -> GroupError:
            raise AssertionError(text)

    assert not is_reached(Broken(), 1.0)
    group = Group()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_watch, "mark_on", lambda stream: Broken())
        patch.setattr(device_watch, "current_stream", lambda device: "stream")
        watch = device_watch.DeviceWatch(group, 0, 20.0)
        watch.launched(torch.device("cuda"))
        give_up = time.monotonic() + SOON
        while any(thread.name == "watch device" for thread in threading.enumerate()):
            assert time.monotonic() < give_up
            time.sleep(0.01)


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: operation not permitted when stream is capturing",
        "CUDA error: operation failed due to a previous error during capture",
        "CUDA error: operation not permitted on an event last recorded in a capturing stream",
    ],
)
def test_a_watch_goes_on_after_a_capture(text: str) -> None:
    """Another thread captures a graph, and marks are refused meanwhile."""

    class Capturing:
        num_left = 3

        def query(self) -> bool:
            Capturing.num_left -= 1
            if Capturing.num_left >= 0:
                raise RuntimeError(text)
            return True

    class Group:
        def __init__(self) -> None:
            self.heard: list[str] = []

        def _news(self, waits: bool) -> str | None:
            return None if Capturing.num_left >= 0 else "bad batch"

        def _lost(self, text: str, era: int | None = None) -> GroupError:
            self.heard.append(text)
            return GroupError(text)

    assert is_reached(Capturing(), SOON)
    Capturing.num_left = 3
    group = Group()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_watch, "mark_on", lambda stream: Capturing())
        patch.setattr(device_watch, "current_stream", lambda device: "stream")
        patch.setattr(device_watch, "_SECONDS_WHILE_IT_GOES_ON", 0.0)
        device_watch.DeviceWatch(group, 0, 20.0).launched(torch.device("cuda"))
        give_up = time.monotonic() + SOON
        while not group.heard and time.monotonic() < give_up:
            time.sleep(0.01)
    assert group.heard == ["bad batch"]


class Fault:
    """Happens on rank 1, in its loss or in its backward, once it is `armed`."""

    def __init__(self, place: str, happens: Callable[[], object]) -> None:
        self.armed, self.place, self.happens = False, place, happens

    def reached(self, place: str) -> None:
        if self.armed and place == self.place:
            self.armed = False
            self.happens()


class Passing(torch.autograd.Function):
    """The identity, with a fault in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: Fault) -> Tensor:
        ctx.fault = fault
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.fault.reached("backward")
        return grad, None


def bad_batch() -> None:
    raise ValueError("bad batch")


def trained(group: Any, level: int, fault: Fault, patience: float) -> tuple[Any, Ended | None]:
    """Three steps, the second of which is tried again after the fault: the state's leaves, and the
    end of the second step."""
    case = ZOO["mlp"]
    loss_fn, params, buffers = case.build()

    def with_fault(*arguments: Any) -> Any:
        loss, *rest = result if isinstance(result := loss_fn(*arguments), tuple) else (result,)
        fault.reached("loss")
        loss = Passing.apply(loss, fault)
        return (loss, *rest) if rest else loss

    step = shard(train_step(with_fault, optim.adamw(0.01)), level=level, group=group)
    state = step.init(params, buffers)
    ended = None
    for i, batch in enumerate(case.batches(3, 8)):
        own = split(batch, [8 // group.size] * group.size)[group.rank]
        if i == 1:
            fault.armed, DEVICE.patience = group.rank == 1, patience
            ended = outcome(lambda state=state, own=own: step(state, own))  # type: ignore[misc]
            DEVICE.patience = float("inf")
            fault.armed = False
            if ended.error == "LostPeerError":
                return None, ended
        state, _ = step(state, own)
    return [leaf.tolist() for leaf in optree.tree_leaves(step.unshard(state))], ended


def undisturbed(group: Any, level: int) -> Any:
    case = ZOO["mlp"]
    loss_fn, params, buffers = case.build()
    step = shard(train_step(loss_fn, optim.adamw(0.01)), level=level, group=group)
    state = step.init(params, buffers)
    for batch in case.batches(3, 8):
        state, _ = step(state, split(batch, [8 // group.size] * group.size)[group.rank])
    return [leaf.tolist() for leaf in optree.tree_leaves(step.unshard(state))]


WAIT, RUN = "wait for the device", "run ahead"


@pytest.mark.parametrize(
    ("level", "place", "hosts"),
    tiers(
        [(3, "backward", WAIT)],
        [
            (1, "loss", RUN),
            (1, "loss", WAIT),
            (3, "loss", WAIT),
            (1, "backward", WAIT),
            (2, "backward", RUN),
            (3, "backward", RUN),
        ],
        rows=True,
    ),
)
def test_a_step_is_tried_again(level: int, place: str, hosts: str) -> None:
    """To the bit. The state was to be donated."""
    patience = float("inf") if hosts == WAIT else AHEAD

    def fn() -> Any:
        expected = undisturbed(on_device(), level)
        leaves, ended = trained(on_device(), level, Fault(place, bad_batch), patience)
        return leaves == expected, ended

    for rank, (same, ended) in enumerate(on_ranks(fn, 2)):
        assert same
        assert ended.error == ("ValueError" if rank == 1 else "PeerError")
        assert "bad batch" in ended.text if rank == 1 else "rank 1 failed" in ended.text
        assert ended.seconds < SOON


def test_a_rank_raises_before_it_publishes_new_params() -> None:
    """After the ranks have agreed. The other host has gone on, with a state that its device can't
    finish: the next call says so, on both ranks."""

    def fn() -> Any:
        trigger = Trigger("publish", bad_batch)
        case = ZOO["mlp"]
        loss_fn, params, buffers = case.build()
        group = trigger.on(on_device(timeout=2.0))
        step = shard(train_step(loss_fn, optim.adamw(0.01)), level=1, group=group)
        states = [step.init(params, buffers)]
        batches = [split(batch, [4, 4])[group.rank] for batch in case.batches(2, 8)]
        trigger.armed, DEVICE.patience = group.rank == 1, 0.02
        first = outcome(lambda: states.append(step(states[0], batches[0])[0]))
        return first, [outcome(lambda: step(states[-1], batches[1])) for _ in range(3)]

    (first, others), (failed, own) = on_ranks(fn, 2)
    assert (first.error, failed.text) == ("", "bad batch")
    assert others[0].text == "rank 1 failed: ValueError: bad batch"
    for ended in (*others[1:], *own):
        assert ended.error == "LostPeerError"
        assert "rank 0 could not finish the call before the one that failed" in ended.text


def out_of_memory(*arguments: Any) -> None:
    raise MemoryError("out of memory")


CALLS = {"step.unshard": "all_gather", "fz.unshard": "all_gather", "broadcast": "broadcast"}


@pytest.mark.parametrize("call", thinned(CALLS, 3))
def test_a_rank_fails_before_it_takes_part_in_a_gather(call: str) -> None:
    """The other host runs ahead of its device, and has no values to return."""

    def fn() -> Any:
        case = ZOO["mlp"]
        loss_fn, params, buffers = case.build()
        group = on_device()
        step = shard(train_step(loss_fn, optim.adamw(0.01)), level=3, group=group)
        state = step.init(params, buffers)

        def gathered() -> list[Tensor]:
            if call == "step.unshard":
                return optree.tree_leaves(step.unshard(state).params)
            if call == "fz.unshard":
                return optree.tree_leaves(fz.unshard(state.params))
            return [fz.broadcast(torch.full((3,), 1.0 + group.rank), group)]

        expected = [leaf.clone() for leaf in gathered()]
        DEVICE.patience = 0.0
        if group.rank == 1:
            setattr(group, CALLS[call], out_of_memory)
        ended = outcome(gathered)
        DEVICE.patience = float("inf")
        if group.rank == 1:
            delattr(group, CALLS[call])
        return ended, all(map(torch.equal, expected, gathered()))

    for rank, (ended, same) in enumerate(on_ranks(fn, 2)):
        assert ended.error == ("MemoryError" if rank == 1 else "PeerError")
        assert "out of memory" in ended.text and ended.seconds < SOON
        assert same


def test_settling_waits_for_the_device() -> None:
    def fn() -> Any:
        group, x = on_device(), torch.zeros(2)
        DEVICE.patience, DEVICE.delay = 0.0, 0.5
        group.settle()  # nothing was queued
        group.all_gather(x, torch.ones(1)).wait()
        settle(labelled(group, "unshard"))
        return x.tolist()

    assert on_ranks(fn, 2) == [[1.0] * 2] * 2


def test_a_rank_is_killed_while_the_others_wait_for_a_gather(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All have started it. torch cuts it off before the watch hears of the death, and then the
    device goes on with garbage."""
    module = importlib.import_module("functorch_zero.groups.launch")  # the name is a function's
    monkeypatch.setattr(module, "_SECONDS_AFTER_FAILURE", 20.0)  # to write the file

    def fn(folder: str) -> None:
        group = on_device()
        DEVICE.patience = 0.0
        # Its host has come to the end of the call, and its device has done nothing of it
        if group.rank == 1:
            group.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        group.all_gather(torch.zeros(2), torch.ones(1)).wait()
        device_group = group._connections.groups["device"]
        assert isinstance(device_group, HangingGroup)
        threading.Timer(0.1, device_group.abort).start()
        monkeypatch.setattr(device_watch, "_SECONDS_WHILE_IT_WAITS", 1000.0)
        Path(folder, "0").write_text(json.dumps(outcome(group.settle)))

    with tempfile.TemporaryDirectory() as folder:
        with suppress(GroupError):  # that rank 1 has died
            on_ranks(fn, 2, folder)
        error, _, seconds = json.loads(Path(folder, "0").read_text())
    assert error == "LostPeerError" and seconds < SOON


@THOROUGH
def test_a_step_of_replicas_is_tried_again() -> None:
    """Ranks that share no piece with the one that failed hear of it, too."""

    def fn() -> Any:
        expected = undisturbed(HybridGroup(on_device(), shard_size=2), 3)
        group = HybridGroup(on_device(), shard_size=2)
        leaves, ended = trained(group, 3, Fault("loss", bad_batch), float("inf"))
        return leaves == expected, ended

    for rank, (same, ended) in enumerate(on_ranks(fn, 4)):
        assert same
        assert ended.error == ("ValueError" if rank == 1 else "PeerError")
        assert ended.seconds < 2 * SOON  # from axis to axis


@pytest.mark.parametrize(
    ("fault", "hosts"),
    tiers([("killed", WAIT)], [("late", RUN), ("killed", RUN), ("late", WAIT)], rows=True),
)
def test_a_rank_is_lost_in_a_step(fault: str, hosts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All others name it. After that there is nothing to try again."""
    module = importlib.import_module("functorch_zero.groups.launch")  # the name is a function's
    monkeypatch.setattr(module, "_SECONDS_AFTER_FAILURE", 20.0)  # to write the file
    patience = float("inf") if hosts == WAIT else AHEAD
    limit = 20.0 if fault == "killed" else 3.0

    def happens() -> None:
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(limit + 3.0)

    def fn(folder: str) -> None:
        group = on_device(timeout=limit)
        _, ended = trained(group, 3, Fault("loss", happens), patience)
        Path(folder, str(group.rank)).write_text(json.dumps([ended, outcome(group.rejoin)]))

    with tempfile.TemporaryDirectory() as folder:
        with suppress(GroupError):  # that rank 1 has died
            on_ranks(fn, 4, folder)
        for rank in (0, 2, 3):
            step, again = json.loads(Path(folder, str(rank)).read_text())
            assert step[0] == again[0] == "LostPeerError"
            named = f"{'No word came from' if fault == 'killed' else 'Behind:'} rank 1 on {HOST}"
            assert named in again[1] and again[1] in step[1], (again, step)
            assert step[2] < (limit if fault == "late" else 0.0) + SOON
            assert again[2] < 0.1  # nobody comes back, so that nobody is waited for
