"""A step's loss and backward on fake tensors: the collectives it starts, and its memory with activations."""

from __future__ import annotations

from typing import Any, NamedTuple

import optree
import torch
from optree import PyTree, tree_map
from torch import Tensor

from ..buffers import BufferRule, sync_buffers
from ..groups.axes import axes_of
from ..layout import Layout
from ..levels import Level, make_sink, make_sources
from ..sinks import Sink
from ..step import LossFn, Outcome, call_loss, micro_batches
from ..unit import Pass, UnitRun
from .live import LiveBytes, key_of
from .recording import Recorder
from .records import Sample
from .update import fake_tensors


class Trace(NamedTuple):
    """What a traced pass tells beside its collectives."""

    samples: list[Sample]
    metrics: tuple[str, ...]  # beside the loss
    weighted: bool


class TracedPass:
    """Forward, backward and the buffers' exchange of one step.

    Args:
        loss: `(params, buffers, batch) -> loss`, or with `Aux`, as `train_step` takes it.
        base: bytes of params and optimizer state, held all the time.
    """

    def __init__(
        self,
        layout: Layout,
        level: Level,
        group: Recorder,
        loss: LossFn,
        *,
        keeps: bool,
        base: tuple[int, int],
        rule: BufferRule,
        accumulate: int,
    ):
        self._layout, self._level, self._group, self._loss = layout, level, group, loss
        self._keeps, self._base, self._rule = keeps, base, rule
        self._accumulate = accumulate
        self._samples: list[Sample] = []
        self._live = LiveBytes(self._grown)
        self._run: _Pass | None = None

    def run(self, buffers: PyTree[Tensor], batch: Any) -> Trace:
        """Two passes: the first one finds the order of units, the second one is a step's in its steady state."""
        with fake_tensors() as mode:
            buffers, batch = fake = tree_map(lambda x: _fake(x, mode), (buffers, batch))
            flats = [_flat(self._layout, self._level, b, mode) for b in range(len(self._layout.buckets))]
            ahead: list[str] = []
            for _ in range(2):
                self._group.recorded.clear()
                self._samples.clear()
                self._live = LiveBytes(self._grown)
                for tensor in (*flats, *(x for x in optree.tree_leaves(fake) if isinstance(x, Tensor))):
                    self._live.ignore(tensor)
                with mode, self._live:
                    outcome, ahead = self._step(flats, buffers, batch, ahead)
        return Trace(self._samples, tuple(outcome.metrics), outcome.weight is not None)

    def _step(self, flats: list[Tensor], buffers: Any, batch: Any, ahead: list[str]) -> tuple[Outcome, list[str]]:
        """As a sharded step's, up to the buffers' exchange."""
        sink = make_sink(self._layout, axes_of(self._group), self._group.log)
        outcomes: list[Outcome] = []
        new = buffers
        parts = micro_batches(batch, self._accumulate)
        for i, part in enumerate(parts):
            outcome, ahead = self._pass(flats, new, part, ahead, sink, last=i == len(parts) - 1)
            outcomes.append(outcome)
            new = outcome.buffers
        reduced = sink.finish()
        self._enter_phase("buffers")
        with torch.no_grad():
            sync_buffers(buffers, new, self._changed(buffers, new), self._rule, self._group)
        del reduced
        return outcomes[-1], ahead

    def _pass(
        self, flats: list[Tensor], buffers: Any, batch: Any, ahead: list[str], sink: Sink, *, last: bool
    ) -> tuple[Outcome, list[str]]:
        sources = make_sources(flats, self._layout, axes_of(self._group), self._group.log)
        device = flats[0].device
        run = _Pass(self._layout, sources, sink, device=device, keeps=self._keeps, ahead=ahead, last=last)
        self._run = run
        self._enter_phase("forward")
        with torch.enable_grad():
            outcome = call_loss(self._loss, run.handles(), buffers, batch)
            run.loss_ended(outcome.weight)
            self._enter_phase("backward")
            torch.autograd.grad(outcome.loss, [run.anchor], torch.ones_like(outcome.loss), allow_unused=True)
        run.finish()
        return outcome._replace(loss=outcome.loss.detach()), run.trace

    def _enter_phase(self, phase: str) -> None:
        self._group.phase = phase
        self._group.notice = self._live.is_for

    def _changed(self, old: PyTree[Tensor], new: PyTree[Tensor]) -> list[bool]:
        pairs = zip(optree.tree_leaves(old), optree.tree_leaves(new), strict=True)
        return [not self._live.is_untouched_copy(b, a) for a, b in pairs]

    def _grown(self) -> None:
        """More memory than at any other time in this unit and phase: that is what this moment's sample says."""
        unit = self._run.current if self._run is not None else ""
        phase = self._group.phase
        now = self._live.now
        sample = Sample(
            f"{phase} of {unit}" if unit and phase in ("forward", "backward") else phase,
            *self._base,
            now["gradients"],
            now["gathered"],
            now["activations"],
        )
        if not self._samples or self._samples[-1].moment != sample.moment:
            self._samples.append(sample)
        elif sample.total > self._samples[-1].total:
            self._samples[-1] = sample


class _Pass(Pass):
    """A pass on fake tensors, which know their storages by identity for want of addresses."""

    current = ""  # the unit that was needed last

    def fetch(self, run: UnitRun) -> list[Tensor]:
        self.current = run.name
        flats = super().fetch(run)
        self._storages.pop(0, None)
        for k, flat in enumerate(flats):
            self._storages[key_of(flat)] = (run, k)
        return flats

    def _pack(self, tensor: Tensor) -> Any:
        owner = self._storages.get(key_of(tensor))
        if owner is None:
            return tensor, tensor._version
        owner[0].note_saved()
        return owner[0].entry, *owner, tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()


def _flat(layout: Layout, level: Level, b: int, mode: Any) -> Tensor:
    bucket = layout.buckets[b]
    with mode:
        return torch.empty(bucket.held.piece, dtype=bucket.dtype)


def _fake(x: Any, mode: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    with mode:
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype)
