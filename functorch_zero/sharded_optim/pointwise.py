"""Pointwise updates on pieces, flat by flat: fewer and larger operators than leaf by leaf.

Note [Writing over donated storage]
-----------------------------------
Results are written over the updates and the state that were donated. But an update is a pure
function: it may return a tensor that it was given, or one tensor twice. So before anything is
overwritten:

- only flats that the library has made are written to: see `Homes`; leaves from elsewhere are
  copied, and no update is written over where one is from elsewhere;
- `_in_storages_of_their_own` copies results that lie in what was given, or in another result,
  where no result is written over anything: a later update will write to each;
- `_write` copies results that lie in what was given (a state that is the old updates, say).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import optree
import torch
from torch import Tensor

from .._torch_private import storage_id
from ..layout.flat_buffers import cut, pack_pieces
from ..layout.home import Home, HomedLeaves, Homes, Positions
from ..layout.layout import Bucket, Layout
from ..layout.placed import PlacedBucket
from ..optim.across import Across, Fused, Pointwise, Tree
from ..optim.arithmetic import IN_CACHE, ON_A_GPU
from ..tree import PyTree, copied_if_in, has_values, is_flagged, same_structure, select
from .ferry import Brought, Ferry, in_turn
from .state_plan import StatePlan, placeholder, plan_of, plan_state

T = TypeVar("T")
_kind = attrgetter("dtype", "device")

# What an update may write over: its updates and its state, neither, or the state alone, in flats
# that are known; or all leaves of the state, which nobody else has. A kernel adds to the params as
# well, where it is asked
Donate = bool | Literal["state", "leaves"]


@dataclass(frozen=True)
class FlatGroup:
    """Leaves that a pointwise update sees as one flat: all of a bucket, or a single leaf where
    others of its bucket are masked out."""

    leaves: tuple[int, ...]  # their numbers in the layout
    positions: tuple[int, ...]  # of the leaves in the masked trees, which lack the other leaves
    bucket: Bucket | None  # None: a single leaf, whose piece is the flat
    piece_number: int  # of this rank's piece in a bucket

    def numel(self, layout: Layout) -> int:
        """The most elements that its flat has on any rank."""
        if self.bucket is not None:
            return self.bucket.piece
        return layout.leaves[self.leaves[0]].numel

    def pack(self, pieces: Sequence[Tensor]) -> Tensor:
        """The flat (piece,) of these pieces: a new one, that they are copied to."""
        # A single leaf's piece is its flat, wherever it lies. An expanded or negative view has no
        # memory of its own for each element, to which results could be written
        if self.bucket is None:
            (piece,) = pieces
            if _lie_plainly(pieces):
                return piece
            return piece.resolve_conj().resolve_neg().contiguous()
        return pack_pieces(pieces, self.bucket, self.piece_number)

    def cut(self, flat: Tensor) -> list[Tensor]:
        """The inverse of `pack`: the pieces, as views of the flat."""
        if self.bucket is None:
            return [flat]
        return cut(flat, self.bucket, self.piece_number)


class CurrentUpdate:
    """The update that runs: the flats that it was given, and what of them it may write over; those
    that it makes take their places. A flat of updates, or of a state, is nothing else.

    Args:
        ferry: brings the state group by group, and takes it back; None: it lies beside the params.
    """

    def __init__(self, ferry: Ferry | None = None):
        self.ferry = Ferry() if ferry is None else ferry
        self.begin()

    def begin(
        self,
        updates: Sequence[Home | None] = (),
        params: Sequence[Home | None] = (),
        state: Iterable[Home] = (),
        *,
        donate: Donate = False,
    ) -> None:
        """An update begins, of trees whose leaves are cut from these."""
        self.updates, self.params, self.state = Homes(updates), Homes(params), Homes(state)
        self.donate = donate


class PointwiseOnFlats:
    """Pointwise updates of the leaves where `mask` is true, on this rank's pieces.

    A state has two structures: `full`, leaf by leaf as `init` makes it, and that of a `_Batch` of
    flats. A leaf of a batch's, a `_StateFlat` or a `_SharedLeaf`, knows which leaves of the full
    state it is.

    Args:
        layout: how the params are cut; `piece_number`: of this rank's pieces.
        current: the update that runs.
    """

    def __init__(
        self, layout: Layout, mask: PyTree[bool], piece_number: int, current: CurrentUpdate
    ):
        self._layout, self._mask, self._current = layout, mask, current
        everything = layout.treedef.unflatten(range(len(layout.leaves)))
        # Of the leaves where the mask is true, in tree order
        self.numbers: list[int]
        self.numbers, self._treedef = optree.tree_flatten(select(everything, mask))
        self._groups = _group_leaves(layout, self.numbers, piece_number)
        # Whether the flats are the trees' leaves, one by one
        singles = [group.positions for group in self._groups if group.bucket is None]
        self._are_leaves = singles == [(n,) for n in range(len(self.numbers))]
        # None: the transform doesn't treat all leaves alike. Weak: it goes with the transform.
        self._regroupings: WeakKeyDictionary[Pointwise, _Regrouping | None] = WeakKeyDictionary()

    def update(self, part: Pointwise, updates: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
        """Run a pointwise update: `(updates, state)`. Donated storage is written over."""
        regrouping = self._regrouping(part)
        # Leaves that are not treated alike stay apart. Without leaves there is no group, but the
        # state's count of steps must go on.
        # A flat has one dtype, and transforms may choose it leaf by leaf
        if (
            regrouping is None
            or not self._groups
            or not self._share_dtypes(regrouping, updates, state)
        ):
            given = self._current.ferry.beside(state, device_of(params))
            new, after = part.update(updates, given, params)
            return new, copied_if_in(after, new, updates, params)

        # Replaced group by group, so that old updates are freed on the way
        new_updates, treedef = optree.tree_flatten(updates)
        param_leaves = optree.tree_leaves(params)
        # In flatten order of the full state; a leaf that follows a param is this rank's piece (n,)
        current, device = self._current, param_leaves[0].device
        ferry, old_state = current.ferry, optree.tree_leaves(state)
        after = HomedLeaves(regrouping.full, [*old_state], {})
        may_write_updates = self._may_write(new_updates)
        # The ids of flats, and of their leaves, that the state alone has
        own_state = current.state.ids if current.donate else set()
        if current.donate == "leaves":
            own_state = own_state.union(map(id, old_state))
        # The operands beside the updates: flats (piece,), and counts that groups share
        before = HomedLeaves(regrouping.full, old_state, current.state.among(old_state))
        tensors = self._tensors_of(regrouping, before, device)

        def begin(batch: _Batch) -> list[Brought]:
            return [ferry.bring(x, device) for x in batch.of(tensors)]

        def run(batch: _Batch, arrived: Sequence[Brought]) -> None:
            # The updates of each group, then the leaves of their state; only params are just read
            operands, params_here = [], []
            for group in batch.groups:
                given = self._flat_of(group, new_updates)
                operands.append(_Operand(given, is_flat=True, donated=may_write_updates))
                params_here.append(self._flat_of(group, param_leaves))
            for leaf, here in zip(batch.leaves, arrived, strict=True):
                # A count is never written over: each batch reads the same old one
                is_own = id(here.stored) in own_state
                may_write = is_own if here.place is None else ferry.writes_to(here)
                is_flat = isinstance(leaf, _StateFlat)
                operands.append(_Operand(here.tensor, is_flat, is_flat and may_write))

            results = iter(_run_in_chunks(part, batch.treedef, operands, params_here))
            for group, operand in zip(batch.groups, operands, strict=False):
                new_flat = next(results)
                # The flat itself: the updates' leaves hold these values already
                if new_flat is not operand.tensor:
                    made = group.cut(new_flat)
                    current.updates.replace(_at(group.positions, new_updates), new_flat, made)
                    _put(made, group.positions, new_updates)
            for leaf, here, new in zip(batch.leaves, arrived, results, strict=True):
                # All batches make the same of a count, so any one's is the answer
                new = ferry.take_back(here, new) if isinstance(leaf, _StateFlat) else new
                if new is not here.stored:
                    _put_next(new, leaf, after)

        # One group at a time, where its state has a place
        room = 0 if ferry.places else _room(device)
        in_turn(self._batches(part, regrouping, room), begin, run, ferry.ahead)
        current.state.note(after.homes.values())
        return treedef.unflatten(new_updates), after.tree

    def _share_dtypes(self, regrouping: _Regrouping, updates: Tree, state: Any) -> bool:
        """Whether the leaves that are to lie in one flat have one dtype, flat by flat."""
        update_leaves, state_leaves = optree.tree_leaves(updates), optree.tree_leaves(state)
        flats = [_at(group.positions, update_leaves) for group in self._groups]
        flats += [_at(leaf.positions, state_leaves) for leaf in regrouping.flats]
        return all(len({leaf.dtype for leaf in flat}) == 1 for flat in flats)

    def _may_write(self, updates: Sequence[Tensor]) -> bool:
        """Whether all updates lie in flats that are known, each in another one. Leaves of an author
        may lie in another group's flat, and so may a leaf that was returned twice."""
        if self._current.donate is not True:
            return False
        known = self._current.updates
        homes = [known.home_of(_at(group.positions, updates)) for group in self._groups]
        return None not in homes and len({id(home.flat) for home in homes if home}) == len(homes)

    def _flat_of(self, group: FlatGroup, leaves: Sequence[Tensor]) -> Tensor:
        """The flat of a group's updates or params: the known one, or a new one."""
        own = _at(group.positions, leaves)
        home = self._current.updates.home_of(own) or self._current.params.home_of(own)
        return group.pack(own) if home is None else home.flat

    def update_fused(
        self, fused: Fused, updates: Tree, state: Any, params: Tree
    ) -> tuple[Tree | None, Any]:
        """Run a kernel, if it can take these leaves, else the pointwise update. Returns the updates
        that are left to be added, and the state."""
        flats, current = self.flats(params), self._current
        # A kernel that wrote to a copy would leave the params as they are
        own = current.params.ids.union(map(id, optree.tree_leaves(params)))
        if not (own.issuperset(map(id, flats)) and self.fuses(fused, flats)):
            return self.update(fused.plain, updates, state, params)
        leaves, treedef = optree.tree_flatten(state)
        before = HomedLeaves(treedef, leaves, current.state.among(leaves))
        after = self.fused(fused, self.flats(updates), before, flats)
        current.state.note(after.homes.values())
        return None, after.tree

    def flats(self, tree: Tree) -> list[Tensor]:
        """The flat (piece,) of each group in a tree; new ones where the leaves lie in none."""
        leaves: list[Tensor] = self._treedef.flatten_up_to(tree)
        if self._are_leaves and _lie_plainly(leaves):
            return leaves
        return [self._flat_of(group, leaves) for group in self._groups]

    def fuses(self, fused: Fused, params: Sequence[Tensor]) -> bool:
        """Whether `fused` can run this kernel on these flats."""
        # By dtype and device, one of each; with `map`, since `to_torch`'s leaves may be many
        kinds = dict(zip(map(_kind, params), params, strict=True))
        if not kinds or not all(map(fused.takes, kinds.values())):
            return False
        # The pointwise update tells how its state is cut flat by flat
        return self._regrouping(fused.plain) is not None

    def fused(
        self,
        fused: Fused,
        updates: list[Tensor],
        state: HomedLeaves,
        params: list[Tensor],
    ) -> HomedLeaves:
        """Run a kernel, which writes over params; and over the state, where the update may. Returns
        the next state.

        Args:
            fused: one of which `fuses` is true.
            updates: the flat (piece,) of each group, only read.
            state: as `init` made it.
            params: the flats (piece,) of the params, in the same order; written to.
        """
        plain, device = fused.plain, params[0].device
        regrouping = self._regrouping(plain)
        assert regrouping is not None
        ferry, donate = self._current.ferry, self._current.donate
        tensors = self._tensors_of(regrouping, state, device)
        after = state._replace(leaves=[*state.leaves], homes={**state.homes})
        # Where a state has a place, the ferry makes the copies
        for leaf in regrouping.flats if donate or not ferry.places else ():
            at = leaf.positions
            is_known, flat = at in state.homes, tensors[at]
            is_stored = is_known or flat is state.leaves[at[0]]
            # A leaf from elsewhere may share elements with another one
            if not (donate and is_stored and (is_known or donate == "leaves")):
                tensors[at] = flat.clone() if is_stored else flat
                _put_next(tensors[at], leaf, after)

        def begin(batch: _Batch) -> list[Brought]:
            return [ferry.bring(x, device) for x in batch.of(tensors) if ferry.places]

        def run(batch: _Batch, arrived: Sequence[Brought]) -> None:
            given = batch.of(tensors)
            if not donate:
                rows = zip(arrived, batch.leaves, strict=False)  # none, where nothing travels
                arrived = [
                    here.to_write() if isinstance(leaf, _StateFlat) else here for here, leaf in rows
                ]
            if ferry.places:
                given = [here.tensor for here in arrived]
            # A plan's have none: a kernel works in place and takes no room
            if has_values(params[0]):
                group = slice(batch.first, batch.first + len(batch.groups))
                new = fused.update(params[group], updates[group], batch.treedef.unflatten(given))
                made = batch.treedef.flatten_up_to(new)
                # Leaves that follow no param are the same for all groups, which read the old
                for k in batch.shared:
                    _put_next(made[k], batch.leaves[k], after)
            for here, leaf in zip(arrived, batch.leaves, strict=False):
                # The kernel has written to the tensor itself
                if isinstance(leaf, _StateFlat):
                    flat = ferry.take_back(here, here.tensor)
                    if flat is not here.stored:
                        _put_next(flat, leaf, after)

        # One call for all groups, where a kernel may launch once for many tensors
        room = -1 if ferry.places or fused.one_by_one else math.inf
        in_turn(self._batches(plain, regrouping, room), begin, run, ferry.ahead)
        return after

    def _tensors_of(
        self, regrouping: _Regrouping, state: HomedLeaves, device: torch.device
    ) -> dict[Positions, Tensor]:
        """By positions, the flat (piece,) that leaves are cut from, or a new one that they are
        copied to; or the leaf that follows no param."""
        _, leaves, homes = state
        found: dict[Positions, Tensor] = {(n,): leaves[n] for n in regrouping.shared}
        # Leaves that nobody else has, of all params: without a call for each, at every step
        if self._current.donate == "leaves" and self._are_leaves:
            own = {leaf.positions: leaves[leaf.positions[0]] for leaf in regrouping.flats}
            if _lie_plainly([*own.values()]):
                return found | own
        for leaf in regrouping.flats:
            home = homes.get(leaf.positions)
            if home is not None:
                found[leaf.positions] = home.flat
            else:
                # A copy must be of what is brought, and stays beside the params
                pieces = self._current.ferry.beside(_at(leaf.positions, leaves), device)
                found[leaf.positions] = leaf.group.pack(pieces)
        return found

    def _batches(self, part: Pointwise, regrouping: _Regrouping, room: float) -> list[_Batch]:
        """The groups, in order, as many at a time as have this number of elements; at least one."""
        if room not in regrouping.batches:
            batches, first, numel = [], 0, 0
            for n, group in enumerate(self._groups):
                size = group.numel(self._layout)
                if n > first and numel + size > room:
                    batches.append(regrouping.batch(part, self._groups[first:n], first))
                    first, numel = n, 0
                numel += size
            batches.append(regrouping.batch(part, self._groups[first:], first))
            regrouping.batches[room] = batches
        return regrouping.batches[room]

    def _regrouping(self, part: Pointwise) -> _Regrouping | None:
        if part not in self._regroupings:
            self._regroupings[part] = self._find_regrouping(part)
        return self._regroupings[part]

    def _find_regrouping(self, part: Pointwise) -> _Regrouping | None:
        """Where each group's state lies; None where leaves are not treated alike, and nothing can
        be regrouped."""

        def init(params: Tree, across: Across) -> Any:
            return part.init(params)

        # The state of all leaves, and that of one param alone
        full = plan_state(init, self._layout, self._mask, self._layout.num_ranks)
        of_one = part.init({"": placeholder(0, torch.float32)})
        # Numbers and text of Python's: there is no tensor to lie anywhere
        if not all(isinstance(leaf, Tensor) for leaf in optree.tree_leaves(of_one)):
            return None
        one = plan_of(of_one)
        if not _treats_leaves_alike(full, one, len(self.numbers)):
            return None
        return _Regrouping(full, len(one.slots), self._groups)


def device_of(params: Tree) -> torch.device | None:
    """The device of a tree's leaves; None: it has none."""
    return next((leaf.device for leaf in optree.tree_leaves(params)), None)


def _group_leaves(layout: Layout, numbers: Sequence[int], piece_number: int) -> list[FlatGroup]:
    """The groups of the leaves with these numbers, bucket by bucket."""
    # A leaf's number in the layout -> its position in the masked trees
    positions = {number: position for position, number in enumerate(numbers)}
    groups = []
    for bucket in layout.buckets:
        chosen = tuple(number for number in bucket.leaves if number in positions)
        # torch's leaves lie in no common flat
        if len(chosen) == len(bucket.leaves) and not isinstance(bucket, PlacedBucket):
            own_positions = tuple(positions[number] for number in chosen)
            groups.append(FlatGroup(chosen, own_positions, bucket, piece_number))
        else:
            # The flat of such a bucket would hold leaves that the update must not see
            for number in chosen:
                groups.append(FlatGroup((number,), (positions[number],), None, piece_number))
    return groups


def _treats_leaves_alike(full: StatePlan, one: StatePlan, num_params: int) -> bool:
    """Whether each param has the followers that a single one has, and all share the other leaves.

    Args:
        full: of the state of all params.
        one: of the state of one param alone.
        num_params: the number of all params.
    """
    follow_alike = len(full.slots) == len(one.slots) * num_params
    return follow_alike and len(full.shared) == len(one.shared)


class _StateFlat(NamedTuple):
    """A leaf of a batch's state that follows a flat of params: a flat of leaves of the full
    state."""

    group: FlatGroup
    positions: Positions  # in the full state, one per leaf of the group


class _SharedLeaf(NamedTuple):
    """A leaf of a batch's state that follows no param: the same in the full state."""

    positions: Positions  # in the full state: one


_StateLeaf = _StateFlat | _SharedLeaf
_positions = attrgetter("positions")


class _Batch(NamedTuple):
    """Groups that an update sees at once, as the tree {0: flat, 1: flat, ...}."""

    groups: Sequence[FlatGroup]
    first: int  # the number of the first group
    treedef: optree.PyTreeSpec  # of the state that `init` makes of that tree
    leaves: list[_StateLeaf]  # of it
    shared: list[int]  # the numbers of those that follow no param

    def of(self, tensors: Mapping[Positions, T]) -> list[T]:
        """Its own, of all tensors by positions."""
        return [*map(tensors.__getitem__, map(_positions, self.leaves))]


class _Regrouping:
    """A state in two structures: leaf by leaf, and flat by flat.

    Attributes:
        full: structure of the full state.
        flats: group by group, and slot by slot.
        shared: the positions of all other leaves in the full state.
        batches: see `PointwiseOnFlats._batches`.
    """

    def __init__(self, full: StatePlan, num_slots: int, groups: Sequence[FlatGroup]):
        self.full, self.shared, self._num_slots = full.treedef, full.shared, num_slots
        self.batches: dict[float, list[_Batch]] = {}  # by the elements that one has room for
        # One slot of a bucket's leaves is one flat
        self.flats = [
            _StateFlat(group, tuple(full.slots[slot, number] for number in group.leaves))
            for group in groups
            for slot in range(num_slots)
        ]

    def batch(self, part: Pointwise, groups: Sequence[FlatGroup], first: int) -> _Batch:
        """Some groups, of which this is the number of the first, as one batch."""
        params = {k: placeholder(k, torch.float32) for k in range(len(groups))}
        plan = plan_of(part.init(params))
        # They have the same order in every state
        shared = iter(self.shared)
        leaves = [
            self.flats[(first + leaf.leaf) * self._num_slots + leaf.slot]
            if leaf.kind == "follows"
            else _SharedLeaf((next(shared),))
            for leaf in plan.leaves
        ]
        return _Batch(groups, first, plan.treedef, leaves, plan.shared)


def _put_next(new: Tensor, leaf: _StateLeaf, after: HomedLeaves) -> None:
    """Put a flat, or a leaf that follows no param, where the old one is, in a next state that is
    being made."""
    if isinstance(leaf, _StateFlat):
        made = leaf.group.cut(new)
        after.homes[leaf.positions] = Home(new, leaves=made)
        _put(made, leaf.positions, after.leaves)
    else:
        after.homes.pop(leaf.positions, None)
        _put([new], leaf.positions, after.leaves)


def _lie_plainly(leaves: Sequence[Tensor]) -> bool:
    """Whether each leaf has a place in memory for each of its elements, with its value."""
    # With `map`, since this runs for every leaf at every step
    flagged = any(map(Tensor.is_conj, leaves)) or any(map(Tensor.is_neg, leaves))
    return all(map(Tensor.is_contiguous, leaves)) and not flagged


def _at(positions: Sequence[int], leaves: Sequence[T]) -> list[T]:
    """The leaves at these positions."""
    # With `map`, since this runs for every leaf at every step
    return [*map(leaves.__getitem__, positions)]


def _put(pieces: Sequence[Tensor], positions: Sequence[int], leaves: list[Tensor]) -> None:
    """The inverse of `_at`."""
    for i, piece in zip(positions, pieces, strict=True):
        leaves[i] = piece


class _Operand(NamedTuple):
    """A tensor that an update reads, and that its result replaces."""

    tensor: Tensor  # (piece,) if it is a flat; else of any shape: a count of steps, say
    is_flat: bool
    donated: bool  # the result is to be written over it

    def chunk(self, here: slice) -> Tensor:
        """The part for one chunk: a view of a flat; else the tensor itself."""
        return self.tensor[here] if self.is_flat else self.tensor


def _room(device: torch.device) -> int:
    """The elements of flats that an update sees at a time. On a GPU a launch costs more than a
    cache would save; what bounds them is the memory of temporaries."""
    return IN_CACHE if device.type in ("cpu", "meta") else ON_A_GPU


def _run_in_chunks(
    part: Pointwise, treedef: Any, operands: Sequence[_Operand], params: Sequence[Tensor]
) -> list[Tensor]:
    """A pointwise update of some flats: the operands' results. On a CPU, a flat that is larger than
    its cache comes alone, in chunks.

    Args:
        treedef: structure of the flats' state.
        operands: the updates, then the state's leaves.
        params: (piece,) each, the params' flats.

    Returns:
        Per operand, its result: the operand's own tensor where that was written over.
    """
    updates = [operand.tensor for operand in operands[: len(params)]]
    run = _choose_function(part, operands)
    numel = max(map(Tensor.numel, updates))
    is_chunked = len(params) == 1 and updates[0].device.type in ("cpu", "meta")
    chunk = IN_CACHE if is_chunked else numel
    # One chunk, and nothing to write over: results are handed on as they were made
    if numel <= chunk and not any(operand.donated for operand in operands):
        everything = [operand.tensor for operand in operands]
        return _in_storages_of_their_own(_run(run, treedef, everything, params), operands, params)

    # A plan's tensors have no values, and one chunk stands for all
    end = numel if has_values(updates[0]) else min(numel, chunk)
    # Per operand; made after the first chunk, which tells their dtypes
    results: list[Tensor] = []
    # An empty flat is run once, too: its counts go on
    for start in range(0, max(end, 1), max(chunk, 1)):
        here = slice(start, start + chunk)
        given = [operand.chunk(here) for operand in operands]
        own_params = [param[here] for param in params]
        made = _run(run, treedef, given, own_params)
        if not results:
            results = _make_results(operands, made)

        of_flats = []
        for k, operand in enumerate(operands):
            if operand.is_flat:
                of_flats.append(_Result(made[k], results[k][here]))
            else:
                # Each chunk was given the same old count, so any chunk's new one is the answer
                results[k] = made[k]
        # Only this chunk of what was donated is written over, and no later chunk reads it
        _write([*given, *own_params], of_flats)
    return results


