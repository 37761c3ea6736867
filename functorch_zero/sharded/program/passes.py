"""Passes: a loss forward and backward through the units of sharded params, micro-batch by
micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from ..._torch_private import hooks_registered
from ...errors import StructureError
from ...groups import labelled
from ...in_a_loss import hiding_trees
from ...model.buffer_copies import check_left_in_backward
from ...profiling import NOTHING, ranged
from ...runtime.reduce import GradientReduction
from ...runtime.two_seeds import TwoSeeds
from ...runtime.unit import Pass
from ...runtime.unshard import UnitFlats
from ...step.backward import nodes_behind, noting_lost_graphs, refuse_reentrant_checkpoints
from ...step.loss import Outcome, call_loss, independent
from ...step.micro_batches import joined, micro_batches
from ...step.scope import given_batch
from ...step.weights import is_on_device
from ...tree import PyTree
from ..average import start_means
from ..batch_on_ranks import BatchOnRanks
from ..buffers import ask_changes
from ..grad_mean import in_range, loss_seed_of
from ..options import Options
from ..params import make_unit_flats
from .gradient import GradientRun, LocalGradient


def differentiate(run: GradientRun) -> LocalGradient:
    """Run the loss forward and backward, one pass per micro-batch, whose gradients add up in the
    reduction. With `reshard_after_forward=False` each unit is gathered once for all of them.

    Collectives: the units' gathers and reductions, as the levels' rows say, and one all-reduce of
    metrics.

    Raises:
        StructureError: the loss depends on no trained leaf.
    """
    parts = micro_batches(run.call.data, run.call.options.accumulate)
    outcomes: list[Outcome] = []  # of the losses so far
    axes, layout = run.options.axes, run.joined.layout
    local, buffers, units = None, run.call.buffers, list[UnitFlats]()
    for i, part in enumerate(parts):
        with run.streams(i), noting_lost_graphs():
            if not units or run.options.reshard_after_forward:
                units = make_unit_flats(run.flats, layout, axes, run.log)
            local = _run_pass(run, units, part, buffers, outcomes, len(parts))
        buffers = outcomes[-1].buffers  # each micro-batch is given those of the one before
    run.reminder.compare_parts(parts, outcomes[0].weight, axes.world.rank)
    assert local is not None
    local = local._replace(reduced=run.reduction.finish())
    if not run.call.options.looks:
        return local
    # The host waits for the device
    is_to_divide = local.is_to_divide
    fine = in_range(local.reduced, layout, local.outcome, is_to_divide=is_to_divide)
    return local._replace(fine=fine)


def _run_pass(
    run: GradientRun,
    units: Sequence[UnitFlats],
    part: Any,
    buffers: PyTree[Any],
    outcomes: list[Outcome],
    num_micro: int,
) -> LocalGradient | None:
    """Run the loss forward and backward on a micro-batch. Its gradients go to the reduction, while
    backward runs. Returns the results of all micro-batches, known since the last loss; None: more
    follow.

    Args:
        units: each unit's flats; some may be here since an earlier pass.
        outcomes: of the micro-batches before. It takes this one's.
    """
    axes, options, rank = run.options.axes, run.options, run.options.axes.world.rank
    first, last = not outcomes, len(outcomes) == num_micro - 1
    one_pass = Pass(
        run.joined.layout,
        units,
        run.reduction,
        device=run.flats[0].device,
        order=run.order,
        overlap=options.overlap,
        keeps=not options.reshard_after_forward,
        last=last,
        look=run.look,
        places=options.places.saved,
    )
    batch = BatchOnRanks(axes, run.log, part, one_pass, num_micro=num_micro)
    # Whatever mode the caller is in
    try:
        with torch.enable_grad(), given_batch(batch):
            params, num_hooks = one_pass.lazy_params(), hooks_registered()
            loss_fn, given = run.call.loss_fn(look=run.look, rank=rank), run.trees.with_lazy(params)
            explaining = _explaining_lazy_params(rank)
            with ranged("loss"), hiding_trees(), one_pass.around_loss(), explaining:
                outcome = call_loss(loss_fn, given, buffers, part, rank, dry=run.is_dry)
            # It requires grad, but by something else than a trained leaf
            if not one_pass.entered:
                raise independent(rank)
            roots = one_pass.take_roots()
            nodes = nodes_behind(outcome.loss, *roots) if run.look else []
            if run.look:
                refuse_reentrant_checkpoints(nodes, rank)
            values = {"loss": outcome.loss, **outcome.metrics}
            batch.check(values, outcome.weight, look=run.look)
            seed, scale = loss_seed_of(
                outcome,
                run.joined.layout,
                axes.data.size,
                run.call.options,
                exchanged=one_pass.mixes,
            )
            # A backward until here was the loss's own; from here on it is the pass's
            one_pass.loss_ended(scale)
            run.reminder.lost_buffers(outcome.lost, rank)
            outcomes.append(_detached(outcome))
            local = None
            if last:
                # Here all ranks are between the same collectives, and backward hides their way
                whole, exchanged = joined(outcomes), batch.exchanged
                local = _sent(whole, run.call.buffers, options, run.reduction, exchanged=exchanged)
            elif outcome.weight is not None:
                _check_weights_are_known(run.reduction, rank)
            trying: AbstractContextManager[None] = NOTHING
            # One rank begins backward as one process does
            if run.look and axes.data.size > 1:
                one_pass.trial = TwoSeeds(run.flats[0].device, rank)
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
            check_left_in_backward(outcome.left, rank)
        # Uses that backward never reached get their zeros here
        one_pass.finish()
    except BaseException:
        one_pass.abandon()
        raise
    # Units that are here since an earlier pass were gathered before those of this one
    stayed = [] if first or options.reshard_after_forward else run.order.units
    # Only after a pass that went well
    run.order.record([*stayed, *one_pass.following.gathered], one_pass.uses)
    return local


def _sent(
    whole: Outcome,
    buffers: PyTree[Any],
    options: Options,
    reduction: GradientReduction,
    *,
    exchanged: bool,
) -> LocalGradient:
    """The results of all micro-batches' losses, which set out to the other ranks.

    Args:
        buffers: those that the first loss was given.
        exchanged: whether a loss has seen rows of other ranks.
    """
    axes, metrics = options.axes, {"loss": whole.loss, **whole.metrics}
    group = labelled(axes.world, "gradient/metrics")
    means = start_means(metrics, whole.weight, group, whole.loss.device)
    changes = ask_changes(buffers, whole.buffers, options.sync_buffers, axes.data)
    divides = reduction.keeps and whole.weight is not None
    # What is kept is added to gradients of other weights, so it must be of means
    if divides:
        reduction.divisor = means.divisor(axes.copy.num)
    return LocalGradient({}, whole, means, changes, divides, exchanged)


def _check_weights_are_known(reduction: GradientReduction, rank: int) -> None:
    """After a loss with a weight, and before the last one: raise if gradients are reduced by now
    that are to be divided by the sum of all weights."""
    if reduction.keeps and reduction.reduces_before_the_end:
        raise StructureError(
            "the reduction keeps tensors of means, and the weights of later micro-batches aren't "
            "known when those of earlier ones are reduced",
            rank=rank,
            remedy='reduce_gradients="once", a loss without a weight, or a reduction that keeps '
            "nothing",
        )


def _detached(outcome: Outcome) -> Outcome:
    """The outcome without its graph, which goes before the next micro-batch begins."""
    return outcome._replace(loss=outcome.loss.detach(), left=(), lost=())


@contextmanager
def _explaining_lazy_params(rank: int) -> Iterator[None]:
    """Around a loss: an error explains where TorchScript or `nn.Parameter` was given a lazy
    param."""
    try:
        yield
    except RuntimeError as error:
        if "Creating a Parameter" in str(error) and "LazyParam" in str(error):
            raise StructureError(
                "nn.Parameter was given a sharded param in the loss",
                expected="a whole leaf",
                got="a LazyParam",
                rank=rank,
                remedy="give it fz.unshard(param). It makes a leaf of its own, so no gradient "
                "comes to the param",
            ) from error
        if "TorchScript" not in str(error):
            raise
        raise StructureError(
            "a scripted or traced function failed in the loss, which may have been given a "
            "sharded param",
            expected="whole tensors: TorchScript sees no operator that gathers",
            rank=rank,
            remedy="give it fz.unshard(param), or don't script it",
        ) from error
