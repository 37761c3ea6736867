"""Layouts: every element of every leaf in exactly one piece, at every world size."""

from __future__ import annotations

from itertools import accumulate
from math import prod
from typing import Any

import optree
import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from functorch_zero.layout.build import (
    LEAF_ALIGNMENT,
    PIECE_ALIGNMENT,
    default_units,
    make_layout,
)
from functorch_zero.layout.extent import Extent
from functorch_zero.layout.layout import Cut, Layout
from functorch_zero.model.functionalize import functionalize
from functorch_zero.params import Params, UnitSpec
from functorch_zero.precision import Precision
from functorch_zero.tree import paths
from tests.modules import Net
from tests.tiers import drawn

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64, torch.bool)
shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)
leaves = st.tuples(shapes, st.sampled_from(DTYPES), st.booleans())
trees = st.recursive(
    leaves,
    lambda children: st.one_of(
        st.lists(children, min_size=1, max_size=3),
        st.dictionaries(st.sampled_from("abcd"), children, min_size=1),
    ),
    max_leaves=12,
).filter(lambda tree: not isinstance(tree, tuple) or isinstance(tree[0], tuple))
worlds = st.one_of(st.integers(1, 6), st.sampled_from([64, 1000]))


def is_leaf(x: Any) -> bool:
    return isinstance(x, tuple)


def layout_of(tree: Any, num_ranks: int, *, aligned: bool = True) -> tuple[Layout, Any]:
    """The layout, and the tree of meta tensors it is for."""
    flags = dict(
        zip(
            paths_of(tree),
            (leaf[2] for leaf in optree.tree_leaves(tree, is_leaf=is_leaf)),
            strict=True,
        )
    )
    tensors = optree.tree_map(
        lambda x: torch.empty(x[0], dtype=x[1], device="meta"), tree, is_leaf=is_leaf
    )
    layout = make_layout(
        tensors, num_ranks, trainable=lambda path, leaf: flags[path], aligned=aligned
    )
    return layout, tensors


def paths_of(tree: Any) -> list[str]:
    return paths(optree.tree_map(lambda x: 0, tree, is_leaf=is_leaf))


@drawn(trees, worlds, st.booleans())
def test_every_element_is_in_exactly_one_piece(tree: Any, num_ranks: int, aligned: bool) -> None:
    layout, _ = layout_of(tree, num_ranks, aligned=aligned)
    extents = [optree.tree_leaves(layout.extents(rank)) for rank in range(num_ranks)]
    for i, leaf in enumerate(layout.leaves):
        stop = 0
        for rank in range(num_ranks):
            extent = extents[rank][i]
            assert extent.shape == leaf.shape
            if extent.num_here:
                assert extent.start == stop, "pieces follow each other in rank order"
                stop = extent.stop
        assert stop == leaf.numel
        assert sum(extents[rank][i].num_here for rank in range(num_ranks)) == prod(leaf.shape)


@drawn(trees, worlds)
def test_buckets_are_aligned_and_hold_one_kind(tree: Any, num_ranks: int) -> None:
    layout, _ = layout_of(tree, num_ranks)
    seen = []
    for bucket in layout.buckets:
        size = bucket.dtype.itemsize
        assert bucket.piece * size % PIECE_ALIGNMENT == 0
        assert (bucket.offsets[-1] + bucket.numels[-1]) <= num_ranks * bucket.piece
        end = 0
        for k, n in enumerate(bucket.leaves):
            leaf = layout.leaves[n]
            assert (leaf.dtype, leaf.trainable) == (bucket.dtype, bucket.trainable)
            assert bucket.offsets[k] * size % LEAF_ALIGNMENT == 0
            assert end <= bucket.offsets[k] < end + LEAF_ALIGNMENT // size + 1, (
                "leaves follow each other, without overlap"
            )
            end = bucket.offsets[k] + leaf.numel
        waste = num_ranks * bucket.piece - (bucket.offsets[-1] + bucket.numels[-1])
        assert waste < (num_ranks + 1) * PIECE_ALIGNMENT, (
            "padding is at most a step of alignment for each rank"
        )
        seen += bucket.leaves
    assert sorted(seen) == list(range(len(layout.leaves)))
    assert sorted(b for unit in layout.units for b in unit.buckets) == list(
        range(len(layout.buckets))
    )


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
@pytest.mark.parametrize("sizes", [(5,), (7, 7), (7, 3), (4, 4, 4, 4, 4, 4)])
def test_leaves_of_proofs_are_cut_however_small(sizes: tuple[int, ...], num_ranks: int) -> None:
    """Aligned, each of them lies whole on one rank. Of equal leaves an even share would be whole
    ones."""
    tree = {f"leaf{i}": torch.zeros(size, dtype=torch.float64) for i, size in enumerate(sizes)}
    cut = []
    for aligned in (True, False):
        layout = make_layout(tree, num_ranks, trainable=lambda path, leaf: True, aligned=aligned)
        (bucket,) = layout.buckets
        pieces = [bucket.extent(k, 0) for k in range(len(sizes))]
        cut.append(any(0 < piece.num_here < piece.numel for piece in pieces))
    assert cut == [False, True]


