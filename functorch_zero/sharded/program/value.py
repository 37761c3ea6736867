"""The value of a program on one rank: how its nodes are cut, which of its leaves are trained, and
whether a next value fits in its place.

A value's nodes are sharded trees, optimizers' states, and leaves that every rank holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import optree
import torch
from optree import tree_map
from torch import Tensor

from ...errors import StructureError
from ...layout.piece import Piece, refuse, text_from
from ...layout.sharded_tree import Holding, ShardedTree, hold, is_held
from ...optim.state_checks import check_opt_state
from ...params import Engine, as_local, is_on_engine, map_local, map_nodes
from ...sharded_optim.sharded_state import ShardedOptState, StateHolding
from ...step.program_step import check_next_value, device_of
from ...step.refit import without_values
from ...step.state import State, Trained
from ...step.trainable import check_alike
from ...tree import named_leaves, paths, select, settled
from ..checks import donated_state
from ..refit import without_values as leaves_without_values
from ..state import part_of_state
from .ledger import Ledger

_OF_THIS_PROGRAM = "pass a whole state of this program, whose init was given the same trees"


class ValueStructure(NamedTuple):
    """How a program's value is cut: its nodes without their tensors."""

    treedef: Any  # down to the nodes
    paths: Sequence[str]  # of the nodes
    # Holding or StateHolding; of a leaf that every rank holds, its form: it, without values
    nodes: Sequence[Any]

    def on(self, engine: Engine) -> ValueStructure:
        """This structure, of trees that lie on this engine."""
        nodes = [replace(x, engine=engine) if _is_cut(x) else x for x in self.nodes]
        return self._replace(nodes=nodes)

    def fits(self, value: Any) -> bool:
        """Whether a value has this structure down to the nodes, in whose places may be trees."""
        return self._found_in(value) is not None

    def _found_in(self, value: Any) -> list[Any] | None:
        try:
            found: list[Any] = self.treedef.flatten_up_to(value)
        except ValueError:
            return None
        return found

    def with_states(self, value: Any) -> Any:
        """The value, with an optimizer's state made of each bare tree in the place of one. A value
        of another structure is returned as it is: others refuse it.

        Raises:
            StructureError: a bare tree is no such state, or stands in the place of a sharded one.
        """
        found = self._found_in(value)
        if found is None:
            return value
        return self.treedef.unflatten(map(_with_state, self.paths, self.nodes, found))

    def part_of(self, whole: Any, rank: int) -> Any:
        """This rank's part of a whole value, in tensors of its own.

        Raises:
            StructureError: the value has another structure, or a leaf another shape or dtype.
        """
        try:
            nodes = self.treedef.flatten_up_to(whole)
        except ValueError as error:
            raise StructureError(
                "the whole state's value has another structure than the one of init",
                expected=self.treedef,
                got=f"a {type(whole).__name__}: {error}",
                rank=rank,
                remedy=_OF_THIS_PROGRAM,
            ) from error
        like = map(partial(_whole_like, rank=rank), self.paths, self.nodes, nodes)
        check_next_value(
            self.treedef.unflatten(like),
            whole,
            rank,
            what="the whole state's value",
            remedy=_OF_THIS_PROGRAM,
        )
        return self.treedef.unflatten(map(_part_like, self.nodes, nodes))


