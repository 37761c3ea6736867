"""An optimizer's state in a place other than beside its params, between steps.

The state's flats are placed, one per bucket and slot, and tensors that lie in none: the *homes* of
leaves, see `sharded_optim/ferry.py`.

A place may bring a home as it lies there, a file mapped into memory say. Then the update works in
it, and nothing has to leave. What an update makes anew is copied there.

Units may have places of their own. Where leaves of several share a home, the first one's counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from .._torch_private import storage_id
from ..layout.home import Home, HomedLeaves
from ..layout.layout import Layout
from ..layout.sharded_tree import ShardedTree
from ..places import ByUnit, Place, moved
from ..sharded_optim.ferry import Ferry, are_alike, checked, home_of, lost, within
from ..sharded_optim.sharded_state import ShardedOptState, StateHolding
from ..sharded_optim.state_plan import StatePlan
from ..tree import has_values


class StatePlaces:
    """The places of an optimizer's state, leaf by leaf.

    Args:
        places: by unit.
        plan: of the state; `layout`: of its params.
    """

    def __init__(self, places: ByUnit, plan: StatePlan, layout: Layout):
        of_buckets = places_of_buckets(places, layout)
        self._of_leaves: list[Place | None] = []  # in flatten order
        for leaf in plan.leaves:
            # What follows no param belongs to no unit
            is_shared = leaf.kind == "replicated"
            b = None if is_shared else layout.in_buckets[leaf.leaf][0]
            self._of_leaves.append(places.of("") if b is None else of_buckets[b])

    def homes(self, leaves: Sequence[Any]) -> dict[int, Placed]:
        """The homes of leaves that have a place, each once, by the id of the tensor. Ids are good
        while `leaves` holds them."""
        found: dict[int, Placed] = {}
        # Somebody's own tree, which no plan fits, is refused where it is used
        if len(leaves) != len(self._of_leaves):
            return found
        for n, (leaf, place) in enumerate(zip(leaves, self._of_leaves, strict=True)):
            tensor = None if place is None else home_of(leaf)
            if place is not None and tensor is not None:
                found.setdefault(id(tensor), Placed(n, tensor, place))
        return found


class Placed(NamedTuple):
    """A tensor that is placed, whole."""

    leaf: int  # the first one that lies in it
    tensor: Tensor
    place: Place

    @property
    def lies_there(self) -> bool:
        """Whether it is in its place already."""
        return self.place.holds(self.tensor)


def brought(places: ByUnit, state: Any) -> Any:
    """The optimizer's state, beside the params, with leaves as views of what was brought.

    Raises:
        StructureError: the place has brought what can't be worked on.
    """
    return Ferry(places.distinct).beside(state, None)


def placed(
    places: StatePlaces,
    state: ShardedOptState,
    holding: StateHolding,
    old: ShardedOptState | None,
    *,
    look: bool,
    ferry: Ferry | None,
) -> ShardedOptState:
    """The inverse of `brought`.

    Args:
        holding: of the state there.
        old: a state in its place that is used up, whose tensors are written over; None: new ones
            are made.
        look: whether the place is asked to bring each tensor once more, for a comparison to the
            bit; see `is_looked_at`.
        ferry: of the update that made the state, which has taken some of it to the place; None: a
            new one.

    Raises:
        StructureError: the place has lost numbers.
    """
    ferry = Ferry() if ferry is None else ferry
    ferry.look = look
    local = state.local
    leaves = local.leaves
    # Per leaf, the one that held it before: an update keeps the state's structure
    befores = [None] * len(leaves) if old is None else old.local.leaves
    free = {key: home for key, home in places.homes(befores).items() if home.lies_there}
    homes = places.homes(leaves)
    # Placed ones, by the id of the one beside the params: taken there by the update,
    here = dict(ferry.made)
    # and worked on where they lie
    here |= {key: free.pop(key).tensor for key in homes if key in free}

    moves: list[_Move] = []
    for key, home in homes.items():
        if key in here:
            continue
        # Leaves may have shared a flat that they share no more, or changed their dtype
        before = free.get(id(home_of(befores[home.leaf])))
        if before is not None and are_alike(before.tensor, home.tensor):
            into = free.pop(id(before.tensor)).tensor
        else:
            into = checked(home.place, home.place.empty(home.tensor), home.tensor)
        moves.append(_Move(home, into))
        here[key] = into
    _move(moves, ferry)
    new = [within(here, leaf) for leaf in leaves]
    moved_homes = {
        at: Home(within(here, home.flat), leaves=[new[n] for n in at])
        for at, home in local.homes.items()
    }
    after = HomedLeaves(local.treedef, new, moved_homes)
    ferry.check(after.tree)
    ferry.begin(look=False, over=False)
    return ShardedOptState.of_local(after, holding)


def places_of_buckets(places: ByUnit | None, layout: Layout) -> list[Place | None]:
    """Per bucket of a layout, the place of its unit."""
    found: list[Place | None] = [None] * len(layout.buckets)
    if places is not None:
        for unit in layout.units:
            for b in unit.buckets:
                found[b] = places.of(unit.path)
    return found


class Stored(NamedTuple):
    """The tensors of one kind that lie in places, of one rank, in bytes."""

    kind: str  # "state", "params", "gradients" or "saved"
    nbytes: int  # the most that lie there at a time
    # By a step: brought and left, or worked on where they lie, which counts once per tensor
    read: int
    written: int


def stored_tensors(places: StatePlaces, state: Any) -> list[Tensor]:
    """The tensors of an optimizer's state that lie in their places."""
    homes = places.homes(optree.tree_leaves(state))
    return [home.tensor for home in homes.values() if home.lies_there]


