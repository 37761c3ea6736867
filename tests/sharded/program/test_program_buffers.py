"""Micro-batches and buffers of a program's gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from optree import tree_map
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero.errors import PeerError, StructureError
from functorch_zero.groups import counted, run_ranks
from functorch_zero.testing.equality import assert_equal_values
from tests.tiers import crossed

LEVELS, RANKS = [0, 1, 2, 3], [1, 2, 3]


def net(seed: int, *layers: nn.Module) -> tuple[Any, Any, Any]:
    torch.manual_seed(seed)
    for layer in layers:
        for param in layer.parameters():
            nn.init.normal_(param)
    return fz.functionalize(nn.Sequential(*layers).double())


def rows(num: int, width: int, seed: int = 7) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(num, width, generator=made, dtype=torch.float64)


def updates(first: Any, after: Any) -> Any:
    """The difference of two trees, of which each trained leaf moves."""
    moved = tree_map(lambda old, new: (new - old).detach(), dict(first), dict(after))
    for path, leaf in moved.items():
        assert torch.count_nonzero(leaf), f"{path} does not move"
    return moved


# Against the same program on whole trees: buffers whose means over ranks are those of the batch


def interleaved(batch: Any, group: Any, count: int) -> Any:
    """A rank's part, of which each micro-batch is a part of the whole batch's micro-batch."""

    def own(x: Tensor) -> Tensor:
        return torch.cat([micro.chunk(group.size)[group.rank] for micro in x.chunk(count)])

    return tree_map(own, batch)


plain, plain_params, _ = net(1, nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def average_loss(params: Any, x: Tensor, *, buffers: Any, batch: Any) -> Any:
    """Writes a moving average, and reads an earlier one; `x` goes to each micro-batch."""
    predicted, _ = plain(params, {}, batch - buffers["kept"])
    buffers["mean"].lerp_(batch.mean(0), 0.1)
    buffers["count"] += 1
    loss = (predicted - x).square().mean()
    return loss, fz.Aux(metrics={"predicted": predicted.mean()})


def average_program(value: Any, x: Tensor, batch: Tensor) -> Any:
    params, buffers = value["params"], value["buffers"]
    gradient = fz.value_and_grad(average_loss, accumulate=2)
    (loss, seen, buffers), grads = gradient(params, x, buffers=buffers, batch=batch)
    away = fz.apply_updates(params, tree_map(lambda g: 0.05 * g, grads))
    buffers["kept"] = buffers["mean"]
    # Only the first gradient's buffers go on
    (more, _, _), grads = gradient(away, x, buffers=buffers, batch=batch)
    params = fz.apply_updates(params, tree_map(lambda g: -0.1 * g, grads))
    return {"params": params, "buffers": buffers}, {"loss": loss, "more": more, **seen}


def average_init(params: Any) -> Any:
    mean = torch.ones(3, dtype=torch.float64)
    buffers = {"mean": mean, "kept": mean.clone(), "count": torch.tensor(0)}
    return {"params": params, "buffers": buffers}


@pytest.mark.parametrize(("level", "ranks"), crossed(LEVELS, RANKS))
def test_as_on_whole_trees(level: int, ranks: int) -> None:
    step = fz.program_step(average_program, init=average_init)
    state, x = step.init(plain_params), torch.tensor(0.3, dtype=torch.float64)
    expected = []
    for seed in range(2):
        state, metrics = step(state, x, rows(12, 3, seed))
        expected.append(metrics)
    assert int(state.value["buffers"]["count"]) == 4

    def run(group: Any) -> Any:
        sharded = fz.shard(step, level=level, group=group)
        state, found = sharded.init(plain_params), []
        for seed in range(2):
            state, metrics = sharded(state, x, interleaved(rows(12, 3, seed), group, 2))
            found.append(metrics)
        again = sharded.shard(sharded.unshard(state))
        return sharded.unshard(again).value, found

    for whole, found in run_ranks(run, ranks):
        moved = updates(plain_params, state.value["params"])
        assert_equal_values(moved, updates(plain_params, whole["params"]))
        assert_equal_values(state.value["buffers"], whole["buffers"])
        assert_equal_values(expected, found)


# Writes in place


def running(params: Any, buffers: Any, x: Tensor) -> Tensor:
    """Batch normalisation by torch's kernel, which counts no version up."""
    seen = F.batch_norm(x, buffers["mean"], buffers["var"], training=True)
    return (fz.unshard(params["w"]) * seen).square().mean()


def written(params: Any, buffers: Any, x: Tensor) -> Tensor:
    buffers["mean"] += x.mean(0)
    return (fz.unshard(params["w"]) * (x - buffers["mean"])).square().mean()


def of_views(params: Any, buffers: Any, x: Tensor) -> Tensor:
    buffers["mean"].data.add_(x.mean(0))
    return (fz.unshard(params["w"]) * (x - buffers["mean"])).square().mean()


def statistics() -> dict[str, Tensor]:
    return {"mean": torch.zeros(3).double(), "var": torch.ones(3).double()}


def weights() -> dict[str, Tensor]:
    return {"w": torch.arange(1.0, 4.0, dtype=torch.float64).requires_grad_()}