@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("use", ["compute", "gather", "reduce"])
def test_leaves_are_aligned_in_every_dtype_of_their_flats(use: str, narrow: torch.dtype) -> None:
    """So that a matrix product finds the kernel that it finds for a leaf of its own."""
    precision = Precision(**{use: narrow})
    _, params, _ = functionalize(
        nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)), precision=precision
    )
    layout = make_layout(params, 2, trainable=lambda path, leaf: True)
    for bucket in layout.buckets:
        flats = {bucket.dtype, bucket.compute, bucket.gather, bucket.reduce}
        assert narrow in flats and len(bucket.offsets) > 1
        for offset in bucket.offsets:
            assert all(offset * dtype.itemsize % 256 == 0 for dtype in flats)


@drawn(trees, worlds)
def test_the_same_on_every_rank(tree: Any, num_ranks: int) -> None:
    first, _ = layout_of(tree, num_ranks)
    second, _ = layout_of(tree, num_ranks)
    assert first == second and first.describe() == second.describe()
    assert first.in_buckets == second.in_buckets


@drawn(trees, worlds)
def test_parts_are_what_each_rank_keeps_and_the_padding_between(tree: Any, num_ranks: int) -> None:
    layout, _ = layout_of(tree, num_ranks)
    for bucket in layout.buckets:
        for rank in range(num_ranks):
            first = rank * bucket.piece
            parts = bucket.sizes(first, first + bucket.piece)
            assert sum(parts) == bucket.piece
            ends = list(accumulate(parts))
            for k, (start, stop) in enumerate(zip(ends[::2], ends[1::2], strict=False)):
                extent = bucket.extent(k, rank)
                assert stop - start == extent.num_here
                assert not extent.num_here or first + start == bucket.offsets[k] + extent.start


def test_units_of_a_module_and_of_its_children() -> None:
    net = Net(a=nn.Linear(64, 64), b=nn.Linear(64, 64))
    net.b.bias.requires_grad_(False)

    _, params, _ = functionalize(net)
    layout = make_layout(params, 2, trainable=lambda path, leaf: leaf.requires_grad)
    assert [unit.name for unit in layout.units] == ["a", "b"]
    assert [bucket.name for bucket in layout.buckets] == [
        "a[float32]",
        "b[float32]",
        "b[float32, frozen]",
    ]
    assert layout.trainable == {"a.weight": True, "a.bias": True, "b.weight": True, "b.bias": False}


def test_units_of_models_inside_a_tree() -> None:
    """Two models in one tree keep their units."""
    _, one, _ = functionalize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    _, other, _ = functionalize(nn.Linear(3, 3))
    tree = {"one": one, "rest": [other, torch.zeros(2)], "more": torch.zeros(3)}
    layout = make_layout(tree, 2, trainable=lambda path, leaf: True)
    named = {unit.name: unit.modules for unit in layout.units}
    assert named["one.0"] == ("0",) and named["one.1"] == ("1",)
    assert len({unit.name for unit in layout.units}) == len(layout.units)
    leaves = {
        unit.name: {layout.leaves[n].path for b in unit.buckets for n in layout.buckets[b].leaves}
        for unit in layout.units
    }
    assert leaves["one.1"] == {"one.1.weight", "one.1.bias"}
    assert {"rest.0.weight", "rest.0.bias"} in leaves.values()
    assert sorted(path for paths in leaves.values() for path in paths) == sorted(paths(tree))


def test_default_units() -> None:
    tree = {"a": [1, 2], "b": 3, "c": {"d": 4}, "e": 5}
    assert {unit.name: unit.leaves for unit in default_units(tree)} == {
        "a": ("a.0", "a.1"),
        "": ("b", "e"),
        "c": ("c.d",),
    }


