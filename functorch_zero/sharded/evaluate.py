"""The evaluation step for N ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optree
import torch
from optree import tree_map
from torch import Tensor

from ..errors import StructureError, explain
from ..groups import labelled
from ..groups.protocol import Group
from ..in_a_loss import hiding_trees
from ..layout.layout import Layout
from ..layout.sharded_tree import ShardedTree
from ..model.casting import mark_policies
from ..model.untouched import Untouched, is_looked_at
from ..params import check_one_group, is_on_engine
from ..runtime.prefetch import PrefetchOrder
from ..runtime.unit import Pass
from ..sharded_optim.sharded_state import ShardedOptState
from ..step.evaluate import EvalStep, Evaluated, call_eval, total_weight
from ..step.loss import Metrics
from ..step.program import read_only
from ..step.rng import Streams, replayed
from ..step.rows import leading_sizes, total_size
from ..step.scope import given_batch
from ..step.state import State, TrainValue
from ..step.weights import check_weight_value
from ..tree import PyTree
from .average import average
from .batch_on_ranks import BatchOnRanks
from .buffers import apart_from
from .checks import check_batch, check_place, own_params, sharding_of
from .failures import sharing_failures
from .options import Options
from .params import make_unit_flats
from .program.engine import ShardedEngine
from .publish import chosen_params, flats_of_pass


class _Reading(NamedTuple):
    """The trees that an evaluation reads."""

    trees: list[ShardedTree]  # held as params are
    layout: Layout
    order: PrefetchOrder  # in which the last evaluation gathered units
    arguments: Callable[[Any], tuple[Any, ...]]  # of the function, from lazy params
    others: PyTree[Tensor]  # given to it as they are; None: it is given copies
    words: str  # how the trees were made: the same on all ranks. See Note [words] in `piece`


class ShardedEvalStep:
    """`step(state, batch) -> metrics` on one rank of a group. Made by `shard`."""

    def __init__(self, step: EvalStep, options: Options):
        self.unsharded, self.options = step, options
        self.engine = ShardedEngine(options)
        self.gather_order = self.engine.orders

    def __repr__(self) -> str:
        name = getattr(self.unsharded.fn, "__qualname__", type(self.unsharded.fn).__name__)
        return f"ShardedEvalStep({self.options.in_words}, {name})"

    @property
    def group(self) -> Group:
        """The ranks."""
        return self.options.group

    @torch.no_grad()
    def __call__(self, state: State, *args: Any) -> Any:
        """Metrics of this rank's part of the batch, averaged over ranks, and this rank's rows if
        the evaluation gives any. Of a program's state, `args` are all arguments after the value.

        Collectives: at level 3 one all-gather per bucket, on use of its unit; two all-reduces of
        metrics and words; and those of `publish`, where other params than the state's are chosen.
        """
        failures = sharing_failures(*self.options.axes.groups, call="evaluation", state=state)
        with failures, self.gather_order.forgotten_on_failure():
            check_place(state, self.options)
            if isinstance(state.value, TrainValue):
                reading = self._of_training(state, *args)
            else:
                reading = self._of_program(state, args)
            batch = tree_map(
                lambda x: None if is_on_engine(x) else x,
                args[0] if len(args) == 1 else args,
                is_leaf=is_on_engine,
            )
            # Ranks compare it with their metrics
            log = [f"evaluation at step {int(state.step)} of trees made as {reading.words}"]
            look = is_looked_at(next(self.unsharded.calls))
            options = self.options
            places = options.places.params
            flats = flats_of_pass(reading.trees, reading.order, options.axes, log, places)
            device = flats[0].device
            check_batch(batch, device, self.group.rank)
            run = self._pass(reading, flats, log, look=look)
            on_ranks = BatchOnRanks(options.axes, log, batch)
            on_ranks.around = run
            with given_batch(on_ranks):
                found = self._call(run, reading, state, args, device, look=look)
            on_ranks.check_weight(found.weight, look=look)
            metrics = self._means(found, on_ranks, batch, log, device)
            reading.order.record(run.following.gathered, run.uses)
            # The next step may write over what rows took from the params
            return found._replace(rows=apart_from(found.rows, flats)).with_rows(metrics)

    def _pass(
        self, reading: _Reading, flats: Sequence[Tensor], log: list[str], *, look: bool
    ) -> Pass:
        """A pass without a reduction: leaves bring no gradients, so units are used and freed."""
        options = self.options
        units = make_unit_flats(flats, reading.layout, options.axes, log)
        return Pass(
            reading.layout,
            units,
            None,
            device=flats[0].device,
            order=reading.order,
            overlap=options.overlap,
            look=look,
        )

    def _call(
        self,
        run: Pass,
        reading: _Reading,
        state: State,
        args: tuple[Any, ...],
        device: torch.device,
        *,
        look: bool,
    ) -> Evaluated:
        """The evaluation of this rank's part of the batch. Collectives: those of the pass."""
        rank, others = self.group.rank, reading.others
        untouched = Untouched(optree.tree_leaves(others), look=look)
        # The numbers that a training step draws from this state, so evaluations repeat
        random = replayed(state.seed, state.step, self.options.axes.data.rank, device)
        with random:
            params = run.lazy_params()
            mark_policies(params)
            with hiding_trees():
                found = call_eval(self.unsharded.fn, reading.arguments(params), args, rank)
        run.finish()
        untouched.check(others)
        if look:
            check_weight_value(found.weight, rank)
        return found

    def _means(
        self,
        found: Evaluated,
        on_ranks: BatchOnRanks,
        batch: Any,
        log: list[str],
        device: torch.device,
    ) -> Metrics:
        """The metrics for all ranks. Collectives: two all-reduces, of metrics and words."""
        group, copy = labelled(self.group, "evaluation/metrics"), self.options.axes.copy
        size = total_size(batch)
        report = average(
            found.metrics, found.weight, group, log, copy=copy, size=size, device=device
        )
        if not on_ranks.exchanged:
            rows = leading_sizes(batch)
            self.unsharded.reminder.compare_ranks(rows, found.weight, report.sizes, group.rank)
        weight = None if found.weight is None else report.weight
        metrics = report.metrics
        return metrics | total_weight(self.unsharded.metrics, metrics, weight, group.rank)

    def _of_training(self, state: State, batch: Any) -> _Reading:
        """A training step's params, or those that are chosen in their place."""
        layout = sharding_of(state, self.options).layout
        state = state.replace(params=own_params(state, self.group.rank))
        params, words = state.params, _words_of([state.params])
        # An average, say, in flats of its own: the state's params stay
        if self.unsharded.params is not None:
            params, words = self._chosen(state)

        def arguments(params: Any) -> tuple[Any, ...]:
            return params, tree_map(torch.clone, state.buffers), batch

        order = self.gather_order.of("params")
        return _Reading([params], layout, order, arguments, None, words)

    def _of_program(self, state: State, args: tuple[Any, ...]) -> _Reading:
        """All sharded trees of a program's value, and of the other arguments."""
        self.unsharded.check_takes_value()
        check_one_group(state.value, args)
        read = read_only((state.value, args))
        nodes, treedef = optree.tree_flatten(read, is_leaf=is_on_engine)
        numbers = [n for n, node in enumerate(nodes) if _is_held(node)]
        trees: list[ShardedTree] = [nodes[n] for n in numbers]
        if not trees:
            raise StructureError(
                explain(
                    "an evaluation was given a value without a sharded tree",
                    got=f"a {type(state.value).__name__}",
                    rank=self.group.rank,
                    remedy="evaluate a state of fz.program_step, whose init has returned a tree",
                )
            )
        joined, order = self.engine.join(trees, [False] * len(trees))

        def arguments(lazy_trees: Any) -> tuple[Any, ...]:
            given = list(nodes)
            for n, lazy in zip(numbers, lazy_trees, strict=True):
                given[n] = lazy
            value, own = treedef.unflatten(given)
            return value, *own

        # The value's other tensors, which every rank holds
        others = tree_map(
            lambda x: x if isinstance(x, Tensor) else None, state.value, is_leaf=is_on_engine
        )
        given = optree.tree_leaves((state.value, args), is_leaf=is_on_engine)
        words = _words_of([node for node in given if _is_held(node)])
        return _Reading(trees, joined.layout, order, arguments, others, words)

    def _chosen(self, state: State) -> tuple[ShardedTree, str]:
        """The params that `eval_step(params=...)` chooses by the optimizer's state, an average say;
        as held between steps. And how they were made. Collectives: those of `publish`."""
        found: list[ShardedTree] = []
        params: ShardedTree = state.params
        pieces = params.pieces()
        device = next(flat.device for flat in params.flats())
        known = _known_as_cut(state.value.opt_state, self.group.rank)

        def as_held(tree: Any) -> Any:
            shown = ShardedTree(tree, pieces.holding)
            shown.check_leaves(some=True)
            found.append(shown)
            return shown.local_tree

        # As in a program, of numbers that are the same on every rank
        with Streams(state.seed, state.step).of_program(device):
            # Leaves are pieces, which refuse functions that whole leaves have another value of
            chosen = self.unsharded.chosen(known.tree, pieces.tree, as_held)
        return chosen_params(params, chosen, self.options.axes), _words_of(found)


def _known_as_cut(opt_state: Any, rank: int) -> ShardedOptState:
    """The optimizer's state, which knows how it is cut."""
    if not isinstance(opt_state, ShardedOptState):
        raise StructureError(
            explain(
                "eval_step(params=...) was given a state of whose optimizer's state nobody knows "
                "how it is cut",
                expected="a state of a training step",
                got=f"a {type(opt_state).__name__} in its place",
                rank=rank,
                remedy="step.shard(step.unshard(state)) with the training step",
            )
        )
    return opt_state


def _words_of(trees: Sequence[ShardedTree]) -> str:
    return " ".join(f"#{tree.story.word:08x}" for tree in trees) or "the state's"


def _is_held(node: Any) -> bool:
    """Whether this is a sharded tree in the form of params, which a function may read."""
    return isinstance(node, ShardedTree) and node.holding.form == "held"
