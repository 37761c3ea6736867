"""Copies of a GPU's tensors beside its work, over streams that are played: a copy is made when
somebody waits for it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from functorch_zero import checkpoint
from functorch_zero.checkpoint import device_copies
from functorch_zero.groups.single import SingleRank
from functorch_zero.sharded.api import shard
from functorch_zero.sharded.update import PreparedUpdate
from tests.checkpoints import assert_same, load_on, make_step, trained
from tests.models import ZOO
from tests.tiers import tiers


class Played:
    """A GPU with two streams, the caller's and that of the copies. Tensors of the CPU stand for its
    own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.read = threading.Event()  # when the host is let through to the copies
        self._late: list[Callable[[], object]] = []  # copies that nobody has waited for
        self._current = threading.local()
        monkeypatch.setattr(device_copies, "_is_on_gpu", lambda tensor: True)
        monkeypatch.setattr(device_copies, "_pinned_like", torch.empty_like)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(self, "caller's"))
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(self, "copies'"))
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: None)
        copy = Tensor.copy_

        def copy_later(into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
            if not non_blocking:
                return copy(into, source)
            assert getattr(self._current, "name", "") == "copies'"
            # Its version counted when it was queued
            self._late.append(lambda: copy(into.data, source))
            return into

        monkeypatch.setattr(Tensor, "copy_", copy_later)

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        self._current.name = stream.name
        yield
        del self._current.name

    def run_late(self) -> None:
        late, self._late = self._late, []
        with torch.no_grad():
            for copy in late:
                copy()


class Stream:
    """One stream of it."""

    def __init__(self, gpu: Played, name: str) -> None:
        self.gpu, self.name = gpu, name

    def record_event(self) -> Event:
        return Event(self.gpu, self.name)

    def wait_event(self, event: Event) -> None:
        self.gpu.done.append(f"the {self.name} waits for the {event.stream}")
        if event.stream == "copies'":
            self.gpu.run_late()


class Event:
    """The end of a stream's queue, when it was made."""

    def __init__(self, gpu: Played, stream: str) -> None:
        self.gpu, self.stream = gpu, stream

    def synchronize(self) -> None:
        assert self.gpu.read.wait(20)
        self.gpu.run_late()


HOLDS = "the caller's waits for the copies'"


@pytest.mark.parametrize("level", tiers([3], [0]))
def test_the_next_update_waits_for_the_copies_of_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: int
) -> None:
    """On its stream. The host waits in the thread of the save alone, and forward for nothing."""
    base, params, buffers = make_step()
    step = shard(base, level=level, group=SingleRank(), donate=True)
    state = trained(step, params, buffers, 1)
    want = step.unshard(state)
    gpu = Played(monkeypatch)
    update = PreparedUpdate.run

    def noted(*args: Any, **named: Any) -> Any:
        gpu.done.append("update")
        return update(*args, **named)

    monkeypatch.setattr(PreparedUpdate, "run", noted)
    saving = checkpoint.async_save(tmp_path, step, state)
    # Copies start behind what the caller has queued: one wait for all, since each costs time here
    assert gpu.done == ["the copies' waits for the caller's"]
    gpu.done.clear()
    state, _ = step(state, ZOO["mlp"].batches(1, 12)[0])
    assert gpu.done == [HOLDS, "update"]
    state, _ = step(state, ZOO["mlp"].batches(1, 12)[0])
    assert gpu.done == [HOLDS, "update", "update"], "once"
    gpu.read.set()
    saving.result(20)
    assert_same(want, load_on(tmp_path, 1, level))