def test_units_must_cover_the_tree_once() -> None:
    tree = {"a": torch.zeros(3), "b": torch.zeros(3)}
    for named in ([()], [("a",)], [("a",), ("a", "b")], [("a", "b", "a")]):
        units = [UnitSpec("unit", (), leaves) for leaves in named]
        with pytest.raises(ValueError, match="exactly one unit"):
            make_layout(tree, 2, trainable=lambda path, leaf: True, units=units)


def test_no_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        make_layout({"a": torch.zeros(1)}, 0, trainable=lambda path, leaf: True)


def test_extents() -> None:
    assert Extent.of(torch.zeros(2, 3)) == Extent((2, 3), 0, 6)
    assert (Extent((2, 3), 1, 4).numel, Extent((2, 3), 1, 4).num_here) == (6, 3)
    with pytest.raises(AssertionError):
        Extent((2,), 1, 3)


def test_an_extent_in_a_box() -> None:
    columns = Extent((2, 3), 1, 4, ((0, 2), (1, 3)))
    assert (columns.shape, columns.box_shape, columns.numel, columns.num_here) == (
        (2, 3),
        (2, 2),
        6,
        3,
    )
    assert columns.in_box == Extent((2, 2), 1, 4)
    assert Extent((2, 3), 1, 4).in_leaf == slice(1, 4)
    with pytest.raises(NotImplementedError, match="not one range of the flattened leaf"):
        columns.in_leaf  # noqa: B018
    for stop, box in ((5, ((0, 2), (1, 3))), (1, ((0, 3), (0, 1))), (0, ((1, 0), (0, 1)))):
        with pytest.raises(AssertionError):
            Extent((2, 3), 0, stop, box)


def test_a_layout_is_hashable_plain_data() -> None:
    _, params, _ = functionalize(nn.Linear(2, 2))
    assert isinstance(params, Params)
    assert hash(make_layout(params, 2, trainable=lambda path, leaf: True)) is not None


def test_a_large_leaf_is_a_bucket_of_its_own_at_levels_2_and_3() -> None:
    with torch.device("meta"):
        params = {
            "a": torch.empty(1024),
            "head": torch.empty(2048, 1024),
            "odd": torch.empty(2049, 1025),
        }
        params |= {"frozen": torch.empty(2048, 1024), "z": torch.empty(7)}
    unit = [UnitSpec("", (), tuple(params))]

    def names(level: int) -> list[list[str]]:
        cut = Cut(level, 2 if level else 1, 2 if level == 3 else 1)
        layout = make_layout(
            params,
            2,
            trainable=lambda path, _: path != "frozen",
            units=unit,
            cut=lambda path, leaf, dtypes: cut,
        )
        return [[layout.leaves[i].path for i in bucket.leaves] for bucket in layout.buckets]

    together = [["a", "head", "odd", "z"], ["frozen"]]
    assert names(0) == names(1) == together
    assert names(2) == names(3) == [["a", "odd", "z"], ["head"], ["frozen"]]


@drawn(rows=st.integers(0, 20), columns=st.integers(1, 5), ranks=worlds, aligned=st.booleans())
def test_pieces_of_tables_are_whole_rows(
    rows: int, columns: int, ranks: int, aligned: bool
) -> None:
    """Each table is a unit of its own, wherever it lies; its pieces are of equally many rows."""
    table = Cut(level=4, num_pieces=ranks, num_held=ranks, by_rows=True)
    other = Cut(level=3, num_pieces=ranks, num_held=ranks)
    shapes = {"a": (3, columns), "emb": (rows, columns), "items": (7, columns), "z": (5,)}
    layout = make_layout(
        {"net": {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}},
        ranks,
        trainable=lambda path, leaf: path == "net.emb",
        cut=lambda path, leaf, dtypes: table if path in ("net.emb", "net.items") else other,
        aligned=aligned,
    )
    units = {unit.name: [layout.buckets[b] for b in unit.buckets] for unit in layout.units}
    assert [*units] == ["net", "net.emb", "net.items"]
    assert [layout.leaves[n].path for n in units["net"][0].leaves] == ["net.a", "net.z"]
    for name in ("net.emb", "net.items"):
        (bucket,) = units[name]
        pieces = [bucket.extent(0, rank) for rank in range(ranks)]
        assert all(x.start % columns == 0 and x.stop % columns == 0 for x in pieces)
        assert bucket.piece == -(-bucket.shapes[0][0] // ranks) * columns
        assert sum(x.num_here for x in pieces) == bucket.numels[0]
