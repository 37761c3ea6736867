"""Means of ranks, for tests that look at what is sent with them."""

from __future__ import annotations

from typing import Any

import torch

from functorch_zero.sharded.average import Report, report_of, start_means


def average(metrics: Any, weight: Any, group: Any, *words: Any, **how: Any) -> Report:
    """Means of ranks on the CPU, as an evaluation takes them."""
    means = start_means(metrics, weight, group, torch.device("cpu"))
    return report_of(means, group, *words, **how)
