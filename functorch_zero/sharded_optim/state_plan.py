"""Which leaves of an optimizer's state follow a param, found by running `init` on placeholders, not
by names or shapes.

A placeholder is a 1-D tensor on the meta device whose length names the leaf; no real tensor is that
long. A state leaf of that length holds one value per element of the param, so it is cut as the
param is.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import optree
import torch
from optree import tree_map
from torch import Tensor

from ..errors import TransformError
from ..layout.extent import Extent
from ..layout.layout import Layout
from ..optim.across import Dim, DimOp, Owned, Question, Tree, WholeLeaf, sum_dtype, without
from ..optim.local import Local
from ..tree import PyTree, select

EVERYONE = -1  # the owner of a leaf that every rank has whole

_LONG = 2**40


@dataclass(frozen=True)
class StateLeaf:
    """What one leaf of an optimizer's state is."""

    kind: Literal["follows", "owned", "replicated"]
    leaf: int = -1  # the param it follows or belongs to, by its number in the layout
    slot: int = -1  # of those that follow one param, which
    owner: int = -1  # the rank that holds it
    shape: tuple[int, ...] = ()  # of an owned leaf, at its owner
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class StatePlan:
    """The leaves of a state in flatten order, and its structure."""

    leaves: tuple[StateLeaf, ...]
    treedef: Any

    def slots(self) -> dict[tuple[int, int], int]:
        """(slot, param) -> position in flatten order, for the leaves that follow a param."""
        return {
            (leaf.slot, leaf.leaf): i
            for i, leaf in enumerate(self.leaves)
            if leaf.kind == "follows"
        }


@dataclass(frozen=True)
class _AtOwner:
    """A leaf of the planned state that only its owner holds."""

    tensor: Tensor  # on the meta device
    leaf: int
    owner: int


class Planner(Local):
    """The `across` that `init` is given while a state is planned. `owned` tells of whole leaves
    afterwards."""

    def __init__(
        self,
        numbers: PyTree[int],
        extents: PyTree[Extent],
        num_ranks: int,
        whole: frozenset[int] = frozenset(),
    ):
        self._numbers, self._num_ranks, self._whole = numbers, num_ranks, whole
        self.extents = extents
        self.owned: list[
            tuple[int, int, float]
        ] = []  # what `init_whole` was asked for: (leaf, owner, cost)

    def select(self, mask: PyTree[bool]) -> Self:
        chosen = super().select(mask)  # with the same list of what is owned
        chosen._numbers = select(self._numbers, mask)
        return chosen

    def placeholders(self, dtypes: Sequence[torch.dtype]) -> Tree:
        """A tree of placeholders; `dtypes` by leaf number."""
        return tree_map(
            lambda n: torch.empty(_LONG + n, dtype=dtypes[n], device="meta"), self._numbers
        )

    def reduce_dims(self, questions: Sequence[Question], op: DimOp) -> tuple[Tree, ...]:
        def reduced(x: Tensor, extent: Extent, dims: tuple[int, ...]) -> Tensor:
            dtype = sum_dtype(x.dtype) if op == "sum" else x.dtype
            return x.new_empty(without(extent.shape, dims), dtype=dtype)

        return tuple(self._per_leaf(reduced, tree, dim) for tree, dim in questions)

    def spread(self, tree: Tree, dim: Dim) -> Tree:
        return tree_map(
            lambda n, x: None if x is None else x.new_empty(_LONG + n), self._numbers, tree
        )

    def init_whole(self, part: WholeLeaf, params: Tree) -> Any:
        extents, numbers = optree.tree_leaves(self.extents), optree.tree_leaves(self._numbers)
        costs = [part.cost(e.shape) for e in extents]
        owners = owners_of(costs, [n not in self._whole for n in numbers], self._num_ranks)
        self.owned += zip(numbers, owners, costs, strict=True)
        leaves, treedef = optree.tree_flatten(params)
        states = []
        for i, (leaf, extent, number, owner) in enumerate(
            zip(leaves, extents, numbers, owners, strict=True)
        ):
            state = part.init(leaf.new_empty(extent.shape))
            if owner != EVERYONE:
                state = tree_map(lambda x, n=number, o=owner: _AtOwner(x, n, o), state)
            states.append(Owned(state, i))
        return treedef.unflatten(states)

    def gather(self, trees: list[Tree], limit: int) -> list[Tree]:
        return [tree_map(lambda x, e: x.new_empty(e.shape), tree, self.extents) for tree in trees]


def plan_state(
    init: Callable[..., Any], layout: Layout, mask: PyTree[bool], num_ranks: int
) -> StatePlan:
    """Plan the state that `init(params, across)` makes for the leaves where `mask` is true."""
    planner = make_planner(layout, mask, num_ranks)
    return plan_of(init(planner.placeholders([leaf.dtype for leaf in layout.leaves]), planner))


def make_planner(layout: Layout, mask: PyTree[bool], num_ranks: int) -> Planner:
    """The planner of the leaves where `mask` is true."""
    numbers = select(layout.treedef.unflatten(range(len(layout.leaves))), mask)
    extents = tree_map(lambda n: Extent(layout.leaves[n].shape, 0, layout.leaves[n].numel), numbers)
    whole = frozenset(n for n, leaf in enumerate(layout.leaves) if leaf.cut.num_pieces == 1)
    return Planner(numbers, extents, num_ranks, whole)


def plan_of(state: Any) -> StatePlan:
    """Read a plan off a state made of placeholders."""
    leaves, treedef = optree.tree_flatten(state)
    seen: dict[int, int] = {}
    plan = []
    for leaf in leaves:
        if isinstance(leaf, _AtOwner):
            shape, dtype = tuple(leaf.tensor.shape), leaf.tensor.dtype
            plan.append(StateLeaf("owned", leaf.leaf, owner=leaf.owner, shape=shape, dtype=dtype))
        elif isinstance(leaf, Tensor) and leaf.dim() == 1 and leaf.numel() >= _LONG:
            number = leaf.numel() - _LONG
            seen[number] = seen.get(number, -1) + 1
            plan.append(StateLeaf("follows", number, slot=seen[number]))
        elif isinstance(leaf, Tensor) and is_placeholder(leaf):
            raise TransformError(
                "a leaf of the optimizer's state holds several values for each element of a param "
                "in one tensor, which can't be cut as the param is. Remedy: keep them in several "
                "tensors, each shaped like the param"
            )
        else:
            plan.append(StateLeaf("replicated"))
    return StatePlan(tuple(plan), treedef)


def is_placeholder(x: Tensor) -> bool:
    """Whether a tensor stands for a leaf."""
    return x.is_meta and x.numel() >= _LONG and max(x.shape) >= _LONG


def placeholder(number: int, dtype: torch.dtype) -> Tensor:
    """One placeholder."""
    return torch.empty(_LONG + number, dtype=dtype, device="meta")


def owners_of(costs: Sequence[float], cuts: Sequence[bool], num_ranks: int) -> list[int]:
    """The owner of each leaf: of those that are cut a rank, of the others everyone."""
    owners = iter(
        assign_owners([cost for cost, cut in zip(costs, cuts, strict=True) if cut], num_ranks)
    )
    return [next(owners) if cut else EVERYONE for cut in cuts]


def assign_owners(costs: Sequence[float], num_ranks: int) -> list[int]:
    """A rank for each cost, the costliest first, each to the rank with the least so far. The same
    on every rank."""
    loads = [(0.0, rank) for rank in range(num_ranks)]
    owners = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, rank = heapq.heappop(loads)
        owners[i] = rank
        heapq.heappush(loads, (load + costs[i], rank))
    return owners
