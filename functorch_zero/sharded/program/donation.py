"""`Donation`: the storage that a program's step may write over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree

from ...layout.sharded_tree import ShardedTree
from ...params import as_local, is_on_engine
from ...sharded_optim.ferry import is_moved
from ...sharded_optim.sharded_state import ShardedOptState, is_placed
from ...tree import storages


class EarlierCalls:
    """The findings about a program of its calls so far, the same on all ranks. The next call
    donates by them.

    Attributes:
        num_gradients: the most that a call has taken; None: there was none yet.
        needed: by their places in the value, the nodes that a call has used after their update.
    """

    def __init__(self) -> None:
        self.num_gradients: int | None = None
        self.needed: set[int] = set()

    def note(self, call: Donation) -> None:
        """Note a call that has ended, and failed on no rank."""
        self.num_gradients = max(call.num_taken, self.num_gradients or 0)
        self.needed |= call.needed


class Donation:
    """The trees and optimizers' states that one call of a program was given, and may be updated in
    place.

    They are those that the value holds once, and whose leaves the program hasn't read: it may hold
    one that it has, and would see it change. Nor has it needed them after their update in an
    earlier step. Ranks may decide differently: collectives are the same either way.

    Nothing is written to before the program has taken as many gradients as it ever has, and all
    ranks agree: see Note [before the first write] in `phases`.

    Args:
        value: as the program is given it.
        earlier: calls of the program.
        agree: tell all ranks that this one is about to write. It raises where another has failed.

    Attributes:
        num_taken: the number of gradients so far.
        needed: those of the earlier calls, and of this one.
    """

    def __init__(
        self,
        value: Any,
        earlier: EarlierCalls,
        agree: Callable[[], None],
    ):
        self._nodes = optree.tree_leaves(value, is_leaf=is_on_engine)
        self._num_gradients, self._agree = earlier.num_gradients, agree
        self.needed = set(earlier.needed)
        # By id, the nodes that an update has left as they were, with the number of their uses then
        self._updated: dict[int, tuple[Any, int]] = {}
        self._agreed = False
        self.num_taken = 0

    def note_result(self, result: Any) -> None:
        """Note the nodes that the program has used after their update, or returns, so that the next
        step needs them."""
        returned = set(map(id, optree.tree_leaves(result, is_leaf=is_on_engine)))
        for node, num_uses in self._updated.values():
            if node.num_uses > num_uses or id(node) in returned:
                self.needed.update(self._places_of(node))

    def note_update(self, params: ShardedTree, state: ShardedOptState) -> None:
        """Note that an update of both has ended, which has not written over them."""
        for node in (params, state):
            self._updated.setdefault(id(node), (node, node.num_uses))

    def _places_of(self, node: Any) -> list[int]:
        return [n for n, given in enumerate(self._nodes) if given is node]

    def takes(self, params: ShardedTree, state: ShardedOptState) -> bool:
        """Whether both may be written over. Every rank asks at the same places: the first answer
        of a step that may be yes is a collective."""
        if self._num_gradients is None or self.num_taken < self._num_gradients:
            return False
        if not self._agreed:
            self._agree()
            self._agreed = True
        return self._is_free(params) and self._is_free(state)

    def _is_free(self, node: Any) -> bool:
        places = self._places_of(node)
        if len(places) != 1 or _is_read(node) or not self.needed.isdisjoint(places):
            return False
        # One that an update has used up before has no storage any more
        others = [x for x in self._nodes if x is not node]
        others = [x for x in others if not (is_on_engine(x) and x.is_used_up)]
        # An average that began as a copy of the tree, say, or an older state
        written = _written_of(node)
        return all(written.isdisjoint(_storages_of(other)) for other in others)


def _is_read(node: Any) -> bool:
    """Whether the program has read leaves of a node that it was given, which an update would
    change."""
    return bool(node.are_leaves_shown)


def _written_of(node: ShardedTree | ShardedOptState) -> set[int]:
    """The storages of a node that an update would write to."""
    if isinstance(node, ShardedTree):
        return _storages_of(node)
    if is_placed(node):
        return storages([leaf for leaf in optree.tree_leaves(node.as_it_lies) if is_moved(leaf)])
    # An update makes a new count and a new rate. States of one optimizer may share the old ones.
    rows = zip(optree.tree_leaves(node.as_it_lies), node.holding.plan.leaves, strict=True)
    return storages([leaf for leaf, planned in rows if planned.is_cut])


def _storages_of(node: Any) -> set[int]:
    """The storages of a node, or of a leaf."""
    if not isinstance(node, ShardedTree):
        return storages(as_local(node))
    # Frozen flats go from tree to tree
    flats = node.pieces().flats() if node.holding.form == "held" else node.flats()
    return storages([flat for flat in flats if flat is not None])
