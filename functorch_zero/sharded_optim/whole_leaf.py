"""Whole-leaf updates: a leaf's pieces travel to its owner, and the result travels back.

A whole-leaf transform (Muon, Shampoo) sees a tensor whole, but between steps each rank holds a
piece of it. So one rank, the leaf's owner, receives the pieces, runs the update, and sends
each rank its piece of the result: one all-to-all in and one out per dtype, for all leaves together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..groups.protocol import Group
from ..layout.extent import Extent, Rows
from ..layout.layout import Bucket, Layout
from ..layout.placed import PlacedBucket
from ..optim.across import Shape, WholeLeaf
from ..tree import grouped
from .mail import Mail
from .state_plan import EVERYONE, HOLDERS


@dataclass(frozen=True)
class _Leaf:
    """Where a leaf lies: it is the `index`-th of its bucket."""

    bucket: Bucket  # in which all its elements lie
    index: int
    shape: Shape  # of the whole leaf

    @property
    def is_cut(self) -> bool:
        return self.bucket.cut.num_pieces > 1

    def extent(self, rank: int) -> Extent:
        """The elements that `rank` holds."""
        return self.bucket.extent(self.index, rank)

    def holders(self) -> Sequence[int]:
        """The ranks that hold at least one element."""
        return self.bucket.holders(self.index)

    def senders(self) -> list[int]:
        """Of the holders, those that bring each element once."""
        return [rank for rank in self.holders() if self.bucket.counts(rank)]

    def join(self, runs: Sequence[Tensor], like: Tensor) -> Tensor:
        """The senders' runs (n,) as the whole leaf; a single run as it is, without a copy."""
        extents = [self.extent(rank) for rank in self.senders()]
        # Neighbours, since a bucket is cut in order; but not where torch has cut it
        if isinstance(self.bucket, PlacedBucket) and len(runs) > 1:
            whole = like.new_empty(self.shape)
            for run, extent in zip(runs, extents, strict=True):
                part = extent.part_of(whole)
                part.copy_(run.view(part.shape))
            return whole
        # A leaf without elements has no run at all
        joined = runs[0] if len(runs) == 1 else torch.cat([like.new_empty(0), *runs])
        return joined.reshape(self.shape)


class _Travelling(NamedTuple):
    """A leaf of one of the trees that are to become whole."""

    tree: int
    position: int  # of the leaf


