"""Wrong losses, batches, params and transforms: an error on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optree import tree_map
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import GroupError, StructureError, TransformError
from functorch_zero.groups import run_ranks
from functorch_zero.model.functionalize import functionalize
from functorch_zero.sharded.api import shard
from functorch_zero.step.loss import Aux
from functorch_zero.step.train import train_step
from tests.models import ZOO, Batch
from tests.sharded.test_shard import LEVELS, SECONDS, batch_for, build
from tests.tiers import crossed, tiers

# wrong input


def one_step(group: Any, loss_fn: Any, level: int) -> None:
    _, params, buffers = ZOO["mlp"].build()
    sharded = shard(train_step(loss_fn, optim.sgd(0.1)), level=level, group=group)
    sharded(sharded.init(params, buffers), batch_for(group))


def fails_everywhere(
    fn: Callable[[Any], Any], error: type[Exception], message: str, ranks: int = 3
) -> None:
    """Every rank ends with an error within seconds: the guilty one with its own, the others with
    what they heard."""
    ended: list[BaseException] = []

    def run(group: Any) -> None:
        try:
            fn(group)
        except BaseException as caught:
            ended.append(caught)
            raise

    start = time.monotonic()
    with pytest.raises(error, match=message):
        run_ranks(run, ranks)
    assert time.monotonic() - start < SECONDS
    assert len(ended) == ranks, [str(e) for e in ended]
    for caught in ended:
        assert isinstance(caught, error | GroupError), caught


@pytest.mark.parametrize(("guilty", "level"), crossed([0, 2], LEVELS))
def test_an_exception_in_one_ranks_loss_ends_all(guilty: int, level: int) -> None:
    def run(group: Any) -> None:
        step, _, _ = build()

        def loss_fn(p: Any, b: Any, batch: Batch) -> Any:
            result = step.loss_fn(p, b, batch)
            if group.rank == guilty:
                raise ArithmeticError("bad batch")
            return result

        one_step(group, loss_fn, level)

    fails_everywhere(run, ArithmeticError, "bad batch")


@pytest.mark.parametrize("level", tiers([3], [0, 1], [2]))
def test_a_batch_on_the_wrong_device(level: int) -> None:
    def run(group: Any) -> None:
        step, params, buffers = build()
        batch = batch_for(group)
        if group.rank == 1:
            batch = {"deep": [{**batch, "x": batch["x"].to("meta")}]}["deep"][0]
        sharded = shard(step, level=level, group=group)
        sharded(sharded.init(params, buffers), batch)

    fails_everywhere(
        run, StructureError, r"wrong device: path x, expected cpu, got meta, on rank 1\. Remedy"
    )


@pytest.mark.parametrize("level", tiers([1], [3, 0], [2]))
def test_a_loss_that_is_no_scalar_on_one_rank(level: int) -> None:
    def run(group: Any) -> None:
        loss_fn, _, _ = ZOO["mlp"].build()

        def wrong(p: Any, b: Any, batch: Batch) -> Tensor:
            loss, _ = loss_fn(p, b, batch)
            return loss.expand(2) if group.rank == 1 else loss

        one_step(group, wrong, level)

    fails_everywhere(run, StructureError, r"not a scalar.*got shape \(2,\).*on rank 1.*Remedy")


@pytest.mark.parametrize("level", tiers([3], [2, 0], [1]))
def test_metrics_that_differ_by_rank(level: int) -> None:
    def run(group: Any) -> None:
        loss_fn, _, _ = ZOO["mlp"].build()

        def other_metrics(p: Any, b: Any, batch: Batch) -> Any:
            return loss_fn(p, b, batch)[0], Aux(
                metrics={"only_here": 1.0} if group.rank == 0 else {}
            )

        one_step(group, other_metrics, level)

    fails_everywhere(run, GroupError, "same metrics")


@pytest.mark.parametrize("level", tiers([3], [0, 1], [2]))
def test_a_parameter_tree_that_does_not_match(level: int) -> None:
    def run(group: Any) -> None:
        apply, params, _ = functionalize(nn.Linear(7, 3))
        del params["bias"]
        step = train_step(lambda p, b, x: apply(p, b, x)[0].sum(), optim.sgd(0.1))
        sharded = shard(step, level=level, group=group)
        sharded(sharded.init(params), torch.ones(2, 7))

    fails_everywhere(run, StructureError, r"params don't fit the model: path bias.*Remedy")


@pytest.mark.parametrize("level", tiers([1], [3, 0], [2]))
def test_params_of_another_model(level: int) -> None:
    """Each would work in the model's place, and an unsharded step refuses them."""

    def run(group: Any) -> None:
        apply, _, _ = functionalize(nn.Linear(7, 3))
        _, params, _ = functionalize(nn.Linear(7, 4))
        step = train_step(lambda p, b, x: apply(p, b, x)[0].sum(), optim.sgd(0.1))
        sharded = shard(step, level=level, group=group)
        sharded(sharded.init(params), torch.ones(2, 7))

    message = r"params don't fit the model: path weight, expected \(3, 7\), got \(4, 7\).*Remedy"
    fails_everywhere(run, StructureError, message)


