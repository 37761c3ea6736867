"""Copies of GPUs' tensors in the host's memory, made beside the work of the caller's streams."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor


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
        on_gpus: defaultdict[torch.device, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for tensor in tensors:
            if _is_on_gpu(tensor):
                copies.append(_pinned_like(tensor))
                on_gpus[tensor.device].append((copies[-1], tensor))
            else:
                # copy=True: on the CPU `to` would give the tensor itself
                copies.append(tensor.to("cpu", copy=True))
        for device, pairs in on_gpus.items():
            stream = torch.cuda.Stream(device)
            # Behind the work that makes the tensors
            stream.wait_event(torch.cuda.current_stream(device).record_event())
            with torch.cuda.stream(stream):
                for copy, tensor in pairs:
                    copy.copy_(tensor, non_blocking=True)
                    tensor.record_stream(stream)
            self._ends[device] = stream.record_event()
        return copies

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
