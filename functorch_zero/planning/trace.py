"""A sharded step on tensors without values: the step itself does what it does on a real rank, and
is watched.

A loss that is not there has a stand-in, which goes through the layout's units. What units gather
and reduce, and when, does not depend on the leaves inside. It supposes what only a loss can say:
each unit is entered once, in the layout's order, and all take part in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import optree
import torch
from optree import PyTree, tree_map
from torch import Tensor, nn

from .._torch_private import FakeTensorMode, dynamo_imported
from ..groups.counting import CountedGroup
from ..groups.debug import LabelledGroup
from ..groups.mesh import Axes, SameData, axes_of, check_same_data, mesh_axes
from ..groups.protocol import Done, ReduceOp, Work
from ..layout.layout import Layout, LeafSpec, Unit
from ..layout.levels import level_of
from ..layout.sharded_tree import ShardedTree
from ..model.lazy_param import LazyParam
from ..runtime.prefetch import PrefetchOrder
from ..runtime.unshard import Gathering, UnitFlats
from ..sharded.background import BackgroundTasks
from ..sharded.options import Options, check_state_axes
from ..sharded.phases import Local, Run, advance, agree_on, differentiate
from ..sharded.state import shard_state
from ..sharded.update import PreparedUpdate
from ..step.loss import Aux, LossFn
from ..step.state import State
from ..step.train import TrainStep
from ..tree import has_values
from .live_bytes import LiveBytes
from .report import Collective, Sample

Notice = Callable[[str, Tensor], None]  # (kind of memory, a tensor of that kind)


class ImaginedStep:
    """One step on a rank that is not there: the phases of a sharded step, and a look on between
    them.

    Args:
        step: its loss and optimizer.
        options: of `shard`, with a `Recorder` for a group.
        layout: of params and of the optimizer's state.
        pass_layout: what the loss is run on, of the same units and buckets.
        fake: the mode of the tensors without values; None: the meta device.

    Attributes:
        samples: memory from moment to moment, of the step that was run last.
        reduced: bytes of the gradients that it gave to the optimizer.
    """

    def __init__(
        self,
        step: TrainStep,
        options: Options,
        layout: Layout,
        pass_layout: Layout,
        fake: FakeTensorMode | None,
    ):
        assert isinstance(options.group, Recorder)
        self._step = replace(step, loss_fn=self._watched(step.loss_fn))
        self._options, self._layout, self._pass_layout = options, layout, pass_layout
        self._journal = options.group.journal
        self.live = LiveBytes(fake, self._sample)
        self._journal.notice, self._journal.on_call = self._adopt, self._name
        # Of an optimizer that treats all elements alike
        self._only_buckets = fake is None and layout is pass_layout
        self.samples: list[Sample] = []
        self._highest = 0  # bytes of the last sample
        self.reduced = 0

    def run(
        self,
        params: PyTree[Tensor],
        buffers: PyTree[Tensor],
        batch: Any,
        *,
        order: Sequence[str] | None = None,
    ) -> State:
        """Run the first step, but with the order of units known, as from the second one on. Returns
        its state.

        `order`: the units as the pass fetches them, where that is known; else one more pass finds
        it out.
        """
        whole = nullcontext() if self._only_buckets else self.live
        fetched = PrefetchOrder()
        with whole:
            run = self._open(params, buffers, batch)
            # The step uses up the params of its own
            state: State = tree_map(lambda x: x, run.state)
        with whole, _uncompiled():
            if any(level_of(bucket).cuts_params for bucket in self._layout.buckets):
                if order is None:
                    self._differentiate(run, fetched)
                else:
                    fetched.record(order)
            for kind, tree in (
                (None, (params, buffers, batch)),
                ("params", (state.params, state.buffers)),
                ("state", (state.opt_state, state.parts)),
                (None, self.stored_in(state)),
            ):
                self.live.adopt(
                    [x for x in optree.tree_leaves(tree) if isinstance(x, Tensor)], kind
                )
            self._journal.recorded.clear()
            self.samples.clear()
            self.live.assumed = 0
            local = self._differentiate(run, fetched)
            self.reduced = sum(flat.nbytes for flat in local.reduced.values())
            self._enter("metrics")
            with self.live.paused():
                agreed = agree_on(run, self._with_numbers(run, local), BackgroundTasks())
            self._enter("buffers")
            advance(run, local, agreed)
        assert order is None or not fetched.units or [*fetched.units] == [*order], (
            "units came in another order"
        )
        return state

    def stored_in(self, state: State) -> list[Tensor]:
        """What of the state lies elsewhere than its params."""
        if self._options.state_storage is None:
            return []
        leaves = optree.tree_leaves(state.opt_state)
        return [x for x in leaves if isinstance(x, Tensor) and x.dim()]

    @torch.no_grad()
    def _open(self, params: PyTree[Tensor], buffers: PyTree[Tensor], batch: Any) -> Run:
        """This rank's part of the first state, and the update of it."""
        step, options = self._step, self._options
        prepared = PreparedUpdate(step, self._layout, options)
        whole = step.init(params, buffers, seed=None)
        rank, sharding = options.axes.number, options.sharding(self._layout)
        state = shard_state(whole, prepared, sharding, rank)
        flats = state.params.flats()
        updater = _Announced(prepared, self._enter, idle=self._only_buckets)
        return Run(step, options, state, batch, sharding, flats, updater, prepared.parts)

    def _differentiate(self, run: Run, order: PrefetchOrder) -> Local:
        """The same on the layout of the pass, which may be cut in another way."""
        sharding = replace(run.sharding, layout=self._pass_layout)
        run = replace(run, sharding=sharding, state=run.state.replace(params=None))
        with self.live if self._only_buckets else nullcontext():  # nothing is made before and after
            return differentiate(run, order)

    def _with_numbers(self, run: Run, local: Local) -> Local:
        """With numbers that are there for the all-reduce, and the buffers that were written to."""
        before = optree.tree_leaves(run.state.buffers)
        after, treedef = optree.tree_flatten(local.outcome.buffers)
        kept = [
            o if self.live.is_untouched_copy(n, o) else n
            for o, n in zip(before, after, strict=True)
        ]
        known = local.outcome._replace(
            loss=torch.zeros(()),
            metrics=dict.fromkeys(local.outcome.metrics, 0.0),
            buffers=treedef.unflatten(kept),
        )
        return local._replace(outcome=known)

    def _watched(self, loss_fn: LossFn) -> LossFn:
        """The loss, before and after which the phase changes. A weight is a number, since nobody
        knows its value."""

        def loss(params: Any, buffers: Any, batch: Any) -> Any:
            for unit in {leaf.entrance.unit for leaf in optree.tree_leaves(params)}:
                unit.flats = Noted(unit.flats, unit.name, self._journal)
            self._enter("forward")
            result = loss_fn(params, buffers, batch)
            self._enter("backward")
            if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Aux):
                given, aux = result
                return given, replace(aux, weight=None if aux.weight is None else 1.0)
            return result

        return loss

    def _enter(self, phase: str) -> None:
        self._journal.enter(phase)
        self._sample()

    def _adopt(self, kind: str, tensor: Tensor) -> None:
        self.live.adopt([tensor], kind)
        self._sample()

    def _name(self, collective: Collective) -> None:
        """Where params are not gathered, the unit in use is known when its gradients are
        reduced."""
        if (
            collective.unit
            and collective.phase == "backward"
            and self.samples
            and self.samples[-1].moment == "backward"
        ):
            self.samples[-1] = self.samples[-1]._replace(moment=f"backward of {collective.unit}")

    def _sample(self) -> None:
        """Note the memory of this moment: of each unit in each phase the highest sample is kept."""
        phase, unit = self._journal.phase, self._journal.unit
        moment = f"{phase} of {unit}" if unit and phase in ("forward", "backward") else phase
        new = not self.samples or self.samples[-1].moment != moment
        if new or self.live.total >= self._highest:
            self._highest = self.live.total
            self.samples[len(self.samples) - (not new) :] = [Sample(moment, **self.live.now)]


