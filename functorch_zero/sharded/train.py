"""The training step for N ranks, made by `shard`. No arithmetic here, and no collective of its own:
it composes.
"""

from __future__ import annotations

from typing import Any

import optree
import torch
from optree import tree_map
from torch import Tensor

from ..errors import StructureError
from ..groups import labelled
from ..groups.protocol import Group
from ..layout.layout import Layout
from ..layout.sharded_tree import ShardedTree, hold
from ..layout.sharding import Sharding
from ..model.deferred_init import DeferredInit
from ..model.untouched import is_looked_at
from ..optim.claims.check import check_claims
from ..optim.naming import described
from ..runtime.prefetch import PrefetchOrder
from ..sharded_optim.sharded_state import ShardedOptState, StateHolding
from ..sharded_optim.state_plan import StatePlan
from ..step.loss import Metrics, check_records
from ..step.metrics import check_reported
from ..step.refit import carried as carried_whole
from ..step.refit import check_own_leaves, check_values
from ..step.state import (
    State,
    TrainValue,
    check_not_on_meta,
    check_policies,
    check_state,
    marked,
    trained,
)
from ..step.train import TrainStep, optimizer_view
from ..step.trainable import check_trained, mark_trainable
from ..tree import PyTree, check_tensors, named_leaves, paths, select
from .agreement import agree, releases_and_ranks
from .background import BackgroundTasks
from .checks import check_batch, own_params, sharding_of
from .deferred_values import DigestedFill
from .equal_batches import EqualBatches
from .failures import sharing_failures
from .options import Options
from .parts import ReductionParts
from .phases import Run, advance, agree_on, differentiate
from .placed import check_places_work, moved_tree
from .program.engine import ShardedEngine
from .readable import told_values
from .refit import agree_on_refit, carried, first_parts, refuse_parts
from .state import cut_state, lay_out_state, unshard_state
from .tree_numbers import next_number
from .update import PreparedUpdate


