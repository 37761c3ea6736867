"""Global tables that a schedule reads by their methods are compared between ranks, too."""

from __future__ import annotations

import numpy as np
import torch

from functorch_zero.optim.naming import described

RATES = {0: 0.5}
TABLE = np.array([0.1, 0.2])


def by_get(count: torch.Tensor) -> float:
    return RATES.get(int(count), 0.1)


def by_mean(count: torch.Tensor) -> float:
    return float(TABLE[int(count) % 2] * TABLE.mean())


def test_a_table_that_is_read_by_a_method() -> None:
    before = described(by_get)
    RATES[0] = 0.25
    try:
        assert described(by_get) != before
    finally:
        RATES[0] = 0.5
    assert described(by_get) == before


def test_a_table_that_is_read_in_two_ways() -> None:
    before = described(by_mean)
    TABLE[1] = 0.3
    try:
        assert described(by_mean) != before
    finally:
        TABLE[1] = 0.2
    assert described(by_mean) == before
