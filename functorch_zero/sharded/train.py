"""The training step for N ranks, made by `shard`. No arithmetic here, and no collective of its own:
it composes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optree
import torch
from optree import tree_map
from torch import Tensor

from ..errors import StructureError
from ..groups import labelled
from ..groups.protocol import Group
from ..layout.build import make_layout
from ..layout.flat_buffers import flats_of, grads_of, hold, pieces_of
from ..layout.layout import Layout
from ..model.deferred_init import DeferredInit
from ..optim.base import describe
from ..optim.claims.check import check_claims
from ..profiling import ranged
from ..runtime.reduce import Sink
from ..runtime.unit import Pass
from ..sharded_optim.state_plan import StatePlan
from ..step.loss import Metrics, Outcome, as_metric, call_loss, independent, joined, micro_batches
from ..step.metrics import UpdateMetrics, check_reported
from ..step.nonfinite import all_finite
from ..step.rng import replayed
from ..step.state import TrainState
from ..step.train import TrainStep, mark_trainable, with_measured
from ..tree import PyTree, content_digests, paths, select
from ..version import __version__
from . import agreement
from .agreement import agree
from .background import BackgroundTasks
from .buffers import apart, replaced, synchronize
from .checks import check_batch, check_not_empty, sharding_of
from .failures import sharing_failures
from .grad_mean import in_range, loss_seed_of, to_means
from .options import Options
from .params import make_sink, make_sources, publish
from .state import lay_out_state, shard_state, unshard_state
from .update import PreparedUpdate


class ShardedTrainStep:
    """`step(state, batch) -> (state, metrics)` on one rank of a group. Made by `shard`.

    Each rank passes its own part of the batch; what comes back is what the unsharded step makes of
    the whole.
    """

    def __init__(self, step: TrainStep, options: Options):
        self.unsharded, self.options = step, options
        self.background = BackgroundTasks()
        self._prepared: PreparedUpdate | None = None
        self._trace: list[
            str
        ] = []  # the units the last pass fetched, in order: a hint for prefetch

    @property
    def group(self) -> Group:
        """The ranks, `group.rank` and `group.size`."""
        return self.options.group

    @property
    def level(self) -> int | None:
        """0 to 3; None where `shard` was given levels by leaf."""
        return self.options.levels.number

    def init(
        self,
        params: PyTree[Tensor],
        buffers: PyTree[Tensor] | None = None,
        *,
        seed: int | None = 0,
        values: DeferredInit | None = None,
    ) -> TrainState:
        """The first state: this rank's part of copies of params and buffers, and of the optimizer's
        state.

        Every rank passes the same whole params; those on the meta device get their values, a bucket
        at a time, from `values`, made by `deferred_init`. Small exchanges compare layout,
        optimizer, options and values.

        Raises:
            MismatchError: on every rank, naming the first thing in which ranks differ.
            TransformError: a transform does what its `needs` says it does not.
            StructureError: params are no tensors, or none is trained.
        """
        with sharing_failures(*self.options.axes.groups), torch.no_grad():
            params = mark_trainable(params, self.unsharded.trainable)
            layout = self._make_layout(params)
            buffers = {} if buffers is None else buffers if values is None else values.fill(buffers)
            agree(
                labelled(self.group, "init/agreement"), self._facts(layout, params, buffers, seed)
            )
            check_claims(self.unsharded.optimizer, select(params, layout.trainable))
            made = None if values is None else Made(values)
            held = hold(params, layout, self._rank, made)
            if made is not None:
                agree(labelled(self.group, "init/agreement"), {"deferred values": made.digests})
            opt_state = self.first_optimizer_state(held, layout)
            check_reported(self.unsharded.metrics, opt_state)
            return TrainState(
                torch.zeros((), dtype=torch.int64),
                held,
                tree_map(lambda b: b.detach().clone(), buffers),
                opt_state,
                None if seed is None else torch.tensor(seed),
                self.options.sharding(layout),
                self.unsharded.finite.init(),
            )

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """One step on this rank's part of the batch.

        Collectives: those of the level's row (units' gathers and reductions), one
        all-reduce of metrics, one of the buffers that changed, and what the optimizer asks for. The
        state given is used up when donating.

        Raises:
            DonatedError: the state was used up before.
            StructureError: state, batch or loss are not what they must be.
            PeerError: another rank failed; GroupError: ranks did different things.
            CheckpointError: an `async_save` with this step has failed; on every rank, and the state
                is still good.
        """
        with sharing_failures(*self.options.axes.groups):
            sharding = sharding_of(state, self.options)
            sharding.donations.check(state.step)
            layout = sharding.layout
            prepared = self._prepare(layout)
            flats = prepared.flats(optree.tree_leaves(state.params))
            check_batch(batch, flats[0].device, self.group.rank)
            reduced, outcome, log = self._backward(state, batch, flats, layout)
            trace, self._trace = self._trace, []  # ranks that turn out to differ forget it
            policy = self.unsharded.finite
            bad = (
                [not in_range(reduced, layout, weighted=outcome.weight is not None)]
                if policy.looks
                else []
            )
            metrics, total, weighty, changed = self._report(state, outcome, log, bad)
            self._trace = trace
            fine = not policy.looks or (not changed.pop() and all_finite([metrics["loss"]]))
            finite = policy.next(state.finite, fine=fine)
            if not fine and policy.nonfinite == "raise":
                agreement.refuse(
                    int(state.step), outcome.loss, reduced, layout, self._rank, self.group
                )
            with torch.no_grad():
                to_means(
                    reduced, None if outcome.weight is None else total, policy.scale(state.finite)
                )
                group, buffers = labelled(self.group, "step/buffers"), state.buffers
                if fine:
                    own = outcome.weight is None or float(outcome.weight) != 0
                    rule = self.options.sync_buffers
                    buffers = synchronize(
                        buffers, outcome.buffers, changed, rule, group, weighty, own
                    )
                grads = grads_of(reduced, flats, layout, self._rank)
                del reduced
                view = pieces_of(flats, layout, self._rank)
                if self.options.donate:
                    buffers = apart(buffers, flats)
                    sharding.donations.take(state.step)
                update_metrics = UpdateMetrics(self.unsharded.metrics, prepared.across)
                update_metrics.see("grad_norm", lambda: grads.tree)
                update_metrics.see("param_norm", lambda: view.tree)
                params, opt_state = state.params, state.opt_state
                if fine:
                    with ranged("update"):
                        updates, opt_state = prepared.update(grads, opt_state, view)
                    update_metrics.see("update_norm", lambda: updates)
                    with ranged("publish"):
                        params = publish(
                            params,
                            flats,
                            updates,
                            layout,
                            self.options.axes,
                            donate=self.options.donate,
                        )
                else:
                    update_metrics.see(
                        "update_norm", lambda: tree_map(torch.zeros_like, grads.tree)
                    )
                metrics = with_measured(metrics, update_metrics.metrics(opt_state))
            metrics = with_measured(metrics, policy.metrics(finite))
            new = TrainState(
                state.step + 1, params, buffers, opt_state, state.seed, sharding, finite
            )
            return new, metrics

    def unshard(self, state: TrainState) -> TrainState:
        """The whole, unsharded state on every rank: copies. All-gathers what is in pieces,
        broadcasts what is owned."""
        with sharing_failures(*self.options.axes.groups), torch.no_grad():
            sharding = sharding_of(state, self.options)
            sharding.donations.check(state.step)
            return unshard_state(
                state, self._prepare(sharding.layout).plan, self.options.axes.at("state/gather")
            )

    def shard_state(self, state: TrainState) -> TrainState:
        """The inverse of `unshard`: this rank's part of a whole state that every rank holds. No
        communication."""
        if state.sharding is not None:
            raise StructureError("shard_state takes a whole state, and this one is sharded already")
        with torch.no_grad():
            layout = self._make_layout(state.params)
            plan = self._prepare(layout).plan
            return shard_state(state, plan, self.options.sharding(layout), self._rank)

    def state_plan(self, layout: Layout) -> StatePlan:
        """Which leaves of the optimizer's state follow a param, and which have an owner."""
        return self._prepare(layout).plan

    def first_optimizer_state(self, params: PyTree[Tensor], layout: Layout) -> Any:
        """The optimizer's state as `init` makes it, for params as a state holds them. What the
        optimizer asks for."""
        prepared = self._prepare(layout)
        view = pieces_of(flats_of(params, layout, self._rank), layout, self._rank)
        made = self.unsharded.optimizer.init(view.tree, prepared.across)
        return lay_out_state(made, prepared.plan, layout, self._rank)

    def _backward(
        self, state: TrainState, batch: Any, flats: list[Tensor], layout: Layout
    ) -> tuple[dict[int, Tensor], Outcome, list[str]]:
        """The reduced gradient flats, what the loss gave, and the collectives started for it."""
        log = [f"step {int(state.step)}"]
        sink = make_sink(layout, self.options.axes, log, self.options.reduce_gradients)
        outcomes: list[Outcome] = []
        try:
            for part in micro_batches(batch, self.unsharded.accumulate):
                outcome = self._on_micro_batch(state, part, flats, layout, sink, log, len(outcomes))
                outcomes.append(outcome)
                state = state._replace(buffers=outcome.buffers)
            return sink.finish(), joined(outcomes), log
        except BaseException:
            self._trace = []  # some ranks may be a pass ahead of others
            raise

    def _on_micro_batch(
        self,
        state: TrainState,
        batch: Any,
        flats: list[Tensor],
        layout: Layout,
        sink: Sink,
        log: list[str],
        i: int,
    ) -> Outcome:
        """One pass, whose gradients go to the sink."""
        device, rank, count = flats[0].device, self.group.rank, self.unsharded.accumulate
        sources = make_sources(flats, layout, self.options.axes, log, state.params)
        keeps, last = not self.options.reshard_after_forward, i == count - 1
        run = Pass(layout, sources, sink, device=device, keeps=keeps, ahead=self._trace, last=last)
        with replayed(state.seed, state.step, rank, device, i), torch.enable_grad():
            with ranged("loss"):
                outcome = call_loss(
                    self.unsharded.loss_fn, run.lazy_params(), state.buffers, batch, rank
                )
            if not any(unit.entered for unit in run.runs):
                raise independent(rank)
            check_not_empty(batch, outcome.loss, outcome.weight, rank)
            scale = self.unsharded.finite.scale(state.finite)
            seed, grad_scale = loss_seed_of(outcome, layout, self.group.size, count, scale)
            run.loss_ended(grad_scale)
            with ranged("backward"):
                torch.autograd.grad(outcome.loss, [run.anchor], seed, allow_unused=True)
        run.finish()
        self._trace = run.trace
        metrics = {name: as_metric(value) for name, value in outcome.metrics.items()}
        return outcome._replace(loss=outcome.loss.detach(), metrics=metrics)

    def _report(
        self, state: TrainState, outcome: Outcome, log: list[str], more: list[bool]
    ) -> agreement.Report:
        """What all ranks know after backward: metrics, the sum of weights, which buffers any
        changed, and `more`."""
        flags = [*replaced(state.buffers, outcome.buffers), *more, self.background.failed()]
        seen = {"loss": outcome.loss, **outcome.metrics}
        report = agreement.average(
            seen, outcome.weight, labelled(self.group, "step/metrics"), log, flags
        )
        self.background.raise_if(report.flags.pop())
        return report

    @property
    def _rank(self) -> int:
        """This rank's number among the pieces of a bucket."""
        return self.options.axes.number

    def _make_layout(self, params: PyTree[Tensor]) -> Layout:
        self.options.levels.check(params)
        num_ranks = self.options.axes.optimizer.size
        return make_layout(
            params,
            num_ranks,
            trainable=lambda path, leaf: leaf.requires_grad,
            cut=self.options.cut_of,
        )

    def _prepare(self, layout: Layout) -> PreparedUpdate:
        known = self._prepared
        if known is None or (known.layout is not layout and known.layout != layout):
            self._prepared = known = PreparedUpdate(self.unsharded, layout, self.options)
        return known

    def _facts(
        self, layout: Layout, params: PyTree[Tensor], buffers: PyTree[Tensor], seed: int | None
    ) -> dict[str, Any]:
        """What ranks must agree on."""
        o = self.options
        return {
            "functorch_zero": __version__,
            "torch": torch.__version__,
            "ranks": self.group.size,
            "level": o.levels.describe(),
            "accumulate": self.unsharded.accumulate,
            "metrics": list(self.unsharded.metrics),
            "finite": describe(self.unsharded.finite),
            "options": {
                "donate": o.donate,
                "sync_buffers": o.sync_buffers,
                "reshard_after_forward": o.reshard_after_forward,
                "reduce_gradients": o.reduce_gradients,
                "ranks of the shard axis": o.axes.shard.size,
                "state_axes": "both" if o.axes.both else "shard",
            },
            "optimizer": describe(self.unsharded.optimizer),
            "layout": layout.describe(),
            "level of leaves": {leaf.path: leaf.cut.level for leaf in layout.leaves},
            "buffers": {
                path: [list(b.shape), str(b.dtype)]
                for path, b in zip(paths(buffers), optree.tree_leaves(buffers), strict=True)
            },
            "values": content_digests(params),
            "values of buffers": {} if o.sync_buffers == "local" else content_digests(buffers),
            "seed": seed,
        }


class Made:
    """`DeferredInit.fill_leaves`, and digests of all that it gives."""

    def __init__(self, values: DeferredInit):
        self._values = values
        self.digests: dict[str, Any] = {}

    def __call__(self, names: Sequence[str], leaves: Sequence[Tensor]) -> list[Tensor]:
        made = self._values.fill_leaves(names, leaves)
        self.digests |= content_digests(dict(zip(names, made, strict=True)))
        return made
