"""`assert_sharded_equals_unsharded`: one step, unsharded and on ranks, compared after every
batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from glob import escape
from typing import Any, NamedTuple

import optree
import torch
from optree import tree_map
from torch import Tensor

from ..errors import explain
from ..groups import HybridGroup, SingleRank, run_ranks
from ..groups.mesh import SameData
from ..groups.protocol import Group
from ..layout.levels import LevelRule
from ..layout.sharded_tree import ShardedTree
from ..params import is_on_engine
from ..sharded.api import shard
from ..sharded.buffers import SyncBuffers
from ..step.loss import Metrics, Outcome, as_metric
from ..step.program_step import ProgramStep
from ..step.state import State, TrainValue
from ..step.train import TrainStep
from ..step.weight_reminder import WeightReminder
from ..tree import PyTree, named_leaves, paths, same_structure
from .equality import (
    Equality,
    Grade,
    ProvesNothing,
    apart,
    as_equality,
    assert_equal_updates,
    assert_equal_values,
    is_visible,
)

# Last places of a leaf's largest gradient: about the difference that sums in another order make
JITTER = 16
JITTERED_RUNS = 4  # of the unsharded step, to see how far round-off carries
# The sharded step may be this many times as far off as round-off makes the unsharded one
ROUND_OFF = 10

HINT = (
    "If the loss is a sum over the batch, make it a mean: a sharded step returns the mean over "
    "ranks. If it couples the samples of a batch (BatchNorm) or draws random numbers (dropout), "
    "compare with per_rank=True."
)
HINT_OF_PROGRAM = (
    "If a loss is a sum over the batch, make it a mean: sharded it is the mean over ranks. If "
    "ranks' parts are of unequal size, return fz.Aux(weight=...). If a loss couples the samples of "
    "a batch or draws random numbers, only ranks=(1,) is like the unsharded program."
)
AMPLIFIED = (
    "Round-off makes a difference of this size in the unsharded step too: model or optimizer "
    "amplify round-off here (sums that cancel, a matrix without full rank, an eps that is too "
    "small, a leaf whose true gradient is zero, such as the bias of attention's keys). Remedy: "
    "float64 by model.double(), no such biases, a larger eps, or allow_round_off=True "
    "(docs/testing.md, Limits)."
)


def assert_sharded_equals_unsharded(
    step: TrainStep | ProgramStep,
    *args: Any,
    levels: Sequence[LevelRule] = (0, 1, 2, 3),
    ranks: Sequence[int] = (1, 2, 3),
    grade: Grade | Equality = "reordered",
    per_rank: bool = False,
    unused: Iterable[str] = (),
    allow_round_off: bool = False,
    seed: int | None = 0,
    sync_buffers: SyncBuffers = "mean",
    shard_size: int | None = None,
    same_data: SameData | None = None,
    **options: Any,
) -> None:
    """Prove a step: run it unsharded, and at each level on each number of ranks, and compare after
    every batch.

    The params' updates are compared, and each trained leaf must move visibly in some step. So must
    each other leaf of a program's trees that moves. The optimizer's state, the buffers and the
    metrics are compared, too, and all ranks must agree bit by bit. Of a program's value, the
    updates of all trees are compared, and the values of all else. Ranks are threads of this
    process.

    Args:
        step: an unsharded step, from `train_step` or `program_step`.
        *args: those of `step.init`, and then the batches. Of a training step these are `params,
            buffers, batches`; of a program its trees, and `batches`. Whole batches, one per step,
            are trees of tensors. A program's batch that is a tuple holds the step's arguments. Each
            rank gets its part of every leaf's first dim; 0-d tensors and other things go to all
            ranks.
        levels, ranks: all combinations are run.
        grade: of equality, see `Equality`.
        per_rank: the oracle averages the ranks' gradients, each from that rank's part, instead of
            taking the whole batch: for losses that couple the samples of a batch (BatchNorm) or
            draw random numbers (dropout), and for unequal parts of a loss without a weight. Of a
            program it isn't possible.
        unused: paths, or patterns of paths, of leaves whose update may be zero or lost in rounding:
            trained ones that the loss does not use, averages of frozen ones.
        allow_round_off: leaf by leaf, also allow ten times the difference that round-off makes in
            the unsharded step, when its gradients are changed in their last places; of a program,
            the trained leaves that it starts with. Some optimizers
            amplify round-off where a matrix has no full rank (Shampoo, SOAP, full-matrix Adagrad).
            Eigenvectors are defined up to sign only. A leaf that round-off changes altogether is
            hardly compared then.
        seed: for `init`.
        sync_buffers: as for `shard`.
        shard_size: of a mesh of two axes, how many ranks lie along the shard axis (HSDP). It
            divides all `ranks`.
        same_data: as for `HybridGroup`: batches are split over the ranks along the other axis.
        **options: for `shard`: `donate` and so on.

    Raises:
        AssertionError: naming the first leaf, step, level and ranks that differ, and by how much.
        ProvesNothing: an AssertionError, too: nothing would be compared, or a trained leaf doesn't
            move.
        ValueError: a batch can't be split so that the comparison would be fair.

    >>> from functorch_zero import optim
    >>> from functorch_zero import train_step
    >>> def loss_fn(params, buffers, x):
    ...     return ((params["w"] - x) ** 2).mean()
    >>> step = train_step(loss_fn, optim.adamw(0.1))
    >>> params = {"w": torch.zeros(5, dtype=torch.float64, requires_grad=True)}
    >>> batches = [torch.arange(30.0).view(6, 5)] * 2
    >>> assert_sharded_equals_unsharded(step, params, {}, batches, levels=(1, 3), ranks=(2,))
    """
    _check_is_unsharded(step)
    if isinstance(step, TrainStep) and len(args) != 3:
        raise TypeError(
            explain(
                "a training step was given other arguments than params, buffers and batches",
                expected="3 arguments after the step",
                got=len(args),
                remedy="pass buffers={} where there are none",
            )
        )
    *of_init, batches = args or ([],)
    for name, given in (("batches", batches), ("levels", levels), ("ranks", ranks)):
        if isinstance(given, Mapping | str | Tensor) or not isinstance(given, Iterable):
            raise TypeError(
                explain(
                    f"{name} is no sequence",
                    expected="a list or tuple",
                    got=type(given).__name__,
                    remedy=f"{name}=[...], also of one",
                )
            )
    # A generator's items are needed more than once
    batches, levels, ranks = list(batches), list(levels), list(ranks)
    # Loops over nothing would pass
    for name, given in (("batches", batches), ("levels", levels), ("ranks", ranks)):
        if not given:
            raise ProvesNothing(f"{name} is empty: nothing would be compared")
    equality = as_equality(grade)
    oracle: _Oracle | _ProgramOracle
    if isinstance(step, ProgramStep):
        oracle = _ProgramOracle.of(step, tuple(of_init), batches, seed, per_rank=per_rank)
    else:
        # Whoever says so means unequal parts to count the same
        if per_rank:
            step = replace(step, reminder=WeightReminder(silent=True))
        params, buffers = of_init
        start = Start(params, buffers, seed)
        oracle = _Oracle(step, start, batches, sync_buffers, per_rank)
    for num_ranks in ranks:
        mesh = Mesh(num_ranks, shard_size, same_data)
        parts = [split(batch, mesh.num_parts) for batch in batches]  # by batch, each rank's part
        expected = oracle.run(parts)
        # Whose buffers a rank's are compared with, where each keeps its own
        local = mesh.parts_by_rank if sync_buffers == "local" else None
        for level in levels:
            settings = {"level": level, "sync_buffers": sync_buffers, **options}
            got = _run_sharded(step, oracle.start, parts, mesh, settings)
            at = {"level": level, "ranks": num_ranks}
            comparison = Comparison(expected, got, equality, tuple(unused), local, at)
            _check(comparison, oracle, parts, allow_round_off=allow_round_off)


def _check_is_unsharded(step: Any) -> None:
    if not isinstance(step, TrainStep | ProgramStep):
        raise TypeError(
            explain(
                "assert_sharded_equals_unsharded shards the step itself",
                expected="what train_step or program_step made",
                got=type(step).__name__,
                remedy="pass the step before fz.shard, and shard's arguments to this function",
            )
        )


def _check(
    comparison: Comparison,
    oracle: _Oracle | _ProgramOracle,
    parts: list[list[Any]],
    *,
    allow_round_off: bool,
) -> None:
    """Raise where the runs differ, with a note that says whether round-off explains it."""
    try:
        comparison.run()
    except ProvesNothing:
        raise  # the oracle's update is at fault, and round-off explains nothing
    except AssertionError as error:
        may_be_round_off = comparison.equality.grade != "bitwise"
        # Costly, and so only after a difference: some more runs of the unsharded step
        explained = may_be_round_off and comparison.holds(oracle.jittered_runs(parts))
        if explained and allow_round_off:
            return
        # Most differences that round-off doesn't explain come from a loss that is a sum
        error.add_note(AMPLIFIED if explained else oracle.hint)
        raise


@dataclass(frozen=True)
class _Oracle:
    """The unsharded step, which takes the batches whole or, `per_rank`, in the ranks' parts."""

    step: TrainStep
    start: Start
    batches: Sequence[Any]  # whole
    rule: SyncBuffers
    per_rank: bool
    hint = HINT

    def run(self, parts: list[list[Any]]) -> Run:
        """The run expected of ranks that are given these parts, batch by batch."""
        if self.per_rank:
            return run_in_parts(self.step, self.start, parts, rule=self.rule)
        for batch, its_parts in zip(self.batches, parts, strict=True):
            self._check_fair(batch, len(its_parts))
        return self._whole  # cached: it is the same for all ranks and levels

    def jittered_runs(self, parts: list[list[Any]]) -> list[Run]:
        """The same several times, with gradients that are off in their last places."""
        # Whole batches count as one part
        given = parts if self.per_rank else [[batch] for batch in self.batches]
        runs = []
        for seed in range(JITTERED_RUNS):
            runs.append(run_in_parts(self.step, self.start, given, rule=self.rule, jitter=seed))
        return runs

    @cached_property
    def _whole(self) -> Run:
        return run_whole(self.step, self.start, self.batches)

    def _check_fair(self, batch: Any, num_parts: int) -> None:
        """Refuse unequal parts of a loss without a weight: the mean of their means is not the mean
        of the whole."""
        for path, leaf in zip(paths(batch), optree.tree_leaves(batch), strict=True):
            # Rows that don't divide: parts would be of unequal size
            uneven = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] % num_parts
            if uneven and not self._whole.weighted:
                raise ValueError(
                    f"a batch of {leaf.shape[0]} ({path or 'the batch'}) does not divide over "
                    f"{num_parts} ranks, and the loss returns no weight, so each rank's mean "
                    "would count the same. Remedy: return Aux(weight=...), pass batches that "
                    "divide, or compare with per_rank=True"
                )


