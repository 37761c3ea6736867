"""`ShardedOptState`: an optimizer's state that knows how it is cut over ranks, as one of them holds
it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

import optree
from torch import Tensor

from ..errors import DonatedError, StructureError
from ..in_a_loss import are_trees_hidden
from ..introspection import name_in_callers
from ..layout.extent import Extent
from ..layout.home import HomedLeaves, Lease, has_ended
from ..layout.levels import level_of
from ..layout.piece import (
    AsMade,
    History,
    Piece,
    content_word,
    leases_of,
    refuse,
    story_from,
    story_of,
    text_from,
)
from ..layout.sharding import Sharding
from ..params import Engine, OnEngine, Story, register_node
from ..tree import outline, own_copy
from .ferry import is_moved
from .state_plan import StatePlan


class _Place(NamedTuple):
    """The part of a state's leaf that is here."""

    extent: Extent
    is_whole: bool  # whether every rank holds all of it, by the layout
    shape: tuple[int, ...]  # of the tensor that is here

    def piece(self, leaf: Tensor, history: History) -> Piece:
        """The leaf as users see it."""
        shape = self.extent.shape if self.is_whole else (self.extent.num_here,)
        return Piece(leaf.reshape(shape), self.extent, is_whole=self.is_whole, history=history)

    def local(self, leaf: Any, path: str, rank: int) -> Any:
        """The inverse: the leaf as this rank holds it. What is no tensor stays as it is."""
        if not isinstance(leaf, Tensor):
            return leaf
        if isinstance(leaf, Piece):
            if (leaf.extent, leaf.is_whole) != (self.extent, self.is_whole):
                refuse("a leaf of an optimizer's state was replaced by another leaf's", leaf)
            return leaf.here.reshape(self.shape)
        if not self.is_whole:
            raise StructureError(
                "a leaf of an optimizer's state, of which ranks hold parts, was replaced by a "
                "plain tensor",
                path=path,
                expected=f"elements {self.extent.start} to {self.extent.stop} of a leaf of "
                f"shape {self.extent.shape}, made by tree_map of the state's own",
                got=f"shape {(*leaf.shape,)}",
                rank=rank,
                remedy="torch.zeros_like, say, of the leaf that it replaces",
            )
        # One of another shape is refused where the state is used
        fits = leaf.shape == self.extent.shape
        # A copy: it may be a view of another state's, of which a step may take the storage
        return leaf.detach().reshape(self.shape).clone() if fits else leaf


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

    def places(self) -> list[_Place | None]:
        """Per leaf of the state, its place; None: all ranks have the same, whole."""
        layout, piece_number = self.sharding.layout, self.sharding.piece_number
        found: list[_Place | None] = []
        for leaf in self.plan.leaves:
            if leaf.is_cut:
                b, _ = layout.places[leaf.leaf]
                is_whole = not level_of(layout.buckets[b]).cuts_state
                shape = leaf.shape_here(layout, piece_number)
                found.append(_Place(leaf.extent(layout, piece_number), is_whole, shape))
            elif leaf.kind == "owned":
                is_here = leaf.owner == piece_number
                extent = Extent(leaf.shape, 0, prod(leaf.shape) if is_here else 0)
                found.append(_Place(extent, False, leaf.shape if is_here else (0,)))
            else:
                found.append(None)
        return found

    def __hash__(self) -> int:
        return hash((self.sharding.rank, self.sharding.mesh, len(self.plan.leaves)))

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the engine, which is bound to this process's groups and connections
        return StateHolding, (self.sharding, self.plan)

    def __deepcopy__(self, memo: dict[int, Any]) -> StateHolding:
        """Itself: copies of a state lie on the ranks that the state lies on."""
        return self


