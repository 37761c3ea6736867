"""Runs of the unsharded step, on whole batches or on their parts. Sharded ones are compared with
them, so nothing of the sharded step is used here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import optree
import torch
from optree import tree_map
from torch import Tensor

from ..groups import SingleRank, run_ranks
from ..groups.protocol import Group
from ..step.loss import Metrics, Outcome, as_metric
from ..step.program import PART, Part
from ..step.program_step import ProgramStep
from ..step.rows import num_rows, split_rows
from ..step.state import State, TrainValue
from ..tree import PyTree, is_within, named_leaves
from .equality import apart, assert_equal_values, differences, is_rounded, wide, wide_values

# Last places of a leaf's largest gradient: about the difference that sums in another order make
JITTER = 16

IN_PARTS = (
    "While running {num_parts} copies of the unsharded program side by side, each on a part of the "
    "batch. If they don't go on alike, make of the batch only what fz.value_and_grad gives, a loss "
    "and Aux(metrics=...), which are means over the parts; branch and scale by these."
)


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
            "counters": (state.step, state.seed, state.value.finite),
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

    def repeats(self, other: Run) -> bool:
        """Whether all results are those of another run, to the bit."""
        ours, theirs = (optree.tree_leaves(run.steps) for run in (self, other))
        return all(apart(a, b) == 0 for a, b in zip(ours, theirs, strict=True))

    def known(self, k: int, kind: str) -> dict[str, Tensor]:
        """The tensors of a kind in step k, by path, float64 or complex128; of "params" those before
        it. Empty where there are none."""
        if not 0 <= k < len(self.steps):
            return {}
        before, after = (named_leaves(state.params) for state in self.states[k : k + 2])
        if kind == "updates":
            return differences(after, before)
        kinds = {"params": before, **self.steps[k].others()}
        return wide_values(named_leaves(kinds.get(kind)))


class Start(NamedTuple):
    """The beginning of a run: the arguments of `step.init`.

    Attributes:
        args: whole trees, and whatever else init takes.
        of_trees: per leaf of a program's value, whether it is one of a tree. None: the value is a
            training step's, which says so itself.
        buffers: names of trees of buffers in a program's value.
    """

    args: tuple[Any, ...]
    seed: int | None
    of_trees: list[bool] | None = None
    buffers: tuple[str, ...] = ()

    def arguments(self, batch: Any) -> tuple[Any, ...]:
        """Those of the step, after the state."""
        return batch if type(batch) is tuple and self.of_trees is not None else (batch,)

    def arranged(self, state: State) -> State:
        """A whole state as a training step's: the leaves of trees are its params, by path, those of
        buffers its buffers, and all others its optimizer's state."""
        if self.of_trees is None:
            return state
        params: dict[str, Tensor] = {}
        buffers: dict[str, Tensor] = {}
        others: dict[str, Any] = {}
        rows = zip(named_leaves(state.value).items(), self.of_trees, strict=True)
        for (path, leaf), of_tree in rows:
            kind = params if of_tree else buffers if is_within(path, self.buffers) else others
            kind[path] = leaf
        return state.replace(value=TrainValue(params, buffers, others), trained=None)


def split(batch: Any, num_ranks: int) -> list[Any]:
    """Each rank's part of a batch: consecutive rows, as equal in number as possible."""
    rows = num_rows(batch)
    # Some rank would get no row
    if rows is not None and rows < num_ranks:
        raise ValueError(
            f"a batch of {rows} can't be split over {num_ranks} ranks. Remedy: pass larger batches"
        )
    return split_rows(batch, num_ranks)


def run_whole(step: ProgramStep, start: Start, batches: Sequence[Any]) -> Run:
    """The unsharded step as it is, on whole batches."""
    weights: list[Any] = []  # of each gradient

    def weighed(grads: PyTree[Tensor], outcome: Outcome) -> tuple[PyTree[Tensor], Outcome]:
        weights.append(outcome.weight)
        return grads, outcome

    run = _run(step, start, batches, Part(0, weighed))
    return run._replace(weighted=all(weight is not None for weight in weights))


def run_in_parts(
    step: ProgramStep,
    start: Start,
    batches: Sequence[list[Any]],
    *,
    rule: str = "mean",
    jitter: int | None = None,
    sums: Sequence[bool] = (),
) -> Run:
    """The unsharded step with each batch in parts: as many copies of it as there are parts run side
    by side, each on its own. In each gradient that they take, all get the means over the parts, and
    the buffers by `shard`'s rule.

    Args:
        jitter: seeds changes of the gradients in their last places.
        sums: per leaf, or one for all, whether ranks add up its gradients whole, over uses and
            micro-batches, and a `Precision` rounds their sum. Empty: each use's are rounded.

    Raises:
        AssertionError: the copies' results differ.
        GroupError: the copies take other gradients.
    """
    num_parts = len(batches[0]) if batches else 1
    # By part: gradients and outcome of the loss that the copies are at
    given: list[Any] = [None] * num_parts

    def run_copy(group: Group) -> Run:
        own = group.rank
        # Apart from the global generator, from which the loss may draw; the same in all copies
        generator = None if jitter is None else torch.Generator().manual_seed(jitter)

        def mean(grads: PyTree[Tensor], outcome: Outcome) -> tuple[PyTree[Tensor], Outcome]:
            given[own] = grads, outcome
            group.barrier()  # until those of all parts are there
            # Each copy its own, which it may keep
            gradients, outcomes = zip(*given, strict=True)
            found, outcome = _mean_over_parts(gradients, outcomes, rule, own)
            # Until nobody needs them any more: a fast copy's next ones take their place
            group.barrier()
            if generator is not None:
                found = _jittered(found, generator)
            return found, outcome

        parts = [of_batch[own] for of_batch in batches]
        return _run(step, start, parts, Part(own, mean, tuple(sums)))

    try:
        if num_parts == 1:
            return run_copy(SingleRank())
        # Threads, all of which end where one fails
        runs = run_ranks(run_copy, num_parts)
        what, local, steps = "part 0's results and this part's", rule == "local", []
        for k, copies in enumerate(zip(*(run.steps for run in runs), strict=True)):
            for part, other in enumerate(copies):
                assert_alike(copies[0], other, what, local=local, context={"step": k, "part": part})
            # Each rank's buffers, which are its own by the rule "local"
            steps.append(copies[0]._replace(buffers=[copy.buffers[0] for copy in copies]))
    except Exception as error:
        error.add_note(IN_PARTS.format(num_parts=num_parts))
        raise
    return runs[0]._replace(steps=steps)


def _run(step: ProgramStep, start: Start, batches: Sequence[Any], part: Part) -> Run:
    """A run of the step in this thread, whose gradients go through the part's mean."""
    token = PART.set(part)
    try:
        state = step.init(*start.args, seed=start.seed)
        first, steps = start.arranged(state), []
        for batch in batches:
            state, metrics = step(state, *start.arguments(batch))
            whole = start.arranged(state)
            steps.append(Step(whole, [whole.buffers], metrics))
        return Run(first, steps)
    finally:
        PART.reset(token)


def assert_alike(first: Step, other: Step, what: str, *, local: bool, context: Any) -> None:
    """Raise unless two ranks, or copies of a program, have the same results, to the bit: same data,
    same arithmetic. `local`: but for buffers, which are each one's own."""
    steps = [step._replace(buffers=[]) for step in (first, other)]
    if local:
        steps = [step._replace(state=step.state.replace(buffers=None)) for step in steps]
    assert_equal_values(*steps, grade="bitwise", what=what, context=context)


def _mean_over_parts(
    gradients: Sequence[PyTree[Tensor]], outcomes: Sequence[Outcome], rule: str, part: int
) -> tuple[PyTree[Tensor], Outcome]:
    """The mean gradients, and the outcome as that of the loss on a whole batch, with the buffers
    that this part's rank holds afterwards. As ranks do: shares first, then the weighted sums in
    rank order."""
    shares = _shares(outcomes)

    def mean(*values: Tensor) -> Tensor:
        # Left to right: another order would give other bits
        total, *rest = [value * share for value, share in zip(values, shares, strict=True)]
        return sum(rest, start=total)

    measured = [(outcome.loss, dict(outcome.metrics)) for outcome in outcomes]
    loss, metrics = tree_map(mean, *tree_map(as_metric, measured))
    buffers = _combine_buffers(rule, [outcome.buffers for outcome in outcomes], shares)
    return tree_map(mean, *gradients), Outcome(loss, buffers[part], metrics, weight=None)


def _shares(outcomes: Sequence[Outcome]) -> list[float]:
    """Each part's share of the mean, by its loss's weight."""
    weights = [1.0 if outcome.weight is None else float(outcome.weight) for outcome in outcomes]
    total = sum(weights) or 1.0  # all of weight 0: every share is 0, not NaN
    return [weight / total for weight in weights]


def _combine_buffers(
    rule: str, trees: list[PyTree[Tensor]], shares: Sequence[float]
) -> list[PyTree[Tensor]]:
    """The buffers that each rank holds after a step, from those that each rank's loss made. A batch
    of weight 0 isn't averaged.

    Written out over whole buffers, and of nothing that the sharded step uses: else a mistake in its
    rule would be one here, too.
    """
    if rule == "local":
        return trees
    if rule == "rank0":
        return [trees[0]] * len(trees)
    counted = [tree for tree, share in zip(trees, shares, strict=True) if share]
    return [tree_map(_mean_buffer, *(counted or trees[:1]))] * len(trees)


def _mean_buffer(*buffers: Tensor) -> Tensor:
    """The mean over ranks of one buffer; of integers and bools, the first rank's."""
    first = buffers[0]
    # The mean of equal numbers could be rounded to another one
    if not is_rounded(first) or all(torch.equal(first, other) for other in buffers):
        return first
    total, *rest = map(wide, buffers)
    return (sum(rest, start=total) / len(buffers)).to(first.dtype)


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
