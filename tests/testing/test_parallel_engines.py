"""Loops in other engines, in processes: right ones pass, and wrong ones are found with their cause.
`tests/testing/engines.py` has both."""

from __future__ import annotations

import re
from typing import Any

import pytest

from functorch_zero.errors import GroupError
from functorch_zero.testing import assert_parallel_equals_reference
from tests.testing import engines
from tests.testing.engines import Engine, Momentum, OwnLibrary
from tests.tiers import FULL, tiers

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed")

Loop = Any


def check(reference: Loop, candidate: Loop, ranks: int = 2, **options: Any) -> None:
    options = {"start_method": "fork", "timeout": 60.0, **options}
    assert_parallel_equals_reference(reference, candidate, ranks, **options)


@pytest.mark.parametrize(
    ("reference", "candidate", "ranks", "options"),
    tiers(
        thorough=[
            (Engine(), engines.DataParallel(), 2, {"resume_at": 2}),
            (Engine(), engines.Sharded(), 2, {"grade": "reordered"}),
            (Engine(), engines.TensorParallel(), 2, {}),
            (OwnLibrary(3), OwnLibrary(3), 2, {}),
            (engines.Owners(), engines.ShardedOwners(), 2, {"resume_at": 2}),
        ],
        full=[
            (Momentum(), engines.ShardedMomentum(), 3, {"resume_at": 3}),
            (Engine(), engines.Accumulating(), 2, {}),
            (Engine(), engines.Accumulating(), 4, {}),
            (Engine(), engines.Zero1(), 3, {}),
            (Engine(), engines.Replicated(), 4, {}),
            (Engine(), engines.TwoAxes(), 4, {}),
            (OwnLibrary(1), OwnLibrary(1), 3, {}),
            (OwnLibrary(2), OwnLibrary(2), 4, {}),
            (Engine(), engines.DataParallel(), 2, {"start_method": "spawn"}),
        ],
        rows=True,
    ),
    ids=lambda value: type(value).__name__ if callable(value) else "",
)
def test_a_right_engine_passes(
    reference: Loop, candidate: Loop, ranks: int, options: dict[str, Any]
) -> None:
    check(reference, candidate, ranks, **options)


MICRO = {"sizes": {"micro-batches": 3}}


@pytest.mark.parametrize(
    ("candidate", "story", "options"),
    tiers(
        thorough=[
            (engines.NormOfItsPiece(), "the norm differs.*norms of the ranks' pieces", {}),
            (engines.LosesItsState(), "step is 1, and 3.*state is lost", {"resume_at": 2}),
        ],
        full=[
            (engines.NotDivided(), "3 times.*3 being the number of micro-batches", MICRO),
            (engines.Diverges(), r"on rank 1 only.*lr is 0\.02, and 0\.01", {}),
        ],
        rows=True,
    ),
    ids=lambda value: type(value).__name__ if isinstance(value, Engine) else "",
)
def test_a_wrong_engine_is_found_with_its_cause(
    candidate: Loop, story: str, options: dict[str, Any]
) -> None:
    with pytest.raises(AssertionError) as caught:
        check(Engine(), candidate, **options)
    assert re.search(story, str(caught.value), re.DOTALL), caught.value


@pytest.mark.thorough
def test_a_failing_rank_shows_its_traceback() -> None:
    with pytest.raises(KeyError, match="a mistake of rank 1") as caught:
        check(Engine(), engines.Fails())
    assert "Raised on rank 1" in "".join(caught.value.__notes__)


@pytest.mark.thorough
def test_ranks_that_hang_are_ended() -> None:
    with pytest.raises(TimeoutError, match=r"ranks 0, 1 of 2 still ran after 3 s"):
        check(Engine(), engines.Hangs(), timeout=3.0)


@FULL
def test_a_rank_that_dies_is_named() -> None:
    with pytest.raises(GroupError, match="rank 1 died without a word: exit code 3"):
        check(Engine(), engines.Dies())
