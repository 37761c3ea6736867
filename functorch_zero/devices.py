"""Numbers on devices, and copies to the host's memory, for which the host need not wait; and the
current device of new threads.

A copy from the host's memory to a device waits for all that the device has been given before. So
does a read of a device's value. A fill takes its number along, as an argument of the kernel.

Note [memory of the copies' stream]
-----------------------------------
What is brought is allocated on the copies' stream. So torch's allocator gives its memory to nobody
but a later copy on that stream, as soon as it is dropped, whatever the host is ahead of the GPU: a
peak doesn't depend on their speeds, as it does with `record_stream`. Work on other streams may
still read it then. So each copy begins behind all that their callers have queued.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec

import torch
from torch import Tensor

from .tree import has_values

P = ParamSpec("P")


def number_on(
    device: torch.device, number: Tensor | float, dtype: torch.dtype = torch.float64
) -> Tensor:
    """A number or a 0-d tensor as a 0-d tensor on the device, in no graph.

    The host waits for no device, unless the tensor lies on another one than this.

    >>> number_on(torch.device("cpu"), 0.5)
    tensor(0.5000, dtype=torch.float64)
    """
    if isinstance(number, Tensor):
        # Without values it is on its way at once
        if not number.is_cpu or device.type == "cpu" or not has_values(number):
            return number.detach().to(device, dtype)
        number = number.item()
    return torch.full((), number, dtype=dtype, device=device)


def on_this_device(fn: Callable[P, object]) -> Callable[P, None]:
    """`fn` for a new thread, with the accelerator that is current here.

    A new thread's own is the first one. On a machine with several, each rank would take memory of
    that one for nothing, and put marks into a queue that is not its own.
    """
    index = _current_index()

    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        if index is not None:
            torch.accelerator.set_device_index(index)
        fn(*args, **kwargs)

    return run


def _current_index() -> int | None:
    """The number of the current accelerator; None where this process has used none."""
    found = torch.accelerator.current_accelerator()
    if found is None:
        return None
    # Only to ask for it would take memory of a GPU that nobody uses
    is_initialized = getattr(torch.get_device_module(found), "is_initialized", None)
    if is_initialized is None or not is_initialized():
        return None
    return torch.accelerator.current_device_index()


def divided(flat: Tensor, divisor: Tensor) -> Tensor:
    """A tensor divided by a 0-d float64 one, in its own dtype. A device would cast the divisor to
    that dtype first, and a half holds no large sum: so halves are divided in float32."""
    wide = flat.to(torch.promote_types(flat.dtype, torch.float32))
    return (wide / divisor).to(flat.dtype)


def divide_(flat: Tensor, divisor: Tensor) -> None:
    """`divided` in place. Halves take room for a quotient meanwhile."""
    if flat.dtype.itemsize < torch.float32.itemsize:
        flat.copy_(divided(flat, divisor))
    else:
        flat.div_(divisor)


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
