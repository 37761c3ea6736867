"""The settings that torch keeps per thread. A thread that does a caller's work has the caller's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

Settings = Callable[[], AbstractContextManager[None]]


def settings_here() -> Settings:
    """This thread's, to be put into effect around work in another one."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    device = torch.get_default_device()

    @contextmanager
    def applied() -> Iterator[None]:
        on_device = nullcontext() if device.type == "cpu" else device
        with torch.inference_mode(inference), on_device, torch.set_grad_enabled(grad):
            yield

    return applied
