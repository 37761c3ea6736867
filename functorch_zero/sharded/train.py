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
from ..layout.layout import Layout
from ..layout.sharded_tree import ShardedTree, hold
from ..model.deferred_init import DeferredInit
from ..optim.claims.check import check_claims
from ..optim.naming import described
from ..runtime.prefetch import PrefetchOrder
from ..sharded_optim.state_plan import StatePlan
from ..step.loss import Metrics
from ..step.metrics import check_reported
from ..step.state import State, TrainValue
from ..step.train import TrainStep, mark_trainable
from ..tree import PyTree, content_digests, paths, select
from ..version import __version__
from .agreement import agree
from .background import BackgroundTasks
from .checks import check_batch, sharding_of
from .engine import ShardedEngine, next_number
from .failures import sharing_failures
from .options import Options
from .parts import ReductionParts
from .phases import Run, advance, agree_on, differentiate
from .state import lay_out_state, shard_state, unshard_state
from .update import PreparedUpdate


class ShardedTrainStep:
    """`step(state, batch) -> (state, metrics)` on one rank of a group. Made by `shard`.

    Each rank passes its own part of the batch; what comes back is what the unsharded step makes of
    the whole.
    """

    def __init__(self, step: TrainStep, options: Options):
        self.unsharded, self.options = step, options
        self.engine = ShardedEngine(options)
        self.background = BackgroundTasks()
        self._prepared: PreparedUpdate | None = None
        self.order = PrefetchOrder()

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
        with sharing_failures(*self.options.axes.groups), torch.no_grad():
            params = mark_trainable(params, self.unsharded.trainable)
            layout = self.options.layout_of(params)
            buffers = {} if buffers is None else buffers if values is None else values.fill(buffers)
            agree(
                labelled(self.group, "init/agreement"), self._facts(layout, params, buffers, seed)
            )
            check_claims(self.unsharded.optimizer, select(params, layout.trainable))
            made = None if values is None else Made(values)
            sharding = self.options.sharding(layout)
            number = next_number(self.group)
            held = hold(params, sharding, engine=self.engine, number=number, fill=made)
            if made is not None:
                agree(labelled(self.group, "init/agreement"), {"deferred values": made.digests})
            opt_state = self.first_optimizer_state(held, layout)
            check_reported(self.unsharded.metrics, opt_state)
            buffers = tree_map(lambda b: b.detach().clone(), buffers)
            return State(
                torch.zeros((), dtype=torch.int64),
                TrainValue(held, buffers, opt_state),
                None if seed is None else torch.tensor(seed),
                sharding,
                self.unsharded.finite.init(),
                self._prepare(layout).parts.init(held.flats()[0].device),
            )

    def __call__(self, state: State, batch: Any) -> tuple[State, Metrics]:
        """One step on this rank's part of the batch.

        Collectives: those of the level's row (units' gathers and reductions), one
        all-reduce of metrics, one of the buffers that changed, and what the optimizer asks for. The
        state given is used up when donating.

        Raises:
            DonatedError: the state was used up before.
            StructureError: state, batch or loss are not what they must be.
            PeerError: another rank failed; GroupError: ranks did different things.
            MismatchError: ranks of the same data have found different losses or metrics; on every
                rank, and the state is still good.
            CheckpointError: an `async_save` with this step has failed; on every rank, and the state
                is still good.
        """
        with sharing_failures(*self.options.axes.groups), self.order.forgotten_on_failure():
            run = self._open(state, batch)
            local = differentiate(run, self.order)
            agreed = agree_on(run, local, self.background)
            return advance(run, local, agreed)

    def _open(self, state: State, batch: Any) -> Run:
        """Check the state and the batch, and find the flats that the params lie in."""
        sharding = sharding_of(state, self.options)
        prepared = self._prepare(sharding.layout)
        flats = state.params.flats()
        check_batch(batch, flats[0].device, self.group.rank)
        parts = prepared.parts
        return Run(self.unsharded, self.options, state, batch, sharding, flats, prepared, parts)

    def unshard(self, state: State) -> State:
        """The whole, unsharded state on every rank: copies. All-gathers what is in pieces,
        broadcasts what is owned."""
        with sharing_failures(*self.options.axes.groups), torch.no_grad():
            sharding = sharding_of(state, self.options)
            prepared = self._prepare(sharding.layout)
            axes = self.options.axes.at("state/unshard")
            return unshard_state(state, prepared, axes)

    def shard_state(self, state: State) -> State:
        """The inverse of `unshard`: this rank's part of a whole state that every rank holds. No
        communication.

        Of `State.parts`, sums become rank 0's; a state without parts is given first ones.
        """
        if state.sharding is not None:
            raise StructureError("shard_state takes a whole state, and this one is sharded already")
        with torch.no_grad():
            layout = self.options.layout_of(state.params)
            prepared = self._prepare(layout)
            sharding = self.options.sharding(layout)
            number = next_number(self.group)
            return shard_state(state, prepared, sharding, self._rank, self.engine, number)

    def parts(self, layout: Layout) -> ReductionParts:
        """What of a state's parts is whose."""
        return self._prepare(layout).parts

    def state_plan(self, layout: Layout) -> StatePlan:
        """Which leaves of the optimizer's state follow a param, and which have an owner."""
        return self._prepare(layout).plan

    def first_optimizer_state(self, params: ShardedTree, layout: Layout) -> Any:
        """The optimizer's state as `init` makes it. Collectives: those that the optimizer asks
        for."""
        prepared = self._prepare(layout)
        made = self.unsharded.optimizer.init(params.pieces().tree, prepared.across)
        return prepared.stored(lay_out_state(made, prepared.plan, layout, self._rank))

    @property
    def _rank(self) -> int:
        """This rank's number among the pieces of a bucket."""
        return self.options.axes.number

    def _prepare(self, layout: Layout) -> PreparedUpdate:
        known = self._prepared
        if known is None or (known.layout is not layout and known.layout != layout):
            self._prepared = known = PreparedUpdate(self.unsharded, layout, self.options)
        return known

    def _facts(
        self, layout: Layout, params: PyTree[Tensor], buffers: PyTree[Tensor], seed: int | None
    ) -> dict[str, Any]:
        """The facts that ranks must agree on."""
        o = self.options
        return {
            "functorch_zero": __version__,
            "torch": torch.__version__,
            "ranks": self.group.size,
            "level": o.levels.describe(),
            "accumulate": self.unsharded.accumulate,
            "metrics": list(self.unsharded.metrics),
            "finite": described(self.unsharded.finite),
            "options": {
                "donate": o.donate,
                "sync_buffers": o.sync_buffers,
                "reshard_after_forward": o.reshard_after_forward,
                "reduce_gradients": o.reduce_gradients,
                "ranks of the shard axis": o.axes.shard.size,
                "axes of the same data": o.axes.of_same_data,
                "state_axes": "both" if o.axes.both else "shard",
                "overlap": o.overlap,
                **o.seams,
            },
            "optimizer": described(self.unsharded.optimizer),
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
