"""`Comparison`: the oracle's run and each rank's, compared step by step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from glob import escape
from typing import Any

import optree
import torch
from optree import tree_map
from torch import Tensor

from ..tree import named_leaves, paths
from .causes import Adam, Evidence, Wrong, why
from .equality import (
    Equality,
    Unequal,
    apart,
    assert_equal_updates,
    assert_equal_values,
    compare_within,
    is_visible,
    wide_values,
)
from .runs import Run, assert_alike

# The sharded step may be this many times as far off as round-off makes the unsharded one
ROUND_OFF = 10


@dataclass(frozen=True)
class Comparison:
    """The oracle's run and each rank's, to be compared step by step."""

    expected: Run
    got: Sequence[Run]
    equality: Equality
    unused: tuple[str, ...]
    parts: list[int]  # each rank's part of the batch
    local: bool  # whether ranks keep buffers of their own
    at: dict[str, Any]  # for errors: level and ranks
    sizes: Mapping[str, int]  # for causes, as all below: numbers that a mistake may multiply by
    decays: tuple[float, float] | None  # Adam's b1 and b2
    # The oracle's runs that end with step k, of which each has one part alone. None: a difference
    # is raised without its cause
    shares: Callable[[int], Sequence[Run]] | None = None

    def difference(self, jittered: Sequence[Run] = ()) -> AssertionError | None:
        """The first difference that the grade does not allow, nor round-off as in the `jittered`
        runs."""
        try:
            self._run(jittered)
        except AssertionError as error:
            return error
        return None

    def _run(self, jittered: Sequence[Run]) -> None:
        # By the oracle's run alone: the other's may be wrong
        moving = self._moving()
        first, *others = self.got
        for k, want in enumerate(self.expected.steps):
            at = {"step": k, **self.at}
            # Rank 0 against the oracle; the others against rank 0, to the bit
            with self._explained(k, partial(self._compare_others, k, first, (), at, ["metrics"])):
                self._compare_updates(k, first, moving, jittered, at)
                self._compare_others(k, first, jittered, at, want.others())
            for rank, run in enumerate(others, start=1):
                here = {**at, "rank": rank}
                with self._explained(k, partial(self._compare_updates, k, run, moving, (), here)):
                    self._compare_rank(k, rank, here)

    @contextmanager
    def _explained(self, k: int, besides: Callable[[], None]) -> Iterator[None]:
        """Around a comparison in step k: where causes are looked for, its error tells one, and as a
        note that of another comparison, in which it may be plainer."""
        try:
            yield
        except Unequal as error:
            if self.shares is None:
                raise
            told = AssertionError(self._with_cause(k, error))
            try:
                besides()
            except Unequal as other:
                if other.story != error.story:
                    told.add_note(f"Besides, {self._with_cause(k, other)}")
            raise told from None

    def _with_cause(self, k: int, error: Unequal) -> str:
        """An error of step k, with its cause by all that is known."""
        runs, expected, got, kind = self.shares, self.expected, self.got, error.what
        if runs is None or kind not in ("updates", *expected.steps[k].others()):
            return error.story
        is_last = k + 1 == len(expected.steps)
        alike = got[:1] if self.local and kind == "buffers" else got
        ranks = [run.values(k, kind) for run in alike]
        wrong: list[Wrong] = []
        for rank, values in enumerate(ranks):
            wrong += _on(rank, values, error.wrong)
        evidence = Evidence(
            kind,
            wrong,
            self.sizes,
            ranks=ranks,
            earlier=expected.values(k - 1, kind) if k else {},
            later={} if is_last else got[0].values(k + 1, kind),
            shares=lambda: [run.values(k, kind) for run in runs(k)],
            share_of=self.parts,
            params=wide_values(named_leaves(expected.states[k].params)),
            adam=Adam(*self.decays, k + 1) if self.decays and kind == "updates" else None,
        )
        return f"{error.story} {why(evidence)}".rstrip()

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
        self, k: int, run: Run, moving: list[str], jittered: Sequence[Run], at: dict[str, Any]
    ) -> None:
        """Step k's updates of the params; leaves that don't move in any step are refused."""
        before, after = self.expected.states[k : k + 2]
        got_before, got_after = run.states[k : k + 2]
        # A tree that is only read, such as an average, has round-off since it has first moved
        so_far = [state.params for state in self.expected.states[: k + 2]]
        moves = tree_map(_has_moved, *so_far)
        # The oracle's, then the jittered runs' of the same step
        runs = self.expected, *jittered
        updates = [[*other.values(k, "updates").values()] for other in runs]
        assert_equal_updates(
            before.params,
            after.params,
            got_after.params,
            grade=self.equality,
            old_got=got_before.params,
            trained=moves,
            unused=self.unused,
            resting=moving,
            slack=_slack(*updates),  # zero without jittered runs
            context=at,
        )

    def _compare_others(
        self, k: int, run: Run, jittered: Sequence[Run], at: dict[str, Any], names: Iterable[str]
    ) -> None:
        """Other results of step k than its params, by their names."""
        # Counters and metrics come from computations in these dtypes
        dtypes = {leaf.dtype for leaf in optree.tree_leaves(self.expected.start.params)}
        want, have, *off = (other.steps[k].others() for other in (self.expected, run, *jittered))
        for name in names:
            assert_equal_values(
                want[name],
                have[name],
                grade=self.equality,
                what=name,
                dtypes=dtypes,
                slack=_slack(want[name], *(others[name] for others in off)),
                context=at,
            )

    def _compare_rank(self, k: int, rank: int, at: dict[str, Any]) -> None:
        """A rank against rank 0; buffers that are its own against the oracle's."""
        want, first, other = (run.steps[k] for run in (self.expected, self.got[0], self.got[rank]))
        what = "rank 0's results and this rank's"
        assert_alike(first, other, what, local=self.local, context=at)
        # The oracle has buffers of each part only where it takes the batch in parts; on a mesh
        # several ranks may have one part
        if self.local and len(want.buffers) > self.parts[rank]:
            expected, got = want.buffers[self.parts[rank]], other.buffers[0]
            what = "the rank's own buffers"
            assert_equal_values(expected, got, grade=self.equality, what=what, context=at)


def _on(rank: int, values: Mapping[str, Tensor], wrong: Sequence[Wrong]) -> list[Wrong]:
    """Leaves that differ on some rank, as they are on this one, if they differ there."""
    found = [
        compare_within(row.leaf, row.expected, values[row.leaf], row.allowed, rank) for row in wrong
    ]
    return [row for row in found if row is not None]


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
