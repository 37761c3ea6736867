"""Numbers on devices, for which the host need not wait; and the current device of new threads.

A copy from the host's memory to a device waits for all that the device has been given before. So
does a read of a device's value. A fill takes its number along, as an argument of the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

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
    """The same in place. Halves take room for a quotient meanwhile."""
    if flat.dtype.itemsize < torch.float32.itemsize:
        flat.copy_(divided(flat, divisor))
    else:
        flat.div_(divisor)
