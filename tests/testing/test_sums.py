"""A loss that is a sum over its batch is told by the size of its updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.testing import assert_sharded_equals_unsharded

torch.manual_seed(0)
X = torch.randn(12, 3, dtype=torch.float64)
LossOfRows = Callable[[Tensor], Tensor]


def first() -> dict[str, Tensor]:
    return {
        "w": torch.randn(3, dtype=torch.float64, requires_grad=True),
        "bias": torch.zeros((), dtype=torch.float64, requires_grad=True),
        "frozen": torch.ones(2, dtype=torch.float64),
    }


def of_rows(reduced: LossOfRows) -> Callable[..., Tensor]:
    def loss(params: Any, *rest: Any) -> Tensor:
        return reduced((rest[-1] @ params["w"] + params["bias"] - 1).square())

    return loss


def training_step(reduced: LossOfRows, optimizer: Any) -> tuple[Any, ...]:
    return fz.train_step(of_rows(reduced), optimizer), first(), {}


def program(reduced: LossOfRows, optimizer: Any) -> tuple[Any, ...]:
    def step(value: Any, x: Tensor) -> Any:
        params, state = value
        found, grads = fz.value_and_grad(of_rows(reduced))(params, x)
        params, state = optimizer.apply(grads, state, params)
        return (params, state), {"loss": found}

    return fz.program_step(step, init=lambda params: (params, optimizer.init(params))), first()


def hints(arguments: tuple[Any, ...], ranks: int, **options: Any) -> str:
    with pytest.raises(AssertionError) as caught:
        assert_sharded_equals_unsharded(*arguments, [X, X], levels=[1], ranks=[ranks], **options)
    return "".join(caught.value.__notes__)


def twice(rows: Tensor) -> Tensor:
    return rows.mean() / len(rows)


@pytest.mark.parametrize("make", [training_step, program])
@pytest.mark.parametrize("ranks", [2, 3])
def test_updates_of_a_sum(make: Any, ranks: int) -> None:
    found = hints(make(torch.sum, optim.sgd(1e-3)), ranks)
    assert f"All updates are 1/{ranks} of the unsharded step's, on {ranks} parts" in found
    assert "is a sum over its batch" in found and "fz.Aux(weight=...)" in found
    found = hints(make(twice, optim.sgd(0.1, momentum=0.9)), ranks)
    assert f"All updates are {ranks} times the unsharded step's" in found
    assert "divided by the number of rows again" in found


def test_a_mesh_has_as_many_parts_as_its_batch() -> None:
    arguments = training_step(torch.sum, optim.sgd(1e-3))
    found = hints(arguments, 4, shard_size=2, same_data="replicate")
    assert "1/2 of the unsharded step's, on 2 parts" in found


def test_the_loss_of_a_step_whose_updates_have_one_size() -> None:
    found = hints(training_step(torch.sum, optim.adam(1e-3)), 2)
    assert "The loss is 1/2 of the unsharded step's" in found
    # Of a program nobody knows which loss a metric is
    found = hints(program(torch.sum, optim.adam(1e-3)), 2)
    assert "1/2" not in found and "If a loss is a sum" in found


def test_other_differences_have_no_such_cause() -> None:
    def penalty(params: Any, *rest: Any) -> Tensor:
        return of_rows(torch.sum)(params, *rest) + params["bias"].exp()

    # The sum of rows alone is divided
    found = hints((fz.train_step(penalty, optim.sgd(1e-3)), first(), {}), 2)
    assert "1/2" not in found and "If a loss is a sum over the batch" in found
    coupled = training_step(lambda rows: rows.mean() * rows.std(), optim.sgd(1e-3))
    found = hints(coupled, 2)
    # Before `per_rank`, by which it would pass
    assert 0 <= found.index("let it gather that") < found.index("per_rank=True")
