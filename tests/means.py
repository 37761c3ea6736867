"""Means of ranks, for tests that look at what is sent with them."""

from __future__ import annotations

from typing import Any

import torch

from functorch_zero.groups.mesh import ONLY_COPY
from functorch_zero.sharded.average import Means, compare_words, means_of, start_means
from functorch_zero.step.loss import constants
from functorch_zero.step.reminder import Reminder


def average(
    metrics: Any, weight: Any, group: Any, log: Any = (), flags: Any = (), copy: Any = ONLY_COPY
) -> Means:
    """Means of ranks on the CPU, as an evaluation takes them."""
    found, _ = average_with_flags(metrics, weight, group, log, flags, copy)
    return found


def average_with_flags(
    metrics: Any, weight: Any, group: Any, log: Any, flags: Any, copy: Any = ONLY_COPY
) -> tuple[Means, list[bool]]:
    """The means, and the flags that any rank has raised."""
    means = start_means(constants(metrics), weight, group, torch.device("cpu"))
    raised = compare_words(means, group, log, [], Reminder(), flags)
    return means_of(means, group, copy), raised
