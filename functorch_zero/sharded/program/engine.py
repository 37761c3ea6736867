"""`ShardedEngine`: gradients and updates of sharded trees, on the ranks that hold them.

One pass runs over all sharded trees that a loss is given: their layouts are joined under prefixes,
and a tree that is only read is frozen there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from ...errors import StructureError
from ...groups import labelled
from ...groups.era_counter import EraCounter
from ...layout.joined import Joined, join_layouts
from ...layout.layout import Layout
from ...layout.sharded_tree import Holding, ShardedTree, is_held, shapes_of
from ...layout.sharding import Sharding
from ...model.untouched import is_looked_at
from ...optim.base import Transform
from ...optim.claims.check import check_claims
from ...optim.naming import described
from ...optim.state_checks import check_opt_state
from ...optim.tree_norms import roots_of_totals, squares_of, without_trained
from ...profiling import ranged
from ...runtime.prefetch import PrefetchOrder
from ...runtime.reduce import SUMMED
from ...runtime.two_seeds import TwoSeeds
from ...sharded_optim.across import Sharded
from ...sharded_optim.ferry import Ferry
from ...sharded_optim.pointwise import CurrentUpdate, Donate
from ...sharded_optim.sharded_state import ShardedOptState, StateHolding, is_placed
from ...step.backward import nodes_behind
from ...step.loss import on_meta, untrained
from ...step.loss_calls import LossCalls
from ...step.program import LossCall
from ...step.scope import next_streams
from ...step.state import check_not_on_meta
from ...tree import PyTree, select
from ..agreement import agree
from ..checks import check_batch
from ..failures import sharing_failures
from ..options import Options, check_reduction
from ..params import all_gather_tree, make_reduction
from ..placed import StatePlaces, brought, emptied, placed
from ..publish import flats_of_pass, in_copied_flats, in_new_flats, publish
from ..refit import without_values
from ..state import all_gather_state, lay_out_state
from ..update import PreparedUpdate
from .gradient import (
    GradientRun,
    LossTrees,
    agree_on,
    finish,
    no_updates,
)
from .kept import KeptTensors
from .passes import differentiate
from .recent import Recent
from .scope import compared, ranks_here

# Layouts, combinations of trees, and updates, that an engine remembers: a program that cuts a tree
# in each step, or makes a transform, brings new ones each time
_MOST = 64


class ShardedEngine:
    """The functions of sharded trees on one rank. See `params.Engine`.

    Args:
        options: those of `shard` that say how trees are cut and gathered.
    """

    def __init__(self, options: Options):
        self.options = options
        places = options.places.state
        # One object: by it the engine knows states that lie in its places
        self._brought = None if places is None else partial(brought, places)
        self._calls = LossCalls()  # of losses, outside of steps
        # Of updates, and of states that none has made; on this rank alone
        self._runs, self._storings = itertools.count(), itertools.count()
        self._gradients = EraCounter(options.axes.world)  # which ranks compare, in the log
        # By layouts and what is trained: the same keys, in the same order, on every rank. Each
        # combination of trees is gathered in an order of its own
        self._joined: Recent[Any, tuple[Joined, PrefetchOrder]] = Recent(_MOST)
        # By the id of a layout, which the value keeps alive
        self._across: Recent[int, Sharded] = Recent(_MOST)
        # By transform, and the id of a layout; a prepared update keeps both alive
        self._updates: Recent[tuple[Transform, int], PreparedUpdate] = Recent(_MOST)
        self.announce: Callable[[str], None] = _nobody_listens  # told the phase that begins
        # While a step's `init` runs: that which ranks have compared with its arguments
        self.agreed: Transform | None = None
        # Of those that ranks have compared
        self._descriptions: Recent[Transform, Any] = Recent(_MOST)

    def __eq__(self, other: object) -> bool:
        """Whether trees of both can be used together: they lie on one group, cut over one mesh.

        The other options may differ: those of the first tree then hold for all.
        """
        if not isinstance(other, ShardedEngine):
            return False
        mine, others = self.options.axes, other.options.axes
        # A mesh is a group itself, so the same world has the same axes
        return mine.world is others.world and mine.both == others.both

    def __hash__(self) -> int:
        return hash(id(self.options.axes.world))

    @property
    def rank(self) -> int:
        """This rank's number among all."""
        return self.options.axes.world.rank

    @property
    def keeps_tensors(self) -> bool:
        """Whether the reduction of its trees' gradients keeps tensors between them."""
        return bool(self.options.reduction.keeps)

    @compared("optimizer init", settles=True)
    def init(self, transform: Transform, params: ShardedTree) -> Any:
        """The optimizer's state, in pieces. Collectives: an exchange, which compares the
        transform, and those that it asks for.

        Raises:
            MismatchError: on every rank, if ranks have other transforms.
            TransformError: a transform does what its `needs` says it does not.
        """
        axes = self.options.axes
        self._check_held(params)
        if params.is_read_only:
            raise StructureError(
                "an optimizer was asked for a state of a tree of which no leaf is trained",
                expected="leaves with requires_grad=True",
                got=params,
                rank=axes.world.rank,
                remedy="pass the params that are trained; of a copy that tree_map has "
                "made, tree_map(torch.Tensor.requires_grad_, copy)",
            )
        layout = params.sharding.layout
        description = described(transform)
        # First: other transforms ask other questions, whose collectives would not meet
        if transform is not self.agreed:
            group = labelled(axes.world, "optimizer/agreement")
            agree(group, {"optimizer": description})
        self._descriptions.note(transform, description)
        whole = without_values(layout, read_only=True)
        check_claims(transform, select(whole, layout.trainable))
        return self.first_state(transform, params)

    def first_state(self, transform: Transform, params: ShardedTree) -> ShardedOptState:
        """The optimizer's state, of a transform that all ranks have alike."""
        layout = params.sharding.layout
        # The optimizer sees the trained leaves' pieces (n,), and so state lies beside them
        view = params.pieces()
        made = transform.init_fn(view.local_tree, self._across_of(layout))
        plan = self._update_of(transform, layout).plan
        holding = StateHolding(params.sharding, plan, engine=params.engine)
        return self.placed(lay_out_state(made, holding))

    def placed(
        self,
        state: ShardedOptState,
        old: ShardedOptState | None = None,
        *,
        by: PreparedUpdate | None = None,
    ) -> ShardedOptState:
        """An optimizer's state where it lies between updates.

        Args:
            state: beside the params, or in its place already.
            old: one that is to be used up, and is written over if it is in this place.
            by: the update that has made it; None: none has.
        """
        made, by_unit = state, self.options.places.state
        if by_unit is not None:
            holding, over = state.holding, None
            ferry = None if by is None else by.across.current.ferry
            look = is_looked_at(next(self._storings)) if ferry is None else ferry.look
            places = StatePlaces(by_unit, holding.plan, holding.sharding.layout)
            if old is not None and old.holding.brought is self._brought:
                over = old
            lying = holding.lying(self._brought)
            made = placed(places, state, lying, over, look=look, ferry=ferry)
        return made

    @compared("optimizer update")
    def update(
        self, transform: Transform, updates: ShardedTree, state: Any, params: ShardedTree
    ) -> tuple[ShardedTree, ShardedOptState]:
        """The updates, in pieces, and the next state. Collectives: those that the transform asks
        for.

        Raises:
            StructureError: params, updates or new updates are not cut as they must be, or the state
                is another transform's.
        """
        prepared = self._prepared(transform, updates, state, params)
        flats, look = params.flats(), is_looked_at(next(self._runs))
        new, after = prepared.run(
            *(updates, state, flats, params.holding),
            by_kernel=False,
            may_fuse=True,
            look=look,
            donate=False,
        )
        assert new is not None
        return new, self.placed(after, by=prepared)

    @compared("optimizer apply")
    def apply(
        self,
        transform: Transform,
        grads: ShardedTree,
        state: Any,
        params: ShardedTree,
        *,
        see: Callable[[ShardedTree], object] | None = None,
        donate: bool = False,
    ) -> tuple[ShardedTree, ShardedOptState]:
        """The next params, held as params are, and the next state: by the transform's fused kernel,
        where it has one, and nobody wants to `see` the updates. Collectives: those that the
        transform asks for, and those of `publish`.

        Raises:
            StructureError: as `update`.
        """
        axes = self.options.axes
        prepared, scope = self._prepared(transform, grads, state, params), ranks_here()
        layout, holding = params.sharding.layout, params.holding_as_shown
        donation = None if scope is None else scope.donation
        # Params are used up then, and the state is where a kernel runs or it has a place; else
        # those given stay as they are
        over = donation is not None and donation.takes(params, state, by_any=donate)
        # Where gradients are given away: in place, or by the unsharded step's own operators
        may_fuse = see is None and (over or not donate)
        # A user's own leaves of them stay
        gives_grads = over and donate and not grads.are_leaves_shown
        if gives_grads:
            grads = grads.handed_on()
        empty, flats = emptied(self.options.places.params, layout), params.flats()
        fuses = may_fuse and prepared.fuses(flats)
        uses_up = over and (fuses or is_placed(state) or gives_grads)
        if over and layout.publishes:
            # The old ones go before new ones are made
            params.note_published(
                [
                    None if bucket.trainable else x
                    for x, bucket in zip(params.published(), layout.buckets, strict=True)
                ]
            )
        if fuses and not over:
            # The kernel writes to its flats
            new = in_copied_flats(params, flats, axes.piece_number, empty)
            flats = new.flats()
        look = is_looked_at(next(self._runs))
        gives: Donate = gives_grads or ("state" if uses_up else False)
        try:
            updates, made = prepared.run(
                *(grads, state, flats, holding),
                by_kernel=fuses,
                may_fuse=may_fuse,
                look=look,
                donate=gives,
            )
            if updates is not None:
                self._check_pieces(updates, params, some=True)
                if see is not None:
                    # It may read params and state
                    see(updates)
        except BaseException:
            # Some of it may be written over: tried again, the step would be another one
            if uses_up:
                params.handed_on()
                state.use_up()
            raise
        self.announce("publish")
        if over:
            new = params.handed_on()
        elif not fuses:
            new = in_new_flats(params, flats, empty)
        with ranged("publish"):
            publish(new, flats, updates, axes, empty=empty)
        # Last: an update may lie in the old state, which is written over
        if self._brought is not None:
            made = self.placed(made, state if uses_up else None, by=prepared)
        if uses_up:
            state.use_up()
        if donation is not None and not over:
            donation.note_update(params, state)
        return new, made

    def description_of(self, transform: Transform) -> Any:
        """A transform as ranks compare it. Of one that they have compared it stays what it was: a
        function of the user's may refer to things that change, a log say."""
        known = self._descriptions.get(transform)
        return described(transform) if known is None else known

    @compared("apply_updates")
    def apply_updates(self, params: ShardedTree, updates: ShardedTree) -> ShardedTree:
        """params + updates, held as params are. Collectives: those of `publish`."""
        self._check_held(params)
        self._check_pieces(updates, params, some=True)
        empty, flats = emptied(self.options.places.params, params.sharding.layout), params.flats()
        self.announce("publish")
        new = in_new_flats(params, flats, empty)
        with ranged("publish"):
            publish(new, flats, updates, self.options.axes, empty=empty)
        return new

    @compared("dot")
    def dot(self, a: ShardedTree, b: ShardedTree) -> Tensor:
        """The inner product of two trees in pieces, 0-d, the same on every rank. One all-reduce."""
        self._check_pieces(a, a)
        self._check_pieces(b, a)
        # Of both, it is 0
        if a.holding.read_only != b.holding.read_only:
            self._refuse_no_updates(a)
            self._refuse_no_updates(b)
        return self._across_of(a.sharding.layout).dot(a.local_tree, b.local_tree)

    def squares(self, name: str, tree: ShardedTree, first: ShardedTree) -> PyTree[Tensor]:
        """The sums of squares of this rank's parts of a tree's leaves, 0-d. No communication.

        Args:
            name: "param_norm", of held params, whose trained leaves count; others are in pieces.
            first: the tree by which all that go together are cut.

        Raises:
            StructureError: they are of other params, or no leaf is trained.
        """
        with sharing_failures(*self.options.axes.groups, call="norms"), torch.no_grad():
            if name == "param_norm":
                self._check_held(tree)
                if tree.is_read_only:
                    raise without_trained(tree, self.rank)
                tree = tree.pieces()
            self._check_pieces(tree, first)
            self._refuse_no_updates(tree)
            return squares_of(tree.local_rows)

    @compared("norms")
    def norms(self, squares: Mapping[str, PyTree[Tensor]], first: ShardedTree) -> dict[str, Tensor]:
        """The norms of whole trees, 0-d, by name, from these sums. One all-reduce."""
        return roots_of_totals(squares, self._across_of(first.sharding.layout))

    def zero_updates(self, params: ShardedTree) -> ShardedTree:
        """Zeros in pieces for trained leaves, None elsewhere. No communication.

        Raises:
            StructureError: some of the leaves require grad, and others don't.
        """
        return self._made_of("zero_updates", params, torch.zeros_like, "zeros")

    def pieces(self, params: ShardedTree) -> ShardedTree:
        """Copies of the trained leaves, in pieces; None elsewhere. No communication.

        Raises:
            StructureError: some of the leaves require grad, and others don't.
        """
        # Views would be written over where the params are donated
        return self._made_of("pieces", params, torch.clone, f"pieces of #{params.story.word:08x}")

    def _made_of(
        self, call: str, params: ShardedTree, make: Callable[[Tensor], Tensor], origin: str
    ) -> ShardedTree:
        """The results of a function of the trained flats, in pieces; None elsewhere."""
        with sharing_failures(*self.options.axes.groups, call=call), torch.no_grad():
            self._check_held(params)
            if params.is_read_only:
                return no_updates(params)
            flats = [None if flat is None else make(flat) for flat in params.pieces().flats()]
            made = ShardedTree.of_flats(flats, params.holding.in_pieces)
            made.origin = origin
            return made

    @compared("unshard", settles=True)
    def unshard(self, tree: ShardedTree | ShardedOptState) -> PyTree[Tensor]:
        """The whole tree, copies. At level 3, or in pieces, one all-gather per bucket; of an
        optimizer's state one collective per leaf that is not here whole."""
        axes = self.options.axes.at("unshard")
        if isinstance(tree, ShardedOptState):
            layout, plan = tree.holding.sharding.layout, tree.holding.plan
            # Users may have put other entries into its dicts
            check_opt_state(tree.holding.like, tree.as_it_lies, self.rank)
            return all_gather_state(tree.beside, plan, layout, axes.optimizer)
        return all_gather_tree(tree, axes)

    @compared("value_and_grad")
    def value_and_grad(self, call: LossCall, tree: Any) -> tuple[Any, Any]:
        """The loss, its metrics and its buffers for all ranks, and gradients in pieces. See
        `fz.value_and_grad`."""
        run = self.open_gradient(call, tree)
        local = differentiate(run)
        return finish(run, local, agree_on(run, local))

    def open_gradient(self, call: LossCall, tree: Any) -> GradientRun:
        """Check a loss's arguments, and join the sharded trees among them: one pass runs over all,
        so that a unit is gathered where the loss uses it, in whatever tree.

        Raises:
            StructureError: an argument is not what it must be.
        """
        call.check(self.rank)
        given = LossTrees(tree, call.args)
        for one in given.trees:
            self._check_held(one)
        joined, order = self.join([one.holding for one in given.trees], given.trained)
        # Ranks that take gradients of other things, or in another order, find out in `agree_on`
        name = getattr(call.loss, "__qualname__", type(call.loss).__name__)
        log = [f"gradient {self._gradients.next() + 1} of {name} {given.in_words}"]
        if not any(bucket.trainable for bucket in joined.layout.buckets):
            raise untrained(self.rank)
        axes, places = self.options.axes, self.options.places.params
        flats = flats_of_pass(given.trees, order, axes, log, places)
        trained = compress(flats, [bucket.trainable for bucket in joined.layout.buckets])
        # Trees that are only read as well: a unit of theirs can't be gathered without values
        if any(flat.is_meta for flat in flats):
            check_not_on_meta(given.trees, call.data)
        if call.takes_batch:
            check_batch(call.batch, flats[0].device, self.rank)
        options, all_kept = self._reducing(call)
        kept = None if all_kept is None else all_kept.of_gradient(given.trained_in(joined))
        kept_before = {} if kept is None else kept.before
        scope = ranks_here()
        calls = self._calls if scope is None else scope.calls
        look = is_looked_at(calls.next_number(call.counted))
        if look and options.axes.data.size > 1:
            call.trying = self._trying
        # This rank's part of the batch is its own; ranks of the same data draw alike
        streams = next_streams(options.axes.data.rank, flats[0].device)
        return GradientRun(
            call=call,
            trees=given,
            joined=joined,
            flats=flats,
            streams=streams,
            reminder=calls.reminder,
            reduction=make_reduction(joined.layout, options, log, kept_before),
            order=order,
            options=options,
            log=log,
            kept=kept,
            look=look,
            is_dry=on_meta(trained),
            scope=scope,
        )

    def _trying(self, loss: Tensor) -> AbstractContextManager[None]:
        """Around the gradient of a loss inside of another one, of this rank's part of the batch."""
        trial = TwoSeeds(loss.device, self.rank)
        return trial.trying(nodes_behind(loss), loss, torch.ones_like(loss), hooked=True)

    def _reducing(self, call: LossCall) -> tuple[Options, KeptTensors | None]:
        """The options by which a loss's gradients are reduced, and the tensors that the reduction
        has kept.

        Where there is no place for them, outside of a program's step, gradients are summed as they
        are. So are those of a slope, which don't follow the gradients.
        """
        if not self.keeps_tensors:
            return self.options, None
        scope = ranks_here()
        kept = None if scope is None else scope.kept
        if kept is None or call.is_slope:
            return replace(self.options, reduction=SUMMED), None
        check_reduction(kept.reduction, loss_scale=call.options.scale is not None)
        # The step's own: another step may have cut the trees
        return replace(self.options, reduction=kept.reduction), kept

    def join(
        self, holdings: Sequence[Holding], trained: Sequence[bool]
    ) -> tuple[Joined, PrefetchOrder]:
        """The layouts of held trees as one, of which the trained trees' stay trainable; and the
        order in which the last pass over them gathered units."""
        layouts = [holding.sharding.layout for holding in holdings]
        names = _prefixes([holding.name for holding in holdings])
        # By id, since to compare layouts takes long. `Joined` keeps them, and so their ids.
        key = (*map(id, layouts), *trained, *(names or ()))  # n ids, n flags, and n names or none
        known = self._joined.get(key)
        if known is None:
            joined = join_layouts(layouts, trained, names)
            known = joined, PrefetchOrder(self.options.axes.world)
            self._joined.note(key, known)
        return known

    @contextmanager
    def forgetting_orders(self) -> Iterator[None]:
        """Forget all orders of gathers when the code inside fails; see `PrefetchOrder`."""
        try:
            yield
        except BaseException:  # an interrupt, too
            self._joined.forget()
            raise

    def _across_of(self, layout: Layout) -> Sharded:
        """The answers about the trained leaves."""
        across = self._across.get(id(layout))
        if across is None:
            group = labelled(self.options.axes.optimizer, "optimizer/update")
            places = self.options.places.state
            ferry = Ferry(() if places is None else places.distinct)
            across = Sharded(layout, group, current=CurrentUpdate(ferry))
            self._across.note(id(layout), across)
        return across

    def _check_held(self, tree: Any) -> None:
        """Raise unless this is a sharded tree in the form of params."""
        if isinstance(tree, ShardedTree):
            tree.num_uses += 1
        if not is_held(tree):
            raise StructureError(
                "something else was given in the place of params",
                expected="a sharded tree, held as params are",
                got=_in_words(tree),
                rank=self.rank,
                remedy="gradients and updates are in pieces, and fz.apply_updates(params, "
                "updates) makes params of them; of several trees pass one at a time",
            )

    def _prepared(
        self, transform: Transform, updates: ShardedTree, state: Any, params: ShardedTree
    ) -> PreparedUpdate:
        """The transform's update of such params. Raise unless a state is one that the transform
        makes of params that are cut so, and updates are theirs."""
        self._check_held(params)
        self._check_pieces(updates, params)
        self._refuse_no_updates(updates)
        axes = self.options.axes
        is_sharded = isinstance(state, ShardedOptState)
        if not is_sharded or not _follows(state.holding.sharding, params.sharding):
            raise StructureError(
                "an optimizer was given a state that it has not made of these params",
                expected="the state of optimizer.init(params), or of its last update, for "
                f"{_in_words(params)}",
                got=_state_in_words(state) if is_sharded else type(state).__name__,
                rank=axes.world.rank,
                remedy="keep each tree's optimizer state beside it",
            )
        prepared = self._update_of(transform, params.sharding.layout)
        prepared.check_state(state, axes.world.rank, what="the optimizer's state")
        return prepared

    def _update_of(self, transform: Transform, layout: Layout) -> PreparedUpdate:
        key = transform, id(layout)
        prepared = self._updates.get(key)
        if prepared is None:
            across, options = self._across_of(layout), self.options
            prepared = PreparedUpdate(transform, layout, options, across, self._brought)
            self._updates.note(key, prepared)
        return prepared

    def _check_pieces(self, tree: Any, params: ShardedTree, *, some: bool = False) -> None:
        """Raise unless a tree is updates of params; with `some`, of some of their leaves."""
        # Engines and numbers are not compared: averages of a tree fit it, too
        fits = isinstance(tree, ShardedTree) and tree.holding == params.holding.in_pieces
        if not fits:
            raise StructureError(
                "something else was given in the place of updates or gradients",
                expected=f"updates in pieces, cut as the params are, {_in_words(params)}",
                got=_in_words(tree),
                rank=self.rank,
                remedy="pass the gradients that fz.value_and_grad gave of these params; params "
                "themselves as fz.pieces(params); of several trees pass one at a time",
            )
        tree.check_leaves(some=some)

    def _refuse_no_updates(self, tree: ShardedTree) -> None:
        """Raise if all leaves are None, as the gradients of a tree that is read only."""
        if tree.holding.read_only:
            raise StructureError(
                "updates of trained params were expected, and those of a tree that is read "
                "only were given, all of which are None",
                expected="gradients of leaves with requires_grad=True",
                got=tree,
                rank=self.rank,
                remedy="pass the gradients of the params, value_and_grad(loss)(params, other); "
                "to train a copy that tree_map has made, "
                "tree_map(torch.Tensor.requires_grad_, copy) before its gradients are taken",
            )


