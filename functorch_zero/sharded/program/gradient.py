"""The phases of a gradient: functions from one value to the next.

    GradientRun ── differentiate ──> LocalGradient ── agree_on ──> Agreed ── finish ──> the results

`ShardedEngine` runs them one after the other. A plan runs the same functions on tensors without
values, and looks on between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import compress
from operator import not_
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from ...errors import StructureError
from ...groups import labelled
from ...layout.extent import Rows
from ...layout.flat_buffers import own_piece
from ...layout.joined import Joined
from ...layout.sharded_tree import ShardedTree
from ...params import is_on_engine
from ...runtime.prefetch import PrefetchOrder
from ...runtime.reduce import GradientReduction
from ...step.loss import Outcome
from ...step.program import LossCall
from ...step.reminder import Reminder
from ...step.rng import MicroStreams
from ...step.rows import leading_sizes
from ...step.scope import gradient_in_words
from ...step.weights import check_weight_value
from ..average import Means, MeansUnderWay, compare_words, means_of, words_of
from ..buffers import Changes, apart_from, check_synchronizable, synchronize
from ..grad_mean import to_means
from ..nonfinite import refuse
from ..options import Options
from ..params import TreesAmong
from .kept import KeptOfGradient
from .ledger import Posted
from .scope import RanksScope


class LossTrees(TreesAmong):
    """The sharded trees among the arguments of a loss.

    Args:
        tree: the gradients asked for are of its sharded trees.
        args: the loss's other arguments, with sharded trees that it reads.

    Attributes:
        trees: those of `tree` come first.
        trained: for each, whether its gradients are taken.

    Raises:
        StructureError: sharded and whole trees are differentiated together.
    """

    def __init__(self, tree: Any, args: tuple[Any, ...]):
        super().__init__((tree, args), _is_sharded)
        self._treedef_of_asked = optree.tree_structure(tree, is_leaf=is_on_engine)
        num_asked = self._treedef_of_asked.num_leaves
        if others := [x for x in self._nodes[:num_asked] if not _is_sharded(x)]:
            raise StructureError(
                "a gradient was asked of sharded and of whole trees together",
                expected="sharded trees alone in the first argument",
                got=f"{num_asked - len(others)} sharded trees and {len(others)} leaves of "
                f"whole ones, the first of them a {type(others[0]).__name__}",
                remedy="shard them all with fz.shard_tree, or pass the whole ones as later "
                "arguments",
            )
        # Those among `args` are read only
        self.trained = [
            n < num_asked and not tree.is_read_only
            for n, tree in zip(self._places, self.trees, strict=True)
        ]

    @property
    def in_words(self) -> str:
        """Their labels, the same on all ranks, and which of them are only read."""
        # With the trees' serial numbers
        told = f"at {' and '.join(tree.holding.label for tree in self.trees)}"
        read = [*compress(self.trees, map(not_, self.trained))]
        if not read:
            return told
        return f"{told}, which only reads {' and '.join(tree.holding.label for tree in read)}"

    def trained_in(self, joined: Joined) -> list[tuple[ShardedTree, int]]:
        """The trees whose gradients are taken, each with the number of its first bucket.

        Args:
            joined: the layouts of all trees as one.
        """
        return [*compress(zip(self.trees, joined.first_buckets, strict=True), self.trained)]

    def gradients(self, reduced: Mapping[int, Tensor | Rows], joined: Joined) -> Any:
        """The gradients of `tree`, cut as its trees are, in the form of pieces: zeros for a bucket
        that no loss reached, None where frozen.

        Args:
            reduced: by bucket of the joined layout, (piece,) or rows each.
            joined: the layouts of all trees as one.
        """
        grads = []
        # Those asked for come first
        asked = self.trees[: self._treedef_of_asked.num_leaves]
        for tree, on, first in zip(asked, self.trained, joined.first_buckets, strict=False):
            if not on:
                grads.append(no_updates(tree))
                continue
            # As of a whole tree: None for leaves that are not trained
            found: list[Tensor | Rows | None] = []
            rows = zip(tree.sharding.layout.buckets, tree.flats(), strict=True)
            for b, (bucket, flat) in enumerate(rows, first):
                if not bucket.trainable:
                    found.append(None)
                elif b in reduced:
                    found.append(reduced[b])
                else:
                    own = own_piece(flat, bucket, tree.sharding.piece_number)
                    found.append(torch.zeros_like(own))
            grads.append(ShardedTree.of_flats(found, tree.holding.in_pieces))
        return self._treedef_of_asked.unflatten(grads)


class GradientRun(NamedTuple):
    """One gradient on one rank: a loss, its trees, and the parts that follow from them."""

    call: LossCall  # the user's loss, and this rank's arguments of it
    trees: LossTrees
    joined: Joined
    flats: list[Tensor]  # of all trees, as a pass uses them, in the order of the buckets
    streams: MicroStreams  # the random numbers of its micro-batches
    reminder: Reminder  # warns of unequal sizes, and of lost buffers
    reduction: GradientReduction  # takes the gradients of all micro-batches
    order: PrefetchOrder  # in which the last pass over these trees gathered units
    options: Options
    log: list[str]  # the gradient's number, and the collectives started since
    kept: KeptOfGradient | None  # by the reduction, of the trees; None: it keeps nothing
    look: bool  # whether the loss is looked at closely
    is_dry: bool  # whether trained flats have no values, and so results needn't either
    scope: RanksScope | None  # of the program's step that it is in; None: it is in none


class Agreed(NamedTuple):
    """The agreement of all ranks on a gradient; the same on every rank."""

    means: Means
    changed: Sequence[bool]  # per buffer, whether any rank's loss has changed it
    fine: bool  # loss and gradients are finite, or nobody looks


class LocalGradient(NamedTuple):
    """The results of the loss on this rank's part of the batch, all micro-batches as one."""

    # By bucket: sums over ranks of gradients (piece,), (numel,), or rows of a table
    reduced: dict[int, Tensor | Rows]
    outcome: Outcome  # without graphs
    means: MeansUnderWay  # of its loss, metrics and weight
    changes: Changes  # of its buffers
    is_divided: bool  # whether gradients were divided by the weights' sum before they were reduced
    exchanged: bool  # whether the loss has seen rows of other ranks
    fine: bool = True  # this rank's numbers are finite, or nobody looks

    @property
    def is_to_divide(self) -> bool:
        """Whether reduced gradients are still to be divided by the weights' sum."""
        return self.outcome.weight is not None and not self.is_divided


