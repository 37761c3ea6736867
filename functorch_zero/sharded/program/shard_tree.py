"""`shard_tree`: a whole tree, cut for programs without a step."""

from __future__ import annotations

from typing import Any, overload

import torch
from torch import Tensor

from ...errors import StructureError
from ...groups import as_group, labelled
from ...groups.mesh import axes_of
from ...layout.levels import LevelRule, Levels
from ...layout.sharded_tree import Holding, ShardedTree, hold
from ...shared_elements import check_apart
from ...step.program import check_like, copied_like
from ...tree import PyTree, check_tensors
from ..agreement import agree
from ..failures import sharing_failures
from ..options import Options
from ..readable import told_values
from ..refit import without_values
from ..tree_numbers import next_number
from .engine import ShardedEngine
from .scope import compared


@overload
def shard_tree(tree: PyTree[Tensor], *, level: LevelRule, group: Any = None) -> ShardedTree: ...


@overload
def shard_tree(tree: PyTree[Tensor], *, layout_like: ShardedTree) -> ShardedTree: ...


@overload
def shard_tree(tree: PyTree[Tensor], *, layout_like: PyTree[Tensor]) -> PyTree[Tensor]: ...


@compared()
def shard_tree(
    tree: PyTree[Tensor],
    *,
    level: LevelRule | None = None,
    group: Any = None,
    layout_like: PyTree[Tensor] | None = None,
) -> ShardedTree | PyTree[Tensor]:
    """This rank's part of a whole tree that every rank passes: copies, which know how they are cut.

    `fz.value_and_grad`, `fz.apply_updates`, `fz.unshard`, and a transform's `init` and `update`
    take such trees as they take whole ones.

    Args:
        tree: leaves with `requires_grad` are trained, the others are frozen.
        level: as `shard` takes it.
        group: as `shard` takes it; trees that are used together lie on one.
        layout_like: cut as this tree is, instead: for teachers, averages and copies of it. Shapes
            and dtypes are the same. The same leaves are trained, unless none of `tree` is. Like a
            whole tree, the result is a whole copy: a program in one process goes on as on ranks.

    Collectives: one exchange, which compares layout, levels and values.

    Raises:
        MismatchError: on every rank, naming the first leaf in which ranks differ.
        StructureError: the tree does not fit `layout_like`, or neither it nor a level is given.

    >>> from functorch_zero.groups import SingleRank
    >>> shard_tree({"w": torch.ones(2)}, level=3, group=SingleRank())
    ShardedTree({w: (2,) torch.float32}, as params are held, level 3, rank 0)
    """
    if (level is None) == (layout_like is None):
        raise StructureError(
            "shard_tree takes either a level or layout_like, and not both",
            got="both" if layout_like is not None else "neither",
            remedy="fz.shard_tree(tree, level=3, group=group), or layout_like=params for a "
            "tree that is cut as params are",
        )
    if layout_like is not None and not isinstance(layout_like, ShardedTree):
        return copied_like(tree, layout_like)
    # That of `layout_like`, of the same ranks and options, so that the trees can be used together
    engine: Any = _new_engine(level, group) if layout_like is None else layout_like.engine
    options: Options = engine.options
    axes = options.axes
    with sharing_failures(*axes.groups, call="shard_tree"), torch.no_grad():
        check_tensors(tree, "the tree")
        check_apart(tree)
        if layout_like is None:
            sharding, read_only = options.sharding(options.layout_of(tree)), False
        else:
            sharding = layout_like.sharding
            # A teacher, say: it is cut as if trained, so that its pieces lie beside the student's
            read_only = check_like(tree, without_values(sharding.layout), axes.world.rank)
        layout = sharding.layout
        # Each rank cuts its own copy, and no later collective would show that copies differ
        facts = {
            "layout": layout.describe(),
            "level of leaves": {leaf.path: leaf.cut.level_name for leaf in layout.leaves},
            "values": told_values(tree),
        }
        agree(labelled(axes.world, "shard_tree/agreement"), facts)
        number = next_number(axes.world)
        return hold(tree, Holding(sharding, "held", engine, number, read_only=read_only))


def _new_engine(level: Any, group: Any) -> ShardedEngine:
    """An engine whose trees are cut over a group, with the defaults of `shard`."""
    options = Options(
        Levels(level),
        axes_of(as_group(group)),
        donate=False,
        sync_buffers="mean",
        reshard_after_forward=True,
    )
    return ShardedEngine(options)
