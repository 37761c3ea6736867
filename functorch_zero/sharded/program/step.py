"""The step of a program for N ranks: the same program, on sharded trees.

The program runs as it stands. Its trees know how they are cut, so the functions that it calls do
what ranks need; this file cuts its first value, gives each call its random numbers, and makes sure
that all ranks have done the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from operator import is_
from types import MappingProxyType
from typing import Any, Protocol

import optree
import torch
from optree import tree_map
from torch import Tensor

from ...errors import StructureError
from ...groups import labelled
from ...groups.era_counter import EraCounter
from ...groups.forwarding import era_of
from ...groups.protocol import Group
from ...layout.joined import join_layouts
from ...layout.layout import Layout
from ...layout.sharded_tree import Holding, ShardedTree, hold, is_held
from ...layout.sharding import Sharding
from ...model.deferred_init import DeferredInit
from ...optim.base import Transform
from ...params import Engine, as_local, is_on_engine, map_nodes
from ...sharded_optim.sharded_state import ShardedOptState, is_placed
from ...shared_elements import check_apart
from ...step.background import Background
from ...step.loss import Metrics, check_records
from ...step.loss_calls import LossCalls
from ...step.program_step import (
    ProgramStep,
    args_of_refit,
    carried_tree,
    check_value,
    entry_of,
    named_args,
    named_values,
)
from ...step.refit import check_own_tensors
from ...step.rng import Streams
from ...step.state import State, check_policies
from ...step.state import check_state as check_is_state
from ...step.trainable import check_trained
from ...tree import check_tensors, named_leaves, own_copy, paths
from ..checks import check_place
from ..deferred_values import DigestedFill
from ..failures import sharing_failures
from ..options import Options
from ..parts import ReductionParts
from ..placed import check_places_work, moved_tree
from ..refit import (
    agree_on_refit,
    carried,
    check_same_ranks,
    first_parts,
    refuse_parts,
    without_values,
)
from ..tree_numbers import next_number
from .agreement import AgreementOfRanks
from .donation import Donation, EarlierCalls
from .engine import ShardedEngine
from .kept import KeptTensors, TrainedTrees
from .ledger import Agreement, Ledger
from .outline import structure_made_of
from .scope import RanksScope
from .value import (
    Nodes,
    ValueStructure,
    as_marked,
    beside_params,
    check_trained_alike,
    trained_of,
    whole_value,
    without_pieces,
)


class ProgramEngine(Engine, Protocol):
    """The engine of a program's trees, as far as the program's step knows it."""

    agreed: Transform | None  # while `init` runs: the optimizer, if its facts have it

    def placed(self, state: ShardedOptState) -> ShardedOptState:
        """An optimizer's state where it lies between updates; `tree` lies beside the params."""
        ...

    def forgetting_orders(self) -> AbstractContextManager[None]:
        """Forget in which order units were gathered when the code inside fails."""
        ...


