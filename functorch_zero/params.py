"""`Params`: a model's leaves by dotted path, which know the model's units."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol
from zlib import crc32

import optree
from torch import Tensor

from ._torch_private import register_in_torch
from .errors import StructureError, first_few
from .precision import Precision


class Engine(Protocol):
    """The functions of sharded trees, for the ranks that hold them. Every rank calls them, in the
    same order.

    A sharded tree carries its engine, so that functions of trees need not know which they are given
    and nothing is ambient.
    """

    @property
    def rank(self) -> int:
        """This rank's number, for errors."""
        ...

    @property
    def keeps_tensors(self) -> bool:
        """Whether the reduction of its trees' gradients keeps tensors between them."""
        ...

    def init(self, transform: Any, params: Any) -> Any:
        """The first state of an optimizer's transform."""
        ...

    def update(self, transform: Any, updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
        """A transform's updates, and its next state."""
        ...

    def apply(
        self,
        transform: Any,
        grads: Any,
        state: Any,
        params: Any,
        *,
        see: Any = None,
        donate: bool = False,
    ) -> tuple[Any, Any]:
        """The next params and state: `update`, and its updates added to params.

        Args:
            see: a function that is given the updates before that; None: nobody wants them.
            donate: whether gradients may be written over where params and state are.
        """
        ...

    def value_and_grad(self, call: Any, tree: Any) -> tuple[Any, Any]:
        """A loss's value, with its metrics and buffers if it has some, for all ranks; and the
        gradients of the sharded trees in `tree`. `call`: the loss and its other arguments, a
        `step.program.LossCall`."""
        ...

    def apply_updates(self, params: Any, updates: Any) -> Any:
        """params + updates, held as params are."""
        ...

    def dot(self, a: Any, b: Any) -> Any:
        """The inner product of two trees in pieces, one 0-d tensor."""
        ...

    def squares(self, name: str, tree: Any, first: Any) -> Any:
        """The sums of squares of this rank's parts of the leaves, 0-d: of held params, or of a tree
        in pieces, as the first one that was asked about is cut."""
        ...

    def norms(self, squares: Any, first: Any) -> dict[str, Tensor]:
        """The norms of whole trees, 0-d, by name, from these sums."""
        ...

    def zero_updates(self, params: Any) -> Any:
        """Updates in pieces that change nothing."""
        ...

    def pieces(self, params: Any) -> Any:
        """Copies of params in pieces."""
        ...

    def unshard(self, tree: Any) -> Any:
        """The whole tree, on every rank."""
        ...


class OnEngine:
    """A tree that an engine works on: the base class of sharded ones, which `layout` defines. It
    has the attributes of the tree that users see.

    Args:
        holding: how it is cut, and its engine.
        shown: the tree as users see it; None: it is made when somebody first reads it.

    Attributes:
        holding: as given.
        origin: the call of the library that has made it, or the path in a program's value, in
            words that are the same on all ranks; "" where nobody has named it. It is named before
            somebody reads the leaves, which are in its words. See Note [words] in `layout.piece`.
        path_in_value: its path in the value that a program was given; None: it isn't of that. A
            state's own field may be called `path`, and would be hidden.
        num_uses: how often it was read so far, given to a function of the library, or returned by
            a program.
        leases: its own, and those of the leaves that `tree_map` has put here; see
            `layout.home.Lease`.
    """

    without_engine: ClassVar[str]  # the error of one that was pickled

    def __init__(self, holding: Any, shown: Any = None):
        self.holding, self._shown = holding, shown
        self._made: Any = None  # the shown leaves, where the library has made them
        self.leases: Sequence[Any] = ()
        self.origin, self.num_uses = "", 0
        self.path_in_value: str | None = None

    @property
    def tree(self) -> Any:
        """This rank's part, as users see it."""
        raise NotImplementedError

    @property
    def are_leaves_shown(self) -> bool:
        """Whether somebody has read the leaves, which become pieces when that happens."""
        return self._shown is not None

    @property
    def engine(self) -> Engine:
        """The engine of the ranks that hold it."""
        engine: Engine | None = self.holding.engine
        if engine is None:
            raise StructureError(self.without_engine)
        return engine

    @property
    def of_rank(self) -> int:
        """The rank whose part this is."""
        rank: int = self.holding.sharding.rank
        return rank

    def __getitem__(self, key: Any) -> Any:
        return self.tree[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tree)

    def __len__(self) -> int:
        return len(self.tree)

    def __getattr__(self, name: str) -> Any:
        """The tree's own attributes, such as `items` of a dict, or a state's fields; private ones
        are not looked up."""
        # "_" also keeps copy and pickle from asking a half-made node for its tree, and the others
        # the properties' own errors from beginning anew
        if name.startswith("_") or name in ("holding", "tree"):
            raise AttributeError(name)
        return getattr(self.tree, name)

    @property
    def as_it_lies(self) -> Any:
        """This rank's part of the tree in plain tensors, wherever it lies: what has a place
        isn't brought beside the others."""
        raise NotImplementedError

    @property
    def tensors(self) -> list[Any]:
        """This rank's part, in tensors that count all writes to it: leaves, or flats of leaves that
        nobody has read."""
        found: list[Any] = optree.tree_leaves(self.as_it_lies)
        return found

    def with_numbers(self, tree: Any) -> Any:
        """Of an optimizer's state: the same of a tree in which some numbers are others."""
        raise NotImplementedError

    def with_local(self, tree: Any) -> Any:
        """This tree, of other plain tensors, which lie where these do."""
        raise NotImplementedError


class Story(NamedTuple):
    """How the leaves of a tree were made, for ranks to compare. See Note [words] in
    `layout.piece`."""

    origin: str  # of a tree that is made anew of the same leaves
    unread: Sequence[Any]  # tensors on a device that they were made with, of which words know forms
    tell: Callable[[], Mapping[str, str]]  # the same in words, by leaf, for errors

    @property
    def word(self) -> int:
        """The same on all ranks that have made the tree alike."""
        return crc32(self.origin.encode())


def engine_of(*trees: Any) -> Engine | None:
    """The one engine of all trees that have one, or None: they are whole, on one process.

    Raises:
        StructureError: they lie on different groups of ranks.
    """
    found: list[Engine] = []  # distinct ones; mostly one
    for node in filter(OnEngine.__instancecheck__, nodes_of(trees)):
        # A list, not a set: engines of one group are equal, and there are few
        if node.engine not in found:
            found.append(node.engine)
    if len(found) > 1:
        raise StructureError(
            "sharded trees of different groups were used together. Remedy: make the group once, "
            "and shard all of them over it"
        )
    return found[0] if found else None


def is_on_engine(node: Any) -> bool:
    """Whether a node of a tree has an engine."""
    return isinstance(node, OnEngine)


def nodes_of(tree: Any) -> list[Any]:
    """The sharded trees and states of a tree, and the leaves beside them, in flatten order."""
    # In C, without a call of Python for each leaf
    found: list[Any] = optree.tree_leaves(tree, is_leaf=OnEngine.__instancecheck__)
    return found


def map_nodes(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """The tree with a function's results in the places of its nodes; see `nodes_of`."""
    return optree.tree_map(function, tree, *others, is_leaf=is_on_engine)


def as_local(tree: Any) -> Any:
    """A tree with this rank's plain tensors in the places of its sharded trees and states. Users
    see these tensors as pieces; this library's own looks at them are no reads."""
    return map_nodes(lambda node: node.as_it_lies if is_on_engine(node) else node, tree)


def without_engines(tree: Any) -> Any:
    """A tree with None in the places of its sharded trees and states: a rank's own data."""
    return map_nodes(lambda node: None if is_on_engine(node) else node, tree)


def map_local(function: Callable[[Any], Any], tree: Any) -> Any:
    """The function of each leaf as this rank holds it, in flatten order. Sharded trees and states
    stay such."""

    def of_node(node: Any) -> Any:
        if is_on_engine(node):
            return node.with_local(optree.tree_map(function, node.as_it_lies))
        return function(node)

    return map_nodes(of_node, tree)


def register_node(
    kind: type[Any],
    flatten: Callable[[Any], tuple[Iterable[Any], Any, Sequence[str]]],
    unflatten: Callable[[Any, Iterable[Any]], Any],
) -> None:
    """Make a class a node of optree's trees and of torch's own.

    Args:
        flatten: node -> (children, context, entries), these by name.
        unflatten: (context, children) -> node.
    """
    # In the global namespace, so that users' `tree_map` works without an argument
    everywhere = optree.registry.__GLOBAL_NAMESPACE
    optree.register_pytree_node(kind, flatten, unflatten, namespace=everywhere)

    def of_torch(node: Any) -> tuple[list[Any], Any]:
        children, context, _ = flatten(node)
        return [*children], context

    register_in_torch(kind, of_torch, lambda children, context: unflatten(context, children))


@dataclass(frozen=True)
class UnitSpec:
    """Leaves that are gathered and freed together, and the modules whose calls enter them."""

    name: str
    # Paths of the modules that use the leaves, in the order they are called
    modules: tuple[str, ...]
    leaves: tuple[str, ...]  # dotted paths of the leaves
    precisions: tuple[Precision, ...] = ()  # of each leaf; empty: none has a policy
    sparse: tuple[str, ...] = ()  # paths of leaves that are used by lookups of `sparse=True` alone
    # What `units=None` found it by, for `describe`; "" where it was chosen
    why: str = field(default="", compare=False)

    @property
    def policies(self) -> dict[str, Precision]:
        """The policies given, by the leaf's path."""
        if not self.precisions:
            return {}
        return dict(zip(self.leaves, self.precisions, strict=True))


@dataclass(frozen=True)
class Names:
    """The ways in which a model's names in a `state_dict` differ from its leaves' paths. All are
    equal: of what is known of names it doesn't depend whether trees fit each other.

    Attributes:
        aliases: the leaf's path, by each other name of a tied leaf.
        unsaved: paths of leaves that a `state_dict` lacks, buffers that are not persistent.
    """

    aliases: Mapping[str, str] = field(default_factory=dict, compare=False)
    unsaved: frozenset[str] = field(default=frozenset(), compare=False)


_MOST_PRINTED = 4  # leaves of `Params`


class Params(dict[str, Any]):
    """A model's parameters: a dict from dotted path to leaf, which also carries the model's
    `units`, and its `names` in files.

    It is a pytree node of its own for optree and for torch, in insertion order, so `tree_map` over
    it gives a `Params` again. `dict(params)` forgets the units, their precision, and the names.
    """

    def __init__(
        self,
        leaves: Mapping[str, Any] | Iterable[tuple[str, Any]] = (),
        units: tuple[UnitSpec, ...] = (),
        names: Names | None = None,
    ):
        super().__init__(leaves)
        self.units = units  # () where nothing is known of the model
        self.names = names or Names()

    def __repr__(self) -> str:
        """Shapes without values: a lazy leaf has none, and a model's fill the screen."""
        tensors = [leaf for leaf in self.values() if isinstance(leaf, Tensor)]
        nbytes = sum(x.numel() * x.element_size() for x in tensors)
        outlined = []
        for path, leaf in self.items():
            kind = f"{tuple(leaf.shape)} {leaf.dtype}" if isinstance(leaf, Tensor) else repr(leaf)
            outlined.append(f"{path}: {kind}")
        counts = f"{len(self)} leaves, {nbytes:,} bytes, {len(self.units)} units"
        return f"Params({counts}; {first_few(outlined, _MOST_PRINTED)})"


Context = tuple[tuple[str, ...], tuple[UnitSpec, ...], Names]


def _flatten_params(params: Params) -> tuple[list[Any], Context, tuple[str, ...]]:
    keys = tuple(params)
    # Keys and units are static: trees of other models don't fit
    return list(params.values()), (keys, params.units, params.names), keys


def _unflatten_params(context: Context, leaves: Iterable[Any]) -> Params:
    keys, units, names = context
    return Params(zip(keys, leaves, strict=True), units, names)


register_node(Params, _flatten_params, _unflatten_params)
