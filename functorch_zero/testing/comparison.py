"""`Comparison`: the oracle's run and each rank's, compared step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import optree
import torch
from optree import tree_map
from torch import Tensor

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
from .recording import Recording
from .runs import assert_alike

# The sharded step may be this many times as far off as round-off makes the unsharded one
ROUND_OFF = 10

# The kinds of results that ranks must have as the oracle, in the order in which they are compared
RESULTS = ("updates", "opt_state", "buffers", "metrics", "counters")

# The oracle's runs that end with step k, of which each has one part alone
Shares: TypeAlias = Callable[[int], Sequence[Recording]]


@dataclass(frozen=True)
class Comparison:
    """The oracle's run and each rank's, to be compared step by step."""

    oracle: Sequence[Recording]  # one, or where it takes batches in parts, each part's
    got: Sequence[Recording]  # by rank
    equality: Equality
    unused: tuple[str, ...]
    local: bool  # whether ranks keep buffers of their own
    at: dict[str, Any]  # for errors: level and ranks
    sizes: Mapping[str, int]  # for causes, as all below: numbers that a mistake may multiply by
    decays: tuple[float, float] | None  # Adam's b1 and b2

    @property
    def expected(self) -> Recording:
        """The oracle's results that all ranks must have."""
        return self.oracle[0]

    def difference(self, jittered: Sequence[Recording] = ()) -> AssertionError | None:
        """The first difference that the grade does not allow, nor round-off as in the `jittered`
        runs."""
        try:
            # Of the oracle's run alone: the other's may be wrong
            self._check_moves()
            for k in range(len(self.expected.steps)):
                at = {"step": k, **self.at}
                # Rank 0 against the oracle; the others against rank 0, to the bit
                for kind in RESULTS:
                    self._compare(k, kind, self.got[0], jittered, at)
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
            kind = "updates" if rank else "metrics"
            self._compare(k, kind, self.got[rank], (), error.context)
        except Unequal as other:
            if other.story != error.story:
                found.add_note(f"Besides, {self._with_cause(k, other, shares)}")
        return found

    def _with_cause(self, k: int, error: Unequal, shares: Shares) -> str:
        """An error of step k, with its cause by all that is known."""
        kind = error.what
        if kind not in RESULTS:
            return error.story
        alike = self.got[:1] if self.local and kind == "buffers" else self.got
        ranks = [run.known(k, kind) for run in alike]
        # Leaves that differ on some rank, as they are on each one
        wrong = [
            compare_within(row.leaf, row.expected, values[row.leaf], row.allowed, rank)
            for rank, values in enumerate(ranks)
            for row in error.wrong
        ]
        evidence = Evidence.of_step(
            k,
            kind,
            self.expected,
            self.got,
            wrong=[row for row in wrong if row is not None],
            sizes=self.sizes,
            ranks=ranks,
            shares=lambda: [run.known(k, kind) for run in shares(k)],
            adam=Adam(*self.decays, k + 1) if self.decays and kind == "updates" else None,
        )
        return f"{error.story} {why(evidence)}".rstrip()

    def _check_moves(self) -> None:
        """Refuse an oracle that would prove nothing. A leaf may rest in some steps, as with Rprop
        and SOAP; one that isn't trained may rest in all."""
        for path, values in self.expected.histories():
            if _has_moved(*values):
                excused = any(fnmatchcase(path, pattern) for pattern in self.unused)
                check_moves(path, values, self.equality, self.at, excused=excused)

    def _compare(
        self,
        k: int,
        kind: str,
        run: Recording,
        jittered: Sequence[Recording],
        at: Mapping[str, Any],
    ) -> None:
        """A rank's results of a kind in step k against the oracle's."""
        want = self.expected
        measured = (want, *jittered) if jittered else ()  # there is no slack without
        slack = _slack(*([*other.values(k, kind).values()] for other in measured))
        if kind == "updates":
            # A tree that is only read, such as an average, has round-off since it has first moved
            moves = tree_map(_has_moved, *map(want.params, range(-1, k + 1)))
            assert_equal_updates(
                want.params(k - 1),
                want.params(k),
                run.params(k),
                grade=self.equality,
                old_got=run.params(k - 1),
                trained=moves,
                unused=["*"],  # see _check_moves
                slack=slack,
                context=at,
            )
        else:
            assert_equal_values(
                want.at(k).others[kind],
                run.at(k).others[kind],
                grade=self.equality,
                what=kind,
                # Counters and metrics come from computations in these dtypes
                dtypes={leaf.dtype for leaf in optree.tree_leaves(want.start)},
                slack=slack,
                context=at,
            )

    def _compare_rank(self, k: int, rank: int, at: dict[str, Any]) -> None:
        """A rank against rank 0; buffers that are its own against the oracle's."""
        run = self.got[rank]
        what = "rank 0's results and this rank's"
        assert_alike(self.got[0].at(k), run.at(k), what, local=self.local, context=at)
        # The oracle has buffers of each part only where it takes the batch in parts; on a mesh
        # several ranks may have one part
        if self.local and run.part < len(self.oracle):
            expected, got = (one.at(k).others["buffers"] for one in (self.oracle[run.part], run))
            what = "the rank's own buffers"
            assert_equal_values(expected, got, grade=self.equality, what=what, context=at)


def _has_moved(first: Tensor, *later: Tensor) -> bool:
    """Whether a leaf is trained, or has another value than at first."""
    return first.requires_grad or any(not torch.equal(first, value) for value in later)


def _slack(*runs: list[Any]) -> list[float]:
    """For each leaf, the difference that round-off may make: the leaves are the oracle's, and then
    those of jittered runs."""
    return [
        ROUND_OFF * max(apart(leaf, other) for other in others)
        for leaf, *others in zip(*runs, strict=True)
    ]