class Elsewhere:
    """Storage for state without values, which no device takes."""

    def fetch(self, stored: Tensor) -> Tensor:
        return stored.clone()

    def store(self, tensor: Tensor, into: Tensor | None) -> Tensor:
        return torch.empty_like(tensor) if into is None else into


def _uncompiled() -> AbstractContextManager[Any]:
    """Compiled regions run operator by operator: there is nothing to compile for without values."""
    return torch.compiler.set_stance("force_eager") if dynamo_imported() else nullcontext()


class _Announced:
    """An update that says when it begins and ends; an idle one works in place, and takes no
    room."""

    def __init__(
        self, prepared: PreparedUpdate, enter: Callable[[str], None], *, idle: bool
    ) -> None:
        self._prepared, self._enter, self._idle = prepared, enter, idle
        self.across = prepared.across
        self.fetched, self.stored = prepared.fetched, prepared.stored

    def update(self, grads: ShardedTree, state: Any, params: ShardedTree) -> Any:
        self._enter("optimizer")
        made = (None, state) if self._idle else self._prepared.update(grads, state, params)
        self._enter("publish")
        return made


class Journal:
    """The one record that all recorders of a step write to.

    Attributes:
        phase: of the step.
        unit: in use.
        recorded: the collectives so far.
        notice: told which tensors hold gathered params and gradients.
        on_call: told of each collective.
    """

    def __init__(self) -> None:
        self.phase, self.unit = "forward", ""
        self.recorded: list[Collective] = []
        self.notice: Notice = lambda kind, tensor: None
        self.on_call: Callable[[Collective], None] = lambda collective: None

    def enter(self, phase: str) -> None:
        """The next phase of the step."""
        self.phase, self.unit = phase, ""


