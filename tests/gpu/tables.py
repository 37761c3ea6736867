"""Part C: tables, whose rows travel between two ranks as a loss looks them up."""

from __future__ import annotations

import time
from typing import Any

import optree
import torch
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.groups import counted
from tests.gpu.measure import synchronize
from tests.gpu.ranks import RANKS, backends, group_over, on_ranks
from tests.gpu.report import DEVICE, Report

STEPS = 3


class Ranker(nn.Module):
    """Two tables and a net."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.items = nn.Embedding(rows, 16, sparse=True)
        self.tags = nn.EmbeddingBag(rows // 2, 16, mode="sum", padding_idx=0, sparse=True)
        self.net = nn.Linear(16, 1)

    def forward(self, ids: Tensor) -> Tensor:
        tags = ids[:, 1:] % self.tags.num_embeddings
        out: Tensor = self.net(self.items(ids[:, 0]) + self.tags(tags))
        return out[:, 0]


def tables(report: Report) -> None:
    """Params beside one process on the whole batch; and what a step of a large table takes beside
    the same at level 0."""
    rows, size = (20_000, 200) if report.tiny else (200_000, 2_000)
    for backend in backends(report):
        with report.failing(f"{backend}: tables"):
            found = on_ranks(_train, backend, rows, size)
            for level in (1, 3):
                apart = max(by_level[level]["apart"] for by_level in found)
                name = f"{backend}, level {level}: params, apart"
                report.check_result(name, apart, apart < 1e-5, "< 1e-5")
            sent = [found[0][level]["sent"] for level in (0, 1)]
            share = sent[1] / sent[0]
            report.check(f"{backend}: share of level 0's bytes", share, share < 0.1, "< 0.1")
            for level in (0, 1):
                report.measured(f"{backend}, level {level}: s a step", found[0][level]["seconds"])


def _train(backend: str, rows: int, size: int) -> dict[int, Any]:
    """By level: how far params are from those of one process, the bytes that a rank sends in a
    step, and the seconds that it takes."""
    group = group_over(backend)
    torch.manual_seed(0)
    apply, params, _ = fz.functionalize(Ranker(rows).to(DEVICE))
    batches = [torch.randint(0, rows, (size, 3)).to(DEVICE) for _ in range(STEPS)]

    def loss_fn(params: Any, buffers: Any, ids: Tensor) -> Tensor:
        return (apply(params, {}, ids)[0] - ids[:, 0] / rows).square().mean()

    step = fz.train_step(loss_fn, optim.adamw(1e-2))
    state = step.init(params)
    for ids in batches:
        state, _ = step(state, ids)
    expected = optree.tree_leaves(state.params)
    found = {}
    for level in (0, 1, 3):
        watched = counted(group)
        sharded = fz.shard(step, level=level, group=watched)
        ours = sharded.init(params)
        for ids in batches:
            synchronize()
            watched.reset()
            start = time.monotonic()
            ours, _ = sharded(ours, ids.chunk(RANKS)[group.rank])
            synchronize()
            seconds = time.monotonic() - start
        sent = watched.sent_bytes()
        whole = optree.tree_leaves(fz.unshard(ours.params))
        apart = [float((a - b).detach().abs().max()) for a, b in zip(expected, whole, strict=True)]
        found[level] = {"apart": max(apart), "sent": sent, "seconds": round(seconds, 4)}
    return found
