"""`Donation`: the storage that a program's step may write over.

Note [before the first write]: a step writes to the state that it was given only when donating, in
an update, after the last of its gradients. All ranks have agreed by then. So whatever fails before,
on any rank, leaves every rank a good state, and the step can be tried again. Afterwards the given
state is used up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ...layout.sharded_tree import ShardedTree
from ...params import is_on_engine
from ...sharded_optim.ferry import is_moved
from ...sharded_optim.sharded_state import ShardedOptState, is_placed
from ...tree import storages


class EarlierCalls(NamedTuple):
    """The findings about a program of its calls so far, the same on all ranks. The next call
    donates by them."""

    # The most that a call has taken, or will, as the program says; None: nobody knows yet
    num_gradients: int | None
    # By their places in the value, the nodes that a call has used after their update
    needed: frozenset[int] = frozenset()


class Donation:
    """The trees and optimizers' states that one call of a program was given, and may be updated in
    place.

    They are those that the value holds once, and whose leaves the program hasn't read: it may hold
    one that it has, and would see it change. Nor has it needed them after their update in an
    earlier step. Ranks may decide differently: collectives are the same either way.

    Nothing is written to before the program has taken as many gradients as it ever has, and all
    ranks agree: see Note [before the first write].

    Args:
        nodes: of the value, as the program is given it.
        earlier: calls of the program.
        agree: called before the first write: they tell all ranks that this one is about to write,
            and raise where another has failed.

    Attributes:
        num_taken: the number of gradients so far; of those that have failed, and were taken once
            more, none counts.
    """

    def __init__(
        self,
        nodes: Sequence[Any],
        earlier: EarlierCalls,
        agree: Sequence[Callable[[], object]],
    ):
        self._nodes, self.num_taken = nodes, 0
        self._earlier, self._agree = earlier, agree
        # The nodes that an update has left as they were, with the number of their uses then
        self._updated: list[tuple[Any, int]] = []
        self._agreed = False

    @property
    def findings(self) -> EarlierCalls:
        """The findings of all calls, this one among them, which has failed on no rank: the nodes
        that the program has used after their update, or returned, are needed by the next step."""
        num_gradients, needed = self._earlier
        used = {id(node) for node, num_uses in self._updated if node.num_uses > num_uses}
        places = {n for n, node in enumerate(self._nodes) if id(node) in used}
        return EarlierCalls(max(self.num_taken, num_gradients or 0), needed | places)

    def note_update(self, params: ShardedTree, state: ShardedOptState) -> None:
        """Note that an update of both has ended, which has not written over them."""
        self._updated += [(node, node.num_uses) for node in (params, state)]

    def takes(self, params: ShardedTree, state: ShardedOptState, *, by_any: bool) -> bool:
        """Whether both may be written over. Every rank asks at the same places: the first answer
        of a step that may be yes is a collective.

        `by_any`: by an update that may write to any tensor of the state.
        """
        num_gradients, needed = self._earlier
        if num_gradients is None or self.num_taken < num_gradients:
            return False
        if not self._agreed:
            for function in self._agree:
                function()
            self._agreed = True
        for node in (params, state):
            places = [n for n, given in enumerate(self._nodes) if given is node]
            # Leaves that the program has read are its own
            if len(places) != 1 or node.are_leaves_shown or places[0] in needed:
                return False
        others = []
        for node in self._nodes:
            # One that an update has used up before has no storage any more
            is_used_up = is_on_engine(node) and node.is_used_up
            if node is not params and node is not state and not is_used_up:
                others.append(node.tensors if is_on_engine(node) else node)
        # Trees share frozen flats, which no update writes to
        rows = zip(params.flats(), params.sharding.layout.buckets, strict=True)
        of_params = storages([flat for flat, bucket in rows if bucket.trainable])
        of_others, of_state = storages(others), storages(state.tensors)
        # An average that began as a copy of the tree, say, or an older state
        written = of_state if by_any else _written_of(state)
        return of_params.isdisjoint(of_others | of_state) and written.isdisjoint(of_others)


def _written_of(state: ShardedOptState) -> set[int]:
    """The storages of a state that an update would write to: all that lies in a place, or else the
    flats. It makes a new count and a new rate, and states of one optimizer may share the old."""
    _, leaves, homes = state.local
    written = leaves if is_placed(state) else [home.flat for home in homes.values()]
    return storages([*filter(is_moved, written)])