def _nobody_listens(phase: str) -> None:
    """A plan does."""


def _prefixes(names: Sequence[str]) -> list[str] | None:
    """The names of trees, each once: "net", "net#2". None: a tree has none, since no program's step
    has cut it."""
    found: list[str] = []
    for name in names:
        if not name:
            return None
        prefix, count = name, 1
        while prefix in found:
            count += 1
            prefix = f"{name}#{count}"
        found.append(prefix)
    return found


def _follows(of_state: Sharding, of_params: Sharding) -> bool:
    """Whether an optimizer's state is cut as the params are."""
    same_rank = (of_state.rank, of_state.mesh) == (of_params.rank, of_params.mesh)
    ours, theirs = of_state.layout, of_params.layout
    # By identity first: comparing layouts takes longer
    return same_rank and (ours is theirs or ours.leaf_cuts == theirs.leaf_cuts)


def _state_in_words(state: ShardedOptState) -> str:
    sharding = state.holding.sharding
    return f"a state for leaves {shapes_of(sharding.layout)}, cut as {sharding.in_words}"


def _in_words(node: Any) -> str:
    """A tree for errors, by its name and its leaves."""
    if not isinstance(node, ShardedTree):
        return f"a {type(node).__name__}"
    return f"{node.holding.label} of leaves {shapes_of(node.sharding.layout)}, {node.in_words}"
