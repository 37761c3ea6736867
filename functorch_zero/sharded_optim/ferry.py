"""An optimizer's state on its way between a place and the update, some tensors at a time.

A leaf's *home* is the tensor that is placed with it: the flat that it is a view of, or the leaf
itself. Single numbers, 0-d, have none, and stay where they are.

An update is given a state as it lies. What reads it, a bucket's pointwise update say, has the
`Ferry` bring the tensors that it reads, and take back what it has made of them, before it goes on
to the next ones. So of a state that must be brought, a few buckets are beside the params at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import optree
import torch
from torch import Tensor

from .._torch_private import base_of
from ..errors import StructureError
from ..model.untouched import marks_of_values
from ..places import Arriving, Here, Place, ahead_of
from ..tree import has_values, is_flagged, paths

T = TypeVar("T")


@dataclass
class Brought:
    """A tensor of a state, on its way to be beside the params; whoever reads it waits for it."""

    stored: Tensor  # as the state has it
    place: Place | None  # None: it lies in none
    home: Tensor  # that it lies in
    arriving: Arriving

    @cached_property
    def arrived(self) -> Tensor:
        """The home beside the params; itself, where it can be worked on."""
        made = self.arriving.wait()
        return made if self.place is None else checked(self.place, made, self.home)

    @cached_property
    def tensor(self) -> Tensor:
        """As `stored` lies in its home, in `arrived`."""
        here = self.arrived
        return here if self.place is None else within({id(self.home): here}, self.stored)

    @property
    def is_copy(self) -> bool:
        """Whether nothing else lies in its memory, so that it may be written to."""
        return self.arrived is not self.home

    def to_write(self) -> Brought:
        """One that may be written to, whatever happens to the old values."""
        if self.is_copy:
            return self
        made = replace(self)
        made.tensor = self.tensor.clone()
        return made


class Ferry:
    """Brings the tensors of one optimizer's state, and takes back what an update makes of them.

    Args:
        places: where they may lie; (): beside the params, and nothing travels.

    Attributes:
        places: as given.
        ahead: how many, or how many buckets', are brought before the update needs them.
        look: whether what is taken back in this update is compared to the bit at its end.
        made: by id, the homes that were made in this update.
    """

    def __init__(self, places: Sequence[Place] = ()):
        self.places, self.ahead = places, max(map(ahead_of, places), default=0)
        self.begin(look=False, over=False)

    def begin(self, *, look: bool, over: bool) -> None:
        """An update begins. `over`: whether the state's tensors are used up, and what is made of
        them may be written over them."""
        self.look, self._over = look, over
        self.made: dict[int, Tensor] = {}
        self._left: dict[int, _Left] = {}  # by id of the home, what is to be compared
        self._here: dict[int, _Shared] = {}  # by id, the homes that have come and not yet gone

    def bring(self, stored: Tensor, device: torch.device | None) -> Brought:
        """Start to bring a tensor of the state beside params on this device."""
        home = home_of(stored) if self.places else None
        if home is None:
            return Brought(stored, None, stored, Here(stored))
        for place in self.places:
            if place.holds(home):
                # Leaves of one home share what was brought: of two copies, the one that leaves
                # last would undo what the other has changed
                shared = self._here.get(id(home))
                if shared is None:
                    shared = self._here[id(home)] = _Shared(place.bring(home))
                shared.users += 1
                return Brought(stored, place, home, shared)
        # One that lies elsewhere, a copy say, is worked on there, and moved afterwards
        here = stored if device is None else stored.to(device)
        return Brought(stored, None, stored, Here(here))

    def writes_to(self, brought: Brought) -> bool:
        """Whether what an update makes of a tensor may be written over it, and will be."""
        return brought.place is not None and (brought.is_copy or self._over)

    def take_back(self, brought: Brought, new: Tensor) -> Tensor:
        """Start to take what an update has made of a tensor, `new`, to its place; returns it there.
        It may be the tensor that was brought."""
        place, home = brought.place, brought.home
        if place is None:
            return new
        is_over = self._over and are_alike(new, brought.stored)
        if is_over and new is not brought.tensor:
            brought.tensor.copy_(new)
        self._let_go(place, home, changed=is_over)
        if is_over:
            return brought.stored
        made = checked(place, place.empty(new), new)
        self.made[id(made)] = made
        self.leave(place, new.detach(), made)
        return made

    def _let_go(self, place: Place, home: Tensor, *, changed: bool) -> None:
        """One leaf of a home needs it no more. The last one under way takes it back, if any has
        changed it."""
        shared = self._here[id(home)]
        shared.users -= 1
        shared.is_changed |= changed
        if shared.users:
            return
        del self._here[id(home)]
        arrived = shared.wait()
        if shared.is_changed and arrived is not home:
            self.leave(place, arrived, home)

    def leave(self, place: Place, tensor: Tensor, into: Tensor) -> None:
        """Copy a tensor to one of a place; in an update that is looked at, `check` compares."""
        # A plan's have none
        if self.look and has_values(tensor) and has_values(into):
            self._left[id(into)] = _Left(place, into, marks_of_values(tensor))
        place.leave(tensor, into).wait()

    def beside(self, state: Any, device: torch.device | None) -> Any:
        """All of a state beside params on this device, for functions that read it leaf by leaf."""
        if not self.places:
            return state
        leaves, treedef = optree.tree_flatten(state)
        # Many leaves share a home, which is brought once. Ids are good while `leaves` holds them.
        homes = {id(home): home for leaf in leaves if (home := home_of(leaf)) is not None}
        brought = {key: self.bring(home, device) for key, home in homes.items()}
        here = {key: one.tensor for key, one in brought.items()}
        for one in brought.values():
            if one.place is not None:
                self._let_go(one.place, one.home, changed=False)
        return treedef.unflatten([within(here, leaf) for leaf in leaves])

    def check(self, state: Any) -> None:
        """Raise unless all that was taken back in this update lies in its place, to the bit.

        Raises:
            StructureError: a place has lost numbers, of a leaf of this state.
        """
        if not self._left:
            return
        homes: dict[int, int] = {}  # by id, the first leaf that lies there
        for n, leaf in enumerate(optree.tree_leaves(state)):
            homes.setdefault(id(home_of(leaf)), n)
        # Last: a later tensor may have been written over an earlier one
        for key, (place, home, marks) in self._left.items():
            again = checked(place, place.bring(home).wait(), home)
            if key in homes and not marks_of_values(again).equal(marks):
                raise lost(place, paths(state)[homes[key]])


class _Shared:
    """A home on its way, for all leaves of it that are under way together."""

    def __init__(self, arriving: Arriving):
        self._arriving: Arriving | None = arriving
        self.users = 0  # tensors that were asked for, and not yet taken back
        self.is_changed = False

    def wait(self) -> Tensor:
        if self._arriving is not None:
            self._arrived, self._arriving = self._arriving.wait(), None
        return self._arrived


class _Left(NamedTuple):
    """A tensor that was taken back, to be compared."""

    place: Place
    home: Tensor
    marks: Tensor  # of the values that it should have


def in_turn(
    items: Sequence[T], start: Callable[[T], Any], run: Callable[[T, Any], None], ahead: int
) -> None:
    """`run(item, started)` of each item, with what `start` made of it `ahead` items before."""
    under_way = deque(map(start, items[:ahead]))
    for n, item in enumerate(items):
        if n + ahead < len(items):
            under_way.append(start(items[n + ahead]))
        # Handed over: what was started for an item is nobody's when it has run
        run(item, under_way.popleft())


def is_moved(leaf: Any) -> bool:
    """Whether a leaf of a state lies in the place: single numbers stay, and what is no tensor."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def home_of(leaf: Any) -> Tensor | None:
    """The tensor that is placed with a leaf: the flat that it is a view of, or itself. None: the
    leaf stays."""
    if not is_moved(leaf):
        return None
    # A view of anything but a flat of its own dtype is placed alone
    base = base_of(leaf)
    lies_in_flat = base is not None and base.dim() == 1 and base.dtype == leaf.dtype
    return base if lies_in_flat and not is_flagged(leaf) else leaf


