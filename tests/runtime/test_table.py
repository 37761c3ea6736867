"""Rows of a table between ranks, by themselves: unique ids, rows there, gradients back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from functorch_zero.groups import SingleRank, counted, run_ranks
from functorch_zero.groups.mesh import Axis
from functorch_zero.layout.layout import Bucket, Cut
from functorch_zero.runtime.table import Lookup, Reading, TableFlats
from tests.tiers import drawn

D = torch.float64
COLUMNS = 3


def piece_of(table: Tensor, axis: Axis, **options: Any) -> TableFlats:
    """A rank's rows of a table, as a pass has them."""
    rows = -(-len(table) // axis.size)
    flat = table.new_zeros(rows * axis.size, COLUMNS)
    flat[: len(table)] = table
    cut = Cut(level=4, num_pieces=axis.size, num_held=axis.size, by_rows=True)
    bucket = Bucket(
        name="emb[float64]",
        dtype=table.dtype,
        trainable=True,
        leaves=(0,),
        shapes=(tuple(table.shape),),
        offsets=(0,),
        piece=rows * COLUMNS,
        cut=cut,
        **options,
    )
    own = flat.view(axis.size, -1)[axis.rank]
    return TableFlats(own, bucket, axis, [], "emb", axis.rank)


@drawn(data=st.data())
def test_rows_there_and_gradients_back(data: Any) -> None:
    """Each rank gets the rows that it names, and the holders get the sums of all gradients."""
    ranks, rows = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    numbers = st.lists(st.integers(0, rows - 1), max_size=6)
    ids = [torch.tensor(data.draw(numbers), dtype=torch.int64) for _ in range(ranks)]
    table = torch.arange(rows * COLUMNS, dtype=D).view(rows, COLUMNS)

    def run(group: Any) -> Tensor:
        flats = piece_of(table, Axis("shard", group))
        asked, places = flats.ask(ids[group.rank])
        sums = torch.zeros_like(flats.rows)
        lookup = Lookup(
            flats, asked, lambda at, grads: sums.index_add_(0, at, grads), lambda g: 2 * g
        )
        found = lookup.there(torch.zeros(()))
        assert torch.equal(found[places], table[ids[group.rank]])
        # Each use of a row adds its id's number
        grads = torch.zeros_like(found).index_add_(
            0, places, torch.ones(len(places), COLUMNS, dtype=D) * (1 + group.rank)
        )
        lookup.back(grads)
        return sums

    held = torch.cat(run_ranks(run, ranks))
    expected = torch.zeros(len(held), COLUMNS, dtype=D)
    for rank, own in enumerate(ids):
        expected.index_add_(0, own, torch.full((len(own), COLUMNS), 2.0 * (1 + rank), dtype=D))
    assert torch.equal(held, expected)


def test_ids_of_any_shape() -> None:
    ids = torch.tensor([[5, 1], [1, 3]], dtype=torch.int32)
    asked, places = Reading().ask(ids, rows_per_rank=2, num_ranks=4)
    assert asked.ids.tolist() == [1, 3, 5] and asked.counts == [1, 1, 1, 0]
    assert places.tolist() == [[2, 0], [0, 1]] and places.dtype == torch.int32
    none, _ = Reading().ask(ids[:0], rows_per_rank=2, num_ranks=4)
    assert none.ids.tolist() == [] and none.counts == [0, 0, 0, 0]


def test_a_frequent_row_travels_once() -> None:
    """And only rows that others hold travel: 4 of each rank's 5."""
    table = torch.zeros(10, COLUMNS, dtype=D)

    def run(group: Any) -> int:
        watched = counted(group)
        flats = piece_of(table, Axis("shard", watched))
        ids = torch.tensor([1 - group.rank] * 100 + [5, 6, 7, 8])
        asked, _ = flats.ask(ids)
        Lookup(flats, asked, None, lambda g: g).there(torch.zeros(()))
        return sum(call.sent_bytes for call in watched.calls if call.dtype == D)

    assert run_ranks(run, 2) == [COLUMNS * 8, 4 * COLUMNS * 8]


def test_the_same_data_travel_back_nowhere() -> None:
    table = torch.zeros(5, COLUMNS, dtype=D)

    def run(group: Any) -> Tensor:
        watched = counted(group)
        flats = piece_of(table, Axis("shard", watched, holds_different_data=False))
        asked, _ = flats.ask(torch.tensor([0, 3, 4]))
        sums = torch.zeros_like(flats.rows)
        lookup = Lookup(flats, asked, lambda at, grads: sums.index_add_(0, at, grads), lambda g: g)
        lookup.there(torch.zeros(()))
        watched.reset()
        lookup.back(torch.ones(3, COLUMNS, dtype=D))
        assert not watched.calls
        return sums

    held = torch.cat(run_ranks(run, 2))
    assert held[:, 0].tolist() == [1, 0, 0, 1, 1, 0]


@pytest.mark.parametrize("wrong", [-1, 5])
def test_a_row_that_is_not_there(wrong: int) -> None:
    flats = piece_of(torch.zeros(5, COLUMNS, dtype=D), Axis("shard", SingleRank()))
    with pytest.raises(
        IndexError, match=f"path emb, expected ids from 0 to 4, got {wrong}, on rank 0"
    ):
        flats.ask(torch.tensor([0, wrong]))
