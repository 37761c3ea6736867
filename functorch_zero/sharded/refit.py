"""A sharded value carried over to another cut: only elements whose rank changes are sent.

Note [moves]: ranks know, from the layouts and plans, which range of each leaf each of them holds
before and after. A rank keeps the elements that it has already. The others come from the first rank
that has them, in one all-to-all per dtype. Every rank goes through leaves, receivers and runs in
one order, so runs need no labels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from ..errors import StructureError, explain
from ..groups import labelled
from ..groups.protocol import Group
from ..layout.extent import Extent
from ..layout.layout import Layout
from ..layout.sharded_tree import Holding, ShardedTree
from ..layout.sharding import Sharding
from ..params import as_local, is_on_engine, map_local, map_nodes, nodes_of, without_engines
from ..sharded_optim.mail import Mail
from ..sharded_optim.sharded_state import ShardedOptState, StateHolding
from ..step.refit import Form, check_values, in_both
from ..step.state import State
from ..tree import PyTree, paths
from .agreement import agree
from .options import Options
from .readable import told_story
from .state import lay_out_state

Range = tuple[int, int]  # [start, stop) of a flattened whole leaf


class Part(NamedTuple):
    """This rank's part of a leaf, and the parts of all ranks of the optimizer's axis."""

    tensor: Any  # (n,), or whole in its own shape; a number is itself
    form: Form  # of the whole leaf
    ranges: Sequence[Range]  # by rank


def check_same_ranks(state: State, options: Options) -> None:
    """Raise unless a state is sharded, and lies on the ranks of these options."""
    got = None if state.sharding is None else (state.sharding.rank, state.sharding.mesh)
    if got != (options.place.rank, options.place.mesh):
        raise StructureError(
            "refit was given a state of other ranks",
            expected=options.place,
            got="a whole state" if state.sharding is None else state.sharding,
            rank=options.group.rank,
            remedy="step.shard(step.unsharded.refit(whole, ...)), where whole is "
            "unsharded by the step that made the state",
        )


def refuse_parts(state: State, rank: int) -> None:
    """Raise if a reduction keeps tensors in a state. They are of buckets, which `refit` cuts
    anew."""
    if state.parts is None:
        return
    raise NotImplementedError(
        explain(
            "the state's parts hold tensors that a reduction keeps between steps, and refit can't "
            "cut them anew",
            path="parts",
            rank=rank,
            remedy="refit the whole state, and let the reduction begin anew: "
            "step.shard(step.unsharded.refit(other.unshard(state).replace(parts=None), ...))",
        )
    )


def agree_on_refit(state: State, options: Options) -> None:
    """Raise `MismatchError` on every rank, unless all refit one state. One exchange."""
    assert state.sharding is not None
    rest = without_engines(state.value)
    forms = [repr(Form.of(leaf)) for leaf in optree.tree_leaves(rest)]
    facts: dict[str, Any] = {
        "step": int(state.step),
        "layout before": state.sharding.layout.describe(),
        "other leaves": dict(zip(paths(rest), forms, strict=True)),
    }
    for path, node in zip(paths(state.value, is_on_engine), nodes_of(state.value), strict=True):
        if is_on_engine(node):
            facts[f"the value's tree {path!r}"] = told_story(node.story)
    agree(labelled(options.axes.world, "refit/agreement"), facts)


def first_parts(params: PyTree[Tensor], holding: Holding) -> ShardedTree:
    """This rank's part of whole leaves, of which some may be on the meta device: copies."""
    made = []
    for leaf, part in zip(optree.tree_leaves(params), holding.parts, strict=True):
        own = leaf if part.is_whole else part.extent.part_of(leaf).reshape(-1)
        made.append(own.detach().clone())
    return ShardedTree.of_local(holding.sharding.layout.treedef.unflatten(made), holding)


def without_values(layout: Layout, *, read_only: bool = False) -> PyTree[Tensor]:
    """The whole leaves of a layout on the meta device, which say whether they are trained; with
    `read_only`, none is."""
    leaves = []
    for leaf in layout.leaves:
        made = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
        leaves.append(made.requires_grad_(leaf.trainable and not read_only))
    return layout.treedef.unflatten(leaves)


def carried(new: PyTree[Any], old: PyTree[Any], group: Group, what: str) -> PyTree[Any]:
    """The new value with the old one's elements where the paths are the same, in tensors of its
    own. One all-to-all per dtype of elements that travel.

    Args:
        new: of sharded trees, optimizers' states and leaves that every rank has. Params that the
            old value has may be on the meta device.
        old: the same, over the same ranks.
        group: the optimizer's axis.
        what: the value's name, for errors.
    """
    ours, theirs = _parts(new, group.size), _parts(old, group.size)
    forms = [{path: part.form for path, part in parts.items()} for parts in (ours, theirs)]
    names = in_both(forms[0], forms[1], what, group.rank)
    leaves = {path: part.tensor for path, part in ours.items()}
    moving = defaultdict(list)  # by dtype
    for path in names:
        if isinstance(theirs[path].tensor, Tensor):
            moving[theirs[path].form.dtype].append(path)
        else:
            leaves[path] = theirs[path].tensor
    for dtype in moving:
        pairs = [(theirs[path], ours[path]) for path in moving[dtype]]
        leaves |= zip(moving[dtype], _moved(pairs, group), strict=True)
    check_values(leaves, what, group.rank)
    made = iter(leaves.values())
    return _laid_out(map_local(lambda _: next(made), new))


