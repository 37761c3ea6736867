"""The phases of a sharded step: functions from one frozen value to the next.

    Run ── differentiate ──> LocalResults ── agree_on ──> Agreed ── advance ──> state, metrics

`ShardedTrainStep` runs them one after the other. A plan runs the same functions on tensors without
values, and looks on between them.

Note [before the first write]: `advance` is the first to write to the state that the step was given,
and only when donating. All ranks have agreed by then. So whatever fails before, on any rank, leaves
every rank a good state, and the step can be tried again. Afterwards the given state is used up.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from optree import tree_map
from torch import Tensor

from ..groups import labelled
from ..layout.extent import Rows, elements
from ..layout.layout import Layout
from ..layout.sharded_tree import ShardedTree, pieces_of
from ..layout.sharding import Sharding
from ..model.untouched import is_looked_at
from ..optim.across import Across
from ..profiling import ranged
from ..runtime.prefetch import PrefetchOrder
from ..runtime.reduce import Kept
from ..sharded_optim.sharded_state import ShardedOptState
from ..step.loss import Metrics, Outcome
from ..step.metrics import UpdateMetrics
from ..step.nonfinite import NonFiniteState
from ..step.rng import replayed
from ..step.rows import leading_sizes, total_size
from ..step.state import State, TrainValue
from ..step.train import TrainStep, merged_metrics
from ..step.weights import check_weight_value
from ..tree import PyTree
from .average import report_of
from .background import BackgroundTasks
from .buffers import apart_from, check_synchronizable, synchronize
from .equal_batches import EqualBatches
from .grad_mean import in_range, to_means
from .nonfinite import refuse
from .options import Options
from .params import grads_like, make_reduction
from .parts import ReductionParts
from .passes import LossOnData, Passed, run_passes
from .placed import emptied
from .publish import flats_of_pass, publish


class Updater(Protocol):
    """The optimizer's update on this rank's pieces."""

    @property
    def across(self) -> Across:
        """The answers to the optimizer's questions."""
        ...

    @property
    def takes_rows(self) -> bool:
        """Whether gradients of tables may be rows."""
        ...

    def update(
        self,
        grads: ShardedTree,
        state: ShardedOptState,
        params: ShardedTree,
        *,
        donate: bool,
        look: bool,
    ) -> tuple[ShardedTree | None, ShardedOptState]:
        """The updates and the optimizer's next state; None where the params hold the sums
        already. The state is given as it lies, and the next one is for `placed`.

        Gradients, params and updates are this rank's pieces, (n,) per leaf. When donating, all that
        is given may be written over.
        """
        ...

    def placed(
        self, state: ShardedOptState, old: ShardedOptState | None = None, *, look: bool = True
    ) -> ShardedOptState:
        """The optimizer's state, where it lies between steps: over the tensors of `old`, if given.
        With `look`, its place is asked whether it has lost anything."""
        ...


@dataclass(frozen=True)
class Run:
    """One step on one rank: its arguments, and the parts that follow from the layout."""

    step: TrainStep
    options: Options  # of `shard`
    state: State  # as given; see Note [before the first write]
    batch: Any  # this rank's part
    sharding: Sharding
    # Those that hold the params between steps, (numel,) or (piece,), in the order of the buckets
    flats: list[Tensor]
    updater: Updater  # prepared for this layout
    parts: ReductionParts  # the same, for what the reduction keeps

    @property
    def layout(self) -> Layout:
        return self.sharding.layout

    @property
    def piece_number(self) -> int:
        """This rank's number among the pieces of a bucket."""
        return self.options.axes.piece_number


class LocalResults(NamedTuple):
    """The results of the loss on this rank's part of the batch."""

    # By bucket: sums over ranks of gradients, (piece,), (numel,) or rows of a table
    reduced: dict[int, Tensor | Rows]
    kept: dict[int, Kept]  # by bucket: the tensors that the reduction keeps for the next step
    passed: Passed
    fine: bool  # loss and reduced gradients are finite, or the step doesn't look
    log: list[str]  # the step's number, and the collectives started since


