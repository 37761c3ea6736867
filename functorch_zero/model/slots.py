"""Places in modules where leaves are used, filled with whole leaves while a unit is entered."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..errors import StructureError
from ..tree import ancestors
from .lazy_param import Entrance, LazyParam


class Slot(NamedTuple):
    """A place in a module where a leaf is used."""

    module: str  # its path
    attribute: str
    leaf: str  # the leaf's path


def slots_of(
    named: Iterable[tuple[str, Tensor]],
    model: nn.Module,
    held_by: Callable[[nn.Module], dict[str, Any]],
) -> list[Slot]:
    """Every slot of a model's params or buffers, in the order of its modules.

    A tied tensor has several, all with the first of its names, which is the one in `named`.
    """
    names = {id(tensor): name for name, tensor in named}  # id -> the first name
    slots = []
    for path, module in model.named_modules():
        for attribute, tensor in held_by(module).items():
            if tensor is not None:  # a bias that a module does without, say
                slots.append(Slot(path, attribute, names[id(tensor)]))
    return slots


def leaves_inside(slots: Iterable[Slot], modules: Collection[str]) -> set[str]:
    """The leaves that are used in these modules, or in those inside of them."""
    return {slot.leaf for slot in slots if any(path in modules for path in ancestors(slot.module))}


class Place:
    """An entry that holds a leaf in a skeleton: a slot's in its module, or one of a user's dict or
    list.

    Attributes:
        held: the module's own dict, from `params_dict` or `buffers_dict`; or another dict or list.
        attribute: a name; a key or an index of another container.
        leaf: the leaf's path.
        empty: the tensor that was there first, on the meta device.
        ours: of a param, what the library has there: the leaf, or a whole one that an entrance has
            put there. A place that holds anything else was filled by somebody else,
            `torch.func.functional_call` say.
    """

    __slots__ = ("attribute", "empty", "held", "leaf", "ours")

    def __init__(self, held: Any, attribute: Any, leaf: str):
        self.held, self.attribute, self.leaf = held, attribute, leaf
        self.empty = self.ours = held[attribute]

    def fill(self, value: Any) -> None:
        """Put in what the library has there from now on."""
        self.held[self.attribute] = self.ours = value


def tensors_in(places: Iterable[Place]) -> list[Any]:
    """The tensors in the places."""
    return [place.held[place.attribute] for place in places]


def put(places: Iterable[Place], values: Iterable[Any]) -> None:
    """Put tensors into the places, as many as there are values, in their order."""
    for place, value in zip(places, values, strict=True):
        place.held[place.attribute] = value


def check_kept(places: Iterable[Place]) -> None:
    """Raise if a call has put another value in one of the places that the library has filled."""
    for place in places:
        if place.held[place.attribute] is not place.ours:
            raise StructureError(
                "the model put another tensor in the place of one of its params while it ran, "
                "which would be lost",
                path=place.leaf,
                got=f"another tensor at {place.attribute!r}",
                remedy="compute with a local variable; keep as a buffer what must stay",
            )


def put_by_path(places: Iterable[Place], leaves: Mapping[str, Any]) -> None:
    """Put into each place the leaf that is used there."""
    for place in places:
        place.held[place.attribute] = leaves[place.leaf]


def entering(
    path: str,
    places: Iterable[Place],
    leaves: Mapping[str, Any],
    forward: Callable[..., Any],
) -> Callable[..., Any]:
    """A function, run inside the entrances of the leaves that are used in it.

    Mostly there is one: a unit's own. There are several where leaves of differently sharded trees
    were put together.

    Args:
        path: of the module whose `forward` it is.
        places: where the module and those inside it use the leaves of the module's unit.
        leaves: by path; those that are not lazy are in their places already.
        forward: the function.
    """
    # By entrance: its leaves' places here, and the leaves' numbers among its own
    by_entrance: dict[Entrance, dict[Place, int]] = {}
    for place in places:
        leaf = leaves[place.leaf]
        if type(leaf) is LazyParam:
            by_entrance.setdefault(leaf.entrance, {})[place] = leaf.number
    for entrance, numbers in by_entrance.items():
        # Each wraps the one before: all are entered when the function runs
        forward = partial(_entered, entrance, path, numbers, forward)
    return forward


def _entered(
    entrance: Entrance,
    path: str,
    numbers: Mapping[Place, int],
    forward: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run inside the entrance, with its whole leaves of these numbers in the places meanwhile."""
    leaves = entrance.enter(path)
    before: dict[Place, Any] = {}  # what the library had in the places: lazy leaves mostly
    for place, number in numbers.items():
        if place.held[place.attribute] is place.ours:
            before[place] = place.ours
            place.fill(leaves[number])
    try:
        with entrance.watch():
            output = forward(*args, **kwargs)
        check_kept(before)
        return output
    finally:
        # Whatever the function does: no place keeps gathered storage alive
        for place, leaf in before.items():
            place.fill(leaf)
        entrance.leave(path)