@dataclass(frozen=True)
class _ProgramOracle:
    """An unsharded program, which takes the batches whole."""

    step: ProgramStep
    start: ProgramStart
    batches: Sequence[Any]  # whole
    hint = HINT_OF_PROGRAM

    @classmethod
    def of(
        cls,
        step: ProgramStep,
        args: tuple[Any, ...],
        batches: Sequence[Any],
        seed: int | None,
        *,
        per_rank: bool,
    ) -> _ProgramOracle:
        if per_rank:
            raise ValueError(
                explain(
                    "per_rank=True is of training steps: the gradients of a program are its own "
                    "business, and nobody else can average them",
                    remedy="leave it out, and give the program losses that are means over a batch",
                )
            )
        return cls(step, ProgramStart(args, seed, _leaves_of_trees(step, args)), batches)

    def run(self, parts: list[list[Any]]) -> Run:
        """The run expected of ranks that are given these parts: the same for all."""
        return self._whole

    def jittered_runs(self, parts: list[list[Any]]) -> list[Run]:
        """The same several times, from trained leaves that are off in their last places."""
        runs = []
        for seed in range(JITTERED_RUNS):
            runs.append(run_whole(self.step, self.start.jittered(seed), self.batches))
        return runs

    @cached_property
    def _whole(self) -> Run:
        run = run_whole(self.step, self.start, self.batches)
        if not any(map(_is_trained, run.start.params.values())):
            raise ProvesNothing(
                "no tree of the program's value has a trained leaf, whose update could be "
                "compared. Remedy: return the trees that init is given as they are"
            )
        return run