class Recorder(LabelledGroup):
    """Rank `rank` of `size`: every collective is recorded with its phase and unit, and leaves its
    tensors as they are.

    Args:
        name: which ranks these are.
        swaps: whether a reduce-scatter takes room for what the other ranks send, as over gloo.
    """

    def __init__(
        self, rank: int, size: int, journal: Journal, *, name: str, swaps: bool, label: str = ""
    ) -> None:
        super().__init__(_Silent(rank, size), label)
        self.journal, self.name, self.swaps = journal, name, swaps
        self._counting = CountedGroup(self.inner)

    def at(self, label: str) -> Recorder:
        return Recorder(
            self.rank, self.size, self.journal, name=self.name, swaps=self.swaps, label=label
        )

    def all_gather(self, out: Tensor, piece: Tensor) -> Work:
        if self._in_pass:
            self.journal.notice("gathered", out)
        return self._noted(self._counting.all_gather(out, piece))

    def reduce_scatter(self, out: Tensor, whole: Tensor) -> Work:
        self.journal.notice("gradients", out)
        self.journal.notice("gradients", whole)
        self._noted(self._counting.reduce_scatter(out, whole))
        return _Holding(whole.new_empty(whole.numel()) if self.swaps and self.size > 2 else None)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        if has_values(tensor) and op == "sum":
            tensor.mul_(self.size)  # as if every rank had the same
        if self._in_pass:
            self.journal.notice("gradients", tensor)
        return self._noted(self._counting.all_reduce(tensor, op))

    def all_to_all(
        self, out: Tensor, out_sizes: Sequence[int], source: Tensor, in_sizes: Sequence[int]
    ) -> Work:
        return self._noted(self._counting.all_to_all(out, out_sizes, source, in_sizes))

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        return self._noted(self._counting.broadcast(tensor, source))

    @property
    def _in_pass(self) -> bool:
        return self.journal.phase in ("forward", "backward")

    def _noted(self, work: Work) -> Work:
        where = self.label.partition("/")[0].partition("[")[0]
        phase = "optimizer" if where == "optimizer" else self.journal.phase
        unit = "" if where in ("step", "optimizer") else where
        call = self._counting.calls[-1]
        made = Collective(
            phase, call.kind, unit, call.dtype, call.num_elements, call.sent_bytes, self.name
        )
        self.journal.recorded.append(made)
        self.journal.on_call(made)
        return work


def imagined_axes(
    rank: int,
    size: int,
    journal: Journal,
    shard_size: int | None,
    state_axes: str,
    *,
    swaps: bool,
    same_data: SameData | None = None,
) -> Axes:
    """The groups of rank `rank` of `size`: of one axis, or of a mesh with `shard_size` ranks along
    its shard axis."""

    def group(rank: int, size: int, name: str) -> Recorder:
        return Recorder(
            rank, size, journal, name=f"{name} {size}" if size > 1 else "itself", swaps=swaps
        )

    world, both = group(rank, size, "all"), check_state_axes(state_axes) == "both"
    check_same_data(same_data)
    if shard_size is None:
        if same_data is not None:
            raise ValueError(
                f"same_data={same_data!r} names an axis of a mesh, and there is one axis only. "
                "Remedy: plan(..., shard_size=...)"
            )
        return axes_of(world, both=both)
    if shard_size < 1 or size % shard_size:
        raise ValueError(
            f"shard_size must divide the number of ranks, {size}, so that all replicas are alike; "
            f"got {shard_size}"
        )
    (replica, place), num_replicas = divmod(rank, shard_size), size // shard_size
    pieces = group(place, shard_size, "shard")
    # As `HybridGroup.by_piece`
    by_piece = group(place * num_replicas + replica, size, "all") if both else pieces
    copies = group(replica, num_replicas, "replicate")
    return mesh_axes(world, pieces, copies, by_piece, same_data)


