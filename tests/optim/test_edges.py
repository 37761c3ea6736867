"""Every optimizer that looks beyond one element, sharded, where it hurts: thin matrices, fewer
matrices than ranks, gradients that are all zero, and NaNs and infinities in one rank's gradient. It
does what the unsharded one does there, on all ranks alike.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.groups.threads import ThreadGroup, run_ranks
from functorch_zero.testing import assert_equal_values
from tests.conformance.table import POINTWISE, STATISTICS, TABLE, WHOLE, WRAPPERS
from tests.tiers import thinned, tiers

SHAPES: dict[str, tuple[int, ...]] = {
    "thin": (1, 9),
    "column": (4, 1),
    "one": (1, 1),
    "bias": (3,),
    "gain": (),
}
ROWS = 8
# By ranks. Powers of two, so that gradients have the same bits on every number of ranks
PARTS = {2: [4, 4], 3: [4, 2, 2], 4: [2, 2, 2, 2], 5: [2, 2, 2, 1, 1]}
Edge = tuple[tuple[float | None, ...], int]  # kinds of batches, and the number of ranks
ROW_NAMES = [*STATISTICS, *WHOLE, *WRAPPERS, "adamw", "adabelief", "schedule_free_adamw"]


def params() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(5)
    return {
        k: torch.randn(s, generator=g, dtype=torch.float64).requires_grad_()
        for k, s in SHAPES.items()
    }


def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
    whole, rows = fz.unshard(params), len(batch["bias"])
    return sum((whole[k] * c.sum(0)).sum() for k, c in batch.items()) / rows, fz.Aux(weight=rows)


def batches(*kinds: float | None) -> list[dict[str, Tensor]]:
    """A batch each: None is an ordinary one, 0 gives gradients of zero, another number stands in
    the last row."""
    g = torch.Generator().manual_seed(6)
    made = []
    for kind in kinds:
        batch = {
            k: torch.randint(-9, 10, (ROWS, *s), generator=g).double() / 8
            for k, s in SHAPES.items()
        }
        if kind == 0:
            batch = {k: torch.zeros_like(x) for k, x in batch.items()}
        elif kind is not None:
            batch["thin"][-1, 0, 3] = kind  # on the last rank
        made.append(batch)
    return made


def run(name: str, data: list[dict[str, Tensor]], level: int, ranks: int) -> None:
    """Unsharded and on ranks: params and optimizer state after the last step."""
    step = fz.train_step(loss_fn, TABLE[name].make())
    state = step.init(params())
    for batch in data:
        state, _ = step(state, batch)

    def one(group: ThreadGroup) -> fz.State:
        sharded = fz.shard(fz.train_step(loss_fn, TABLE[name].make()), level=level, group=group)
        part = sharded.init(params())
        for batch in data:
            own = {k: x.split(PARTS[ranks])[group.rank] for k, x in batch.items()}
            part, _ = sharded(part, own)
        return sharded.unshard(part)

    for rank, got in enumerate(run_ranks(one, ranks)):
        at = {"rank": rank, "level": level, "ranks": ranks}
        assert_equal_values(
            (state.params, state.opt_state),
            (got.params, got.opt_state),
            what="the states",
            context=at,
        )


ZEROS: list[Edge] = [((0, None, 0), 4)]  # four ranks have fewer matrices than they are
MORE_ZEROS: list[Edge] = [((None, 0, None, 0), 5), ((0, 0, None), 2)]
NOT_FINITE: list[Edge] = [((None, math.nan, None), 2)]
MORE_NOT_FINITE: list[Edge] = [((None, math.nan, None), 3), ((None, math.inf, None), 2)]
EDGES = (ZEROS, NOT_FINITE, MORE_ZEROS, MORE_NOT_FINITE)


# Each row with one kind of edges, in turn, is thorough
ROWS_WITH_EDGES = [*itertools.product(ROW_NAMES, EDGES)]
IN_TURN = [(name, EDGES[i % len(EDGES)]) for i, name in enumerate(ROW_NAMES)]


@pytest.mark.parametrize(
    ("name", "edges"),
    tiers(
        IN_TURN[::41], [row for i, row in enumerate(IN_TURN) if i % 41], ROWS_WITH_EDGES, rows=True
    ),
    ids=str,
)
def test_gradients_of_zero_and_not_finite(name: str, edges: list[Edge]) -> None:
    level = 1 + ROW_NAMES.index(name) % 3
    for kinds, ranks in edges:
        run(name, batches(*kinds), level, ranks)


@pytest.mark.parametrize("level", thinned([3, 2, 1, 0]))
def test_a_tree_too_large_is_an_error_on_all_ranks(level: int) -> None:
    def one(group: ThreadGroup) -> str:
        optimizer = optim.contrib.full_matrix_adagrad(0.1, whole_tree=True, limit=1000)
        with pytest.raises(fz.errors.TransformError) as error:
            fz.shard(fz.train_step(loss_fn, optimizer), level=level, group=group).init(params())
        return str(error.value)

    messages = run_ranks(one, 3)
    assert len(set(messages)) == 1 and str(18**2 * 8) in messages[0], messages


def test_all_rows_are_known() -> None:
    assert set(ROW_NAMES) <= set(TABLE) and "adamw" in POINTWISE


def test_what_is_no_transform_is_refused() -> None:
    with pytest.raises(TypeError, match=r"chain's argument 1 must be an optim\.Transform, got str"):
        optim.chain(optim.sgd(0.1), "adam")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"must say what it needs.*Remedy"):
        optim.Transform(lambda params, across: (), lambda u, s, p, across: (u, s), 0)  # type: ignore[arg-type]
