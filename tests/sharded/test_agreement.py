"""What ranks tell each other once a step: weighted means, flags, and whether they have done the
same."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from functorch_zero.errors import GroupError
from functorch_zero.groups import counted, run_ranks
from tests.means import average, average_with_flags
from tests.tiers import drawn

weights = st.lists(st.just(0.0) | st.floats(1e-6, 1e6), min_size=1, max_size=5)


@drawn(weights, st.integers(0, 40))
def test_means_are_weighted(given_weights: list[float], num_metrics: int) -> None:
    def run(group: Any) -> Any:
        metrics = {f"m{i}": torch.tensor(float(group.rank + i)) for i in range(num_metrics)}
        return average(metrics, given_weights[group.rank], group)

    total = math.fsum(given_weights)
    for report in run_ranks(run, len(given_weights)):
        assert float(report.weight) == pytest.approx(total)
        for i in range(num_metrics):
            expected = (
                math.fsum(w * (r + i) for r, w in enumerate(given_weights)) / total
                if total
                else 0.0
            )
            assert float(report.metrics[f"m{i}"]) == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_without_weights_each_rank_counts_the_same() -> None:
    for report in run_ranks(lambda group: average({"a": float(group.rank)}, None, group), 4):
        assert float(report.metrics["a"]) == 1.5 and float(report.weight) == 4


def test_dtypes() -> None:
    def run(group: Any) -> Any:
        half = torch.tensor(2.0, dtype=torch.bfloat16)
        return average(
            {"half": half, "count": torch.tensor(group.rank), "flag": True}, torch.tensor(3), group
        ).metrics

    for metrics in run_ranks(run, 2):
        assert metrics["half"].dtype == torch.bfloat16 and float(metrics["half"]) == 2
        assert metrics["count"].dtype == torch.float32 and float(metrics["count"]) == 0.5
        assert float(metrics["flag"]) == 1


def test_what_weighs_nothing_counts_for_nothing() -> None:
    """The mean of no tokens is NaN."""
    for report in run_ranks(
        lambda group: average({"a": (2.0, math.nan)[group.rank]}, 1 - group.rank, group), 2
    ):
        assert float(report.metrics["a"]) == 2
    for report in run_ranks(lambda group: average({"a": math.nan}, 1, group), 2):
        assert math.isnan(report.metrics["a"])


@drawn(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=4))
def test_flags_are_anyones(flags: list[list[bool]]) -> None:
    for _, raised in run_ranks(
        lambda group: average_with_flags({}, 0.0, group, (), flags[group.rank]), len(flags)
    ):
        assert raised == [any(column) for column in zip(*flags, strict=True)]


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_other_collectives_or_metrics_are_noticed_on_every_rank(ranks: int) -> None:
    def logs(group: Any) -> Any:
        log = ["gather a", "gather b"]
        return average({"a": 1.0}, None, group, log[::-1] if group.rank == 1 else log)

    def names(group: Any) -> Any:
        return average({"b" if group.rank == 1 else "a": 1.0}, None, group)

    for differ in (logs, names):

        def run(group: Any, differ: Any = differ) -> None:
            with pytest.raises(GroupError, match=r"same collectives.*Remedy"):
                differ(group)

        run_ranks(run, ranks)


def test_two_collectives() -> None:
    """Of values, and of words."""

    def run(group: Any) -> Any:
        watched = counted(group)
        average({f"m{i}": 1.0 for i in range(10)}, 1.0, watched, [], [True])
        return [(call.kind, call.dtype, call.num_elements) for call in watched.calls]

    expected = [("all_reduce", torch.float64, 32), ("all_reduce", torch.int64, 32)]
    assert run_ranks(run, 2) == [expected] * 2
