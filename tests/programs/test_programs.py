"""Programs in one process, compared with loops in plain torch, and on ranks."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from optree import tree_map

import functorch_zero as fz
from functorch_zero.groups import HybridGroup, ProcessGroup, launch, run_ranks
from functorch_zero.testing import assert_equal_values, assert_sharded_equals_unsharded
from tests.programs.case import Case
from tests.programs.cases import BY_RANK, BY_VALUES, CASES, OF_ONE_THREAD
from tests.tiers import THOROUGH, crossed, thinned, tiers

LEVELS = [0, 1, 2, 3]
LIKE_ONE_PROCESS = CASES | BY_VALUES  # on any number of ranks
ALL = LIKE_ONE_PROCESS | BY_RANK | OF_ONE_THREAD
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


def check(case: Case, result: Result, ranks: int) -> None:
    """A run's updates, buffers and metrics are those of plain torch."""
    values, metrics = result
    expected = case.run_plain(ranks)
    for name, module in expected.modules.items():
        # A tree that `init` has made begins as the first one given
        first = case.modules.get(name, next(iter(case.modules.values())))
        moved = updates(first, dict(module.named_parameters()))
        for path, leaf in moved.items():
            assert torch.count_nonzero(leaf), f"{name}.{path} does not move"
        assert_equal_values(moved, updates(first, values[name]), dtypes=case.dtypes)
        buffers = dict(module.named_buffers())
        if buffers:
            assert_equal_values(buffers, values["buffers"][name])
    assert_equal_values(expected.metrics, metrics, dtypes=case.dtypes)


def updates(first: torch.nn.Module, after: Any) -> dict[str, torch.Tensor]:
    """The differences of leaves after training from those of a module, by path."""
    return {path: (after[path] - leaf).detach() for path, leaf in first.named_parameters()}


@pytest.mark.parametrize("name", thinned(ALL, 9))
def test_one_process(name: str) -> None:
    case = ALL[name]()
    check(case, run(case, case.step), ranks=1)


def check_ranks(name: str, level: Any, ranks: int) -> None:
    case = LIKE_ONE_PROCESS[name]()
    assert_sharded_equals_unsharded(
        case.step, *case.trees(), case.batches(), levels=[level], ranks=[ranks]
    )


@pytest.mark.parametrize(("name", "level"), crossed([*BY_VALUES, *CASES], LEVELS, quick=2))
def test_ranks(name: str, level: int) -> None:
    check_ranks(name, level, ranks=2)


# Each program at each level, and each with each number, in turn
NUMBERS = (1, 3, 5)
AT_NUMBERS = [*product(LIKE_ONE_PROCESS, LEVELS, NUMBERS)]
IN_TURN = [
    (name, level, NUMBERS[(i + level) % len(NUMBERS)])
    for i, name in enumerate(LIKE_ONE_PROCESS)
    for level in LEVELS
]


@pytest.mark.parametrize(
    ("name", "level", "ranks"),
    tiers(thorough=IN_TURN, full=[row for row in AT_NUMBERS if row not in IN_TURN], rows=True),
)
def test_numbers_of_ranks(name: str, level: int, ranks: int) -> None:
    check_ranks(name, level, ranks)


# A teacher that is an average has the student's level, a frozen one its own
LEVELS_BY_TREE = [
    ("byol", {"student": 1, "frozen": 3}),
    ("byol", {"student": 3, "frozen": 0}),
    ("gan", {"gen": 3, "disc": 1}),
    ("gan", {"": 2, "gen.0": 3}),
    ("ppo", {"actor": 2, "critic": 3}),
]


@pytest.mark.parametrize("ranks", tiers([2], [3, 5], [1]))
@pytest.mark.parametrize(
    ("name", "level"), tiers(LEVELS_BY_TREE[:1], LEVELS_BY_TREE[1:], rows=True)
)
def test_levels_by_tree(name: str, level: Any, ranks: int) -> None:
    check_ranks(name, level, ranks)


@pytest.mark.parametrize(
    ("name", "level", "ranks"),
    crossed(BY_RANK, [*LEVELS, {"gen": 3, "disc": 1}], [1, 2, 3, 5], n=5, quick=1),
)
def test_by_rank(name: str, level: Any, ranks: int) -> None:
    case = BY_RANK[name]()
    for result in run_ranks(lambda group: on_rank(group, case, level), ranks):
        check(case, result, ranks)


@THOROUGH
@pytest.mark.parametrize("name", BY_RANK)
def test_by_rank_beside_the_unsharded_program(name: str) -> None:
    case = BY_RANK[name]()
    assert_sharded_equals_unsharded(
        case.step, *case.trees(), case.batches(), levels=[3], ranks=[3], per_rank=True
    )


@pytest.mark.parametrize(("name", "level"), crossed([*OF_ONE_THREAD], LEVELS, n=4))
def test_one_thread(name: str, level: int) -> None:
    case = OF_ONE_THREAD[name]()
    (result,) = run_ranks(lambda group: on_rank(group, case, level), 1)
    check(case, result, ranks=1)


# Outside of a step, `fz.random` needs a seed, and what `tree_map` makes is read only
LOOPS = [name for name in CASES if name not in ("adahessian", "reptile")]
BY_LEAF = {"": 3, "2.weight": 1}


def loop_on_rank(group: Any, case: Case, level: Any) -> Result:
    """The program as a loop without a step, over trees of `fz.shard_tree`."""
    trees = [fz.shard_tree(tree, level=level, group=group) for tree in case.trees()]
    metrics = []
    with torch.no_grad():
        value = case.step.first_value(*trees)
        for batch in case.batches():
            own = tree_map(lambda x: x.chunk(group.size)[group.rank], batch)
            value, found = case.step.program(value, own)
            metrics.append(found)
        return {name: fz.unshard(tree) for name, tree in value._asdict().items()}, metrics


@pytest.mark.parametrize(
    ("name", "level"),
    [*crossed(LOOPS, [0, 2, 3], quick=1), *tiers(thorough=product(LOOPS, [1, BY_LEAF]), rows=True)],
)
def test_loops_without_a_step(name: str, level: Any) -> None:
    case = CASES[name]()
    for result in run_ranks(lambda group: loop_on_rank(group, case, level), 2):
        check(case, result, ranks=2)


@pytest.mark.parametrize("level", tiers([3], [1, 0], [2]))
def test_loops_over_a_mesh(level: int) -> None:
    case = CASES["gan"]()

    def run(group: Any) -> Result:
        return loop_on_rank(HybridGroup(group, shard_size=2), case, level)

    for result in run_ranks(run, 4):
        check(case, result, ranks=4)


OVER_GLOO = [(3, 2), (1, 3)]
ALSO_OVER_GLOO = [at for at in product(LEVELS, [1, 2, 3, 5]) if at not in OVER_GLOO]


@pytest.mark.parametrize(
    ("level", "ranks"), tiers(thorough=OVER_GLOO, full=ALSO_OVER_GLOO, rows=True)
)
def test_processes(level: int, ranks: int) -> None:
    """All programs over gloo, one after the other on the same ranks."""
    cases = [make() for make in ALL.values()]

    def on_ranks() -> list[Result]:
        group = ProcessGroup()
        return [on_rank(group, case, level) for case in cases]

    for results in launch(on_ranks, ranks, start_method="fork", timeout=200):
        for case, result in zip(cases, results, strict=True):
            check(case, result, ranks)
