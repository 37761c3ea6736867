"""Each tier is a set of its own, and the tables that are crossed keep their pairs."""

from __future__ import annotations

import itertools

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
def test_without_the_full_tier_they_have_all_pairs(lengths: tuple[int, ...]) -> None:
    axes = [range(length) for length in lengths]
    table = [row for row in crossed(*axes) if FULL not in getattr(row, "marks", ())]
    rows = [getattr(row, "values", row) for row in table]
    for i, j in itertools.combinations(range(len(axes)), 2):
        assert {(row[i], row[j]) for row in rows} == {*itertools.product(axes[i], axes[j])}