class Agreed(NamedTuple):
    """The agreement of all ranks, once each has told the others; the same on every rank."""

    metrics: Metrics  # weighted means over ranks
    weight: Tensor  # 0-d float64, the sum of the weights of the batch's parts
    num_weighty: Tensor  # 0-d float64: parts whose weight isn't 0
    changed: list[bool]  # by buffer: whether any rank's loss has changed it
    fine: bool  # loss and gradients are finite, or nobody looks
    finite: NonFiniteState | None  # of the next state


def differentiate(run: Run, order: PrefetchOrder) -> LocalResults:
    """Run the loss forward and backward, micro-batch by micro-batch.

    Collectives: the units' gathers and reductions, as the level's row says, and one all-reduce of
    metrics. Gradients are reduced, and metrics averaged, while backward runs.
    """
    # Ranks at different steps, or in other collectives, find out in `agree_on`
    log = [f"step {int(run.state.step)}"]
    options = run.options
    kept = run.parts.kept_in(run.state.parts)  # by bucket, from the step before
    # One for all micro-batches: gradients add up in it
    reduction = make_reduction(run.layout, options, log, kept, in_rows=run.updater.takes_rows)
    state, step, device = run.state, run.step, run.flats[0].device
    # Ranks of the same data draw the same numbers, so they find the same loss
    part = options.axes.data.rank

    def stream(micro: int) -> AbstractContextManager[None]:
        return replayed(state.seed, state.step, part, device, micro)

    given = LossOnData(
        step.loss_fn,
        state.buffers,
        run.batch,
        step.accumulate,
        stream,
        step.reminder,
        scale=step.policy.scale(state.finite),
    )
    look = is_looked_at(int(state.step))
    flats = flats_of_pass([state.params], order, options.axes, log, options.places.params)
    passed = run_passes(
        given,
        flats,
        run.layout,
        reduction,
        order,
        options,
        log,
        labelled(options.group, "step/metrics"),
        look=look,
        held=state.params,
    )
    # The one wait for the last reductions; from here on gradients are sums over ranks
    reduced = reduction.finish()
    # The host waits for the device there, so it asks only if the step looks
    fine = not run.step.policy.looks or in_range(
        reduced, run.layout, passed.outcome, is_to_divide=passed.is_to_divide
    )
    return LocalResults(reduced, reduction.kept, passed, fine, log)


def agree_on(
    run: Run, local: LocalResults, background: BackgroundTasks, batches: EqualBatches
) -> Agreed:
    """Tell all ranks this one's findings, and learn theirs. One all-reduce of words.

    Nothing of the state has been written to by then: see Note [before the first write].

    Raises:
        Exception: a background task's own, where one has failed; PeerError on the other ranks.
        StructureError: this rank's loss has changed a buffer's shape or dtype, or backward has
            written to one.
        GroupError: ranks are at different steps, or have started different collectives.
        MismatchError: ranks of the same data have found different losses or metrics.
        NonFiniteError: loss or gradients are not finite, and the step refuses that.
    """
    (outcome, means, changes, _, exchanged), policy = local.passed, run.step.policy
    group, axes = run.options.group, run.options.axes
    old, new = run.state.buffers, outcome.buffers
    check_synchronizable(old, new, run.options.sync_buffers, axes.data, group.rank)
    # In the order in which they are taken apart below; all ranks have as many buffers
    look = is_looked_at(int(run.state.step))
    digest = batches.digest(run.batch, look=look)
    flags = [
        *changes.flags(group.rank, look=look),
        not local.fine,
        background.failed(),
    ]
    report = report_of(
        means,
        labelled(group, "step/metrics"),
        local.log,
        flags,
        axes.copy,
        total_size(run.batch),
        digest,
    )
    *changed, unfit, failed = report.flags
    # Before the numbers are looked at: whatever they are, the task's error is told
    background.raise_if(failed)
    # A loss of all rows is right by any number of them
    if not exchanged:
        rows = leading_sizes(run.batch)
        run.step.reminder.compare_ranks(rows, outcome.weight, report.sizes, group.rank)
    batches.note(digest, report.same_batch, group.rank)
    # All ranks come here alike, so one more exchange can say which leaf, on which rank
    if unfit and policy.nonfinite == "raise":
        check_weight_value(outcome.weight, group.rank)
        what = f"step {int(run.state.step)}"
        refuse(what, outcome.loss, local.reduced, run.layout, run.piece_number, group)
    finite = policy.next(run.state.finite, fine=not unfit)
    return Agreed(report.metrics, report.weight, report.num_weighty, changed, not unfit, finite)


