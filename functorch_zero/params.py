"""`Params`: a model's leaves by dotted path, which know the model's units."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import optree

from ._torch_private import register_in_torch
from .precision import Precision

register: Any = optree.register_pytree_node


@dataclass(frozen=True)
class UnitSpec:
    """Leaves that are gathered and freed together, and the modules whose calls enter them."""

    name: str
    # Paths of the modules that use the leaves, in the order they are called
    modules: tuple[str, ...]
    leaves: tuple[str, ...]  # dotted paths of the leaves
    precisions: tuple[Precision, ...] = ()  # of each leaf; empty: none has a policy

    @property
    def policies(self) -> dict[str, Precision]:
        """By leaf, the policies given."""
        return dict(zip(self.leaves, self.precisions, strict=True)) if self.precisions else {}


class Params(dict[str, Any]):
    """A model's parameters: a dict from dotted path to leaf, which also carries the model's
    `units`.

    It is a pytree node of its own for optree and for torch, in insertion order, so `tree_map` over
    it gives a `Params` again. `dict(params)` forgets the units.
    """

    def __init__(
        self,
        leaves: Mapping[str, Any] | Iterable[tuple[str, Any]] = (),
        units: tuple[UnitSpec, ...] = (),
    ):
        super().__init__(leaves)
        self.units = units


def _flatten_params(
    params: Params,
) -> tuple[list[Any], tuple[tuple[str, ...], tuple[UnitSpec, ...]], tuple[str, ...]]:
    keys = tuple(params)
    return list(params.values()), (keys, params.units), keys


def _unflatten_params(
    context: tuple[tuple[str, ...], tuple[UnitSpec, ...]], leaves: Iterable[Any]
) -> Params:
    keys, units = context
    return Params(zip(keys, leaves, strict=True), units)


register(Params, _flatten_params, _unflatten_params, namespace=optree.registry.__GLOBAL_NAMESPACE)

register_in_torch(
    Params,
    lambda p: _flatten_params(p)[:2],
    lambda leaves, context: _unflatten_params(context, leaves),
)
