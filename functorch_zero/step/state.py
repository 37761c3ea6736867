"""`State`: all that a run carries from one step to the next, around the value of any program."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import optree
from torch import Tensor

from .._torch_private import register_in_torch
from ..layout.sharding import Sharding
from ..tree import PyTree
from .nonfinite import NonFiniteState


class TrainValue(NamedTuple):
    """The value of `train_step`'s program."""

    params: PyTree[Tensor]  # sharded, a ShardedTree: whole, or at level 3 this rank's pieces
    buffers: PyTree[Tensor]  # whole, on every rank
    opt_state: Any  # at levels 1 to 3 in pieces where it follows a param


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


def check_state(state: Any) -> None:
    """Raise TypeError unless `state` is a State."""
    if not isinstance(state, State):
        raise TypeError(
            "a step takes (state, batch), and a state is what step.init made; got a "
            f"{type(state).__name__}"
        )
