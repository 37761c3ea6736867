"""What tables hold and send: bytes, peaks, and a process of its own per rank."""

from __future__ import annotations

import gc
import itertools
from functools import partial
from typing import Any

import pytest
import torch

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import StructureError
from functorch_zero.groups import counted, run_ranks
from tests.compare import (
    Run,
    assert_equal_updates,
    assert_same_on_all_ranks,
    train,
    train_sharded,
)
from tests.local import local_leaves
from tests.planning.test_plan import allocations
from tests.sharded.test_processes import on_processes
from tests.sharded.test_tables import COLUMNS, TABLE, D, build, large, made, make_batches
from tests.tiers import THOROUGH, tiers


def test_what_a_rank_holds_and_describes() -> None:
    step, params, _ = build()

    def run(group: Any) -> Any:
        sharded = fz.shard(step, level=1, group=group)
        state = sharded.init(params, {})
        items, tags, *_ = state.params.flats()
        row = next(row for row in fz.describe(sharded, state).rows if row.unit == "items.weight")
        assert row.where == row.state_where == "1/3"
        assert [message for message, _ in row.wire] == ["rows", "reduce"]
        return items.view(-1, COLUMNS), tags.view(-1, COLUMNS)

    held = run_ranks(run, 3)
    for k, name in enumerate(("items.weight", "tags.weight")):
        rows = torch.cat([pieces[k] for pieces in held])
        assert torch.equal(rows[: len(params[name])], params[name])
        assert len({len(pieces[k]) for pieces in held}) == 1


LARGE = tiers([(50_000, 250)], [(1_000_000, 5_000)], rows=True)


@pytest.mark.parametrize(("rows", "asked"), LARGE)
def test_bytes(rows: int, asked: int) -> None:
    """Of a table of 1 M x 16, of which each rank asks for 5,000 rows, at most 0.01 of level 0's
    bytes are sent; and those that a plan says."""
    step, params, ids = large(rows, asked)
    batch = {"ids": ids, "y": torch.zeros(2, asked // 5)}

    def run(group: Any, level: Any) -> int:
        watched = counted(group)
        sharded = fz.shard(step, level=level, group=watched)
        state, _ = sharded(sharded.init(params, {}), {k: x[group.rank] for k, x in batch.items()})
        watched.reset()
        sharded(state, {name: x[group.rank] for name, x in batch.items()})
        return sum(call.sent_bytes for call in watched.calls)

    level = {"": 0, "emb": "table"}
    whole, *_ = run_ranks(lambda group: run(group, 0), 2)
    by_rows = run_ranks(lambda group: run(group, level), 2)
    planned = fz.plan(params, step, level=level, ranks=2, rows={"emb": asked}).sent_bytes
    assert max(by_rows) <= 0.01 * whole
    # Halves of what a rank asks for lie on the other, up to chance
    assert planned == pytest.approx(sum(by_rows) / 2, rel=0.1)


def peak_of(rows: int, asked: int) -> int:
    """The most bytes of tensors in a step on a real rank, by torch's own allocator."""
    torch.set_num_threads(1)
    step, params, ids = large(rows, asked)
    sharded = fz.shard(step, level={"": 0, "emb": "table"})
    state = sharded.init(params, {})
    del params
    batch = {"ids": ids[sharded.group.rank], "y": torch.zeros(asked // 5)}
    for _ in range(2):
        state, _ = sharded(state, batch)
    held = sum(flat.nbytes for flat in state.params.flats())
    held += sum(x.nbytes for x in local_leaves(state.opt_state))
    peaks = []
    for _ in range(2):  # gloo's threads may hold tensors longer: the least counts
        gc.collect()
        events: list[int] = []
        with allocations(events):
            state, _ = sharded(state, batch)
        peaks.append(held + max(itertools.accumulate(events)))
    return min(peaks)


@pytest.mark.parametrize(("rows", "asked"), tiers(thorough=[(200_000, 1_000)], rows=True))
def test_the_peak_is_the_plans(rows: int, asked: int) -> None:
    most, _ = fz.launch(peak_of, 2, rows, asked, timeout=100, start_method="fork")
    step, params, _ = large(rows, asked)
    planned = fz.plan(params, step, level={"": 0, "emb": "table"}, ranks=2, rows={"emb": asked})
    assert planned.peak.total == pytest.approx(most, rel=0.1)
    whole = fz.plan(params, step, level=0, ranks=2)
    assert planned.peak.total < 0.55 * whole.peak.total


def on_gloo(group: Any) -> list[Run]:
    step, params, buffers = build()
    return [
        train_sharded(group, step, params, buffers, make_batches(), [6, 6], level=level)
        for level in (3, 1)
    ]


@THOROUGH
def test_on_processes() -> None:
    step, params, buffers = build()
    expected = train(step, params, buffers, make_batches())
    first, second = on_processes(on_gloo, 2)
    for a, b in zip(first, second, strict=True):
        assert_same_on_all_ranks([a, b])
        assert_equal_updates(expected, a)


def test_the_plan_of_rows() -> None:
    _, params = made()
    plan = partial(fz.plan, params, optim.adamw(0.1), level=TABLE, ranks=2)
    with pytest.raises(StructureError, match=r"path emb\. Remedy: plan\(..., rows=\{"):
        plan()
    with pytest.raises(StructureError, match=r"no table: path net, expected one of \['emb'\]"):
        plan(rows={"emb": 3, "net": 3})
    with pytest.raises(ValueError, match=r"a number of rows, got 2\.5"):
        plan(rows={"emb": 2.5})
    rows = [c for c in plan(rows={"e*": 6}).collectives if c.unit == "emb" and c.dtype == D]
    assert [(c.phase, c.kind, c.num_elements) for c in rows] == [
        ("forward", "all_to_all", 6 * COLUMNS),
        ("backward", "all_to_all", 6 * COLUMNS),
    ]
