"""Building a layout: leaves into units, units into buckets, buckets into pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import optree
import torch

from ..params import Params, UnitSpec
from ..precision import Dtypes, Precision, short
from ..tree import PyTree, paths
from .layout import Bucket, Cut, Layout, LeafSpec, Unit

LARGE = 2**23  # bytes of a leaf from which on a bucket of its own pays, at levels 2 and 3


ALIGNMENT = 64  # bytes; a leaf, and a rank's piece, start at a multiple of it


def leaf_specs(
    tree: PyTree[Any],
    trainable: Callable[[str, Any], bool],
    cut: Callable[[str, Any], Cut],
    policies: Mapping[str, Precision],
) -> list[LeafSpec]:
    """What `make_layout` needs, read off a tree of tensors (the meta device will do), with the
    policies by path."""
    specs = []
    for path, leaf in zip(paths(tree), optree.tree_leaves(tree), strict=True):
        dtypes = policies[path].dtypes(leaf.dtype) if path in policies else None
        trained = bool(trainable(path, leaf))
        specs.append(
            LeafSpec(path, tuple(leaf.shape), leaf.dtype, trained, cut(path, leaf), dtypes)
        )
    return specs


def make_layout(
    tree: PyTree[Any],
    num_ranks: int,
    *,
    trainable: Callable[[str, Any], bool],
    units: Sequence[UnitSpec] | None = None,
    cut: Callable[[str, Any], Cut] | None = None,
) -> Layout:
    """Cut `tree` over `num_ranks` ranks. `units` defaults to `default_units`, `cut` to a piece of
    all on every rank."""
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be at least 1, got {num_ranks}")
    everything = Cut(3, num_ranks, num_ranks)
    chosen = default_units(tree) if units is None else units
    policies = {path: policy for unit in chosen for path, policy in unit.policies.items()}
    specs = leaf_specs(
        tree, trainable, (lambda path, leaf: everything) if cut is None else cut, policies
    )
    number = {spec.path: i for i, spec in enumerate(specs)}
    made: list[Unit] = []
    buckets: list[Bucket] = []
    for unit in chosen:
        groups = _same_kind(specs, [number[path] for path in unit.leaves if path in number])
        levels = len({specs[leaves[0]].cut.level for leaves in groups})
        made.append(
            Unit(unit.name, unit.modules, tuple(range(len(buckets), len(buckets) + len(groups))))
        )
        buckets += [_bucket(unit.name, specs, leaves, levels) for leaves in groups]
    covered = sorted(leaf for bucket in buckets for leaf in bucket.leaves)
    if covered != list(range(len(specs))):
        raise ValueError(
            "each leaf must be in exactly one unit; the units given don't cover the tree exactly "
            "once"
        )
    return Layout(num_ranks, tuple(specs), tuple(made), tuple(buckets), optree.tree_structure(tree))


def default_units(tree: PyTree[Any]) -> tuple[UnitSpec, ...]:
    """The units that models in the tree have (`Params.units`). Of the rest, each child of the root
    that is itself a tree is one unit, and bare leaves share one."""
    found: list[UnitSpec] = []
    groups: dict[str, list[str]] = {}
    accessors = optree.tree_accessors(tree, is_leaf=_has_units)
    for accessor, path in zip(accessors, paths(tree, is_leaf=_has_units), strict=True):
        node = accessor(tree)
        if _has_units(node):
            found += [_inside(unit, path) for unit in node.units]
        else:
            groups.setdefault(path.split(".")[0] if len(accessor) > 1 else "", []).append(path)
    return (*found, *(UnitSpec(name, (), tuple(leaves)) for name, leaves in groups.items()))


def _has_units(node: Any) -> bool:
    return isinstance(node, Params) and bool(node.units)


def _inside(unit: UnitSpec, path: str) -> UnitSpec:
    """The unit of a model that lies at `path` of a tree. Its modules keep their paths in the
    model."""
    if not path:
        return unit
    leaves = tuple(f"{path}.{leaf}" for leaf in unit.leaves)
    return replace(unit, name=f"{path}.{unit.name}".rstrip("."), leaves=leaves)


def _same_kind(specs: Sequence[LeafSpec], numbers: Sequence[int]) -> list[list[int]]:
    """A unit's leaves bucket by bucket; those that are alone in theirs last."""
    kinds: dict[tuple[torch.dtype, Dtypes | None, bool, Cut, int], list[int]] = {}
    alone = {i: i if _stands_alone(specs[i]) else -1 for i in numbers}
    for i in sorted(numbers, key=lambda i: alone[i] >= 0):
        kinds.setdefault(
            (specs[i].dtype, specs[i].dtypes, specs[i].trainable, specs[i].cut, alone[i]), []
        ).append(i)
    return list(kinds.values())


def _stands_alone(spec: LeafSpec) -> bool:
    """Whether a leaf is a bucket by itself: its gradient, if reduced at once, then needs no copy to
    be one flat."""
    align = max(1, ALIGNMENT // spec.dtype.itemsize) * spec.cut.num_pieces
    large = spec.numel * spec.dtype.itemsize >= LARGE and spec.numel % align == 0
    return large and spec.trainable and spec.cut.level > 1 and spec.cut.num_pieces > 1


def _bucket(
    unit: str, specs: Sequence[LeafSpec], numbers: Sequence[int], num_levels: int
) -> Bucket:
    first = specs[numbers[0]]
    align = max(1, ALIGNMENT // first.dtype.itemsize)
    offsets, end = [], 0
    for i in numbers:
        offsets.append(end)
        end += -(-specs[i].numel // align) * align
    piece = -(-end // (first.cut.num_pieces * align)) * align
    about = (
        short(first.dtype)
        if first.dtypes is None
        else f"{short(first.dtype)}, used as {first.dtypes}"
    )
    about += f", {first.path}" if _stands_alone(first) else ""
    about += ("" if first.trainable else ", frozen") + (
        f", level {first.cut.level}" if num_levels > 1 else ""
    )
    name, shapes = f"{unit or 'root'}[{about}]", tuple(specs[i].shape for i in numbers)
    return Bucket(
        name,
        first.dtype,
        first.trainable,
        tuple(numbers),
        shapes,
        tuple(offsets),
        piece,
        first.cut,
        first.dtypes,
    )