def _leaves_of_trees(step: ProgramStep, args: tuple[Any, ...]) -> list[bool]:
    """Per leaf of a program's whole value, whether it is one of a tree that ranks cut, as params
    are. Others are an optimizer's, or no tree's."""
    sharded = shard(step, level=0, group=SingleRank())
    state = sharded.init(*args)
    same_structure(
        step.init(*args).value,
        sharded.unshard(state).value,
        what="the value that init makes of sharded trees",
        remedy="let init make the same of whole and of sharded trees. A whole tree's copy is not "
        "trained in init, so pass fz.zero_updates the tree itself",
    )

    def of_node(node: Any) -> Any:
        is_tree = isinstance(node, ShardedTree) and node.holding.form == "held"
        return tree_map(lambda leaf: is_tree, node)

    found: list[bool] = optree.tree_leaves(tree_map(of_node, state.value, is_leaf=is_on_engine))
    return found


class Mesh(NamedTuple):
    """The ranks of a run, on one axis where there is no `shard_size`."""

    num_ranks: int
    shard_size: int | None
    same_data: SameData | None

    @property
    def num_parts(self) -> int:
        """How many parts a batch is split into."""
        return 1 + max(self.parts_by_rank)

    @property
    def parts_by_rank(self) -> list[int]:
        """The number of each rank's part of the batch."""
        return [self.part_of(rank) for rank in range(self.num_ranks)]

    def part_of(self, rank: int) -> int:
        """The part of the batch that a rank is given."""
        if self.same_data is None:
            return rank
        if self.shard_size is None:
            raise ValueError(f"same_data={self.same_data!r} needs a mesh. Remedy: shard_size=...")
        replica, place = divmod(rank, self.shard_size)
        # Along "replicate" data are equal, so the place in the replica decides
        return place if self.same_data == "replicate" else replica

    def of(self, group: Group) -> Group:
        """The group that `shard` is given."""
        if self.shard_size is None:
            return group
        return HybridGroup(group, shard_size=self.shard_size, same_data=self.same_data)


