"""`assert_sharded_equals_unsharded`: one step, unsharded and on ranks, compared after every
batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from typing import Any, NamedTuple

import optree
import torch
from optree import tree_map
from torch import Tensor

from ..groups import HybridGroup, run_ranks
from ..groups.mesh import SameData
from ..groups.protocol import Group
from ..layout.levels import LevelRule
from ..sharded.api import shard
from ..sharded.buffers import SyncBuffers
from ..step.loss import Metrics, Outcome, as_metric
from ..step.state import State
from ..step.train import TrainStep
from ..tree import PyTree, paths
from .equality import (
    Equality,
    Grade,
    ProvesNothing,
    apart,
    assert_equal_updates,
    assert_equal_values,
    is_visible,
)

JITTER = 16  # last places of a leaf's largest gradient, about what sums in another order differ by


HINT = (
    "If the loss of a batch is not the mean of its parts' losses (BatchNorm, dropout, a sum "
    "instead of a mean), compare with per_rank=True."
)
AMPLIFIED = (
    "Round-off makes a difference of this size in the unsharded step too: model or optimizer "
    "amplify round-off here (sums that cancel, a matrix without full rank, an eps that is too "
    "small). Remedy: other data, a larger eps, or allow_round_off=True."
)
ROUND_OFF = (
    10  # times what round-off does to the unsharded step may be between it and the sharded one
)
JITTERED_RUNS = 4


def assert_sharded_equals_unsharded(
    step: TrainStep,
    params: PyTree[Tensor],
    buffers: PyTree[Tensor] | None,
    batches: Sequence[Any],
    *,
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

    Compared are the params' updates (each trained leaf must move visibly in some step), the
    optimizer's state, the buffers and the metrics, and all ranks must agree bit by bit. Ranks are
    threads of this process.

    Args:
        step: an unsharded step, from `train_step`.
        params, buffers: as for `step.init`.
        batches: whole batches, one a step: trees of tensors. Each rank gets its part of every
            leaf's first dim; 0-d tensors and other things go to all ranks.
        levels, ranks: all combinations are run.
        grade: of equality, see `Equality`.
        per_rank: the oracle averages the ranks' gradients, each from that rank's part, instead of
            taking the whole
            batch: for losses that couple the samples of a batch (BatchNorm) or draw random numbers
            (dropout), and for unequal parts of a loss without a weight.
        unused: paths, or patterns of paths, of trained leaves that the loss does not use, whose
            update may be zero.
        allow_round_off: leaf by leaf, also allow ten times what round-off makes of the unsharded
            step: gradients changed in their last places. Some optimizers amplify round-off where a
            matrix has no full rank (Shampoo, SOAP, full-matrix Adagrad), and eigenvectors are
            defined up to sign only; a leaf that round-off changes altogether is hardly compared
            then.
        seed: for `init`.
        sync_buffers: as for `shard`.
        shard_size: of a mesh of two axes, how many ranks lie along the shard axis (HSDP). It
            divides all `ranks`.
        same_data: as for `HybridGroup`: batches are split over the ranks along the other axis.
        **options: for `shard`: `donate` and so on.

    Raises:
        AssertionError: naming the first leaf, step, level and ranks that differ, and by how much.
        ValueError: a batch can't be split so that the comparison would be fair.

    >>> from functorch_zero import optim
    >>> from functorch_zero import train_step
    >>> def loss_fn(params, buffers, x):
    ...     return ((params["w"] - x) ** 2).mean()
    >>> step = train_step(loss_fn, optim.adamw(0.1))
    >>> params = {"w": torch.zeros(5, dtype=torch.float64, requires_grad=True)}
    >>> assert_sharded_equals_unsharded(step, params, {}, [torch.arange(30.0).view(6, 5)] * 2)
    """
    equality = grade if isinstance(grade, Equality) else Equality(grade)
    start, rule = Start(params, buffers, seed), sync_buffers
    whole = None if per_rank else run_whole(step, start, batches)
    for num_ranks in ranks:
        mesh = Mesh(num_ranks, shard_size, same_data)
        parts = [split(batch, mesh.num_parts) for batch in batches]
        if whole is not None:
            _check_fair(whole, batches, mesh.num_parts)
        expected = whole or run_in_parts(step, start, parts, rule=rule)
        for level in levels:
            settings = {"level": level, "sync_buffers": rule, **options}
            got = _run_sharded(step, start, parts, mesh, settings)
            at = {"level": level, "ranks": num_ranks}
            local = [mesh.part_of(rank) for rank in range(num_ranks)] if rule == "local" else None
            comparison = Comparison(expected, got, equality, tuple(unused), local, at)
            try:
                comparison.run()
            except ProvesNothing:
                raise
            except AssertionError as error:
                jittered = []
                for k in range(JITTERED_RUNS):
                    others = parts if per_rank else [[batch] for batch in batches]
                    jittered.append(run_in_parts(step, start, others, rule=rule, jitter=k))
                explained = equality.grade != "bitwise" and comparison.holds(jittered)
                if not (explained and allow_round_off):
                    error.add_note(AMPLIFIED if explained else HINT)
                    raise


