"""The warning that all ranks are given the same batches, and its silence in right programs."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import EqualBatchesWarning
from functorch_zero.groups import CountingGroup, HybridGroup, run_ranks
from functorch_zero.sharded import equal_batches
from tests.tiers import thinned

F64 = torch.float64
PARAMS = {"w": torch.ones(5, 61, dtype=F64, requires_grad=True)}
BATCHES = [
    torch.randn(12, 5, dtype=F64, generator=torch.Generator().manual_seed(k)) for k in range(5)
]


def loss(params: Any, buffers: Any, batch: Any) -> Tensor:
    return (torch.as_tensor(batch["x"]) @ params["w"]).square().mean()


def new_step() -> Any:
    return fz.train_step(loss, optim.sgd(0.1))


def caught(batch_of: Any, ranks: int = 2, level: int = 3, mesh: Any = None) -> list[str]:
    """The messages of the warnings in five steps."""
    step = new_step()

    def run(group: Any) -> None:
        own = fz.shard(step, level=level, group=group if mesh is None else mesh(group))
        state = own.init(PARAMS)
        for k, x in enumerate(BATCHES):
            state, _ = own(state, batch_of(k, x, group.rank))

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run_ranks(run, ranks)
    assert all(warning.category is EqualBatchesWarning for warning in found)
    return [str(warning.message) for warning in found]


@pytest.mark.parametrize(
    ("ranks", "level"), thinned([(2, 3), (3, 0), (3, 1), (2, 2)], 2, rows=True)
)
def test_the_same_stream_on_every_rank_is_told_once(ranks: int, level: int) -> None:
    (message,) = caught(lambda k, x, rank: {"x": x}, ranks, level)
    assert "all ranks were given the same batches, 3 in turn" in message and "Remedy" in message


RIGHT: dict[str, Any] = {
    "parts": lambda k, x, rank: {"x": x[6 * rank : 6 * rank + 6]},
    "arrays in parts": lambda k, x, rank: {"x": x.numpy()[6 * rank : 6 * rank + 6]},
    "one batch again and again": lambda k, x, rank: {"x": BATCHES[0]},
    "one batch, and the step's number": lambda k, x, rank: {"x": BATCHES[0], "k": k},
    "one batch, and a schedule": lambda k, x, rank: {"x": BATCHES[0], "k": torch.tensor(k)},
    "the last place of one element": lambda k, x, rank: {"x": x + 1e-15 * rank * (x == x.max())},
    "texts of their own": lambda k, x, rank: {"x": x, "names": [f"{rank}.{n}" for n in range(12)]},
    "words of their own": lambda k, x, rank: {"x": x, "names": np.array([str(rank)] * 12)},
    "the same at first": lambda k, x, rank: {"x": x if k < 2 else x + rank},
}


@pytest.mark.parametrize("name", thinned(RIGHT, 4))
def test_right_streams(name: str) -> None:
    assert not caught(RIGHT[name])


def test_ranks_that_are_declared_to_hold_the_same_data() -> None:
    def copies(group: Any) -> Any:
        return HybridGroup(group, shard_size=2, same_data="shard")

    def by_part(k: int, x: Tensor, rank: int) -> Any:
        return {"x": x.chunk(2)[rank // 2]}

    assert not caught(by_part, ranks=4, mesh=copies)
    assert not caught(lambda k, x, rank: {"x": x}, ranks=2, mesh=copies)
    assert caught(lambda k, x, rank: {"x": x}, ranks=4, mesh=copies)


def test_ranks_that_are_not_there_give_no_batches() -> None:
    step = fz.shard(new_step(), level=3, group=CountingGroup(2))
    state = step.init(PARAMS)
    for x in BATCHES:
        state, _ = step(state, {"x": x})


def test_nothing_is_read_once_ranks_have_differed(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []
    digests = equal_batches.content_digests
    monkeypatch.setattr(
        equal_batches, "content_digests", lambda tree: read.append(tree) or digests(tree)
    )
    assert not caught(RIGHT["parts"])
    assert len(read) == 2  # by each rank, in the first step
