"""`assert_sharded_equals_unsharded`: one step, unsharded and on ranks, compared after every
batch."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import optree
from torch import Tensor

from ..errors import UnequalBatchesWarning, explain
from ..groups import HybridGroup, SingleRank, run_ranks
from ..groups.mesh import SameData
from ..groups.protocol import Group
from ..layout.build import default_units
from ..layout.levels import LevelRule, Levels
from ..layout.sharded_tree import is_held
from ..params import as_local, nodes_of
from ..sharded.api import shard
from ..sharded.buffers import SyncBuffers
from ..step.loss_calls import LossCalls
from ..step.program_step import ProgramStep
from ..step.rows import num_rows
from ..step.train import TrainStep
from ..tree import named_leaves, same_structure
from .causes import sizes_of
from .comparison import Comparison
from .equality import Equality, Grade, ProvesNothing, Unequal, as_equality
from .recording import Recording
from .runs import Start, run_in_parts, run_whole, split

JITTERED_RUNS = 4  # of the unsharded step, to see how far round-off carries

HINT = (
    "A rank's loss sees its own part of the batch. If it needs the whole, such as a contrastive "
    "loss, let it gather that (docs/howto/inside-a-loss.md); per_rank=True would not notice. If a "
    "loss is a sum over the batch, make it a mean: sharded it is the mean over ranks. If ranks' "
    "parts are of unequal size, or the mean is over tokens or a mask, return fz.Aux(weight=...). A "
    "reduction that rounds is to be left out. Only where each rank's part is meant to be seen by "
    "itself (BatchNorm, dropout), or a Precision rounds its gradients, compare with per_rank=True."
)
NOT_REPEATED = (
    "The unsharded step gives other numbers when it is run again on the same batches. It draws "
    "random numbers that don't follow from its seed (Python's random, numpy, a generator of its "
    "own, seed=None), or keeps something outside of its state. Remedy: draw by torch or fz.random "
    "in a step with a seed, or pass what was drawn with the batch; keep what changes in the state."
)
AMPLIFIED = (
    "Round-off makes a difference of this size in the unsharded step too: model or optimizer "
    "amplify round-off here (sums that cancel, a matrix without full rank, an eps that is too "
    "small, a leaf whose true gradient is zero, such as the bias of attention's keys). Remedy: "
    "float64 by model.double(), no such biases, a larger eps, or allow_round_off=True "
    "(docs/begin/testing.md, Limits)."
)


def assert_sharded_equals_unsharded(
    step: ProgramStep,
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
    process. Leaves begin anywhere in their flats, so that ranks cut small ones, too.

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
            taking the whole batch: for losses that see each part by itself on purpose (BatchNorm,
            dropout), and for unequal parts of a loss without a weight. A loss that needs the whole
            batch, and doesn't gather it, passes so, too. Of a program, each gradient that it takes
            is averaged so. Where a `Precision` rounds gradients, the sum of a rank's is rounded if
            ranks add them up whole: at levels 0 and 1, and with `reduce_gradients="once"`. Of a
            program with levels by leaf each use's are.
        unused: paths, or patterns of paths, of leaves whose update may be zero or lost in rounding:
            trained ones that the loss does not use, averages of frozen ones.
        allow_round_off: leaf by leaf, also allow ten times the difference that round-off makes in
            the unsharded step, when its gradients are changed in their last places. Some optimizers
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

    >>> import torch
    >>> from functorch_zero import optim
    >>> from functorch_zero import train_step
    >>> def loss_fn(params, buffers, x):
    ...     return ((params["w"] - x) ** 2).mean()
    >>> step = train_step(loss_fn, optim.adamw(0.1))
    >>> params = {"w": torch.zeros(5, dtype=torch.float64, requires_grad=True)}
    >>> batches = [torch.arange(30.0).view(6, 5)] * 2
    >>> assert_sharded_equals_unsharded(step, params, {}, batches, levels=(1, 3), ranks=(2,))
    """
    if not isinstance(step, ProgramStep):
        raise TypeError(
            explain(
                "assert_sharded_equals_unsharded shards the step itself",
                expected="what train_step or program_step made",
                got=type(step).__name__,
                remedy="pass the step before fz.shard, and shard's arguments to this function",
            )
        )
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
    batches = _listed("batches", batches)
    levels, ranks = _listed("levels", levels), _listed("ranks", ranks)
    equality = as_equality(grade)
    # Whoever proves by parts means unequal ones to count the same: the step's own reminder is not
    # used up by that
    if per_rank:
        step = replace(step, calls=LossCalls())
    start = Start((*of_init,), seed)
    if not isinstance(step, TrainStep):
        start = start._replace(
            of_trees=_leaves_of_trees(step, start.args, sync_buffers), buffers=step.buffers
        )
    whole = [[batch] for batch in batches]
    oracle = _Oracle(step, start, whole, sync_buffers, in_parts=False)
    with warnings.catch_warnings():
        # Whoever says so means unequal parts to count the same
        if per_rank:
            warnings.simplefilter("ignore", UnequalBatchesWarning)
        for num_ranks in ranks:
            mesh = Mesh(num_ranks, shard_size, same_data)
            parts = [split(batch, mesh.num_parts) for batch in batches]  # by batch, each rank's
            if not per_rank:
                oracle.check_fair(parts)
            # By the leaves whose summed gradients are rounded
            in_parts: dict[tuple[bool, ...], _Oracle] = {}
            for level in levels:
                settings = {"level": level, "sync_buffers": sync_buffers, **options}
                if per_rank:
                    sums = summed_whole(start, settings)
                    new = _Oracle(step, start, parts, sync_buffers, in_parts=True, sums=sums)
                    oracle = in_parts.setdefault(sums, new)
                expected = oracle.expected
                got = _run_sharded(step, start, parts, mesh, settings)
                comparison = Comparison(
                    expected,
                    got,
                    equality,
                    tuple(unused),
                    local=sync_buffers == "local",
                    at={"level": level, "ranks": num_ranks},
                    sizes=mesh.sizes | {"micro-batches": getattr(step, "accumulate", 1)},
                    decays=_decays(getattr(step, "optimizer", None)),
                )
                _check(comparison, oracle, parts, allow_round_off=allow_round_off)


