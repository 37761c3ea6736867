"""Ranges that torch's profiler shows, named after units. While nobody profiles they cost a look at
a flag."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ._torch_private import profiler_enabled

NOTHING: AbstractContextManager[Any] = nullcontext()  # one for all, since steps ask often


def ranged(work: str, unit: str = "") -> AbstractContextManager[Any]:
    """Around some work: the range "fz.<work> <unit>" in a profile."""
    if not profiler_enabled():
        return NOTHING
    return torch.profiler.record_function(f"fz.{work} {unit}".rstrip())
