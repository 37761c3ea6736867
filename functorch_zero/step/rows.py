"""The rows of a batch: one per example. All that counts or cuts them goes by this file.

Tensors and numpy arrays tell how many there are: the length of dim 0, in all that have dims. These
are cut along it, and so are lists and tuples of anything else, which must be as long: what
collating makes of labels or captions. Numbers, texts and 0-d tensors belong to all rows. Containers
are opened, mappings of any kind among them. Other objects can't be cut.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from numbers import Number
from typing import Any

import optree
from optree import tree_map
from torch import Tensor

from ..errors import StructureError
from ..tree import dotted, paths


def leading_sizes(batch: Any) -> list[int]:
    """The first dims of a batch's tensors and arrays, in flatten order; those without dims are left
    out."""
    return [len(leaf) for leaf in opened(batch) if _has_rows(leaf)]


def sizes_by_path(batch: Any) -> list[tuple[str, int]]:
    """The leading sizes with their paths, which take long."""
    return [(path, len(leaf)) for path, leaf in opened_by_path(batch) if _has_rows(leaf)]


def num_rows(batch: Any) -> int | None:
    """How many rows a batch has; None: no tensor or array tells.

    Raises:
        StructureError: two differ, so that parts of one would belong to others' rows.
    """
    sizes = leading_sizes(batch)
    if len({*sizes}) < 2:
        return sizes[0] if sizes else None
    named = sizes_by_path(batch)
    path, num = next((path, num) for path, num in named if num != sizes[0])
    raise StructureError(
        "a batch is cut along dim 0 of its tensors, and these have unequal rows",
        path=path,
        expected=f"{sizes[0]}, as {named[0][0]} has",
        got=num,
        remedy="give each tensor a row per example; close over one that is no part of the "
        "batch, or pass it as a number or a 0-d tensor",
    )


def split_rows(batch: Any, count: int) -> list[Any]:
    """A batch in `count` parts of consecutive rows, the first ones larger by one where that doesn't
    divide.

    Raises:
        StructureError: leaves have unequal rows, or one can't be cut.
    """
    rows = num_rows(batch)
    return _cut(batch, rows, [_rows_of_part(rows or 0, n, count) for n in range(count)])


def part_of_rows(batch: Any, n: int, count: int) -> Any:
    """Part n of those that `split_rows` makes."""
    rows = num_rows(batch)
    return _cut(batch, rows, [_rows_of_part(rows or 0, n, count)])[0]


def _rows_of_part(rows: int, n: int, count: int) -> slice:
    size, rest = divmod(rows, count)
    return slice(n * size + min(n, rest), (n + 1) * size + min(n + 1, rest))


def without_rows(batch: Any) -> Any:
    """A batch of the same structure with 0 rows."""
    return _cut(batch, num_rows(batch), [slice(0)])[0]


def _cut(batch: Any, rows: int | None, parts: Sequence[slice]) -> list[Any]:
    """These parts of a batch's rows, of which there are so many."""
    by_leaf = []
    for n, leaf in enumerate(opened(batch)):
        cut = _parts_of(leaf, rows, parts)
        if cut is None:
            raise _uncut(*opened_by_path(batch)[n], rows)
        by_leaf.append(cut)
    return [_with_leaves(batch, (cut[n] for cut in by_leaf)) for n in range(len(parts))]


def _parts_of(leaf: Any, rows: int | None, parts: Sequence[slice]) -> list[Any] | None:
    """The parts of one leaf; None: it can't be cut, or could in two ways."""
    if _has_rows(leaf):
        return [leaf[part] for part in parts]
    if _is_single(leaf) or (_is_list(leaf) and not leaf):
        return [leaf] * len(parts)
    if not _is_list(leaf):
        return None
    # One entry per row; or several lists of these, as default collating makes them
    is_per_row = len(leaf) == rows
    if all(isinstance(x, Tensor) for x in leaf):  # 0-d: a tree of numbers, or one per row
        return None if is_per_row else [leaf] * len(parts)
    inside = all(_is_list(x) and len(x) == rows for x in leaf)
    if is_per_row and not inside:
        return [leaf[part] for part in parts]
    if inside and not is_per_row:
        return [type(leaf)(x[part] for x in leaf) for part in parts]
    return None


