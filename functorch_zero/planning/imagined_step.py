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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from ..layout.layout import Layout
from ..layout.sharded_tree import ShardedTree, is_held
from ..optim.base import Transform
from ..params import as_local, map_nodes, nodes_of
from ..sharded.notes import bytes_held
from ..sharded.options import Options
from ..sharded.placed import Stored, stored_flats
from ..sharded.program.agreement import AgreementOfRanks
from ..sharded.program.engine import ShardedEngine
from ..sharded.program.gradient import agree_on, finish
from ..sharded.program.ledger import Ledger
from ..sharded.program.passes import differentiate
from ..sharded.program.step import ShardedStep
from ..sharded_optim.sharded_state import ShardedOptState
from ..step.background import Background
from ..step.program import LossCall
from ..step.program_step import ProgramStep, entry_of
from ..step.state import State
from ..tree import has_values
from .elsewhere import Elsewhere, with_imagined_places
from .live_bytes import uncompiled
from .watch import MemoryWatch, with_numbers

BETWEEN = "program"  # the phase outside of all calls


class Imagined(NamedTuple):
    """The findings of an imagined step beside its moments, which the watch has sampled: bytes of a
    rank, as a `Plan` has them."""

    layout: Layout  # of all trees
    params: int  # the trees of the first value that are held as params are
    buffers: int
    state: int  # the rest of that value
    parts: int
    gradients: int
    stored: tuple[Stored, ...]


def imagine(
    step: ProgramStep,
    options: Options,
    watch: MemoryWatch,
    device: torch.device,
    trees: tuple[Any, ...],
    args: tuple[Any, ...],
) -> Imagined:
    """Run one step, but with the order of units known, as from the second one on.

    Args:
        step: the program.
        options: of `shard`, with a `Recorder` for a group.
        watch: that the `Recorder` tells.
        device: of the params; meta: nobody has said.
        trees: the arguments of `init`, without values.
        args: those of the step after the state, a rank's own.
    """
    options, places = with_imagined_places(options, watch, device)
    engine: Any = _AnnouncedEngine(options, watch, places)
    agreement = _ImaginedAgreement(step, options, watch)
    # The first of its steps is one to find out the order: it donates nothing
    sharded = ShardedStep(replace(step, num_gradients=None), options, engine, agreement)
    with watch.live, uncompiled(), _cycles_stay_young():
        state = _without_values(sharded.init(*trees), watch)
        _adopt_held(watch, (trees, args), state, step.buffers)
        _first_step(sharded, state, args)
        watch.begin()
        gc.collect(0)  # what `init` and the first call have left in cycles
        # Numbers of the first call's state, which an update remembers
        watch.live.discount_states()
        sizes = _adopt_held(watch, (trees, args), state, step.buffers)
        for elsewhere in places.values():
            elsewhere.begin()
        watch.enter(BETWEEN)
        sharded(state, *args)
    assert state.sharding is not None
    stored = tuple(own.stored() for own in places.values())
    return Imagined(state.sharding.layout, *sizes, engine.reduced, stored)