class Mesh(NamedTuple):
    """The ranks of a run, on one axis where there is no `shard_size`."""

    num_ranks: int
    shard_size: int | None
    same_data: SameData | None

    @property
    def num_parts(self) -> int:
        """The parts of a batch."""
        return 1 + max(self.part_of(rank) for rank in range(self.num_ranks))

    def part_of(self, rank: int) -> int:
        """The part of the batch that a rank is given."""
        if self.same_data is None:
            return rank
        if self.shard_size is None:
            raise ValueError(f"same_data={self.same_data!r} needs a mesh. Remedy: shard_size=...")
        replica, place = divmod(rank, self.shard_size)
        return place if self.same_data == "replicate" else replica

    def of(self, group: Group) -> Group:
        """The group that `shard` is given."""
        if self.shard_size is None:
            return group
        return HybridGroup(group, shard_size=self.shard_size, same_data=self.same_data)


def _run_sharded(
    step: TrainStep,
    start: Start,
    batches: Sequence[list[Any]],
    mesh: Mesh,
    settings: Mapping[str, Any],
) -> list[Run]:
    """Each rank's run, with the whole states gathered."""

    def run(group: Group) -> Run:
        sharded = shard(step, group=mesh.of(group), **settings)
        state = sharded.init(start.params, start.buffers, seed=start.seed)
        first, steps = sharded.unshard(state), []
        for parts in batches:
            state, metrics = sharded(state, parts[mesh.part_of(group.rank)])
            whole = sharded.unshard(state)
            steps.append(Step(whole, [whole.buffers], metrics))
        return Run(first, steps)

    try:
        return run_ranks(run, mesh.num_ranks)
    except Exception as error:
        at = f"level {settings['level']}, ranks {mesh.num_ranks}"
        error.add_note(f"While running the sharded step at {at}.")
        raise