class ShardedTrainStep:
    """`step(state, batch) -> (state, metrics)` on one rank of a group. Made by `shard`.

    Each rank passes its own part of the batch, and gets the result of the unsharded step on the
    whole.
    """

    def __init__(self, step: TrainStep, options: Options):
        self.unsharded, self.options = step, options
        self.engine = ShardedEngine(options)
        self.background = BackgroundTasks()
        self._batches = EqualBatches(options.axes.data.size)
        self.gather_order = PrefetchOrder(options.group)  # in which the last step gathered units
        self._prepared: PreparedUpdate | None = None  # for the last layout

    def __repr__(self) -> str:
        name = self.unsharded.optimizer.name.rpartition(".")[2] or "a transform"
        return f"ShardedTrainStep({self.options.in_words}, {name})"

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
    ) -> State:
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
        # The optimizer's `init` may ask for collectives
        failures = sharing_failures(*self.options.axes.groups, call="init", settles=True)
        with failures, torch.no_grad():
            check_records("a first state", self.group.rank)
            params = mark_trainable(params, self.unsharded.trainable["params"])
            layout = self.options.layout_of(params)
            if buffers is None:
                buffers = {}
            if values is not None:
                buffers = values.fill(buffers)
            check_tensors(buffers, "buffers")

            check_places_work(self.options.places.given, params, self.group.rank)
            # Before any tensor is made, so that ranks that differ say so instead of hanging later
            group = labelled(self.group, "init/agreement")
            agree(group, self._facts(layout, params, buffers, seed))
            check_claims(self.unsharded.optimizer, select(params, layout.trainable))

            # Storage of this rank's own, filled bucket by bucket: no rank need have room for a
            # whole tree beside it, where values are made here
            fill = None if values is None else DigestedFill(values)
            # The static part of the state, with donations of its own
            sharding = self.options.sharding(layout)
            number = next_number(self.group)
            held = hold(params, sharding, engine=self.engine, number=number, fill=fill)
            held = moved_tree(self.options.places.params, held)
            if fill is not None:
                # Values that are made on each rank could not be compared before
                agree(group, {"deferred values": fill.digests})
            opt_state = self.first_optimizer_state(held, layout)
            check_reported(self.unsharded.metrics, opt_state)
            # The caller's buffers stay the caller's
            copies = tree_map(lambda buffer: buffer.detach().clone(), buffers)
            parts = self._prepare(layout).parts.init(held.flats()[0].device)
            value = TrainValue(held, copies, opt_state, self.unsharded.policy.init())
            # A rank without room for what it places says so before the others go on
            if self.options.places.given:
                agree(labelled(self.group, "init/places"), {"places": [*self.options.places.given]})
            return State.first(value, seed, sharding=sharding, parts=parts)

    def __call__(self, state: State, batch: Any) -> tuple[State, Metrics]:
        """One step on this rank's part of the batch.

        Collectives: those of the level's row (units' gathers and reductions), two all-reduces
        (metrics, and words of the hosts), and one per dtype of the buffers that changed. Besides,
        those that the optimizer asks for. When donating, the given state is used up.

        Raises:
            DonatedError: the state was used up before.
            StructureError: state, batch or loss are not what they must be.
            PeerError: another rank failed; GroupError: ranks did different things.
            MismatchError: ranks of the same data have found different losses or metrics; on every
                rank, and the state is still good.
            CheckpointError: an `async_save` with this step has failed; on every rank, and the state
                is still good.
        """
        failures = sharing_failures(*self.options.axes.groups, call="step", state=state)
        with failures, self.gather_order.forgotten_on_failure():
            # Up to `advance` an error leaves the state good: Note [before the first write]
            run = self._open(state, batch)
            local = differentiate(run, self.gather_order)
            agreed = agree_on(run, local, self.background, self._batches)
            return advance(run, local, agreed)

    def _open(self, state: State, batch: Any) -> Run:
        """Check the state and the batch, and find the flats that the params lie in. Leaves that
        were replaced since the last step are packed into new ones."""
        sharding = sharding_of(state, self.options)
        # Plans are made at the first step with a layout, and found again in later ones
        prepared = self._prepare(sharding.layout)
        state = state.replace(opt_state=self._own_state(state))
        if is_looked_at(int(state.step)):
            self._check_trained(sharding.layout)
        # Leaves that were replaced since the last step are packed here, into new flats, which the
        # loss is given then
        params = own_params(state, self.group.rank)
        params = params.with_flats(params.flats(), params.published())
        params = moved_tree(self.options.places.params, params)
        state, flats = state.replace(params=params), params.flats()
        if flats[0].is_meta:
            check_not_on_meta(state.params, batch)
        check_batch(batch, flats[0].device, self.group.rank)
        return Run(
            step=self.unsharded,
            options=self.options,
            state=state,
            batch=batch,
            sharding=sharding,
            flats=flats,
            updater=prepared,
            parts=prepared.parts,
        )

    def _check_trained(self, layout: Layout) -> None:
        """Raise if this step's `trainable` chooses other leaves than the state trains."""
        if self.unsharded.trainable["params"] is None:
            return
        whole = _without_values(layout)
        check_trained(self.unsharded.trainable["params"], whole, layout.trainable, self.group.rank)

    def unshard(self, state: State) -> State:
        """The whole, unsharded state on every rank: copies. Leaves in pieces are all-gathered,
        those with an owner broadcast."""
        groups = self.options.axes.groups
        failures = sharing_failures(*groups, call="unshard", state=state, settles=True)
        with failures, torch.no_grad():
            sharding = sharding_of(state, self.options)
            prepared = self._prepare(sharding.layout)
            state = state.replace(opt_state=self._own_state(state))
            axes = self.options.axes.at("state/unshard")
            return unshard_state(state, prepared, axes)

    def shard(self, state: State) -> State:
        """The inverse of `unshard`: this rank's part of a whole state that every rank holds. No
        communication.

        Of `State.parts`, sums become rank 0's; a state without parts is given first ones.
        """
        check_state(state)
        if state.sharding is not None:
            raise StructureError("step.shard takes a whole state, and this one is sharded already")
        check_policies(state, state.params)
        view, _ = optimizer_view(state.params, trained(state))
        with torch.no_grad():
            optimizer = self.unsharded.optimizer
            optimizer.check_whole(state.opt_state, view, what="state.opt_state")
            layout = self.options.layout_of(marked(state))
            prepared = self._prepare(layout)
            sharding = self.options.sharding(layout)
            number = next_number(self.group)
            part = cut_state(state, prepared, sharding, self.engine, number)
            return part.replace(opt_state=self.engine.placed(part.value.opt_state))

    def refit(
        self,
        state: State,
        params: PyTree[Tensor] | None = None,
        buffers: PyTree[Tensor] | None = None,
    ) -> State:
        """Another step's state as one of this step, as `TrainStep.refit` makes it of whole ones.

        Both steps have the same level and ranks. Every rank passes the same params; those that the
        state has may be on the meta device. Collectives: two exchanges, which compare them, and
        one all-to-all per dtype of params and of the optimizer's state, by which elements travel
        whose rank changes; and those that the optimizer's `init` asks for.

        Raises:
            NotImplementedError: a reduction keeps tensors between steps.
        """
        groups = self.options.axes.groups
        failures = sharing_failures(*groups, call="refit", state=state, settles=True)
        with failures, torch.no_grad():
            before = sharding_of(state, self.options)
            past = PreparedUpdate.of_step(self.unsharded, before.layout, self.options)
            state = state.replace(opt_state=self._own_state(state))
            refuse_parts(state, self.group.rank)
            if params is None:
                params = _without_values(before.layout)
            if buffers is None:
                buffers = state.buffers
            params = mark_trainable(params, self.unsharded.trainable["params"])
            layout = self.options.layout_of(params)
            self._agree_on_new(state, before.layout, params, buffers)
            was, now = _trained_without_values(before.layout), _trained_without_values(layout)
            check_own_leaves(self.unsharded.optimizer, was, now, self.group.rank)
            check_claims(self.unsharded.optimizer, select(params, layout.trainable))

            prepared = self._prepare(layout)
            sharding = self.options.sharding(layout)
            held = self._carried_params(state, params, sharding)
            opt_state = self._carried_opt_state(state, past, held, prepared)
            given = tree_map(torch.detach, buffers)
            # Copies of those that the state has; the others stay the caller's
            new_buffers = carried_whole(given, state.buffers, "buffers")
            new_buffers = tree_map(lambda b, own: b.clone() if b is own else b, new_buffers, given)
            first = self.unsharded.policy.init()
            finite = carried_whole(first, state.finite, "the policy's state")
            return State(
                step=state.step.clone(),
                value=TrainValue(held, new_buffers, self.engine.placed(opt_state), finite),
                seed=tree_map(torch.clone, state.seed),
                sharding=sharding,
                # None so far: a reduction begins with what it keeps
                parts=prepared.parts.init(held.flats()[0].device),
            )

    def _carried_params(
        self, state: State, params: PyTree[Tensor], sharding: Sharding
    ) -> ShardedTree:
        """The given params, cut anew, with the elements of those that the state has."""
        new = first_parts(params, sharding, self.engine, next_number(self.group))
        old = own_params(state, self.group.rank)
        old.check_leaves()
        held: ShardedTree = carried(new, old, self._refit_group, "params")
        return held

    def _carried_opt_state(
        self, state: State, past: PreparedUpdate, params: ShardedTree, prepared: PreparedUpdate
    ) -> Any:
        """The optimizer's state for new params, with the elements that the state has of it.

        Args:
            past: the update that the state is of; `prepared` is the new params'.
        """
        # First states of new leaves follow from the params as they are now
        fresh = self.unsharded.optimizer.init(params.pieces().local_tree, prepared.across)
        check_reported(self.unsharded.metrics, fresh)
        new = ShardedOptState(fresh, self._holding(params.sharding))
        given = state.value.opt_state
        device = params.flats()[0].device
        old = given.held_as(given.holding.lying(None), past.brought(given.as_it_lies, device))
        return carried(new, old, self._refit_group, "the optimizer's state")

    @property
    def _refit_group(self) -> Group:
        """The ranks among which elements travel in `refit`."""
        return labelled(self.options.axes.optimizer, "refit")

    def _agree_on_new(
        self,
        state: State,
        before: Layout,
        params: PyTree[Tensor],
        buffers: PyTree[Tensor],
    ) -> None:
        """Raise on every rank, unless all refit one state to the same params and buffers."""
        agree_on_refit(state, named_leaves(state.buffers), self.options)
        known = {leaf.path for leaf in before.leaves}
        new = {path: leaf for path, leaf in named_leaves(params).items() if path not in known}
        check_values(new, "params", self.group.rank)
        check_tensors(buffers, "buffers")
        layout = self.options.layout_of(params)
        facts = self._facts(layout, new, buffers, None)
        agree(labelled(self.group, "refit/agreement"), facts)

    def parts_of(self, state: State) -> ReductionParts:
        """The kinds of a state's parts, and the tensors that the reduction keeps in them."""
        assert state.sharding is not None
        return self._prepare(state.sharding.layout).parts

    def state_plan(self, layout: Layout) -> StatePlan:
        """The plan of the optimizer's state: which leaves follow a param, which have an owner."""
        return self._prepare(layout).plan

    def first_optimizer_state(self, params: ShardedTree, layout: Layout) -> Any:
        """The optimizer's state as `init` makes it. Collectives: those that the optimizer asks
        for."""
        prepared = self._prepare(layout)
        made = self.unsharded.optimizer.init(params.pieces().local_tree, prepared.across)
        return self.engine.placed(lay_out_state(made, self._holding(params.sharding)))

    def _holding(self, sharding: Sharding) -> StateHolding:
        return StateHolding(sharding, self.state_plan(sharding.layout), engine=self.engine)

    def _own_state(self, state: State) -> ShardedOptState:
        """A state's optimizer's state as this step takes it, if it is one of this step's."""
        assert state.sharding is not None
        given, prepared = state.value.opt_state, self._prepare(state.sharding.layout)
        rank, holding = self.group.rank, self._holding(state.sharding)
        if not isinstance(given, ShardedOptState):
            # Somebody's own tree
            if optree.tree_structure(given) != prepared.plan.treedef:
                prepared.check_state(given, rank)
            given = ShardedOptState.of_shown(given, holding)
        prepared.check_state(given.as_it_lies, rank)
        return self.engine.own(given, holding)

    def _prepare(self, layout: Layout) -> PreparedUpdate:
        """The plans that follow from a layout. Those of the last layout are kept."""
        known = self._prepared
        # By identity first: comparing layouts takes longer, and steps ask every time
        if known is None or (known.layout is not layout and known.layout != layout):
            known = PreparedUpdate.of_step(self.unsharded, layout, self.options)
            self._prepared = known
        return known

    def _facts(
        self, layout: Layout, params: PyTree[Tensor], buffers: PyTree[Tensor], seed: int | None
    ) -> dict[str, Any]:
        """The facts that ranks must agree on, as plain data.

        Of those that differ the first is told, so causes come before their effects: another number
        of ranks gives another layout, too.
        """
        step, options = self.unsharded, self.options
        facts = releases_and_ranks(self.group)
        # The choices of `train_step` and `shard`
        facts |= {
            "level": options.levels.describe(),
            "accumulate": step.accumulate,
            "metrics": list(step.metrics),
            "finite": described(step.policy),
            "options": options.describe(),
            "optimizer": described(step.optimizer),
        }
        # What follows from them and from the model
        facts |= {
            "layout": layout.describe(),
            "level of leaves": {leaf.path: leaf.cut.level_name for leaf in layout.leaves},
            "buffers": _shapes_and_dtypes(buffers),
        }
        # Local buffers may differ between ranks from the start
        compared = {} if options.sync_buffers == "local" else buffers
        # Last the numbers themselves, which another model would change as well
        facts |= {
            "values": told_values(params),
            "values of buffers": told_values(compared),
            "seed": seed,
        }
        return facts


def _without_values(layout: Layout) -> PyTree[Tensor]:
    """The whole leaves of a layout on the meta device, which say whether they are trained."""
    leaves = [
        torch.empty(leaf.shape, dtype=leaf.dtype, device="meta", requires_grad=leaf.trainable)
        for leaf in layout.leaves
    ]
    return layout.treedef.unflatten(leaves)


def _trained_without_values(layout: Layout) -> PyTree[Tensor]:
    """The same of trained leaves alone."""
    return select(_without_values(layout), layout.trainable)


def _shapes_and_dtypes(tree: PyTree[Tensor]) -> dict[str, Any]:
    """By path."""
    leaves = zip(paths(tree), optree.tree_leaves(tree), strict=True)
    return {path: {"shape": list(leaf.shape), "dtype": str(leaf.dtype)} for path, leaf in leaves}
