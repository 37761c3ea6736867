"""A transform's state as torch's state dicts have it: for each param a dict of tensors by name.

A leaf of the state that follows a param lies under that param, as a DTensor like it; so does one
whose path ends in a param's, such as Adafactor's rows. Others, such as counts, are shared by the
params that were updated together: where params may be updated apart, each has them in its dict,
else the first one. A leaf at one owner is spread by rows over the ranks, as a DTensor that torch
can gather and cut anew. The names are the state's paths without the param's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from ..errors import StructureError
from ..groups.dtensors import Placed, like_dtensor, local_of, sharded_by_rows
from ..layout.home import HomedLeaves
from ..layout.layout import Layout
from ..layout.placed import PlacedLeaf, placed_layout
from ..sharded_optim.state_plan import StateLeaf, StatePlan
from ..sharded_optim.whole_leaf import Exchange
from ..tree import grouped, is_dtensor

ByParam = dict[str, dict[str, Any]]  # path of a param -> name -> tensor


class _Entry(NamedTuple):
    """The place of a leaf of the state in a state dict."""

    param: str
    name: str
    path: str  # of the leaf, in the state
    leaf: StateLeaf
    is_shared: bool = False
    in_rows: bool = False  # is cut by rows, where there are several ranks: so a number is one row

    def shape_of(self, leaf: Tensor) -> tuple[int, ...]:
        """The shape of the whole tensor, of a leaf that follows no param."""
        shape = self.leaf.shape if self.has_owner else (*leaf.shape,)
        return shape or (1,) if self.in_rows else shape

    @property
    def has_owner(self) -> bool:
        return self.leaf.kind == "owned"


class TorchState:
    """The state of a transform on this rank.

    Args:
        tree: as `init` made it.
        plan: which of its leaves follow a param, and which have an owner.
        shared: the paths of leaves that belong to no param.
        apart: whether params may be updated apart, and so have other shared leaves.
        layout: of the params.
        params: by path, in the layout's order.
        placed: how torch has put them on ranks.
    """

    def __init__(
        self,
        tree: Any,
        plan: StatePlan,
        shared: Collection[str],
        layout: Layout,
        params: Mapping[str, Tensor],
        placed: Placed,
        *,
        apart: bool,
    ):
        self._layout, self._apart = layout, apart
        self._params, self._placed = params, placed
        leaves = dict(zip(plan.paths, optree.tree_leaves(tree), strict=True))
        first = {path: leaves.pop(path) for path in plan.paths if path in shared}
        self._own = leaves  # by path, without those that are shared
        # By param, then by path; one dict for params that have been updated together so far
        self._shared = dict.fromkeys(layout.paths, first)
        self._entries: list[_Entry] = []
        for path, leaf in zip(plan.paths, plan.leaves, strict=True):
            if path in shared:
                holders = layout.paths if apart else layout.paths[:1]
                self._entries += [_Entry(p, path, path, leaf, is_shared=True) for p in holders]
            else:
                self._entries.append(_entry(path, leaf, layout.paths, self._shared))

    # The state as a transform has it

    def together(self, paths: Iterable[str]) -> list[list[str]]:
        """These params, by the values of their shared leaves: those of a group can be updated
        together."""
        groups = grouped((id(self._shared[path]), path) for path in paths)
        if len(groups) < 2:
            return [*groups.values()]
        by_value: defaultdict[str, list[str]] = defaultdict(list)
        for group in groups.values():
            values = self._shared[group[0]].values()
            by_value[repr([x.tolist() for x in values])] += group
        return [*by_value.values()]

    def local(self, plan: StatePlan, paths: Sequence[str]) -> HomedLeaves:
        """The state of these params, which can be updated together. `plan`: of their state."""
        leaves = self._own | self._shared[paths[0]]
        return HomedLeaves(plan.treedef, [*map(leaves.__getitem__, plan.paths)], {})

    def take(self, plan: StatePlan, paths: Sequence[str], leaves: Sequence[Any]) -> None:
        """Take the leaves of their next state."""
        own = dict(zip(plan.paths, leaves, strict=True))
        shared = {path: own.pop(path) for path in self._shared[paths[0]]}
        self._own |= own
        self._shared |= dict.fromkeys(paths if self._apart else self._params, shared)

    # And as state dicts have it

    @property
    def has_owners(self) -> bool:
        """Whether a leaf is at one owner alone."""
        return any(entry.has_owner for entry in self._entries)

    def _values(self) -> list[Tensor]:
        """By entry. Copies of those that are shared: a load writes to each in place."""
        return [
            self._shared[entry.param][entry.path].clone()
            if entry.is_shared
            else self._own[entry.path]
            for entry in self._entries
        ]

    def shown(self) -> ByParam:
        """Tensors by param and name, without communication: of one at another owner, none of its
        elements."""
        return self._by_param(self._values())

    def saved(self) -> ByParam:
        """Tensors by param and name, with all elements. One all-to-all per dtype where leaves have
        owners."""
        leaves = self._values()
        at = [i for i, entry in enumerate(self._entries) if entry.has_owner]
        by_rows = _ByRows([self._entries[i].leaf for i in at], self._placed)
        rows = by_rows.from_owners([leaves[i] for i in at])
        for i, own, shape in zip(at, rows, by_rows.shapes, strict=True):
            leaves[i] = sharded_by_rows(own, shape, self._placed)
        return self._by_param(leaves)

    def load(self, given: ByParam) -> None:
        """Take the values of a state dict, where whole tensors may stand for DTensors. One
        all-to-all per dtype where leaves have owners.

        Raises:
            StructureError: tensors are missing, not expected, or of other shapes, dtypes or
                placements; nothing has been changed.
        """
        leaves = self._values()
        known = {(entry.param, entry.name) for entry in self._entries}
        for param, tensors in given.items():
            for name in tensors:
                if (param, name) not in known:
                    raise unfit(param, name, "no tensor of this name", "one")
        new, at = [], []
        for i, (entry, leaf) in enumerate(zip(self._entries, leaves, strict=True)):
            value = given.get(entry.param, {}).get(entry.name)
            new.append(self._fitting(entry, leaf, value))
            if entry.has_owner and is_dtensor(value):
                at.append(i)
        by_rows = _ByRows([self._entries[i].leaf for i in at], self._placed)
        for i, whole in zip(at, by_rows.to_owners([new[i] for i in at]), strict=True):
            new[i] = whole
        # All of it fits: only now is something written. Leaves that lie in flats stay there
        shared: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
        for entry, x in zip(self._entries, new, strict=True):
            if entry.is_shared:
                shared[entry.param][entry.path] = x
            elif entry.leaf.kind == "follows":
                self._own[entry.path].copy_(x)
            else:
                self._own[entry.path] = x
        # Where all share one dict, the entries of the first param have the values
        first = self._layout.paths[0]
        self._shared = {path: shared[path if self._apart else first] for path in self._shared}

    def _fitting(self, entry: _Entry, leaf: Tensor, value: Any) -> Tensor:
        """This rank's part of a value that is to take a leaf's place; of one at an owner, which
        came by rows, this rank's rows (n,)."""
        like: Any = self._params[entry.param]
        follows, here = entry.leaf.kind == "follows", self._placed.group.rank
        shape = (*like.shape,) if follows else entry.shape_of(leaf)
        expected = f"a tensor of shape {shape}, {leaf.dtype}"
        if not isinstance(value, Tensor):
            got = "none" if value is None else type(value).__name__
            raise unfit(entry.param, entry.name, expected, got)
        if ((*value.shape,), value.dtype) != (shape, leaf.dtype):
            got = f"one of shape {(*value.shape,)}, {value.dtype}"
            raise unfit(entry.param, entry.name, expected, got)
        is_cut = is_dtensor(value)
        if follows and is_cut:
            cut: Any = value
            lies, wanted = (cut.device_mesh, cut.placements), (like.device_mesh, like.placements)
            if lies != wanted:
                raise unfit(entry.param, entry.name, wanted, lies)
        if is_cut and (follows or entry.has_owner):
            return local_of(value).reshape(-1)
        if follows:
            extent = entry.leaf.extent(self._layout, here)
            return extent.part_of(value.contiguous()).reshape(-1)
        if entry.has_owner and entry.leaf.owner != here:
            return leaf
        return leaf.new_empty(leaf.shape).copy_(value.view(leaf.shape))

    def _by_param(self, leaves: list[Any]) -> ByParam:
        found: ByParam = {path: {} for path in self._params}
        for entry, x in zip(self._entries, leaves, strict=True):
            if entry.leaf.kind == "follows":
                param = self._params[entry.param]
                x = like_dtensor(x.view(local_of(param).shape), param)
            elif entry.in_rows and not x.dim():
                x = x.view(1)
            found[entry.param][entry.name] = x
        return found


