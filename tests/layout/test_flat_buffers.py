"""Trees to flats and back, and pieces between ranks: bitwise round trips."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from functorch_zero.groups import run_ranks
from functorch_zero.layout.build import make_layout
from functorch_zero.layout.flat_buffers import (
    by_bucket,
    cut,
    flat_of_leaves,
    flat_of_pieces,
    pack,
    to_tree,
    unpack,
)
from functorch_zero.layout.layout import Layout
from functorch_zero.testing.slicing import slice_tree
from tests.local import all_gather_tree
from tests.tiers import drawn

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
kinds = st.sampled_from([torch.float32, torch.float64])
specs = st.lists(st.tuples(shapes, kinds, st.booleans()), min_size=1, max_size=8)


def make(spec: Any, num_ranks: int, seed: int = 0) -> tuple[dict[str, Tensor], Layout]:
    """A tree of random leaves in two units, and its layout."""
    g = torch.Generator().manual_seed(seed)
    tree = {
        f"{'ab'[i % 2]}{i}": torch.randn(shape, generator=g).to(dtype)
        for i, (shape, dtype, _) in enumerate(spec)
    }
    flags = {name: flag for name, (_, _, flag) in zip(tree, spec, strict=True)}
    nested = {
        "a": {k: v for k, v in tree.items() if k[0] == "a"},
        "b": {k: v for k, v in tree.items() if k[0] == "b"},
    }
    return nested, make_layout(
        nested, num_ranks, trainable=lambda path, leaf: flags[path.split(".")[1]]
    )


def same(a: Any, b: Any) -> bool:
    return all(
        torch.equal(x, y) for x, y in zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True)
    )


@drawn(specs, st.integers(1, 5))
def test_slices_gathered_are_the_tree(spec: Any, ranks: int) -> None:
    def run(group: Any) -> bool:
        tree, layout = make(spec, ranks)
        pieces = slice_tree(tree, layout, group.rank)
        lengths = [e.num_here for e in optree.tree_leaves(layout.extents(group.rank))]
        assert [p.numel() for p in optree.tree_leaves(pieces)] == lengths
        assert all(p.dim() == 1 for p in optree.tree_leaves(pieces))
        return same(all_gather_tree(pieces, layout, group), tree)

    assert all(run_ranks(run, ranks))


@drawn(specs, st.integers(1, 5))
def test_flats_are_found_again_without_a_copy(spec: Any, num_ranks: int) -> None:
    tree, layout = make(spec, num_ranks)
    leaves = optree.tree_leaves(tree)
    copied = [
        unpack(pack(by_bucket(leaves, layout, b), bucket, device=torch.device("cpu")), bucket)
        for b, bucket in enumerate(layout.buckets)
    ]
    assert same(to_tree(copied, layout), tree)
    for own, bucket in zip(copied, layout.buckets, strict=True):
        whole = flat_of_leaves(own, bucket)
        assert (
            not (bucket.offsets[-1] + bucket.numels[-1])
            or whole.data_ptr() == own[0]._base.data_ptr()
        )
        for rank in range(num_ranks):
            piece = whole[rank * bucket.piece : (rank + 1) * bucket.piece].clone()
            found = flat_of_pieces(cut(piece, bucket, rank), bucket, rank)
            assert (
                not (bucket.offsets[-1] + bucket.numels[-1]) or found.data_ptr() == piece.data_ptr()
            )
            assert torch.equal(found, piece)


@drawn(specs, st.integers(1, 5))
def test_pieces_that_lie_elsewhere_are_packed(spec: Any, num_ranks: int) -> None:
    tree, layout = make(spec, num_ranks)
    leaves = optree.tree_leaves(tree)
    for b, bucket in enumerate(layout.buckets):
        own = by_bucket(leaves, layout, b)
        whole = pack(own, bucket, device=own[0].device)
        assert torch.equal(flat_of_leaves([x.clone() for x in own], bucket), whole)
        assert all(torch.equal(x, y) for x, y in zip(unpack(whole, bucket), own, strict=True))
        assert whole.count_nonzero() == sum(x.count_nonzero() for x in own), "padding is zero"
        for rank in range(num_ranks):
            piece = whole[rank * bucket.piece : (rank + 1) * bucket.piece]
            clones = [x.clone() for x in cut(piece, bucket, rank)]
            assert torch.equal(flat_of_pieces(clones, bucket, rank), piece)
            shuffled = [x + 0 for x in reversed(cut(piece, bucket, rank))][::-1]
            assert torch.equal(flat_of_pieces(shuffled, bucket, rank), piece)


@drawn(specs, st.integers(1, 4))
def test_reduce_scatter_gives_pieces_of_the_sum(spec: Any, ranks: int) -> None:
    def run(group: Any) -> Any:
        tree, layout = make(spec, ranks, seed=group.rank)
        leaves, parts = optree.tree_leaves(tree), []
        for b, bucket in enumerate(layout.buckets):
            own = by_bucket(leaves, layout, b)
            piece = own[0].new_empty(bucket.piece)
            group.reduce_scatter(piece, pack(own, bucket, device=own[0].device)).wait()
            parts.append(cut(piece, bucket, group.rank))
        return all_gather_tree(to_tree(parts, layout), layout, group)

    results = run_ranks(run, ranks)
    trees = [optree.tree_leaves(make(spec, ranks, seed=rank)[0]) for rank in range(ranks)]
    for i, leaf in enumerate(optree.tree_leaves(results[0])):
        total = trees[0][i].clone()
        for other in trees[1:]:
            total += other[i]
        assert torch.equal(leaf, total)
    assert all(same(result, results[0]) for result in results)


def test_none_is_zeros_and_padding_is_zero() -> None:
    tree, layout = make(
        [((3,), torch.float32, True), ((1,), torch.float32, True), ((2,), torch.float32, True)], 2
    )
    (bucket,) = [b for b in layout.buckets if len(b.leaves) == 2]
    flat = pack([None, tree["a"]["a2"]], bucket, device=torch.device("cpu"))
    assert flat.count_nonzero() == 2 and torch.equal(unpack(flat, bucket)[1], tree["a"]["a2"])


def test_mixed_dtypes_in_a_bucket_are_an_error() -> None:
    _, layout = make([((3,), torch.float32, True)], 2)
    with pytest.raises(TypeError, match="share a dtype"):
        pack(
            [torch.zeros(3, dtype=torch.float64), torch.zeros(1)],
            layout.buckets[0],
            device=torch.device("cpu"),
        )
