"""Rows of a leaf's update, as ids and values: what they are as a dense one, and sums of them."""

from __future__ import annotations

import torch

from functorch_zero.layout.extent import Rows, elements

NONE = Rows(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 2), 5)


def test_sums_are_those_of_dense_ones() -> None:
    """Ids that come several times, in one sum or in two, and none at all."""
    parts = [
        (torch.tensor([4, 0, 4]), torch.randn(3, 2)),
        (torch.zeros(0, dtype=torch.int64), torch.zeros(0, 2)),
        (torch.tensor([0, 4]), torch.randn(2, 2)),
        (torch.tensor([1, 0]), torch.randn(2, 2)),
    ]
    rows, dense = NONE, torch.zeros(5, 2)
    for ids, values in parts:
        rows = rows.plus(ids, values)
        dense.index_add_(0, ids, values)
    assert rows.ids.tolist() == [0, 1, 4]
    assert torch.equal(rows.dense(), dense.view(-1))
    assert torch.equal(elements(rows), dense[[0, 1, 4]]) and elements(dense) is dense
    flat = torch.randn(12)  # of six rows: the last is padding
    expected = flat + torch.cat([dense.view(-1), torch.zeros(2)])
    rows.add_to(flat)
    assert torch.equal(flat, expected)


def test_touched_rows_are_not_all_zeros() -> None:
    values = torch.tensor([[0.0, 0.0], [0.0, torch.nan], [-0.0, 0.0], [0.0, 1.0]])
    rows = Rows(torch.tensor([0, 2, 3, 4]), values, 5).touched()
    assert rows.ids.tolist() == [2, 4] and rows.values[:, 1].isnan().tolist() == [True, False]


def test_a_plan_has_at_most_all_rows() -> None:
    """Without values each id may be another row's."""
    rows = Rows(NONE.ids.to("meta"), NONE.values.to("meta"), 5)
    for most in (3, 5):
        ids = torch.zeros(3, dtype=torch.int64, device="meta")
        rows = rows.plus(ids, torch.zeros(3, 2, device="meta"))
        assert rows.values.shape == (most, 2)
    assert rows.dense().shape == (10,) and rows.touched().values.shape == (5, 2)
