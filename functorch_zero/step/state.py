"""`State`: all that a run carries from one step to the next, around the value of any program."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import optree
import torch
from optree import tree_map
from torch import Tensor

from ..errors import StructureError
from ..layout.sharding import Sharding
from ..params import Params, register_node
from ..precision import Precision
from ..tree import (
    PyTree,
    check_tensors,
    dotted,
    has_values,
    outline,
    paths,
    requiring_grad,
)
from .nonfinite import NonFiniteState


class TrainValue(NamedTuple):
    """The value of `train_step`'s program."""

    params: PyTree[Tensor]  # sharded, a ShardedTree: whole, or at level 3 this rank's pieces
    buffers: PyTree[Tensor]  # whole, on every rank
    opt_state: Any  # at levels 1 to 3 in pieces where it follows a param
    # Steps skipped, and the loss scale; None: nothing is skipped
    finite: NonFiniteState | None = None


@dataclass(frozen=True)
class Trained:
    """The leaves of whole params that are trained, and the policies of those that have one: a
    pytree node without leaves, which `tree_map` and checkpoints keep, whatever leaves they make."""

    by_path: tuple[tuple[str, bool], ...]  # of all leaves
    policies: tuple[tuple[str, Precision], ...] = ()

    @classmethod
    def of(cls, tree: PyTree[Any]) -> Trained:
        """Those with `requires_grad`; numbers have none."""
        flags = requiring_grad(optree.tree_leaves(tree))
        return cls(tuple(zip(paths(tree), flags, strict=True)), _policies_of(tree))

    @property
    def paths(self) -> list[str]:
        """Of the leaves that are trained."""
        return [path for path, on in self.by_path if on]

    def names(self, tree: PyTree[Any]) -> PyTree[bool]:
        """Which leaves are trained of a tree whose leaves `tree_map` may have made anew, detached
        say: by path. One of a path that is not known is trained if it requires grad."""
        return optree.tree_structure(tree).unflatten(self.flags(tree))

    def flags(self, tree: PyTree[Any]) -> list[bool]:
        """Per leaf of such a tree, in flatten order, whether it is trained; see `names`."""
        known, names = dict(self.by_path), paths(tree)
        if known.keys() >= {*names}:
            return [*map(known.__getitem__, names)]
        leaves = zip(names, requiring_grad(optree.tree_leaves(tree)), strict=True)
        return [known.get(path, own) for path, own in leaves]


def _policies_of(params: PyTree[Any]) -> tuple[tuple[str, Precision], ...]:
    """The policies of leaves, by path. Only `Params` have any."""
    found = []
    nodes = optree.tree_leaves(params, is_leaf=_is_params)
    for prefix, node in zip(paths(params, _is_params), nodes, strict=True):
        for unit in node.units if _is_params(node) else ():
            for path, policy in unit.policies.items():
                found.append((dotted(prefix, path), policy))
    return tuple(found)


def _is_params(node: Any) -> bool:
    return isinstance(node, Params)


@dataclass(frozen=True, eq=False, repr=False)
class State:
    """Everything that a run carries from one step to the next; a pytree.

    A training step's `params`, `buffers`, `opt_state` and `finite` are reached by their names:
    `state.params` is `state.value.params`. Paths of leaves leave the value's name out, too.
    """

    step: Tensor  # 0-d int64, on the CPU
    value: Any  # the program's own tree; a training step's is a TrainValue
    seed: Tensor | None  # 0-d int64, on the CPU; None: the global random state is used as it is
    sharding: Sharding | None = None  # how it is cut, the same on every rank; None: whole
    parts: Any = None  # by name, the tensors that parts of the sharded step keep between steps
    # Of a training step's whole params, or of a program's whole value. Of a leaf that it doesn't
    # name the sharding says it, or requires_grad
    trained: Trained = Trained(())

    @classmethod
    def first(cls, value: Any, seed: int | None, **others: Any) -> State:
        """The state before the first step. Its numbers are on the CPU, where reading them waits for
        no device."""
        number = torch.zeros((), dtype=torch.int64, device="cpu")
        own_seed = None if seed is None else torch.tensor(seed, device="cpu")
        return cls(number, value, own_seed, **others)

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
        self.settle()
        return self.value.opt_state

    @property
    def finite(self) -> NonFiniteState | None:
        """The steps skipped, and the loss scale; None: nothing is skipped."""
        finite: NonFiniteState | None = self.value.finite
        return finite

    def settle(self) -> None:
        """Return once the host may read the state's tensors: some may be on their way to a
        place."""
        if self.sharding is not None and self.sharding.settle is not None:
            self.sharding.settle()

    def __getstate__(self) -> dict[str, Any]:
        """Its fields, for copies and pickles."""
        self.settle()
        return self.__dict__

    def __repr__(self) -> str:
        """Its leaves' shapes, without values: those of a donated state are another state's."""
        step = self.step
        if isinstance(step, Tensor) and has_values(step) and step.dim() == 0:
            step = int(step)  # type: ignore[assignment]
        sharding = self.sharding
        place = "whole" if sharding is None else f"sharded, {sharding}"
        # By field, or else a model's params would leave no room for the rest
        value = self.value
        fields = value._asdict() if hasattr(value, "_asdict") else {"value": value}
        given = {name: node for name, node in fields.items() if node is not None}
        outlines = [f"{name}: {outline(node, most=4)}" for name, node in given.items()]
        return f"State(step {step}, {place}; {'; '.join(outlines)})"

    def replace(self, **changes: Any) -> State:
        """The state with other fields, its own or its value's. `step` and `seed` may be ints.

        >>> import torch
        >>> value = TrainValue({"w": torch.zeros(2)}, {}, ())
        >>> state = State(torch.tensor(0), value, None).replace(step=1, params={})
        >>> int(state.step), state.params
        (1, {})
        """
        # Own fields first: a value may have fields of the same names
        own = {name: changes.pop(name) for name in _FIELDS if name in changes}
        for name in ("step", "seed"):
            if isinstance(own.get(name), int):
                own[name] = torch.tensor(own[name], device="cpu")
        if changes:  # the rest are fields of the value
            value = own.get("value", self.value)
            own["value"] = value._replace(**changes)
        return replace(self, **own)


