"""The library's own proofs name the mistake that explains a difference: of losses as users write
them, and planted in what runs on ranks."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optree import tree_map
from torch import Tensor

import functorch_zero as fz
import functorch_zero.testing.step as proof_module
from functorch_zero import optim
from functorch_zero.groups import SingleRank
from functorch_zero.optim import arithmetic
from functorch_zero.optim.base import Transform, pointwise
from functorch_zero.optim.optimizers import adam as adam_module
from functorch_zero.optim.transforms import moments
from functorch_zero.sharded.program.step import ShardedStep
from functorch_zero.testing import assert_sharded_equals_unsharded
from tests.tiers import crossed, thinned

torch.manual_seed(0)
X = torch.randn(12, 5, dtype=torch.float64)
LossOfRows = Callable[[Tensor], Tensor]


def first() -> dict[str, Tensor]:
    return {
        "w": torch.randn(5, dtype=torch.float64, requires_grad=True),
        "bias": torch.zeros((), dtype=torch.float64, requires_grad=True),
        "frozen": torch.ones(2, dtype=torch.float64),
    }


def of_rows(reduced: LossOfRows) -> Callable[..., Tensor]:
    def loss(params: Any, *rest: Any) -> Tensor:
        return reduced((rest[-1] @ params["w"] + params["bias"] - 1).square())

    return loss


def training_step(reduced: LossOfRows, optimizer: Any, **options: Any) -> tuple[Any, ...]:
    return fz.train_step(of_rows(reduced), optimizer, **options), first(), {}


def program(reduced: LossOfRows, optimizer: Any) -> tuple[Any, ...]:
    def step(value: Any, x: Tensor) -> Any:
        params, state = value
        found, grads = fz.value_and_grad(of_rows(reduced))(params, x)
        params, state = optimizer.apply(grads, state, params)
        return (params, state), {"loss": found}

    return fz.program_step(step, init=lambda params: (params, optimizer.init(params))), first()


def story(arguments: tuple[Any, ...], ranks: int, **options: Any) -> str:
    """The error of a proof, with its notes."""
    options = {"levels": [1]} | options
    with pytest.raises(AssertionError) as caught:
        assert_sharded_equals_unsharded(*arguments, [X, X, X], ranks=[ranks], **options)
    return "\n".join([str(caught.value), *caught.value.__notes__])


# Losses


def twice(rows: Tensor) -> Tensor:
    return rows.mean() / len(rows)


@pytest.mark.parametrize(("make", "ranks"), crossed([training_step, program], [2, 3]))
def test_updates_of_a_sum(make: Any, ranks: int) -> None:
    found = story(make(torch.sum, optim.sgd(1e-3)), ranks)
    number = f"the reference's, {ranks} being the number of ranks"
    assert f"Grade: reordered. What differs is 1/{ranks} of {number}" in found
    assert "If a loss is a sum over the batch" in found and "fz.Aux(weight=...)" in found
    found = story(make(twice, optim.sgd(0.1, momentum=0.9)), ranks)
    assert f"What differs is {ranks} times {number}" in found


def test_a_mesh_has_as_many_parts_as_its_batch() -> None:
    arguments = training_step(torch.sum, optim.sgd(1e-3))
    found = story(arguments, 4, shard_size=2, same_data="replicate")
    assert "1/2 of the reference's, 2 being the number of parts of the batch" in found


@pytest.mark.parametrize("make", thinned([program, training_step]))
def test_the_loss_of_a_step_whose_updates_have_one_size(make: Any) -> None:
    found = story(make(torch.sum, optim.adam(1e-3)), 2)
    assert found.startswith("the updates differ at step 0, level 1, ranks 2")
    _, _, besides = found.partition(
        "Besides, metrics differ at step 0, level 1, ranks 2: leaf loss"
    )
    assert "What differs is 1/2 of the reference's" in besides


def test_other_differences_have_no_such_cause() -> None:
    def penalty(params: Any, *rest: Any) -> Tensor:
        penalty: Tensor = params["bias"].exp()
        return of_rows(torch.sum)(params, *rest) + penalty

    # The sum of rows alone is divided
    found = story((fz.train_step(penalty, optim.sgd(1e-3)), first(), {}), 2)
    assert "1/2" not in found and "If a loss is a sum over the batch" in found
    coupled = training_step(lambda rows: rows.mean() * rows.std(), optim.sgd(1e-3))
    found = story(coupled, 2)
    # Before `per_rank`, by which it would pass
    assert 0 <= found.index("let it gather that") < found.index("per_rank=True")


def counted(x: Tensor) -> Tensor:
    """Which rows count: four of the first half, and one of the second."""
    equal: Tensor = x[:, None] == X[[0, 1, 2, 3, 11]]
    return equal.all(2).any(1)


def masked(params: Any, buffers: Any, x: Tensor) -> Tensor:
    loss: Tensor = of_rows(torch.mean)(params, x[counted(x)])
    return loss


def weighted(params: Any, buffers: Any, x: Tensor) -> Any:
    return masked(params, buffers, x), fz.Aux(weight=counted(x).sum())


@pytest.mark.parametrize("optimizer", thinned([optim.adam(0.1), optim.sgd(0.1)]))
def test_weights_that_are_left_out(optimizer: Transform) -> None:
    found = story((fz.train_step(masked, optimizer), first(), {}), 2, levels=[3])
    assert "What differs is the plain mean over the ranks' parts" in found
    assert "likely weights, numbers of rows or tokens, are left out" in found
    right = fz.train_step(weighted, optimizer)
    assert_sharded_equals_unsharded(right, first(), {}, [X, X], levels=[3], ranks=[2])


# Mistakes on ranks, each of which gets another step than the one that is proved


def another(step: Any, optimizer: Any = None, loss: Any = None) -> Any:
    return fz.train_step(loss or step.loss_fn, optimizer or step.optimizer)


def times(factor: float) -> Callable[[Any], Any]:
    return lambda step: another(step, loss=lambda *given: factor * step.loss_fn(*given))


def part_0_alone(step: Any) -> Any:
    """The weight of all other parts is zero."""

    def loss(params: Any, buffers: Any, x: Tensor) -> Any:
        is_first = bool((x[0] == X[:4]).all(1).any())
        return step.loss_fn(params, buffers, x), fz.Aux(weight=float(is_first))

    return another(step, loss=loss)


def stale(step: Any) -> Any:
    def init(params: Any) -> Any:
        return tree_map(torch.zeros_like, params)

    def update(updates: Any, state: Any, params: Any) -> Any:
        return state, updates

    return another(step, optim.chain(step.optimizer, pointwise(init, update)))


def decayed(step: Any) -> Any:
    return another(step, optim.chain(optim.add_decayed_weights(0.1), step.optimizer))


PLANTED: dict[str, tuple[Any, Any, str]] = {
    "times the ranks": (optim.sgd(0.1), times(3), "3 times the reference's, 3 being .* of ranks"),
    "times k": (optim.sgd(0.1), times(4), "4 times the reference's, 4 being .* of micro-batches"),
    "part 0": (optim.sgd(0.1), part_0_alone, "what part 0 of the rows gives alone"),
    "part 0, by Adam": (optim.adam(0.1), part_0_alone, "what part 0 of the rows gives alone"),
    "stale": (optim.sgd(0.1), stale, "zero now, and the reference's in the next step: stale"),
    "decay": (
        optim.sgd(0.1),
        decayed,
        r"the reference's and -0\.01 times the params: likely by weight decay",
    ),
}


@pytest.mark.parametrize("name", thinned(PLANTED))
def test_a_mistake_on_ranks_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    optimizer, wrong, cause = PLANTED[name]
    step, *rest = training_step(torch.mean, optimizer, accumulate=4)
    monkeypatch.setattr(proof_module, "shard", lambda _, **given: fz.shard(wrong(step), **given))
    found = story((step, *rest), 3)
    assert re.search(f"What differs is {cause}", found), found


@pytest.mark.parametrize(
    ("optimizer", "cause"),
    thinned(
        [
            (optim.adam(0.1), "what each rank's own rows give: not reduced"),
            (optim.sgd(0.1), "each rank's own, whose mean is the reference's: not reduced"),
        ],
        rows=True,
    ),
)
def test_ranks_that_do_not_reduce(
    monkeypatch: pytest.MonkeyPatch, optimizer: Transform, cause: str
) -> None:
    def alone(step: Any, *, group: Any, **given: Any) -> Any:
        return fz.shard(step, group=SingleRank(), **given)

    monkeypatch.setattr(proof_module, "shard", alone)
    found = story(training_step(torch.mean, optimizer), 3)
    assert f"What differs is {cause}" in found


def test_a_bias_correction_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    right = arithmetic.bias_correction

    def ahead(decay: Any, count: Tensor) -> Tensor:
        on_a_rank = threading.current_thread() is not threading.main_thread()
        return right(decay, count + on_a_rank)

    for module in (adam_module, moments):
        monkeypatch.setattr(module, "bias_correction", ahead)
    arguments = training_step(
        torch.mean, optim.chain(optim.clip_by_global_norm(9.0), optim.adam(0.1))
    )
    assert "Adam's bias correction is a step ahead" in story(arguments, 2, donate=False)


@pytest.mark.parametrize(
    ("change", "cause"),
    thinned(
        [
            (
                lambda old, new: 2 * new - old,
                "2 times the reference's, 2 being the number of ranks",
            ),
            (lambda old, new: old, "missing on rank 1 only"),
        ],
        rows=True,
    ),
)
def test_a_mistake_of_one_rank(monkeypatch: pytest.MonkeyPatch, change: Any, cause: str) -> None:
    unshard = ShardedStep.unshard
    before: dict[str, Any] = {}  # rank 1's params

    def wrong(self: ShardedStep, state: Any) -> Any:
        whole = unshard(self, state)
        if self.group.rank != 1:
            return whole
        old, before["params"] = before.get("params"), whole.params
        return whole.replace(params=tree_map(change, old, whole.params)) if old else whole

    monkeypatch.setattr(ShardedStep, "unshard", wrong)
    found = story(training_step(torch.mean, optim.sgd(0.1)), 2)
    assert "rank 0's results and this rank's differ at step 0, level 1, ranks 2, rank 1" in found
    assert f"What differs is {cause}" in found