class ShardedOptState(OnEngine):
    """This rank's part of an optimizer's state, and how it is cut: a pytree node around the part.

    The state's own fields are reached as in the state itself, `state.mu`, `state[0].count`; `tree`
    is the state without the node. There, leaves that follow a param, or that one rank owns, are
    `Piece`s. For this library, they are 1-D (n,) in `as_it_lies` and `beside`.

    Args:
        tree: this rank's part of the state, in plain tensors.
        holding: how it is cut.

    Attributes:
        leases: its own, which pieces of it have, and those of leaves that `tree_map` has put here.
        holding, origin, place, num_uses: as of all nodes.
    """

    holding: StateHolding
    without_engine = (
        "an optimizer's state that was pickled has no group of ranks. Remedy: use the step that "
        "made it, or optimizer.init(params) on the sharded tree again"
    )

    def __init__(self, tree: Any, holding: StateHolding):
        super().__init__(holding)
        self._local = HomedLeaves.of(tree)
        self._made: AsMade | None = None  # its leaves, where the library has made them
        self.leases = [Lease()]

    @classmethod
    def of_local(cls, local: HomedLeaves, holding: StateHolding) -> ShardedOptState:
        """The state of these leaves, and of flats that nobody else has."""
        made = cls((), holding)
        made._local = local
        return made

    @classmethod
    def of_shown(cls, tree: Any, holding: StateHolding) -> ShardedOptState:
        """The state whose leaves users see as these: pieces, numbers and plain tensors."""
        leaves, treedef = optree.tree_flatten(tree)
        local = leaves
        # Somebody's own tree, which no plan fits, is refused where it is used
        if len(leaves) == len(holding.plan.leaves):
            rank = holding.sharding.rank
            rows = zip(leaves, holding.places(), holding.plan.paths, strict=True)
            local = [
                leaf if place is None else place.local(leaf, path, rank)
                for leaf, place, path in rows
            ]
        made = cls.of_local(HomedLeaves(treedef, local, {}), holding.lying(None))
        made._shown = tree
        made.leases += leases_of(leaves)
        return made

    @property
    def tree(self) -> Any:
        """This rank's part of the state as users see it, beside the params.

        Raises:
            StructureError: it is read inside of a loss.
            DonatedError: a step has taken its storage.
        """
        self.num_uses += 1
        self._check()
        if self._shown is None:
            self._shown = self._as_pieces(self.brought_for(None).local)
        return self._shown

    def _as_pieces(self, local: HomedLeaves) -> Any:
        # Somebody's own tree, which no plan fits
        if len(local.leaves) != len(self.holding.plan.leaves):
            return local.tree
        shown, is_brought = [], self.holding.brought is not None
        names = self.holding.plan.paths
        rows = zip(local.leaves, self.holding.places(), names, strict=True)
        for leaf, place, path in rows:
            if isinstance(leaf, Tensor) and place is not None:
                given = None if self.place is None else text_from(self.place, path)
                text = text_from(self.origin, path)
                history = History(text, path=given, lease=self.leases[0], is_brought=is_brought)
                shown.append(place.piece(leaf, history))
            else:
                shown.append(leaf)
        self._made = AsMade.of(self.origin, shown)
        return local.treedef.unflatten(shown)

    @property
    def is_used_up(self) -> bool:
        """Whether a step has taken its storage, or that of leaves which `tree_map` has put here."""
        return any(map(has_ended, self.leases))

    @property
    def story(self) -> Story:
        """How the leaves were made: see Note [words] in `piece`."""
        names = self.holding.plan.paths
        if self._shown is None:
            return story_from(self.origin, names)
        return story_of(optree.tree_leaves(self._shown), names, self._made)

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
        self._check()
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
        return self._like(HomedLeaves.of(tree, self._local.homes.values()), self.holding)

    def with_numbers(self, tree: Any) -> ShardedOptState:
        """A state of a tree in which some numbers are others, which ranks compare."""
        known = set(map(id, self.local.leaves))
        leaves = optree.tree_leaves(tree)
        numbers = [x for x in leaves if id(x) not in known and not is_moved(x)]
        words = ", ".join(map(content_word, numbers))
        made = self.with_local(tree)
        made.origin = f"#{self.story.word:08x} with {words}"
        return made

    def _like(self, local: HomedLeaves, holding: StateHolding) -> ShardedOptState:
        made = ShardedOptState.of_local(local, holding)
        made.leases = self.leases
        return made

    def held_as(self, holding: StateHolding) -> ShardedOptState:
        """A state of these leaves under a holding of the same cut, which nobody has read."""
        if not self.are_leaves_shown and self.origin and holding is self.holding:
            return self
        made = self._like(self.local, holding)
        made.origin = self.story.origin
        return made

    @property
    def beside(self) -> Any:
        """This rank's part of the state in plain tensors beside the params, for an update."""
        tree, brought = self.as_it_lies, self.holding.brought
        return tree if brought is None else brought(tree)

    def _check(self) -> None:
        """Raise unless the state may be read."""
        # As of a sharded tree: a loss of one rank's pieces would silently be another one
        if are_trees_hidden():
            name = name_in_callers(self)
            raise StructureError(
                "an optimizer's state was read inside of a sharded loss or evaluation, which "
                "is refused at every level, since its leaves may be pieces",
                path=name,
                expected="whole tensors, or a number of it",
                got="one that is cut over ranks",
                rank=self.of_rank,
                remedy=f"pass the loss fz.unshard({name or 'state'}), or the number that it needs",
            )
        if self.is_used_up:
            raise DonatedError(
                "an optimizer's state was donated to a step, and its storage holds the next one "
                "now. Remedy: use the state that the step returned, keep a copy with "
                "tree_map(torch.clone, state), or shard with donate=False"
            )

    def use_up(self) -> None:
        """Forget the tensors, which another state holds from now on."""
        for lease in self.leases:
            lease.has_ended = True
        self._local, self._shown = HomedLeaves.of(()), None

    def _replace(self, **changes: Any) -> ShardedOptState:
        """Of a NamedTuple: the state with other fields."""
        return ShardedOptState.of_shown(self.tree._replace(**changes), self.holding)

    def _asdict(self) -> dict[str, Any]:
        """Of a NamedTuple: its fields by name."""
        fields: dict[str, Any] = self.tree._asdict()
        return fields

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardedOptState, (self.beside, self.holding.lying(None))

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedOptState:
        """A state of its own on the same ranks."""
        made: ShardedOptState = optree.tree_map(own_copy, self)
        return made

    def __repr__(self) -> str:
        if self.is_used_up:
            return "ShardedOptState(donated to a step)"
        return f"ShardedOptState({outline(self._local.tree, most=4)})"


def is_placed(node: Any) -> bool:
    """Whether a node of a value is an optimizer's state that has a place."""
    return isinstance(node, ShardedOptState) and node.holding.brought is not None


def _flatten(node: ShardedOptState) -> tuple[list[Any], StateHolding, tuple[str]]:
    # One child, under no name: paths are those of the state itself
    return [node.tree], node.holding, ("",)


def _unflatten(holding: StateHolding, children: Any) -> ShardedOptState:
    (tree,) = children
    return ShardedOptState.of_shown(tree, holding)


register_node(ShardedOptState, _flatten, _unflatten)