class Nodes:
    """A value, taken apart once in a step, for all that is asked of its nodes.

    Args:
        structure: that is noted of such values.
        nodes: in the places of the structure.

    Attributes:
        structure, nodes: as given.
    """

    def __init__(self, structure: ValueStructure, nodes: Sequence[Any]):
        self.structure, self.nodes = structure, nodes

    @cached_property
    def value(self) -> Any:
        """The whole of them."""
        return self.structure.treedef.unflatten(self.nodes)

    @classmethod
    def of(cls, value: Any, known: ValueStructure | None = None) -> Nodes:
        """Those of a value. `known`: its structure, if it has that; else it is as its nodes are."""
        nodes, treedef = optree.tree_flatten(value, is_leaf=is_on_engine)
        if known is not None and known.treedef == treedef:
            return cls(known, nodes)
        noted = [node.holding if is_on_engine(node) else without_values(node) for node in nodes]
        return cls(ValueStructure(treedef, paths(value, is_on_engine), noted), nodes)

    @classmethod
    def of_state(
        cls, state: State, known: ValueStructure | None, ledger: Ledger | None = None
    ) -> Nodes:
        """Those of a state, as is noted of their places. Users may have put others there: bare
        trees for optimizers' states, say.

        Args:
            known: the structure of this step's values; None: this one's is another.
            ledger: of the call that is given the state. It notes how they were made, and they know
                their paths then; what a step has made says already where it comes from. None:
                nobody asks.

        Raises:
            DonatedError: a step has taken the storage of one of them.
            StructureError: as `ValueStructure.with_states`, and `trained_like`.
        """
        given = cls.of(state.value, known)
        if known is not None and given.structure is not known:
            given = cls.of(known.with_states(state.value), known)
        found = []
        for path, noted, node in given._rows():
            is_tree = is_on_engine(node)
            if is_tree and node.is_used_up:
                raise donated_state(state.step)
            if ledger is not None:
                ledger.note_given(path, node.story if is_tree else node)
            # One without an origin keeps none: a rank that has read it knows it by that
            is_own = _is_as_noted(node, noted) and node.origin
            own = node if is_own else _as_noted(node, noted)
            if ledger is not None and is_tree:
                # A program may change dicts of its value, and the state stays as it is
                own = own.twin() if own is node else own
                own.origin = own.origin or _origin(ledger.step, path)
                own.path_in_value = path
            found.append(own)
        return cls(given.structure, found)

    def named(self, step: int) -> Nodes:
        """These nodes as is noted of their places, and named as those of the value of this step."""
        found = []
        for path, noted, node in self._rows():
            own = node if _is_as_noted(node, noted) else _as_noted(node, noted)
            if is_on_engine(own):
                own.origin, own.path_in_value = _origin(step, path), None
            found.append(own)
        return Nodes(self.structure, found)

    def _rows(self) -> Iterator[tuple[str, Any, Any]]:
        """The path of each node, what is noted of its place, and the node."""
        return zip(self.structure.paths, self.structure.nodes, self.nodes, strict=True)

    @property
    def device(self) -> torch.device:
        """That of the first held tree, of which no leaf is cut; else of a tensor."""
        for node in self.nodes:
            if is_held(node) and (own := node.flats()):
                device: torch.device = own[0].device
                return device
        return device_of(as_local(self.value))

    def next(self, value: Any, rank: int, *, free: Sequence[str]) -> Nodes:
        """The nodes of the value that a program has returned in this one's place, with plain
        tensors for single leaves of sharded trees.

        To compare the leaves of a tree would cut them, so nodes whose holdings say that they fit
        are left out.

        Args:
            free: names of entries whose leaves may have another shape or dtype.

        Raises:
            StructureError: the value has another structure, or ranks hold parts of such a leaf.
        """
        nodes, treedef = optree.tree_flatten(value, is_leaf=is_on_engine)
        if treedef != self.structure.treedef:
            outline = self.structure.treedef.unflatten(map(_structure_of, self.nodes))
            check_next_value(outline, value, rank)  # which names the difference
        own = [x if is_on_engine(x) else _plain(x) for x in nodes]
        before, after = [*self.nodes], [*own]
        for n, (one, two) in enumerate(zip(self.nodes, nodes, strict=True)):
            if is_on_engine(two):
                two.num_uses += 1
            if not is_on_engine(one) or type(one) is not type(two):
                continue
            if _fits(one, two):
                before[n] = after[n] = None
            elif one.holding == two.holding:
                before[n], after[n] = one.as_it_lies, two.as_it_lies
        if any(node is not None for node in before):
            expected = treedef.unflatten(map(_structure_of, before))
            check_next_value(expected, treedef.unflatten(after), rank, free=free)
        return Nodes(self.structure, own)

    @property
    def by_path(self) -> dict[str, Any]:
        """The nodes by their paths, each of which the value has once."""
        return dict(zip(self.structure.paths, self.nodes, strict=True))

    def check_states(self, rank: int) -> None:
        """Raise unless optimizers' states have the structure that is noted of those there."""
        for path, noted, node in self._rows():
            if isinstance(noted, StateHolding) and isinstance(node, ShardedOptState):
                check_opt_state(noted.like, node.as_it_lies, rank, what=f"state.{path}")


def _is_cut(noted: Any) -> bool:
    """Whether this is what a `ValueStructure` has of a sharded tree or an optimizer's state."""
    return isinstance(noted, Holding | StateHolding)


