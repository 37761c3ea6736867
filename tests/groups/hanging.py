"""NCCL's ways on a CPU: collectives that hang for good, and whose `wait` raises nothing.

`HangingGroup` is a backend of torch.distributed for a device, written in Python. gloo moves its
data. A collective that another rank doesn't start, or whose peer has died, never ends until it is
aborted. Its outputs are then anything. What a device would hold back is held back here by `wait`:
tensors on the CPU stand for the device's, and the host may read them at once.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from functorch_zero.groups import ProcessGroup, device_watch, torch_distributed

_FOREVER = timedelta(days=1000)  # gloo's own limit is no part of this
# gloo's groups end by waiting for what is under way, which NCCL's abort doesn't
_KEPT: list[dist.ProcessGroup] = []


class Device:
    """The device of this process: its queue, and what may happen to it."""

    def __init__(self) -> None:
        self.queue: list[HangingWork] = []
        # Seconds for which a host waits for a collective. It then goes on with wrong values, as a
        # host does that needs no values of its device.
        self.patience = float("inf")
        self.delay = 0.0  # seconds by which it is behind its host
        self.num_cut: list[int] = []  # by abort: the collectives that it cut off
        self.streams: list[torch.device | None] = []  # whose current stream was asked for

    def mark(self) -> Callable[[], bool]:
        """Whether all that is queued now has ended."""
        queued = list(self.queue)
        return lambda: all(work.has_ended() for work in queued)

    def current_stream(self, device: torch.device | None = None) -> Any:
        """The stand-in for `torch.accelerator.current_stream`."""
        self.streams.append(device)
        return "stream"


DEVICE = Device()


class CurrentDevice:
    """A stand-in for the part of torch.accelerator that says which one a thread uses."""

    def __init__(self) -> None:
        self._own = threading.local()  # by thread, from 0
        self.chosen: list[tuple[str, int]] = []  # by the name of a thread
        torch.cuda.is_initialized = lambda: True
        torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cuda")
        torch.accelerator.current_device_index = self.index
        torch.accelerator.set_device_index = self.choose

    def index(self) -> int:
        return getattr(self._own, "index", 0)

    def choose(self, index: int) -> None:
        self._own.index = index
        self.chosen.append((threading.current_thread().name, index))


class MarkOfDevice:
    """A stand-in for `torch.Event`."""

    def __init__(self, stream: Any) -> None:
        self.query = DEVICE.mark()


class HangingWork:
    """A collective in the device's queue, run by a thread."""

    def __init__(self, handle: Any, aborted: threading.Event) -> None:
        self._handle, self._aborted = handle, aborted
        self._succeeded = threading.Event()
        self._delay = DEVICE.delay
        DEVICE.queue = [work for work in DEVICE.queue if not work.has_ended()] + [self]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        # gloo's error stands for a kernel that waits for a peer that is gone
        with suppress(RuntimeError):
            time.sleep(self._delay)
            self._handle.wait()
            self._succeeded.set()

    def has_ended(self) -> bool:
        return self._succeeded.is_set() or self._aborted.is_set()

    def wait(self) -> None:
        """Never raises. A host that reads a number at once waits as long as this."""
        give_up = time.monotonic() + DEVICE.patience
        while not self.has_ended() and time.monotonic() < give_up:
            self._succeeded.wait(0.005)


class HangingGroup(dist.ProcessGroup):
    """The backend."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.timeout = timeout
        self.env = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING")
        self._inner = dist.ProcessGroupGloo(store, rank, size, timeout=_FOREVER)
        _KEPT.append(self._inner)
        self._aborted = threading.Event()

    def _start(self, method: str, *arguments: Any) -> HangingWork:
        assert not self._aborted.is_set()
        return HangingWork(getattr(self._inner, method)(*arguments), self._aborted)

    def getBackendName(self) -> str:
        return "hanging"

    def _allgather_base(self, out: Tensor, piece: Tensor) -> HangingWork:
        return self._start("_allgather_base", out, piece)

    def _reduce_scatter_base(self, out: Tensor, whole: Tensor) -> HangingWork:
        return self._start("_reduce_scatter_base", out, whole)

    def alltoall_base(self, *arguments: Any) -> HangingWork:
        return self._start("alltoall_base", *arguments)

    def allreduce(self, tensors: list[Tensor], *options: Any) -> HangingWork:
        return self._start("allreduce", tensors, *options)

    def broadcast(self, tensors: list[Tensor], options: Any) -> HangingWork:
        return self._start("broadcast", tensors, options)

    def abort(self) -> None:
        DEVICE.queue = [work for work in DEVICE.queue if not work.has_ended()]
        DEVICE.num_cut.append(len(DEVICE.queue))
        self._aborted.set()

    def shutdown(self) -> None:
        """At the end of the process."""


class OnDevice(ProcessGroup):
    """A group whose tensors are the device's, but for words of the host."""

    _from_host = False

    def _device_type(self, tensor: Tensor) -> str:
        return "cpu" if self._from_host else "cuda"

    @contextmanager
    def _words(self) -> Iterator[None]:
        before, self._from_host = self._from_host, True
        try:
            yield
        finally:
            self._from_host = before

    def _gather_host(self, kind: str, part: Tensor) -> Tensor:
        with self._words():
            return super()._gather_host(kind, part)

    def all_reduce(self, tensor: Tensor, op: Any = "sum") -> Any:
        if tensor.dtype != torch.int64:  # not the agreement of a step
            return super().all_reduce(tensor, op)
        with self._words():
            return super().all_reduce(tensor, op)


def on_device(timeout: float = 20.0) -> OnDevice:
    """All ranks, with gloo for their hosts and the hanging backend for their device."""
    dist.Backend.register_backend("hanging", HangingGroup, devices=["cuda"])
    # In a process of its own, which ends with the test
    torch_distributed.accelerator = lambda: "cuda"
    device_watch.mark_on = MarkOfDevice  # type: ignore[assignment]
    torch.accelerator.current_stream = DEVICE.current_stream
    parent = dist.new_group(backend="cuda:hanging")
    assert isinstance(parent, dist.ProcessGroup)
    return OnDevice(parent, timeout=timeout)