def _run_sharded(
    step: TrainStep | ProgramStep,
    start: Start | ProgramStart,
    batches: Sequence[list[Any]],
    mesh: Mesh,
    settings: Mapping[str, Any],
) -> list[Run]:
    """Each rank's run, with the whole states gathered. `batches`: by step, each one's parts."""

    def run(group: Group) -> Run:
        sharded: Any = shard(step, group=mesh.of(group), **settings)
        state = sharded.init(*start.args, seed=start.seed)
        first = start.arranged(sharded.unshard(state))
        steps = []
        for parts in batches:
            own = parts[mesh.part_of(group.rank)]
            state, metrics = sharded(state, *start.arguments(own))
            # Gathered after every step, as the next one may use its storage up
            whole = start.arranged(sharded.unshard(state))
            steps.append(Step(whole, [whole.buffers], metrics))
        return Run(first, steps)

    try:
        # Threads: no port, and a failure comes with its rank's note
        return run_ranks(run, mesh.num_ranks)
    except Exception as error:
        at = f"level {settings['level']}, ranks {mesh.num_ranks}"
        error.add_note(f"While running the sharded step at {at}.")
        raise


@dataclass(frozen=True)
class Comparison:
    """The oracle's run and each rank's, to be compared step by step."""

    expected: Run
    got: Sequence[Run]
    equality: Equality
    unused: tuple[str, ...]
    local: list[int] | None  # each rank's part of the batch, if ranks keep buffers of their own
    at: dict[str, Any]  # for errors: level and ranks

    def run(self, jittered: Sequence[Run] = ()) -> None:
        """Raise at the first difference that the grade does not allow, nor round-off as in the
        `jittered` runs."""
        # By the oracle's run alone: the other's may be wrong
        moving = self._moving()
        for k, want in enumerate(self.expected.steps):
            have = [run.steps[k] for run in self.got]
            at = {"step": k, **self.at}
            # Rank 0 against the oracle; the others against rank 0, to the bit
            self._compare_updates(k, moving, jittered, at)
            self._compare_others(want, have[0], [run.steps[k] for run in jittered], at)
            self._compare_ranks(want, have, at)

    def holds(self, jittered: Sequence[Run]) -> bool:
        """Whether round-off explains all differences."""
        try:
            self.run(jittered)
        except AssertionError:
            return False
        return True

    def _moving(self) -> list[str]:
        """The paths of the leaves that some step moves visibly: in another they may rest, as with
        Rprop and SOAP."""
        moved = set()
        for before, after in itertools.pairwise(state.params for state in self.expected.states):
            leaves = optree.tree_leaves(before), optree.tree_leaves(after)
            for path, old, new in zip(paths(before), *leaves, strict=True):
                if old.numel() and self._moves(old, new):
                    moved.add(escape(path))  # a path may have characters that patterns use
        return sorted(moved)

    def _moves(self, old: Tensor, new: Tensor) -> bool:
        if self.equality.grade == "reordered":
            return is_visible(old, new)
        return not torch.equal(old, new)

    def _compare_updates(
        self, k: int, moving: list[str], jittered: Sequence[Run], at: dict[str, Any]
    ) -> None:
        """Step k's updates of the params; leaves that don't move in any step are refused."""
        before, after = self.expected.states[k : k + 2]
        got_before, got_after = self.got[0].states[k : k + 2]
        trained = tree_map(_is_trained, before.params)
        # A tree that is only read, such as an average, moves or rests as the oracle's does
        moves = tree_map(
            lambda on, old, new: on or _differ(old, new), trained, before.params, after.params
        )
        # The oracle's, then the jittered runs' of the same step
        updates = [run.update(k) for run in (self.expected, *jittered)]
        assert_equal_updates(
            before.params,
            after.params,
            got_after.params,
            grade=self.equality,
            old_got=got_before.params,
            trained=moves,
            unused=self.unused,
            resting=moving,
            slack=_slack(*updates),
            # Zero without jittered runs
            context=at,
        )

    def _compare_others(
        self, want: Step, have: Step, jittered: Sequence[Step], at: dict[str, Any]
    ) -> None:
        """All results of a step but its params."""
        # Counters and metrics come from computations in these dtypes
        dtypes = {leaf.dtype for leaf in optree.tree_leaves(self.expected.start.params)}
        got, off = have.others(), [step.others() for step in jittered]
        for name, expected in want.others().items():
            assert_equal_values(
                expected,
                got[name],
                grade=self.equality,
                what=name,
                dtypes=dtypes,
                slack=_slack(expected, *(others[name] for others in off)),
                context=at,
            )

    def _compare_ranks(self, want: Step, have: Sequence[Step], at: dict[str, Any]) -> None:
        """All ranks against rank 0, bit by bit; buffers that are each rank's own against the
        oracle's."""
        # Same data, same arithmetic: ranks may not differ in a single bit. `_compare_others` has
        # compared rank 0's own results
        first, *others = have
        for rank, other in enumerate(others, start=1):
            here = {**at, "rank": rank}
            assert_equal_values(
                self._shared(first),
                self._shared(other),
                grade="bitwise",
                what="rank 0's results and this rank's",
                context=here,
            )
            # The oracle has buffers of each part only where it takes the batch in parts; on a mesh
            # several ranks may have one part
            if self.local and len(want.buffers) > self.local[rank]:
                expected = want.buffers[self.local[rank]]
                got = other.buffers[0]
                assert_equal_values(
                    expected, got, grade=self.equality, what="buffers", context=here
                )

    def _shared(self, step: Step) -> Any:
        """The results that all ranks must have alike."""
        state: State = step.state.replace(buffers=None) if self.local else step.state
        return {"state": state, "metrics": step.metrics}