def _in_storages_of_their_own(
    made: Sequence[Tensor], operands: Sequence[_Operand], params: Sequence[Tensor]
) -> list[Tensor]:
    """The results, copied where one lies in what was given in another's place, or in another
    result. The next transform may write over its updates, and the next step over each leaf of the
    state."""
    taken = {storage_id(operand.tensor) for operand in operands if operand.is_flat}
    taken |= {storage_id(param) for param in params}
    apart = []
    for x, operand in zip(made, operands, strict=True):
        # Flats have a place in memory for each of their values
        x = x.resolve_conj().resolve_neg().contiguous()
        is_other = x is not operand.tensor and storage_id(x) in taken
        apart.append(x.clone() if is_other else x)
        taken.add(storage_id(x))
    return apart


def _choose_function(part: Pointwise, operands: Sequence[_Operand]) -> Callable[..., Any]:
    """`in_place` where it may write over all flats, else `update`."""
    all_donated = all(operand.donated for operand in operands if operand.is_flat)
    # In a plan, which measures memory, tensors have no values
    if part.in_place and all_donated and has_values(operands[0].tensor):
        return part.in_place
    return part.update


def _run(
    run: Callable[..., Any], treedef: Any, given: Sequence[Tensor], params: Sequence[Tensor]
) -> list[Tensor]:
    """Call an author's function with trees of some flats. Given and returned: the updates, then the
    state's leaves."""
    updates, state = dict(enumerate(given[: len(params)])), given[len(params) :]
    new_updates, new_state = run(updates, treedef.unflatten(state), dict(enumerate(params)))
    if not isinstance(new_updates, dict):
        remedy = "keep the structure that `update` is given, by tree_map for example"
        same_structure(updates, new_updates, what="the optimizer's updates", remedy=remedy)
    return [*map(new_updates.__getitem__, updates), *optree.tree_leaves(new_state)]