def within(homes: Mapping[int, Tensor], leaf: Any) -> Any:
    """The leaf where its home lies now; `homes`: by the ids of those that they take the place
    of."""
    home = home_of(leaf)
    if home is None:
        return leaf
    now = homes.get(id(home), home)
    if now is home:
        return leaf
    if home is leaf:
        return now
    # A view of a flat becomes the same view of the flat where it lies now
    offset = leaf.storage_offset() - home.storage_offset()
    # Its own offset may be any: the place chooses where a flat lies
    return now.as_strided(leaf.shape, leaf.stride(), now.storage_offset() + offset)


def checked(place: Place, made: Any, home: Tensor) -> Tensor:
    """The tensor that a place has returned; an error where it can't take the tensor's place."""
    if isinstance(made, Tensor) and are_alike(made, home):
        return made
    raise StructureError(
        f"{type(place).__name__} returned what can't take the place of the tensor that it was "
        "given",
        expected=_form_of(home),
        got=_form_of(made) if isinstance(made, Tensor) else type(made).__name__,
        remedy="return a tensor of the same shape and dtype, from empty and from bring's wait",
    )


def lost(place: Place, path: str) -> StructureError:
    """The error for a place that has not kept what it was given, of a leaf or a kind."""
    name = type(place).__name__
    return StructureError(
        f"{name} has lost numbers: what {name}.bring gives isn't what {name}.leave was given, "
        "to the bit",
        path=path,
        remedy="let leave copy all of the tensor to `into`, and bring give all that was left, "
        "rounded nowhere; of two tensors, each in memory of its own",
    )


def are_alike(a: Tensor, b: Tensor) -> bool:
    """Whether one may be written over the other."""
    return a.shape == b.shape and a.dtype == b.dtype


def _form_of(x: Tensor) -> str:
    return f"shape {(*x.shape,)}, {x.dtype}"