class _ByRows:
    """The way of whole leaves from their owners to rows on all ranks, and back.

    Attributes:
        shapes: of the tensors that are cut by rows; a number is one row.
    """

    def __init__(self, leaves: Sequence[StateLeaf], placed: Placed):
        self._leaves, self._rank = leaves, placed.group.rank
        self._owners = [leaf.owner for leaf in leaves]
        self.shapes = [leaf.shape or (1,) for leaf in leaves]
        # Along all axes, one after the other, as a DTensor of several `Shard(0)` is cut
        cuts = tuple((axis, 0) for axis in range(len(placed.sizes)))
        specs = [
            PlacedLeaf(shape, leaf.dtype or torch.float32, cuts)
            for leaf, shape in zip(leaves, self.shapes, strict=True)
        ]
        boxes = [spec.boxes(placed.sizes)[self._rank] for spec in specs]
        self._here = [tuple(b - a for a, b in box) for box in boxes]
        layout = placed_layout({f"{n:09}": x for n, x in enumerate(specs)}, placed.sizes)
        self._exchange = Exchange(layout, range(len(specs)), placed.group)

    def from_owners(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """This rank's rows of the owners' leaves."""
        rows = enumerate(zip(leaves, self._owners, self.shapes, strict=True))
        here = {n: x.reshape(shape) for n, (x, owner, shape) in rows if owner == self._rank}
        empty = [x.new_empty(0) for x in leaves]
        pieces = self._exchange.from_owners(here, empty, self._owners)
        return [piece.view(shape) for piece, shape in zip(pieces, self._here, strict=True)]

    def to_owners(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """The whole leaves at their owners, and nothing of them, (0,), elsewhere. `rows`: this
        rank's (n,)."""
        (whole,) = self._exchange.to_owners([rows], self._owners)
        return [
            whole[n].reshape(leaf.shape) if n in whole else rows[n].new_empty(0)
            for n, leaf in enumerate(self._leaves)
        ]


def _entry(path: str, leaf: StateLeaf, params: Sequence[str], known: Collection[str]) -> _Entry:
    """The place of the leaf of the state with this path.

    Args:
        params: the params' paths, by number; `known`: the same, to look them up.
    """
    # What lies in an `Owned` is at an owner, or on the only rank
    before, owned, _ = f"{path}.".partition(".owned.")
    if leaf.kind == "replicated":
        # The longest end that is a param's path
        head = before if owned else path
        ends = [head] + [head[i + 1 :] for i, c in enumerate(head) if c == "."]
        param = next((end for end in ends if end in known), None)
        if param is None:
            return _Entry(params[0], path, path, leaf)
    else:
        param = params[leaf.leaf]
    start, _, end = f".{path}.".partition(f".{param}.")
    return _Entry(param, f"{start}.{end}".strip("."), path, leaf, in_rows=bool(owned))


def unfit(param: str, name: str, expected: object, got: object) -> StructureError:
    """The error of a state dict with another tensor, or none, in a place."""
    return StructureError(
        "a state dict is not of this optimizer's",
        path=f"{name} of {param}",
        expected=expected,
        got=got,
        remedy="load the state of the same transform of the same params",
    )