def _is_trained(leaf: Tensor) -> bool:
    return leaf.requires_grad


def _differ(old: Tensor, new: Tensor) -> bool:
    return not torch.equal(old, new)


def _slack(expected: Any, *jittered: Any) -> list[float]:
    """For each leaf, the difference that round-off may make."""
    others = [optree.tree_leaves(tree) for tree in jittered]
    slack = []
    for n, leaf in enumerate(optree.tree_leaves(expected)):
        # Over all jittered runs
        largest = max((apart(leaf, other[n]) for other in others), default=0.0)
        slack.append(ROUND_OFF * largest)
    return slack


class Step(NamedTuple):
    """The results of one step."""

    state: State  # whole leaves: gathered, where the step is sharded
    # A rank's run has its own; the oracle's, where it takes a batch in parts, has each part's
    buffers: list[PyTree[Tensor]]
    metrics: Metrics

    def others(self) -> dict[str, Any]:
        """All results but the params, by the names that errors give them."""
        state = self.state
        return {
            "opt_state": state.opt_state,
            "buffers": self.buffers[0],
            "metrics": self.metrics,
            "counters": (state.step, state.seed, state.finite),
        }


class Run(NamedTuple):
    """A run from the first state on."""

    start: State
    steps: list[Step]
    weighted: bool = True  # whether the loss says how much a batch counts

    @property
    def states(self) -> list[State]:
        """The first state, and the one after each step."""
        return [self.start, *(step.state for step in self.steps)]

    def update(self, k: int) -> PyTree[Tensor]:
        """Step k's update of the params."""
        before, after = self.states[k : k + 2]
        return tree_map(torch.sub, after.params, before.params)  # in the params' dtypes


