"""Where the optimizer's state lies between steps: a seam, `shard(state_storage=...)`.

What is moved is what leaves lie in: the state's flats, one per bucket and slot, and tensors by
themselves. Single numbers, 0-d, stay where they are.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import optree
from torch import Tensor

from .._torch_private import base_of


@runtime_checkable
class StateStorage(Protocol):
    """A place for the optimizer's state between steps, other than beside its params.

    Each rank moves what it holds; no communication. Shapes, dtypes and paths of the state's leaves
    stay, and so do checkpoints.
    """

    def fetch(self, stored: Tensor) -> Tensor:
        """A copy for the update, on the params' device. `stored` is only read: a state that isn't
        donated stays valid."""
        ...

    def store(self, tensor: Tensor, into: Tensor | None) -> Tensor:
        """The inverse, after the update: what the next state holds, of the same shape and dtype.

        Args:
            tensor: on the params' device; given away.
            into: what the state before held, to be written to and returned; None where that stays
                valid, or there was nothing.
        """
        ...


def fetched(storage: StateStorage | None, state: Any) -> Any:
    """The optimizer's state, beside the params, with leaves as views of fetched flats."""
    if storage is None:
        return state
    leaves, treedef = optree.tree_flatten(state)
    homes: dict[int, Tensor] = {}  # by the id of a stored one: fetched
    for home in map(_home, leaves):
        if home is not None and id(home) not in homes:
            homes[id(home)] = storage.fetch(home)
    return treedef.unflatten([_in(homes, leaf) for leaf in leaves])


def stored(storage: StateStorage | None, state: Any, old: Any = None) -> Any:
    """The inverse of `fetched`; into the storage of `old`, a state that is used up, if given."""
    if storage is None:
        return state
    leaves, treedef = optree.tree_flatten(state)
    befores = [None] * len(leaves) if old is None else optree.tree_leaves(old)
    homes: dict[int, Tensor] = {}  # by the id of one beside the params: stored
    taken: set[int] = set()  # what two flats must not be written into
    for leaf, before in zip(leaves, befores, strict=True):
        home, into = _home(leaf), _home(before)
        if home is None or id(home) in homes:
            continue
        if into is not None and (id(into) in taken or not _alike(into, home)):
            into = None
        taken.add(id(into))
        homes[id(home)] = storage.store(home.detach(), into)
    return treedef.unflatten([_in(homes, leaf) for leaf in leaves])


def _home(leaf: Any) -> Tensor | None:
    """What is moved of a leaf: the flat that it is a view of, or itself; None: nothing."""
    if not isinstance(leaf, Tensor) or leaf.dim() == 0:
        return None
    base = base_of(leaf)
    lies_in_flat = base is not None and base.dim() == 1 and base.dtype == leaf.dtype
    return base if lies_in_flat else leaf


def _in(homes: dict[int, Tensor], leaf: Any) -> Any:
    """The leaf, where its home is now."""
    home = _home(leaf)
    if home is None:
        return leaf
    now = homes[id(home)]
    if home is leaf:
        return now
    offset = leaf.storage_offset() - home.storage_offset()
    return now.as_strided(leaf.shape, leaf.stride(), now.storage_offset() + offset)


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype
