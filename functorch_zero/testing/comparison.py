"""`Comparison`: the oracle's run and each rank's, compared step by step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from glob import escape
from typing import Any

import optree
import torch
from optree import tree_map
from torch import Tensor

from ..step.state import State
from ..tree import PyTree, paths
from .equality import (
    RATIO,
    Equality,
    apart,
    are_scaled,
    assert_equal_updates,
    assert_equal_values,
    is_visible,
)
from .runs import Run, Step

# The sharded step may be this many times as far off as round-off makes the unsharded one
ROUND_OFF = 10

AS_SUM = (
    "{what} 1/{n} of the unsharded step's, on {n} parts of the batch: the loss is a sum over its "
    "batch, and sharded it is the mean over ranks of their sums. Remedy: make it a mean over its "
    "rows; where they count unequally, divide by their number or weight, and return that as "
    "fz.Aux(weight=...)."
)
DIVIDED_TWICE = (
    "{what} {n} times the unsharded step's, on {n} parts of the batch: the loss is smaller than a "
    "mean over its batch, as a mean that is divided by the number of rows again. Remedy: make it a "
    "mean over its rows; where they count unequally, divide by their number or weight once, and "
    "return that as fz.Aux(weight=...)."
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
    names_its_loss: bool = False  # whether the metric "loss" is the one whose gradients are taken

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

    def cause_by_size(self, num_parts: int) -> str | None:
        """The cause of a difference, where the first updates, or the first loss of a training
        step, are as many times the oracle's as there are parts of the batch, or that part of it.
        None: they aren't."""
        want, have = self.expected, self.got[0]
        if num_parts == 1 or not want.steps or not _alike(want.start.params, have.start.params):
            return None
        # The params of three states
        before, after, other = want.start.params, want.states[1].params, have.states[1].params
        for factor, text in ((1 / num_parts, AS_SUM), (float(num_parts), DIVIDED_TWICE)):
            if are_scaled(factor, before, after, other):
                return text.format(what="All updates are", n=num_parts)
            # Optimizers that go by signs, or normalize, move the same
            losses = [run.steps[0].metrics.get("loss") for run in (want, have)]
            if self.names_its_loss and _is_times(factor, *losses):
                return text.format(what="The loss is", n=num_parts)
        return None

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
        # A tree that is only read, such as an average, has round-off since it has first moved
        so_far = [state.params for state in self.expected.states[: k + 2]]
        moves = tree_map(_has_moved, *so_far)
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


def _alike(a: PyTree[Tensor], b: PyTree[Tensor]) -> bool:
    return all(map(torch.equal, optree.tree_leaves(a), optree.tree_leaves(b)))


def _is_times(factor: float, expected: Any, got: Any) -> bool:
    """Whether one loss is this many times the other; of numbers that are too small nothing is
    known."""
    wanted = factor * float(expected)
    return wanted != 0 and abs(float(got) - wanted) <= RATIO * abs(wanted)


def is_trained(leaf: Tensor) -> bool:
    return leaf.requires_grad


def _has_moved(first: Tensor, *later: Tensor) -> bool:
    """Whether a leaf is trained, or has another value than at first."""
    return is_trained(first) or any(not torch.equal(first, value) for value in later)


def _slack(expected: Any, *jittered: Any) -> list[float]:
    """For each leaf, the difference that round-off may make."""
    others = [optree.tree_leaves(tree) for tree in jittered]
    slack = []
    for n, leaf in enumerate(optree.tree_leaves(expected)):
        # Over all jittered runs
        largest = max((apart(leaf, other[n]) for other in others), default=0.0)
        slack.append(ROUND_OFF * largest)
    return slack
