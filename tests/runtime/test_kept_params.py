"""Params of a loss that it keeps, in a list of its own, until after its pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import StructureError
from functorch_zero.groups import run_ranks
from tests.compare import (
    assert_equal_on_ranks,
)
from tests.models import even
from tests.modules import seeded
from tests.tiers import crossed, thinned

LEVELS = (0, 1, 2, 3)
RANKS = (1, 2)


def step_of(keep: Callable[[Any], Any], accumulate: int = 1) -> tuple[Any, Any, Any]:
    """A step whose loss pulls a weight to its value in the call before."""
    net = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double())
    apply, params, buffers = fz.functionalize(net)
    kept: list[Any] = []

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
        loss = (apply(params, buffers, batch["x"])[0] - 1).square().mean()
        if kept:
            loss = loss + 10 * (params["0.weight"] - kept[-1]).square().sum()
        kept.append(keep(params["0.weight"]))
        return loss

    return fz.train_step(loss_fn, optim.sgd(0.05), accumulate=accumulate), params, buffers


def batches(num: int = 3) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(8, 4, generator=generator, dtype=torch.float64)} for _ in range(num)]


def itself(param: Any) -> Any:
    return param


def clone(param: Any) -> Tensor:
    return fz.unshard(param).detach().clone()


@pytest.mark.parametrize(("level", "ranks"), crossed(LEVELS, RANKS))
def test_a_clone_is_that_of_the_unsharded_step(level: int, ranks: int) -> None:
    assert_equal_on_ranks(lambda: step_of(clone), batches(), even(8, ranks), level=level)


@pytest.mark.parametrize("level", thinned([3, 2, 1, 0]))
def test_a_view_is_that_of_the_unsharded_step_without_donation(level: int) -> None:
    """With it, levels 0 to 2 write the next params over the view."""

    def run(group: Any, donate: bool) -> tuple[Tensor, Tensor]:
        kept: list[Tensor] = []

        def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
            kept.append(params["w"].detach())
            return (params["w"] * batch).square().mean()

        step = fz.train_step(loss_fn, optim.sgd(0.1))
        sharded = fz.shard(step, level=level, group=group, donate=donate)
        state = sharded.init({"w": torch.ones(3, requires_grad=True)})
        state, _ = sharded(state, torch.ones(3))
        return kept[0].clone(), sharded.unshard(state).params["w"].detach()

    for view, _ in run_ranks(lambda group: run(group, donate=False), 2):
        assert torch.equal(view, torch.ones(3))
    # The limit that docs/howto/inside-a-loss.md tells of; a view that stays would lift it
    for view, after in run_ranks(lambda group: run(group, donate=True), 2):
        assert torch.equal(view, torch.ones(3) if level == 3 else after)


@pytest.mark.parametrize(("level", "accumulate"), crossed(LEVELS, (1, 2)))
def test_a_param_of_another_call_is_refused(level: int, accumulate: int) -> None:
    """One of the step before, or of the micro-batch before."""

    def run(group: Any) -> Any:
        step, params, buffers = step_of(itself, accumulate)
        sharded = fz.shard(step, level=level, group=group)
        state = sharded.init(params, buffers)
        for batch in batches(2):
            state, _ = sharded(state, batch)

    with pytest.raises(StructureError, match=r"after the loss.*0.*clone"):
        run_ranks(run, 2)


@pytest.mark.parametrize("level", thinned([3, 2, 1, 0]))
@pytest.mark.parametrize("call", ["step", "failed step", "evaluation", "program"])
def test_a_read_after_the_loss_is_refused(level: int, call: str) -> None:
    """On one rank alone too, which has nobody to gather with: at once."""
    kept: list[Any] = []

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
        kept.append(params["w"])
        loss = (params["w"] * batch).square().mean()
        if call == "failed step":
            raise ValueError("of the loss")
        return {"loss": loss} if call == "evaluation" else loss

    def run(group: Any) -> None:
        params = {"w": torch.ones(3, requires_grad=True)}
        step = fz.shard(fz.train_step(loss_fn, optim.sgd(0.1)), level=level, group=group)
        state = step.init(params)
        try:
            if call == "evaluation":
                fz.shard(fz.eval_step(loss_fn), level=level, group=group)(state, torch.ones(3))
            elif call == "program":
                tree = fz.shard_tree(params, level=level, group=group)
                fz.value_and_grad(lambda p, x: loss_fn(p, {}, x))(tree, torch.ones(3))
            else:
                step(state, torch.ones(3))
        except ValueError as error:
            assert "of the loss" in str(error)
        if group.rank == 0:
            for read in (torch.sum, torch.clone, fz.unshard, Tensor.tolist):
                with pytest.raises(StructureError, match="after the loss"):
                    read(kept[0])
        assert tuple(kept[0].shape) == (3,)

    run_ranks(run, 2)
