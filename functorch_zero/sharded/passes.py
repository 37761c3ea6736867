"""Passes: a loss forward and backward through the units of sharded params, micro-batch by
micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch_private import hooks_registered
from ..errors import StructureError, explain
from ..groups.protocol import Group
from ..in_a_loss import hiding_trees
from ..layout.layout import Layout
from ..layout.sharded_tree import ShardedTree
from ..model.buffer_copies import check_kept_in_backward
from ..model.casting import mark_policies
from ..profiling import NOTHING, ranged
from ..runtime.prefetch import PrefetchOrder
from ..runtime.reduce import GradientReduction
from ..runtime.two_seeds import TwoSeeds
from ..runtime.unit import Pass
from ..runtime.unshard import UnitFlats
from ..step.backward import nodes_behind, noting_lost_graphs, refuse_reentrant_checkpoints
from ..step.loss import LossFn, Outcome, as_metric, call_loss, independent
from ..step.micro_batches import joined, micro_batches
from ..step.reminder import Reminder
from ..step.rng import MicroStreams
from ..step.scope import given_batch
from ..step.weights import check_weight_value, is_on_device
from ..tree import PyTree
from .average import MeansUnderWay, start_means
from .batch_on_ranks import BatchOnRanks
from .buffers import Changes, ask_changes
from .checks import check_not_empty
from .grad_mean import LossSeed, loss_seed_of
from .options import Options
from .params import make_unit_flats


def run_pass(
    loss: Callable[[PyTree[Tensor]], Outcome],
    seed_of: Callable[[Outcome, Pass], LossSeed],
    before_backward: Callable[[Outcome], None],
    flats: Sequence[UnitFlats],
    layout: Layout,
    reduction: GradientReduction,
    order: PrefetchOrder,
    options: Options,
    *,
    device: torch.device,
    look: bool,
    first: bool,
    last: bool,
    batch: BatchOnRanks,
) -> None:
    """Run a loss forward and backward. Its gradients go to the reduction, while backward runs.

    Collectives: the units' gathers and reductions, as the level's row says.

    Args:
        loss: called with lazy parameters, in the structure of the layout.
        seed_of: gives this rank's share of the mean, from the loss's outcome and the pass. It may
            raise, where it refuses the outcome.
        before_backward: takes the loss's outcome, which is still in its autograd graph, where all
            ranks are between the same collectives. It may start some.
        flats: each unit's; some may be here since an earlier pass.
        layout: of the params.
        reduction: takes the gradients. The caller finishes it, after its last pass.
        order: the units as the last pass gathered them. This pass's own order takes its place.
        options: those of `shard`.
        device: of the leaves.
        look: whether slow questions about the loss are asked; see `is_looked_at`.
        first: whether no other pass has given gradients to the same reduction.
        last: whether no other pass will.
        batch: the loss's, by which it finds the rows of other ranks.

    Raises:
        StructureError: the loss depends on no trained leaf.
    """
    rank = options.axes.world.rank
    one_pass = Pass(
        layout,
        flats,
        reduction,
        device=device,
        order=order,
        overlap=options.overlap,
        keeps=not options.reshard_after_forward,
        last=last,
        look=look,
        places=options.places.saved,
    )
    batch.around = one_pass
    # Whatever mode the caller is in
    try:
        with torch.enable_grad(), given_batch(batch):
            params, num_hooks = one_pass.lazy_params(), hooks_registered()
            mark_policies(params)
            with ranged("loss"), hiding_trees(), one_pass.around_loss():
                outcome = _called(loss, params, rank)
            # It requires grad, but by something else than a trained leaf
            if not one_pass.entered:
                raise independent(rank)
            roots = one_pass.take_roots()
            nodes = nodes_behind(outcome.loss, *roots) if look else []
            if look:
                refuse_reentrant_checkpoints(nodes, rank)
                check_weight_value(outcome.weight, rank)
            seed, scale = seed_of(outcome, one_pass)
            # A backward until here was the loss's own; from here on it is the pass's
            one_pass.loss_ended(scale)
            before_backward(outcome)
            trying: AbstractContextManager[None] = NOTHING
            # One rank begins backward as one process does
            if look and options.axes.data.size > 1:
                one_pass.trial = TwoSeeds(device, rank)
                hooked = hooks_registered() > num_hooks
                trying = one_pass.trial.trying(nodes, outcome.loss, seed, hooked=hooked)
            with ranged("backward"), trying:
                # The anchor has no gradient: asking for it makes autograd run each unit's node
                results, seeds = [*roots], [*map(torch.zeros_like, roots)]
                # Where it counts for nothing, its gradients may be NaN; others' must not be
                if not roots or is_on_device(outcome.weight) or outcome.is_weighty:
                    results.append(outcome.loss)
                    seeds.append(seed)
                torch.autograd.grad(results, [one_pass.anchor], seeds, allow_unused=True)
                del roots, results
            # Units were entered, and nothing of them led to the loss
            if not one_pass.reached:
                raise independent(rank)
            check_kept_in_backward(outcome.kept, rank)
        # Uses that backward never reached get their zeros here
        one_pass.finish()
    except BaseException:
        one_pass.abandon()
        raise
    # Units that are here since an earlier pass were gathered before those of this one
    stayed = [] if first or options.reshard_after_forward else order.units
    # Only after a pass that went well
    order.record([*stayed, *one_pass.following.gathered], one_pass.uses)


class LossOnData(NamedTuple):
    """A loss, and this rank's data."""

    loss_fn: LossFn
    buffers: PyTree[Tensor]
    data: Any  # the batch; or the arguments of a loss that takes none, which are never cut
    accumulate: int  # micro-batches per batch
    streams: MicroStreams  # their random numbers
    reminder: Reminder  # warns of unequal sizes, and of lost buffers
    scale: float | None = None  # of the loss; None: it isn't scaled


