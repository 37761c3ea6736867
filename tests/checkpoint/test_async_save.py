"""Saving beside training: a snapshot, in order, and no failure lost."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import optree
import pytest
import torch

from functorch_zero import checkpoint
from functorch_zero.checkpoint import CheckpointError, block_io
from functorch_zero.checkpoint.snapshot import Snapshot, devices_of, snapshot_of
from functorch_zero.errors import MismatchError, PeerError
from functorch_zero.groups import ProcessGroup, launch, run_ranks
from functorch_zero.groups.protocol import Group
from functorch_zero.groups.single import SingleRank
from functorch_zero.sharded.api import shard
from functorch_zero.step.state import State
from tests.checkpoints import assert_same, load_on, make_step, on_ranks, trained
from tests.local import local_leaves
from tests.models import ZOO, even, split
from tests.tiers import THOROUGH, thinned, tiers


class Gate:
    """Holds every write until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()
        write = block_io.write_all

        def wait_and_write(*args: Any) -> None:
            self.reached.set()
            assert self.open.wait(20)
            write(*args)

        monkeypatch.setattr(block_io, "write_all", wait_and_write)


def solo_step(*, donate: bool) -> tuple[Any, State]:
    base, params, buffers = make_step()
    step = shard(base, level=3, group=SingleRank(), donate=donate)
    return step, trained(step, params, buffers, 1)


@pytest.mark.parametrize("donate", tiers([True], [False]))
def test_training_goes_on_and_the_old_state_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, donate: bool
) -> None:
    """C7."""
    gate = Gate(monkeypatch)
    step, state = solo_step(donate=donate)
    want = step.unshard(state)
    saving = checkpoint.async_save(tmp_path, step, state, user="mine")
    assert gate.reached.wait(20)
    for batch in ZOO["mlp"].batches(3, 12):
        state, _ = step(state, batch)
    assert not saving.done and checkpoint.latest(tmp_path) is None
    with pytest.raises(TimeoutError):
        saving.result(0.01)
    gate.open.set()
    assert saving.result(20) == tmp_path / "step-000000000001"
    assert saving.done and saving.progress.written == saving.progress.total > 0
    assert_same(want, load_on(tmp_path, 2, 3))


def test_without_donation_nothing_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from functorch_zero.checkpoint.snapshot import Snapshot

    copies = []
    original = Snapshot.copied
    monkeypatch.setattr(Snapshot, "copied", lambda self: copies.append(1) or original(self))
    for donate in (False, True):
        step, state = solo_step(donate=donate)
        checkpoint.async_save(tmp_path / str(donate), step, state).result(20)
    assert copies == [1]


def test_a_state_changed_in_place_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    step, state = solo_step(donate=False)
    saving = checkpoint.async_save(tmp_path, step, state)
    assert gate.reached.wait(20)
    with torch.no_grad():
        optree.tree_leaves(state.params)[0].add_(1)
    gate.open.set()
    with pytest.raises(CheckpointError, match="was changed in place while it was being saved"):
        saving.result(20)
    assert checkpoint.latest(tmp_path) is None


def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(block_io, "write_all", full)


@pytest.mark.parametrize("asked", tiers(["save", "async_save"], ["result", "wait"]))
def test_a_failure_is_raised_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    step, state = solo_step(donate=False)
    with monkeypatch.context() as context:
        failing(context)
        saving = checkpoint.async_save(tmp_path, step, state)
        saving._thread.join()
    calls: dict[str, Any] = {
        "result": lambda: saving.result(),
        "save": lambda: checkpoint.save(tmp_path, step, state),
        "async_save": lambda: checkpoint.async_save(tmp_path, step, state),
        "wait": lambda: checkpoint.wait_for_saves(step),
    }
    with pytest.raises(CheckpointError, match="No space left"):
        calls[asked]()
    checkpoint.wait_for_saves(step)  # told once
    checkpoint.async_save(tmp_path, step, state).result()
    assert checkpoint.latest(tmp_path) == 1


@pytest.mark.parametrize("guilty", thinned([(1,), (0,), (0, 1)]))
def test_a_failure_is_raised_by_the_next_step(tmp_path: Path, guilty: tuple[int, ...]) -> None:
    """C7. By every rank, before it touches the state, whichever rank's disk is full; then training
    goes on."""

    def run() -> list[Any]:
        group = ProcessGroup(timeout=20)
        base, params, buffers = make_step()
        step = shard(base, level=2, group=group)
        state = trained(step, params, buffers, 1)
        before = [x.detach().clone() for x in local_leaves(state)]
        batch = split(ZOO["mlp"].batches(1, 12)[0], even(12, 2))[group.rank]
        with pytest.MonkeyPatch.context() as context:
            if group.rank in guilty:
                failing(context)
            saving = checkpoint.async_save(tmp_path, step, state)
            saving._thread.join()
        group.barrier()
        with pytest.raises(CheckpointError, match="No space left") as caught:
            step(state, batch)
        same = all(torch.equal(a, b) for a, b in zip(before, local_leaves(state), strict=True))
        state, _ = step(state, batch)
        checkpoint.async_save(tmp_path, step, state).result(20)
        return [str(caught.value), same, int(state.step)]

    results = launch(run, 2, start_method="fork", timeout=40)
    assert results[0] == results[1] and results[0][1:] == [True, 2]
    assert checkpoint.latest(tmp_path) == 2