class Exchange:
    """Moves leaves between pieces and owners. Leaves are known by their position among `numbers`.

    Only the ranks that hold something of a leaf are gone through, so its cost does not grow with
    leaves times ranks.

    Args:
        layout: how all leaves are cut over the group.
        numbers: the leaves, by their number in the layout.
    """

    def __init__(self, layout: Layout, numbers: Sequence[int], group: Group):
        self._group = group
        self._leaves: list[_Leaf] = []
        for number in numbers:
            b, index = layout.in_buckets[number]
            self._leaves.append(_Leaf(layout.buckets[b], index, layout.leaves[number].shape))

    def to_owners(
        self, trees: Sequence[Sequence[Tensor]], owners: Sequence[int]
    ) -> list[dict[int, Tensor]]:
        """Send the pieces of each leaf to its owner. One all-to-all per dtype.

        Args:
            trees: of each, this rank's pieces (n,), by position.
            owners: by position, a rank; EVERYONE, to which a cut leaf goes whole; or HOLDERS.

        Returns:
            Of each tree, by position, the leaves that are whole on this rank: those that it owns,
            and those that are not cut; of HOLDERS, the rows (m, ...) that are here.
        """
        whole: list[dict[int, Tensor]] = [{} for _ in trees]
        # In the order of the leaves, so that all ranks start the same all-to-all next
        by_dtype: defaultdict[Any, list[_Travelling]] = defaultdict(list)
        for t, pieces in enumerate(trees):
            for i, (piece, leaf) in enumerate(zip(pieces, self._leaves, strict=True)):
                if isinstance(piece, Rows):
                    whole[t][i] = piece
                elif owners[i] == HOLDERS:
                    whole[t][i] = piece.reshape(-1, *leaf.shape[1:])
                elif self._group.size > 1 and leaf.is_cut:
                    # And by device: numbers lie on the CPU, and go by another backend
                    by_dtype[piece.dtype, piece.device].append(_Travelling(t, i))
                else:
                    # Here whole on every rank: a view, and nothing travels
                    whole[t][i] = piece.reshape(leaf.shape)

        for travelling in by_dtype.values():
            self._gather(travelling, trees, owners, whole)
        return whole

    def _gather(
        self,
        travelling: Sequence[_Travelling],
        trees: Sequence[Sequence[Tensor]],
        owners: Sequence[int],
        whole: list[dict[int, Tensor]],
    ) -> None:
        """Put leaves of one dtype into `whole`, at their owners. One all-to-all."""
        like = trees[travelling[0].tree][travelling[0].position]
        # Senders and receivers go through the leaves in this order, so runs need no labels
        mail = Mail(self._group)
        for key in travelling:
            leaf, owner = self._leaves[key.position], owners[key.position]
            # For EVERYONE this is an all-gather of uneven pieces
            receivers = range(self._group.size) if owner == EVERYONE else (owner,)
            for receiver in receivers if leaf.bucket.counts(self._group.rank) else ():
                mail.send(receiver, trees[key.tree][key.position])
            if owner in (self._group.rank, EVERYONE):
                for sender in leaf.senders():
                    mail.expect(sender, key, leaf.extent(sender).num_here)
        arrived = mail.exchange(like)
        for key in travelling:
            if owners[key.position] in (self._group.rank, EVERYONE):
                # Runs come in the order of senders
                leaf = self._leaves[key.position]
                whole[key.tree][key.position] = leaf.join(arrived[key], like)

    def from_owners(
        self, results: Mapping[int, Tensor], pieces: Sequence[Tensor], owners: Sequence[int]
    ) -> list[Tensor]:
        """Send each rank its pieces of the results. One all-to-all per dtype.

        Args:
            results: by position, the leaves that are whole on this rank, in the pieces' dtypes.
            pieces: by position, this rank's pieces (n,) before the update.
            owners: by position, a rank; EVERYONE of leaves that are not cut, and of no others; or
                HOLDERS.

        Returns:
            By position, this rank's pieces (n,) of the results.
        """
        found: dict[int, Tensor] = {}  # by position, this rank's pieces (n,) of results
        by_dtype: defaultdict[Any, list[int]] = defaultdict(list)
        for i, piece in enumerate(pieces):
            if self._group.size == 1 or owners[i] in (EVERYONE, HOLDERS):
                # Every rank has run it, on a leaf that is not cut: all of it is the piece. Or each
                # on its own rows
                made = results[i]
                found[i] = made if isinstance(made, Rows) else made.reshape(-1)
            else:
                by_dtype[piece.dtype, piece.device].append(i)

        for travelling in by_dtype.values():
            self._scatter(travelling, results, pieces[travelling[0]], owners, found)
        return [found[i] for i in range(len(pieces))]

    def _scatter(
        self,
        travelling: Sequence[int],
        results: Mapping[int, Tensor],
        like: Tensor,
        owners: Sequence[int],
        found: dict[int, Tensor],
    ) -> None:
        """Put this rank's pieces of results of one dtype into `found`. One all-to-all."""
        here = self._group.rank
        mail = Mail(self._group)
        for i in travelling:
            leaf = self._leaves[i]
            # One run per leaf, empty where this rank holds nothing of it
            mail.expect(owners[i], i, leaf.extent(here).num_here)
            if owners[i] == here:
                whole = results[i].contiguous()
                for holder in leaf.holders():
                    mail.send(holder, leaf.extent(holder).part_of(whole).reshape(-1))
        arrived = mail.exchange(like)
        for i in travelling:
            # A view of the received buffer could be taken for a view of a bucket's flat
            found[i] = arrived[i][0].clone()


def batches(part: WholeLeaf, whole: Mapping[int, Tensor]) -> list[list[int]]:
    """The positions of leaves that run together: those of one shape and dtype, if the transform
    takes batches."""
    if not part.batched:
        return [[i] for i in whole]
    # (shape, dtype) -> positions
    alike = grouped(((leaf.shape, leaf.dtype), i) for i, leaf in whole.items())
    return list(alike.values())
