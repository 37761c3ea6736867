"""A whole optimizer state -> a rank's part of it, and back, by the state's plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import Tensor

from ..groups.protocol import Group
from ..layout.flat_buffers import cut
from ..layout.home import Home, HomedLeaves, Positions
from ..layout.layout import Bucket, Layout
from ..sharded_optim.sharded_state import ShardedOptState, StateHolding
from ..sharded_optim.state_plan import StateLeaf, StatePlan


def lay_out_state(opt_state: Any, holding: StateHolding) -> ShardedOptState:
    """Put leaves that follow a param into one new flat per bucket and slot; copy the rest.

    Args:
        opt_state: this rank's, as `init` makes it: (n,) where a leaf follows a param.
    """
    plan, layout, piece_number = (
        holding.plan,
        holding.sharding.layout,
        holding.sharding.piece_number,
    )
    leaves, treedef = optree.tree_flatten(opt_state)
    assert len(leaves) == len(plan.leaves), (
        "the state of init on placeholders has another structure"
    )
    new: dict[int, Any] = {}  # by position in flatten order
    homes: dict[Positions, Home] = {}
    for bucket, positions in _sharing_a_flat(plan, layout):
        own = [leaves[i] for i in positions]
        if len({x.dtype for x in own}) > 1:
            continue  # an init may choose the dtype by shape or path; a flat has one
        flat = own[0].new_zeros(bucket.piece)  # (piece,), padding stays 0
        views = cut(flat, bucket, piece_number)
        for i, x, view in zip(positions, own, views, strict=True):
            new[i] = view.copy_(x)
        homes[*positions,] = Home(flat, leaves=views)
    for i, x in enumerate(leaves):
        # Copies, since `init` may return params, or one tensor for several leaves
        if i not in new:
            new[i] = x.detach().clone() if isinstance(x, Tensor) else x
            homes[i,] = Home(new[i], leaves=[new[i]])
    local = HomedLeaves(treedef, [new[i] for i in range(len(leaves))], homes)
    return ShardedOptState.of_local(local, holding.lying(None))


def _sharing_a_flat(plan: StatePlan, layout: Layout) -> Iterator[tuple[Bucket, list[int]]]:
    """The leaves that share flats, in bucket order: for Adam each bucket's first moments (slot 0),
    and its second ones (slot 1). A slot that some leaf of a bucket lacks has no flat there.

    Yields a bucket, and the positions in flatten order of the state, one per leaf of the bucket.
    """
    # (slot, number of the param) -> position in flatten order
    positions = plan.slots
    num_slots = 1 + max((slot for slot, _ in positions), default=-1)
    for bucket in layout.buckets:
        for slot in range(num_slots):
            keys = [(slot, n) for n in bucket.leaves]
            if all(key in positions for key in keys):
                yield bucket, [positions[key] for key in keys]


def all_gather_state(opt_state: Any, plan: StatePlan, layout: Layout, group: Group) -> Any:
    """The whole state of an optimizer on every rank, in tensors of its own. One collective per leaf
    that isn't whole already."""
    leaves, treedef = optree.tree_flatten(opt_state)
    # In flatten order, so that all ranks start the same collective next
    whole = []
    for x, leaf in zip(leaves, plan.leaves, strict=True):
        whole.append(_gather_leaf(x, leaf, layout, group))
    return treedef.unflatten(whole)


def _gather_leaf(x: Any, leaf: StateLeaf, layout: Layout, group: Group) -> Any:
    """A leaf of the optimizer's state, whole, on every rank. One collective where it isn't whole
    already."""
    if not isinstance(x, Tensor):
        return x
    if leaf.is_cut:
        # The layout tells how much each rank has, without communication
        extents = [leaf.extent(layout, rank) for rank in range(group.size)]
        shape = extents[0].shape
        # Level 0: whole here already
        if layout.leaves[leaf.leaf].cut.num_pieces == 1:
            return x.clone().view(shape)
        counts = [extent.num_here for extent in extents]
        return _gather_piece(x.reshape(-1), counts, group).view(shape)
    if leaf.kind == "owned":
        return _from_owner(x, leaf, group)
    return x.clone()


def _gather_piece(piece: Tensor, counts: list[int], group: Group) -> Tensor:
    """All ranks' pieces of one leaf, joined: one all-gather, padded to the longest.

    Args:
        piece: (counts[group.rank],), this rank's.
    """
    if group.size == 1:
        return piece.clone()
    longest = max(*counts, 1)
    # An all-gather takes equal parts, and ranks' pieces of one leaf differ in length
    padded = F.pad(piece, (0, longest - piece.numel()))
    out = piece.new_empty(group.size * longest)  # padded pieces of all ranks, in their order
    group.all_gather(out, padded).wait()
    pieces = zip(out.split(longest), counts, strict=True)
    return torch.cat([own[:count] for own, count in pieces])


def _from_owner(x: Tensor, leaf: StateLeaf, group: Group) -> Tensor:
    """A leaf of kind "owned": its owner, a rank of `group`, has it whole, and the others empty. One
    broadcast."""
    if leaf.owner == group.rank:
        whole = x.clone()
    else:
        whole = torch.empty(leaf.shape, dtype=leaf.dtype, device=x.device)
    # A copy where the state is not contiguous, so this is what is returned
    flat = whole.reshape(-1)
    # Nothing to send of a leaf without elements
    if group.size > 1 and flat.numel():
        group.broadcast(flat, leaf.owner).wait()
    return flat.view(leaf.shape)


def part_of_state(opt_state: Any, holding: StateHolding) -> ShardedOptState:
    """This rank's part of a whole optimizer's state, in tensors of its own."""
    leaves, treedef = optree.tree_flatten(opt_state)
    own = []  # views: `lay_out_state` copies them
    for x, part in zip(leaves, holding.parts, strict=True):
        own.append(x if part is None else part.extent.part_of(x).reshape(part.shape))
    # Laid out as `init` does it, so that updates find flats without a copy
    return lay_out_state(treedef.unflatten(own), holding)
