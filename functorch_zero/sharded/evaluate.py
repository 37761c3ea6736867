"""The evaluation step for N ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor

from ..errors import StructureError
from ..groups import labelled
from ..groups.protocol import Group
from ..in_a_loss import hiding_trees
from ..layout.sharded_tree import ShardedTree, is_held
from ..model.untouched import Untouched, is_looked_at
from ..params import engine_of, is_on_engine, map_nodes, nodes_of, without_engines
from ..runtime.unit import Pass
from ..step.evaluate import CHOSEN, EvalStep, Evaluated, call_eval, total_weight
from ..step.loss import Metrics
from ..step.rng import Streams, replayed
from ..step.rows import leading_sizes
from ..step.scope import given_batch
from ..step.state import State, check_state
from ..tree import PyTree, check_tensors
from .average import compare_words, means_of, start_means
from .batch_on_ranks import BatchOnRanks
from .buffers import apart_from
from .checks import check_batch, check_place, donated_state
from .failures import sharing_failures
from .options import Options
from .params import TreesAmong, make_unit_flats
from .program.engine import ShardedEngine
from .program.value import trained_like
from .publish import chosen_params, flats_of_pass


class ShardedEvalStep:
    """`step(state, batch) -> metrics` on one rank of a group. Made by `shard`."""

    def __init__(self, step: EvalStep, options: Options):
        self.unsharded, self.options = step, options
        self.engine = ShardedEngine(options)

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
        options, rank, step = self.options, self.group.rank, getattr(state, "step", None)
        failures = sharing_failures(*options.axes.groups, call="evaluation", step=step)
        with failures, self.engine.forgetting_orders():
            check_state(state)
            check_place(state.sharding, options)
            nodes = nodes_of(state.value)
            if any(is_on_engine(node) and node.is_used_up for node in nodes):
                raise donated_state(state.step)
            # Ranks compare it with their metrics
            log: list[str] = []
            given, others = self._arguments(state, args, log)
            batch = without_engines(args[0] if len(args) == 1 else args)
            look = is_looked_at(next(self.unsharded.calls))
            holdings = [tree.holding for tree in given.trees]
            joined, order = self.engine.join(holdings, [True] * len(holdings))
            flats = flats_of_pass(given.trees, order, options.axes, log, options.places.params)
            device = flats[0].device
            check_batch(batch, device, rank)
            # Without a reduction: leaves bring no gradients, so units are used and freed
            run = Pass(
                joined.layout,
                make_unit_flats(flats, joined.layout, options.axes, log),
                None,
                device=device,
                order=order,
                overlap=options.overlap,
                look=look,
            )
            on_ranks = BatchOnRanks(options.axes, log, batch, run)
            untouched = Untouched(optree.tree_leaves(others), look=look)
            # The numbers that a training step draws from this state, so evaluations repeat
            random = replayed(state.seed, state.step, options.axes.data.rank, device)
            with given_batch(on_ranks), random:
                read = given.with_lazy(run.lazy_params())
                with hiding_trees():
                    found = call_eval(self.unsharded.fn, read, args, rank)
                run.finish()
            untouched.check(others)
            on_ranks.check(found.metrics, found.weight, look=look)
            metrics = self._means(found, on_ranks, batch, log, device)
            order.record(run.following.gathered, run.uses)
            # The next step may write over what rows took from the params
            return found._replace(rows=apart_from(found.rows, flats)).with_rows(metrics)

    def _arguments(
        self, state: State, args: tuple[Any, ...], log: list[str]
    ) -> tuple[TreesAmong, PyTree[Tensor]]:
        """The trees among the evaluation's arguments, and the other tensors of the first one, which
        every rank holds. `log` takes words of how trees were made. Collectives: those of `publish`,
        where params are chosen."""
        rank, place = self.group.rank, self.options.place
        choose = partial(self._chosen, log=log)
        first, *_ = all_given = self.unsharded.arguments(state, args, choose)
        given = TreesAmong(all_given, is_held)
        if not given.trees:
            raise StructureError(
                "an evaluation was given a value without a sharded tree",
                got=f"a {type(state.value).__name__}",
                rank=rank,
                remedy="evaluate a state whose init has returned a tree; "
                "fz.shard_tree(tree, layout_like=...) cuts a whole one",
            )
        # It raises where they lie on different groups. Pickled, a tree has lost its engine
        engine_of([tree for tree in given.trees if tree.holding.engine is not None])
        for tree in given.trees:
            if (tree.sharding.rank, tree.sharding.mesh) != (place.rank, place.mesh):
                raise StructureError(
                    "an evaluation was given a tree of another group of ranks",
                    path=tree.holding.name or None,
                    expected=place,
                    got=tree.sharding,
                    rank=rank,
                    remedy="make the group once, and shard all trees over it",
                )
        log.append(
            f"evaluation at step {int(state.step)} of trees made as {_words_of(given.trees)}"
        )
        tensors = map_nodes(lambda x: x if isinstance(x, Tensor) else None, first)
        return given, tensors

    def _means(
        self,
        found: Evaluated,
        on_ranks: BatchOnRanks,
        batch: Any,
        log: list[str],
        device: torch.device,
    ) -> Metrics:
        """The metrics for all ranks. Collectives: two all-reduces, of metrics and words."""
        group = labelled(self.group, "evaluation/metrics")
        # No backward could hide the means' way
        means = start_means(found.metrics, found.weight, group, device)
        plain = found.weight is None and not on_ranks.exchanged
        rows = leading_sizes(batch) if plain else []
        compare_words(means, group, log, rows, self.unsharded.reminder)
        metrics, total, _ = means_of(means, group, self.options.axes.copy)
        weight = None if found.weight is None else total
        return metrics | total_weight(self.unsharded.metrics, metrics, weight, group.rank)

    def _chosen(self, state: State, log: list[str]) -> Any:
        """The params that `eval_step(params=...)` chooses by the optimizer's state, an average say;
        as held between steps. `log` takes words of how they were made. Collectives: those of
        `publish`."""
        assert state.sharding is not None
        # A bare tree that users have put there is refused as any value without a sharded one
        if not is_held(state.params):
            return state.params
        holding = replace(state.params.holding, sharding=state.sharding)
        params = trained_like(state.params, holding)
        pieces, opt_state = params.pieces(), state.opt_state
        device = next(flat.device for flat in params.flats())
        # As in a program, of numbers that are the same on every rank
        with Streams(state.seed, state.step).of_program(device):
            # Leaves are pieces, which refuse functions that whole leaves have another value of
            own_state = opt_state.tree if is_on_engine(opt_state) else opt_state
            chosen = ShardedTree(self.unsharded.chosen(own_state, pieces.tree), pieces.holding)
            check_tensors(chosen.local_tree, CHOSEN)
        log.append(f"params chosen of trees made as {_words_of([chosen])}")
        # In flats of their own: the state's params stay
        return chosen_params(params, chosen, self.options.axes)


def _words_of(trees: Sequence[ShardedTree]) -> str:
    return " ".join(f"#{tree.story.word:08x}" for tree in trees)