class Passed(NamedTuple):
    """The results of all micro-batches on this rank, known since the last loss. Backward has hidden
    what is under way."""

    outcome: Outcome  # of all as one, without graphs
    means: MeansUnderWay  # of its loss, metrics and weight
    changes: Changes  # of its buffers
    is_divided: bool  # whether gradients were divided by the weights' sum before they were reduced
    exchanged: bool  # whether the loss has seen rows of other ranks

    @property
    def is_to_divide(self) -> bool:
        """Whether reduced gradients are still to be divided by the weights' sum."""
        return self.outcome.weight is not None and not self.is_divided


def run_passes(
    given: LossOnData,
    flats: Sequence[Tensor],
    layout: Layout,
    reduction: GradientReduction,
    order: PrefetchOrder,
    options: Options,
    log: list[str],
    group: Group,
    *,
    look: bool,
    held: ShardedTree | None = None,
) -> Passed:
    """One pass per micro-batch, whose gradients add up in the reduction. With
    `reshard_after_forward=False` each unit is gathered once for all of them.

    Args:
        given: the loss, and this rank's data.
        flats: bucket by bucket, as of `flats_of_pass`.
        log: the step, and the collectives started so far. The passes add their own, and ranks
            compare them afterwards.
        group: for the means.
        held: leaves that were cut from the flats already; None: they are cut anew.
        layout, reduction, order, options, look: see `run_pass`.
    """
    axes, rank = options.axes, options.axes.world.rank
    parts = micro_batches(given.data, given.accumulate)
    # Trees that are only read are frozen here
    buckets = zip(flats, layout.buckets, strict=True)
    trained = [flat for flat, bucket in buckets if bucket.trainable]
    outcomes: list[Outcome] = []  # of the losses so far
    found: list[Passed] = []  # one, once the last loss is known

    def of_units() -> list[UnitFlats]:
        return make_unit_flats(flats, layout, axes, log, held)

    kept = None if options.reshard_after_forward else of_units()

    def passed(outcome: Outcome, *, exchanged: bool) -> Passed:
        metrics = {"loss": outcome.loss, **outcome.metrics}
        means = start_means(metrics, outcome.weight, group, outcome.loss.device)
        changes = ask_changes(given.buffers, outcome.buffers, options.sync_buffers, axes.data)
        divides = reduction.keeps and outcome.weight is not None
        # What is kept is added to gradients of other weights, so it must be of means
        if divides:
            reduction.divisor = means.divisor(axes.copy.num)
        return Passed(outcome, means, changes, divides, exchanged)

    def on_micro_batch(i: int, buffers: PyTree[Tensor]) -> None:
        part, last = parts[i], i == len(parts) - 1
        batch = BatchOnRanks(axes, log, part, num_micro=len(parts))

        def loss(params: PyTree[Tensor]) -> Outcome:
            return call_loss(given.loss_fn, params, buffers, part, rank, differentiated=trained)

        def seed_of(outcome: Outcome, one_pass: Pass) -> LossSeed:
            if not batch.received_nonfinite():
                check_not_empty(part, outcome.loss, outcome.weight, rank)
            batch.check_weight(outcome.weight, look=look)
            return loss_seed_of(
                outcome,
                layout,
                axes.data.size,
                given.accumulate,
                given.scale,
                exchanged=one_pass.mixes,
            )

        def before_backward(outcome: Outcome) -> None:
            given.reminder.lost_buffers(outcome.lost, rank)
            outcomes.append(_detached(outcome))
            if last:
                found.append(passed(joined(outcomes), exchanged=batch.exchanged))
                return
            keeps_early = reduction.keeps and reduction.reduces_before_the_end
            if keeps_early and outcome.weight is not None:
                raise _weights_come_late(rank)

        with given.streams(i), noting_lost_graphs():
            run_pass(
                loss,
                seed_of,
                before_backward,
                of_units() if kept is None else kept,
                layout,
                reduction,
                order,
                options,
                device=flats[0].device,
                look=look,
                first=i == 0,
                last=last,
                batch=batch,
            )

    buffers = given.buffers
    for i in range(len(parts)):
        on_micro_batch(i, buffers)
        buffers = outcomes[-1].buffers  # each micro-batch is given those of the one before
    given.reminder.compare_parts(parts, outcomes[0].weight, rank)
    return found[0]


