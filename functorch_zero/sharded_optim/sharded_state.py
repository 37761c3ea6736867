"""`ShardedOptState`: an optimizer's state that knows how it is cut over ranks, as one of them holds
it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from operator import is_
from typing import Any

import optree
from torch import Tensor

from ..layout.extent import Extent
from ..layout.home import HomedLeaves, Lease
from ..layout.levels import level_of
from ..layout.node import LeafPart, ShardedNode, register_sharded
from ..layout.piece import Piece, content_word, leases_of
from ..layout.sharding import Sharding
from ..params import Engine
from ..tree import outline
from .ferry import is_moved
from .state_plan import StatePlan, state_like


@dataclass(frozen=True)
class StateHolding:
    """The static part: equal for states that fit each other.

    Attributes:
        sharding: how the params are cut that the state follows, and which rank's part this is.
        plan: which leaves of the state follow a param, and which have an owner.
        engine: answers for the state on its ranks. Not compared, and not pickled.
        brought: of a state that has a place, brings its tree beside the params.
            None: it lies beside them. Not compared, and not pickled.
    """

    sharding: Sharding
    plan: StatePlan = field(repr=False)
    engine: Engine | None = field(default=None, compare=False, repr=False)
    brought: Callable[[Any], Any] | None = field(default=None, compare=False, repr=False)

    def lying(self, brought: Callable[[Any], Any] | None) -> StateHolding:
        """This holding, of leaves that lie in another place."""
        return self if brought is self.brought else replace(self, brought=brought)

    @property
    def paths(self) -> Sequence[str]:
        """Of the state's leaves."""
        return self.plan.paths

    @cached_property
    def parts(self) -> Sequence[LeafPart | None]:
        """Per leaf of the state, the part of it that is here; None: all ranks have the same,
        whole."""
        layout, piece_number = self.sharding.layout, self.sharding.piece_number
        found: list[LeafPart | None] = []
        for leaf in self.plan.leaves:
            if leaf.is_cut:
                b, _ = layout.in_buckets[leaf.leaf]
                is_whole = not level_of(layout.buckets[b]).cuts_state
                shape = leaf.shape_here(layout, piece_number)
                found.append(LeafPart(leaf.extent(layout, piece_number), is_whole, shape))
            elif leaf.kind == "owned":
                is_here = leaf.owner == piece_number
                extent = Extent(leaf.shape, 0, prod(leaf.shape) if is_here else 0)
                found.append(LeafPart(extent, False, leaf.shape if is_here else (0,)))
            else:
                found.append(None)
        return found

    @property
    def like(self) -> Any:
        """The structure of the state on this rank, for `check_opt_state`."""
        return state_like(self.plan, self.sharding.layout, self.sharding.piece_number)

    def rows_of(self, leaves: Sequence[Any]) -> Iterable[tuple[Any, LeafPart | None, str]]:
        """A state's leaves, with their parts and paths. Somebody's own tree, which no plan fits,
        has none, and is refused where it is used."""
        if len(leaves) != len(self.parts):
            return [(leaf, None, "") for leaf in leaves]
        return zip(leaves, self.parts, self.paths, strict=True)

    def __hash__(self) -> int:
        return hash((self.sharding.rank, self.sharding.mesh, len(self.plan.leaves)))

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the engine, which is bound to this process's groups and connections
        return StateHolding, (self.sharding, self.plan)

    def __deepcopy__(self, memo: dict[int, Any]) -> StateHolding:
        """Itself: copies of a state lie on the ranks that the state lies on."""
        return self


