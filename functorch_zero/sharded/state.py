"""A whole optimizer state -> a rank's part of it, and back, by the state's plan."""

from __future__ import annotations

from typing import Any

import optree
import torch
from optree import tree_map
from torch import Tensor

from ..groups.mesh import Axes
from ..groups.protocol import Group
from ..layout.flat_buffers import cut
from ..layout.layout import Layout
from ..layout.sharded_tree import hold
from ..layout.sharding import Sharding
from ..params import Engine
from ..sharded_optim.state_plan import StateLeaf, StatePlan
from ..step.state import State, TrainValue
from .params import all_gather_params
from .update import PreparedUpdate


def lay_out_state(opt_state: Any, plan: StatePlan, layout: Layout, rank: int) -> Any:
    """Put leaves that follow a param into one new flat for each bucket and slot (of one dtype);
    copy the rest."""
    leaves, treedef = optree.tree_flatten(opt_state)
    assert len(leaves) == len(plan.leaves), (
        "the state of init on placeholders has another structure"
    )
    new: dict[int, Any] = {}
    for slots in _by_bucket_and_slot(plan, layout):
        if len({leaves[i].dtype for _, i in slots}) > 1:
            continue  # an init may choose by shape
        bucket = layout.buckets[slots[0][0]]
        flat = leaves[slots[0][1]].new_zeros(bucket.piece)
        for (_, i), view in zip(slots, cut(flat, bucket, rank), strict=True):
            new[i] = view.copy_(leaves[i])
    rest = {i: leaf for i, leaf in enumerate(leaves) if i not in new}
    new |= {
        i: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for i, leaf in rest.items()
    }
    return treedef.unflatten([new[i] for i in range(len(leaves))])


def _by_bucket_and_slot(plan: StatePlan, layout: Layout) -> list[list[tuple[int, int]]]:
    """(bucket, position in the state) of the leaves that share a flat, in bucket order; only
    complete buckets."""
    places = plan.slots()
    num_slots = 1 + max((slot for slot, _ in places), default=-1)
    groups = []
    for b, bucket in enumerate(layout.buckets):
        for slot in range(num_slots):
            if all((slot, leaf) in places for leaf in bucket.leaves):
                groups.append([(b, places[slot, leaf]) for leaf in bucket.leaves])
    return groups


def unshard_state(state: State, prepared: PreparedUpdate, axes: Axes) -> State:
    """The whole state on every rank, in tensors of its own."""
    assert state.sharding is not None
    layout = state.sharding.layout
    leaves, treedef = optree.tree_flatten(prepared.fetched(state.opt_state))
    whole = [
        _gather_leaf(x, leaf, layout, axes.optimizer)
        for x, leaf in zip(leaves, prepared.plan.leaves, strict=True)
    ]
    value = TrainValue(
        all_gather_params(state.params, axes),
        tree_map(torch.clone, state.buffers),
        treedef.unflatten(whole),
    )
    return State(
        state.step.clone(),
        value,
        None if state.seed is None else state.seed.clone(),
        finite=tree_map(torch.clone, state.finite),
        parts=prepared.parts.whole(state.parts, axes),
    )


def _gather_leaf(x: Any, leaf: StateLeaf, layout: Layout, group: Group) -> Any:
    if not isinstance(x, Tensor):
        return x
    if leaf.kind == "follows":
        b, k = layout.places[leaf.leaf]
        bucket = layout.buckets[b]
        if bucket.cut.num_pieces == 1:
            return x.clone().view(bucket.shapes[k])
        return _gather_piece(
            x, [bucket.extent(k, r).num_here for r in range(group.size)], group
        ).view(bucket.shapes[k])
    if leaf.kind == "owned":
        here = leaf.owner == group.rank
        whole = x.clone() if here else torch.empty(leaf.shape, dtype=leaf.dtype, device=x.device)
        flat = whole.reshape(-1)
        if group.size > 1 and flat.numel():
            group.broadcast(flat, leaf.owner).wait()
        return flat.view(leaf.shape)
    return x.clone()


def _gather_piece(piece: Tensor, counts: list[int], group: Group) -> Tensor:
    """All ranks' pieces of one leaf, joined: one all-gather, padded to the longest."""
    if group.size == 1:
        return piece.clone()
    longest = max(*counts, 1)
    padded = piece.new_zeros(longest)
    padded[: piece.numel()] = piece
    out = piece.new_empty(group.size * longest)
    group.all_gather(out, padded).wait()
    return torch.cat([part[:count] for part, count in zip(out.split(longest), counts, strict=True)])


def shard_state(
    whole: State,
    prepared: PreparedUpdate,
    sharding: Sharding,
    rank: int,
    engine: Engine | None = None,
    number: int = 0,
) -> State:
    """The `rank`-th part of a whole state, in tensors of its own."""
    layout, plan = sharding.layout, prepared.plan
    leaves, treedef = optree.tree_flatten(whole.opt_state)
    assert len(leaves) == len(plan.leaves), "the state does not belong to this optimizer"
    part: list[Any] = [
        _scatter_leaf(x, leaf, layout, rank) for x, leaf in zip(leaves, plan.leaves, strict=True)
    ]
    held = hold(whole.params, sharding, engine=engine, number=number)
    value = TrainValue(
        held,
        tree_map(torch.clone, whole.buffers),
        prepared.stored(lay_out_state(treedef.unflatten(part), plan, layout, rank)),
    )
    return State(
        whole.step.clone(),
        value,
        None if whole.seed is None else whole.seed.clone(),
        sharding,
        tree_map(torch.clone, whole.finite),
        prepared.parts.part(whole.parts, held.flats()[0].device),
    )


def _scatter_leaf(x: Any, leaf: StateLeaf, layout: Layout, rank: int) -> Any:
    if leaf.kind == "follows":
        b, k = layout.places[leaf.leaf]
        extent = layout.buckets[b].extent(k, rank)
        return x.reshape(-1)[extent.in_leaf]
    if leaf.kind == "owned" and leaf.owner != rank:
        return x.new_empty(0)
    return x
