"""Each tier is a set of its own, and the tables that are crossed keep their pairs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.conftest import pytest_collection_modifyitems
from tests.tiers import FULL, THOROUGH, crossed


def test_marks_of_two_tiers_are_the_later_one(request: pytest.FixtureRequest) -> None:
    node = request.node
    node.add_marker(THOROUGH)
    node.add_marker(FULL)
    pytest_collection_modifyitems([node])
    assert [mark.name for mark in node.iter_markers()] == ["full"]


@pytest.mark.parametrize("lengths", [(3, 4), (2, 3, 4), (7, 4, 3), (4, 5, 4, 3)])
def test_crossed_tables_have_all_rows(lengths: tuple[int, ...]) -> None:
    axes = [range(length) for length in lengths]
    rows = [getattr(row, "values", row) for row in crossed(*axes)]
    assert sorted(rows) == [*itertools.product(*axes)]


@pytest.mark.parametrize("lengths", [(2, 3, 4), (7, 4, 3), (4, 5, 4, 3)])
@pytest.mark.parametrize("quick", [None, 1])
def test_without_the_full_tier_they_have_all_pairs(
    lengths: tuple[int, ...], quick: int | None
) -> None:
    axes = [range(length) for length in lengths]
    table = [row for row in crossed(*axes, quick=quick) if FULL not in getattr(row, "marks", ())]
    rows = [getattr(row, "values", row) for row in table]
    for i, j in itertools.combinations(range(len(axes)), 2):
        assert {(row[i], row[j]) for row in rows} == {*itertools.product(axes[i], axes[j])}


def test_with_few_quick_rows_the_others_are_thorough() -> None:
    def marked(rows: list[Any], mark: pytest.MarkDecorator) -> set[Any]:
        return {row.values for row in rows if mark in getattr(row, "marks", ())}

    axes = range(4), range(4)
    plain, few = crossed(*axes), crossed(*axes, quick=1)
    assert plain[:2] == [(1, 1), (3, 3)] and few[0] == (3, 3)
    assert marked(few, THOROUGH) == marked(plain, THOROUGH) | {(1, 1)}
    assert marked(few, FULL) == marked(plain, FULL)