def _listed(name: str, given: Any) -> list[Any]:
    """A list, since a generator's items are needed more than once; loops over nothing would
    pass."""
    if isinstance(given, Mapping | str | Tensor) or not isinstance(given, Iterable):
        raise TypeError(
            explain(
                f"{name} is no sequence",
                expected="a list or tuple",
                got=type(given).__name__,
                remedy=f"{name}=[...], also of one",
            )
        )
    found = list(given)
    if not found:
        raise ProvesNothing(f"{name} is empty: nothing would be compared")
    return found


def summed_whole(start: Start, settings: Mapping[str, Any]) -> tuple[bool, ...]:
    """Per leaf, whether ranks add up its gradients whole, over uses and micro-batches, before a
    `Precision` rounds them: at levels 0 and 1, and where they are reduced once. One entry for all
    leaves of a program, and none where no policy says how gradients travel.

    `settings`: of `shard`.
    """
    policies = [p for unit in default_units(start.args) for p in unit.policies.values()]
    if all(policy.reduce is None for policy in policies):
        return ()
    levels, once = Levels(settings["level"]), settings.get("reduce_gradients") == "once"
    if start.of_trees is not None:
        return (once or levels.number in (0, 1),)
    leaves = named_leaves(start.args[0]).items()
    return tuple(once or not levels.of(path, leaf).streams for path, leaf in leaves)


def _check(
    comparison: Comparison,
    oracle: _Oracle,
    parts: list[list[Any]],
    *,
    allow_round_off: bool,
) -> None:
    """Raise where the runs differ, with a note that says whether round-off explains it."""
    error = comparison.difference()
    if error is None:
        return
    if isinstance(error, ProvesNothing):
        raise error  # the oracle's update is at fault, and round-off explains nothing
    # Costly, and so only after a difference. Other random numbers would pass for round-off.
    again = oracle.run(oracle.given)
    if not all(map(Recording.repeats, again, oracle.expected)):
        error.add_note(NOT_REPEATED)
        raise error
    if comparison.equality.grade != "bitwise":
        jittered = [oracle.run(oracle.given, jitter=seed)[0] for seed in range(JITTERED_RUNS)]
        if comparison.difference(jittered) is None:
            if allow_round_off:
                return
            error.add_note(AMPLIFIED)
            raise error
    if isinstance(error, Unequal):
        error = comparison.explained(error, partial(oracle.shares, parts))
    error.add_note(HINT)
    raise error


