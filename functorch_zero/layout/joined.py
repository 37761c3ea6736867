"""The layouts of several trees as one, for a pass over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import optree

from .layout import Bucket, Layout, LeafSpec, Unit


class Joined(NamedTuple):
    """The layouts of several trees as one, a tuple of them; the leaves, units and buckets under
    prefixes: "gen", "disc", or "0", "1"."""

    layout: Layout
    first_buckets: list[int]  # per tree, the number of its first bucket
    layouts: tuple[Layout, ...]  # the trees' own


def join_layouts(
    layouts: Sequence[Layout], trained: Sequence[bool], prefixes: Sequence[Any] | None = None
) -> Joined:
    """One layout of several trees, frozen where they are not trained.

    Without prefixes for their names, trees are numbered, and one alone has its own names.
    """
    alone = prefixes is None and len(layouts) == 1 and trained[0]
    prefixes = range(len(layouts)) if prefixes is None else prefixes
    treedef = optree.treespec_tuple([layout.treedef for layout in layouts])
    if alone:  # the user's, in errors and logs
        return Joined(replace(layouts[0], treedef=treedef), [0], tuple(layouts))
    # Numbers of leaves and of buckets go on from tree to tree
    leaves: list[LeafSpec] = []
    units: list[Unit] = []
    buckets: list[Bucket] = []
    first_buckets = []
    for i, layout, on in zip(prefixes, layouts, trained, strict=True):
        first_leaf, first_bucket = len(leaves), len(buckets)
        first_buckets.append(first_bucket)
        for leaf in layout.leaves:
            path = f"{i}.{leaf.path}"
            leaves.append(replace(leaf, path=path, trainable=leaf.trainable and on))
        # A name is unique in a layout only; it stands in logs and in labels of collectives
        for bucket in layout.buckets:
            numbers = tuple(n + first_leaf for n in bucket.leaves)
            named = replace(bucket, name=f"{i}.{bucket.name}", leaves=numbers)
            buckets.append(replace(named, trainable=bucket.trainable and on))
        for unit in layout.units:
            numbers = tuple(b + first_bucket for b in unit.buckets)
            # The unit of leaves around all others has no name of its own
            name = f"{i}.{unit.name or 'root'}"
            units.append(replace(unit, name=name, buckets=numbers))
    # Trees of one engine are cut over the same ranks. A program may train none of its trees.
    num_ranks = max((layout.num_ranks for layout in layouts), default=1)
    joined = Layout(num_ranks, tuple(leaves), tuple(units), tuple(buckets), treedef)
    return Joined(joined, first_buckets, tuple(layouts))