def _with_state(path: str, noted: Any, node: Any) -> Any:
    """A node of a value, of which a bare tree is an optimizer's state as it is noted."""
    if is_on_engine(node) or not _is_cut(noted):
        return node
    sharding, what = noted.sharding, f"state.{path or 'value'}"
    if isinstance(noted, Holding):
        raise StructureError(
            f"{what} has been replaced by a whole tree",
            expected="a ShardedTree, as in the state of `init`",
            got=f"a {type(node).__name__}",
            rank=sharding.rank,
            remedy=f"fz.shard_tree(tree, layout_like={what}), of the state as it was, or "
            "step.shard(...) of a whole state",
        )
    like = noted.like
    if optree.tree_structure(node) != noted.plan.treedef:  # before its leaves are taken for pieces
        check_opt_state(like, node, sharding.rank, what=what)
    made = ShardedOptState.of_shown(node, noted)
    check_opt_state(like, made.as_it_lies, sharding.rank, what=what)
    return made


def _origin(step: int, path: str) -> str:
    """Of a node of the value of this step: programs may keep those of earlier ones."""
    return text_from(f"step {step}'s value", path)


def _is_as_noted(node: Any, noted: Any) -> bool:
    """Whether a node is as is noted of its place. The usual case: a step has made it for that, and
    nobody has read its leaves."""
    return is_on_engine(node) and node.holding is noted and not node.are_leaves_shown


def _as_noted(node: Any, noted: Any) -> Any:
    """A node as is noted of its place, whose leaves nobody has read: a tree is trained, or read
    only, and has a name, as in the first value, whatever its leaves say."""
    if not is_on_engine(node):
        return settled(node)
    holding, engine = node.holding, node.holding.engine
    if isinstance(node, ShardedOptState):
        # Pickled, it has lost its engine
        is_lost = engine is None and _is_cut(noted)
        return node.held_as(replace(holding, engine=noted.engine) if is_lost else holding)
    # In another form it doesn't fit, as `Nodes.next` tells
    if not isinstance(noted, Holding) or holding.form != noted.form:
        return node.held_as(holding)
    own = engine is not None and engine is not noted.engine
    return trained_like(node, replace(noted, engine=engine) if own else noted)


def as_marked(value: Any, nameless: str | None) -> Any:
    """The value of `init`, whose leaves are asked once which of them are trained: its trees know it
    from now on, and their paths as names, but for the tree in the nameless place. Other tensors are
    not trained. The same as of whole trees: a clone that is made without gradients isn't
    trained."""
    made = Nodes.of(value)

    def mark(node: Any, path: str) -> Any:
        if not isinstance(node, ShardedTree):
            return settled(map_local(_detached, node))
        holding = node.holding
        return node.held_as(
            replace(
                holding,
                read_only=node.is_read_only if is_held(node) else holding.read_only,
                # One that is the whole value keeps its name, too
                name=holding.name if path in ("", nameless) else path,
            )
        )

    # A tree that the value holds twice has a node for each
    return made.structure.treedef.unflatten(map(mark, made.nodes, made.structure.paths))


def _detached(leaf: Any) -> Any:
    # Others stay as they are: a detached view no longer knows the flat that it lies in
    return leaf.detach() if isinstance(leaf, Tensor) and leaf.requires_grad else leaf


def trained_like(tree: ShardedTree, noted: Holding) -> ShardedTree:
    """A tree in the place of another one, of which this is noted. A tree from a step that trains
    other leaves is copied, where its pieces are of the same elements."""
    theirs, ours = tree.sharding.layout, noted.sharding.layout
    # By identity first: comparing leaves takes longer
    is_alike = theirs is ours or theirs.trained == ours.trained
    if tree.holding == noted:
        if is_alike:
            return tree.held_as(noted)
        # As leaves from elsewhere, which are copied
        return ShardedTree.of_homes(ShardedTree.of_local(tree.local_tree, noted).homes(), noted)
    if is_alike:
        return tree.held_as(tree.holding)
    raise StructureError(
        "a tree of the value trains other leaves than the one that was in its place, and is "
        "cut in another way",
        path=noted.name or None,
        expected=[leaf.path for leaf in ours.leaves if leaf.trainable],
        got=[leaf.path for leaf in theirs.leaves if leaf.trainable],
        rank=tree.sharding.rank,
        remedy="give both steps one level; or go by whole trees, step.shard(whole), where "
        "whole has the tree that other.unshard(...) gives",
    )


def beside_params(value: Any) -> Any:
    """A value whose optimizers' states lie beside the params, also of those that have a place."""

    def beside(node: Any) -> Any:
        if not isinstance(node, ShardedOptState):
            return node
        return node.brought_for(None)

    return map_nodes(beside, value)