def _make_results(operands: Sequence[_Operand], made: Sequence[Tensor]) -> list[Tensor]:
    """Per operand, the tensor that its result is written to: the operand's own, or a new one of the
    dtype that the first chunk was made in."""
    results = []
    for operand, value in zip(operands, made, strict=True):
        # A result in another dtype, a float32 mean of bfloat16 say, doesn't fit its operand
        if operand.donated and operand.tensor.dtype == value.dtype:
            results.append(operand.tensor)
        elif operand.is_flat:
            results.append(value.new_empty(operand.tensor.numel()))
        else:
            results.append(value)
    return results


class _Result(NamedTuple):
    """A chunk of a flat's result, and where it is to lie."""

    value: Tensor  # (chunk,)
    target: Tensor  # (chunk,), a view of a flat


def _write(given: Sequence[Tensor], made: Sequence[_Result]) -> None:
    """Copy values to their targets. Values that lie in given tensors are cloned before any of these
    is overwritten. See Note [Writing over donated storage]."""
    # 0-d ones are counts, and nothing is written over these
    given_storages = {storage_id(x) for x in given if x.dim()}
    pending = []
    for value, target in made:
        if _is_at(value, target):
            continue
        if storage_id(value) in given_storages:
            value = value.clone()
        pending.append(_Result(value, target))
    for value, target in pending:
        target.copy_(value)


def _is_at(value: Tensor, target: Tensor) -> bool:
    """Whether a value lies where it is to be written already."""
    return (
        storage_id(value) == storage_id(target)
        and value.storage_offset() == target.storage_offset()
        and value.stride() == target.stride()
        and not is_flagged(value)
    )
