"""One rank's step, imagined: the real phases of a sharded step, without values and without ranks.

Three things are imagined, and the rest is the code that trains:

- tensors: on the meta device, or fake ones of a device. `LiveBytes` makes them and counts the bytes
  that are alive, by kind.
- the other ranks: a `Recorder` notes each collective, and leaves its tensors as they are.
- time: a `Journal` knows the phase and the unit in use. A `MemoryWatch` makes samples.

A step goes through `_open`, `differentiate`, `agree_on` and `advance`; the functions below follow
that order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import optree
import torch
from optree import PyTree
from torch import Tensor

from .._torch_private import FakeTensorMode, storage_id
from ..layout.layout import Layout
from ..layout.levels import level_of
from ..layout.sharded_tree import ShardedTree
from ..params import as_local
from ..places import ByUnit, Here, ahead_of, brings_copies
from ..runtime.prefetch import PrefetchOrder
from ..sharded.background import BackgroundTasks
from ..sharded.equal_batches import EqualBatches
from ..sharded.options import Options
from ..sharded.phases import LocalResults, Run, advance, agree_on, differentiate
from ..sharded.placed import Stored, moved_tree, stored_flats
from ..sharded.state import cut_state
from ..sharded.update import PreparedUpdate
from ..sharded_optim.ferry import Coming, home_of, in_turn
from ..sharded_optim.sharded_state import ShardedOptState
from ..step.state import State
from ..step.train import TrainStep
from .imagined_ranks import Recorder
from .live_bytes import bytes_held, uncompiled
from .watch import MemoryWatch, with_numbers


class ImaginedStep:
    """One step on a rank that is not there, sampled between its phases.

    Args:
        step: its loss and optimizer.
        options: of `shard`, with a `Recorder` for a group.
        layout: of params and of the optimizer's state.
        pass_layout: of the params that the loss sees, with the same units and buckets. A stand-in
            loss sees one leaf per bucket.
        fake: the mode of the tensors without values; None: the meta device.
        rows: how many rows of a table a lookup asks for, by pattern of its path.
        device: of the params; meta: nobody has said.

    Attributes:
        watch: the memory from moment to moment, of the step that was run last.
        live: the bytes alive.
        places: the stand-ins for the user's, by kind.
        reduced: bytes of the gradients that it gave to the optimizer.
        published: bytes of the whole flats that are published beside pieces of params.
    """

    def __init__(
        self,
        step: TrainStep,
        options: Options,
        layout: Layout,
        pass_layout: Layout,
        fake: FakeTensorMode | None,
        rows: Mapping[str, int],
        device: torch.device,
    ):
        assert isinstance(options.group, Recorder)
        self.watch = MemoryWatch(options.group.journal, fake, rows)
        self.live = self.watch.live
        # The loss announces its phases; nothing else of it changes
        self._step = replace(step, loss_fn=self.watch.announced(step.loss_fn))
        self._options, self.places = with_imagined_places(options, self.watch, device)
        self._layout, self._pass_layout = layout, pass_layout
        # Both layouts have one leaf per bucket where loss and optimizer treat all elements alike.
        # Then the update makes nothing that has to be followed.
        # Else every operator is followed: an optimizer makes temporaries, a real loss activations
        self._only_buckets = fake is None and layout is pass_layout
        self.reduced = self.published = 0

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
        # Following costs time per operator, so it is left out where it would count nothing
        whole = nullcontext() if self._only_buckets else self.live
        with whole:
            run = self._open(params, buffers, batch)
            # The step uses up the tree that it is given, as donated; the plan counts leaves alone
            state: State = as_local(run.state)
        published = [flat for flat in run.state.params.published() if flat is not None]
        self.published = bytes_held(published)
        with whole, uncompiled():
            last_order = self._order_before(run, order)
            # Tensors made so far have no kind, or that of activations
            self._adopt_held((params, buffers, batch), state)
            self.live.adopt(published, "params")
            published.clear()  # the step lets go of them
            # Forget the state's making, and the pass that found out the order
            self.watch.begin()
            for elsewhere in self.places.values():
                elsewhere.begin()
            local = self._differentiate(run, last_order)
            # Bytes of the gradients, on this rank
            self.reduced = sum(flat.nbytes for flat in local.reduced.values())
            self.watch.enter("metrics")
            with self.live.paused():  # ranks agree on numbers, which have values
                numbers = with_numbers(local.passed, run.state.buffers, self.live)
                local, tasks = local._replace(passed=numbers), BackgroundTasks()
                agreed = agree_on(run, local, tasks, EqualBatches(1))
            self.watch.enter("buffers")
            new, _ = advance(run, local, agreed)
            if "params" in self.places:
                own = self._options.places.params
                written = stored_flats(own, new.params.flats(), self._layout, trained=True)
                written += stored_flats(own, new.params.published(), self._layout, trained=True)
                self.places["params"].written = bytes_held(written)
        # The order by names must be the one that the pass has gone through
        if order is not None and last_order.units:
            assert [*last_order.units] == [*order], "units came in another order"
        return state

    # The phases, in order

    @torch.no_grad()
    def _open(self, params: PyTree[Tensor], buffers: PyTree[Tensor], batch: Any) -> Run:
        """This rank's part of the first state, and the update of it."""
        step, options = self._step, self._options
        prepared = PreparedUpdate.of_step(step, self._layout, options)
        # No seed: nothing is drawn where nothing has values
        whole = step.init(params, buffers, seed=None)
        sharding = options.sharding(self._layout)
        state = cut_state(whole, prepared, sharding)
        params_there = moved_tree(options.places.params, state.params)
        opt_state = prepared.placed(state.value.opt_state)
        state = state.replace(params=params_there, opt_state=opt_state)
        flats = params_there.flats()
        updater = _Announced(
            prepared, self.watch.enter, self.places.get("state"), idle=self._only_buckets
        )
        # `parts` are tensors that the gradients' reduction keeps. They and the options are real:
        # only groups and updater are imagined
        return Run(step, options, state, batch, sharding, flats, updater, prepared.parts)

    def _order_before(self, run: Run, order: Sequence[str] | None) -> PrefetchOrder:
        """The order of units as the step before has recorded it; empty where no params are cut. A
        pass of its own finds it out, unless `order` is known."""
        last_order = PrefetchOrder()
        # Only level 3 gathers params in a pass
        if any(level_of(bucket).cuts_params for bucket in self._layout.buckets):
            if order is None:
                self._differentiate(run, last_order)
            else:
                last_order.record(order)
        return last_order

    def _adopt_held(self, given: Any, state: State) -> None:
        """Give each tensor that is held between steps its kind, before anything is counted."""
        kinds = (  # the last one counts, where a rank's part is the given tensor itself
            (None, given),
            ("params", (state.params, state.buffers)),
            ("state", (state.opt_state, state.parts)),
        )
        for kind, tree in kinds:
            leaves = optree.tree_leaves(as_local(tree))
            self.live.adopt([leaf for leaf in leaves if isinstance(leaf, Tensor)], kind)

    def _differentiate(self, run: Run, order: PrefetchOrder) -> LocalResults:
        """Forward and backward, on the layout of the pass."""
        sharding = replace(run.sharding, layout=self._pass_layout)
        # The same flats in a tree of the pass layout
        given: ShardedTree = run.state.params
        params = ShardedTree.of_flats(run.flats, replace(given.holding, sharding=sharding))
        params.note_published(given.published())
        run = replace(run, sharding=sharding, state=run.state.replace(params=params))
        # With buckets alone nothing is made before and after the pass: so it alone is followed
        with self.live if self._only_buckets else nullcontext():
            return differentiate(run, order)


