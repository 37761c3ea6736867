"""A program's step on a rank that is not there: the program runs as it stands, without values and
without ranks.

Its trees lie on an engine that announces each call: gradients, updates, and params + updates. The
step runs twice, since the first run finds out the order of units.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from .._torch_private import FakeTensorMode
from ..layout.sharded_tree import ShardedTree
from ..optim.base import Transform
from ..params import is_on_engine
from ..sharded.average import Report
from ..sharded.engine import ShardedEngine
from ..sharded.options import Options
from ..sharded.piece_watch import PieceWatch
from ..sharded.program_step import ShardedProgramStep
from ..step.loss import Metrics, Outcome, as_metric
from ..step.program import LossCall
from ..step.program_step import ProgramStep, named_args
from ..step.state import State
from ..tree import PyTree
from .imagined_ranks import Recorder
from .live_bytes import uncompiled
from .watch import Watch

BETWEEN = "program"  # the phase outside of all calls


class ImaginedProgram(ShardedProgramStep):
    """A program's step, sampled between the functions that it calls.

    Args:
        step: the program.
        options: of `shard`, with a `Recorder` for a group.
        fake: the mode of the tensors without values.

    Attributes:
        watch: the memory from moment to moment.
    """

    def __init__(self, step: ProgramStep, options: Options, fake: FakeTensorMode):
        assert isinstance(options.group, Recorder)
        self.watch = Watch(options.group.journal, fake)
        self._announcing = _AnnouncingEngine(options, self.watch)
        super().__init__(step, options, self._announcing)

    def run(self, trees: tuple[Any, ...], args: tuple[Any, ...]) -> State:
        """Run one step, but with the order of units known, as from the second one on. Returns the
        state that it was given.

        Args:
            trees: the arguments of `init`, without values.
            args: those of the step after the state, a rank's own.
        """
        with self.watch.live, uncompiled():
            state = self.init(*trees)
            self._adopt_held((trees, args), state.value)
            self(state, *args)  # which finds out the order
            self.watch.begin()
            self.watch.enter(BETWEEN)
            self(state, *args)
        return state

    @property
    def reduced(self) -> int:
        """Bytes of the largest gradients that the program was given."""
        return self._announcing.reduced

    def init(self, *args: Any, seed: int | None = 0, values: Any = None) -> State:
        """The first state. Nobody is there to agree with, and nothing has a value to compare."""
        with torch.no_grad():
            given = named_args(self.unsharded.first_value, args)
            return self._first_state(given, self._layouts(given), seed, {})

    def _agree(
        self, number: int, value: Any, metrics: Metrics, num_draws: int, watch: PieceWatch
    ) -> None:
        self.watch.enter("metrics")
        # The same message about no results: a digest has the same length whatever it is of
        with self.watch.live.paused():
            super()._agree(number, (), {}, num_draws, PieceWatch(self.group.rank))

    def _adopt_held(self, given: Any, value: Any) -> None:
        """Give each tensor that is held between steps its kind, before anything is counted."""
        held, others = held_and_others(value)
        live = self.watch.live
        live.adopt(_tensors(given), None)
        live.adopt(others, "state")
        live.adopt(held, "params")


class _AnnouncingEngine(ShardedEngine):
    """Tells a watch the phase of each call, and asks nobody for values."""

    def __init__(self, options: Options, watch: Watch):
        super().__init__(options)
        self._watch = watch
        self.reduced = 0

    def init(self, transform: Transform, params: ShardedTree) -> Any:
        return self.first_state(transform, params)

    def value_and_grad(self, call: LossCall, tree: Any) -> tuple[Any, Any]:
        call.loss = self._watch.announced(call.loss)
        value, grads = super().value_and_grad(call, tree)
        self.reduced = max(self.reduced, sum(flat.nbytes for flat in _tensors(grads)))
        self._watch.enter(BETWEEN)
        return value, grads

    def changed_buffers(self, old: PyTree[Tensor], new: PyTree[Tensor]) -> Sequence[bool]:
        if self.options.axes.data.size == 1:
            return [False] * len(_tensors(old))
        pairs = zip(_tensors(old), _tensors(new), strict=True)
        # A copy that nobody wrote to is not synchronized on a real rank
        return [not self._watch.live.is_untouched_copy(after, before) for before, after in pairs]

    def average(
        self, outcome: Outcome, log: Sequence[str], changed: Sequence[bool], size: int
    ) -> Report:
        self._watch.enter("metrics")
        # Numbers that are packed and sent; their values decide nothing here
        numbers = outcome._replace(
            loss=torch.zeros((), device="cpu"), metrics=dict.fromkeys(outcome.metrics, 0.0)
        )
        with self._watch.live.paused():
            report = super().average(numbers, log, changed, size)
        # The program's own code may not read them either
        metrics = {"loss": outcome.loss.detach()}
        for name, value in outcome.metrics.items():
            metrics[name] = as_metric(value)
        return report._replace(metrics=metrics)

    def update(
        self, transform: Transform, updates: ShardedTree, state: Any, params: ShardedTree
    ) -> tuple[ShardedTree, Any]:
        self._watch.enter("optimizer")
        found, after = super().update(transform, updates, state, params)
        self._watch.live.adopt(_tensors(after), "state")
        self._watch.enter(BETWEEN)
        return found, after

    def apply(
        self, transform: Transform, grads: ShardedTree, state: Any, params: ShardedTree
    ) -> tuple[ShardedTree, Any]:
        self._watch.enter("optimizer")
        new, after = super().apply(transform, grads, state, params)
        self._watch.live.adopt(new.flats(), "params")
        self._watch.live.adopt(_tensors(after), "state")
        self._watch.enter(BETWEEN)
        return new, after

    def apply_updates(self, params: ShardedTree, updates: ShardedTree) -> ShardedTree:
        self._watch.enter("publish")
        new = super().apply_updates(params, updates)
        self._watch.live.adopt(new.flats(), "params")
        self._watch.enter(BETWEEN)
        return new


def held_and_others(value: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors of a program's value: those of trees in the form of params, and all others."""
    held: list[Tensor] = []
    others: list[Tensor] = []
    for node in optree.tree_leaves(value, is_leaf=is_on_engine):
        if isinstance(node, ShardedTree) and node.holding.form == "held":
            held += node.flats()
        else:
            others += _tensors(node)
    return held, others


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, Tensor)]
