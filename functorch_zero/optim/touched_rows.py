"""A transform's functions of rows, as functions of a leaf: they see the rows that were touched.

A row is touched if its gradient isn't all zeros. The others have an update of zeros, and their part
of the state stays as it is. So the same holds for a dense gradient, for one that came of ids, and
however a batch is cut.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from math import prod
from typing import Any

import optree
from optree import tree_map
from torch import Tensor

from ..errors import TransformError
from ..layout.extent import Rows, touched_among


def as_rows(leaf: Tensor) -> Tensor:
    """The leaf's rows, (n, columns); a view where the leaf is contiguous. A leaf of one dim has
    rows of one number, and a 0-d one has one row."""
    num_rows = leaf.shape[0] if leaf.dim() else 1
    return leaf.reshape(num_rows, prod(leaf.shape[1:]))


def init_by_rows(init: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """An author's `init` of rows, as one of a leaf."""

    @wraps(init)  # whose name errors have
    def run(param: Tensor) -> Any:
        rows = as_rows(param)
        state = init(rows)
        for leaf in optree.tree_leaves(state):
            if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) != len(rows):
                raise TransformError(
                    f"{name_of(init)} makes a state that doesn't go by rows",
                    expected=f"tensors with {len(rows)} rows, or 0-d ones",
                    got=f"shape {tuple(leaf.shape)}",
                    remedy="param.new_zeros(len(param)) for one number per row",
                )
        return state

    return run


def update_by_rows(
    update: Callable[..., tuple[Tensor, Any]], *, in_place: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """An author's `update` of touched rows, as one of a leaf, or of `Rows` of it.

    Args:
        update: `(update, state) -> (update, state)`, or `(update, state, param)`.
        in_place: whether results are written over the leaf's update and state.
    """

    def run(leaf: Any, state: Any, *param: Tensor) -> tuple[Any, Any]:
        given = leaf.touched() if isinstance(leaf, Rows) else _touched(as_rows(leaf))
        ids = given.ids
        # 0-d: a count, say, which goes on whether or not a row is touched
        own = tree_map(lambda x: x[ids] if x.dim() else x, state)
        new, new_own = update(given.values, own, *(as_rows(p)[ids] for p in param))

        def put(whole: Tensor, here: Tensor) -> Tensor:
            if not whole.dim():
                return here
            target = whole if in_place else whole.clone()
            return target.index_copy_(0, ids, here.to(whole.dtype))

        state = tree_map(put, state, new_own)
        if isinstance(leaf, Rows):
            return given.map(lambda values: new.to(values.dtype)), state
        # The rows that weren't touched are zeros, as their updates are
        return put(as_rows(leaf), new).reshape(leaf.shape), state

    return run


def _touched(rows: Tensor) -> Rows:
    """The rows that aren't all zeros, of a leaf's (n, columns)."""
    ids = touched_among(rows)
    return Rows(ids, rows[ids], len(rows))


def name_of(author: Any) -> str:
    """The name of an author's function."""
    return getattr(author, "__qualname__", repr(author))