@pytest.mark.parametrize("level", tiers([3], [2, 0], [1]))
def test_a_falsely_tagged_transform(level: int) -> None:
    lying = optim.pointwise(lambda p: (), lambda u, s, p: (tree_map(lambda x: x / x.norm(), u), s))

    def run(group: Any) -> None:
        loss_fn, params, buffers = ZOO["mlp"].build()
        step = train_step(loss_fn, optim.chain(lying, optim.scale(-0.1)))
        shard(step, level=level, group=group).init(params, buffers)

    fails_everywhere(run, TransformError, "norm")


def test_an_update_of_another_structure() -> None:
    forgets = optim.pointwise(lambda p: (), lambda u, s, p: ({"": None}, s))

    def run(group: Any) -> None:
        loss_fn, params, buffers = ZOO["mlp"].build()
        sharded = shard(train_step(loss_fn, forgets), level=1, group=group)
        sharded(sharded.init(params, buffers), batch_for(group))

    with pytest.raises((StructureError, TransformError, ValueError, KeyError)):
        run_ranks(run, 2)


@pytest.mark.parametrize("level", range(4))
def test_params_in_another_tree_are_refused(level: int) -> None:
    """A dict has its leaves in another order than a module has its parameters."""
    _, params, buffers = functionalize(
        nn.ModuleDict({"up": nn.Linear(4, 4), "down": nn.Linear(4, 4)})
    )
    step = train_step(
        lambda p, b, x: sum(leaf.square().sum() for leaf in p.values()), optim.sgd(0.1)
    )

    def on_a_rank(group):
        sharded = shard(step, level=level, group=group)
        state = sharded.init(params, buffers)
        other = state.replace(params=dict(state.params.items()))
        for use in (
            lambda s: sharded(s, torch.ones(4)),
            sharded.unshard,
            lambda s: fz.describe(sharded, s),
        ):
            with pytest.raises(
                StructureError, match=r"replaced by a whole tree.*got a dict.*layout_like"
            ):
                use(other)

    run_ranks(on_a_rank, 1)


@pytest.mark.parametrize("level", range(4))
def test_a_loss_of_other_tensors_is_refused(level: int) -> None:
    own = torch.ones(3, requires_grad=True)
    step = train_step(lambda p, b, x: (own * x).sum(), optim.adamw(0.1))

    def on_a_rank(group):
        sharded = shard(step, level=level, group=group)
        with pytest.raises(StructureError, match="does not depend on any trained leaf"):
            sharded(sharded.init({"w": torch.ones(3, requires_grad=True)}), torch.ones(3))

    run_ranks(on_a_rank, 1)
