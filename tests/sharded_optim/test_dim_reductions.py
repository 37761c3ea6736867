"""Sums over dims, and their answers put back, of leaves that are cut into boxes and each box into
pieces: equal to torch's on the whole leaf."""

from __future__ import annotations

import itertools
import re
from typing import Any, Literal

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from functorch_zero.groups import run_ranks
from functorch_zero.layout.extent import Box, Extent
from functorch_zero.optim.across import without
from functorch_zero.sharded_optim.dim_reductions import (
    boxes_of_range,
    reduce_piece,
    spread_over_piece,
)
from tests.tiers import drawn

Dims = tuple[int, ...]


@st.composite
def cuts(draw: Any) -> tuple[tuple[int, ...], list[Extent], Dims]:
    """A leaf's shape, the extents of all ranks and some dims. Each dim is cut in two or not at all;
    each box that makes, in two pieces, of which one may be empty."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    ranges = []
    for size in shape:
        middle = draw(st.integers(0, size))
        ranges.append(draw(st.sampled_from([[(0, size)], [(0, middle), (middle, size)]])))
    extents = []
    for box in itertools.product(*ranges):
        num = Extent(shape, 0, 0, box).in_box.numel
        middle = draw(st.integers(0, num))
        extents += [Extent(shape, 0, middle, box), Extent(shape, middle, num, box)]
    dims = draw(st.sets(st.sampled_from(range(len(shape)))))
    return shape, extents, tuple(sorted(dims))


def piece_of(leaf: Tensor, extent: Extent) -> Tensor:
    assert extent.box is not None
    return leaf[tuple(slice(*ends) for ends in extent.box)].reshape(-1)[extent.start : extent.stop]


@drawn(cuts(), st.sampled_from(["sum", "max"]))
def test_any_boxes(
    case: tuple[tuple[int, ...], list[Extent], Dims], op: Literal["sum", "max"]
) -> None:
    shape, extents, dims = case
    leaf = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = leaf
    if dims:
        expected = leaf.sum(dims) if op == "sum" else leaf.amax(dims)
    shares = [reduce_piece(piece_of(leaf, extent), extent, dims, op) for extent in extents]
    stacked = torch.stack(shares)
    torch.testing.assert_close(stacked.sum(0) if op == "sum" else stacked.amax(0), expected)
    beside = expected.reshape([1 if d in dims else n for d, n in enumerate(shape)]).expand(shape)
    for extent in extents:
        spread = spread_over_piece(expected, extent, dims)
        assert torch.equal(spread, piece_of(beside, extent))


@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1), ()])
def test_columns_of_a_matrix_on_ranks(dims: Dims) -> None:
    """Two ranks have half of the columns each, as a matrix that is split by columns is cut."""
    leaf = torch.arange(30, dtype=torch.float64).view(5, 6).square()
    expected = leaf.sum(dims) if dims else leaf

    def run(group: Any) -> tuple[Tensor, Tensor]:
        first = group.rank * 3
        extent = Extent((5, 6), 0, 15, ((0, 5), (first, first + 3)))
        piece = leaf[:, first : first + 3].reshape(-1)
        total = reduce_piece(piece, extent, dims, "sum")
        group.all_reduce(total.view(-1)).wait()
        return total, (piece / spread_over_piece(total, extent, dims)).view(5, 3)

    totals, shares = zip(*run_ranks(run, 2), strict=True)
    shape = [1 if dim in dims else size for dim, size in enumerate(leaf.shape)]
    for total in totals:
        assert torch.equal(total, expected)
    got = torch.cat(shares, 1).nan_to_num()
    assert torch.equal(got, (leaf / expected.view(shape)).nan_to_num())


@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1), (), (0, 2)])
def test_a_box_of_everything_is_no_box_to_the_bit(dims: Dims) -> None:
    shape = (4, 3, 5) if 2 in dims else (4, 15)
    box: Box = tuple((0, size) for size in shape)
    piece = torch.randn(31, generator=torch.Generator().manual_seed(1))
    for op in ("sum", "max"):
        plain = reduce_piece(piece, Extent(shape, 7, 38), dims, op)
        boxed = reduce_piece(piece, Extent(shape, 7, 38, box), dims, op)
        assert torch.equal(plain, boxed) and plain.shape == without(shape, dims)
        spread = [spread_over_piece(plain, Extent(shape, 7, 38, b), dims) for b in (None, box)]
        assert torch.equal(*spread)


class InFixedOrder(TorchDispatchMode):
    """Refuses operators that add at indices: CUDA adds there as threads come, and bits differ from
    run to run."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not re.search("index_add|index_put|index_reduce|scatter", str(func)), func
        return func(*args, **(kwargs or {}))


@drawn(cuts(), st.sampled_from(["sum", "max"]))
def test_sums_are_repeatable_on_every_device(
    case: tuple[tuple[int, ...], list[Extent], Dims], op: Literal["sum", "max"]
) -> None:
    shape, extents, dims = case
    leaf = torch.ones(shape)
    with InFixedOrder():
        for extent in extents:
            reduce_piece(piece_of(leaf, extent), extent, dims, op)


def test_the_check_of_fixed_order_can_fail() -> None:
    with InFixedOrder(), pytest.raises(AssertionError, match="index_add"):
        torch.zeros(3).index_add_(0, torch.tensor([0, 0]), torch.ones(2))


@pytest.mark.parametrize(
    ("start", "stop", "boxes"),
    [
        (0, 24, [((0, 2), (0, 3), (0, 4))]),
        (4, 8, [((0, 1), (1, 2), (0, 4))]),
        (5, 7, [((0, 1), (1, 2), (1, 3))]),
        (
            3,
            23,
            [
                ((0, 1), (0, 1), (3, 4)),
                ((0, 1), (1, 3), (0, 4)),
                ((1, 2), (0, 2), (0, 4)),
                ((1, 2), (2, 3), (0, 3)),
            ],
        ),
        (7, 7, []),
    ],
)
def test_a_range_is_a_few_boxes(start: int, stop: int, boxes: list[Box]) -> None:
    assert [*boxes_of_range((2, 3, 4), start, stop)] == boxes
