"""Batches and states that a sharded step refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import optree
import torch
from optree import tree_map
from torch import Tensor

from ..errors import DonatedError, StructureError, explain
from ..layout.layout import Layout
from ..layout.levels import level_in_words, levels_of
from ..layout.sharded_tree import ShardedTree
from ..layout.sharding import Sharding
from ..params import is_on_engine
from ..step.rows import leading_sizes, opened, opened_by_path, sizes_by_path
from ..step.state import State, check_state
from .options import Options, StatePlace


def check_batch(batch: Any, device: torch.device, rank: int) -> None:
    """Refuse a batch on another kind of device than the params; single numbers may be anywhere."""
    # Paths are made for the error alone: a step checks each batch
    for n, leaf in enumerate(opened(batch)):
        if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.device.type != device.type:
            path, _ = opened_by_path(batch)[n]
            raise StructureError(
                explain(
                    "the batch is on the wrong device",
                    path=path,
                    expected=device,
                    got=leaf.device,
                    rank=rank,
                    remedy="move it with tree_map(lambda x: x.to(device), batch)",
                )
            )


def check_not_empty(batch: Any, loss: Tensor, weight: Tensor | float | None, rank: int) -> None:
    """Refuse a loss that is the mean of nothing, NaN, and would count as much as the others'.

    Args:
        batch: this rank's part.
        loss: 0-d, of this batch.
        weight: that the loss returned; None: every batch counts the same.
    """
    # A weight of 0 says it already
    if weight is not None:
        return
    # An accelerator is waited for only where a leaf is empty
    if 0 in leading_sizes(batch) and bool(loss.isnan()):
        raise StructureError(
            explain(
                "the batch is empty, and its loss NaN",
                path=next(path for path, size in sizes_by_path(batch) if size == 0),
                rank=rank,
                remedy="give batches a weight, fz.Aux(weight=len(x)): what weighs nothing counts "
                "for nothing",
            )
        )


def check_place(state: State, options: Options) -> Sharding:
    """The sharding of any program's state, which must be as these options cut.

    Raises:
        TypeError: `state` is no state.
        StructureError: it is whole, or cut in another way.
    """
    check_state(state)
    sharding = state.sharding
    if sharding is None:
        raise StructureError(
            "a sharded step was given a whole state. Remedy: `step.shard(state)` first"
        )
    # It is remembered weakly, which a number can't be
    if not isinstance(state.step, Tensor):
        raise StructureError(
            explain(
                "state.step is no counter",
                expected="a 0-d int64 tensor",
                got=type(state.step).__name__,
                rank=options.group.rank,
                remedy="state.replace(step=torch.tensor(0))",
            )
        )
    # Of this very place in the mesh: another rank's part would fit in shape alone
    got = StatePlace(
        level=sharding.level,
        num_pieces=sharding.layout.num_ranks,
        rank=sharding.rank,
        mesh=sharding.mesh,
        level_in_words=sharding.level_in_words,
    )
    if got != options.place:
        raise StructureError(
            explain(
                "the state was sharded for another level, group or rank",
                expected=options.place,
                got=got,
                rank=options.group.rank,
                remedy="unshard it with the step that made it, then shard it with this one",
            )
        )
    return sharding


def check_not_donated(state: State) -> None:
    """Raise if a step has taken the storage of a state, or of a part of it."""
    nodes = optree.tree_leaves(state.value, is_leaf=is_on_engine)
    if any(is_on_engine(node) and node.is_used_up for node in nodes):
        # Who took it may have failed since, so no state need have come of it
        raise DonatedError(
            f"the state of step {int(state.step)} was donated to a step or a load, which has "
            "written over its storage. Remedy: use the state that it returned; if it failed, load "
            "the newest checkpoint. To keep a state, copy it with tree_map(torch.clone, state), or "
            "shard with donate=False"
        )


def sharding_of(state: State, options: Options) -> Sharding:
    """The sharding of a training step's state.

    Raises:
        TypeError, StructureError: as `check_place`; or its params are another tree.
        DonatedError: a step has taken its storage.
    """
    sharding = check_place(state, options)
    check_not_donated(state)
    params = state.params
    if not isinstance(params, ShardedTree):
        raise StructureError(
            explain(
                "state.params have been replaced by a whole tree",
                expected="a ShardedTree, as in the state of `init`",
                got=f"a {type(params).__name__}",
                rank=options.group.rank,
                remedy="fz.shard_tree(tree, layout_like=state.params), or step.shard(...) of "
                "a whole state",
            )
        )
    if not _fits(params, sharding.layout):
        raise StructureError(
            explain(
                "state.params have another tree structure than those of `init`",
                got=f"a {type(params).__name__}",
                rank=options.group.rank,
                remedy="replace leaves by tree_map, which keeps the tree: in a dict they have "
                "another order",
            )
        )
    return sharding


def own_params(state: State, rank: int) -> ShardedTree:
    """A state's params, cut as the state says. Those of a step that trains other leaves are copied,
    where their pieces are of the same elements.

    Raises:
        StructureError: they are cut in another way: at another level, or with other leaves trained.
    """
    params, sharding = state.params, state.sharding
    assert sharding is not None
    theirs, ours = params.sharding.layout, sharding.layout
    # By identity first: comparing layouts takes longer
    if theirs is ours:
        return params  # type: ignore[no-any-return]
    params.flats()  # which raises where a step has taken its storage
    if theirs == ours:
        return params.cut_by(sharding)  # type: ignore[no-any-return]
    holding = replace(params.holding, sharding=sharding)
    if params.holding == holding:
        return ShardedTree.of_local(tree_map(torch.clone, params.local_tree), holding)
    raise StructureError(
        explain(
            "state.params are of a step that cuts them in another way",
            expected=_cut_in_words(ours, sharding.level),
            got=_cut_in_words(theirs, params.sharding.level),
            rank=rank,
            remedy="give both steps one level and one rule of trained leaves; or go by whole "
            "params: step.shard(whole.replace(params=other.unshard(...).params))",
        )
    )


def _cut_in_words(layout: Layout, level: int | None) -> str:
    trained = [leaf.path for leaf in layout.leaves if leaf.trainable]
    at = level_in_words(level, levels_of(layout))
    return f"{at}, {len(trained)} of {len(layout.leaves)} leaves trained ({', '.join(trained[:3])})"


def _fits(params: ShardedTree, layout: Layout) -> bool:
    fits: bool = optree.tree_structure(params.local_tree) == layout.treedef
    return fits
