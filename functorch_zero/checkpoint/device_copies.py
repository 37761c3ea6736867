"""Copies of GPUs' tensors in the host's memory, made beside the work of the caller's streams."""

from __future__ import annotations

import torch
from torch import Tensor


class DeviceCopies:
    """Copies under way: into pinned memory, on a stream of their own per GPU, so that no host waits
    when they start. Those of a CPU's tensors are made at once.

    The host waits before it reads the copies (`wait`), and a stream before it writes over the
    tensors (`hold_streams`). Torch's allocator gives the tensors' memory to nobody else before.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._ends: dict[torch.device, torch.cuda.Event] = {}  # behind the last copy

    def start(self, tensor: Tensor) -> Tensor:
        """A copy on the CPU, right once `wait` has returned."""
        if not _is_on_gpu(tensor):
            # copy=True: on the CPU `to` would give the tensor itself
            return tensor.to("cpu", copy=True)
        device = tensor.device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        # Behind the work that makes the tensor
        stream.wait_event(torch.cuda.current_stream(device).record_event())
        copy = _pinned_like(tensor)
        with torch.cuda.stream(stream):
            copy.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)
        self._ends[device] = stream.record_event()
        return copy

    def wait(self) -> None:
        """Return when the copies are there."""
        for end in self._ends.values():
            end.synchronize()

    def hold_streams(self) -> None:
        """Let work that is queued from now on, on the current streams, wait for the copies."""
        for device, end in self._ends.items():
            torch.cuda.current_stream(device).wait_event(end)


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _pinned_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
