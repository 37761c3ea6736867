"""Copies and reads of GPUs' tensors beside the work of the caller's streams."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class DeviceCopies:
    """Copies under way: into pinned memory, on a stream of their own per GPU, so that no host waits
    when they start. Those of a CPU's tensors are made at once.

    The host waits before it reads the copies (`wait`), and a stream before it writes over the
    tensors (`hold_streams`). Torch's allocator gives the tensors' memory to nobody else before.

    Torch keeps pinned memory for the next copies of these sizes. So the first ones take seconds,
    in which the system finds the memory and locks it, and later ones some milliseconds.
    """

    def __init__(self) -> None:
        self._ends: dict[torch.device, torch.cuda.Event] = {}  # behind the last copy

    def start(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Copies on the CPU, right once `wait` has returned. Called once."""
        copies: list[Tensor] = []
        streams: dict[torch.device, torch.cuda.Stream] = {}
        for tensor in tensors:
            if not _is_on_gpu(tensor):
                # copy=True: on the CPU `to` would give the tensor itself
                copies.append(tensor.to("cpu", copy=True))
                continue
            if tensor.device not in streams:
                streams[tensor.device] = _stream_beside(tensor.device)
            stream = streams[tensor.device]
            with torch.cuda.stream(stream):
                copies.append(_pinned_like(tensor).copy_(tensor, non_blocking=True))
            tensor.record_stream(stream)
        self._ends = {device: stream.record_event() for device, stream in streams.items()}
        return copies

    def wait(self) -> None:
        """Return when the copies are there."""
        for end in self._ends.values():
            end.synchronize()

    def hold_streams(self) -> None:
        """Let work that is queued from now on, on the current streams, wait for the copies."""
        for device, end in self._ends.items():
            torch.cuda.current_stream(device).wait_event(end)


def reading_beside(devices: Iterable[torch.device], job: Callable[[], T]) -> Callable[[], T]:
    """The job as another thread runs it, which reads what lies on these GPUs now.

    That thread reads on streams of its own. Its default stream would not wait for the caller's, and
    on the caller's each copy would queue between the kernels of training.
    """
    streams = {device: _stream_beside(device) for device in devices}

    def run() -> T:
        with ExitStack() as stack:
            for device, stream in streams.items():
                # torch enters a stream by way of the current device
                stack.enter_context(torch.cuda.device(device))
                stack.enter_context(torch.cuda.stream(stream))
            return job()

    return run


def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    """A new stream, behind the work that is queued on the current one."""
    stream = torch.cuda.Stream(device)
    stream.wait_event(torch.cuda.current_stream(device).record_event())
    return stream


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _pinned_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
