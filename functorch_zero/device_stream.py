"""A GPU's part in copies to and from the host's memory: what tests play on a CPU.

Note [memory of the copies' stream]
-----------------------------------
What is brought is allocated on the copies' stream. So torch's allocator gives its memory to nobody
but a later copy on that stream, as soon as it is dropped, whatever the host is ahead of the GPU: a
peak doesn't depend on their speeds, as it does with `record_stream`. Work on other streams may
still read it then. So each copy begins behind all that their callers have queued.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class DeviceStream:
    """A stream of its own on one GPU, for copies, and memory of the host that they reach at full
    speed, while the host goes on."""

    def __init__(self, device: torch.device):
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._callers: list[Any] = []  # streams on which somebody has brought or left, few

    def pinned(self, like: Tensor) -> Tensor:
        """Memory of the host, of this shape and dtype. Torch gives it to nobody else before the
        copies that it has seen of it have ended."""
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in such memory."""
        return tensor.device.type == "cpu" and tensor.is_pinned()

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies on the GPU."""
        return tensor.device == self.device

    def copied(self, source: Tensor) -> Tensor:
        """Start to copy a tensor to the GPU, to memory of the stream's own."""
        with self._behind_callers():
            made = torch.empty(source.shape, dtype=source.dtype, device=self.device)
            return made.copy_(source, non_blocking=True)

    def copy(self, source: Tensor, into: Tensor) -> None:
        """Start to copy a tensor of the GPU to pinned memory."""
        with self._behind_callers():
            into.copy_(source, non_blocking=True)

    @contextmanager
    def _behind_callers(self) -> Iterator[None]:
        """Queue on the stream, behind what the callers have queued so far. See Note [memory of the
        copies' stream]."""
        caller = torch.cuda.current_stream(self.device)
        if caller not in self._callers:
            self._callers.append(caller)
        for one in self._callers:
            self._stream.wait_stream(one)
        with torch.cuda.stream(self._stream):
            yield

    def end(self) -> Any:
        """An event behind all that is queued by now."""
        return self._stream.record_event()

    def hold_caller(self, event: Any) -> None:
        """Let work that the caller queues from now on wait for an event."""
        torch.cuda.current_stream(self.device).wait_event(event)

    def synchronize(self) -> None:
        """The host waits until all copies have ended."""
        self._stream.synchronize()
