"""The place of the optimizer's state between steps: a seam, `shard(state_storage=...)`.

The state's flats are moved, one per bucket and slot, and tensors that lie in none. Single numbers,
0-d, stay where they are. A leaf's *home* is the tensor that is moved with it: the flat that it is
a view of, or the leaf itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import optree
import torch
from torch import Tensor

from .._torch_private import base_of
from ..errors import StructureError, explain
from ..model.untouched import marks_of_values
from ..shared_elements import sharing_pairs
from ..tree import has_values, is_flagged, paths


@runtime_checkable
class StateStorage(Protocol):
    """A place for the optimizer's state between steps, other than beside its params.

    Each rank moves what it holds; no communication. Shapes, dtypes and paths of the state's leaves
    stay, and so do checkpoints.
    """

    def fetch(self, stored: Tensor) -> Tensor:
        """A copy for the update, on the params' device, which no other fetch writes over until that
        is done. `stored` is only read: a state that isn't donated stays valid."""
        ...

    def store(self, tensor: Tensor, into: Tensor | None) -> Tensor:
        """The inverse, to the bit, after the update: the tensor that the next state holds, of the
        same shape and dtype.

        Args:
            tensor: on the params' device; given away.
            into: the tensor that the state before held, to be written to and returned; None where
                that state stays valid, or held nothing.
        """
        ...


def fetched(storage: StateStorage | None, state: Any) -> Any:
    """The optimizer's state, beside the params, with leaves as views of fetched flats.

    Raises:
        StructureError: the storage has fetched what isn't a copy of its own for each tensor.
    """
    if storage is None:
        return state
    leaves, treedef = optree.tree_flatten(state)
    # Many leaves share a home, which is fetched once. Ids are good while `leaves` holds them.
    homes: dict[int, Tensor] = {}  # fetched ones, by the id of the stored one
    stored_homes: list[Tensor] = []
    for leaf in leaves:
        home = _home(leaf)
        if home is not None and id(home) not in homes:
            homes[id(home)] = _checked("fetch", storage.fetch(home), home)
            stored_homes.append(home)
    _check_apart("fetch", [*homes.values()], stored_homes)
    return treedef.unflatten([_in(homes, leaf) for leaf in leaves])


def stored(storage: StateStorage | None, state: Any, old: Any = None, *, look: bool = True) -> Any:
    """The inverse of `fetched`. Written over the tensors of `old`, a state that is used up, if
    given.

    Args:
        look: whether the storage is asked to fetch each tensor once more, for a comparison to the
            bit; see `is_looked_at`.

    Raises:
        StructureError: the storage has lost numbers, or stored two tensors in one place.
    """
    if storage is None:
        return state
    leaves, treedef = optree.tree_flatten(state)
    # Per leaf, the one that held it before: an update keeps the state's structure
    befores = [None] * len(leaves) if old is None else optree.tree_leaves(old)
    homes: dict[int, Tensor] = {}  # stored ones, by the id of the one beside the params
    taken: set[int] = set()  # ids of old homes: no two flats may be written into one
    marks: list[tuple[int, Tensor, Tensor]] = []  # of values: the leaf's number, where, and which
    for n, (leaf, before) in enumerate(zip(leaves, befores, strict=True)):
        home, into = _home(leaf), _home(before)
        if home is None or id(home) in homes:
            continue
        # Leaves may have shared a flat that they share no more, or changed their dtype
        if into is not None and (id(into) in taken or not _alike(into, home)):
            into = None
        taken.add(id(into))
        # Taken before: a storage may keep what it is given, and change it
        expected = marks_of_values(home) if look and has_values(home) else None
        # It must not keep a graph
        made = homes[id(home)] = _checked("store", storage.store(home.detach(), into), home)
        if expected is not None and has_values(made):
            marks.append((n, made, expected))
    _check_apart("store", [*homes.values()])
    # Last: a later tensor may have been stored over an earlier one
    for n, made, expected in marks:
        again = _checked("fetch", storage.fetch(made), made)
        if not torch.equal(marks_of_values(again), expected):
            raise _lost(storage, paths(state)[n])
    return treedef.unflatten([_in(homes, leaf) for leaf in leaves])


def _lost(storage: StateStorage, path: str) -> StructureError:
    name = type(storage).__name__
    return StructureError(
        explain(
            f"{name} has lost numbers of the optimizer's state: {name}.fetch of what {name}.store "
            "has returned isn't what was stored, to the bit",
            path=path,
            remedy="let store write to `into`, where it is given, and return it; and fetch give a "
            "copy of all that was stored, rounded nowhere",
        )
    )


def _check_apart(method: str, moved: Sequence[Tensor], given: Sequence[Tensor] = ()) -> None:
    """Raise if two tensors that a storage has returned share elements, or one with one of those
    given: what is written to the one would change the other."""
    for first, second in sharing_pairs([*moved, *given]):
        if first >= len(moved):  # the state's own, which lie where the storage has put them
            continue
        other = "the one it was given" if second >= len(moved) else "another one's"
        raise StructureError(
            explain(
                f"state_storage.{method} returned a tensor that lies in the same memory as {other}",
                expected="a tensor of its own for each call, until the update is done",
                got=_form_of(moved[first]),
                remedy="make a new tensor in fetch, as stored.clone() does, or keep a buffer for "
                "each tensor and not one for each shape",
            )
        )


def is_moved(leaf: Any) -> bool:
    """Whether a leaf of a state lies in the storage: single numbers stay, and what is no tensor."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def _home(leaf: Any) -> Tensor | None:
    """The tensor that is moved with a leaf: the flat that it is a view of, or itself. None: the
    leaf stays."""
    if not is_moved(leaf):
        return None
    # A view of anything but a flat of its own dtype moves alone
    base = base_of(leaf)
    lies_in_flat = base is not None and base.dim() == 1 and base.dtype == leaf.dtype
    return base if lies_in_flat and not is_flagged(leaf) else leaf


def _in(homes: dict[int, Tensor], leaf: Any) -> Any:
    """The leaf in the place where its home was moved to."""
    home = _home(leaf)
    if home is None:
        return leaf
    now = homes[id(home)]
    if home is leaf:
        return now
    # A view of a flat becomes the same view of the moved flat
    offset = leaf.storage_offset() - home.storage_offset()
    # Its own offset may be any: the storage chooses where a flat lies
    return now.as_strided(leaf.shape, leaf.stride(), now.storage_offset() + offset)


def _checked(method: str, moved: Any, home: Tensor) -> Tensor:
    """The tensor that a storage has returned; an error where it can't take the tensor's place."""
    if isinstance(moved, Tensor) and _alike(moved, home):
        return moved
    raise StructureError(
        explain(
            f"state_storage.{method} returned what can't take the place of the tensor that it was "
            "given",
            expected=_form_of(home),
            got=_form_of(moved) if isinstance(moved, Tensor) else type(moved).__name__,
            remedy="return a tensor of the same shape and dtype; from store that is `into`, where "
            "it is given",
        )
    )


def _form_of(x: Tensor) -> str:
    return f"shape {(*x.shape,)}, {x.dtype}"


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype
