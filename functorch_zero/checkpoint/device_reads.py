"""Reads of GPUs' tensors in another thread than the one that writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import TypeVar

import torch

T = TypeVar("T")


class DeviceReads:
    """A moment on the caller's streams, after which another thread reads what lies on these GPUs.

    That thread reads on streams of its own. Its default stream would not wait for the caller's,
    and on the caller's each copy would queue between the kernels of training.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        # By GPU, the end of the work that is queued now
        self._written: dict[torch.device, torch.cuda.Event] = {}
        for device in devices:
            self._written[device] = torch.cuda.current_stream(device).record_event()

    def around(self, job: Callable[[], T]) -> Callable[[], T]:
        """The job as the thread that reads runs it."""

        def run() -> T:
            with ExitStack() as stack:
                for device, event in self._written.items():
                    # torch enters a stream by way of the current device
                    stack.enter_context(torch.cuda.device(device))
                    stream = torch.cuda.Stream(device)
                    stream.wait_event(event)
                    stack.enter_context(torch.cuda.stream(stream))
                return job()

        return run
