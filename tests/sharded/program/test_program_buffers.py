"""Micro-batches and buffers of a program's gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from optree import tree_map
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import PeerError, StructureError
from functorch_zero.groups import counted, run_ranks
from functorch_zero.step.program import GradientOptions, LossCall
from functorch_zero.testing.equality import assert_equal_values
from tests.tiers import crossed

LEVELS, RANKS = [0, 1, 2, 3], [1, 2, 3]
sgd = optim.sgd(0.1, momentum=0.9)


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


class Trained(NamedTuple):
    params: Any
    buffers: Any
    opt_state: Any


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
        check(
            {
                "sharded tree in buffers=.*Remedy": lambda: fz.value_and_grad(returning)(
                    params, buffers=params
                ),
                "sharded tree in batch=.*Remedy": lambda: fz.value_and_grad(weighted_loss)(
                    params, batch={"teacher": params}
                ),
                "each rank its own buffers": lambda: fz.shard(
                    fz.program_step(average_program, init=average_init),
                    level=3,
                    group=group,
                    sync_buffers="local",
                ),
            }
        )

    check(calls(plain_params))
    run_ranks(run, 2)


def test_errors_about_named_arguments_name_the_rank() -> None:
    def run(group: Any) -> None:
        sharded = fz.shard_tree(plain_params, level=3, group=group)
        for call, error in [
            (LossCall(plain, (), buffers=sharded), StructureError),
            (LossCall(plain, (), batch={"teacher": sharded}), StructureError),
            (LossCall(plain, (), options=GradientOptions(2)), TypeError),
        ]:
            with pytest.raises(error, match=r"on rank 5\. Remedy"):
                call.check(5)
            # One process has no ranks
            with pytest.raises(error) as raised:
                call.check()
            assert "rank" not in str(raised.value).partition("Remedy")[0]

    run_ranks(run, 1)


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


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize(("ranks", "rule"), [(1, "mean"), (2, "local")])
@pytest.mark.parametrize("num_gradients", [None, 1])
def test_a_param_that_is_returned_as_a_buffer_is_as_it_was(
    level: int, ranks: int, rule: Any, num_gradients: int | None
) -> None:
    """The update of a step that donates writes over the param."""

    def loss(params: Any, buffers: Any) -> Any:
        return params["w"].square().sum(), fz.Aux(buffers={"target": params["w"]})

    def program(value: Trained) -> Any:
        params, buffers, opt_state = value
        (mean, _, buffers), grads = fz.value_and_grad(loss)(params, buffers=buffers)
        params, opt_state = sgd.apply(grads, opt_state, params)
        return Trained(params, buffers, opt_state), {"loss": mean}

    def init(params: Any, buffers: Any) -> Trained:
        return Trained(params, buffers, sgd.init(params))

    options: Any = {"buffers": ["buffers"], "num_gradients": num_gradients}
    step = fz.program_step(program, init=init, **options)
    first = {"w": rows(4, 50).requires_grad_()}, {"target": rows(4, 50)}

    def targets(step: Any) -> list[Tensor]:
        state, found = step.init(*first), []
        for _ in range(4):
            state, _ = step(state)
            found.append(state.value.buffers["target"].clone())
        return found

    expected, given = targets(step), {"level": level, "sync_buffers": rule, "donate": True}
    for found in run_ranks(lambda group: targets(fz.shard(step, group=group, **given)), ranks):
        assert_equal_values(expected, found)


@pytest.mark.parametrize("ranks", [None, 1, 2])
def test_buffers_that_stay_and_that_grow(ranks: int | None) -> None:
    """Nobody copies those that a loss leaves as they are. Where nothing is sent, one may become of
    another shape, whole or sharded."""

    def loss(params: Any, *, buffers: Any, batch: Tensor) -> Tensor:
        buffers["seen"] = torch.cat([buffers["seen"], batch])
        return (params["w"] * batch).sum()

    def program(value: Any, batch: Tensor) -> Any:
        results, grads = fz.value_and_grad(loss)(value.params, buffers=value.buffers, batch=batch)
        params, opt_state = sgd.apply(grads, value.opt_state, value.params)
        return Trained(params, results[2], opt_state), {"loss": results[0]}

    def first(params: Any, buffers: Any) -> Trained:
        return Trained(params, buffers, sgd.init(params))

    def run(group: Any) -> None:
        whole = fz.program_step(program, init=first, buffers=["buffers"])
        local = {"group": group, "sync_buffers": "local", "donate": True}
        step = whole if ranks is None else fz.shard(whole, level=1, **local)
        buffers = {"seen": torch.zeros(2), "mask": torch.ones(2)}
        state = step.init({"w": torch.ones(2, requires_grad=True)}, buffers)
        mask = state.value.buffers["mask"]
        for _ in range(2):
            state, _ = step(state, torch.ones(2))
        assert state.value.buffers["seen"].tolist() == [0, 0, 1, 1, 1, 1]
        assert ranks is None or state.value.buffers["mask"] is mask

    run_ranks(run, ranks or 1)