class Elsewhere:
    """A place for tensors without values, which no device takes.

    Args:
        kind: of what lies here.
        ahead: as of a place.
        brings_copies: else a step works in it, as in a `File`.

    Attributes:
        read, written: bytes that were brought and left since it began.
    """

    def __init__(self, kind: str, watch: MemoryWatch, *, ahead: int, brings_copies: bool):
        self._kind, self._watch, self._live = kind, watch, watch.live
        self.ahead, self.brings_copies = ahead, brings_copies
        # By storage, until it goes
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._now = self._most = self._held = self.read = self.written = 0

    def begin(self) -> None:
        """Forget what was, but for the tensors that lie here."""
        self._most = self._held = self._now
        self.read = self.written = 0

    def stored(self) -> Stored:
        """The bytes since it began."""
        kind = self._kind
        # Nobody brings what is worked on where it lies: params that a step begins with, and sums
        # of gradients, which the update reads
        read = {"params": self._held, "gradients": self.written}.get(kind, self.read)
        return Stored(kind, self._most, read, self.written)

    def empty(self, like: Tensor) -> Tensor:
        with self._live.paused():
            made = torch.empty_like(like, memory_format=torch.contiguous_format)
        storage, key = made.untyped_storage(), storage_id(made)
        self._refs[key] = weakref.ref(storage, partial(self._gone, key, made.nbytes))
        self._live.elsewhere.add(key)
        self._now += made.nbytes
        self._most = max(self._most, self._now)
        return made

    def holds(self, tensor: Tensor) -> bool:
        return storage_id(tensor) in self._refs

    def bring(self, stored: Tensor) -> Here:
        self.read += stored.nbytes
        if not self.brings_copies:
            return Here(stored)
        with self._live.paused():
            made = torch.empty_like(stored)
        self._watch.adopt("state" if self._kind == "state" else "activations", made)
        return Here(made)

    def leave(self, tensor: Tensor, into: Tensor) -> Here:
        self.written += into.nbytes
        return Here(into)

    def _gone(self, key: int, nbytes: int, _: Any) -> None:
        del self._refs[key]
        self._live.elsewhere.discard(key)
        self._now -= nbytes