class ShardedOptState(ShardedNode):
    """This rank's part of an optimizer's state, and how it is cut: a pytree node around the part.

    The state's own fields are reached as in the state itself, `state.mu`, `state[0].count`; `tree`
    is the state without the node. There, leaves that follow a param, or that one rank owns, are
    `Piece`s. For this library, they are 1-D (n,) in `as_it_lies` and `beside`.

    Args:
        tree: this rank's part of the state, in plain tensors.
        holding: how it is cut.

    Attributes:
        leases: of which the first one is its own, which its pieces have.
        holding, origin, path_in_value, num_uses: as of all nodes.
    """

    holding: StateHolding
    _what, _name = "an optimizer's state", "state"
    _remedy_in_a_loss = "pass the loss fz.unshard({}), or the number that it needs"
    without_engine = (
        "an optimizer's state that was pickled has no group of ranks. Remedy: use the step that "
        "made it, or optimizer.init(params) on the sharded tree again"
    )

    def __init__(self, tree: Any, holding: StateHolding):
        super().__init__(holding)
        self._local = HomedLeaves.of(tree)
        self._taken: list[Any] = []  # the leaves that users see, of which those are
        self.leases = [Lease()]

    @classmethod
    def of_local(
        cls, local: HomedLeaves, holding: StateHolding, leases: Sequence[Lease] = ()
    ) -> ShardedOptState:
        """The state of these leaves, and of flats that nobody else has; or another node of a state
        that has these leases."""
        made = cls((), holding)
        made._local, made.leases = local, leases or made.leases
        return made

    @classmethod
    def of_shown(cls, tree: Any, holding: StateHolding) -> ShardedOptState:
        """The state whose leaves users see as these: pieces, numbers and plain tensors."""
        made = cls((), holding.lying(None))
        made._shown = tree
        made._take_shown()
        return made

    def _take_shown(self) -> None:
        """Hold the leaves that users have put into the tree that they see."""
        leaves, treedef = optree.tree_flatten(self._shown)
        if treedef == self._local.treedef and all(map(is_, leaves, self._taken)):
            return
        known = dict(zip(map(id, self._taken), self._local.leaves, strict=True))
        local = []
        for leaf, part, path in self.holding.rows_of(leaves):
            own = known.get(id(leaf), leaf)
            if isinstance(leaf, Tensor) and part is not None:
                # Of a whole leaf any shape: another one is refused where the state is used
                fault = part.fault_of(leaf, leaf.shape if part.is_whole else None)
                if fault is not None:
                    raise fault.error("a leaf of an optimizer's state", path, self.of_rank)
                if own is leaf:
                    own = part.local_of(leaf)
                    # A copy: it may be a view of another state's, of which a step may take the
                    # storage
                    own = own if isinstance(leaf, Piece) else own.clone()
            local.append(own)
        self._local = HomedLeaves.of(treedef.unflatten(local), self._local.homes.values())
        self._taken, self.leases = leaves, [*self.leases, *leases_of(leaves)]

    def _pieces(self) -> tuple[Any, list[Any]]:
        local, holding = self.brought_for(None).local, self.holding
        lying: dict[str, Any] = {"lease": self.leases[0], "is_brought": holding.brought is not None}
        rows = holding.rows_of(local.leaves)
        self._taken = [self._piece(leaf, part, path, **lying) for leaf, part, path in rows]
        return local.treedef, self._taken

    def _shown_leaves(self) -> list[Any]:
        leaves: list[Any] = optree.tree_leaves(self._shown)
        return leaves

    @property
    def in_words(self) -> str:
        """How the params are cut that it follows, in words for errors."""
        return f"of params cut as {self.holding.sharding.in_words}"

    @property
    def as_it_lies(self) -> Any:
        """This rank's part of the state in plain tensors, wherever it lies."""
        return self.local.tree

    @property
    def local(self) -> HomedLeaves:
        """This rank's part of the state in plain tensors, wherever it lies, with the flats that
        nobody else has."""
        self._check_readable()
        # Users may have put other leaves into the tree that they see
        if self._shown is not None:
            self._take_shown()
        return self._local

    @property
    def tensors(self) -> list[Any]:
        """As of all nodes."""
        return [*self.local.leaves]

    def brought_for(self, brought: Callable[[Any], Any] | None) -> ShardedOptState:
        """The state for updates: itself, where it lies beside the params, or `brought` brings it
        there; else what is brought there."""
        if self.holding.brought is None or self.holding.brought is brought:
            return self
        return ShardedOptState(self.beside, self.holding.lying(None))

    def with_local(self, tree: Any) -> ShardedOptState:
        """A state of other plain tensors, which lie where these do; some may be these."""
        local = HomedLeaves.of(tree, self.local.homes.values())
        return ShardedOptState.of_local(local, self.holding, self.leases)

    def with_numbers(self, tree: Any) -> ShardedOptState:
        """A state of a tree in which some numbers are others, which ranks compare."""
        known = set(map(id, self.local.leaves))
        leaves = optree.tree_leaves(tree)
        numbers = [x for x in leaves if id(x) not in known and not is_moved(x)]
        words = ", ".join(map(content_word, numbers))
        made = self.with_local(tree)
        made.origin = f"#{self.story.word:08x} with {words}"
        return made

    def _unread(self, holding: StateHolding) -> ShardedOptState:
        return ShardedOptState.of_local(self.local, holding, self.leases)

    @property
    def beside(self) -> Any:
        """This rank's part of the state in plain tensors beside the params, for an update."""
        tree, brought = self.as_it_lies, self.holding.brought
        return tree if brought is None else brought(tree)

    def use_up(self) -> None:
        """Forget the tensors, which another state holds from now on."""
        for lease in self.leases:
            lease.has_ended = True
        self._local, self._shown, self._taken = HomedLeaves.of(()), None, []

    def _replace(self, **changes: Any) -> ShardedOptState:
        """Of a NamedTuple: the state with other fields."""
        return ShardedOptState.of_shown(self.tree._replace(**changes), self.holding)

    def _asdict(self) -> dict[str, Any]:
        """Of a NamedTuple: its fields by name."""
        fields: dict[str, Any] = self.tree._asdict()
        return fields

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardedOptState, (self.beside, self.holding.lying(None))

    def __repr__(self) -> str:
        if self.is_used_up:
            return "ShardedOptState(donated to a step)"
        return f"ShardedOptState({outline(self._local.tree, most=4)})"


def is_placed(node: Any) -> bool:
    """Whether a node of a value is an optimizer's state that has a place."""
    return isinstance(node, ShardedOptState) and node.holding.brought is not None


register_sharded(ShardedOptState, ShardedOptState.of_shown)
