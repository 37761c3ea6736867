"""`save` and `async_save`: the same job, now or beside training."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..devices import on_this_device
from ..groups import sibling
from ..groups.protocol import Group
from ..groups.single import SingleRank
from ..step.state import State
from .contents import Step, check_step, donates, group_of
from .device_copies import reading_beside
from .save_job import run_save
from .snapshot import Progress, Snapshot, devices_of, snapshot_of

PathLike = str | os.PathLike[str]


def save(
    root: PathLike, step: Step, state: State, *, user: Any = None, frozen: bool = True
) -> Path:
    """Save a state as `root/step-<its step>`, and return that folder. Every rank of the step's
    group calls this.

    Each rank writes the elements that only it has, and an equal share of those that all have,
    without padding, into one safetensors file, and its rows beside it. The folder gets its name
    when everything is on disk: a save that is killed leaves the old checkpoints or the new one.
    Three exchanges of JSON, some 350 bytes from each rank. Before the name, rank 0 reads all rows:
    every element must be there once. Memory beyond the state: 4 MiB, one leaf where it doesn't lie
    row by row, and on rank 0 32 bytes for each piece.

    Args:
        root: a folder that all ranks see; made if need be.
        step: the step function that the state belongs to.
        state: one that `step.init` or `step` returned.
        user: data of your own, the same on every rank: the data loader's position, say. Plain JSON
            (dicts by strings, lists), and infinities and NaNs besides. With all else in the
            manifest, it may have 64 MiB.
        frozen: False: without the params that a training step does not train. The checkpoint has
            their shapes and CRC-32s, and `load` takes them from `like`, where they must be the
            same. To make the CRCs, each rank reads its pieces once, and tells 30 bytes of each.

    Raises:
        CheckpointError: on every rank, with the same words: the step is saved already, the disk is
            full, `user` or the leaves are more than `load` would read, an `async_save` before this
            one failed.
        StructureError: the state is not one of this step, or has leaves that can't be saved.
        DonatedError: the state was used up by a step.
        MismatchError: ranks have different states or `user`; the first difference is named.
        TypeError: `user` holds something else, which is named.
    """

    def take() -> Snapshot:
        # The `async_save` under way ends first, and its error is raised rather than lost: on all
        # ranks, also where only some were told of it before
        wait_for_saves(step)
        return snapshot_of(step, state, user, frozen=frozen)

    return run_save(Path(root), group_of(step), take)


def async_save(
    root: PathLike, step: Step, state: State, *, user: Any = None, frozen: bool = True
) -> Saving:
    """Save as `save` does, but beside training: return when `state` may be used up.

    If the step donates, that is after a copy of this rank's share, on the CPU. A GPU's tensors are
    copied into pinned memory beside its work, and there the next step's update waits for them.
    Without donation it is at once, and the save holds on to the state's tensors. The save runs in a
    thread, on a group of its own, one at a time: this call waits for the one before. On ranks that
    are threads (`run_ranks`) it runs at once, here.

    An error is raised by `Saving.result`, by `wait_for_saves`, or by the next `save` or
    `async_save` with this step. The next call of a sharded `step` raises it too, on every rank
    before it touches the state. One that nobody asked for is printed when the program ends. Leaving
    the program waits for the save, but torch's groups must live until then: call
    `wait_for_saves(step)` before `destroy_process_group`.

    Raises: the error of the save before this one.
    """
    check_step(step)
    group = _group_beside(step)
    snapshot: Snapshot | None = None
    problem: Exception | None = None
    waits = True  # for the save before, whose error this call raises
    try:
        step.background.wait()
        waits = False
        # On the caller's thread: after this call the step may overwrite its storage
        snapshot = snapshot_of(step, state, user, frozen=frozen)
        # Without donation the tensors stay as they are, and the job checks that they did
        if donates(step):
            with torch.no_grad():
                snapshot = snapshot.copied()
            # Forward and backward of the next step go on meanwhile
            assert state.sharding is not None
            state.sharding.waits.append(snapshot.copies.hold_streams)
    except Exception as error:  # to be told to the other ranks, in the save's own exchange
        problem = error

    # Hands the only reference over: the thread frees the copy as soon as it is written
    def take() -> Snapshot:
        nonlocal snapshot
        if problem is not None:
            raise problem
        assert snapshot is not None
        taken, snapshot = snapshot, None
        taken.copies.wait()
        return taken

    job, progress = partial(run_save, Path(root), group, take), Progress()
    # Without a snapshot the job only tells the other ranks why
    devices = set[torch.device]()
    if snapshot is not None:
        devices, progress = devices_of(snapshot), snapshot.progress
    step.background.task = saving = Saving(reading_beside(devices, job), progress)
    # Ranks that were told of the error before have begun this save, which tells them why it fails
    saving.was_asked = waits
    saving.start(here=group is group_of(step) and not isinstance(group, SingleRank))
    if waits and problem is not None:
        raise problem
    return saving


def wait_for_saves(step: Step) -> None:
    """Wait for the `async_save` under way with this step, if there is one, and raise its error.

    Raises: as `save`.
    """
    if isinstance(step, Step):  # else the save or the load before which this is called says so
        step.background.wait()


class Saving:
    """An `async_save` under way."""

    def __init__(self, job: Callable[[], Path], progress: Progress) -> None:
        self.progress = progress
        self.was_asked = False  # whether somebody has asked how it ended
        self._job: Callable[[], Path] | None = job  # None once it runs: it holds the snapshot
        self._ended: Future[Path] = Future()
        run = on_this_device(self._run)
        self._thread = threading.Thread(target=run, name="functorch_zero save", daemon=False)

    @property
    def failed(self) -> bool:
        """Whether it has ended badly."""
        return self.done and self._ended.exception() is not None

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.done()

    def result(self, timeout: float | None = None) -> Path:
        """Wait for the end of the save, and return its folder.

        Raises: as `save`; TimeoutError after `timeout` seconds.
        """
        if self._thread.ident is not None:  # None: it ran in the call, or has not been started
            self._thread.join(timeout)
        if not self.done:
            raise TimeoutError(f"the save still runs after {timeout:g} s")
        self.was_asked = True
        return self._ended.result()

    def start(self, *, here: bool) -> None:
        """Run it in a thread, or here and now."""
        if here:
            self._run()
            return
        # Runs at exit, after the threads that aren't daemons have ended
        atexit.register(self._tell)
        self._thread.start()

    def _run(self) -> None:
        # The job holds the snapshot: gone from here, it is freed when the job ends
        job, self._job = self._job, None
        assert job is not None
        try:
            self._ended.set_result(job())
        except BaseException as error:
            self._ended.set_exception(error)

    def _tell(self) -> None:
        """At the end of the program, when all threads have ended."""
        if self.has_failed_untold():
            error = self._ended.exception()
            print(f"functorch_zero: an async_save failed: {error}", file=sys.stderr)

    def has_failed_untold(self) -> bool:
        """Whether it has failed, and nobody was told yet."""
        return self.failed and not self.was_asked

    def wait(self) -> None:
        """Wait for its end, and raise its error, if nobody was told."""
        was_asked = self.was_asked  # before `result` sets it
        try:
            self.result()
        except BaseException:
            if not was_asked:
                raise
        finally:
            atexit.unregister(self._tell)  # told, or raised just above


def _group_beside(step: Step) -> Group:
    """The group of saves beside training, since collectives of two threads must not meet on one.
    Thread ranks have no second one: theirs is the step's, and saves run in the call."""
    group = group_of(step)
    if step.background.group is None:
        own = None if isinstance(group, SingleRank) else sibling(group)
        step.background.group = group if own is None else own
    beside: Group = step.background.group
    return beside
