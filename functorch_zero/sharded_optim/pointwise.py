"""Pointwise updates on pieces: bunch by bunch, where a bunch is what lies in one flat."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import optree
import torch
from torch import Tensor

from .._torch_private import base_of, storage_id
from ..layout.flat_buffers import Recall, cut, flat_of_pieces
from ..layout.layout import Bucket, Layout
from ..optim.across import Pointwise, Tree
from ..optim.base import Transform
from ..tree import PyTree, has_values, select, storages
from .state_plan import placeholder, plan_of, plan_state

# Elements a pointwise update sees at a time on a CPU, whose caches then hold its temporaries
_CHUNK = 2**17


class PointwiseOnFlats:
    """The leaves where `mask` is true, as bunches, and pointwise updates of them.

    Args:
        layout: how the params are cut, over `num_ranks` ranks of which this is `rank`.
        donate: updates and state may be overwritten.
    """

    def __init__(self, layout: Layout, mask: PyTree[bool], rank: int, *, donate: bool):
        self._layout, self._mask, self._rank, self._donate = layout, mask, rank, donate
        everything = layout.treedef.unflatten(range(len(layout.leaves)))
        # Of the leaves, in tree order
        self.numbers: list[int] = optree.tree_leaves(select(everything, mask))
        self._position = {n: i for i, n in enumerate(self.numbers)}
        self._bunches = self._find_bunches()
        # In the trees given
        self._at = [[self._position[n] for n in bunch.leaves] for bunch in self._bunches]
        self._regroupings: WeakKeyDictionary[Pointwise, _Regrouping | None] = WeakKeyDictionary()

    def _find_bunches(self) -> list[_Bunch]:
        chosen = set(self.numbers)
        bunches = []
        for bucket in self._layout.buckets:
            inside = tuple(n for n in bucket.leaves if n in chosen)
            if len(inside) == len(bucket.leaves):
                bunches.append(_Bunch(inside, bucket, self._rank))
            else:
                bunches += [_Bunch((n,), None, self._rank) for n in inside]
        return bunches

    def pointwise(
        self, part: Pointwise, updates: Tree, state: Any, params: Tree
    ) -> tuple[Tree, Any]:
        how = self._regrouping(part)
        if how is None or not self._bunches:  # without leaves, counts go on all the same
            return part.update(updates, state, params)
        u, treedef = optree.tree_flatten(updates)
        p, old = optree.tree_leaves(params), _distinct(optree.tree_leaves(state))
        new = list(old)
        owned = self._owned(u, p) if self._donate else set()
        for bunch, at, places in zip(self._bunches, self._at, how.places, strict=True):
            flat_u, flat_p = bunch.flat([u[i] for i in at]), bunch.flat([p[i] for i in at])
            flats = [
                bunch.flat([old[i] for i in where]) if follows else old[where[0]]
                for follows, where in places
            ]
            donated = [_share(u[at[0]], flat_u) and storage_id(flat_u) in owned]
            donated += [
                self._donate and f and _share(old[w[0]], x)
                for (f, w), x in zip(places, flats, strict=True)
            ]
            made_u, *made_s = _stream(
                part, how.one, flat_u, flat_p, flats, [f for f, _ in places], donated
            )
            _put(u, at, bunch, flat_u, made_u)
            for (follows, where), flat, made in zip(places, flats, made_s, strict=True):
                if follows:
                    _put(new, where, bunch, flat, made)
                else:
                    new[where[0]] = made
        return treedef.unflatten(u), how.full.unflatten(new)

    def _owned(self, updates: Sequence[Tensor], params: Sequence[Tensor]) -> set[int]:
        """The storages that one bunch's updates have for themselves: elsewhere padding may be a
        leaf."""
        within = ({storage_id(updates[i]) for i in at} for at in self._at)
        times = Counter(storage for storages in within for storage in storages)
        return {storage for storage, count in times.items() if count == 1} - storages(params)

    def flats(self, tree: Tree) -> list[Tensor]:
        """The flats that a tree's leaves lie in, one a bunch; packed into new ones where they don't
        lie in one."""
        leaves = optree.tree_leaves(tree)
        return [
            bunch.flat([leaves[i] for i in at])
            for bunch, at in zip(self._bunches, self._at, strict=True)
        ]

    def fuses(self, transform: Transform, params: Sequence[Tensor]) -> bool:
        """Whether `fused` can run this transform on these flats."""
        if not self._donate or transform.fused is None or transform.plain is None or not params:
            return False
        return (
            all(map(transform.fused.takes, params))
            and self._regrouping(transform.plain) is not None
        )

    def fused(
        self, transform: Transform, updates: list[Tensor], state: Any, params: list[Tensor]
    ) -> Any:
        """Run a transform's kernel on flats of donated params and updates and on donated state.
        Returns the state."""
        assert transform.fused is not None and transform.plain is not None
        how = self._regrouping(transform.plain)
        assert how is not None
        if not all(map(has_values, params)):
            return state  # a plan's: a kernel works in place and takes no room
        old = _distinct(optree.tree_leaves(state))
        flats = how.recall([*map(old.__getitem__, how.following)])
        known = [*flats, *old]
        states = [how.one.unflatten(map(known.__getitem__, row)) for row in how.rows]
        made = transform.fused.update(params, updates, states)
        new = list(old)
        for (bunch, where), flat in zip(how.runs, flats, strict=True):
            if base_of(old[where[0]]) is not flat and not _share(old[where[0]], flat):
                _put(new, where, bunch, old[where[0]], flat)
        for (follows, where), result in zip(
            how.places[0], optree.tree_leaves(made[0]), strict=True
        ):
            if not follows:
                new[where[0]] = result
        return how.full.unflatten(new)

    def _regrouping(self, part: Pointwise) -> _Regrouping | None:
        if part not in self._regroupings:
            self._regroupings[part] = self._find_regrouping(part)
        return self._regroupings[part]

    def _find_regrouping(self, part: Pointwise) -> _Regrouping | None:
        """Where each bunch's state lies; None where leaves are not treated alike, and nothing can
        be regrouped."""
        full = plan_state(
            lambda params, across: part.init(params),
            self._layout,
            self._mask,
            self._layout.num_ranks,
        )
        one = plan_of(part.init({"": placeholder(0, torch.float32)}))
        slots = full.slots()
        rest = [i for i, leaf in enumerate(full.leaves) if leaf.kind != "follows"]
        num_slots = sum(leaf.kind == "follows" for leaf in one.leaves)
        if len(slots) != num_slots * len(self.numbers) or len(rest) + num_slots != len(one.leaves):
            return None
        places = []
        for bunch in self._bunches:
            others = iter(rest)
            places.append(
                [
                    (True, [slots[leaf.slot, n] for n in bunch.leaves])
                    if leaf.kind == "follows"
                    else (False, [next(others)])
                    for leaf in one.leaves
                ]
            )
        return _Regrouping(full.treedef, one.treedef, places, self._bunches)


@dataclass(frozen=True)
class _Bunch:
    """Leaves that a pointwise update sees as one flat: a whole bucket, or where some are masked out
    a single leaf."""

    leaves: tuple[int, ...]
    bucket: Bucket | None
    rank: int

    def flat(self, pieces: Sequence[Tensor]) -> Tensor:
        return pieces[0] if self.bucket is None else flat_of_pieces(pieces, self.bucket, self.rank)

    def cut(self, flat: Tensor) -> list[Tensor]:
        return [flat] if self.bucket is None else cut(flat, self.bucket, self.rank)


@dataclass(frozen=True)
class _Regrouping:
    """Where the state of each bunch lies in the full state's leaves."""

    full: Any  # structure of the full state
    one: Any  # structure of the state of a single leaf
    # For each bunch and leaf of `one`: (follows a param, positions)
    places: list[list[tuple[bool, list[int]]]]
    bunches: list[_Bunch]

    @cached_property
    def runs(self) -> list[tuple[_Bunch, list[int]]]:
        """The leaves that lie in one flat together: of which bunch, and where in the full state."""
        return [
            (b, where)
            for b, places in zip(self.bunches, self.places, strict=True)
            for f, where in places
            if f
        ]

    @cached_property
    def following(self) -> list[int]:
        """The positions of all leaves that follow a param, run by run."""
        return [i for _, where in self.runs for i in where]

    @cached_property
    def rows(self) -> list[list[int]]:
        """For each bunch and leaf of `one`, its position in the list of the runs' flats and then
        the full state."""
        runs = iter(range(len(self.runs)))
        return [
            [next(runs) if f else len(self.runs) + where[0] for f, where in places]
            for places in self.places
        ]

    @cached_property
    def recall(self) -> Recall:
        """Of the leaves at `following`, the flats that they lie in."""

        def find(leaves: Sequence[Tensor]) -> list[Tensor]:
            given = iter(leaves)
            return [bunch.flat([next(given) for _ in where]) for bunch, where in self.runs]

        return Recall(find)