@dataclass(frozen=True)
class _Oracle:
    """The unsharded step, which takes whole batches, or batches in the ranks' parts."""

    step: ProgramStep
    start: Start
    given: list[list[Any]]  # by batch: the ranks' parts, or one that is the whole
    rule: SyncBuffers
    in_parts: bool
    sums: tuple[bool, ...] = ()  # as `summed_whole` gives it

    @cached_property
    def expected(self) -> list[Recording]:
        """The run that ranks are compared with, by part where it takes batches in parts."""
        runs = self.run(self.given)
        if not any(leaf.requires_grad for leaf in optree.tree_leaves(runs[0].start)):
            raise ProvesNothing(
                "no tree of the program's value has a trained leaf, whose update could be "
                "compared. Remedy: return the trees that init is given as they are"
            )
        return runs

    def run(self, given: list[list[Any]], jitter: int | None = None) -> list[Recording]:
        """A run from the same start; with `jitter` gradients are off in their last places."""
        step, start = self.step, self.start
        if self.in_parts or jitter is not None:  # gradients are jittered in parts alone
            return run_in_parts(step, start, given, rule=self.rule, jitter=jitter, sums=self.sums)
        return [run_whole(step, start, [batch for (batch,) in given])]

    def shares(self, parts: list[list[Any]], k: int) -> list[Recording]:
        """Runs that end with step k, each with one part of its batch in place of all."""
        before, num = self.given[:k], len(self.given[k])
        return [self.run([*before, [part] * num])[0] for part in parts[k]]

    def check_fair(self, parts: list[list[Any]]) -> None:
        """Refuse unequal parts of a loss without a weight: the mean of their means is not the mean
        of the whole."""
        for (batch,), its_parts in zip(self.given, parts, strict=True):
            rows, num_parts = num_rows(batch) or 0, len(its_parts)
            # Rows that don't divide: parts would be of unequal size
            if rows % num_parts and not self.expected[0].weighted:
                raise ValueError(
                    f"a batch of {rows} does not divide over {num_parts} ranks, and the loss "
                    "returns no weight, so each rank's mean would count the same. Remedy: return "
                    "Aux(weight=...), pass batches that divide, or compare with per_rank=True"
                )


def _decays(optimizer: Any) -> tuple[float, float] | None:
    """Adam's b1 and b2, where an optimizer or a part of it has them as numbers."""
    made_with = getattr(optimizer, "hyperparams", {})
    b1, b2 = made_with.get("b1"), made_with.get("b2")
    if isinstance(b1, float) and isinstance(b2, float):
        return b1, b2
    return next(filter(None, map(_decays, made_with.values())), None)


def _leaves_of_trees(
    step: ProgramStep, args: tuple[Any, ...], sync_buffers: SyncBuffers
) -> list[bool]:
    """Per leaf of a program's whole value, whether it is one of a tree that ranks cut, as params
    are. Others are an optimizer's, or no tree's."""
    sharded = shard(step, level=0, group=SingleRank(), sync_buffers=sync_buffers)
    state = sharded.init(*args)
    same_structure(
        step.init(*args).value,
        sharded.unshard(state).value,
        what="the value that init makes of sharded trees",
        remedy="let init make the same of whole and of sharded trees. A whole tree's copy is not "
        "trained in init, so pass fz.zero_updates the tree itself",
    )
    nodes = nodes_of(state.value)
    return [is_held(node) for node in nodes for _ in optree.tree_leaves(as_local(node))]


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
    def sizes(self) -> dict[str, int]:
        """The numbers of ranks, by what they count."""
        along = self.shard_size or self.num_ranks
        found = {
            "parts of the batch": self.num_parts,
            "ranks along the shard axis": along,
            "ranks along the replicate axis": self.num_ranks // along,
        }
        return sizes_of(self.num_ranks, found)

    @property
    def parts_by_rank(self) -> list[int]:
        """The number of the part of the batch that each rank is given."""
        ranks, size = range(self.num_ranks), self.shard_size
        if self.same_data is None:
            return [*ranks]
        if size is None:
            raise ValueError(f"same_data={self.same_data!r} needs a mesh. Remedy: shard_size=...")
        # Along "replicate" data are equal, so the place in the replica decides
        return [rank % size if self.same_data == "replicate" else rank // size for rank in ranks]

    def of(self, group: Group) -> Group:
        """The group that `shard` is given."""
        if self.shard_size is None:
            return group
        return HybridGroup(group, shard_size=self.shard_size, same_data=self.same_data)


def _run_sharded(
    step: ProgramStep,
    start: Start,
    batches: Sequence[list[Any]],
    mesh: Mesh,
    settings: Mapping[str, Any],
) -> list[Recording]:
    """Each rank's run, with the whole states gathered. `batches`: by step, each one's parts."""

    def run(group: Group) -> Recording:
        sharded = shard(step, group=mesh.of(group), **settings)
        # With layouts that cut small leaves, too
        sharded = type(sharded)(sharded.unsharded, replace(sharded.options, aligned=False))
        state = sharded.init(*start.args, seed=start.seed)
        part = mesh.parts_by_rank[group.rank]
        run = Recording(start.recorded(sharded.unshard(state)).params, part=part)
        for parts in batches:
            state, metrics = sharded(state, *start.arguments(parts[part]))
            # Gathered after every step, as the next one may use its storage up
            run.steps.append(start.recorded(sharded.unshard(state), metrics))
        return run

    try:
        # Threads: no port, and a failure comes with its rank's note
        return run_ranks(run, mesh.num_ranks)
    except Exception as error:
        at = f"level {settings['level']}, ranks {mesh.num_ranks}"
        error.add_note(f"While running the sharded step at {at}.")
        raise
