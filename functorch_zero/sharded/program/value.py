"""The value of a program on one rank: how its nodes are cut, which of its leaves are trained, and
whether a next value fits in its place.

A value's nodes are sharded trees, optimizers' states, and leaves that every rank holds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import optree
import torch
from optree import tree_map
from torch import Tensor

from ...errors import StructureError, explain
from ...layout.sharded_tree import Holding, ShardedTree, hold
from ...layout.sharding import Sharding
from ...optim.state_checks import check_opt_state
from ...params import is_on_engine
from ...sharded_optim.sharded_state import ShardedOptState, StateHolding
from ...step.program_step import device_of, leaf_form
from ...tree import paths, same_structure
from ..state import part_of_state

_OF_THIS_PROGRAM = "pass a whole state of this program, whose init was given the same trees"


class ValueStructure(NamedTuple):
    """How a program's value is cut: nodes without their tensors."""

    sharding: Sharding  # of the state
    treedef: Any  # down to the nodes
    paths: list[str]  # of the nodes
    nodes: list[Any]  # Holding or StateHolding; of a leaf that every rank holds, its `leaf_form`

    @classmethod
    def of(cls, value: Any, sharding: Sharding) -> ValueStructure:
        leaves, treedef = optree.tree_flatten(value, is_leaf=is_on_engine)
        nodes = [leaf.holding if is_on_engine(leaf) else leaf_form(leaf) for leaf in leaves]
        return cls(sharding, treedef, paths(value, is_on_engine), nodes)

    def subtrees(self, whole: Any, rank: int) -> list[Any]:
        """Of a whole value, the trees in place of the nodes."""
        try:
            found: list[Any] = self.treedef.flatten_up_to(whole)
        except ValueError as error:
            raise StructureError(
                explain(
                    "the whole state's value has another structure than the one of init",
                    expected=self.treedef,
                    got=f"a {type(whole).__name__}: {error}",
                    rank=rank,
                    remedy=_OF_THIS_PROGRAM,
                )
            ) from error
        return found


def whole_node(node: Any) -> Any:
    """A node, or a leaf, as a whole state has it: copies."""
    if is_on_engine(node):
        return node.engine.unshard(node)
    return node.clone() if isinstance(node, Tensor) else node


def marked_like(node: Any, noted: Any) -> Any:
    """A node of a value, trained or read only as this one of a `ValueStructure` says."""
    if not isinstance(node, ShardedTree) or node.holding.form != "held":
        return node
    return node.as_read_only(noted.read_only) if isinstance(noted, Holding) else node.as_noted()


def trained_leaves(node: Any) -> Any:
    """Per leaf of a node, whether it is trained."""
    if isinstance(node, ShardedTree) and node.holding.form == "held":
        return node.trained
    return tree_map(lambda leaf: False, node)


def known_as_trained(node: Any) -> Any:
    """A node of the value of `init`, which says whether its leaves are trained; other tensors
    don't. The same for whole trees: a clone that is made without gradients isn't trained."""
    if isinstance(node, Tensor):
        return node.detach()
    if not isinstance(node, ShardedTree) or node.holding.form != "held":
        return tree_map(_detached, node)
    return node.as_read_only(node.is_read_only)


def _detached(leaf: Any) -> Any:
    # Others stay as they are: a detached view no longer knows the flat that it lies in
    return leaf.detach() if isinstance(leaf, Tensor) and leaf.requires_grad else leaf


def device_of_value(value: Any) -> torch.device:
    """The device of a value's first held tree, of which no leaf is cut; else of a tensor."""
    for node in optree.tree_leaves(value, is_leaf=is_on_engine):
        if isinstance(node, ShardedTree) and node.holding.form == "held" and (own := node.flats()):
            device: torch.device = own[0].device
            return device
    return device_of(value)


def without_fitting(old: Any, new: Any) -> tuple[Any, Any]:
    """Both values, with None where the new one's node is known to fit: where its flats do and it
    has no leaves yet, since to compare these would cut them; and where the old one is used up. Used
    up nodes of the old one that don't fit keep their structure alone."""
    before, treedef = optree.tree_flatten(old, is_leaf=is_on_engine)
    after, other = optree.tree_flatten(new, is_leaf=is_on_engine)
    if treedef != other:
        return treedef.unflatten(map(_structure_of, before)), new
    for n, (one, two) in enumerate(zip(before, after, strict=True)):
        if is_on_engine(one) and is_on_engine(two) and _fits(one, two):
            before[n] = after[n] = None
    return treedef.unflatten(map(_structure_of, before)), treedef.unflatten(after)