def _distinct(leaves: list[Tensor]) -> list[Tensor]:
    """The leaves of a state, those copied that have come before: each will be written to."""
    if len({*map(id, leaves)}) == len(leaves):
        return leaves
    first = {id(leaf): i for i, leaf in reversed([*enumerate(leaves)])}
    return [leaf if first[id(leaf)] == i else leaf.clone() for i, leaf in enumerate(leaves)]


def _put(
    leaves: list[Tensor], where: Sequence[int], bunch: _Bunch, old: Tensor, new: Tensor
) -> None:
    """Put a new flat's pieces in the place of the old ones, unless it is the old flat itself."""
    if new is not old:
        for i, view in zip(where, bunch.cut(new), strict=True):
            leaves[i] = view


def _stream(
    part: Pointwise,
    one: Any,
    u: Tensor,
    p: Tensor,
    state: list[Tensor],
    follows: list[bool],
    donated: list[bool],
) -> list[Tensor]:
    """A pointwise update of one flat, in chunks that stay in a CPU's cache: the updates, then the
    state's leaves.

    Where `donated`, a result is written into the storage of what it replaces.
    """
    update, moved = part.update, [True, *follows]
    if part.in_place and has_values(u) and all(itertools.compress(donated, moved)):
        update = part.in_place
    size = _CHUNK if u.device.type in ("cpu", "meta") else u.numel()
    end = u.numel() if has_values(u) else min(u.numel(), size)  # one chunk stands for all in a plan
    out: list[Tensor] = []
    for start in range(0, max(end, 1), max(size, 1)):
        here = slice(start, start + size)
        given = [x[here] if f else x for x, f in zip(state, follows, strict=True)]
        made_u: Any
        made_u, made_s = update({"": u[here]}, one.unflatten(given), {"": p[here]})
        made = [made_u[""], *optree.tree_leaves(made_s)]
        if u.numel() <= size and not any(donated):
            return [
                made[0],
                *(x.clone() if x.dim() and _share(x, made[0]) else x for x in made[1:]),
            ]
        if not out:
            fits = [
                d and x.dtype == m.dtype for d, x, m in zip(donated, [u, *state], made, strict=True)
            ]
            out = [
                x if fit else m.new_empty(u.numel()) if f else m
                for x, m, f, fit in zip([u, *state], made, moved, fits, strict=True)
            ]
        places = [x[here] if f else m for x, m, f in zip(out, made, moved, strict=True)]
        made = _apart(made, places, [u[here], p[here], *given])
        for k, (m, place) in enumerate(zip(made, places, strict=True)):
            if not moved[k]:
                out[k] = m
            elif not _is_at(m, place):
                place.copy_(m)
    return out


def _apart(made: list[Tensor], places: list[Tensor], given: list[Tensor]) -> list[Tensor]:
    """Results that are what was given (a state that is the old updates, say), copied: that may be
    written to first.

    Not those that are in their places already.
    """
    taken = {storage_id(x) for x in given if x.dim()}
    return [
        x.clone() if x.dim() and storage_id(x) in taken and not _is_at(x, place) else x
        for x, place in zip(made, places, strict=True)
    ]


def _is_at(x: Tensor, place: Tensor) -> bool:
    return (
        _share(x, place)
        and x.storage_offset() == place.storage_offset()
        and x.stride() == place.stride()
    )


def _share(a: Tensor, b: Tensor) -> bool:
    return storage_id(a) == storage_id(b)