# In the order of the class, which is the order of leaves, too
_FIELDS = tuple(field.name for field in fields(State))
# Names in the paths of leaves: the value's own fields stand beside the state's
_ENTRIES = tuple("" if name == "value" else name for name in _FIELDS)


def _flatten(state: State) -> tuple[list[Any], None, tuple[str, ...]]:
    state.settle()  # the leaves are for somebody to read
    # None among them is no leaf: optree leaves it out
    children = [getattr(state, name) for name in _FIELDS]
    return children, None, _ENTRIES


def _unflatten(_: None, children: Iterable[Any]) -> State:
    return State(*children)


register_node(State, _flatten, _unflatten)
register_node(Trained, lambda trained: ((), trained, ()), lambda trained, _: trained)


def marked(state: State) -> PyTree[Tensor]:
    """A whole state's params, detached, with `requires_grad` where they are trained."""
    flags = state.trained.names(state.params)
    return tree_map(lambda p, on: p.detach().requires_grad_(on), state.params, flags)


def check_state(state: Any) -> None:
    """Raise TypeError unless `state` is a State."""
    if not isinstance(state, State):
        raise TypeError(
            "a step takes (state, batch), and a state is what step.init made; got a "
            f"{type(state).__name__}"
        )
    step = state.step
    if not isinstance(step, Tensor) or step.dim() > 0:
        got = tuple(step.shape) if isinstance(step, Tensor) else type(step).__name__
        raise StructureError(
            "state.step is no counter",
            expected="a 0-d int64 tensor",
            got=got,
            remedy="state.replace(step=torch.tensor(0))",
        )


def check_whole_state(state: Any) -> None:
    """Raise unless `state` is a State that isn't sharded."""
    check_state(state)
    if state.sharding is not None:
        raise StructureError(
            "an unsharded step was given a sharded state. Remedy: `sharded.unshard(state)` first"
        )


def check_policies(state: State, tree: PyTree[Any]) -> None:
    """Raise, naming the first leaf, if the tree of a whole state whose trained leaves it knows, its
    params or its value, has lost its policies."""
    known = state.trained.policies
    if not known:
        return
    found = _policies_of(tree)
    # The usual cases: no policies, and those of `init`
    if found == known:
        return
    of_path = dict(found)
    # Another model's params may have other paths
    own_paths = {*paths(tree)}
    for path, policy in known:
        if path in own_paths and of_path.get(path) != policy:
            raise StructureError(
                "params of a state have lost the model's Precision, as a plain dict does",
                path=path,
                expected=policy,
                got=of_path.get(path, "none"),
                remedy="replace leaves by tree_map, which keeps the tree; fz.Params(leaves, "
                "params.units) makes a dict Params again",
            )


def check_not_on_meta(params: PyTree[Tensor], batch: Any) -> None:
    """Raise, naming the first leaf on the meta device, unless the batch is there, as in a dry
    run."""
    batch_leaves = optree.tree_leaves(batch)
    if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in batch_leaves):
        return
    for n, leaf in enumerate(optree.tree_leaves(params)):
        if leaf.is_meta:
            raise StructureError(
                "a param has no values",
                path=paths(params)[n],
                expected="a leaf on a device",
                got="one on the meta device",
                remedy="step.init(params, buffers, values=fz.deferred_init(...)), or build the "
                "model on a device",
            )


def check_params(params: Any) -> None:
    """Raise unless a step can be made for these params: whole leaves, and no state."""
    for node in optree.tree_leaves(params, is_leaf=_is_of_a_state):
        if _is_of_a_state(node):
            raise StructureError(
                "params hold a state, whose optimizer's leaves would be params, too",
                expected="a tree of params",
                got=f"a {type(node).__name__}",
                remedy="pass state.params, or fz.unshard(state.params) of a sharded state",
            )
    check_tensors(params, "params")


def _is_of_a_state(node: Any) -> bool:
    return isinstance(node, State | TrainValue)
