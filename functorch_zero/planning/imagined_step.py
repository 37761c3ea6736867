"""A step on a rank that is not there: the program runs as it stands, without values and without
ranks.

Three things are imagined, and the rest is the code that trains:

- tensors: fake ones of a device. `LiveBytes` makes them and counts the bytes that are alive, by
  kind.
- the other ranks: a `Recorder` notes each collective, and leaves its tensors as they are.
- time: a `MemoryWatch` knows the phase and the unit in use, and makes samples.

The trees lie on an engine that announces each call: gradients, updates, and params + updates. The
ranks agree with nobody. The step runs twice, since the first run finds out the order of units, and
how many gradients come before a step that donates may write.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import optree
import torch
from optree import tree_map
from torch import Tensor

from ..layout.layout import Layout
from ..layout.sharded_tree import ShardedTree, is_held
from ..optim.base import Transform
from ..params import as_local, is_on_engine
from ..sharded.background import BackgroundTasks
from ..sharded.notes import bytes_held
from ..sharded.options import Options
from ..sharded.placed import stored_flats
from ..sharded.program.agreement import AgreementOfRanks
from ..sharded.program.engine import ShardedEngine
from ..sharded.program.gradient import agree_on, finish, is_fine
from ..sharded.program.ledger import Ledger
from ..sharded.program.passes import differentiate
from ..sharded.program.step import ShardedStep
from ..sharded_optim.sharded_state import ShardedOptState
from ..step.loss import as_metric
from ..step.program import LossCall
from ..step.program_step import ProgramStep, entry_of
from ..step.state import State
from ..tree import has_values
from .elsewhere import Elsewhere, with_imagined_places
from .live_bytes import uncompiled
from .watch import MemoryWatch, with_numbers

BETWEEN = "program"  # the phase outside of all calls


class ImaginedStep:
    """A step, sampled between the functions that it calls.

    Args:
        step: the program.
        options: of `shard`, with a `Recorder` for a group.
        watch: that the `Recorder` tells.
        device: of the params; meta: nobody has said.

    Attributes:
        engine: of the trees.
        held: bytes of the first value's trees that are held as params are.
        buffers: bytes of its buffers.
        others: bytes of the rest of that value.
        places: the stand-ins for the user's, by kind.
        parts: bytes that the gradients' reduction keeps between steps.
    """

    def __init__(
        self,
        step: ProgramStep,
        options: Options,
        watch: MemoryWatch,
        device: torch.device,
    ):
        self.watch = watch
        options, self.places = with_imagined_places(options, self.watch, device)
        self.engine = _AnnouncedEngine(options, self.watch, self.places)
        agreement = _ImaginedAgreement(step, options, self.watch)
        # The first of its steps is one to find out the order: it donates nothing
        step = replace(step, num_gradients=None)
        self._step = ShardedStep(step, options, self.engine, agreement)
        self.held = self.buffers = self.others = self.parts = 0

    def run(self, trees: tuple[Any, ...], args: tuple[Any, ...]) -> Layout:
        """Run one step, but with the order of units known, as from the second one on. Returns the
        layout of all trees.

        Args:
            trees: the arguments of `init`, without values.
            args: those of the step after the state, a rank's own.
        """
        with self.watch.live, uncompiled():
            state = self._without_values(self._step.init(*trees))
            self._adopt_held((trees, args), state)
            self._first_step(state, args)
            self.watch.begin()
            gc.collect()  # what `init` and the first call have left in cycles
            # Numbers of the first call's state, which an update remembers
            self.watch.live.discount("state")
            self._adopt_held((trees, args), state)
            for elsewhere in self.places.values():
                elsewhere.begin()
            self.watch.enter(BETWEEN)
            self._step(state, *args)
        assert state.sharding is not None
        return state.sharding.layout

    def _first_step(self, state: State, args: tuple[Any, ...]) -> None:
        """A step that finds out the order. It donates nothing, and what it gathers for the trees
        isn't here in the next one, whose trees are other ones."""
        held = held_trees(state.value)
        published = [tree.published() for tree in held]
        self._step(state, *args)
        for tree, known in zip(held, published, strict=True):
            tree.note_published(known)

    def _without_values(self, state: State) -> State:
        """A first state whose tensors of one or more dims have no values: those that `init` has
        brought along, such as buffers, would be compared with what a step makes of them."""

        def bare(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.dim() == 0 or not has_values(leaf):
                return leaf
            if self.watch.fake is None:
                return torch.empty_like(leaf, device="meta")
            return self.watch.fake.from_tensor(leaf)  # views of one storage stay that

        with self.watch.live.paused():
            return state.replace(value=tree_map(bare, state.value, is_leaf=is_on_engine))

    def _adopt_held(self, given: Any, state: State) -> None:
        """Give each tensor that is held between steps its kind, before anything is counted."""
        held, others = held_and_others(state.value)
        names = self._step.unsharded.buffers
        buffers = _tensors([entry_of(state.value, name) for name in names])
        parts = _tensors(state.parts)
        self.held, self.buffers = bytes_held(held), bytes_held(buffers)
        self.others = bytes_held(others) - self.buffers
        self.parts = bytes_held(parts)
        # The last kind counts, where this rank's part is the given tensor itself
        self.watch.live.adopt(_tensors(given), None)
        self.watch.live.adopt([*others, *parts], "state")
        self.watch.live.adopt([*held, *buffers], "params")


class _ImaginedAgreement:
    """An `Agreement` of ranks that are not there. Nothing has a value that could be compared; what
    a step sends is sent."""

    def __init__(self, step: ProgramStep, options: Options, watch: MemoryWatch):
        self._agreement = AgreementOfRanks(step, options, BackgroundTasks())
        self.is_by_gradients, self.own = self._agreement.is_by_gradients, self._agreement.own
        self._watch = watch

    def on_arguments(self, *given: Any) -> None:
        return None

    def on_first_value(self, value: Any, fills: Any) -> None:
        return None

    def looks_at(self, call: int) -> bool:
        return False  # most steps aren't looked at

    def compare(
        self, ledger: Ledger, label: str, *, flags: Sequence[bool] = (), batch: Any = None
    ) -> list[bool]:
        if label == "step/agreement":
            self._watch.enter("metrics")
        with self._watch.live.paused():
            return self._agreement.compare(ledger, label, flags=flags, batch=batch)


class _AnnouncedEngine(ShardedEngine):
    """An engine that tells a watch the phase of each call, and asks nobody for values.

    Attributes:
        reduced: bytes of the largest gradients that the program was given.
    """

    def __init__(self, options: Options, watch: MemoryWatch, places: Mapping[str, Elsewhere]):
        super().__init__(options)
        self._watch, self._places = watch, places
        self.announce = watch.enter
        self.reduced = 0

    def init(self, transform: Transform, params: ShardedTree) -> Any:
        # Without the agreement of ranks, and the proof of the transform's claims
        return self.first_state(transform, params)

    def value_and_grad(self, call: LossCall, tree: Any) -> tuple[Any, Any]:
        call.loss = self._watch.announced(call.loss)
        run = self.open_gradient(call, tree)
        local = differentiate(run)
        fine = is_fine(run, local)  # which the watch answers with yes
        self._watch.enter("metrics")
        with self._watch.live.paused():
            agreed = agree_on(run, with_numbers(local, call.buffers, self._watch.live), fine=fine)
        # The program's own code may not read the means either
        metrics = {"loss": local.outcome.loss.detach()}
        for name, value in local.outcome.metrics.items():
            metrics[name] = as_metric(value)
        report = agreed.report._replace(metrics=metrics)
        results, grads = finish(run, local, agreed._replace(report=report))
        if run.scope is not None and run.scope.donation is not None:
            run.scope.donation.num_taken += 1
        self.reduced = max(self.reduced, sum(flat.nbytes for flat in _tensors(grads)))
        self._watch.enter(BETWEEN)
        return results, grads

    def update(
        self, transform: Transform, updates: ShardedTree, state: Any, params: ShardedTree
    ) -> tuple[ShardedTree, ShardedOptState]:
        self._watch.enter("optimizer")
        found, after = super().update(transform, updates, state, params)
        self._adopt_state(after)
        self._watch.enter(BETWEEN)
        return found, after

    def apply(
        self,
        transform: Transform,
        grads: ShardedTree,
        state: Any,
        params: ShardedTree,
        **how: Any,
    ) -> tuple[ShardedTree, ShardedOptState]:
        self._watch.enter("optimizer")
        new, after = super().apply(transform, grads, state, params, **how)
        self._adopt_params(new)
        self._adopt_state(after)
        self._watch.enter(BETWEEN)
        return new, after

    def apply_updates(self, params: ShardedTree, updates: ShardedTree) -> ShardedTree:
        self._watch.enter("publish")
        new = super().apply_updates(params, updates)
        self._adopt_params(new)
        self._watch.enter(BETWEEN)
        return new

    def _adopt_params(self, params: ShardedTree) -> None:
        """Note params that were made, or written over."""
        self._watch.live.adopt(flats_here(params), "params")
        if "params" in self._places:
            places, layout = self.options.places.params, params.sharding.layout
            for flats in (params.flats(), params.published()):
                written = stored_flats(places, flats, layout, trained=True)
                self._places["params"].written += bytes_held(written)

    def _adopt_state(self, state: ShardedOptState) -> None:
        """Note an optimizer's state that was made, or written over."""
        self._watch.live.adopt(_tensors(state), "state")
        if "state" in self._places:
            written = filter(self._places["state"].holds, _tensors(state))
            self._places["state"].written += bytes_held(written)


def held_and_others(value: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors of a program's value: those of trees in the form of params, and all others."""
    held: list[Tensor] = []
    others: list[Tensor] = []
    for node in optree.tree_leaves(value, is_leaf=is_on_engine):
        if is_held(node):
            held += flats_here(node)
        else:
            others += _tensors(node)
    return held, others


def held_trees(value: Any) -> list[ShardedTree]:
    """The trees of a value in the form of params."""
    return [*filter(is_held, optree.tree_leaves(value, is_leaf=is_on_engine))]


def flats_here(params: ShardedTree) -> list[Tensor]:
    """The flats of a tree that is held as params are, and the published ones beside them."""
    return [*params.flats(), *(flat for flat in params.published() if flat is not None)]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in optree.tree_leaves(as_local(tree)) if isinstance(leaf, Tensor)]
