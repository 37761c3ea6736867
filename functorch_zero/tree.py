"""The few pytree helpers that optree does not have: dotted paths, selection, and `Params`."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any, TypeAlias, TypeVar

import optree
import torch
from optree import tree_map
from torch import Tensor

from ._torch_private import is_fake, storage_id
from .errors import StructureError, explain
from .params import Params

T = TypeVar("T")
# Any tree whose leaves are T; optree's own type knows the built-in containers only
PyTree: TypeAlias = T | Any


def paths(tree: PyTree[Any], is_leaf: Callable[[Any], bool] | None = None) -> list[str]:
    """The dotted path of every leaf, in flatten order.

    >>> paths({"head": {"weight": 1}, "blocks": [2, 3]})
    ['blocks.0', 'blocks.1', 'head.weight']
    """
    if (
        is_leaf is None
        and type(tree) is Params
        and all(isinstance(leaf, Tensor) for leaf in tree.values())
    ):
        return list(tree)
    return [
        ".".join(filter(None, map(_entry, accessor)))
        for accessor in optree.tree_accessors(tree, is_leaf=is_leaf)
    ]


def _entry(entry: Any) -> str:
    return str(getattr(entry, "field", entry.entry))


def named_leaves(tree: PyTree[Any]) -> dict[str, Any]:
    """Leaves by dotted path. For a model's params this is what `Module.load_state_dict` takes.

    >>> named_leaves({"b": [1, None], "a": 2})
    {'a': 2, 'b.0': 1}
    """
    return dict(zip(paths(tree), optree.tree_leaves(tree), strict=True))


def storages(tree: PyTree[Any]) -> set[int]:
    """The storages that a tree's tensors lie in."""
    return {storage_id(x) for x in optree.tree_leaves(tree) if isinstance(x, Tensor)}


def has_values(x: Tensor) -> bool:
    """Whether there is more to a tensor than shape and dtype."""
    return not (x.is_meta or is_fake(x))


def select(tree: PyTree[Any], mask: PyTree[bool]) -> PyTree[Any]:
    """`tree` with None, which optree skips, where `mask` is false.

    >>> select({"a": 1, "b": 2}, {"a": True, "b": False})
    {'a': 1, 'b': None}
    """
    return tree_map(lambda leaf, keep: leaf if keep else None, tree, mask)


def merge(selected: PyTree[Any], rest: PyTree[Any]) -> PyTree[Any]:
    """Inverse of `select`: where `selected` has None, the leaf of `rest`."""
    leaves, treedef = optree.tree_flatten(rest)
    chosen = optree.tree_leaves(selected, none_is_leaf=True)
    whole = optree.tree_leaves(rest, none_is_leaf=True)
    picked = iter(
        b if a is None else a for a, b in zip(chosen, whole, strict=True) if b is not None
    )
    assert len(leaves) == treedef.num_leaves
    return treedef.unflatten(picked)


def mask_of(tree: PyTree[Any], mask: PyTree[bool] | Callable[[str, Any], bool]) -> PyTree[bool]:
    """A tree of bools shaped like `tree`, from such a tree or from a function
    `(path, leaf) -> bool`."""
    if callable(mask):
        treedef = optree.tree_structure(tree)
        values = [
            bool(mask(path, leaf))
            for path, leaf in zip(paths(tree), optree.tree_leaves(tree), strict=True)
        ]
        return treedef.unflatten(values)
    same_structure(tree, mask, what="the mask")
    return mask


def same_structure(
    expected: PyTree[Any], got: PyTree[Any], *, what: str, rank: int | None = None
) -> None:
    """Raise `StructureError`, naming the first path that differs, unless both trees have the same
    structure."""
    if optree.tree_structure(expected) == optree.tree_structure(got):
        return
    want, have = paths(expected), paths(got)
    missing = [p for p in want if p not in set(have)]
    extra = [p for p in have if p not in set(want)]
    path = (missing or extra or [""])[0]
    story = "missing" if missing else "not expected" if extra else f"a {type(got).__name__}"
    raise StructureError(
        explain(
            f"{what} does not have the tree structure it must have",
            path=path,
            expected=f"{len(want)} leaves in a {type(expected).__name__}",
            got=f"{len(have)} leaves in a {type(got).__name__}; this leaf is {story}",
            rank=rank,
            remedy="pass a tree with the structure of the params that `init` was given",
        )
    )


_CHUNK = 2**20  # bytes that a digest looks at together: it makes some copies of them


def content_digests(tree: PyTree[Tensor]) -> dict[str, Any]:
    """A digest of each leaf's values, by path; leaves on the meta device have none."""
    named = zip(paths(tree), optree.tree_leaves(tree), strict=True)
    return {path: _digest(leaf.detach()) for path, leaf in named if leaf.device.type != "meta"}


def _digest(leaf: Tensor) -> str:
    """Of the bytes, so that NaNs compare equal to themselves; weighted by position, so that a swap
    shows."""
    data, total = leaf.contiguous().reshape(-1).view(torch.uint8), 0
    for start in range(0, data.numel(), _CHUNK):
        part = data[start : start + _CHUNK]
        words = torch.cat([part, part.new_zeros(-part.numel() % 8)]).view(torch.int64)
        position = (
            torch.arange(1, words.numel() + 1, device=words.device).add_(start // 8).mul_(2).add_(1)
        )
        total += int(((words ^ (words >> 29)) * position).sum())
    return f"{total & (2**64 - 1):016x}"


def path_matches(path: str, pattern: str) -> bool:
    """Name by name: "layers.*" is each layer, not what is inside it."""
    names, patterns = path.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


def ancestors(path: str) -> list[str]:
    """The path itself, its parents, and the root, innermost first."""
    parts = path.split(".") if path else []
    return [".".join(parts[:i]) for i in range(len(parts), -1, -1)]
