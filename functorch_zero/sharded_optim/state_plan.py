"""The plan of an optimizer's state: which of its leaves follow a param. It is found by running
`init` on placeholders, not by names or shapes.

A placeholder is a 1-D tensor on the meta device whose length names the leaf; no real tensor is that
long. A state leaf of that length holds one value per element of the param, so it is cut as the
param is.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Literal, NamedTuple, Self

import optree
import torch
from optree import tree_map
from torch import Tensor

from ..errors import TransformError
from ..layout.extent import Extent
from ..layout.layout import Layout
from ..optim.across import Dim, Shape, Tree, WholeLeaf
from ..optim.shapes_only import ShapesOnly
from ..tree import PyTree, paths, select

EVERYONE = -1  # the owner of a leaf that every rank has whole
HOLDERS = -2  # the owners of a leaf of whose rows each rank owns those that it holds

_LONG = 2**40  # plus the number of its leaf, a placeholder's length; 4 TiB in float32


@dataclass(frozen=True)
class StateLeaf:
    """One leaf of an optimizer's state. Attributes that its kind lacks have their defaults.

    Attributes:
        kind: "follows": one value per element of a param, and cut as the param is. "rows": of a
            transform of rows, and cut as the param's rows are. "owned": of a whole-leaf transform,
            and on one rank. "replicated": the same on all ranks.
        leaf: the number in the layout of the param that it follows or belongs to.
        slot: its number among the state's leaves that follow this param, from 0.
        owner: the rank that holds it.
        shape, dtype: of an owned leaf, at its owner; of one of rows, as a whole.
    """

    kind: Literal["follows", "rows", "owned", "replicated"]
    leaf: int = -1
    slot: int = -1
    owner: int = -1
    shape: Shape = ()
    dtype: torch.dtype | None = None

    @property
    def is_cut(self) -> bool:
        """Whether it is cut along with its param: `extent` says how."""
        return self.kind in ("follows", "rows")

    def extent(self, layout: Layout, piece_number: int) -> Extent:
        """The part of it, if it is cut, beside the param's piece of this number."""
        if self.kind == "follows":
            return self._extent_of_param(layout, piece_number)
        first, last = self._rows(layout, piece_number)
        row = prod(self.shape[1:])  # elements
        return Extent(self.shape, first * row, last * row)

    def shape_here(self, layout: Layout, piece_number: int) -> Shape:
        """The shape of that part: (n,), or some rows."""
        if self.kind == "follows":
            return (self._extent_of_param(layout, piece_number).num_here,)
        first, last = self._rows(layout, piece_number)
        return last - first, *self.shape[1:]

    def _rows(self, layout: Layout, piece_number: int) -> tuple[int, int]:
        extent = self._extent_of_param(layout, piece_number)
        row = prod(extent.shape[1:])
        return extent.start // row, extent.stop // row

    def _extent_of_param(self, layout: Layout, piece_number: int) -> Extent:
        b, k = layout.in_buckets[self.leaf]
        return layout.buckets[b].extent(k, piece_number)


