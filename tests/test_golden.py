"""A step's collectives and memory are the golden ones: tests/fixtures/golden.py says of what, and
writes them anew."""

from __future__ import annotations

import pytest
import torch

from tests.fixtures.golden import CASES, RANKS, Golden, read, short, without_options
from tests.tiers import thinned

CALLS, PEAKS = read("calls.json"), read("peaks.json")
SAME_TORCH = PEAKS.pop("torch") == torch.__version__.partition("+")[0]
# by how much the bytes of another torch may differ: its operators keep other things for backward
OTHER_TORCH = 0.05
REMEDY = (
    "If this is meant: PYTHONPATH=. python tests/fixtures/golden.py, and the commit says why "
    "the numbers change"
)


def test_every_case_has_its_numbers() -> None:
    """And no other case. (One that is missing can't be read.)"""
    assert CALLS.keys() == PEAKS.keys() == CASES.keys(), REMEDY


@pytest.mark.parametrize("name", thinned(CASES, 16))
def test_calls_and_peaks(name: str) -> None:
    golden = Golden(CASES[name])
    assert short(golden.calls) == CALLS[name], REMEDY
    if SAME_TORCH:
        assert golden.peaks == PEAKS[name], REMEDY
    else:
        assert golden.peaks == pytest.approx(PEAKS[name], rel=OTHER_TORCH), REMEDY


def test_the_numbers_tell_levels_and_options_apart() -> None:
    """So that a level or an option that does nothing can't pass."""
    plain = [CALLS[f"level {n}"]["first step"] for n in range(4)]
    assert plain[1] != plain[0] and plain[3] != plain[2]
    peaks = [PEAKS[f"level {n}"]["first step"] + PEAKS[f"level {n}"]["params"] for n in range(4)]
    assert sorted(peaks, reverse=True) == peaks and peaks[0] > peaks[1] > peaks[3]
    states = [PEAKS[f"level {n}"]["opt_state"] for n in range(4)]
    assert states[0] == pytest.approx(RANKS * states[1], rel=0.02), "but for padding"
    assert states[1] == states[2] == states[3]
    levels = {name: without_options(name) for name in CASES}
    same = [
        n for n, at in levels.items() if n != at and (CALLS[n], PEAKS[n]) == (CALLS[at], PEAKS[at])
    ]
    assert same == [
        "level 0, clipped by global norm",
        "level 0, all metrics",
        "level 0, two axes",
    ], "every rank has all and clips in place, and all ranks reduce together"