def with_imagined_places(
    options: Options, watch: MemoryWatch, device: torch.device
) -> tuple[Options, dict[str, Elsewhere]]:
    """The same with stand-ins for the user's places, which would be asked for real memory; and
    these, one per kind. `device`: of the params."""
    made = {}
    for kind, places in options.places.given.items():
        ahead = max(map(ahead_of, places.distinct))
        brings = any(brings_copies(place, device) for place in places.distinct)
        made[kind] = Elsewhere(kind, watch, ahead=ahead, brings_copies=brings)
    by_unit: dict[str, ByUnit] = {}
    for kind, places in options.places.given.items():
        rule = {p: None if own is None else made[kind] for p, own in places.rule.items()}
        by_unit[kind] = ByUnit(rule)
    return replace(options, places=replace(options.places, **by_unit)), made


class _Announced:
    """An `Updater` that tells `enter` the phase that begins. An idle one leaves all as it is: it
    stands for an update in place, which takes no room."""

    def __init__(
        self,
        prepared: PreparedUpdate,
        enter: Callable[[str], None],
        elsewhere: Elsewhere | None,
        *,
        idle: bool,
    ) -> None:
        self._prepared, self._enter, self._elsewhere = prepared, enter, elsewhere
        self._idle = idle
        self.across, self.takes_rows = prepared.across, prepared.takes_rows

    def update(self, grads: ShardedTree, state: Any, params: ShardedTree, **how: bool) -> Any:
        self._enter("optimizer")
        updated: tuple[Any, Any]
        if self._idle:
            updated = None, self._carried(state, over=how["donate"])
        else:
            updated = self._prepared.update(grads, state, params, **how)
        self._enter("publish")
        return updated

    def _carried(self, state: ShardedOptState, *, over: bool) -> ShardedOptState:
        """The state after each bucket of it was brought and taken back, as an update does.
        `over`: to where it was."""
        if self._elsewhere is None:
            return state
        ferry, (leaves, treedef) = self._prepared.ferry, optree.tree_flatten(state.as_it_lies)
        ferry.begin(look=False, over=over)
        slots: dict[int, list[int]] = {}  # positions, by the bucket's one leaf
        for i, planned in enumerate(self._prepared.plan.leaves):
            home = home_of(leaves[i])
            if planned.is_cut and home is not None:
                slots.setdefault(planned.leaf, []).append(i)
                leaves[i] = home  # with the bucket's padding

        def begin(positions: list[int]) -> list[Coming]:
            return [ferry.bring(leaves[i], None) for i in positions]

        def run(positions: list[int], coming: list[Coming]) -> None:
            for i, one in zip(positions, coming, strict=True):
                here = ferry.wait(one)
                leaves[i] = ferry.take_back(here, here.tensor)

        in_turn([*slots.values()], begin, run, ferry.ahead)
        return ShardedOptState(treedef.unflatten(leaves), state.holding)

    def placed(
        self, state: ShardedOptState, old: ShardedOptState | None = None, *, look: bool = True
    ) -> ShardedOptState:
        made = self._prepared.placed(state, old, look=look)
        if self._elsewhere is not None:
            # Whether it was left there, or worked on where it lies
            self._elsewhere.written = bytes_held(self._prepared.stored_in(made.as_it_lies))
        return made
