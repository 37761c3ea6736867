"""A sharded step on tensors without values: the step itself does what it does on a real rank, and is watched."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import optree
import torch
from optree import PyTree
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ..layout.flat_buffers import Pieces, flats_of
from ..layout.layout import Layout
from ..layout.levels import level_of
from ..sharded import agreement
from ..sharded.options import Options
from ..sharded.train import ShardedTrainStep
from ..step.loss import Aux, LossFn, Outcome
from ..step.state import TrainState
from ..step.train import TrainStep
from .live import LiveBytes
from .recording import Noted, Recorder
from .records import Collective, Sample


class ImaginedStep(ShardedTrainStep):
    """One step on a rank that is not there.

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
        self, step: TrainStep, options: Options, layout: Layout, pass_layout: Layout, fake: FakeTensorMode | None
    ):
        super().__init__(replace(step, loss_fn=self._watched(step.loss_fn)), options)
        assert isinstance(options.group, Recorder)
        self._journal, self._layout, self._pass_layout = options.group.journal, layout, pass_layout
        self.live = LiveBytes(fake, self._sample)
        self._journal.notice, self._journal.on_call = self._adopt, self._name
        self._only_buckets = fake is None and layout is pass_layout  # of an optimizer that treats all elements alike
        self.samples: list[Sample] = []
        self._highest = 0  # bytes of the last sample
        self.reduced = 0

    def run(
        self, params: PyTree[Tensor], buffers: PyTree[Tensor], batch: Any, *, order: Sequence[str] | None = None
    ) -> TrainState:
        """Run the first step, but with the order of units known, as from the second one on. Returns its state.

        `order`: the units as the pass fetches them, where that is known; else one more pass finds it out.
        """
        whole = nullcontext() if self._only_buckets else self.live
        with whole:
            state = self.scatter(self.unsharded.init(params, buffers, seed=None))
        with whole, _uncompiled():
            if any(level_of(bucket).cuts_params for bucket in self._layout.buckets):
                if order is None:
                    self._backward(state, batch, flats_of(state.params, self._layout, self._rank), self._layout)
                else:
                    self._trace = list(order)
            for kind, tree in ((None, (params, buffers, batch)), ("params", state[1:3]), ("state", state.opt_state)):
                self.live.adopt([x for x in optree.tree_leaves(tree) if isinstance(x, Tensor)], kind)
            self._journal.recorded.clear()
            self.samples.clear()
            self(state, batch)
        assert order is None or not self._trace or self._trace == list(order), "units came in another order"
        return state

    def _watched(self, loss_fn: LossFn) -> LossFn:
        """The loss, before and after which the phase changes. A weight is a number, since nobody knows its value."""

        def loss(params: Any, buffers: Any, batch: Any) -> Any:
            for run in {handle.entrance for handle in optree.tree_leaves(params)}:
                run.source = Noted(run.source, run.name, self._journal)
            self._enter("forward")
            result = loss_fn(params, buffers, batch)
            self._enter("backward")
            if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Aux):
                given, aux = result
                return given, replace(aux, weight=None if aux.weight is None else 1.0)
            return result

        return loss

    def _make_layout(self, params: PyTree[Tensor]) -> Layout:
        return self._layout

    def _prepare(self, layout: Layout) -> Any:
        return _Announced(super()._prepare(layout), self._enter, idle=self._only_buckets)

    def _backward(self, state: TrainState, batch: Any, flats: list[Tensor], layout: Layout) -> Any:
        state = state._replace(params=None)  # which may be cut in another way
        with self.live if self._only_buckets else nullcontext():  # nothing is made before and after
            made = super()._backward(state, batch, flats, self._pass_layout)
        self.reduced = sum(flat.nbytes for flat in made[0].values())
        return made

    def _report(self, state: TrainState, outcome: Outcome, log: list[str], more: list[bool]) -> agreement.Report:
        """The same all-reduce, of numbers that are there, and the buffers that were written to."""
        self._enter("metrics")
        before, (after, treedef) = optree.tree_leaves(state.buffers), optree.tree_flatten(outcome.buffers)
        kept = [o if self.live.is_untouched_copy(n, o) else n for o, n in zip(before, after, strict=True)]
        metrics, buffers = dict.fromkeys(outcome.metrics, 0.0), treedef.unflatten(kept)
        with self.live.paused():
            known = outcome._replace(loss=torch.zeros(()), metrics=metrics, buffers=buffers)
            report = super()._report(state, known, log, more)
        self._enter("buffers")
        return report

    def _enter(self, phase: str) -> None:
        self._journal.enter(phase)
        self._sample()

    def _adopt(self, kind: str, tensor: Tensor) -> None:
        self.live.adopt([tensor], kind)
        self._sample()

    def _name(self, collective: Collective) -> None:
        """Where params are not gathered, the unit in use is known when its gradients are reduced."""
        if (
            collective.unit
            and collective.phase == "backward"
            and self.samples
            and self.samples[-1].moment == "backward"
        ):
            self.samples[-1] = self.samples[-1]._replace(moment=f"backward of {collective.unit}")

    def _sample(self) -> None:
        """What is here at this moment: of each unit in each phase the highest sample is kept."""
        phase, unit = self._journal.phase, self._journal.unit
        moment = f"{phase} of {unit}" if unit and phase in ("forward", "backward") else phase
        new = not self.samples or self.samples[-1].moment != moment
        if new or self.live.total >= self._highest:
            self._highest = self.live.total
            self.samples[len(self.samples) - (not new) :] = [Sample(moment, **self.live.now)]


def _uncompiled() -> AbstractContextManager[Any]:
    """Compiled regions run operator by operator: there is nothing to compile for without values."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


class _Announced:
    """A prepared update that says when it begins and ends; an idle one works in place, and takes no room."""

    def __init__(self, prepared: Any, enter: Callable[[str], None], *, idle: bool) -> None:
        self._prepared, self._enter, self._idle = prepared, enter, idle
        self.plan, self.across, self.flats = prepared.plan, prepared.across, prepared.flats

    def update(self, grads: Pieces, state: Any, params: Pieces) -> Any:
        self._enter("optimizer")
        made = (None, state) if self._idle else self._prepared.update(grads, state, params)
        self._enter("publish")
        return made
