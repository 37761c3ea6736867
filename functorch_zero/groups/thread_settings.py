"""The settings that torch keeps per thread. A thread that does a caller's work has the caller's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch


class ThreadSettings(NamedTuple):
    """The caller's, taken by `now` and put into effect in another thread by `applied`."""

    grad: bool
    inference: bool
    device: torch.device

    @classmethod
    def now(cls) -> ThreadSettings:
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            device=torch.get_default_device(),
        )

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            if self.device.type != "cpu":
                stack.enter_context(self.device)
            stack.enter_context(torch.set_grad_enabled(self.grad))
            yield
