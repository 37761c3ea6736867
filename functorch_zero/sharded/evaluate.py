"""The evaluation step for N ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..groups import labelled
from ..groups.protocol import Group
from ..layout.layout import Layout
from ..layout.sharded_tree import in_a_loss, pieces_of
from ..model.casting import mark_policies
from ..model.untouched import is_looked_at
from ..runtime.prefetch import PrefetchOrder
from ..runtime.unit import Pass
from ..step.evaluate import EvalStep, call_eval, total_weight
from ..step.loss import check_weight_value
from ..step.rng import replayed
from ..step.state import State
from ..step.weight_reminder import total_size
from . import agreement
from .buffers import apart
from .checks import check_batch, own_params, sharding_of
from .failures import sharing_failures
from .options import Options
from .params import held_flats_of, make_unit_flats
from .storage import fetched


class ShardedEvalStep:
    """`step(state, batch) -> metrics` on one rank of a group. Made by `shard`."""

    def __init__(self, step: EvalStep, options: Options):
        self.unsharded, self.options = step, options
        self.gather_order = PrefetchOrder(
            options.group
        )  # in which the last evaluation gathered units

    @property
    def group(self) -> Group:
        """The ranks."""
        return self.options.group

    @torch.no_grad()
    def __call__(self, state: State, batch: Any) -> Any:
        """Metrics of this rank's part of the batch, averaged over ranks, and this rank's rows if
        the evaluation gives any.

        Collectives: at level 3 one all-gather per bucket, on use of its unit; one all-reduce of the
        metrics; and those of `publish`, where other params than the state's are chosen.
        """
        failures = sharing_failures(*self.options.axes.groups, call="evaluation", state=state)
        with failures, self.gather_order.forgotten_on_failure():
            sharding = sharding_of(state, self.options)
            layout, axes, gather = sharding.layout, self.options.axes, self.options.gather
            # Per bucket, as held between steps: (piece,) at level 3, else (numel,)
            state = state.replace(params=own_params(state, self.group.rank))
            flats = state.params.flats()
            device = flats[0].device
            check_batch(batch, device, self.group.rank)
            # Ranks compare it with their metrics
            log = [f"evaluation at step {int(state.step)}"]
            # An average, say, in flats of its own: the state's params stay
            if self.unsharded.params is not None:
                flats = self._chosen_flats(state, layout, flats)
            units = make_unit_flats(flats, layout, axes, log, gather)
            overlap = self.options.overlap
            # Without a reduction leaves bring no gradients: units are used and freed
            look = is_looked_at(next(self.unsharded.calls))
            run = Pass(
                layout,
                units,
                None,
                device=device,
                order=self.gather_order,
                overlap=overlap,
                look=look,
            )
            # The numbers that a training step draws from this state, so evaluations repeat
            random = replayed(state.seed, state.step, axes.data.rank, device)
            # As in training, a backward of the loss's own runs in this thread: it may gather
            with random, torch.autograd.set_multithreading_enabled(False):
                params = run.lazy_params()
                mark_policies(params)
                with in_a_loss():
                    found = call_eval(
                        self.unsharded.fn, params, state.buffers, batch, self.group.rank
                    )
            run.finish()
            if look:
                check_weight_value(found.weight, self.group.rank)
            group = labelled(self.group, "evaluation/metrics")
            size = total_size(batch)
            report = agreement.average(
                found.metrics, found.weight, group, log, copy=axes.copy, size=size
            )
            reminder = self.unsharded.reminder
            reminder.compare_ranks(batch, found.weight, report.mean_size, group.rank)
            self.gather_order.record(run.following.gathered, run.uses)
            weight = None if found.weight is None else report.weight
            metrics = report.metrics
            metrics |= total_weight(self.unsharded.metrics, metrics, weight, group.rank)
            # The next step may write over what rows took from the params
            return found._replace(rows=apart(found.rows, flats)).with_rows(metrics)

    def _chosen_flats(self, state: State, layout: Layout, flats: list[Tensor]) -> list[Tensor]:
        """The flats of the params that `eval_step(params=...)` chooses by the optimizer's state, an
        average say; as held between steps. Collectives: those of `publish`."""
        pieces = pieces_of(flats, state.params.holding)
        opt_state = fetched(self.options.state_storage, state.opt_state)
        chosen = self.unsharded.chosen(opt_state, pieces.tree)
        return held_flats_of(chosen, flats, layout, self.options.axes, self.options.gather)