class ShardedStep:
    """`step(state, *args) -> (state, metrics)` on one rank of a group. Made by `shard`.

    Each rank passes its own part of the batch, and gets the result of the unsharded step on the
    whole.

    Args:
        step: for one process.
        options: those of `shard`.
        engine: of the sharded trees; None: that of this rank.
        agreement: of the ranks; None: theirs. A plan, which has no ranks, gives both.
    """

    def __init__(
        self,
        step: ProgramStep,
        options: Options,
        engine: ProgramEngine | None = None,
        agreement: Agreement | None = None,
    ):
        self.unsharded, self.options = step, options
        self.engine = ShardedEngine(options) if engine is None else engine
        self.background = Background()
        self._agreement = agreement or AgreementOfRanks(step, options, self.background)
        self._trees: TrainedTrees | None = None  # of the last value
        # Of states that are this step's. That of the last one that `init`, `refit` or `shard` has
        # made comes last
        self._structures: list[tuple[Sharding | None, ValueStructure]] = []
        self._calls = EraCounter(self.group)
        self._loss_calls = LossCalls()  # this rank's: thread ranks share the unsharded step
        self._earlier = EarlierCalls(step.num_gradients)  # where the step donates

    def __repr__(self) -> str:
        return f"ShardedStep({self.options.in_words}, {self.unsharded})"

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
        *args: Any,
        seed: int | None = 0,
        values: DeferredInit | Mapping[str, DeferredInit] | None = None,
        **named: Any,
    ) -> State:
        """The first state: this rank's part of what the program's `init` makes of copies of the
        arguments.

        Every rank passes the same arguments. Trees of whole leaves are cut before `init` sees them,
        each at the level that `shard` was given for the argument's name. Leaves on the meta device
        get their values, a bucket at a time, from `values`, as in `ProgramStep.init`. Collectives:
        exchanges, which compare them, and those of the optimizers' own `init`.

        Raises:
            MismatchError: on every rank, naming the first thing in which ranks differ.
            StructureError: a tree holds anything but tensors, or the value does.
        """
        axes = self.options.axes
        # The optimizers' `init` may ask for collectives
        with sharing_failures(*axes.groups, call="init", settles=True), torch.no_grad():
            check_records("a first state", axes.world.rank)
            given = named_args(self.unsharded.first_value, args, named)
            deferred = dict(named_values(given, values))
            # They are not cut, nor filled bucket by bucket
            for name in self.unsharded.buffers:
                if name in deferred:
                    given[name] = deferred.pop(name).fill(given[name])
            marked = self.unsharded.marked(given)
            state, _ = self._first_state(marked, seed, _fills(given, deferred))
            self._note_structure(state.sharding, Nodes.of(state.value).structure)
            return state

    def _layouts(self, given: Mapping[str, Any]) -> dict[str, Layout]:
        """Those of the trees among the arguments of `init`, by name."""
        whole = self.unsharded.buffers
        trees = {name: arg for name, arg in given.items() if _is_tree(arg) and name not in whole}
        named = {self._name_of(name): tree for name, tree in trees.items()}
        arguments = [name for name in named if name]
        self.options.levels.check(named, arguments)
        layouts = {name: self._layout_of(name, tree) for name, tree in trees.items()}
        units = [unit.path for layout in layouts.values() for unit in layout.units]
        self.options.places.check_units(units, arguments)
        return layouts

    def _holdings(self, layouts: Mapping[str, Layout]) -> dict[str, Holding]:
        """Those of new trees that are cut so, by name: each has a number of its own."""
        # All at once: a rank that fails at one tree must count as the others do
        return {
            n: Holding(
                self.options.sharding(layout),
                "held",
                self.engine,
                next_number(self.group),
                name=self._name_of(n),
            )
            for n, layout in layouts.items()
        }

    def _name_of(self, argument: str) -> str:
        """The name of the tree that is this argument of `init`, by which its paths begin."""
        return "" if argument == self.unsharded.nameless else argument

    def _first_state(
        self,
        given: Mapping[str, Any],
        seed: int | None = None,
        fills: Mapping[str, DigestedFill] = MappingProxyType({}),
        known: Mapping[str, ShardedTree] = MappingProxyType({}),
    ) -> tuple[State, dict[str, ShardedTree]]:
        """This rank's part of the first state, and the trees that the program's `init` was given.

        Args:
            given: the arguments of `init` by name, which know what is trained.
            fills: the values of those on the meta device.
            known: by name, trees of another state, whose elements count where they have any.
        """
        layouts = self._layouts(given)
        # Before any tensor is made, so that ranks that differ say so instead of hanging later
        check_places_work(self.options.places.given, given, self.group.rank)
        # Of leaves that are known nobody reads the values
        new = {n: _without(given[n], known[n]) if n in known else given[n] for n in layouts}
        self._agreement.on_arguments(new, layouts, seed, self.unsharded.facts)
        cut = {}
        for name, holding in self._holdings(layouts).items():
            if name in known:
                first = first_parts(given[name], holding)
                held = carried(first, known[name], self._refit_group, name)
            else:
                held = hold(given[name], holding, fills.get(name))
            places = self.options.places.params
            cut[name] = held if places is None else moved_tree(places, held, {})
        # Copies of all that isn't cut, too: nobody who holds it can change the state
        own = [cut[n] if n in cut else tree_map(own_copy, arg) for n, arg in given.items()]
        try:
            self.engine.agreed = self.unsharded.facts.get("optimizer")
            value = without_pieces(self.unsharded.first_value(*own))
        finally:
            self.engine.agreed = None
        check_value(value, self.group.rank)
        self.unsharded.check_buffers(value)
        self._agreement.on_first_value(value, fills)
        marked = Nodes.of(as_marked(value, self.unsharded.nameless))
        state = State.first(
            self._placed(marked).value,
            seed,
            sharding=self._sharding(layouts),
            parts=self._trees_of(marked).parts.init(marked.device),
        )
        return state, cut

    def _placed(self, value: Nodes) -> Nodes:
        """A value whose optimizers' states lie in their place, and its params in theirs, where
        there is one: also those that the program has made by `tree_map`."""
        places = self.options.places.params
        frozen: dict[int, Tensor] = {}

        def placed(node: Any) -> Any:
            if places is not None and isinstance(node, ShardedTree):
                return moved_tree(places, node, frozen)
            # Without a place the engine leaves it where it is
            if isinstance(node, ShardedOptState) and not is_placed(node):
                return self.engine.placed(node)
            return node

        return Nodes(value.structure, [*map(placed, value.nodes)])

    def refit(self, state: State, *args: Any, **named: Any) -> State:
        """Another program's state as one of this program, as `ProgramStep.refit` makes it of whole
        ones.

        Collectives: those of `init`, one exchange, and one all-to-all per dtype, by which elements
        travel whose rank changes.

        Raises:
            StructureError: the state lies on other ranks, or a leaf has another shape or dtype.
            MismatchError: ranks refit other states.
            NotImplementedError: a reduction keeps tensors between steps.
        """
        axes = self.options.axes
        step = getattr(state, "step", None)
        failures = sharing_failures(*axes.groups, call="refit", step=step, settles=True)
        with failures, torch.no_grad():
            check_is_state(state)
            check_same_ranks(state, self.options)
            refuse_parts(state, self.group.rank)
            agree_on_refit(state, self.options)
            known = self._noted(state.sharding) or self._found_in(state)
            nodes = Nodes.of_state(state, known)
            # The states of a program of any number of optimizers may be others
            if self.unsharded.is_training_step:
                nodes.check_states(self.group.rank)
            old = beside_params(nodes.value)
            given = args_of_refit(self.unsharded.first_value, args, old, named)
            held, begun = {}, {}
            for name, arg in given.items():
                own = entry_of(old, name)
                if is_held(own):
                    held[name] = own
                    begun[name] = _whole_without_values(own) if arg is own else arg
                else:
                    begun[name] = carried_tree(arg, own, name)
            begun = self.unsharded.marked(begun)
            fresh, cut = self._first_state(begun, known=held)
            was, now = trained_of(old).paths, trained_of(fresh.value).paths
            first, rank = self.unsharded.first_value, self.group.rank
            check_own_tensors(first, begun, was, now, paths(as_local(old)), rank)
            # Those of trees that `init` has left as they were have travelled already
            came = {
                id(own): cut[name]
                for name, own in held.items()
                if _has_flats_of(cut[name], entry_of(fresh.value, name))
            }
            old = map_nodes(lambda node: came.get(id(node), node), old)
            # Elements travel beside the params
            new = beside_params(fresh.value)
            value = carried(new, old, self._refit_group, "the value")
            # A refit that fails changes nothing
            self._note_structure(fresh.sharding, Nodes.of(fresh.value).structure)
            value = self._placed(Nodes.of(value)).value
            return fresh.replace(step=state.step.clone(), seed=state.seed, value=value)

    @property
    def _refit_group(self) -> Group:
        """The ranks among which elements travel in `refit`."""
        return labelled(self.options.axes.optimizer, "refit")

    def _note_structure(self, sharding: Sharding | None, structure: ValueStructure) -> None:
        """Remember how a first state's value is cut. States of other structures stay valid."""
        # One per layout
        others = [known for known in self._structures if known[0] != sharding]
        self._structures = [*others, (sharding, structure)]

    def __call__(self, state: State, *args: Any) -> tuple[State, Metrics]:
        """One step of the program on this rank's part of the batch. The state given stays valid,
        unless the step donates.

        Collectives: those of the functions that the program calls, and one all-reduce, which
        compares the ranks' results; when donating, another one before the first write. Of a
        training step neither: its gradient's words settle all.

        Raises:
            StructureError: the state is of another step, or the program returns another structure.
            PeerError: another rank failed; GroupError: ranks did different things.
            MismatchError: metrics, or leaves that every rank holds, differ between ranks; on every
                rank.
        """
        groups, rank = self.options.axes.groups, self.group.rank
        failures = sharing_failures(*groups, call="step", step=getattr(state, "step", None))
        # A rank may fail in another gradient than this one
        with failures, self.engine.forgetting_orders(), torch.no_grad():
            # The state arrives: its nodes are noted as they are given, then marked and named
            check_is_state(state)
            number = int(state.step)
            # Calls are counted, whatever their states: ranks that look meet in messages that others
            # don't send
            look = self._agreement.looks_at(self._calls.next())
            ledger = Ledger(number, self._agreement, look=look, era=era_of(self.group))
            structure = self._noted(state.sharding) or self._note_other(state)
            given, kept, donation = Nodes.of_state(state, structure, ledger), None, None
            # Parts that it doesn't keep are refused
            if self.options.reduction.keeps or state.parts is not None:
                kept = KeptTensors(self._trees_of(given), state.parts)
            if self.options.donate:
                assert state.sharding is not None
                # A file may still be made of the state
                agree = [ledger.settle, state.sharding.take_storage]
                donation = Donation(given.nodes, self._earlier, agree)

            # The program runs
            streams = Streams(state.seed, state.step)
            scope = RanksScope(
                streams=streams,
                calls=self._loss_calls,
                rank=rank,
                ledger=ledger,
                donation=donation,
                kept=kept,
            )
            # A training step's program is the library's own, which writes to none of its value
            compares = look and not self.unsharded.is_training_step
            run = self.unsharded.run
            value, metrics = run(given.value, args, scope, given.device, look=compares)

            # Its results are compared: with the state, and with those of other ranks
            made = given.next(value, rank, free=self.unsharded.free)
            if donation is not None:
                # A metric may be a leaf of the next value, which the next step writes over
                metrics = {name: metric.clone() for name, metric in metrics.items()}
            if not ledger.is_by_gradients:
                ledger.settle_at_end(args, made.by_path, metrics, streams.num_draws)
            if donation is not None:
                self._earlier = donation.findings

            # It is handed on: to compare it may have cut leaves, which are made anew
            placed = self._placed(made) if self.options.places.given else made
            after = placed.named(number + 1)
            parts = None if kept is None else kept.next_parts(made, self._trees_of(after))
            return state.replace(step=state.step + 1, value=after.value, parts=parts), metrics

    def _found_in(self, state: State) -> ValueStructure | None:
        """How the value of a state from elsewhere is cut: as `init` makes it of the value's own
        trees; as it is, where this step knows no state. None: it has made others."""
        assert state.sharding is not None
        given, made = self._own_args(state.value), None
        if given is not None:
            cut = {n: own.holding if is_held(own) else own for n, own in given.items()}
            if self.unsharded.nameless is not None:
                # That of the state: its tree may have been replaced
                cut[self.unsharded.nameless] = Holding(state.sharding, "held")
            made = structure_made_of(self.unsharded, cut, self.engine)
        if made is not None and made.fits(state.value):
            return made
        return None if self._structures else Nodes.of(state.value).structure

    def _noted(self, sharding: Sharding | None) -> ValueStructure | None:
        """How the values of this step's states with such trees are cut; None: it knows none."""
        noted = [structure for own, structure in self._structures if own == sharding]
        return noted[-1] if noted else None

    def _own_args(self, value: Any) -> dict[str, Any] | None:
        """A value's own trees as arguments of `init`, by name; None: it lacks one."""
        try:
            return args_of_refit(self.unsharded.first_value, (), value)
        except StructureError:
            return None

    def _structure_like(self, whole: State) -> tuple[Sharding | None, ValueStructure]:
        """How a whole state is cut, and its value: as `init` makes it of the value's own trees; as
        that of the last first state, where they don't tell."""
        given = self._own_args(self.unsharded.as_trained(whole))
        if given is not None:
            layouts = self._layouts(given)
            made = structure_made_of(self.unsharded, given | self._holdings(layouts), self.engine)
            if made is not None:
                return self._sharding(layouts), made
        if not self._structures:
            raise StructureError(
                "step.shard was called before init, from which follows how this program's value is "
                "cut. Remedy: like = step.init(...) once, then step.shard(state)"
            )
        return self._structures[-1]

    def unshard(self, state: State) -> State:
        """The whole, unsharded state on every rank: copies."""
        axes = self.options.axes
        step = getattr(state, "step", None)
        failures = sharing_failures(*axes.groups, call="unshard", step=step, settles=True)
        with failures, torch.no_grad():
            check_is_state(state)
            nodes = self._checked(state)
            value = whole_value(nodes.value)
            return State(
                step=state.step.clone(),
                value=value,
                seed=tree_map(torch.clone, state.seed),
                parts=self._trees_of(nodes).parts.whole(state.parts, axes.at("unshard")),
                trained=self.unsharded.trained_of(value),
            )

    def shard(self, state: State) -> State:
        """The inverse of `unshard`: this rank's part of a whole state that every rank holds. No
        communication. Of `State.parts`, sums become rank 0's; a state without parts is given first
        ones.

        The value is cut as `init` makes it of the value's own trees; where `init` takes anything
        else, or looks at values, as in the last `init` or `refit`.
        """
        check_is_state(state)
        if state.sharding is not None:
            raise StructureError("step.shard takes a whole state, and this one is sharded already")
        check_policies(state, self.unsharded.known_tree(state.value))
        with torch.no_grad():
            sharding, structure = self._structure_like(state)
            self._check_trained(structure)
            value = structure.part_of(state.value, self.group.rank)
            check_trained_alike(self.unsharded.as_trained(state), value, self.group.rank)
            nodes = Nodes.of(value)
            parts = self._trees_of(nodes).parts.part(state.parts, nodes.device)
            self._note_structure(sharding, structure)
            return State(
                step=state.step.clone(),
                value=self._placed(nodes).value,
                seed=tree_map(torch.clone, state.seed),
                sharding=sharding,
                parts=parts,
            )

    def _layout_of(self, name: str, tree: Any) -> Layout:
        """The layout of an argument of `init`; the rule of levels sees its name before paths.

        Raises:
            ValueError: as `Options.layout_of`.
        """
        check_tensors(tree, name)
        check_apart(tree)
        return self.options.layout_under(self._name_of(name), tree)

    def _sharding(self, layouts: Mapping[str, Layout]) -> Sharding:
        """The static part of a state: of all trees that `init` was given."""
        if not layouts:
            raise StructureError(
                "init was given no tree of tensors to cut",
                expected="trees of whole leaves, as of fz.functionalize",
                rank=self.group.rank,
                remedy="let init have a parameter per tree of params, and pass them to "
                "step.init(...); a tree that init closes over is not cut",
            )
        names = [*map(self._name_of, layouts)]
        # A tree without a name is the only one
        if names == [""]:
            return self.options.sharding(*layouts.values())
        joined = join_layouts([*layouts.values()], [True] * len(names), names)
        return self.options.sharding(joined.layout)

    def _trees_of(self, value: Nodes) -> TrainedTrees:
        """The trained trees of a value that knows which are; mostly they are the last one's."""
        nameless = self.unsharded.nameless
        self._trees = TrainedTrees.of(value, nameless, self.options, self._trees)
        return self._trees

    def parts_of(self, state: State) -> ReductionParts:
        """The kinds of a state's parts, and the tensors that the reduction keeps in them."""
        return self._trees_of(self._checked(state)).parts

    def check_state(self, state: State) -> None:
        """Raise unless a state is one of this step's, on this rank."""
        check_is_state(state)
        self._checked(state)

    def _checked(self, state: State) -> Nodes:
        """The nodes of a state that is one of this step's, on this rank, for no program."""
        return Nodes.of_state(state, self._noted(state.sharding) or self._note_other(state))

    def _note_other(self, state: State) -> ValueStructure:
        """Note how the value of a state from elsewhere is cut, and return it.

        Raises:
            StructureError: it isn't one of this step's, or trains other leaves.
        """
        check_place(state.sharding, self.options)
        structure = self._found_in(state)
        if structure is None:
            known, _ = self._structures[-1]
            raise StructureError(
                "the state was sharded by another step",
                expected=known and known.in_words,
                got=state.sharding and state.sharding.in_words,
                rank=self.group.rank,
                remedy="unshard it with the step that made it, then shard it with this one",
            )
        self._check_trained(structure)
        # The last one stays that of a first state
        self._structures.insert(0, (state.sharding, structure))
        return structure

    def _check_trained(self, structure: ValueStructure) -> None:
        """Raise if this step's `trainable` chooses other leaves than a state from elsewhere
        trains."""
        for path, noted in zip(structure.paths, structure.nodes, strict=True):
            rule = self.unsharded.trainable.get(path)
            if rule is not None and isinstance(noted, Holding):
                check_trained(rule, without_values(noted.sharding.layout), self.group.rank)