class Start(NamedTuple):
    """The beginning of a run: the arguments of `step.init`."""

    params: PyTree[Tensor]  # whole leaves
    buffers: PyTree[Tensor] | None
    seed: int | None

    @property
    def args(self) -> tuple[Any, ...]:
        return self.params, self.buffers

    def arguments(self, batch: Any) -> tuple[Any, ...]:
        """Those of the step, after the state."""
        return (batch,)

    def arranged(self, state: State) -> State:
        """A whole state of the run: its params are those that are compared by their updates."""
        return state


class ProgramStart(NamedTuple):
    """The same of a program."""

    args: tuple[Any, ...]  # whole trees, and whatever else init takes
    seed: int | None
    of_trees: list[bool]  # per leaf of the value, whether it is one of a tree

    def arguments(self, batch: Any) -> tuple[Any, ...]:
        """Those of the step, after the state."""
        return batch if type(batch) is tuple else (batch,)

    def arranged(self, state: State) -> State:
        """A whole state as a training step's: the leaves of trees are its params, by path, and all
        others its optimizer's state."""
        params: dict[str, Tensor] = {}
        others: dict[str, Any] = {}
        rows = zip(named_leaves(state.value).items(), self.of_trees, strict=True)
        for (path, leaf), of_tree in rows:
            if of_tree:
                params[path] = leaf
            else:
                others[path] = leaf
        return state.replace(value=TrainValue(params, {}, others), trained=None)

    def jittered(self, seed: int) -> ProgramStart:
        """The same with trained leaves that are off in their last places."""
        leaves, treedef = optree.tree_flatten(self.args)
        trained = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
        with torch.no_grad():
            new = iter(_jittered(trained, torch.Generator().manual_seed(seed)))
        for n, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaves[n] = next(new).requires_grad_()
        return self._replace(args=treedef.unflatten(leaves))


