"""Every optimizer, sharded, is what it is unsharded: the table in `conformance/table.py`, run.

A row has 32 cells: level, number of ranks, dtype. The thorough tier runs one cell per row, in turn.
The quick tier runs one of every eighth row, in fewer steps: over 128 rows these are all pairs of a
level and a number of ranks. The full tier runs every cell of every row.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import optree
import pytest
import torch

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.groups import launch
from functorch_zero.groups.threads import ThreadGroup, run_ranks
from functorch_zero.testing import (
    Equality,
    assert_equal_updates,
    assert_equal_values,
    check_transform,
)
from functorch_zero.testing.strategies import known_optimizers, public_functions
from tests.conformance.table import TABLE, Row, decay, rate
from tests.conformance.tree import batches, hostile, part_of
from tests.local import all_gather_tree
from tests.scripts import ROOT
from tests.tiers import FULL, THOROUGH, tiers

LEVELS, RANKS, DTYPES = (0, 1, 2, 3), (1, 2, 3, 5), (torch.float32, torch.float64)
NUM_STEPS, QUICK_STEPS = 5, 2
EVERY = 8  # every eighth row is quick


class Case(NamedTuple):
    """One cell of a row."""

    level: int
    ranks: int
    dtype: torch.dtype
    donate: bool
    steps: int = NUM_STEPS


def all_cases() -> list[Case]:
    cells = itertools.product(LEVELS, RANKS, DTYPES)
    return [
        Case(level, ranks, dtype, bool(i % 3 == 0)) for i, (level, ranks, dtype) in enumerate(cells)
    ]


def quick_case(row: int) -> Case:
    """The quick cell of a row, one of every eighth, on the next pair of a level and a number."""
    pair = 5 * (row // EVERY) % 16
    return all_cases()[2 * pair + pair // 2 % 2]._replace(steps=QUICK_STEPS)


def thorough_case(row: int) -> Case:
    return all_cases()[5 * row % 32]


def runs() -> Iterator[Any]:
    """Names of rows with some of their cases, for `parametrize`."""
    for row, name in enumerate(TABLE):
        if row % EVERY == 0:
            yield pytest.param(name, [quick_case(row)], id=f"{name}-quick")
        yield pytest.param(name, [thorough_case(row)], id=f"{name}-thorough", marks=THOROUGH)
        for level in LEVELS:
            every = [case for case in all_cases() if case.level == level]
            yield pytest.param(name, every, id=f"{name}-{level}", marks=FULL)


def test_the_quick_cases_are_spread() -> None:
    pairs = set(itertools.product(LEVELS, RANKS))
    for start in range(0, len(TABLE) - 16 * EVERY, EVERY):
        rows = range(start, start + 16 * EVERY, EVERY)
        assert {quick_case(row)[:2] for row in rows} == pairs
    quick = [quick_case(row) for row in range(0, len(TABLE), EVERY)]
    assert {case.dtype for case in quick} == {*DTYPES}
    donated = {(case.level, case.donate) for case in quick}
    assert donated == set(itertools.product(LEVELS, (False, True)))


def test_the_thorough_cases_are_all_cells() -> None:
    assert {thorough_case(row) for row in range(len(TABLE))} == {*all_cases()}


class Run(NamedTuple):
    """Whole params before the first step and after each, and the whole optimizer state at the
    end."""

    params: list[Any]
    opt_state: Any


def run_whole(row: Row, dtype: torch.dtype, steps: int = NUM_STEPS) -> Run:
    """The oracle."""
    params, loss_fn = hostile(dtype)
    step = fz.train_step(loss_fn, row.make())
    state = step.init(params)
    seen = [state.params]
    for k, batch in enumerate(batches(params, steps, dtype)):
        state, metrics = step(state, batch)
        seen.append(state.params)
        if k < steps - 1:
            state = state.replace(opt_state=row.between(state.opt_state, k, metrics))
    return Run(seen, state.opt_state)


def run_sharded(row: Row, case: Case) -> list[Run]:
    """The same on ranks."""
    params, loss_fn = hostile(case.dtype)
    data = batches(params, case.steps, case.dtype)

    def one(group: ThreadGroup) -> Run:
        step = fz.shard(
            fz.train_step(loss_fn, row.make()), level=case.level, group=group, donate=case.donate
        )
        state = step.init(params)
        seen = [whole_params(state, group, case.level)]
        for k, batch in enumerate(data):
            state, metrics = step(state, part_of(batch, group.rank, group.size))
            seen.append(whole_params(state, group, case.level))
            if k < case.steps - 1:
                state = state.replace(opt_state=row.between(state.opt_state, k, metrics))
        return Run(seen, step.unshard(state).opt_state)

    return run_ranks(one, case.ranks)


def whole_params(state: fz.State, group: ThreadGroup, level: int) -> Any:
    """Copies: the next step may use the storage again."""
    with torch.no_grad():
        if level < 3:
            return optree.tree_map(
                lambda p: p.local.clone().requires_grad_(p.requires_grad), state.params.tree
            )
        assert state.sharding is not None
        layout = state.sharding.layout
        whole = all_gather_tree(state.params.local_tree, layout, group)
        return optree.tree_map(
            lambda p, flag: p.detach().clone().requires_grad_(flag), whole, layout.trainable
        )


def grade_of(row: Row, case: Case) -> Equality:
    """The row's; on donated storage a fused kernel rounds otherwise than the chain it stands
    for."""
    equality = row.equality()
    if equality.grade == "bitwise" and case.donate and row.make().has_kernel:
        return Equality("reordered")
    return equality


def assert_conforms(row: Row, case: Case, expected: Run) -> None:
    """Every step's update on every rank, and the state at the end."""
    runs, equality, at = run_sharded(row, case), grade_of(row, case), case._asdict()
    first = runs[0]
    for other in runs[1:]:
        assert_equal_values(
            (first.params, first.opt_state), (other.params, other.opt_state), grade="bitwise"
        )
    moving = {path for a, b in itertools.pairwise(expected.params) for path in moved(a, b)}
    pairs = zip(itertools.pairwise(expected.params), itertools.pairwise(first.params), strict=True)
    for k, ((old, new), (old_got, new_got)) in enumerate(pairs):
        assert_equal_updates(
            old,
            new,
            new_got,
            old_got=old_got,
            grade=equality,
            unused=moving,
            context={"step": k, **at},
        )
    assert_equal_values(
        expected.opt_state,
        first.opt_state,
        grade=equality,
        what="opt_state",
        dtypes=[case.dtype],
        context=at,
    )


