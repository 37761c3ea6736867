"""Params and updates added: the last line of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from ..errors import StructureError
from ..in_a_loss import refuse_update
from ..params import engine_of
from ..tree import PyTree, paths, same_structure


def apply_updates(params: Any, updates: Any) -> Any:
    """params + updates: new trees. Where `updates` has None, the leaf of `params` itself.

    Sharded params stay in their form, and keep their number of ranks; updates are in pieces, as
    gradients are. Collectives at levels 1 and 2: one all-gather per trained bucket. With
    `state_axes="both"` there is one more along the replicate axis, at level 3 too.

    Raises:
        StructureError: the updates are another tree's; or one has another shape than its leaf, or
            is complex where its leaf is real. The call is inside of a loss.

    >>> apply_updates({"w": torch.ones(2)}, {"w": torch.tensor([0.5, 1.0])})
    {'w': tensor([1.5000, 2.0000])}
    """
    refuse_update("fz.apply_updates was called")
    engine = engine_of(params, updates)
    if engine is not None:
        return engine.apply_updates(params, updates)
    return apply_whole(params, updates)


@torch.no_grad()
def apply_whole(params: PyTree[Tensor], updates: PyTree[Tensor | None]) -> PyTree[Tensor]:
    """`apply_updates` of whole trees."""

    def add(p: Tensor, u: Tensor | None) -> Tensor:
        if u is None:  # nothing to add, and the leaf itself
            return p
        # The update is rounded to the param's dtype before the sum, as the step's own is
        return (p + u.to(p.dtype)).requires_grad_(p.requires_grad)

    remedy = "pass the trees that fz.value_and_grad and the optimizer gave of these params"
    # None is an update here, so optree must not skip it
    same_structure(params, updates, what="the tree of updates", none_is_leaf=True, remedy=remedy)
    leaves, treedef = optree.tree_flatten(params, none_is_leaf=True)
    given = optree.tree_leaves(updates, none_is_leaf=True)
    for n, (p, u) in enumerate(zip(leaves, given, strict=True)):
        if u is not None and u.shape != p.shape:  # a sum would broadcast one of them
            raise StructureError(
                "an update has another shape than its leaf",
                path=paths(params, lambda x: x is None)[n],
                expected=tuple(p.shape),
                got=tuple(u.shape),
                remedy=remedy,
            )
    check_no_complex_for_real(given, leaves, lambda n: paths(params, lambda x: x is None)[n])
    return treedef.unflatten(map(add, leaves, given))


def check_no_complex_for_real(
    updates: Sequence[Any],
    leaves: Sequence[Any],
    path_of: Callable[[int], str],
    rank: int | None = None,
) -> None:
    """Raise unless a sum keeps all of each update: a real leaf has no place for an imaginary part.

    Args:
        updates: tensors, or None.
        leaves: tensors, or others that have a dtype; one for each update.
        path_of: of the leaf of that number, for the error.
        rank: for the error.
    """
    for n, update in enumerate(updates):
        is_complex = isinstance(update, Tensor) and update.is_complex()
        if is_complex and not leaves[n].dtype.is_complex:
            raise StructureError(
                "a complex tensor was given for a real leaf, which would lose its imaginary part",
                path=path_of(n),
                expected=leaves[n].dtype,
                got=update.dtype,
                rank=rank,
                remedy="pass its .real, if that is meant, or make the leaf complex",
            )