def test_two_saves_are_in_order(tmp_path: Path) -> None:
    step, state = solo_step(donate=True)
    first = checkpoint.async_save(tmp_path, step, state)
    state, _ = step(state, ZOO["mlp"].batches(1, 12)[0])
    second = checkpoint.async_save(tmp_path, step, state)
    assert first.done
    second.result(20)
    checkpoint.wait_for_saves(step)
    assert checkpoint.verify(tmp_path) == {1: [], 2: []}


def test_ranks_that_are_threads_save_at_once(tmp_path: Path) -> None:
    def run(step: Any, state: Any) -> None:
        saving = checkpoint.async_save(tmp_path, step, state)
        assert saving.done
        saving.result()
        again = checkpoint.async_save(tmp_path, step, state)
        with pytest.raises(CheckpointError, match="exists"):
            checkpoint.wait_for_saves(step)
        assert again.done

    on_ranks(3, 2, run)


def test_a_mistake_is_told_to_all_ranks(tmp_path: Path) -> None:
    base, params, buffers = make_step()

    def run(group: Group) -> str:
        step = shard(base, level=3, group=group)
        state = step.init(params, buffers)
        saving = checkpoint.async_save(tmp_path, step, state, user={1} if group.rank else None)
        with pytest.raises(CheckpointError) as caught:
            saving.result()
        return str(caught.value)

    texts = run_ranks(run, 2)
    assert texts[0] == texts[1] and "rank 1: TypeError: user must" in texts[0]


@pytest.mark.parametrize("name", tiers(["step", "load"], ["save", "async_save"]))
def test_a_failure_that_one_rank_has_heard_of_is_raised_on_all(tmp_path: Path, name: str) -> None:
    """Else that one goes on alone, to wait for the others. Then the call is made once more."""
    base, params, buffers = make_step()

    def run(group: Group) -> list[str]:
        step = shard(base, level=2, group=group, donate=False)
        state = step.init(params, buffers)
        checkpoint.save(tmp_path, step, state.replace(step=9))
        failed = checkpoint.async_save(tmp_path, step, state, user={1} if group.rank else None)
        if group.rank == 0:
            with pytest.raises(CheckpointError, match="TypeError"):
                failed.result()
        batch = split(ZOO["mlp"].batches(1, 12)[0], even(12, 2))[group.rank]
        calls: dict[str, Any] = {
            "step": lambda: step(state, batch),
            "save": lambda: checkpoint.save(tmp_path, step, state),
            "async_save": lambda: checkpoint.async_save(tmp_path, step, state).result(),
            "load": lambda: checkpoint.load(tmp_path, step, like=state),
        }
        with pytest.raises(
            PeerError if (name, group.rank) == ("step", 0) else CheckpointError
        ) as e:
            calls[name]()
        calls[name]()
        checkpoint.wait_for_saves(step)
        return str(e.value)

    told = run_ranks(run, 2)
    assert all("TypeError" in text for text in told[name == "step" :])


@THOROUGH
def test_collectives_of_training_meanwhile(tmp_path: Path) -> None:
    """C7, over gloo: the save has a group of its own."""

    def run() -> list[torch.Tensor]:
        group = ProcessGroup(timeout=20)
        base, params, buffers = make_step()
        step = shard(base, level=3, group=group)
        state = trained(step, params, buffers, 1)
        saving = checkpoint.async_save(tmp_path, step, state)
        want = step.unshard(state)
        for _ in range(30):
            for batch in ZOO["mlp"].batches(1, 12):
                state, _ = step(state, split(batch, even(12, 2))[group.rank])
            if int(state.step) % 10 == 0:
                checkpoint.async_save(tmp_path, step, state)
        checkpoint.wait_for_saves(step)
        assert saving.done
        return [x.detach().clone() for x in optree.tree_leaves(want)]

    want = launch(run, 2, start_method="fork", timeout=40)[0]
    assert checkpoint.verify(tmp_path) == {1: [], 10: [], 20: [], 30: []}
    got = optree.tree_leaves(load_on(tmp_path, 3, 1, count=1))
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


SCRIPT = """
import sys, time, torch
from functorch_zero import checkpoint, optim
from functorch_zero.checkpoint import block_io
from functorch_zero import train_step

write = block_io.write_all
def slow(*args):
    time.sleep(0.3)
    if sys.argv[2] == "fail":
        raise OSError(28, "No space left on device")
    write(*args)
block_io.write_all = slow

step = train_step(lambda p, b, x: p["w"].sum(), optim.sgd(0.1))
checkpoint.async_save(sys.argv[1], step, step.init({"w": torch.ones(3, requires_grad=True)}))
print("left")
"""