@torch.no_grad()
def advance(run: Run, local: LocalResults, agreed: Agreed) -> tuple[State, Metrics]:
    """Update the params, and publish them to the ranks that hold them between steps. Returns the
    next state and the step's metrics.

    Collectives: one per dtype of the buffers that changed, those that the optimizer asks for, and
    the level's gathers of the new params. One more for the norms, if metrics ask for them.
    """
    state, options = run.state, run.options
    scale = run.step.policy.scale(state.finite)
    # In place: these flats are the reduction's own
    to_means(local.reduced, agreed.weight if local.passed.is_to_divide else None, scale)
    buffers = _next_buffers(run, local.passed.outcome, agreed)
    params, opt_state = state.params, state.value.opt_state
    # From here on the given state is used up: see Note [before the first write]
    if options.donate:
        buffers = apart_from(buffers, run.flats)
        run.sharding.donations.take()
        # A skipped step changes no params, and what was published stays
        params = params.handed_on(params.published(trained=not agreed.fine))
    # This rank's pieces: views of what is held
    view = pieces_of(run.flats, params.holding)
    grads = grads_like(params, local.reduced)

    # Norms of gradients and params are taken before the update, which may write over both
    measured = UpdateMetrics(run.step.metrics, run.updater.across)
    measured.see("grad_norm", lambda: grads.local_rows)
    measured.see("param_norm", lambda: view.local_tree)
    look = is_looked_at(int(state.step))
    if agreed.fine:
        with ranged("update"):
            updates, opt_state = run.updater.update(
                grads, opt_state, view, donate=options.donate, look=look
            )
        measured.see("update_norm", lambda: None if updates is None else updates.local_rows)
        with ranged("publish"):
            params = publish(
                params,
                run.flats,
                updates,
                options.axes,
                donate=options.donate,
                empty=emptied(options.places.params, run.layout),
            )
    # A skipped step: params and optimizer state stay, an update of zeros is reported
    else:
        own = tree_map(elements, grads.local_rows)
        measured.see("update_norm", lambda: tree_map(torch.zeros_like, own))

    metrics = merged_metrics(agreed.metrics, measured.metrics(opt_state.as_it_lies))
    metrics = merged_metrics(metrics, run.step.policy.metrics(agreed.finite))
    # Last, since metrics are read off the state beside the params
    old: ShardedOptState = state.value.opt_state
    if agreed.fine:
        opt_state = run.updater.placed(opt_state, old if options.donate else None, look=look)
    # A skipped step's, too, is another node
    elif options.donate:
        opt_state = ShardedOptState(old.as_it_lies, old.holding, old.homes())
    if options.donate:
        old.use_up()
    new = State(
        step=state.step + 1,
        value=TrainValue(params, buffers, opt_state, agreed.finite),
        seed=state.seed,
        sharding=run.sharding,
        parts=run.parts.parts_of(local.kept) if agreed.fine else state.parts,
    )
    return new, metrics


def _next_buffers(run: Run, outcome: Outcome, agreed: Agreed) -> PyTree[Tensor]:
    """The buffers after the step, the same on every rank by the rule; a skipped step keeps them."""
    if not agreed.fine:
        return run.state.buffers
    group = labelled(run.options.axes.data, "step/buffers")
    return synchronize(
        run.state.buffers,
        outcome.buffers,
        agreed.changed,
        run.options.sync_buffers,
        group,
        None if outcome.weight is None else agreed.num_weighty,
        outcome.is_weighty,
    )
