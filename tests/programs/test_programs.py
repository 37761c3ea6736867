"""Programs in one process and on ranks, compared with loops in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optree import tree_map

import functorch_zero as fz
from functorch_zero.groups import run_ranks
from functorch_zero.testing.equality import assert_equal_values
from tests.programs.cases import CASES, OF_ONE_THREAD, Case

LEVELS = [0, 1, 2, 3]
Result = tuple[dict[str, Any], list[Any]]  # the trees of the last value by name, all metrics


def run(case: Case, step: Any, part: Any = None) -> Result:
    """All steps, from `init` on; `part` gives this rank's part of a batch."""
    state = step.init(*case.trees())
    metrics = []
    for batch in case.batches():
        state, found = step(state, batch if part is None else tree_map(part, batch))
        metrics.append(found)
    whole = step.unshard(state) if part else state
    return whole.value._asdict(), metrics


def on_rank(group: Any, case: Case, level: Any) -> Result:
    step = fz.shard(case.step, level=level, group=group)
    return run(case, step, lambda x: x.chunk(group.size)[group.rank])


def check(case: Case, result: Result) -> None:
    """A run's updates and metrics are those of plain torch."""
    values, metrics = result
    expected = case.run_plain()
    for name, module in expected.modules.items():
        # A tree that `init` has made begins as the first one given
        first = case.modules.get(name, next(iter(case.modules.values())))
        moved = updates(first, dict(module.named_parameters()))
        for path, leaf in moved.items():
            assert torch.count_nonzero(leaf), f"{name}.{path} does not move"
        assert_equal_values(moved, updates(first, values[name]), dtypes=case.dtypes)
    assert_equal_values(expected.metrics, metrics, dtypes=case.dtypes)


def updates(first: torch.nn.Module, after: Any) -> dict[str, torch.Tensor]:
    """The differences of leaves after training from those of a module, by path."""
    return {path: (after[path] - leaf).detach() for path, leaf in first.named_parameters()}


@pytest.mark.parametrize("name", [*CASES, *OF_ONE_THREAD])
def test_one_process(name: str) -> None:
    case = (CASES | OF_ONE_THREAD)[name]()
    check(case, run(case, case.step))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("level", LEVELS)
def test_ranks(name: str, level: int) -> None:
    case = CASES[name]()
    for result in run_ranks(lambda group: on_rank(group, case, level), 2):
        check(case, result)