def _uncut(path: str, leaf: Any, rows: int | None) -> StructureError:
    got = f"a {type(leaf).__name__}"
    if _is_list(leaf):
        got += f" of {len(leaf)}, the first of them a {type(leaf[0]).__name__}"
    each, here = ("a row per example", "") if rows is None else (f"{rows} rows", f", {rows} here,")
    entries = "an entry per row" if rows is None else f"{rows} entries"
    return StructureError(
        f"a batch is cut along its rows{here} and it can't be told which part of this belongs "
        "to each",
        path=path,
        expected=f"a tensor or array with {each}, a list with {entries} that are no tensors, "
        "a dict of such, or a number or text that all rows share",
        got=got,
        remedy="pass its fields as a dict, or a list with one object per row; close over what "
        "is the same for all rows",
    )


def _is_array(x: Any) -> bool:
    numpy = sys.modules.get("numpy")  # whoever has an array has imported it
    return isinstance(x, Tensor) or (numpy is not None and isinstance(x, numpy.ndarray))


def _has_rows(leaf: Any) -> bool:
    return _is_array(leaf) and leaf.ndim > 0


def _is_single(leaf: Any) -> bool:
    """Whether a leaf without rows belongs to all of them."""
    numpy = sys.modules.get("numpy")
    is_of_numpy = numpy is not None and isinstance(leaf, numpy.generic)
    return is_of_numpy or _is_array(leaf) or isinstance(leaf, Number | str | bytes)


def _is_list(node: Any) -> bool:
    return type(node) in (list, tuple)  # not a NamedTuple, whose fields differ


def _is_list_of_values(node: Any) -> bool:
    """Whether a list is cut by its entries: in one of tensors each tensor is."""
    # A deque can't be cut, and falls into its entries no more than a list does
    return (_is_list(node) or type(node) is deque) and not _holds_rows(node)


def _holds_rows(node: Any) -> bool:
    """Whether a tensor or array with rows is somewhere inside."""
    leaves = optree.tree_leaves(node)
    # Nearly always, and of thousands of tokens in each step
    if {*map(type, leaves)} <= _VALUES:
        return False
    return any(_holds_rows(dict(x)) if isinstance(x, Mapping) else _has_rows(x) for x in leaves)


_VALUES = {int, float, bool, str, bytes}


def _is_leaf_of(batch: Any) -> Any:
    # A batch that is a tuple has several parts, such as a program's arguments
    return lambda node: not (node is batch and type(node) is tuple) and _is_list_of_values(node)


def opened(batch: Any) -> list[Any]:
    """The leaves of a batch, those in mappings among them. Lists of values are leaves."""
    found = []
    for leaf in optree.tree_leaves(batch, is_leaf=_is_leaf_of(batch)):
        found += opened(dict(leaf)) if isinstance(leaf, Mapping) else [leaf]
    return found


def opened_by_path(batch: Any, inside: str = "") -> list[tuple[str, Any]]:
    """The leaves that `opened` gives, with their paths, which take long."""
    found = []
    is_leaf = _is_leaf_of(batch)
    leaves = optree.tree_leaves(batch, is_leaf=is_leaf)
    for name, leaf in zip(paths(batch, is_leaf), leaves, strict=True):
        path = dotted(inside, name)
        found += opened_by_path(dict(leaf), path) if isinstance(leaf, Mapping) else [(path, leaf)]
    return found


def _with_leaves(batch: Any, leaves: Iterator[Any]) -> Any:
    """The batch with these leaves in place of its own."""

    def made(node: Any) -> Any:
        if not isinstance(node, Mapping):
            return next(leaves)
        inside = _with_leaves(dict(node), leaves)
        try:
            # transformers' BatchEncoding leaves behind what it knows of the rows' texts
            return type(node)(inside)  # type: ignore[call-arg]
        except Exception as error:  # its author's
            raise StructureError(
                "a batch is cut along its rows, and a mapping in it can't be made again",
                got=f"{type(error).__name__} from {type(node).__name__}(a dict)",
                remedy="pass dict(...) of it",
            ) from error

    return tree_map(made, batch, is_leaf=_is_leaf_of(batch))
