"""`Comparison`: the oracle's run and each rank's, compared step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import optree
import torch
from optree import tree_map
from torch import Tensor

from ..tree import paths
from .causes import Adam, Evidence, why
from .equality import (
    Equality,
    Unequal,
    apart,
    assert_equal_updates,
    assert_equal_values,
    check_moves,
    compare_within,
)
from .runs import Run, assert_alike

# The sharded step may be this many times as far off as round-off makes the unsharded one
ROUND_OFF = 10


# The oracle's runs that end with step k, of which each has one part alone
Shares: TypeAlias = Callable[[int], Sequence[Run]]


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

    def difference(self, jittered: Sequence[Run] = ()) -> AssertionError | None:
        """The first difference that the grade does not allow, nor round-off as in the `jittered`
        runs."""
        try:
            # Of the oracle's run alone: the other's may be wrong
            self._check_moves()
            for k, want in enumerate(self.expected.steps):
                at = {"step": k, **self.at}
                # Rank 0 against the oracle; the others against rank 0, to the bit
                self._compare_updates(k, self.got[0], jittered, at)
                self._compare_others(k, jittered, at, want.others())
                for rank in range(1, len(self.got)):
                    self._compare_rank(k, rank, {**at, "rank": rank})
            return None
        except AssertionError as error:
            return error

    def explained(self, error: Unequal, shares: Shares) -> AssertionError:
        """A difference with its cause, and as a note that of another comparison of its step, in
        which it may be plainer."""
        k, rank = error.context["step"], error.context.get("rank", 0)
        found = AssertionError(self._with_cause(k, error, shares))
        try:
            if rank:
                self._compare_updates(k, self.got[rank], (), error.context)
            else:
                self._compare_others(k, (), error.context, ["metrics"])
        except Unequal as other:
            if other.story != error.story:
                found.add_note(f"Besides, {self._with_cause(k, other, shares)}")
        return found

    def _with_cause(self, k: int, error: Unequal, shares: Shares) -> str:
        """An error of step k, with its cause by all that is known."""
        expected, got, kind = self.expected, self.got, error.what
        if kind not in ("updates", *expected.steps[k].others()):
            return error.story
        alike = got[:1] if self.local and kind == "buffers" else got
        ranks = [run.known(k, kind) for run in alike]
        # Leaves that differ on some rank, as they are on each one
        wrong = [
            compare_within(row.leaf, row.expected, values[row.leaf], row.allowed, rank)
            for rank, values in enumerate(ranks)
            for row in error.wrong
        ]
        evidence = Evidence.of_step(
            k,
            expected,
            got[0],
            kind,
            wrong=[row for row in wrong if row is not None],
            sizes=self.sizes,
            ranks=ranks,
            shares=lambda: [run.known(k, kind) for run in shares(k)],
            share_of=self.parts,
            adam=Adam(*self.decays, k + 1) if self.decays and kind == "updates" else None,
        )
        return f"{error.story} {why(evidence)}".rstrip()

    def _check_moves(self) -> None:
        """Refuse an oracle that would prove nothing. A leaf may rest in some steps, as with Rprop
        and SOAP; one that isn't trained may rest in all."""
        start, *later = (optree.tree_leaves(state.params) for state in self.expected.states)
        for path, *values in zip(paths(self.expected.start.params), start, *later, strict=True):
            if _has_moved(*values):
                excused = any(fnmatchcase(path, pattern) for pattern in self.unused)
                check_moves(path, values, self.equality, self.at, excused=excused)

    def _compare_updates(
        self, k: int, run: Run, jittered: Sequence[Run], at: Mapping[str, Any]
    ) -> None:
        """Step k's updates of the params."""
        before, after = self.expected.states[k : k + 2]
        got_before, got_after = run.states[k : k + 2]
        # A tree that is only read, such as an average, has round-off since it has first moved
        so_far = [state.params for state in self.expected.states[: k + 2]]
        moves = tree_map(_has_moved, *so_far)
        runs = (self.expected, *jittered) if jittered else ()  # there is no slack without
        updates = [[*run.known(k, "updates").values()] for run in runs]
        assert_equal_updates(
            before.params,
            after.params,
            got_after.params,
            grade=self.equality,
            old_got=got_before.params,
            trained=moves,
            unused=["*"],  # see _check_moves
            slack=_slack(*updates),
            context=at,
        )

    def _compare_others(
        self, k: int, jittered: Sequence[Run], at: Mapping[str, Any], names: Iterable[str]
    ) -> None:
        """Rank 0's other results of step k than its params, by their names."""
        # Counters and metrics come from computations in these dtypes
        dtypes = {leaf.dtype for leaf in optree.tree_leaves(self.expected.start.params)}
        want, have, *off = (
            other.steps[k].others() for other in (self.expected, self.got[0], *jittered)
        )
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


def _has_moved(first: Tensor, *later: Tensor) -> bool:
    """Whether a leaf is trained, or has another value than at first."""
    return first.requires_grad or any(not torch.equal(first, value) for value in later)


def _slack(*trees: Any) -> list[float]:
    """For each leaf, the difference that round-off may make: the trees are the oracle's, and then
    those of jittered runs."""
    return [
        ROUND_OFF * max((apart(leaf, other) for other in others), default=0.0)
        for leaf, *others in zip(*map(optree.tree_leaves, trees), strict=True)
    ]
