"""A step's params, gathered for a loss; and its gradients, reduced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optree
from torch import Tensor

from ..groups import labelled
from ..groups.mesh import Axes
from ..layout.flat_buffers import unpack
from ..layout.layout import Layout
from ..layout.levels import level_of
from ..layout.sharded_tree import ShardedTree
from ..params import is_on_engine
from ..runtime.reduce import GradientReduction, Kept
from ..runtime.table import TableFlats
from ..runtime.unshard import GatheredFlats, ResidentFlats, UnitFlats
from ..tree import PyTree
from .options import Options
from .placed import places_of_buckets


class TreesAmong:
    """The sharded trees among the arguments of a loss, or of an evaluation.

    Args:
        args: sharded trees, and optimizers' states, count as leaves in them.
        is_one: whether a node is a tree of which the function is given lazy params.

    Attributes:
        trees: these.
    """

    def __init__(self, args: Any, is_one: Callable[[Any], bool]):
        self._nodes, self._treedef = optree.tree_flatten(args, is_leaf=is_on_engine)
        self._places = [n for n, node in enumerate(self._nodes) if is_one(node)]
        self.trees: list[ShardedTree] = [self._nodes[n] for n in self._places]

    def with_lazy(self, lazy_trees: Sequence[Any]) -> Any:
        """The arguments as the function sees them, with lazy trees for the sharded ones, in their
        order."""
        nodes = [*self._nodes]
        for n, lazy in zip(self._places, lazy_trees, strict=True):
            nodes[n] = lazy
        return self._treedef.unflatten(nodes)


def all_gather_tree(tree: ShardedTree, axes: Axes) -> PyTree[Tensor | None]:
    """This rank's part -> whole leaves, copies, on every rank; None stays None. Params say whether
    they are trained. One all-gather per bucket that is held in pieces, as it is stored."""
    layout, is_held = tree.sharding.layout, tree.holding.form == "held"
    # Above level 0, pieces are those that the optimizer's ranks update
    group = axes.shard.group if is_held else axes.optimizer
    flats: list[Tensor | None] = []
    started = []  # all under way at once
    for bucket, flat in zip(layout.buckets, tree.flats(), strict=True):
        # Frozen leaves have no gradients and no updates
        if flat is not None and not tree.holding.is_whole(bucket):
            whole = flat.new_empty(bucket.numel)
            started.append(group.all_gather(whole, flat))
            flat = whole
        flats.append(flat)
    for work in started:
        work.wait()
    leaves: list[Tensor | None] = [None] * len(layout.leaves)
    for flat, bucket in zip(flats, layout.buckets, strict=True):
        if flat is None:
            continue
        for n, leaf in zip(bucket.leaves, unpack(flat, bucket), strict=True):
            # The state's own flats are among them, so leaves are copied
            leaves[n] = leaf.detach().clone().requires_grad_(is_held and tree.trained[n])
    return layout.treedef.unflatten(leaves)


def make_reduction(
    layout: Layout,
    options: Options,
    log: list[str],
    kept: Mapping[int, Kept],
) -> GradientReduction:
    """The reduction of a step's gradients.

    Args:
        kept: from earlier steps, by bucket.
    """
    # In layout order only where backward starts no other collective: see Note [order of
    # reductions] in runtime/unit.py
    every_use, in_layout_order, as_rows = set[int](), True, set[int]()
    places = places_of_buckets(options.places.gradients, layout)
    for b, bucket in enumerate(layout.buckets):
        level = level_of(bucket)
        # At once, in pieces; the others add up whole, over the micro-batches too
        if level.streams and options.reduce_gradients != "once":
            every_use.add(b)
        # A table's rows travel with its lookups, which have places of their own
        if not level.by_rows and (level.cuts_params or (level.streams and bucket.trainable)):
            in_layout_order = False
        # Between replicas, and to a place, dense ones travel
        if level.by_rows and options.axes.replicate.size == 1 and places[b] is None:
            as_rows.add(b)
    return GradientReduction(
        layout,
        options.axes,
        log,
        every_use=frozenset(every_use),
        in_layout_order=in_layout_order,
        by=options.reduction,
        kept=kept,
        num_bytes=options.reduce_bucket,
        places=places,
        in_rows=frozenset(as_rows),
    )


def make_unit_flats(
    flats: Sequence[Tensor],
    layout: Layout,
    axes: Axes,
    log: list[str],
) -> list[UnitFlats]:
    """Each unit's whole flats, for one pass.

    Args:
        flats: by bucket, pieces at level 3; published flats; else the whole ones (numel,) that hold
            the params between steps.
        log: takes an entry for each gather that is started.
    """
    made: list[UnitFlats] = []
    for unit, content in zip(layout.units, layout.contents, strict=True):
        own = [*map(flats.__getitem__, unit.buckets)]
        if content.is_table:
            bucket, rank = content.buckets[0], axes.world.rank
            made.append(TableFlats(own[0], bucket, axes.shard, log, unit.name, rank))
        elif content.is_made_on_use:
            group = labelled(axes.shard.group, f"{unit.name or 'root'}/gather")
            made.append(GatheredFlats(own, content.buckets, group, log, unit.name))
        else:
            made.append(ResidentFlats(own, content.buckets))
    return made