def _check_fair(whole: Run, batches: Sequence[Any], num_ranks: int) -> None:
    """Refuse unequal parts of a loss without a weight: the mean of their means is not the mean of
    the whole."""
    for batch in batches:
        for path, leaf in zip(paths(batch), optree.tree_leaves(batch), strict=True):
            uneven = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] % num_ranks
            if uneven and not whole.weighted:
                raise ValueError(
                    f"a batch of {leaf.shape[0]} ({path or 'the batch'}) does not divide over "
                    f"{num_ranks} ranks, and the loss returns no weight, so each rank's mean "
                    "would count the same. Remedy: return Aux(weight=...), pass batches that "
                    "divide, or compare with per_rank=True"
                )


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
        """Raise at the first difference that is more than the grade allows, or round-off as in
        `jittered` runs."""
        moving = self._moving()
        for k, (want, *have) in enumerate(
            zip(self.expected.steps, *(run.steps for run in self.got), strict=True)
        ):
            at = {"step": k, **self.at}
            self._compare_updates(k, moving, jittered, at)
            for what in ("opt_state", "buffers", "metrics", "counters"):
                slack = _slack(*(_part(run.steps[k], what) for run in (self.expected, *jittered)))
                pair = _part(want, what), _part(have[0], what)
                assert_equal_values(
                    *pair,
                    grade=self.equality,
                    what=what,
                    dtypes=self._dtypes(),
                    slack=slack,
                    context=at,
                )
            self._compare_ranks(want, have, at)

    def holds(self, jittered: Sequence[Run]) -> bool:
        """Whether round-off explains all differences."""
        try:
            self.run(jittered)
        except AssertionError:
            return False
        return True

    def _dtypes(self) -> set[torch.dtype]:
        return {leaf.dtype for leaf in optree.tree_leaves(self.expected.start.params)}

    def _moving(self) -> list[str]:
        """The paths of the leaves that some step moves visibly: in another they may rest, as with
        Rprop and SOAP."""
        moved = set()
        for before, after in itertools.pairwise(state.params for state in self.expected.states):
            rows = zip(
                paths(before), optree.tree_leaves(before), optree.tree_leaves(after), strict=True
            )
            moved |= {escape(path) for path, a, b in rows if a.numel() and self._moves(a, b)}
        return sorted(moved)

    def _moves(self, a: Tensor, b: Tensor) -> bool:
        return is_visible(a, b) if self.equality.grade == "reordered" else not torch.equal(a, b)

    def _compare_updates(
        self, k: int, moving: list[str], jittered: Sequence[Run], at: dict[str, Any]
    ) -> None:
        before, after = self.expected.states[k : k + 2]
        got_before, got_after = self.got[0].states[k : k + 2]
        updates = [
            tree_map(torch.sub, run.states[k + 1].params, run.states[k].params) for run in jittered
        ]
        expected = tree_map(torch.sub, after.params, before.params)
        assert_equal_updates(
            before.params,
            after.params,
            got_after.params,
            grade=self.equality,
            old_got=got_before.params,
            trained=tree_map(lambda leaf: leaf.requires_grad, before.params),
            unused=self.unused,
            resting=moving,
            slack=_slack(expected, *updates),
            context=at,
        )

    def _compare_ranks(self, want: Step, have: Sequence[Step], at: dict[str, Any]) -> None:
        """All ranks against rank 0, bit by bit; buffers that are each rank's own against the
        oracle's."""
        first = have[0]
        for rank, other in list(enumerate(have))[1:]:
            here = {**at, "rank": rank}
            pair = [self._shared(step) for step in (first, other)]
            assert_equal_values(
                *pair, grade="bitwise", what="rank 0's results and this rank's", context=here
            )
            if self.local and len(want.buffers) > self.local[rank]:
                own = (want.buffers[self.local[rank]], other.buffers[0])
                assert_equal_values(*own, grade=self.equality, what="buffers", context=here)

    def _shared(self, step: Step) -> Any:
        """The results that all ranks must have alike."""
        state: State = step.state.replace(buffers=None) if self.local else step.state
        return {"state": state, "metrics": step.metrics}


def _part(step: Step, what: str) -> Any:
    parts: dict[str, Any] = {
        "opt_state": step.state.opt_state,
        "buffers": step.buffers[0],
        "metrics": step.metrics,
        "counters": (step.state.step, step.state.seed, step.state.finite),
    }
    return parts[what]


def _slack(expected: Any, *jittered: Any) -> list[float]:
    """For each leaf, what round-off may do to it."""
    leaves = [optree.tree_leaves(tree) for tree in (expected, *jittered)]
    return [
        ROUND_OFF * max((apart(first, other) for other in rest), default=0.0)
        for first, *rest in zip(*leaves, strict=True)
    ]


class Step(NamedTuple):
    """The results of one step."""

    state: State
    buffers: list[PyTree[Tensor]]  # by rank; one where all have the same
    metrics: Metrics


class Run(NamedTuple):
    """A run from the first state on."""

    start: State
    steps: list[Step]
    weighted: bool = True  # whether the loss says how much a batch counts

    @property
    def states(self) -> list[State]:
        """The first state, and the one after each step."""
        return [self.start, *(step.state for step in self.steps)]


class Start(NamedTuple):
    """The beginning of a run."""

    params: PyTree[Tensor]
    buffers: PyTree[Tensor] | None
    seed: int | None