@dataclass(frozen=True)
class StatePlan:
    """The leaves of a state in flatten order, and its structure."""

    leaves: tuple[StateLeaf, ...]
    treedef: Any

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Of the leaves, dotted."""
        return tuple(paths(self.treedef.unflatten(range(len(self.leaves)))))

    @cached_property  # a step asks it for each bucket
    def slots(self) -> dict[tuple[int, int], int]:
        """(slot, param) -> position in flatten order, for the leaves that follow a param."""
        positions = {}
        for position, leaf in enumerate(self.leaves):
            if leaf.kind == "follows":
                positions[leaf.slot, leaf.leaf] = position
        return positions

    @cached_property
    def shared(self) -> list[int]:
        """The positions of all other leaves."""
        return [i for i, leaf in enumerate(self.leaves) if leaf.kind != "follows"]


@dataclass(frozen=True)
class _AtOwner:
    """A leaf of the planned state that only its owner holds, or whose rows HOLDERS do."""

    tensor: Tensor  # of the shape and dtype of the whole, on the meta device
    leaf: int  # the param that it belongs to, by its number in the layout
    owner: int

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype


class OwnedParam(NamedTuple):
    """A param that a whole-leaf transform updates."""

    leaf: int  # its number in the layout
    owner: int  # a rank or EVERYONE
    cost: float  # of its update, as the transform says


class Planner(ShapesOnly):
    """The `across` that `init` is given while a state is planned.

    Args:
        layout: how params are cut.
        mask: the leaves that trees have.
        num_ranks: over which the owners of whole leaves are chosen.

    Attributes:
        owned: the params that `init_whole` was asked for.
    """

    def __init__(self, layout: Layout, mask: PyTree[bool], num_ranks: int):
        self._layout, self._num_ranks = layout, num_ranks
        # A tree of leaves' numbers in the layout, and their extents, which are whole
        everything = layout.treedef.unflatten(range(len(layout.leaves)))
        self._numbers: PyTree[int] = select(everything, mask)
        self.extents = tree_map(self._whole, self._numbers)
        self.owned: list[OwnedParam] = []

    def _whole(self, number: int) -> Extent:
        leaf = self._layout.leaves[number]
        return Extent(leaf.shape, 0, leaf.numel)

    def select(self, mask: PyTree[bool]) -> Self:
        chosen = super().select(mask)  # a copy, with the same list of owned params
        # `super` has narrowed the extents
        chosen._numbers = select(self._numbers, mask)
        return chosen

    def placeholders(self) -> Tree:
        """A tree of placeholders."""
        leaves = self._layout.leaves
        return tree_map(lambda n: placeholder(n, leaves[n].dtype), self._numbers)

    def spread(self, tree: Tree, dim: Dim) -> Tree:
        def beside_param(number: int, answer: Tensor | None) -> Tensor | None:
            # One value per element of the param: a placeholder again, in the answer's dtype
            return None if answer is None else answer.new_empty(_LONG + number)

        return tree_map(beside_param, self._numbers, tree)

    def _init_leaves(self, part: WholeLeaf, leaves: list[Tensor]) -> Sequence[Any]:
        extents = optree.tree_leaves(self.extents)
        numbers = optree.tree_leaves(self._numbers)
        owners = owners_of(part, self._layout, numbers, self._num_ranks)
        costs = [part.cost(extent.shape) for extent in extents]
        self.owned += map(OwnedParam, numbers, owners, costs)
        states = []
        for leaf, extent, number, owner in zip(leaves, extents, numbers, owners, strict=True):
            # Run on a whole leaf of true shape, without values, as its owner will run it
            state = part.init(leaf.new_empty(extent.shape))
            # The plan numbers leaves in the layout, and `Owned` in this tree, which may be a part
            states.append(_at_owner(state, number, owner))
        return states


def _at_owner(state: Any, number: int, owner: int) -> Any:
    """One param's state, whose leaves say which rank holds them."""
    if owner == EVERYONE:
        return state

    def at_owner(tensor: Tensor) -> Any:
        # A count of a transform of rows is the same on all ranks
        return tensor if owner == HOLDERS and not tensor.dim() else _AtOwner(tensor, number, owner)

    return tree_map(at_owner, state)


def state_like(plan: StatePlan, layout: Layout, piece_number: int) -> Any:
    """The structure of a state on the rank that holds pieces of this number, for
    `check_opt_state`. On meta, in the shapes that they have there, the leaves that follow a param;
    others may have any."""
    outline: list[Any] = []
    for leaf in plan.leaves:
        if leaf.is_cut:
            # Expanded, so that it has no storage of its size, which a plan would count
            point = torch.empty((), device="meta")
            outline.append(point.expand(leaf.shape_here(layout, piece_number)))
        else:
            outline.append(leaf.kind)
    return plan.treedef.unflatten(outline)


def plan_state(
    init: Callable[..., Any], layout: Layout, mask: PyTree[bool], num_ranks: int
) -> StatePlan:
    """Plan the state that `init(params, across)` makes for the leaves where `mask` is true."""
    return plan_of(state_on_meta(init, layout, mask, num_ranks))


