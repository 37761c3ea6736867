"""An optimizer's state in a place other than beside its params, between steps.

The state's flats are placed, one per bucket and slot, and tensors that lie in none. Single numbers,
0-d, stay where they are. A leaf's *home* is the tensor that is placed with it: the flat that it is
a view of, or the leaf itself.

A place may bring a home as it lies there, a file mapped into memory say. Then the update works in
it, and nothing has to leave. What an update makes anew is copied there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from .._torch_private import storage_id
from ..model.untouched import marks_of_values
from ..places import Place, moved
from ..sharded_optim.ferry import Ferry, are_alike, checked, home_of, lost, within
from ..tree import has_values, paths


def brought(place: Place | None, state: Any, device: torch.device | None = None) -> Any:
    """The optimizer's state, beside the params, with leaves as views of what was brought.

    Args:
        device: of the params; None: that of whatever lies elsewhere than in the place.

    Raises:
        StructureError: the place has brought what can't be worked on.
    """
    return Ferry(in_places(place)).beside(state, device)


def in_places(place: Place | None) -> Sequence[Place]:
    """The places that tensors may lie in."""
    return () if place is None else (place,)


def placed(
    place: Place | None,
    state: Any,
    old: Any = None,
    *,
    look: bool = True,
    ferry: Ferry | None = None,
) -> Any:
    """The inverse of `brought`.

    Args:
        old: a state that is used up, whose tensors are written over; None: tensors are made.
        look: whether the place is asked to bring each tensor once more, for a comparison to the
            bit; see `is_looked_at`.
        ferry: of the update that made the state, which has taken some of it to the place.

    Raises:
        StructureError: the place has lost numbers.
    """
    if place is None:
        return state
    leaves, treedef = optree.tree_flatten(state)
    # Per leaf, the one that held it before: an update keeps the state's structure
    befores = [None] * len(leaves) if old is None else optree.tree_leaves(old)
    free = _homes_in(place, befores)
    # Placed ones, by the id of the one beside the params
    here: dict[int, Tensor] = {} if ferry is None else dict(ferry.made)
    for leaf in leaves:
        home = home_of(leaf)
        if home is not None and id(home) in free:
            here[id(home)] = free.pop(id(home))  # worked on where it lies

    moves: list[_Move] = []
    for n, (leaf, before) in enumerate(zip(leaves, befores, strict=True)):
        home, into = home_of(leaf), home_of(before)
        if home is None or id(home) in here:
            continue
        # Leaves may have shared a flat that they share no more, or changed their dtype
        into = free.pop(id(into), None) if into is not None and are_alike(into, home) else None
        made = checked(place, place.empty(home), home) if into is None else into
        moves.append(_Move(n, home.detach(), made))
        here[id(home)] = made
    _move(place, moves, state, look=look)
    new = treedef.unflatten([within(here, leaf) for leaf in leaves])
    if ferry is not None:
        ferry.check(new)
        ferry.begin(look=False, over=False)
    return new


def moved_flats(place: Place | None, flats: Sequence[Tensor]) -> list[Tensor]:
    """The flats that hold params, where they lie in their place."""
    return [moved(place, flat) for flat in flats]


WORKED_IN = ("params", "gradients")  # where they lie, by passes, collectives and updates


def check_places_work(places: Mapping[str, Place], params: Any, rank: int) -> None:
    """Raise unless each place gives back what two tensors are that it is given.

    Raises:
        StructureError: it gives other numbers, or lets one tensor write over another.
        NotImplementedError: params or gradients can't be worked on where they lie.
    """
    leaves = [leaf for leaf in optree.tree_leaves(params) if isinstance(leaf, Tensor)]
    # Values that are still to be made come to the CPU
    device = next((x.device for x in leaves if not x.is_meta), torch.device("cpu"))
    for kind, place in places.items():
        given = [torch.full((64,), 1 / n, dtype=torch.float64, device=device) for n in (3, 7)]
        if not has_values(given[0]):
            return  # a plan's
        made = [checked(place, place.empty(x), x) for x in given]
        for x, into in zip(given, made, strict=True):
            place.leave(x, into).wait()
        arrived = [place.bring(x).wait() for x in made]
        for x, into, found in zip(given, made, arrived, strict=True):
            if not (place.holds(into) and torch.equal(checked(place, found, x), x)):
                raise lost(place, kind)
            if kind in WORKED_IN and found is not into:
                raise NotImplementedError(
                    f"place[{kind!r}]: {type(place).__name__} brings copies, and {kind} are worked "
                    f"on where they lie (rank {rank}). Remedy: fz.places.File on CPUs; this place "
                    'for "state" or "saved"'
                )


class _Move:
    """One tensor that is to be placed."""

    def __init__(self, leaf: int, home: Tensor, into: Tensor):
        self.leaf, self.home, self.into = leaf, home, into
        self.expected: Tensor | None = None  # marks of its values


def _move(place: Place, moves: Sequence[_Move], state: Any, *, look: bool) -> None:
    """Copy tensors to the place."""
    # What lies in one that is written over is copied before
    written = {storage_id(move.into) for move in moves}
    for move in moves:
        # From one tensor of the place to another, by way of the params' device
        if place.holds(move.home):
            move.home = place.bring(move.home).wait()
        if storage_id(move.home) in written:
            move.home = move.home.clone()
        if look and has_values(move.home):
            move.expected = marks_of_values(move.home)
    leaving = [place.leave(move.home, move.into) for move in moves]
    for one in leaving:
        one.wait()
    # Last: a later tensor may have been written over an earlier one
    for move in moves:
        if move.expected is not None and has_values(move.into):
            again = checked(place, place.bring(move.into).wait(), move.into)
            if not marks_of_values(again).equal(move.expected):
                raise lost(place, paths(state)[move.leaf])


def _homes_in(place: Place, leaves: Sequence[Any]) -> dict[int, Tensor]:
    """The homes of leaves that lie in the place, by id."""
    homes = {id(home): home for leaf in leaves if (home := home_of(leaf)) is not None}
    return {key: home for key, home in homes.items() if place.holds(home)}
