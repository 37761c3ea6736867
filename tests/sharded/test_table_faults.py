"""Lookups and tables that are refused, on all ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recomputed

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import GroupError, StructureError
from functorch_zero.groups import SingleRank, run_ranks
from tests.sharded.test_tables import (
    COLUMNS,
    ROWS,
    TABLE,
    adamw,
    halves,
    made,
    make_batches,
    predicting,
    ranker,
    summed,
)
from tests.tiers import thinned, tiers


def failing(look_up: Callable[[Any, Any], Tensor], ranks: int = 2, level: Any = TABLE) -> list[str]:
    """What each rank raises."""
    apply, params = made()
    step = fz.train_step(predicting(apply, look_up), adamw())
    batch = make_batches(1)[0]

    def run(group: Any) -> str:
        sharded = fz.shard(step, level=level, group=group)
        state = sharded.init(params, {})
        own = {**halves(batch, group), "rank": group.rank}
        with pytest.raises((StructureError, GroupError, IndexError)) as raised:
            sharded(state, own)
        return str(raised.value)

    return run_ranks(run, ranks)


@pytest.mark.parametrize("wrong", [ROWS, -1])
@pytest.mark.parametrize("level", tiers([TABLE], [{"": 0, "emb": "table"}]))
def test_ids_out_of_range(wrong: int, level: Any) -> None:
    def look_up(params: Any, batch: Any) -> Tensor:
        return summed(params, {"ids": batch["ids"].masked_fill(batch["ids"] == 0, wrong)})

    def on_one_rank(params: Any, batch: Any) -> Tensor:
        return look_up(params, batch) if batch["rank"] == 1 else summed(params, batch)

    for said in (*failing(look_up, level=level), *failing(on_one_rank, ranks=3, level=level)):
        assert f"path emb, expected ids from 0 to {ROWS - 1}, got {wrong}, on rank" in said
    assert all("on rank 1" in said for said in failing(on_one_rank, ranks=3, level=level))


def vmapped(params: Any, batch: Any) -> Tensor:
    found: Tensor = torch.func.vmap(lambda ids: F.embedding(ids, params["emb"]).sum(0))(
        batch["ids"]
    )
    return found


def penalty_inside(params: Any, batch: Any) -> Tensor:
    rows = F.embedding(batch["ids"], params["emb"])
    (inner,) = torch.autograd.grad(rows.square().sum(), [params["emb"]], create_graph=True)
    return rows.sum(1) + inner.sum()


def in_two_checkpoints(params: Any, batch: Any) -> Tensor:
    def inner() -> Tensor:
        found: Tensor = recomputed(lambda: summed(params, batch).sin(), use_reentrant=False)
        return found

    outer: Tensor = recomputed(lambda: inner().cos(), use_reentrant=False)
    return outer


REFUSED: dict[str, tuple[Callable[[Any, Any], Tensor], str]] = {
    "a tied head": (
        lambda p, b: F.linear(summed(p, b), p["emb"])[:, :4],
        "tied to it.*linear",
    ),
    "a penalty": (lambda p, b: summed(p, b) + p["emb"].square().sum(), "read as a whole"),
    "rows by index": (lambda p, b: p["emb"][b["ids"]].sum(1), "read as a whole"),
    "unshard": (lambda p, b: F.embedding(b["ids"], fz.unshard(p["emb"])).sum(1), "fz.unshard"),
    "max_norm": (lambda p, b: F.embedding(b["ids"], p["emb"], max_norm=1.0).sum(1), "max_norm"),
    "frequencies": (
        lambda p, b: F.embedding(b["ids"], p["emb"], scale_grad_by_freq=True).sum(1),
        "how often the whole batch",
    ),
    "max_norm of bags": (
        lambda p, b: F.embedding_bag(b["ids"], p["emb"], max_norm=1.0),
        "max_norm",
    ),
    "two checkpoints": (in_two_checkpoints, "ran again in backward"),
    "vmap": (vmapped, "torch.func"),
    "differentiated inside": (penalty_inside, "got grad"),
}


@pytest.mark.parametrize("name", thinned(REFUSED, 2))
def test_refused(name: str) -> None:
    look_up, reason = REFUSED[name]
    for said in failing(look_up):
        assert re.search(reason, said) and re.search(r"path (rows of )?emb", said), said
        assert "level={" in said


def test_second_derivatives_are_refused() -> None:
    apply, params = made()

    def loss_fn(params: Any, batch: Any) -> Any:
        return predicting(apply, summed)(params, {}, batch)

    def program(value: Any, batch: Any) -> Any:
        loss, grads = fz.value_and_grad(loss_fn)(value, batch)
        return fz.hvp(loss_fn)(value, grads, batch)[1], {"loss": loss}

    step = fz.program_step(program, init=lambda params: params)
    batch = make_batches(1)[0]

    def run(group: Any) -> str:
        sharded = fz.shard(step, level={"params": 3, "params.emb": "table"}, group=group)
        state = sharded.init(params)
        with pytest.raises((StructureError, GroupError)) as raised:
            sharded(state, halves(batch, group))
        return str(raised.value)

    for said in run_ranks(run, 2):
        assert "got fz.unshard" in said and "level={" in said  # whole params have derivatives


@pytest.mark.parametrize("level", tiers([0], [3]))
def test_a_lookup_that_a_rank_leaves_out(level: int) -> None:
    def look_up(params: Any, batch: Any) -> Tensor:
        if batch["rank"] == 1:
            return batch["y"][:, None].expand(-1, COLUMNS)
        return summed(params, batch)

    for said in failing(look_up, level={"": level, "emb": "table"}):
        assert "rows of emb" in said and "look up a table" in said


def test_what_can_not_be_a_table() -> None:
    step = fz.train_step(lambda p, b, x: p["w"].sum(), optim.sgd(0.1))
    for w in (torch.ones(3), torch.ones(2, 3, 4), torch.ones(3, 0)):
        with pytest.raises(StructureError, match="path w, expected the shape"):
            fz.shard(step, level="table", group=SingleRank()).init({"w": w.requires_grad_()}, {})
    blocks = fz.Precision(reduce=fz.compress.Blocks(torch.int8, 4))
    params = fz.functionalize(ranker(sparse=False), precision=blocks)[1]
    with pytest.raises(NotImplementedError, match=r"path items.weight.*rows travel|rows travel"):
        fz.shard(step, level={"": 3, "items": "table"}, group=SingleRank()).init(params, {})