def _moved(pairs: Sequence[tuple[Part, Part]], group: Group) -> list[Tensor]:
    """This rank's parts of leaves of one dtype after the move. One all-to-all, if any travels. See
    Note [moves]."""
    here, mail, like = group.rank, Mail(group), None
    kept: list[tuple[tuple[int, int], list[Tensor]]] = []  # as what arrives: its key, and the run
    for i, (old, new) in enumerate(pairs):
        mine = old.ranges[here]
        # The first rank of those that hold the same; no others overlap
        holders = {own: rank for rank, own in reversed([*enumerate(old.ranges)])}
        for receiver, wanted in enumerate(new.ranges):
            known = old.ranges[receiver]
            if like is None and wanted[0] < wanted[1] and _overlap(wanted, known) != wanted:
                # On the device of what travels: counters may lie on another one
                like = old.tensor.new_empty(0, dtype=old.form.dtype)
            if holders[mine] == here and known != mine:
                mail.send(receiver, _cut(old, here, wanted))
        for own, source in holders.items():
            start, stop = _overlap(new.ranges[here], own)
            if own == mine:
                kept.append(((i, start), [_cut(old, here, (start, stop))]))
            elif start < stop:
                mail.expect(source, (i, start), stop - start)
    arrived = {} if like is None else mail.exchange(like)
    runs = defaultdict[int, list[Tensor]](list)  # of each leaf, in order
    for (i, _), [run] in sorted([*kept, *arrived.items()], key=itemgetter(0)):
        runs[i].append(run)
    return [torch.cat(runs[i]).view(new.tensor.shape) for i, (_, new) in enumerate(pairs)]


def _overlap(one: Range, two: Range) -> Range:
    return max(one[0], two[0]), min(one[1], two[1])


def _cut(part: Part, rank: int, wanted: Range) -> Tensor:
    """A range (n,) of what a rank's part has of it."""
    start, stop = _overlap(wanted, part.ranges[rank])
    first, _ = part.ranges[rank]
    flat: Tensor = part.tensor.detach().reshape(-1)
    return flat[start - first : max(start, stop) - first]


def _parts(value: PyTree[Any], num_ranks: int) -> dict[str, Part]:
    """The leaves of a value by path, in flatten order."""
    found: list[Part] = []
    for node in nodes_of(value):
        if isinstance(node, ShardedTree):
            found += _parts_of_tree(node, num_ranks)
        elif isinstance(node, ShardedOptState):
            found += _parts_of_state(node, num_ranks)
        else:
            found.append(_everywhere(node, num_ranks))
    return dict(zip(paths(as_local(value)), found, strict=True))


def _parts_of_tree(node: ShardedTree, num_ranks: int) -> Iterator[Part]:
    sharding, form = node.sharding, node.holding.form
    leaves = sharding.layout.treedef.flatten_up_to(node.local_tree)
    by_rank = [Holding(own, form).parts for own in _on_ranks(sharding, num_ranks)]
    for leaf, *parts in zip(leaves, *by_rank, strict=True):
        if leaf is not None:  # in pieces, of a frozen leaf
            yield _part(leaf, leaf.dtype, [part.extent for part in parts])


def _parts_of_state(node: ShardedOptState, num_ranks: int) -> Iterator[Part]:
    leaves, plan = optree.tree_leaves(node.as_it_lies), node.holding.plan
    on_ranks = _on_ranks(node.holding.sharding, num_ranks)
    by_rank = [StateHolding(own, plan).parts for own in on_ranks]
    for leaf, planned, *parts in zip(leaves, plan.leaves, *by_rank, strict=True):
        if extents := [part.extent for part in parts if part is not None]:
            # Its owner alone has an owned leaf
            yield _part(leaf, planned.dtype or leaf.dtype, extents)
        else:
            yield _everywhere(leaf, num_ranks)


def _on_ranks(sharding: Sharding, num_ranks: int) -> list[Sharding]:
    """The sharding as each rank of the optimizer's axis has it."""
    return [replace(sharding, mesh=(*sharding.mesh[:2], number)) for number in range(num_ranks)]


def _part(leaf: Tensor, dtype: torch.dtype, extents: Sequence[Extent]) -> Part:
    ranges = [(extent.start, extent.stop) for extent in extents]
    return Part(leaf, Form(extents[0].shape, dtype), ranges)


def _everywhere(leaf: Any, num_ranks: int) -> Part:
    """A leaf that every rank has."""
    numel = leaf.numel() if isinstance(leaf, Tensor) else 0
    return Part(leaf, Form.of(leaf), [(0, numel)] * num_ranks)


def _laid_out(value: PyTree[Any]) -> PyTree[Any]:
    """The value with leaves as views of flats, as `init` makes them."""

    def lay_out(node: Any) -> Any:
        if isinstance(node, ShardedTree):
            return ShardedTree.of_flats(node.flats(), node.holding)
        if isinstance(node, ShardedOptState):
            return lay_out_state(node.as_it_lies, node.holding)
        return node

    return map_nodes(lay_out, value)