@pytest.mark.parametrize("how", tiers(thorough=["fail", "well"]))
def test_leaving_the_program_waits(tmp_path: Path, how: str) -> None:
    command = [sys.executable, "-W", "error", "-c", SCRIPT, str(tmp_path), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout == "left\n", done.stderr
    assert checkpoint.latest(tmp_path) == (0 if how == "well" else None)
    assert ("an async_save failed: " in done.stderr and "No space left" in done.stderr) == (
        how == "fail"
    )


class FakeGPU:
    """Streams and events of a GPU, by name, and a list of all that was queued on them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[tuple[str, str, str]] = []  # (thread, stream, what)
        self._streams = threading.local()  # a thread's current one
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.stream())
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(self, "own"))
        monkeypatch.setattr(torch.cuda, "stream", self.use)
        monkeypatch.setattr(torch.cuda, "device", self.enter)
        # It is the second GPU that the rank uses, and a new thread's own is the first one
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        accelerator = torch.accelerator
        monkeypatch.setattr(accelerator, "current_accelerator", lambda: torch.device("cuda"))
        monkeypatch.setattr(accelerator, "current_device_index", lambda: 1)
        monkeypatch.setattr(accelerator, "set_device_index", lambda n: self.queue(f"use {n}"))

    def stream(self) -> FakeStream:
        return getattr(self._streams, "now", FakeStream(self, "default"))

    @contextlib.contextmanager
    def use(self, stream: FakeStream) -> Iterator[None]:
        before, self._streams.now = self.stream(), stream
        yield
        self._streams.now = before

    @contextlib.contextmanager
    def enter(self, device: torch.device) -> Iterator[None]:
        self.queue(f"enter {device}")
        yield

    def queue(self, what: str) -> None:
        self.done.append((threading.current_thread().name, self.stream().name, what))


class FakeStream(NamedTuple):
    gpu: FakeGPU
    name: str

    def record_event(self) -> str:
        self.gpu.queue("record")
        return f"event on {self.name}"

    def wait_event(self, event: str) -> None:
        self.gpu.queue(f"{self.name} waits for {event}")


@pytest.mark.parametrize("on_gpu", [True, False])
def test_the_thread_of_a_save_reads_a_gpu_on_a_stream_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_gpu: bool
) -> None:
    """After what the step has queued; here on a stream of the user's."""
    gpu = FakeGPU(monkeypatch)
    devices = {torch.device("cuda", 1)} if on_gpu else set()
    # By name, since `checkpoint.save` is the function
    module = importlib.import_module("functorch_zero.checkpoint.save")
    monkeypatch.setattr(module, "devices_of", lambda snapshot: devices)
    chunks_of = block_io.chunks_of

    def noting(flat: torch.Tensor) -> Iterator[torch.Tensor]:
        gpu.queue("read")
        return chunks_of(flat)

    monkeypatch.setattr(block_io, "chunks_of", noting)
    step, state = solo_step(donate=False)
    with gpu.use(FakeStream(gpu, "user's")):
        checkpoint.async_save(tmp_path, step, state).result(20)
    thread = "functorch_zero save"
    reads = [entry for entry in gpu.done if entry[2] == "read"]
    assert {*reads} == {(thread, "own" if on_gpu else "default", "read")}
    before = gpu.done[: -len(reads)]
    own = [(thread, "default", "use 1")]
    if on_gpu:
        own.append((thread, "default", "enter cuda:1"))
        called = [("MainThread", "user's", "record")]
        called.append(("MainThread", "user's", "own waits for event on user's"))
        assert before == called + own
    else:
        assert before == own


def test_the_devices_of_a_snapshot() -> None:
    step, state = solo_step(donate=False)
    assert devices_of(snapshot_of(step, state, None)) == set()


def test_a_step_may_be_copied_beside_a_save(tmp_path: Path) -> None:
    """A copy has saves of its own."""
    step, params, buffers = make_step()
    saving = checkpoint.async_save(tmp_path, step, step.init(params, buffers))
    copied = copy.deepcopy(step)
    assert copied.background.task is None
    saving.result()
    with pytest.raises(CheckpointError, match="exists"):
        checkpoint.async_save(tmp_path, copied, copied.init(params, buffers)).result()
    checkpoint.wait_for_saves(step)


def test_an_error_of_ranks_that_differ_holds_no_snapshot(tmp_path: Path) -> None:
    """A saving has its error until the next save, and a snapshot is a copy of the state."""

    users = "that of rank 0", "that of rank 1"

    def save(step: Any, state: State) -> checkpoint.Saving:
        saving = checkpoint.async_save(tmp_path, step, state, user=users[step.group.rank])
        with pytest.raises(MismatchError, match="the ranks save different things: user is"):
            saving.result()
        return saving

    savings = on_ranks(2, 3, save)
    gc.collect()
    alive = [x for x in gc.get_objects() if isinstance(x, Snapshot) and x.user in users]
    assert all(saving.failed for saving in savings) and not alive
