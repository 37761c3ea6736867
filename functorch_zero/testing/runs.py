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
from .equality import assert_equal_values, is_rounded, wide
from .recording import RecordedStep, Recording

# Last places of a leaf's largest gradient: about the difference that sums in another order make
JITTER = 16

IN_PARTS = (
    "While running {num_parts} copies of the unsharded program side by side, each on a part of the "
    "batch. If they don't go on alike, make of the batch only what fz.value_and_grad gives, a loss "
    "and Aux(metrics=...), which are means over the parts; branch and scale by these."
)


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

    def recorded(self, state: State, metrics: Metrics | None = None) -> RecordedStep:
        """A whole state and a step's metrics, by kind. Of a program the leaves of trees are the
        params, by path, those of buffers the buffers, and all others the optimizer's state."""
        value = state.value
        if self.of_trees is not None:
            params: dict[str, Tensor] = {}
            buffers: dict[str, Tensor] = {}
            others: dict[str, Any] = {}
            rows = zip(named_leaves(value).items(), self.of_trees, strict=True)
            for (path, leaf), of_tree in rows:
                kind = params if of_tree else buffers if is_within(path, self.buffers) else others
                kind[path] = leaf
            value = TrainValue(params, buffers, others)
        by_kind = {
            "opt_state": value.opt_state,
            "buffers": value.buffers,
            "metrics": metrics,
            "counters": (state.step, state.seed, value.finite),
            # Compared among ranks alone
            "kept": state.parts,
            "trained": state.trained,
        }
        return RecordedStep(value.params, by_kind, settings={}, draws=False)


def split(batch: Any, num_ranks: int) -> list[Any]:
    """Each rank's part of a batch: consecutive rows, as equal in number as possible."""
    rows = num_rows(batch)
    # Some rank would get no row
    if rows is not None and rows < num_ranks:
        raise ValueError(
            f"a batch of {rows} can't be split over {num_ranks} ranks. Remedy: pass larger batches"
        )
    return split_rows(batch, num_ranks)


def run_whole(step: ProgramStep, start: Start, batches: Sequence[Any]) -> Recording:
    """The unsharded step as it is, on whole batches."""
    weights: list[Any] = []  # of each gradient

    def weighed(grads: PyTree[Tensor], outcome: Outcome) -> tuple[PyTree[Tensor], Outcome]:
        weights.append(outcome.weight)
        return grads, outcome

    run = _run(step, start, batches, Part(0, weighed))
    run.weighted = all(weight is not None for weight in weights)
    return run


def run_in_parts(
    step: ProgramStep,
    start: Start,
    batches: Sequence[list[Any]],
    *,
    rule: str = "mean",
    jitter: int | None = None,
    sums: Sequence[bool] = (),
) -> list[Recording]:
    """The unsharded step with each batch in parts: as many copies of it as there are parts run side
    by side, each on its own. In each gradient that they take, all get the means over the parts, and
    the buffers by `shard`'s rule. The copies' runs, alike but for buffers that are each one's own.

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

    def run_copy(group: Group) -> Recording:
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
            return [run_copy(SingleRank())]
        # Threads, all of which end where one fails
        runs = run_ranks(run_copy, num_parts)
        what, local = "part 0's results and this part's", rule == "local"
        for k, copies in enumerate(zip(*(run.steps for run in runs), strict=True)):
            for part, other in enumerate(copies):
                assert_alike(copies[0], other, what, local=local, context={"step": k, "part": part})
    except Exception as error:
        error.add_note(IN_PARTS.format(num_parts=num_parts))
        raise
    return runs


def _run(step: ProgramStep, start: Start, batches: Sequence[Any], part: Part) -> Recording:
    """A run of the step in this thread, whose gradients go through the part's mean."""
    token = PART.set(part)
    try:
        state = step.init(*start.args, seed=start.seed)
        run = Recording(start.recorded(state).params)
        for batch in batches:
            state, metrics = step(state, *start.arguments(batch))
            run.steps.append(start.recorded(state, metrics))
        return run
    finally:
        PART.reset(token)


def assert_alike(
    first: RecordedStep, other: RecordedStep, what: str, *, local: bool, context: Any
) -> None:
    """Raise unless two ranks, or copies of a program, have the same results, to the bit: same data,
    same arithmetic. `local`: but for buffers, which are each one's own."""
    steps = [first, other]
    if local:
        steps = [step._replace(others=step.others | {"buffers": None}) for step in steps]
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