@contextmanager
def _cycles_stay_young() -> Iterator[None]:
    """Python doesn't look for cycles by itself, so that all made inside are of its youngest
    generation, in which it finds them a hundred times as fast as in a whole process."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _first_step(step: ShardedStep, state: State, args: tuple[Any, ...]) -> None:
    """A step that finds out the order. It donates nothing, and what it gathers for the trees isn't
    here in the next one, whose trees are other ones."""
    held = [*filter(is_held, nodes_of(state.value))]
    published = [tree.published() for tree in held]
    step(state, *args)
    for tree, known in zip(held, published, strict=True):
        tree.note_published(known)


def _without_values(state: State, watch: MemoryWatch) -> State:
    """A first state whose tensors of one or more dims have no values: those that `init` has brought
    along, such as buffers, would be compared with what a step makes of them."""

    def bare(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or not has_values(leaf):
            return leaf
        if watch.fake is None:
            return torch.empty_like(leaf, device="meta")
        return watch.fake.from_tensor(leaf)  # views of one storage stay that

    with watch.live.paused():
        return state.replace(value=map_nodes(bare, state.value))


def _adopt_held(
    watch: MemoryWatch, given: Any, state: State, names: Sequence[str]
) -> tuple[int, int, int, int]:
    """Give each tensor that is held between steps its kind, before anything is counted. Returns the
    bytes of params, buffers, the rest of the value, and parts; `names`: of the buffers."""
    held: list[Tensor] = []
    others: list[Tensor] = []
    for node in nodes_of(state.value):
        if is_held(node):
            held += _flats_here(node)
        else:
            others += _tensors(node)
    buffers = _tensors([entry_of(state.value, name) for name in names])
    parts = _tensors(state.parts)
    # The last kind counts, where this rank's part is the given tensor itself
    watch.live.adopt(_tensors(given), None)
    watch.live.adopt([*others, *parts], "state")
    watch.live.adopt([*held, *buffers], "params")
    of_buffers = bytes_held(buffers)
    return bytes_held(held), of_buffers, bytes_held(others) - of_buffers, bytes_held(parts)


class _ImaginedAgreement:
    """An `Agreement` of ranks that are not there. Nothing has a value that could be compared; what
    a step sends is sent."""

    def __init__(self, step: ProgramStep, options: Options, watch: MemoryWatch):
        self._agreement = AgreementOfRanks(step, options, Background())
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


class _AnnouncedEngine:
    """An engine that tells a watch the phase of each call, and asks nobody for values. All else is
    asked of the engine as it is.

    Attributes:
        reduced: bytes of the largest gradients that the program was given.
    """

    def __init__(self, options: Options, watch: MemoryWatch, places: Mapping[str, Elsewhere]):
        self._engine = ShardedEngine(options)
        self._engine.announce = watch.enter
        self._watch, self._places = watch, places
        self.reduced = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def init(self, transform: Transform, params: ShardedTree) -> Any:
        # Without the agreement of ranks, and the proof of the transform's claims
        return self._engine.first_state(transform, params)

    def value_and_grad(self, call: LossCall, tree: Any) -> tuple[Any, Any]:
        call.loss = self._watch.announced(call.loss)
        run = self._engine.open_gradient(call, tree)
        local = differentiate(run)
        self._watch.enter("metrics")
        with self._watch.live.paused():
            agreed = agree_on(run, with_numbers(local, call.buffers, self._watch.live))
        # The program's own code may not read the means either
        metrics = {"loss": local.outcome.loss.detach(), **local.outcome.metrics}
        means = agreed.means._replace(metrics=metrics)
        results, grads = finish(run, local, agreed._replace(means=means))
        self.reduced = max(self.reduced, sum(flat.nbytes for flat in _tensors(grads)))
        self._watch.enter(BETWEEN)
        return results, grads

    def update(self, *given: Any) -> Any:
        return self._announced("optimizer", self._engine.update, *given)

    def apply(self, *given: Any, **how: Any) -> Any:
        return self._announced("optimizer", self._engine.apply, *given, **how)

    def apply_updates(self, *given: Any) -> Any:
        return self._announced("publish", self._engine.apply_updates, *given)

    def _announced(self, phase: str, function: Callable[..., Any], *given: Any, **how: Any) -> Any:
        """The results of a call in a phase of its own: params and states that were made, or written
        over, are noted."""
        self._watch.enter(phase)
        made = function(*given, **how)
        for node in nodes_of(made):
            if isinstance(node, ShardedOptState):
                self._watch.live.adopt(_tensors(node), "state")
                if "state" in self._places:
                    written = [*filter(self._places["state"].holds, _tensors(node))]
                    self._places["state"].written += bytes_held(written)
            elif is_held(node):
                self._watch.live.adopt(_flats_here(node), "params")
                for flats in (node.flats(), node.published()) if "params" in self._places else ():
                    places, layout = self.options.places.params, node.sharding.layout
                    written = stored_flats(places, flats, layout, trained=True)
                    self._places["params"].written += bytes_held(written)
        self._watch.enter(BETWEEN)
        return made


def _flats_here(params: ShardedTree) -> list[Tensor]:
    """The flats of a tree that is held as params are, and the published ones beside them."""
    return [*params.flats(), *(flat for flat in params.published() if flat is not None)]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in optree.tree_leaves(as_local(tree)) if isinstance(leaf, Tensor)]
