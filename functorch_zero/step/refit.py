"""A value carried over to one of another structure: leaves of the same path keep their values."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, NamedTuple

import optree
from torch import Tensor

from ..errors import StructureError, explain
from ..optim.base import Transform
from ..tree import PyTree, paths, select


def check_no_parts(parts: Any) -> None:
    """Raise if a state has parts, which another structure has no place for."""
    if parts is not None:
        raise StructureError(
            "refit can't keep the tensors of a reduction, which belong to buckets. Remedy: "
            "refit(state.replace(parts=None), ...), and they begin anew"
        )


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


_BEGIN_ANEW = "let the optimizer begin anew, by init of the state's params"


def check_own_leaves(
    optimizer: Transform,
    before: PyTree[Tensor],
    after: PyTree[Tensor],
    rank: int | None = None,
) -> None:
    """Raise where other leaves are trained than before, if an optimizer's state has a tensor of all
    of them together. Its shape may stay the same, but its elements belong to leaves that were.

    Counters and scales, which are 0-d, go on.

    Args:
        before: the leaves that were trained, None elsewhere; they need no values.
        after: those that are trained now.
    """
    old, new = paths(before), paths(after)
    if old == new:
        return

    def made_of(params: PyTree[Tensor], chosen: Set[str]) -> set[str]:
        return _tensors_of_state(optimizer, params, chosen, rank)

    gone, added = {*old} - {*new}, {*new} - {*old}
    if gone or added:
        # A leaf's own tensor is kept where the leaf was trained and still is. So a tensor that the
        # other leaves have, too, belongs to no leaf alone
        shared = made_of(before, gone) | made_of(after, added)
    else:
        # The same leaves in another order: no tensor is two leaves' own
        shared = made_of(before, {old[0]}) & made_of(before, {*old[1:]})
    kept_and_shared = shared & made_of(before, {*old}) & made_of(after, {*new})
    if kept_and_shared:
        raise StructureError(
            explain(
                "refit trains other leaves than before, or in another order, and can't keep a leaf "
                "of the optimizer's state that belongs to all leaves together",
                path=min(kept_and_shared),
                expected=f"the trained leaves {old}",
                got=f"{new}",
                rank=rank,
                remedy=_BEGIN_ANEW,
            )
        )


def _tensors_of_state(
    optimizer: Transform, params: PyTree[Tensor], chosen: Set[str], rank: int | None
) -> set[str]:
    """The paths of the tensors with dims in a first state of the chosen leaves."""
    if not chosen:
        return set()
    mask = optree.tree_structure(params).unflatten([path in chosen for path in paths(params)])
    try:
        state = optimizer.init_on_meta(select(params, mask))
    except Exception as error:
        raise StructureError(
            explain(
                "refit trains other leaves than before, and can't tell which part of the "
                "optimizer's state belongs to them, since its init fails on the meta device",
                expected=f"a state of the leaves {sorted(chosen)}",
                got=f"{type(error).__name__}: {error}",
                rank=rank,
                remedy=f"let init take any part of the leaves, without values; or {_BEGIN_ANEW}",
            )
        ) from error
    leaves = zip(paths(state), optree.tree_leaves(state), strict=True)
    return {path for path, leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim > 0}


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