def split(batch: Any, num_ranks: int) -> list[Any]:
    """Each rank's part of a batch: consecutive rows, as equal in number as possible."""
    leaves, treedef = optree.tree_flatten(batch)
    rows = {x.shape[0] for x in leaves if isinstance(x, Tensor) and x.dim()}
    if rows and min(rows) < num_ranks:
        raise ValueError(
            f"a batch of {min(rows)} can't be split over {num_ranks} ranks. Remedy: pass larger "
            "batches"
        )
    cut = [
        x.tensor_split(num_ranks) if isinstance(x, Tensor) and x.dim() else [x] * num_ranks
        for x in leaves
    ]
    return [treedef.unflatten([parts[rank] for parts in cut]) for rank in range(num_ranks)]


def run_whole(step: TrainStep, start: Start, batches: Sequence[Any]) -> Run:
    """The unsharded step as it is, on whole batches."""
    first = state = step.init(start.params, start.buffers, seed=start.seed)
    steps = []
    for batch in batches:
        state, metrics = step(state, batch)
        steps.append(Step(state, [state.buffers], metrics))
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
    held = [state.buffers] * (len(batches[0]) if batches else 1)
    g = None if jitter is None else torch.Generator().manual_seed(jitter)
    steps = []
    for parts in batches:
        results = []
        for rank, (own, part) in enumerate(zip(held, parts, strict=True)):
            results.append(step.loss_and_grads(state.replace(buffers=own), part, rank))
        outcomes = [outcome for _, outcome in results]
        shares = _shares(outcomes)
        grads = tree_map(lambda *gs, s=shares: _mean(gs, s), *(grads for grads, _ in results))
        held, before = (
            _combine_buffers(rule, [outcome.buffers for outcome in outcomes], shares),
            held,
        )
        metrics, old = _average_metrics(outcomes, shares), state
        grads = grads if g is None else _jittered(grads, g)
        state, measured = step.update_measured(old, grads, held[0], metrics["loss"])
        held = before if _skipped(old, state) else held
        steps.append(Step(state, held, metrics | measured))
    return Run(first, steps)


def _skipped(old: State, new: State) -> bool:
    return (
        old.finite is not None
        and new.finite is not None
        and bool(new.finite.skipped > old.finite.skipped)
    )


def _shares(outcomes: Sequence[Outcome]) -> list[float]:
    weights = [1.0 if outcome.weight is None else float(outcome.weight) for outcome in outcomes]
    return [weight / (sum(weights) or 1.0) for weight in weights]


def _mean(values: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    first, *rest = [value * share for value, share in zip(values, shares, strict=True)]
    for value in rest:
        first = first + value
    return first


def _average_metrics(outcomes: Sequence[Outcome], shares: Sequence[float]) -> Metrics:
    seen = [
        {"loss": as_metric(o.loss), **{k: as_metric(v) for k, v in o.metrics.items()}}
        for o in outcomes
    ]
    return {name: _mean([metrics[name] for metrics in seen], shares) for name in seen[0]}


def _combine_buffers(
    rule: str, held: list[PyTree[Tensor]], shares: Sequence[float]
) -> list[PyTree[Tensor]]:
    """The buffers that each rank holds after a step, from those that each rank's loss made. A batch
    of weight 0 isn't averaged."""

    def mean(*buffers: Tensor) -> Tensor:
        counting = [b for b, share in zip(buffers, shares, strict=True) if share] or [buffers[0]]
        if rule == "rank0":
            return buffers[0]
        if not counting[0].is_floating_point() or all(torch.equal(counting[0], b) for b in buffers):
            return counting[0]
        return torch.stack(counting).mean(0)

    return held if rule == "local" else [tree_map(mean, *held)] * len(held)


def _jittered(grads: PyTree[Tensor], g: torch.Generator) -> PyTree[Tensor]:
    leaves = optree.tree_leaves(grads)
    coarsest = max((torch.finfo(x.dtype).eps for x in leaves), default=0.0)

    def jitter(x: Tensor) -> Tensor:
        if not x.numel():
            return x
        noise = 2 * torch.rand(x.shape, generator=g, dtype=torch.float64) - 1
        return x + (JITTER * coarsest * x.abs().max() * noise.to(x.device)).to(x.dtype)

    return tree_map(jitter, grads)