def state_on_meta(
    init: Callable[..., Any], layout: Layout, mask: PyTree[bool], num_ranks: int
) -> Any:
    """That state, made of placeholders."""
    planner = Planner(layout, mask, num_ranks)
    try:
        # On the meta device: an author's `zeros_like` and arithmetic give shapes and dtypes
        return init(planner.placeholders(), planner)
    except RuntimeError as error:
        # A placeholder has no memory, and a tensor of its length elsewhere has no room
        if "allocate" not in str(error):
            raise
        raise TransformError(
            "the optimizer's init makes a state leaf of a param's shape on a device of its own "
            f"choice: expected the param's device, got {error}. Remedy: torch.zeros_like(param), "
            "or torch.zeros(param.shape, dtype=param.dtype, device=param.device)"
        ) from error


def plan_of(state: Any) -> StatePlan:
    """Read a plan off a state made of placeholders."""
    leaves, treedef = optree.tree_flatten(state)
    num_slots: Counter[int] = Counter()  # by param, of the leaves so far that follow it
    plan = []
    for leaf in leaves:
        # Made by `init_whole`: only its owner has it
        if isinstance(leaf, _AtOwner):
            shape, dtype = tuple(leaf.tensor.shape), leaf.tensor.dtype
            kind: Any = "rows" if leaf.owner == HOLDERS else "owned"
            plan.append(StateLeaf(kind, leaf.leaf, owner=leaf.owner, shape=shape, dtype=dtype))
        elif isinstance(leaf, Tensor) and leaf.dim() == 1 and leaf.numel() >= _LONG:
            # The length names the param
            number = leaf.numel() - _LONG
            plan.append(StateLeaf("follows", number, slot=num_slots[number]))
            num_slots[number] += 1
        # Grown by a dim, (2, length) say, or joined
        elif isinstance(leaf, Tensor) and is_placeholder(leaf):
            raise TransformError(
                "a leaf of the optimizer's state holds several values for each element of a param "
                "in one tensor, which can't be cut as the param is. Remedy: keep them in several "
                "tensors, each shaped like the param"
            )
        else:
            # Counts, and statistics over dims: every rank has them whole
            plan.append(StateLeaf("replicated"))
    return StatePlan(tuple(plan), treedef)


def is_placeholder(x: Tensor) -> bool:
    """Whether a tensor stands for a leaf."""
    # A large whole leaf may have as many elements, and has no dim of that length
    return x.is_meta and x.numel() >= _LONG and max(x.shape) >= _LONG


def placeholder(number: int, dtype: torch.dtype) -> Tensor:
    """The tensor that stands for the param with this number."""
    return torch.empty(_LONG + number, dtype=dtype, device="meta")


def owners_of(part: WholeLeaf, layout: Layout, numbers: Sequence[int], num_ranks: int) -> list[int]:
    """The owner of each leaf with these numbers: a rank, EVERYONE or HOLDERS. By the layout alone,
    so that all ranks, and a plan, find the same owners without a word."""
    owners, to_assign = [EVERYONE] * len(numbers), []
    for i, number in enumerate(numbers):
        b, k = layout.in_buckets[number]
        if part.by_rows and layout.buckets[b].has_whole_rows(k):
            owners[i] = HOLDERS
        elif layout.leaves[number].cut.num_pieces > 1:
            to_assign.append(i)
    costs = [part.cost(layout.leaves[numbers[i]].shape) for i in to_assign]
    for i, owner in zip(to_assign, assign_owners(costs, num_ranks), strict=True):
        owners[i] = owner
    return owners


def assign_owners(costs: Sequence[float], num_ranks: int) -> list[int]:
    """A rank for each cost, the same on every rank: the costliest first, each goes to the rank with
    the least so far.

    By Graham (1969), the largest load is then at most 4/3 of the least possible.
    """
    loads = [(0.0, rank) for rank in range(num_ranks)]  # a heap: the least load, then rank, first
    owners = [0] * len(costs)
    # Equal costs in tree order, so that all ranks sort alike
    costliest_first = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    for i in costliest_first:
        load, rank = heapq.heappop(loads)
        owners[i] = rank
        heapq.heappush(loads, (load + costs[i], rank))
    return owners