def split(batch: Any, num_ranks: int) -> list[Any]:
    """Each rank's part of a batch: consecutive rows, as equal in number as possible."""
    leaves, treedef = optree.tree_flatten(batch)
    # The sizes of first dims, of all tensors that have one
    rows = {x.shape[0] for x in leaves if isinstance(x, Tensor) and x.dim()}
    # Some rank would get no row
    if rows and min(rows) < num_ranks:
        raise ValueError(
            f"a batch of {min(rows)} can't be split over {num_ranks} ranks. Remedy: pass larger "
            "batches"
        )
    by_leaf: list[Sequence[Any]] = []  # each leaf's parts, in rank order
    for leaf in leaves:
        has_rows = isinstance(leaf, Tensor) and leaf.dim()
        # Sizes differ by 1 at most
        by_leaf.append(leaf.tensor_split(num_ranks) if has_rows else [leaf] * num_ranks)
    return [treedef.unflatten([parts[rank] for parts in by_leaf]) for rank in range(num_ranks)]


def run_whole(
    step: TrainStep | ProgramStep, start: Start | ProgramStart, batches: Sequence[Any]
) -> Run:
    """The unsharded step as it is, on whole batches."""
    state = step.init(*start.args, seed=start.seed)
    first, steps = start.arranged(state), []
    for batch in batches:
        state, metrics = step(state, *start.arguments(batch))
        whole = start.arranged(state)
        steps.append(Step(whole, [whole.buffers], metrics))
    if isinstance(step, ProgramStep):
        return Run(first, steps)
    # One more loss tells: `step` does not say whether it was weighted
    weighted = not batches or step.loss_and_grads(first, batches[0])[1].weight is not None
    return Run(first, steps, weighted)


def run_in_parts(
    step: TrainStep,
    start: Start,
    batches: Sequence[list[Any]],
    *,
    rule: str = "mean",
    jitter: int | None = None,
) -> Run:
    """The unsharded step with each batch in parts: their gradients and metrics averaged, buffers by
    `shard`'s rule.

    `jitter` seeds changes of the gradients in their last places.
    """
    first = state = step.init(start.params, start.buffers, seed=start.seed)
    num_parts = len(batches[0]) if batches else 1
    held = [state.buffers] * num_parts  # each rank's
    # Apart from the global generator, from which the loss may draw
    generator = None if jitter is None else torch.Generator().manual_seed(jitter)
    steps = []
    for parts in batches:
        gradients, outcomes = [], []
        # One part after the other, each with its rank's buffers and its rank's random stream
        for rank, (buffers, part) in enumerate(zip(held, parts, strict=True)):
            own, outcome = step.loss_and_grads(state.replace(buffers=buffers), part, rank)
            gradients.append(own)
            outcomes.append(outcome)
        # As ranks do: shares first, then the weighted sum in rank order
        shares = _shares(outcomes)
        grads = _mean_trees(gradients, shares)
        if generator is not None:
            grads = _jittered(grads, generator)
        metrics = _average_metrics(outcomes, shares)
        combined = _combine_buffers(rule, [outcome.buffers for outcome in outcomes], shares)
        # The optimizer runs once, on the mean
        before = state
        state, measured = step.update_measured(before, grads, combined[0], metrics["loss"])
        if not _skipped(before, state):  # after a skipped step each rank has its old buffers
            held = combined
        steps.append(Step(state, held, metrics | measured))
    return Run(first, steps)