def stored_flats(
    places: ByUnit | None,
    flats: Sequence[Tensor | None],
    layout: Layout,
    *,
    trained: bool = False,
) -> list[Tensor]:
    """The flats that hold params and lie in their places; those of trained buckets alone."""
    found = []
    rows = zip(places_of_buckets(places, layout), flats, layout.buckets, strict=True)
    for place, flat, bucket in rows:
        if place is not None and flat is not None and place.holds(flat):
            found += [flat] if bucket.trainable or not trained else []
    return found


def moved_tree(places: ByUnit, tree: ShardedTree, frozen: dict[int, Tensor]) -> ShardedTree:
    """A tree whose flats lie in their places, published ones, too.

    Args:
        frozen: by the id of a frozen flat, which trees may share, where it lies now.
    """
    layout = tree.sharding.layout
    flats: list[Tensor | None] = []
    published: list[Tensor | None] = []
    of_buckets = places_of_buckets(places, layout)
    rows = zip(of_buckets, layout.buckets, tree.flats(), tree.published(), strict=True)
    for place, bucket, flat, whole in rows:
        if flat is not None:
            now = moved(place, flat)
            flat = now if bucket.trainable else frozen.setdefault(id(flat), now)
        flats.append(flat)
        published.append(None if whole is None else moved(place, whole))
    made = tree.with_flats(flats, tree.holding)
    made.note_published(published)
    return made


def emptied(places: ByUnit | None, layout: Layout) -> list[Callable[[Tensor], Tensor]]:
    """Per bucket, the function that makes a flat like one that holds params, in its place."""
    of_buckets = places_of_buckets(places, layout)
    return [torch.empty_like if place is None else place.empty for place in of_buckets]


WORKED_IN = ("params", "gradients")  # where they lie, by passes, collectives and updates


def check_places_work(places: Mapping[str, ByUnit], params: Any, rank: int) -> None:
    """Raise unless each place gives back what two tensors are that it is given.

    Raises:
        StructureError: it gives other numbers, or lets one tensor write over another.
        NotImplementedError: params or gradients can't be worked on where they lie.
    """
    leaves = [leaf for leaf in optree.tree_leaves(params) if isinstance(leaf, Tensor)]
    # Values that are still to be made come to the CPU
    device = next((x.device for x in leaves if not x.is_meta), torch.device("cpu"))
    for kind, place in ((kind, p) for kind, rule in places.items() for p in rule.distinct):
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


class _Move(NamedTuple):
    """One tensor that is to be placed."""

    home: Placed
    into: Tensor


def _move(moves: Sequence[_Move], ferry: Ferry) -> None:
    """Copy tensors to their places."""
    # What lies in one that is written over is copied before
    written = {storage_id(into) for _, into in moves}
    found = []
    for home, _ in moves:
        # From one tensor of its place to another, by way of the params' device
        here = home.place.bring(home.tensor).wait() if home.lies_there else home.tensor
        tensor = here.detach()
        found.append(tensor.clone() if storage_id(tensor) in written else tensor)
    for (home, into), tensor in zip(moves, found, strict=True):
        ferry.leave(home.place, tensor, into)
