"""Numbers on devices, of which the host need not wait.

A copy from the host's memory to a device waits for all that the device has been given before. So
does a read of a device's value. A fill takes its number along, as an argument of the kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor


def number_on(
    device: torch.device, number: Tensor | float, dtype: torch.dtype = torch.float64
) -> Tensor:
    """A number or a 0-d tensor as a 0-d tensor on the device, in no graph.

    The host waits for no device, unless the tensor lies on another one than this.

    >>> number_on(torch.device("cpu"), 0.5)
    tensor(0.5000, dtype=torch.float64)
    """
    if isinstance(number, Tensor) and (not number.is_cpu or device.type == "cpu"):
        return number.detach().to(device, dtype)
    value = number.item() if isinstance(number, Tensor) else number
    return torch.full((), value, dtype=dtype, device=device)
