"""Optimizer states that are another optimizer's, or another net's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import optree
from torch import Tensor

from ..errors import StructureError, explain
from ..tree import PyTree, paths, same_structure


def check_opt_state(
    expected: Any, got: Any, rank: int | None = None, *, what: str = "state.opt_state"
) -> None:
    """Raise, naming the first leaf, unless an optimizer's state has the structure and the shapes of
    another one.

    Args:
        expected: as `init` makes it; leaves that are no tensors stand for any.
        got: the state to check.
        rank: the rank that found it, for the error.
        what: the state's name, for the error.
    """
    remedy = (
        "pass the state that this optimizer's own init made of these params; an optimizer returns "
        "its state in the structure that its init gave it"
    )
    same_structure(expected, got, what=what, rank=rank, remedy=remedy)
    wanted = optree.tree_leaves(expected)
    for n, (one, other) in enumerate(zip(wanted, optree.tree_leaves(got), strict=True)):
        if not isinstance(one, Tensor) or not isinstance(other, Tensor) or one.shape == other.shape:
            continue
        raise StructureError(
            f"a leaf of {what} has another shape than the one of init",
            path=paths(expected)[n],
            expected=tuple(one.shape),
            got=tuple(other.shape),
            rank=rank,
            remedy=remedy,
        )


def note_other_dtype(error: Exception, init: Callable[[], Any], got: Any) -> None:
    """Note the first leaf of an optimizer's state that has another dtype than init made it in: of
    an update that has failed, it may be why. Many optimizers work all the same, so nothing is
    refused.

    Args:
        init: makes the expected state, of whose leaves the dtypes count.
        got: the state that the update was given.
    """
    expected = None
    with suppress(Exception):  # an author's init may ask for values, or for a device
        expected = init()
    wanted, given = (optree.tree_leaves(state) for state in (expected, got))
    for path, one, other in zip(paths(got), wanted, given, strict=False):
        dtype = getattr(one, "dtype", None)
        if isinstance(other, Tensor) and other.dtype != dtype:
            what, remedy = "A leaf of the optimizer's state has another dtype", "convert it"
            error.add_note(explain(what, path=path, expected=dtype, got=other.dtype, remedy=remedy))
            return


def outline_of(tree: PyTree[Any]) -> tuple[Any, ...]:
    """A tree's structure and the shapes of its leaves, to be compared with those of others."""
    leaves, treedef = optree.tree_flatten(tree)
    # A number has no shape
    return treedef, *(getattr(leaf, "shape", None) for leaf in leaves)
