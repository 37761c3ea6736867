"""The known facts about torch's operators, for those who look at each operator that runs."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

# Of one position each, though torch doesn't tag them so: copies, fills, casts and some arithmetic
_POINTWISE = {
    "_conj",
    "_foreach_copy_",
    "_foreach_zero_",
    "_neg_view",
    "_to_copy",
    "alias",
    "clone",
    "complex",
    "copy_",
    "detach",
    "empty_like",
    "fill_",
    "floor_divide",
    "floor_divide_",
    "full_like",
    "hardswish",
    "hardswish_",
    "lift_fresh",
    "masked_fill",
    "masked_fill_",
    "ones_like",
    "polar",
    "positive",
    "zero_",
    "zeros_like",
}
# Their results share the storage of their operand
_ALIASES = {"alias", "detach", "lift_fresh"}
_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Kind(NamedTuple):
    """The known facts about an operator, before it runs."""

    name: str
    is_pointwise: bool  # each element of the result is of the operands' elements in one position
    is_random: bool
    is_foreach: bool
    reads_values: bool  # on the host: one is the result, or decides about its shape
    makes_alias: bool
    makes_new: bool  # from nothing but a dtype and a device
    makes_like: bool  # and a shape
    moves: bool  # the tensor itself, to another place or shape


@cache
def kind_of(func: Any) -> Kind:
    """The kind of an operator of ATen."""
    # Cached by the overload: a schema doesn't change
    packet, tags = func.overloadpacket.__name__, set(func.tags)
    is_random = torch.Tag.nondeterministic_seeded in tags
    reads_values = bool(_READS & tags)
    is_foreach = packet.startswith("_foreach_")
    # torch doesn't tag the foreach operators
    one = _tags_of_single(packet) if is_foreach else tags
    is_pointwise = torch.Tag.pointwise in one or packet in _POINTWISE
    return Kind(
        name=str(func),
        is_pointwise=is_pointwise and not is_random and not reads_values,
        is_random=is_random,
        is_foreach=is_foreach,
        reads_values=reads_values,
        makes_alias=packet in _ALIASES,
        makes_new=packet.startswith("new_"),
        makes_like=packet.endswith("_like"),
        moves=torch.Tag.inplace_view in tags and packet != "detach_",
    )


def _tags_of_single(packet: str) -> set[Any]:
    """The tags of the operator that a foreach operator runs on each tensor."""
    name, found = packet.removeprefix("_foreach_"), set[Any]()
    # It makes the maximum of each tensor; the tags of `max` are those of two tensors' maximum
    if name == "max":
        return found
    # In place, some have no single operator, and some no tags
    for single in (getattr(torch.ops.aten, n, None) for n in (name, name.removesuffix("_"))):
        for overload in () if single is None else single.overloads():
            found |= {*getattr(single, overload).tags}
    return found