def agree_on(run: GradientRun, local: LocalGradient) -> Agreed:
    """Tell all ranks this one's findings, and learn theirs. One all-reduce of words, those of the
    ledger among them where gradients settle it; none in a program's step whose ledger takes them.
    See Note [words that wait] in `ledger`.

    Raises:
        NonFiniteError: loss or gradients are not finite on a rank, and the call refuses that.
        StructureError: this rank's loss has changed a buffer's shape or dtype, or backward has
            written to one.
        GroupError: ranks have taken gradients of other things, or have started other collectives.
        MismatchError: ranks of the same data have found different losses or metrics.
    """
    outcome, means, axes = local.outcome, local.means, run.options.axes
    old, new, rule = run.call.buffers, outcome.buffers, run.options.sync_buffers
    check_synchronizable(old, new, rule, axes.data, axes.world.rank)
    flags = local.changes.flags(axes.world.rank, look=run.look)
    if run.call.options.looks:
        flags = [*flags, not local.fine]
    group = labelled(axes.world, "gradient/metrics")
    # None to compare where a loss says what rows weigh, or sees all of them
    plain = outcome.weight is None and not local.exchanged
    rows = leading_sizes(run.call.data) if plain else []
    if run.scope is None:
        # Logs are compared here, when all collectives of the passes have started
        flags = compare_words(means, group, run.log, rows, run.reminder, flags)
    else:
        ledger = run.scope.ledger
        ledger.gradients.append(Posted([*words_of(means), *run.log], rows, run.reminder))
        # A program goes on without the other ranks' words, where neither flags say which buffers to
        # synchronize, nor ranks of the same data compare values
        if ledger.is_by_gradients or ledger.look or flags or axes.copy.num > 1:
            flags = ledger.settle_by_gradient(flags, run.call.data)
    found = means_of(means, group, axes.copy)
    if not run.call.options.looks:
        return Agreed(found, flags, fine=True)
    *changed, unfit = flags
    # All ranks come here alike, so one more exchange can say which leaf, on which rank
    if unfit and run.call.options.nonfinite == "raise":
        check_weight_value(outcome.weight, axes.world.rank)
        # The paths of the only tree are those that one process tells; else they begin with names
        trees, number = run.trees.trees, axes.piece_number
        layout = trees[0].sharding.layout if len(trees) == 1 else run.joined.layout
        refuse(gradient_in_words(), outcome.loss, local.reduced, layout, number, axes.world)
    return Agreed(found, changed, fine=not unfit)


@torch.no_grad()
def finish(run: GradientRun, local: LocalGradient, agreed: Agreed) -> tuple[Any, Any]:
    """The loss for all ranks, with its metrics and buffers if it has some; and the gradients.

    Collectives: one per dtype of the buffers that changed.
    """
    outcome, (means, changed, fine) = local.outcome, agreed
    # In place: the flats were made for this gradient
    total = means.weight if local.is_to_divide else None
    to_means(local.reduced, total, run.call.options.scale)
    reduced = dict(local.reduced)
    if fine and run.call.options.looks:
        for b, flat in reduced.items():
            reduced[b] = replace(flat, is_finite=True) if isinstance(flat, Rows) else flat
    buffers = run.call.buffers
    # What isn't finite leaves buffers, and the tensors of a reduction, as they were
    if fine:
        buffers = synchronize(
            buffers,
            outcome.buffers,
            changed,
            run.options.sync_buffers,
            labelled(run.options.axes.data, "gradient/buffers"),
            None if outcome.weight is None else means.num_weighty,
            outcome.is_weighty,
        )
        if run.kept is not None:
            run.kept.replace(run.reduction.kept)
    metrics = dict(means.metrics)
    mean = metrics.pop("loss")
    if run.scope is not None and run.scope.donation is not None:
        run.scope.donation.num_taken += 1
    # The step may write over params that a loss has returned as buffers
    results = run.call.results(mean, metrics, apart_from(buffers, run.flats), fine=fine)
    return results, run.trees.gradients(reduced, run.joined)


def no_updates(params: ShardedTree) -> ShardedTree:
    """A tree of updates whose leaves are None."""
    none = [None] * len(params.sharding.layout.buckets)
    return ShardedTree.of_flats(none, replace(params.holding.in_pieces, read_only=True))


def _is_sharded(node: Any) -> bool:
    return isinstance(node, ShardedTree)