class Noted:
    """A unit's flats that say when the unit is in use."""

    def __init__(self, flats: UnitFlats, name: str, journal: Journal) -> None:
        self._flats, self._name, self._journal = flats, name, journal
        self.transient, self.passing = flats.transient, flats.passing
        self.start, self.leaves = flats.start, flats.leaves

    @property
    def here(self) -> list[Tensor] | None:
        if self._flats.here is not None:
            self._journal.unit = self._name
        return self._flats.here

    @here.setter
    def here(self, flats: list[Tensor] | None) -> None:
        self._flats.here = flats

    @property
    def under_way(self) -> Sequence[Gathering] | None:
        return self._flats.under_way

    @property
    def versions(self) -> Sequence[int]:
        return self._flats.versions

    def unshard(self) -> list[Tensor]:
        self._journal.unit = self._name
        return self._flats.unshard()


class _Holding:
    """Finished work that held room while it was under way: over gloo, what the other ranks sent."""

    def __init__(self, room: Tensor | None) -> None:
        self._room = room

    def wait(self) -> None:
        self._room = None


class _Silent:
    """A group whose collectives do nothing."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_gather(self, out: Tensor, piece: Tensor) -> Work:
        return Done()

    def reduce_scatter(self, out: Tensor, whole: Tensor) -> Work:
        return Done()

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        return Done()

    def all_to_all(
        self, out: Tensor, out_sizes: Sequence[int], source: Tensor, in_sizes: Sequence[int]
    ) -> Work:
        return Done()

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        return Done()

    def exchange(self, payload: bytes) -> list[bytes]:
        return [payload] * self.size

    def barrier(self) -> None:
        return None

    def fail(self, error: BaseException) -> None:
        return None


def one_leaf_a_bucket(layout: Layout) -> Layout:
    """The same units and buckets, each bucket with one leaf that fills it, or nearly, where several
    leaves do."""
    buckets = []
    for b, bucket in enumerate(layout.buckets):
        fills = bucket.numels == (bucket.numel,)  # then its gradient needs no copy
        buckets.append(
            replace(bucket, leaves=(b,), shapes=((bucket.numel - (not fills),),), offsets=(0,))
        )
    leaves = [LeafSpec(b.name, b.shapes[0], b.dtype, b.trainable, b.cut, b.dtypes) for b in buckets]
    return replace(
        layout,
        leaves=tuple(leaves),
        buckets=tuple(buckets),
        treedef=optree.tree_structure([0] * len(buckets)),
    )


def loss_through(layout: Layout, num_saved: Callable[[Unit], int]) -> LossFn:
    """A loss on such a layout; `num_saved`: how many leaves a unit's backward needs (two stand for
    more)."""

    def loss(params: list[LazyParam], buffers: Any, batch: Any) -> Tensor:
        x = torch.zeros(())
        for unit in layout.units:
            entrance, saved = params[unit.buckets[0]].entrance, min(num_saved(unit), 2)
            if not unit.modules:
                x = _Use.apply(x, saved, *entrance.touch())  # type: ignore[no-untyped-call]
            for path in unit.modules:
                leaves = entrance.enter(path)
                if path == unit.modules[-1]:
                    with entrance.watch():
                        x = _Use.apply(x, saved, *leaves)  # type: ignore[no-untyped-call]
                del leaves  # as a module's places let go of them
                entrance.leave(path)
        return x

    return loss


def order_of_units(layout: Layout, num_saved: Callable[[Unit], int], *, keeps: bool) -> list[str]:
    """The order in which this loss fetches units, forward and, unless they are kept, backward."""
    again = [
        unit.name or "root"
        for unit in layout.units
        if unit.modules and num_saved(unit) and not keeps
    ]
    return [*(unit.name or "root" for unit in layout.units), *reversed(again)]


class _Use(torch.autograd.Function):
    """Forward: x. Backward asks for some of the leaves, and gives all of them a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, num_saved: int, *leaves: Tensor) -> Tensor:
        ctx.save_for_backward(*(leaves[0] for _ in range(num_saved)))
        ctx.like = [(leaf.shape, leaf.dtype, leaf.device) for leaf in leaves]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        grads = [
            torch.empty(shape, dtype=dtype, device=device) if need else None
            for (shape, dtype, device), need in zip(ctx.like, needed, strict=True)
        ]
        return grad, None, *grads


def saved_by_names(layout: Layout, model: Any) -> Callable[[Unit], int]:
    """Linear maps, convolutions and norms need their weights in backward and not their biases; a
    lookup needs none."""
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    lookups = {f"{path}.weight".lstrip(".") for path, m in modules if isinstance(m, nn.Embedding)}

    def num_saved(unit: Unit) -> int:
        paths = [layout.leaves[n].path for b in unit.buckets for n in layout.buckets[b].leaves]
        return sum(
            path not in lookups and not path.rpartition(".")[2].startswith("bias") for path in paths
        )

    return num_saved