def _skipped(old: State, new: State) -> bool:
    """Whether the step in between was skipped, since its loss or gradients were not finite."""
    return (
        old.finite is not None
        and new.finite is not None
        and bool(new.finite.skipped > old.finite.skipped)
    )


def _shares(outcomes: Sequence[Outcome]) -> list[float]:
    """Each part's share of the mean, by its loss's weight."""
    weights = [1.0 if outcome.weight is None else float(outcome.weight) for outcome in outcomes]
    total = sum(weights) or 1.0  # all of weight 0: every share is 0, not NaN
    return [weight / total for weight in weights]


def _mean_trees(trees: Sequence[PyTree[Tensor]], shares: Sequence[float]) -> PyTree[Tensor]:
    return tree_map(lambda *leaves: _mean(leaves, shares), *trees)


def _mean(values: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """The weighted mean, added up in rank order, as ranks do."""
    # Left to right: another order would give other bits
    total, *rest = [value * share for value, share in zip(values, shares, strict=True)]
    for value in rest:
        total = total + value
    return total


def _average_metrics(outcomes: Sequence[Outcome], shares: Sequence[float]) -> Metrics:
    """The loss and the metrics of all parts, each as its weighted mean."""
    seen = []
    for outcome in outcomes:
        measured = {"loss": outcome.loss, **outcome.metrics}
        seen.append({name: as_metric(value) for name, value in measured.items()})
    return {name: _mean([metrics[name] for metrics in seen], shares) for name in seen[0]}


def _combine_buffers(
    rule: str, held: list[PyTree[Tensor]], shares: Sequence[float]
) -> list[PyTree[Tensor]]:
    """The buffers that each rank holds after a step, from those that each rank's loss made. A batch
    of weight 0 isn't averaged.

    Written out over whole buffers, and of nothing that the sharded step uses: else a mistake in its
    rule would be one here, too.
    """
    if rule == "local":
        return held
    if rule == "rank0":
        return [held[0]] * len(held)
    counted = [tree for tree, share in zip(held, shares, strict=True) if share]
    return [tree_map(_mean_buffer, *(counted or held[:1]))] * len(held)


def _mean_buffer(*buffers: Tensor) -> Tensor:
    """The mean over ranks of one buffer; of integers and bools, the first rank's."""
    first = buffers[0]
    if first.is_complex():
        wide = torch.complex128
    elif first.is_floating_point():
        wide = torch.float64
    else:
        return first
    # The mean of equal numbers could be rounded to another one
    if all(other is first or torch.equal(first, other) for other in buffers):
        return first
    total = torch.zeros_like(first, dtype=wide)
    for buffer in buffers:
        total = total + buffer
    return (total / len(buffers)).to(first.dtype)


def _jittered(grads: PyTree[Tensor], generator: torch.Generator) -> PyTree[Tensor]:
    """The gradients with noise of the size that sums in another order would make."""
    leaves = optree.tree_leaves(grads)
    # The coarsest dtype counts for all: gradients pass through every dtype of the model
    last_place = max((torch.finfo(leaf.dtype).eps for leaf in leaves), default=0.0)

    def jitter(grad: Tensor) -> Tensor:
        if not grad.numel():  # no largest magnitude to go by
            return grad
        drawn = torch.rand(grad.shape, generator=generator, dtype=torch.float64, device="cpu")
        noise = (2 * drawn - 1).to(grad.device)  # from -1 to 1
        size = JITTER * last_place * grad.abs().max()  # absolute, for all elements of the leaf
        return grad + (size * noise).to(grad.dtype)

    return tree_map(jitter, grads)