def _weights_come_late(rank: int) -> StructureError:
    return StructureError(
        explain(
            "the reduction keeps tensors of means, and the weights of later micro-batches aren't "
            "known when those of earlier ones are reduced",
            rank=rank,
            remedy='reduce_gradients="once", a loss without a weight, or a reduction that keeps '
            "nothing",
        )
    )


def _detached(outcome: Outcome) -> Outcome:
    """The outcome without its graph, which goes before the next micro-batch begins."""
    metrics = {name: as_metric(value) for name, value in outcome.metrics.items()}
    return outcome._replace(loss=outcome.loss.detach(), metrics=metrics, kept=(), lost=())


def _called(
    loss: Callable[[PyTree[Tensor]], Outcome], params: PyTree[Tensor], rank: int
) -> Outcome:
    """The loss's outcome, with an error that explains where TorchScript or `nn.Parameter` was given
    a lazy param."""
    try:
        return loss(params)
    except RuntimeError as error:
        if "Creating a Parameter" in str(error) and "LazyParam" in str(error):
            raise StructureError(
                explain(
                    "nn.Parameter was given a sharded param in the loss",
                    expected="a whole leaf",
                    got="a LazyParam",
                    rank=rank,
                    remedy="give it fz.unshard(param). It makes a leaf of its own, so no gradient "
                    "comes to the param",
                )
            ) from error
        if "TorchScript" not in str(error):
            raise
        raise StructureError(
            explain(
                "a scripted or traced function failed in the loss, which may have been given a "
                "sharded param",
                expected="whole tensors: TorchScript sees no operator that gathers",
                rank=rank,
                remedy="give it fz.unshard(param), or don't script it",
            )
        ) from error
