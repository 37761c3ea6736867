"""`Sharded`: the answers to a transform's questions on this rank's pieces, with a group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from operator import not_
from typing import Any

import optree
import torch
from optree import tree_map
from torch import Tensor

from .._torch_private import storage_id
from ..errors import TransformError
from ..groups.protocol import Group, ReduceOp
from ..layout.extent import Extent, Rows, elements
from ..layout.layout import Layout
from ..optim.across import (
    Across,
    Dim,
    DimOp,
    Factors,
    Fused,
    LeafOp,
    Owned,
    Pointwise,
    Question,
    Tree,
    WholeLeaf,
    check_limit,
    norms_of,
    note_leaves,
    reduce_leaf,
    run_batch,
    state_elsewhere,
    sums_of,
    total_of,
    widest_dtype,
)
from ..optim.arithmetic import on_numbers
from ..tree import PyTree, copied_if_in, merge, same_structure, select, storages
from .dim_reductions import reduce_piece, spread_over_piece
from .ferry import Brought, in_turn
from .pointwise import CurrentUpdate, PointwiseOnFlats, device_of
from .state_plan import EVERYONE, HOLDERS, owners_of
from .whole_leaf import Exchange, batches


class Sharded(Across):
    """Answers on pieces.

    Each tree given or returned holds this rank's pieces of the trained leaves, None elsewhere. A
    leaf that is not cut (level 0) is here whole, and the same on every rank: questions about it are
    answered without communication.

    Args:
        layout: how the params are cut over the group.
        group: the ranks.
        mask: the leaves that the trees have; None: all trained ones.

    Attributes:
        current: the update that runs.
        on_flats: pointwise updates, and kernels.
    """

    def __init__(
        self,
        layout: Layout,
        group: Group,
        *,
        mask: PyTree[bool] | None = None,
        current: CurrentUpdate | None = None,
    ):
        self._layout, self._group = layout, group
        self.current = CurrentUpdate() if current is None else current
        mask = layout.trainable if mask is None else mask
        self.extents = select(layout.extents(group.rank), mask)  # per leaf; None where masked
        # Per leaf, whether its pieces lie on several ranks; not so at level 0, or on one rank
        self._is_cut = select(tree_map(lambda cut: cut.num_pieces > 1, layout.cuts), mask)
        # Per leaf, whether this rank's elements count in sums: no rank before it holds them, too
        counts = [layout.buckets[b].counts(group.rank) for b, _ in layout.in_buckets]
        self._counts = select(layout.treedef.unflatten(counts), mask)
        self._all_count = all(counts)
        self.on_flats = PointwiseOnFlats(layout, mask, group.rank, self.current)
        # Of the leaves that the trees have, in tree order: their numbers in the layout
        self._numbers = self.on_flats.numbers
        own = [layout.in_buckets[number] for number in self._numbers]
        self._has_tables = any(layout.buckets[b].cut.by_rows for b, _ in own)
        self._exchange = Exchange(layout, self._numbers, group)
        # What `select` made, by the numbers of the chosen leaves: each plans and remembers flats
        self._narrowed: dict[tuple[int, ...], Sharded] = {}

    def select(self, mask: PyTree[bool]) -> Sharded:
        flags = optree.tree_leaves(mask)
        chosen = tuple(number for number, keep in zip(self._numbers, flags, strict=True) if keep)
        if chosen not in self._narrowed:
            # By all leaves of the layout; `mask` has the leaves of this one's trees only
            of_all = [number in chosen for number in range(len(self._layout.leaves))]
            self._narrowed[chosen] = Sharded(
                self._layout,
                self._group,
                mask=self._layout.treedef.unflatten(of_all),
                current=self.current,
            )
        return self._narrowed[chosen]

    # Questions: one all-reduce for all leaves of all trees, or two, where some are integers

    def reduce(self, trees: Sequence[Tree], op: LeafOp) -> tuple[Tree, ...]:
        cuts: list[bool] = []  # per leaf of all trees, in order
        for tree in trees:
            cuts += self._cut_leaves(tree)
        if op != "norm":
            shares = tree_map(lambda x: reduce_leaf(x, op), list(trees))  # of this rank, 0-d
            return tuple(self._reduce(self._counted(shares, op), op, cuts))
        # Squares add up over ranks, norms don't
        leaves, treedef = optree.tree_flatten(list(trees))
        squares = treedef.unflatten(on_numbers(torch.square, norms_of(leaves)))
        shares = self._counted(squares, "sum")
        return tuple(on_numbers(torch.sqrt, self._reduce(shares, "sum", cuts)))

    def reduce_dims(self, questions: Sequence[Question], op: DimOp) -> tuple[Tree, ...]:
        def reduce_leaf_dims(x: Tensor, extent: Extent, dims: tuple[int, ...]) -> Tensor:
            return reduce_piece(x, extent, dims, op)

        # A leaf that is not asked has no share, and so must have no flag: None is no leaf
        def cut_if_asked(cut: bool, share: Tensor | None) -> bool | None:
            return None if share is None else cut

        shares: list[Tree] = []  # of this rank; None where not asked
        cuts: list[bool] = []
        for tree, dim in questions:
            share = self._per_leaf(reduce_leaf_dims, tree, dim)
            shares.append(share)
            cuts += optree.tree_leaves(tree_map(cut_if_asked, self._is_cut, share))
        return tuple(self._reduce(self._counted(shares, op), op, cuts))

    def totals(self, products: Sequence[Factors]) -> tuple[Tensor, ...]:
        shares: list[Tensor] = []  # per product, the sum over its cut leaves here, 0-d
        some_cut: list[bool] = []  # per product, whether any leaf is cut
        whole_sums: list[list[Tensor]] = []  # per product, of each leaf that is not cut, 0-d
        for product in products:
            sums, cuts = sums_of(product), self._cut_leaves(product[0])
            treedef = optree.tree_structure(product[0])
            sums = optree.tree_leaves(self._counted([treedef.unflatten(sums)], "sum"))
            # Cut leaves add up before they travel: one number per product
            shares.append(total_of(list(compress(sums, cuts))))
            some_cut.append(any(cuts))
            # The others are the same on every rank; a sum over ranks would count them N times
            whole_sums.append(list(compress(sums, map(not_, cuts))))

        totals = []
        reduced = self._reduce(shares, "sum", some_cut)
        for total, some, whole in zip(reduced, some_cut, whole_sums, strict=True):
            # Where nothing is cut, `total` is an empty sum, whose dtype must not count
            totals.append(total_of([total, *whole] if some else whole))
        return tuple(totals)

    def spread(self, tree: Tree, dim: Dim) -> Tree:
        return self._per_leaf(spread_over_piece, tree, dim)

    def _counted(self, shares: Sequence[Tree], op: ReduceOp) -> Sequence[Tree]:
        """This rank's shares for a collective, 0 where another rank brings them, in the dtype that
        all bring. A maximum may be brought twice."""
        if self._all_count or op == "max":
            return shares

        def counted(counts: bool, cut: bool, x: Tensor | None) -> Tensor | None:
            return x if x is None or counts or not cut else torch.zeros_like(x)

        found = []
        for tree in shares:
            same_structure(self._counts, tree, what="the tree of a question", none_is_leaf=True)
            found.append(tree_map(counted, self._counts, self._is_cut, tree))
        return found

    def _cut_leaves(self, tree: Tree) -> list[bool]:
        """For each leaf of a tree, whether it is cut.

        Raises:
            TransformError: only some leaves are, and the tree is not shaped like params.
        """
        flags: list[bool]
        flags, params_treedef = optree.tree_flatten(self._is_cut)
        treedef = optree.tree_structure(tree)
        # All leaves alike: a tree of any structure will do
        if len(set(flags)) <= 1:
            return [any(flags)] * treedef.num_leaves
        if treedef != params_treedef:
            raise TransformError(
                "some leaves are replicated (level 0) and others are cut, so a question must be "
                "asked of trees with the structure of params, and this one has another. Remedy: "
                "ask tree by tree, or train none at level 0"
            )
        return flags

    def _reduce(self, trees: Sequence[Tree], op: ReduceOp, cuts: Sequence[bool]) -> list[Tree]:
        """Reduce the leaves that are cut, of any shape and dtype. See `_all_reduce`.

        Args:
            trees: this rank's shares.
            op: of the all-reduce.
            cuts: for each leaf of all trees, whether it is cut; the others are answers already.
        """
        leaves, treedef = optree.tree_flatten(list(trees))
        # The same positions on every rank, by the layout
        at = [i for i, cut in zip(range(len(leaves)), cuts, strict=True) if cut]
        if at and self._group.size > 1:
            reduced = self._all_reduce([leaves[i] for i in at], op)
            for i, answer in zip(at, reduced, strict=True):
                leaves[i] = answer
        return list(treedef.unflatten(leaves))

    def _all_reduce(self, values: list[Tensor], op: ReduceOp) -> list[Tensor]:
        """Reduce values of any shape and dtype, each to its own. One all-reduce, or two, where some
        are integers and others not."""
        # Counts lie on the CPU; one message takes them along with what is on the device
        elsewhere = (x.device for x in values if x.device.type != "cpu")
        device = next(elsewhere, values[0].device)
        # Floating point would round integers above 2**24, so these travel apart
        positions: tuple[list[int], list[int]] = [], []
        for i, x in enumerate(values):
            is_integer = not (x.is_floating_point() or x.is_complex())
            positions[is_integer].append(i)
        reduced = list(values)
        for at in filter(None, positions):
            own = [values[i] for i in at]
            dtype = widest_dtype(own)
            if dtype == torch.bool:  # of which groups take neither sums nor maxima
                dtype = torch.int64
            # (k,), the values one after the other: a collective costs more than its few bytes
            packed = torch.cat([x.reshape(-1).to(device, dtype) for x in own])
            self._group.all_reduce(packed, op).wait()
            parts = packed.split(list(map(Tensor.numel, own)))
            for i, x, part in zip(at, own, parts, strict=True):
                reduced[i] = part.view(x.shape).to(x.dtype)
        return reduced

    def dense(self, updates: Tree) -> Tree:
        def one(x: Any) -> Any:
            return x.dense() if isinstance(x, Rows) else x

        return tree_map(one, updates) if self._has_tables else updates

    def keep(self, state: Any, *passing: Tree) -> Any:
        return copied_if_in(state, passing)

    def beside(self, state: Any, params: Tree) -> Any:
        return self.current.ferry.beside(state, device_of(params))

    # Pointwise: flat by flat

    def run_pointwise(
        self, part: Pointwise, updates: Tree, state: Any, params: Tree
    ) -> tuple[Tree, Any]:
        if part.keeps_zeros and self._has_tables:
            return self._run_on_rows(part, updates, state, params)
        return self.on_flats.update(part, self.dense(updates), state, params)

    def _run_on_rows(
        self, part: Pointwise, updates: Tree, state: Any, params: Tree
    ) -> tuple[Tree, Any]:
        """Run a pointwise update that keeps zeros: on the values of rows, and on other leaves."""
        in_rows = tree_map(lambda x: isinstance(x, Rows), updates)
        rows = select(updates, in_rows)
        # It has no state of their elements: the one after is that of the others
        values, _ = part.update(tree_map(elements, rows), state, select(params, in_rows))
        rows = tree_map(lambda x, made: x.map(lambda _: made), rows, values)
        rest = tree_map(not_, in_rows)
        across = self.select(rest).on_flats
        made, state = across.update(part, select(updates, rest), state, select(params, rest))
        return merge(made, merge(rows, updates)), state

    def run_fused(
        self, fused: Fused, updates: Tree, state: Any, params: Tree
    ) -> tuple[Tree | None, Any]:
        return self.on_flats.update_fused(fused, self.dense(updates), state, params)

    # Whole leaves: one all-to-all in, one out

    def _owners(self, part: WholeLeaf) -> list[int]:
        """The owner of each leaf of the tree: a rank, EVERYONE or HOLDERS."""
        return owners_of(part, self._layout, self._numbers, self._group.size)

    def _init_leaves(self, part: WholeLeaf, leaves: list[Tensor]) -> Sequence[Any]:
        extents = optree.tree_leaves(self.extents)
        owners = self._owners(part)
        (whole,) = self._exchange.to_owners([leaves], owners)  # by position, here only
        states = []
        for i, (leaf, owner, extent) in enumerate(zip(leaves, owners, extents, strict=True)):
            if owner in (self._group.rank, EVERYONE, HOLDERS):
                states.append(part.init(whole[i]))
            else:
                # Another rank owns it: the state has the same structure, with empty tensors
                states.append(state_elsewhere(part, leaf, extent))
        return states

    def run_whole(
        self, part: WholeLeaf, updates: Tree, state: Any, params: Tree
    ) -> tuple[Tree, Any]:
        """Each rank updates the leaves that it owns or has whole, and the rows that it owns. The
        others' `Owned` states, empty here, are passed on."""
        leaves, treedef = optree.tree_flatten(updates if part.by_rows else self.dense(updates))
        states: list[Owned] = treedef.flatten_up_to(state)
        owners = self._owners(part)
        # A param travels only where the update reads it
        trees = [leaves, optree.tree_leaves(params)] if part.wants_param else [leaves]
        whole_updates, *whole_params = self._exchange.to_owners(trees, owners)
        writable = self._writable(part, updates, state, params)
        # By position, the whole updates made here: of leaves owned, or not cut; or of rows
        results: dict[int, Any] = {}
        ferry, device = self.current.ferry, device_of(params)

        def begin(batch: Sequence[int]) -> list[list[Brought]]:
            own = [optree.tree_leaves(states[i].state) for i in batch]
            return [[ferry.bring(x, device) for x in tensors] for tensors in own]

        def may_write(i: int, own: Sequence[Brought]) -> bool:
            tensors = [
                whole_updates[i],
                *(x.tensor for x in own if x.tensor.dim() and not x.is_copy),
            ]
            return storages(tensors) <= writable

        def run(batch: Sequence[int], arrived: Sequence[Sequence[Brought]]) -> None:
            olds = []
            for i, own in zip(batch, arrived, strict=True):
                structure = optree.tree_structure(states[i].state)
                olds.append(structure.unflatten([x.tensor for x in own]))
            own_part = part
            # Only parts by rows have `in_place`, and these run leaf by leaf
            if part.in_place and may_write(batch[0], arrived[0]):
                own_part = replace(part, update=part.in_place)
            given = [whole_updates[i] for i in batch]
            own_params = [whole_params[0][i] for i in batch] if part.wants_param else []
            try:
                made = run_batch(own_part, given, olds, own_params)
            except Exception as error:
                note_leaves(error, [self._layout.paths[self._numbers[i]] for i in batch])
                raise
            for i, own, new in zip(batch, arrived, made, strict=True):
                tensors, structure = optree.tree_flatten(new.state)
                update, *tensors = _apart_from_others(own, new.update, tensors)
                # Receivers expect the dtype of the pieces that they have sent
                results[i] = update if part.by_rows else update.to(leaves[i].dtype)
                pairs = zip(own, tensors, strict=True)
                state = structure.unflatten([ferry.take_back(x, y) for x, y in pairs])
                states[i] = Owned(state, states[i].leaf)

        in_turn(batches(part, whole_updates), begin, run, ferry.ahead)
        pieces = self._exchange.from_owners(results, leaves, owners)
        return treedef.unflatten(pieces), treedef.unflatten(states)

    def _writable(self, part: WholeLeaf, *trees: Tree) -> set[int]:
        """The storages that `in_place` may write over: donated ones, of one tensor each."""
        if part.in_place is None or self.current.donate is not True:
            return set()
        counts = Counter(storage_id(x) for x in optree.tree_leaves(trees) if isinstance(x, Tensor))
        return {storage for storage, count in counts.items() if count == 1}

    # The whole tree: gathered on every rank

    def gather(self, trees: list[Tree], limit: int) -> list[Tree]:
        """Everyone owns every leaf. S (N-1)/N bytes of each tree of S arrive at each of N ranks."""
        extents, treedef = optree.tree_flatten(self.extents)
        leaves = list(map(optree.tree_leaves, trees))
        for tree in leaves:
            check_limit(extents, tree, limit)
        gathered = []
        for whole in self._exchange.to_owners(leaves, [EVERYONE] * len(extents)):
            # Leaves arrive dtype by dtype
            in_order = [whole[position] for position in range(len(extents))]
            gathered.append(treedef.unflatten(in_order))
        return gathered

    def cut(self, tree: Tree) -> Tree:
        def own_piece(leaf: Tensor, extent: Extent) -> Tensor:
            # A view would keep the whole leaf alive
            return extent.part_of(leaf).reshape(-1).clone()

        return tree_map(own_piece, tree, self.extents)


def _apart_from_others(
    brought: Sequence[Brought], update: Tensor, state: Sequence[Tensor]
) -> list[Tensor]:
    """An update, and the tensors of a next state: copies where they lie in brought tensors of other
    slots. These are about to be written over, one after the other."""
    taken = storages([x.tensor for x in brought if x.place is not None])
    own = [None, *(x.tensor for x in brought)]
    return [
        y.clone() if isinstance(y, Tensor) and y is not x and storage_id(y) in taken else y
        for x, y in zip(own, [update, *state], strict=True)
    ]
