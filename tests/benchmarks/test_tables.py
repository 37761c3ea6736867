"""The table of `tables.py`: its form, and rows that train the same model by whichever library."""

from __future__ import annotations

import statistics
import warnings

import pytest
import torch

import functorch_zero as fz
from tests.benchmarks import tables
from tests.benchmarks.rank import everyone
from tests.benchmarks.tables import RANKS, ROWS
from tests.tiers import THOROUGH


def test_bytes_have_one_digit_and_losses_four() -> None:
    row = {"sent MB": 128.27, "loss": 7.45098}
    assert tables.table({"ours": row, "theirs": row}).splitlines() == [
        "| two towers | sent MB | loss |",
        "|---|---:|---:|",
        "| ours | 128.3 | 7.4510 |",
        "| theirs | 128.3 | 7.4510 |",
    ]


def losses() -> dict[str, list[float]]:
    """Of each row's steps, means over ranks."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    size, found = tables.SIZES["tiny"], {}
    for label, make in ROWS.items():
        torch.manual_seed(0)
        step = make(tables.TwoTowers(size.num_rows))
        own = [tables.own_ratings(number, size) for number in range(3)]
        found[label] = [statistics.fmean(everyone(step(batch), RANKS)) for batch in own]
    return found


@THOROUGH
def test_rows_train_the_same_model() -> None:
    """All but the one with another optimizer, which begins alike."""
    found, _ = fz.launch(losses, RANKS, timeout=100)
    expected = found["DDP, dense gradients"]
    for label, got in found.items():
        assert got[0] == pytest.approx(expected[0], rel=1e-6), label
        assert (got == pytest.approx(expected, rel=1e-5)) == ("by_row" not in label), label