@pytest.mark.parametrize(
    ("loss", "level"), crossed([running, written, of_views], [None, *LEVELS], n=2)
)
def test_writes_in_place(loss: Any, level: int | None) -> None:
    """Refused of an argument; of buffers they are the new ones, and those given stay."""
    expected = statistics()
    loss(weights(), expected, rows(6, 3))

    def run(group: Any) -> Any:
        params = weights() if level is None else fz.shard_tree(weights(), level=level, group=group)
        with pytest.raises(StructureError, match=r"has written.*args\.0\.mean.*buffers=buffers"):
            fz.value_and_grad(loss)(params, statistics(), rows(6, 3))
        given = statistics()
        (_, metrics, found), grads = fz.value_and_grad(
            lambda params, x, *, buffers: loss(params, buffers, x)
        )(params, rows(6, 3), buffers=given)
        assert metrics == {} and torch.count_nonzero(fz.unshard(grads)["w"])
        assert_equal_values(statistics(), given, grade="bitwise")
        return found

    for found in [run(None)] if level is None else run_ranks(run, 2):
        assert_equal_values(expected, found)


# What is refused


def weighted_loss(params: Any, *, batch: Any) -> Any:
    predicted, _ = plain(params, {}, batch)
    metrics = {"most": predicted.square().mean()}
    return (predicted - 1).square().mean(), fz.Aux(metrics=metrics, weight=len(batch))


def test_what_is_refused() -> None:
    x = rows(6, 3)

    def returning(params: Any, **named: Any) -> Any:
        return plain(params, {}, x)[0].mean(), fz.Aux(buffers={"seen": torch.ones(())})

    def calls(params: Any) -> dict[str, Any]:
        grad = fz.value_and_grad
        named = {"x": x, "y": rows(5, 3)}
        return {
            r"returned Aux\(buffers=.*given none": lambda: grad(returning)(params),
            r"Aux\.buffers.*tree structure": lambda: grad(returning)(params, buffers={}),
            r"no batch to cut": lambda: grad(weighted_loss, accumulate=2)(params, x),
            r"unequal rows": lambda: grad(weighted_loss, accumulate=2)(params, batch=named),
            r"too small": lambda: grad(weighted_loss, accumulate=7)(params, batch=x),
            r"plain tensors|tensors": lambda: grad(returning)(params, buffers={"seen": 1.0}),
            r"accumulate must be at least 1": lambda: grad(weighted_loss, accumulate=0),
            r"no number of micro-batches": lambda: grad(weighted_loss, accumulate=True),
        }

    def check(found: dict[str, Any]) -> None:
        for message, call in found.items():
            with pytest.raises((StructureError, TypeError, ValueError), match=message):
                call()

    def run(group: Any) -> None:
        params = fz.shard_tree(plain_params, level=3, group=group)
        check(calls(params))
        local = {"level": 3, "group": group, "sync_buffers": "local"}
        step, grad = fz.program_step(average_program, init=average_init), fz.value_and_grad
        check(
            {
                r"sharded tree in buffers=.*on rank \d\. Remedy": lambda: grad(returning)(
                    params, buffers=params
                ),
                r"sharded tree in batch=.*on rank \d\. Remedy": lambda: grad(weighted_loss)(
                    params, batch={"teacher": params}
                ),
                "each rank its own buffers": lambda: fz.shard(step, **local),
            }
        )

    check(calls(plain_params))
    run_ranks(run, 2)


def test_a_batch_that_one_rank_lacks_is_told_to_the_others() -> None:
    """In the user's own loop, where no step tells them."""

    def loss(params: Any, batch: Tensor) -> Tensor:
        return (batch @ params["w"]).mean()

    def run(group: Any) -> None:
        params = fz.shard_tree({"w": torch.ones(3, requires_grad=True)}, level=3, group=group)
        gradient = fz.value_and_grad(loss, accumulate=2)
        mine: Any = TypeError if group.rank == 1 else PeerError
        with pytest.raises(mine, match="no batch to cut"):
            gradient(params, batch=torch.ones(4, 3) if group.rank == 0 else None)

    run_ranks(run, 2, timeout=20)


# Collectives


@pytest.mark.parametrize("changed", [True, False])
@pytest.mark.parametrize("weights", [None, (1, 1), (0, 1), (1, 0), (0, 0)])
def test_integers_of_the_first_rank_that_counts(
    changed: bool, weights: tuple[int, int] | None
) -> None:
    """A broadcast where all ranks count; else two sums, since no host need know who does."""

    def loss(params: Any, weight: int | None, number: int, *, buffers: Any) -> Any:
        new = {name: buffer + number for name, buffer in buffers.items()} if changed else buffers
        return params["w"].sum(), fz.Aux(buffers=new, weight=weight)

    def run(group: Any) -> Any:
        watched, weight = counted(group), None if weights is None else weights[group.rank]
        params = fz.shard_tree({"w": torch.ones(3, requires_grad=True)}, level=0, group=watched)
        watched.reset()
        buffers = {"a": torch.tensor([2, -3]), "b": torch.tensor([7, 300], dtype=torch.int16)}
        (_, _, new), _ = fz.value_and_grad(loss)(params, weight, group.rank + 5, buffers=buffers)
        reduces = watched.num_calls("all_reduce") - 3  # of gradients, metrics and words
        return watched.num_calls("broadcast"), reduces, {k: b.tolist() for k, b in new.items()}

    counting = [5 + rank for rank, weight in enumerate(weights or (1, 1)) if weight]
    added = counting[0] if changed and counting else 0
    calls = (2, 0) if weights is None else (0, 4)  # for two dtypes
    if not added:
        calls = (0, 0)
    values = {"a": [2 + added, added - 3], "b": [7 + added, 300 + added]}
    assert run_ranks(run, 2) == [(*calls, values)] * 2