def _fills(given: Mapping[str, Any], values: Mapping[str, DeferredInit]) -> dict[str, DigestedFill]:
    """The values for trees on the meta device, by the names of `init`'s parameters."""
    fills = {}
    for name, deferred in values.items():
        if not _is_tree(given[name]):
            raise StructureError(
                "values were given for something that is no tree of whole leaves",
                path=name,
                got=f"a {type(given[name]).__name__}",
                remedy="pass values for trees of params that are on the meta device",
            )
        fills[name] = DigestedFill(deferred)
    return fills


def _has_flats_of(tree: ShardedTree, other: Any) -> bool:
    return is_held(other) and all(map(is_, tree.flats(), other.flats()))


def _whole_without_values(tree: ShardedTree) -> Any:
    return without_values(tree.sharding.layout, read_only=tree.holding.read_only)


def _without(tree: Any, known: ShardedTree) -> dict[str, Any]:
    """By path, the leaves of a tree that a known one hasn't."""
    paths_known = {leaf.path for leaf in known.sharding.layout.leaves}
    return {path: leaf for path, leaf in named_leaves(tree).items() if path not in paths_known}


def _is_tree(arg: Any) -> bool:
    """Whether an argument of `init` is to be cut: a whole tree of tensors. Single tensors and other
    things go to every rank as they are."""
    if isinstance(arg, Tensor) or is_on_engine(arg):
        return False
    return any(isinstance(leaf, Tensor) for leaf in optree.tree_leaves(arg))
