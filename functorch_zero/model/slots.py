"""Places in modules where leaves are used, filled with whole leaves while a unit is entered."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..errors import StructureError, explain
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


class Place(NamedTuple):
    """An entry that holds a leaf in a skeleton: a slot's in its module, or one of a user's dict or
    list."""

    # The module's own dict, from `params_dict` or `buffers_dict`; or another dict or list
    held: Any
    attribute: Any  # a name; a key or an index of another container
    leaf: str  # the leaf's path


def tensors_in(places: Iterable[Place]) -> list[Any]:
    """The tensors in the places."""
    return [place.held[place.attribute] for place in places]


def put(places: Iterable[Place], values: Iterable[Any]) -> None:
    """Fill the places, as many as there are values, in their order."""
    for place, value in zip(places, values, strict=True):
        place.held[place.attribute] = value


def check_kept(places: Iterable[Place], values: Iterable[Any]) -> None:
    """Raise if a call has put another value in one of the places."""
    for place, value in zip(places, values, strict=True):
        if place.held[place.attribute] is not value:
            raise StructureError(
                explain(
                    "the model put another tensor in the place of one of its params while it ran, "
                    "which would be lost",
                    path=place.leaf,
                    got=f"another tensor at {place.attribute!r}",
                    remedy="compute with a local variable; keep as a buffer what must stay",
                )
            )


def leaves_for(places: Iterable[Place], leaves: Mapping[str, Any]) -> list[Any]:
    """The leaf that each place uses, in the order of the places."""
    return [leaves[place.leaf] for place in places]


def entering(
    path: str,
    places: Iterable[Place],
    leaves: Mapping[str, Any],
    ours: dict[str, Any],
    forward: Callable[..., Any],
) -> Callable[..., Any]:
    """A function, run inside the entrances of the leaves that are used in it.

    Mostly there is one: a unit's own. There are several where leaves of differently sharded trees
    were put together.

    Args:
        path: of the module whose `forward` it is.
        places: where the module and those inside it use the leaves of the module's unit.
        leaves: by path; those that are not lazy are in their places already.
        ours: by path, what the library has in the leaf's places: the leaf, or a whole one that an
            entrance around this one has put there. A place that holds anything else was filled by
            somebody else, `torch.func.functional_call` say, and is left alone.
        forward: the function.
    """
    by_entrance: dict[Entrance, list[Place]] = {}  # entrance -> its leaves' places here
    for place in places:
        leaf = leaves[place.leaf]
        if type(leaf) is LazyParam:
            by_entrance.setdefault(leaf.entrance, []).append(place)
    for entrance, own in by_entrance.items():
        # Of the leaves, among the entrance's own
        numbers = {place.leaf: leaves[place.leaf].number for place in own}
        # Each wraps the one before: all are entered when the function runs
        forward = partial(_entered, entrance, path, own, numbers, ours, forward)
    return forward


def _entered(
    entrance: Entrance,
    path: str,
    places: Sequence[Place],
    numbers: Mapping[str, int],
    ours: dict[str, Any],
    forward: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run inside the entrance, with its whole leaves of these numbers in the places meanwhile."""
    leaves = entrance.enter(path)
    places = [place for place in places if place.held[place.attribute] is ours[place.leaf]]
    # The lazy ones mostly, which come back whatever the function does
    before = {leaf: ours[leaf] for leaf in numbers}
    whole = {leaf: leaves[number] for leaf, number in numbers.items()}
    try:
        put(places, leaves_for(places, whole))
        ours |= whole
        with entrance.watch():
            output = forward(*args, **kwargs)
        check_kept(places, leaves_for(places, whole))
        return output
    finally:
        # The lazy ones again, so that no place keeps gathered storage alive
        put(places, leaves_for(places, before))
        ours |= before
        entrance.leave(path)
