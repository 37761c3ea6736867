"""A value carried over to one of another structure: leaves of the same path keep their values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any, NamedTuple

import optree
import torch
from optree import tree_map
from torch import Tensor

from ..errors import StructureError
from ..tree import PyTree, named_leaves, paths


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


def forms_of(tree: PyTree[Any]) -> dict[str, Form]:
    """Those of a tree's leaves, by path."""
    return {path: Form.of(leaf) for path, leaf in named_leaves(tree).items()}


def check_forms(
    expected: Mapping[str, Form],
    got: Mapping[str, Form],
    what: str,
    *,
    rank: int | None = None,
    remedy: str,
) -> None:
    """Raise, naming the first leaf, unless the leaves of each path have one shape and dtype.

    Args:
        expected: of leaves that are in `got`, too.
        what, rank, remedy: for the error.
    """
    for path, form in expected.items():
        if got[path] != form:
            raise StructureError(
                what, path=path, expected=form, got=got[path], rank=rank, remedy=remedy
            )


def in_both(
    new: Mapping[str, Form], old: Mapping[str, Form], what: str, rank: int | None = None
) -> list[str]:
    """The paths of the leaves that both have, in the order of the new ones.

    Raises:
        StructureError: naming the first leaf that has another shape or dtype.
    """
    kept = {path: old[path] for path in new if path in old}
    check_forms(
        kept,
        new,
        f"refit can't keep a leaf of {what}, which has another shape or dtype now",
        rank=rank,
        remedy="give a leaf of another shape another path; a state that belongs to all leaves "
        "together can't be kept, and begins anew by init",
    )
    return [*kept]


_BEGIN_ANEW = "let the optimizer begin anew, by init of the state's params"


def check_own_tensors(
    first_value: Callable[..., Any],
    given: Mapping[str, Any],
    before: Sequence[str],
    after: Sequence[str],
    known: Collection[str],
    rank: int | None = None,
) -> None:
    """Raise if other leaves are trained than before, or in another order, and the value has a
    tensor that belongs to all of them together.

    Nobody names the optimizers of a program. Its `init` runs on the meta device, once with fewer
    leaves trained. A tensor of all leaves together has another shape then, or it lies beside the
    trees of leaves' own tensors, in an optimizer's state.

    Args:
        first_value: the program's `init`.
        given: its arguments by name. Trees are whole, and their leaves know if they are trained.
        before: the paths of the leaves of the value that were trained.
        after: of those that are trained now.
        known: the paths of all leaves that the state's value has.
    """
    if before == after:
        return
    for name, tree in given.items():
        old, new = (_leaves_of(tree, name, names, known) for names in (before, after))
        chosen = {*old, *new}
        # Of no leaves there is no state. The same ones in another order belong to other elements
        rest = {*old} & {*new} or {*new}
        rest = rest - {*old[:1]} if rest == {*old} == {*new} else rest
        if old == new or not rest or rest == chosen:
            continue
        everything = _shapes_of_value(first_value, given, name, chosen, rank)
        fewer = _shapes_of_value(first_value, given, name, rest, rank)
        gone = everything.keys() - fewer.keys()
        nodes = {_node_of_trees(path, chosen - rest) for path in gone}
        for path, shape in fewer.items():
            is_beside = path.rpartition(".")[0] in nodes - {""}
            if shape and path in known and (is_beside or everything.get(path) != shape):
                raise StructureError(
                    "refit trains other leaves than before, or in another order, and can't "
                    "keep a leaf of the optimizer's state that belongs to all leaves together",
                    path=path,
                    expected=f"the trained leaves {[*before]}",
                    got=f"{[*after]}",
                    rank=rank,
                    remedy=_BEGIN_ANEW,
                )


def _node_of_trees(path: str, leaves: Set[str]) -> str:
    """The path of the node that has a tree of leaves' own tensors, of one of which this is the
    path: "opt" of "opt.mu.w". "" where it is the whole value, or none."""
    for leaf in leaves:
        if path.endswith(f".{leaf}"):
            return path.removesuffix(f".{leaf}").rpartition(".")[0]
    return ""


def _leaves_of(
    tree: PyTree[Any], name: str, names: Sequence[str], known: Collection[str]
) -> list[str]:
    """Of these paths in a value, those of the leaves of an argument of this name, as it has them
    itself. The value has it under its name; else a leaf is known by the end of its path."""
    own, prefix, found = {*paths(tree)}, f"{name}.", []
    is_entry = any(path.startswith(prefix) for path in known)
    for path in names:
        if is_entry:
            path = path.removeprefix(prefix) if path.startswith(prefix) else ""
        while path not in own and not is_entry and path:
            path = path.partition(".")[2]
        if path in own:
            found.append(path)
    return found


def _shapes_of_value(
    first_value: Callable[..., Any],
    given: Mapping[str, Any],
    name: str,
    chosen: Set[str],
    rank: int | None,
) -> dict[str, tuple[int, ...]]:
    """By path, the shapes of a first value's tensors, if these leaves of a tree were trained."""
    bare = {n: tree_map(without_values, arg) for n, arg in given.items()}
    for path, leaf in named_leaves(bare[name]).items():
        if isinstance(leaf, Tensor):
            leaf.requires_grad_(path in chosen)
    try:
        # What `init` draws elsewhere is undone
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            value = first_value(*bare.values())
    except Exception as error:
        raise StructureError(
            "refit trains other leaves than before, and can't tell which part of the value "
            "belongs to them, since the program's init fails on the meta device",
            path=name,
            expected=f"a value by the trained leaves {sorted(chosen)}",
            got=f"{type(error).__name__}: {error}",
            rank=rank,
            remedy=f"let init take leaves without values; or {_BEGIN_ANEW}",
        ) from error
    leaves = named_leaves(value).items()
    return {path: tuple(leaf.shape) for path, leaf in leaves if isinstance(leaf, Tensor)}


def without_values(leaf: Any) -> Any:
    """A tensor's form on the meta device, trained where the tensor is; anything else itself."""
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty_like(leaf, device="meta").requires_grad_(leaf.requires_grad)


def carried(new: PyTree[Any], old: PyTree[Any], what: str, *, copies: bool = True) -> PyTree[Any]:
    """The new tree, with the old one's leaves where the paths are the same: copies, or views.
    Whole leaves; they require grad as the new ones do."""
    by_path, known = named_leaves(new), named_leaves(old)
    for path in in_both(forms_of(new), forms_of(old), what):
        leaf = known[path].clone() if copies and isinstance(known[path], Tensor) else known[path]
        by_path[path] = _marked(leaf, by_path[path])
    check_values(by_path, what)
    return optree.tree_structure(new).unflatten(by_path.values())


def _marked(leaf: Any, like: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().requires_grad_(like.requires_grad)


def check_values(leaves: Mapping[str, Any], what: str, rank: int | None = None) -> None:
    """Raise if a new leaf is on the meta device."""
    for path, leaf in leaves.items():
        if isinstance(leaf, Tensor) and leaf.is_meta:
            raise StructureError(
                f"a new leaf of {what} has no values",
                path=path,
                expected="a leaf on a device",
                got="one on the meta device",
                rank=rank,
                remedy="only leaves that the state has may be on the meta device",
            )