def _structure_of(node: Any) -> Any:
    """A used up node's structure, with numbers for leaves; any other node is itself."""
    if not is_on_engine(node) or not node.is_used_up:
        return node
    if isinstance(node, ShardedOptState):
        plan = node.holding.plan
        return ShardedOptState(plan.treedef.unflatten(range(len(plan.leaves))), node.holding)
    layout, in_pieces = node.sharding.layout, node.holding.form == "pieces"
    # In pieces, frozen leaves are None
    leaves = [None if in_pieces and not leaf.trainable else 0 for leaf in layout.leaves]
    return ShardedTree(layout.treedef.unflatten(leaves), node.holding)


def _fits(old: Any, new: Any) -> bool:
    """Whether a node's holding says that it fits the old one's place."""
    if type(old) is not type(new) or old.holding != new.holding or new.is_used_up:
        return False
    if old.is_used_up:
        # Its leaves are gone; the next update compares a state's with its plan
        if isinstance(new, ShardedTree):
            new.check_leaves()
        return True
    # In pieces the flats may be of another dtype
    is_held = isinstance(new, ShardedTree) and new.holding.form == "held"
    return is_held and not new.are_leaves_cut


def part_like(path: str, holding: Any, whole: Any, piece_number: int) -> Any:
    """This rank's part of a whole tree, cut as a node of `init`: copies.

    Args:
        path: of the node, for errors.
        holding: its own; of a leaf that every rank holds, its `leaf_form`.
    """
    if isinstance(holding, Holding):
        _check_like(path, holding, whole)
        if holding.form == "pieces":
            given = _with_none(holding, whole)
            device = next(leaf.device for leaf in given if leaf is not None)
            filled = [
                # Where a leaf is frozen there is none
                torch.zeros(spec.shape, dtype=spec.dtype, device=device) if leaf is None else leaf
                for spec, leaf in zip(holding.sharding.layout.leaves, given, strict=True)
            ]
            held = hold(filled, holding.sharding, engine=holding.engine, number=holding.number)
            return held.pieces()
        part = hold(whole, holding.sharding, engine=holding.engine, number=holding.number)
        return part.as_read_only(holding.read_only)
    if isinstance(holding, StateHolding):
        layout, rank = holding.sharding.layout, holding.sharding.rank
        like = _whole_like(holding)
        check_opt_state(like, whole, rank, what=f"the whole state's {path}")
        return ShardedOptState(part_of_state(whole, holding.plan, layout, piece_number), holding)
    if leaf_form(whole) != holding:
        raise _unlike(path, holding, leaf_form(whole), None)
    return whole.clone() if isinstance(whole, Tensor) else whole


def _check_like(path: str, holding: Holding, whole: Any) -> None:
    """Raise unless a whole tree has the structure, shapes and dtypes of a sharded one."""
    layout, rank = holding.sharding.layout, holding.sharding.rank
    expected = layout.trainable
    if holding.form == "pieces":
        expected = tree_map(lambda on: on or None, expected)
    what = f"the whole state's {path or 'value'}"
    same_structure(expected, whole, what=what, rank=rank, remedy=_OF_THIS_PROGRAM)
    for spec, leaf in zip(layout.leaves, _with_none(holding, whole), strict=True):
        wanted, got = (spec.shape, spec.dtype), leaf_form(leaf)
        if leaf is not None and got != wanted:
            raise _unlike(f"{path}.{spec.path}".strip("."), wanted, got, rank)


def _with_none(holding: Holding, whole: Any) -> list[Any]:
    """The leaves of a whole tree in the layout's order; None stands for itself."""
    leaves: list[Any] = holding.sharding.layout.treedef.flatten_up_to(whole)
    return leaves


def _whole_like(holding: StateHolding) -> Any:
    """The structure of the whole state of an optimizer, for `check_opt_state`. On meta, in their
    shapes, the leaves that belong to a param; others may have any."""
    outline: list[Any] = []
    for leaf in holding.plan.leaves:
        if leaf.kind == "replicated":
            outline.append(leaf.kind)
            continue
        follows = leaf.kind == "follows"
        shape = holding.sharding.layout.leaves[leaf.leaf].shape if follows else leaf.shape
        outline.append(torch.empty(shape, device="meta"))
    return holding.plan.treedef.unflatten(outline)


def _unlike(path: str, expected: Any, got: Any, rank: int | None) -> StructureError:
    return StructureError(
        explain(
            "a leaf of the whole state has another shape or dtype than in init",
            path=path,
            expected=expected,
            got=got,
            rank=rank,
            remedy=_OF_THIS_PROGRAM,
        )
    )