def moved(old: Any, new: Any) -> set[str]:
    after = fz.named_leaves(new)
    return {
        path for path, leaf in fz.named_leaves(old).items() if not torch.equal(leaf, after[path])
    }


@pytest.mark.parametrize(("name", "cases"), [*runs()])
def test_sharded_is_unsharded(name: str, cases: list[Case], request: pytest.FixtureRequest) -> None:
    """Quick cases have small leaves cut, too; the others have the layouts of real runs."""
    if cases[0].steps == QUICK_STEPS:
        request.getfixturevalue("cut_anywhere")
    row = TABLE[name]
    runs = {(case.dtype, case.steps) for case in cases}
    expected = {run: run_whole(row, *run) for run in runs}
    for case in cases:
        assert_conforms(row, case, expected[case.dtype, case.steps])


@THOROUGH
@pytest.mark.usefixtures("cpp_compiler")
def test_a_compiled_chain_is_a_row_too() -> None:
    """In a process of its own, since torch's compiler leaves threads behind."""
    ours = [
        optim.scale_by_adam(),
        optim.add_decayed_weights(decay),
        optim.scale_by_learning_rate(rate),
    ]
    optimizer = optim.compiled(optim.chain(*ours))
    row = Row(lambda: optimizer)  # which is compiled once

    def conforms() -> int:
        whole = {dtype: run_whole(row, dtype) for dtype in DTYPES}
        cases = [Case(2, 3, torch.float32, donate=True), Case(3, 5, torch.float64, donate=True)]
        for case in cases:
            assert_conforms(row, case, whole[case.dtype])
        return len(cases)

    assert launch(conforms, 1, start_method="fork", timeout=110)[0] > 0


OTHERS = sorted(
    TABLE.keys() - known_optimizers()
)  # some of the known are in testing/test_transforms.py


@pytest.mark.parametrize("name", tiers(OTHERS[:1], OTHERS[::6], sorted(TABLE)))
def test_claims_hold(name: str) -> None:
    """Whole, cut at random and joined, pointwise parts give the same bits.

    The full tier checks all rows, and the others some. `shard` checks the claims of each row that
    is run above, too: on small leaves, when a state begins.
    """
    check_transform(TABLE[name].make(), seeds=(0,), steps=2, ranks=())


def public_transforms() -> set[str]:
    """What makes a transform, or a function that makes one, by its signature."""
    things = public_functions()
    makers = {
        name: inspect.signature(t).return_annotation
        for name, t in things.items()
        if inspect.isfunction(t)
    }
    return {name for name, made in makers.items() if "Transform" in str(made)}


def test_every_public_optimizer_has_a_row() -> None:
    assert len(public_transforms()) > 90
    # Which has a test above
    missing = public_transforms() - {name.split(",")[0] for name in TABLE} - {"compiled"}
    assert not missing, f"rows are missing for {sorted(missing)}"


def test_every_public_optimizer_is_in_the_catalogue() -> None:
    page = (ROOT / "docs" / "reference" / "optimizers.md").read_text()
    homes = ("functorch_zero.optim.optimizers", "functorch_zero.optim.contrib")
    made_there = {
        n for n in public_transforms() if public_functions()[n].__module__.startswith(homes)
    }
    assert len(made_there) > 50
    assert not {name for name in made_there if f"{name}`" not in page}
