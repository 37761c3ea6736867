"""`ShardedOptState`: an optimizer's state that knows how it is cut over ranks, as one of them holds
it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import optree

from .._torch_private import register_in_torch
from ..errors import DonatedError, StructureError, explain
from ..introspection import name_in_callers
from ..layout.extent import Extent
from ..layout.sharded_tree import is_in_a_loss, is_somebody_reading, tell_reader, tell_use
from ..layout.sharding import Sharding
from ..params import Engine, OnEngine
from ..tree import outline, own_copy
from .state_plan import EVERYONE, StatePlan


@dataclass(frozen=True)
class StateHolding:
    """The static part: equal for states that fit each other.

    Attributes:
        sharding: how the params are cut that the state follows, and which rank's part this is.
        plan: which leaves of the state follow a param, and which have an owner.
        engine: answers for the state on its ranks. Not compared, and not pickled.
        fetched: of a state that lies in a storage, copies its tree to a place beside the params.
            None: it lies beside them. Not compared, and not pickled.
    """

    sharding: Sharding
    plan: StatePlan = field(repr=False)
    engine: Engine | None = field(default=None, compare=False, repr=False)
    fetched: Callable[[Any], Any] | None = field(default=None, compare=False, repr=False)

    def lying(self, fetched: Callable[[Any], Any] | None) -> StateHolding:
        """The same of leaves that lie in another place."""
        return self if fetched is self.fetched else replace(self, fetched=fetched)

    def extents(self) -> list[Extent | None]:
        """Per leaf of the state, the part of it that is here; None: all ranks have the same."""
        layout, piece_number = self.sharding.layout, self.sharding.piece_number
        found: list[Extent | None] = []
        for leaf in self.plan.leaves:
            if leaf.kind == "follows":
                b, k = layout.places[leaf.leaf]
                found.append(layout.buckets[b].extent(k, piece_number))
            elif leaf.kind == "owned":
                is_here = leaf.owner in (piece_number, EVERYONE)
                found.append(Extent(leaf.shape, 0, prod(leaf.shape) if is_here else 0))
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
    is the state without the node. Leaves that follow a param are 1-D pieces (n,).
    """

    def __init__(self, tree: Any, holding: StateHolding):
        self._tree, self.holding = tree, holding
        self.is_used_up = False

    @property
    def tree(self) -> Any:
        """This rank's part of the state: beside the params for whoever computes with it, and as it
        lies for this library's own looks.

        Raises:
            StructureError: it is read inside of a loss.
            DonatedError: a step has taken its storage.
        """
        tree = self.beside if is_somebody_reading() else self._checked()
        tell_reader(self, lambda: optree.tree_leaves(tree))
        return tree

    @property
    def told(self) -> str:
        """How the params are cut that it follows, in words for errors."""
        return f"of params cut as {self.holding.sharding.told}"

    @property
    def as_it_lies(self) -> Any:
        tree = self._checked()
        tell_reader(self, lambda: optree.tree_leaves(tree))
        return tree

    @property
    def beside(self) -> Any:
        """This rank's part of the state beside the params, for an update; nobody is told."""
        tree, fetched = self._checked(), self.holding.fetched
        return tree if fetched is None else fetched(tree)

    def _checked(self) -> Any:
        """The state as it lies, if it may be read."""
        # As of a sharded tree: a loss of one rank's pieces would silently be another one
        if is_in_a_loss():
            name = name_in_callers(self)
            raise StructureError(
                explain(
                    "an optimizer's state was read inside of a sharded loss or evaluation, which "
                    "is refused at every level, since its leaves may be pieces",
                    path=name,
                    expected="whole tensors, or a number of it",
                    got="one that is cut over ranks",
                    rank=self.of_rank,
                    remedy=f"pass the loss fz.unshard({name or 'state'}), or the number that it "
                    "needs",
                )
            )
        tell_use(self)
        if self.is_used_up:
            raise DonatedError(
                "an optimizer's state was donated to a step, and its storage holds the next one "
                "now. Remedy: use the state that the step returned, keep a copy with "
                "tree_map(torch.clone, state), or shard with donate=False"
            )
        return self._tree

    def holding_of(self, tree: Any) -> StateHolding:
        """That of this tree of leaves, which `tree` has given: copies lie beside the params."""
        return self.holding if tree is self._tree else self.holding.lying(None)

    def handed_on(self, tree: Any) -> ShardedOptState:
        """The next state, which has been written over this one's tensors; this node is used up."""
        self.use_up()
        return ShardedOptState(tree, self.holding)

    def use_up(self) -> None:
        """Forget the tensors, which another state holds from now on."""
        self._tree, self.is_used_up = None, True

    @property
    def engine(self) -> Engine:
        """The engine of the ranks that hold the state."""
        if self.holding.engine is None:
            raise StructureError(
                "an optimizer's state that was pickled has no group of ranks. Remedy: use the step "
                "that made it, or optimizer.init(params) on the sharded tree again"
            )
        return self.holding.engine

    @property
    def of_rank(self) -> int:
        """The rank whose part this is."""
        return self.holding.sharding.rank

    def extents(self) -> list[Any]:
        """Refused: not every leaf of a state is a part of a param."""
        raise StructureError(
            "an optimizer's state doesn't tell the places of its leaves' elements. Remedy: use the "
            "params or the gradients instead"
        )

    def __getitem__(self, key: Any) -> Any:
        return self.tree[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tree)

    def __len__(self) -> int:
        return len(self.tree)

    def __getattr__(self, name: str) -> Any:
        """The state's own fields; private ones are not looked up."""
        # "_" also keeps copy and pickle from asking a half-made node for its tree, and "tree" the
        # property's own error from beginning anew
        if name.startswith("_") or name in ("holding", "tree"):
            raise AttributeError(name)
        return getattr(self.tree, name)

    def _replace(self, **changes: Any) -> ShardedOptState:
        """Of a NamedTuple: the state with other fields."""
        tree = self.tree
        return ShardedOptState(tree._replace(**changes), self.holding_of(tree))

    def _asdict(self) -> dict[str, Any]:
        """Of a NamedTuple: its fields by name."""
        fields: dict[str, Any] = self.tree._asdict()
        return fields

    def __reduce__(self) -> tuple[Any, ...]:
        tree = self.tree
        return ShardedOptState, (tree, self.holding_of(tree))

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedOptState:
        """A state of its own on the same ranks."""
        made: ShardedOptState = optree.tree_map(own_copy, self)
        return made

    def __repr__(self) -> str:
        if self.is_used_up:
            return "ShardedOptState(donated to a step)"
        return f"ShardedOptState({outline(self.tree, most=4)})"


def is_stored(node: Any) -> bool:
    """Whether a node of a value is an optimizer's state that lies in a storage."""
    return isinstance(node, ShardedOptState) and node.holding.fetched is not None


def _flatten(node: ShardedOptState) -> tuple[list[Any], StateHolding, tuple[str]]:
    # One child, under no name: paths are those of the state itself
    tree = node.tree
    return [tree], node.holding_of(tree), ("",)


def _unflatten(holding: StateHolding, children: Any) -> ShardedOptState:
    (tree,) = children
    return ShardedOptState(tree, holding)


# In the global namespace, so that users' `tree_map` works without an argument
optree.register_pytree_node(
    ShardedOptState, _flatten, _unflatten, namespace=optree.registry.__GLOBAL_NAMESPACE
)
register_in_torch(
    ShardedOptState,
    lambda node: _flatten(node)[:2],
    lambda children, holding: _unflatten(holding, children),
)
