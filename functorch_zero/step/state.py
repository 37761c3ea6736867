"""`State`: all that a run carries from one step to the next, around the value of any program."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import optree
from optree import tree_map
from torch import Tensor

from .._torch_private import register_in_torch
from ..errors import StructureError, explain
from ..layout.sharding import Sharding
from ..tree import PyTree, paths, same_structure
from .nonfinite import NonFiniteState


class TrainValue(NamedTuple):
    """The value of `train_step`'s program."""

    params: PyTree[Tensor]  # sharded, a ShardedTree: whole, or at level 3 this rank's pieces
    buffers: PyTree[Tensor]  # whole, on every rank
    opt_state: Any  # at levels 1 to 3 in pieces where it follows a param


@dataclass(frozen=True)
class Trained:
    """The leaves of whole params that are trained: a pytree node without leaves, which `tree_map`
    and checkpoints keep, whatever leaves they make."""

    by_path: tuple[tuple[str, bool], ...]  # of all leaves

    @classmethod
    def of(cls, tree: PyTree[Any]) -> Trained:
        """Those with `requires_grad`; numbers have none."""
        flags = [_requires_grad(leaf) for leaf in optree.tree_leaves(tree)]
        return cls(tuple(zip(paths(tree), flags, strict=True)))

    def names(self, tree: PyTree[Any]) -> PyTree[bool]:
        """The same of a tree whose leaves may be others by now: by path. One of a path that is not
        known is trained if it requires grad."""
        leaves, treedef = optree.tree_flatten(tree)
        known = dict(self.by_path)
        rows = zip(paths(tree), leaves, strict=True)
        return treedef.unflatten([known.get(path, _requires_grad(leaf)) for path, leaf in rows])


def _requires_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


@dataclass(frozen=True, eq=False)
class State:
    """Everything that a run carries from one step to the next; a pytree.

    A training step's `params`, `buffers` and `opt_state` are reached by their names:
    `state.params` is `state.value.params`. Paths of leaves leave the value's name out, too.
    """

    step: Tensor  # 0-d int64, on the CPU
    value: Any  # the program's own tree; a training step's is a TrainValue
    seed: Tensor | None  # 0-d int64, on the CPU; None: the global random state is used as it is
    sharding: Sharding | None = None  # how it is cut, the same on every rank; None: whole
    # Steps skipped, and the loss scale; None: nothing is skipped
    finite: NonFiniteState | None = None
    parts: Any = None  # by name, the tensors that parts of the sharded step keep between steps
    # Of a training step's whole params, or of a program's whole value; None: the sharding says, or
    # each leaf's requires_grad
    trained: Trained | None = None

    @property
    def params(self) -> Any:
        """The model's parameters: a tree, or a ShardedTree."""
        return self.value.params

    @property
    def buffers(self) -> PyTree[Tensor]:
        """The model's buffers: whole, on every rank."""
        return self.value.buffers

    @property
    def opt_state(self) -> Any:
        """The optimizer's state: at levels 1 to 3 in pieces where it follows a param."""
        return self.value.opt_state

    def replace(self, **changes: Any) -> State:
        """The state with other fields, its own or its value's.

        >>> import torch
        >>> value = TrainValue({"w": torch.zeros(2)}, {}, ())
        >>> state = State(torch.tensor(0), value, None).replace(step=torch.tensor(1), params={})
        >>> int(state.step), state.params
        (1, {})
        """
        # Own fields first: a value may have fields of the same names
        own = {name: changes.pop(name) for name in _FIELDS if name in changes}
        if changes:  # the rest are fields of the value
            value = own.get("value", self.value)
            own["value"] = value._replace(**changes)
        return replace(self, **own)


# In the order of the class, which is the order of leaves, too
_FIELDS = tuple(field.name for field in fields(State))
# Names in the paths of leaves: the value's own fields stand beside the state's
_ENTRIES = tuple("" if name == "value" else name for name in _FIELDS)


def _flatten(state: State) -> tuple[list[Any], None, tuple[str, ...]]:
    # None among them is no leaf: optree leaves it out
    children = [getattr(state, name) for name in _FIELDS]
    return children, None, _ENTRIES


def _unflatten(_: None, children: Iterable[Any]) -> State:
    return State(*children)


optree.register_pytree_node(
    State, _flatten, _unflatten, namespace=optree.registry.__GLOBAL_NAMESPACE
)
register_in_torch(
    State, lambda state: _flatten(state)[:2], lambda children, _: _unflatten(None, children)
)


optree.register_pytree_node(
    Trained,
    lambda trained: ((), trained, ()),
    lambda trained, _: trained,
    namespace=optree.registry.__GLOBAL_NAMESPACE,
)
register_in_torch(Trained, lambda trained: ([], trained), lambda _, trained: trained)


def trained(state: State) -> PyTree[bool]:
    """Which leaves of a whole state's params are trained. Leaves that `tree_map` has made, detached
    say, are trained as those were; one of a path that the state doesn't know, if it requires
    grad."""
    known = Trained(()) if state.trained is None else state.trained
    return known.names(state.params)


def marked(state: State) -> PyTree[Tensor]:
    """A whole state's params, detached, with `requires_grad` where they are trained."""
    return tree_map(lambda p, on: p.detach().requires_grad_(on), state.params, trained(state))


def check_opt_state(expected: Any, got: Any, rank: int | None = None) -> None:
    """Raise, naming the first leaf, unless an optimizer's state has the structure and the shapes of
    another one.

    Args:
        expected: as `init` makes it; leaves that are no tensors stand for any.
        got: the state to check.
        rank: the rank that found it, for the error.
    """
    remedy = (
        "pass the state of this step's own init, made for these params and this optimizer; an "
        "optimizer returns its state in the structure that its init gave it"
    )
    same_structure(expected, got, what="state.opt_state", rank=rank, remedy=remedy)
    wanted = optree.tree_leaves(expected)
    for n, (one, other) in enumerate(zip(wanted, optree.tree_leaves(got), strict=True)):
        if not isinstance(one, Tensor) or not isinstance(other, Tensor) or one.shape == other.shape:
            continue
        raise StructureError(
            explain(
                "a leaf of state.opt_state has another shape than the one of init",
                path=paths(expected)[n],
                expected=tuple(one.shape),
                got=tuple(other.shape),
                rank=rank,
                remedy=remedy,
            )
        )


def check_state(state: Any) -> None:
    """Raise TypeError unless `state` is a State."""
    if not isinstance(state, State):
        raise TypeError(
            "a step takes (state, batch), and a state is what step.init made; got a "
            f"{type(state).__name__}"
        )
