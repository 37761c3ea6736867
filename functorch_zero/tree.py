"""The few pytree helpers that optree does not have: dotted paths, selection, and `Params`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import optree
import torch.utils._pytree as torch_pytree
from optree import tree_map
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .errors import StructureError, explain
from .precision import Precision

T = TypeVar("T")
PyTree: TypeAlias = T | Any  # any tree whose leaves are T; optree's own type knows the built-in containers only
register: Any = optree.register_pytree_node


@dataclass(frozen=True)
class UnitSpec:
    """Leaves that are gathered and freed together, and the modules whose calls enter them."""

    name: str
    modules: tuple[str, ...]  # paths of the modules that use the leaves, in the order they are called
    leaves: tuple[str, ...]  # dotted paths of the leaves
    precisions: tuple[Precision, ...] = ()  # of each leaf; empty: none has a policy

    @property
    def policies(self) -> dict[str, Precision]:
        """By leaf, the policies given."""
        return dict(zip(self.leaves, self.precisions, strict=True)) if self.precisions else {}


class Params(dict[str, Any]):
    """A model's parameters: a dict from dotted path to leaf, which also carries the model's `units`.

    It is a pytree node of its own for optree and for torch, in insertion order, so `tree_map` over it gives a
    `Params` again. `dict(params)` forgets the units.
    """

    def __init__(self, leaves: Mapping[str, Any] | Iterable[tuple[str, Any]] = (), units: tuple[UnitSpec, ...] = ()):
        super().__init__(leaves)
        self.units = units


def _flatten_params(params: Params) -> tuple[list[Any], tuple[tuple[str, ...], tuple[UnitSpec, ...]], tuple[str, ...]]:
    keys = tuple(params)
    return list(params.values()), (keys, params.units), keys


def _unflatten_params(context: tuple[tuple[str, ...], tuple[UnitSpec, ...]], leaves: Iterable[Any]) -> Params:
    keys, units = context
    return Params(zip(keys, leaves, strict=True), units)


register(Params, _flatten_params, _unflatten_params, namespace=optree.registry.__GLOBAL_NAMESPACE)
torch_pytree.register_pytree_node(
    Params, lambda p: _flatten_params(p)[:2], lambda leaves, context: _unflatten_params(context, leaves)
)


def paths(tree: PyTree[Any], is_leaf: Callable[[Any], bool] | None = None) -> list[str]:
    """The dotted path of every leaf, in flatten order.

    >>> paths({"head": {"weight": 1}, "blocks": [2, 3]})
    ['blocks.0', 'blocks.1', 'head.weight']
    """
    if is_leaf is None and type(tree) is Params and all(isinstance(leaf, Tensor) for leaf in tree.values()):
        return list(tree)
    return [".".join(_entry(e) for e in accessor) for accessor in optree.tree_accessors(tree, is_leaf=is_leaf)]


def _entry(entry: Any) -> str:
    return str(getattr(entry, "field", entry.entry))


def named_leaves(tree: PyTree[Any]) -> dict[str, Any]:
    """Leaves by dotted path. For a model's params this is what `Module.load_state_dict` takes.

    >>> named_leaves({"b": [1, None], "a": 2})
    {'a': 2, 'b.0': 1}
    """
    return dict(zip(paths(tree), optree.tree_leaves(tree), strict=True))


def storage_id(x: Tensor) -> int:
    """Which storage a tensor lies in, while that lives: an address would be 0 for tensors without values."""
    return int(x.untyped_storage()._cdata)


def storages(tree: PyTree[Any]) -> set[int]:
    """The storages that a tree's tensors lie in."""
    return {storage_id(x) for x in optree.tree_leaves(tree) if isinstance(x, Tensor)}


def has_values(x: Tensor) -> bool:
    """Whether there is more to a tensor than shape and dtype."""
    return not (x.is_meta or isinstance(x, FakeTensor))


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
    picked = iter(b if a is None else a for a, b in zip(chosen, whole, strict=True) if b is not None)
    assert len(leaves) == treedef.num_leaves
    return treedef.unflatten(picked)


def mask_of(tree: PyTree[Any], mask: PyTree[bool] | Callable[[str, Any], bool]) -> PyTree[bool]:
    """A tree of bools shaped like `tree`, from such a tree or from a function `(path, leaf) -> bool`."""
    if callable(mask):
        treedef = optree.tree_structure(tree)
        values = [bool(mask(path, leaf)) for path, leaf in zip(paths(tree), optree.tree_leaves(tree), strict=True)]
        return treedef.unflatten(values)
    same_structure(tree, mask, what="the mask")
    return mask


def same_structure(expected: PyTree[Any], got: PyTree[Any], *, what: str, rank: int | None = None) -> None:
    """Raise `StructureError`, naming the first path that differs, unless both trees have the same structure."""
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
