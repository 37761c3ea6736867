"""The tables of `compression.py`: ratios are of one round, a row that failed says how, and rows run
without any package but torch."""

from __future__ import annotations

from tests.benchmarks import compression
from tests.benchmarks.compression import BASE, ROWS, TABLES


def test_ratios_are_taken_within_a_round() -> None:
    row = {"sent": 2e6, "peak": 3e6, "losses": 1e-4, "updates": 0.02}
    taken = {BASE: [(1.0, 4.0), (10.0, 40.0)], "ours": [(2.0, 2.0), (20.0, 20.0)]}
    lines = compression.table("a table", {"ours": row, "theirs": "no GPU"}, taken).splitlines()
    assert lines[2] == (
        "| ours | 2.0 | 3.0 | 2.00 (2.00-2.00) | 0.50 (0.50-0.50) | 1e-04 | 2e-02 |"
    )
    assert lines[3].startswith("| theirs | `no GPU` |") and lines[3].count("|") == 8


def test_the_innermost_error_is_told() -> None:
    text = "in a callback: RuntimeError: in a callback: IndexError: use `x.item()` | no index\n  at"
    assert compression.story_of(text) == "IndexError: use 'x.item()' / no index"
    assert compression.story_of("no\n  GPU") == "no"
    assert len(compression.story_of("RuntimeError: " + "many words " * 20)) <= 100


def test_no_row_has_the_name_of_another() -> None:
    assert len(ROWS) == sum(map(len, TABLES.values()))
    assert BASE in ROWS
