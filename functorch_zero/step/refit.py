"""A value carried over to one of another structure: leaves of the same path keep their values."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, NamedTuple

import optree
from torch import Tensor

from ..errors import StructureError, explain
from ..tree import PyTree, names_of, paths


class Form(NamedTuple):
    """A leaf's shape, where it is whole, and dtype; of a number its type."""

    shape: tuple[int, ...] | None
    dtype: Any

    @classmethod
    def of(cls, leaf: Any) -> Form:
        if isinstance(leaf, Tensor):
            return cls(tuple(leaf.shape), leaf.dtype)
        return cls(None, type(leaf).__name__)

    def __str__(self) -> str:
        return f"{self.dtype}" if self.shape is None else f"shape {self.shape}, {self.dtype}"


def kept(
    new: Mapping[str, Form], old: Mapping[str, Form], what: str, rank: int | None = None
) -> list[str]:
    """The paths of the leaves that both have, in the order of the new ones.

    Raises:
        StructureError: naming the first leaf that has another shape or dtype.
    """
    found = []
    for path, form in new.items():
        if path not in old:
            continue
        if old[path] != form:
            raise StructureError(
                explain(
                    f"refit can't keep a leaf of {what}, which has another shape or dtype now",
                    path=path,
                    expected=old[path],
                    got=form,
                    rank=rank,
                    remedy="give a leaf of another shape another path; a state that belongs to "
                    "all leaves together can't be kept, and begins anew by init",
                )
            )
        found.append(path)
    return found


def check_own_leaves(
    opt_state: PyTree[Any], before: Set[str], after: Set[str], rank: int | None = None
) -> None:
    """Raise where other leaves are trained than before, if an optimizer's state has a tensor of all
    of them together. Its shape may stay the same, but its elements belong to leaves that were.

    Tensors of one param have its path in theirs. Counters and scales, which are 0-d, go on.

    Args:
        before: the paths of the leaves that were trained.
        after: those of the leaves that are trained now.
    """
    if before == after:
        return
    for path, leaf in zip(paths(opt_state), optree.tree_leaves(opt_state), strict=True):
        if isinstance(leaf, Tensor) and leaf.ndim > 0 and not _parts_of(path) & before:
            raise StructureError(
                explain(
                    "refit trains other leaves than before, and can't keep a leaf of the "
                    "optimizer's state that belongs to all leaves together",
                    path=path,
                    expected=f"the trained leaves {sorted(before)}",
                    got=f"{sorted(after)}",
                    rank=rank,
                    remedy="let the optimizer begin anew, by init of the state's params",
                )
            )


def _parts_of(path: str) -> set[str]:
    """A path, and each run of its names: "mu.w.0" has "mu.w", "w", "w.0" and so on."""
    names = names_of(path)
    ends = range(1, len(names) + 1)
    return {".".join(names[start:end]) for end in ends for start in range(end)}


def carried(new: PyTree[Any], old: PyTree[Any], what: str) -> PyTree[Any]:
    """The new tree, with copies of the old one's leaves where the paths are the same. Whole
    leaves; they require grad as the new ones do."""
    leaves, treedef = optree.tree_flatten(new)
    known = dict(zip(paths(old), optree.tree_leaves(old), strict=True))
    by_path = dict(zip(paths(new), leaves, strict=True))
    forms = [{path: Form.of(leaf) for path, leaf in tree.items()} for tree in (by_path, known)]
    for path in kept(forms[0], forms[1], what):
        by_path[path] = _copy(known[path], by_path[path])
    check_values(by_path, what)
    return treedef.unflatten([*by_path.values()])


def _copy(leaf: Any, like: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(like.requires_grad)


def check_values(leaves: Mapping[str, Any], what: str, rank: int | None = None) -> None:
    """Raise if a new leaf is on the meta device."""
    for path, leaf in leaves.items():
        if isinstance(leaf, Tensor) and leaf.is_meta:
            raise StructureError(
                explain(
                    f"a new leaf of {what} has no values",
                    path=path,
                    expected="a leaf on a device",
                    got="one on the meta device",
                    rank=rank,
                    remedy="only leaves that the state has may be on the meta device",
                )
            )