def whole_value(value: Any) -> Any:
    """A value as a whole state has it: copies. Collectives: those of `fz.unshard`."""

    def whole(node: Any) -> Any:
        if is_on_engine(node):
            return node.engine.unshard(node)
        return node.clone() if isinstance(node, Tensor) else node

    return map_nodes(whole, value)


def trained_of(value: Any) -> Trained:
    """Which leaves of the whole value are trained."""

    def trained(node: Any) -> Any:
        if is_held(node):
            return node.sharding.layout.treedef.unflatten(node.trained)
        return tree_map(lambda leaf: False, as_local(node))

    flags = map_nodes(trained, value)
    return Trained(tuple(named_leaves(flags).items()))


def check_trained_alike(whole: Any, part: Any, rank: int) -> None:
    """Raise, naming the first leaf, unless of a whole value those leaves require grad that are
    trained in its part, which is cut as another state's."""
    check_alike(
        trained_of(part),
        Trained.of(whole),
        "the whole state trains other leaves than the program's last init or refit",
        rank=rank,
        remedy="step.refit of the unsharded step makes a state of this program; or step.init of "
        "params that are trained alike, before step.shard",
    )


def without_pieces(value: Any) -> Any:
    """A value that a program's `init` has returned, with plain tensors in the places of single
    leaves of sharded trees."""
    return map_nodes(_plain, value)


def _plain(node: Any) -> Any:
    """A node of a value; of a single leaf of a sharded tree a copy, since the tree's storage is
    its own."""
    if not isinstance(node, Piece):
        return node
    if not node.is_whole:
        remedy = "keep a tree of them, which tree_map makes, or a whole leaf, fz.unshard(tree)['w']"
        refuse("a leaf of them is in the program's value by itself", node, f"{remedy} say")
    return node.local


def _structure_of(node: Any) -> Any:
    """A used up node's structure, with numbers for leaves; any other node is itself."""
    if not is_on_engine(node) or not node.is_used_up:
        return node
    if isinstance(node, ShardedOptState):
        plan = node.holding.plan
        return ShardedOptState.of_shown(
            plan.treedef.unflatten(range(len(plan.leaves))), node.holding
        )
    holding = node.holding
    # In pieces, frozen leaves are None
    leaves = [0 if on or holding.form == "held" else None for on in holding.trained]
    return ShardedTree(holding.sharding.layout.treedef.unflatten(leaves), holding)


def _fits(old: Any, new: Any) -> bool:
    """Whether a node's holding says that it fits the old one's place."""
    if old.holding != new.holding or new.is_used_up:
        return False
    if old.is_used_up:
        # Its leaves are gone; the next update compares a state's with its plan
        if isinstance(new, ShardedTree):
            new.check_leaves()
        return True
    # In pieces the flats may be of another dtype
    return is_held(new) and not new.are_leaves_shown


def _part_like(noted: Any, whole: Any) -> Any:
    """This rank's part of a whole node that fits what is noted, in tensors of its own."""
    if isinstance(noted, Holding):
        return hold(whole, noted)
    if isinstance(noted, StateHolding):
        return part_of_state(whole, noted)
    return whole.clone() if isinstance(whole, Tensor) else whole


def _whole_like(path: str, noted: Any, whole: Any, *, rank: int) -> Any:
    """A node like the one that a whole value must have at this path, for `check_next_value`. An
    optimizer's state is checked here instead, and so is like itself."""
    if isinstance(noted, Holding):
        layout = noted.sharding.layout
        like = leaves_without_values(layout)
        # In pieces, frozen leaves are None
        return like if noted.form == "held" else select(like, layout.trainable)
    if isinstance(noted, StateHolding):
        check_opt_state(_whole_state_like(noted), whole, rank, what=f"state.{path}")
        return whole
    return noted


def _whole_state_like(holding: StateHolding) -> Any:
    """What `check_opt_state` compares a whole optimizer's state with: for a leaf that belongs to a
    param a meta tensor of its whole shape, for others a text, which stands for any."""
    outline: list[Any] = []
    for leaf in holding.plan.leaves:
        if leaf.kind == "replicated":
            outline.append(leaf.kind)
            continue
        follows = leaf.kind == "follows"
        shape = holding.sharding.layout.leaves[leaf.leaf].shape if follows else leaf.shape
        outline.append(torch.empty(shape, device="meta"))
    return holding.plan.treedef.unflatten(outline)
