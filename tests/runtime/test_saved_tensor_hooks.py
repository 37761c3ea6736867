"""A user's hooks on saved tensors around a model: the same gradients, and gathered params are not
kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import FunctorchZeroError
from functorch_zero.groups import run_ranks
from functorch_zero.testing import assert_equal_values
from tests.modules import Unit, seeded
from tests.tiers import thinned

WIDTH = 64
BATCHES = [torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(n)) for n in range(6)]
Hooks = Callable[[], AbstractContextManager[Any]]


def scaled_layer() -> Unit:
    """A unit with a unit inside."""
    return Unit(
        lambda net, x: net.inner(x * net.scale).tanh(),
        scale=nn.Parameter(torch.full((WIDTH,), 0.9)),
        inner=nn.Linear(WIDTH, WIDTH),
    )


def model() -> nn.Module:
    return seeded(
        lambda: nn.Sequential(
            scaled_layer(), scaled_layer(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        )
    )


apply, PARAMS, _ = fz.functionalize(model(), units=(Unit, nn.Linear))
LARGEST = WIDTH * WIDTH * 4  # bytes of a weight


def step_with(hooks: Hooks) -> fz.TrainStep:
    def loss_fn(params: Any, buffers: Any, x: Tensor) -> Tensor:
        with hooks():
            return apply(params, buffers, x)[0].square().mean()

    return fz.train_step(loss_fn, optim.sgd(0.1, momentum=0.9))


@contextmanager
def no_hooks() -> Iterator[None]:
    yield


def trained(step: fz.TrainStep, level: int, ranks: int = 2, **options: Any) -> Any:
    def run(group: Any) -> Any:
        sharded = fz.shard(step, level=level, group=group, **options)
        state = sharded.init(PARAMS, {})
        for x in BATCHES:
            state, _ = sharded(state, x.chunk(group.size)[group.rank])
        return sharded.unshard(state).params

    return run_ranks(run, ranks)[0]


@pytest.mark.parametrize("level", thinned([3, 0, 1, 2]))
def test_gradients_are_the_same(level: int) -> None:
    expected = trained(step_with(no_hooks), level)
    assert_equal_values(expected, trained(step_with(save_on_cpu), level), grade="bitwise")


@pytest.mark.parametrize("keeps", [False, True])
def test_gathered_params_are_not_kept(keeps: bool) -> None:
    """At level 3. Hooks that keep what they are given would keep every gathered weight; with
    `reshard_after_forward=False` they may."""
    seen: list[list[int]] = []  # per step, bytes of the storages that the hooks were given

    def pack(x: Tensor) -> Tensor:
        seen[-1].append(x.untyped_storage().nbytes())
        return x

    def hooks() -> AbstractContextManager[Any]:
        seen.append([])
        return saved_tensors_hooks(pack, lambda x: x)

    trained(step_with(hooks), 3, ranks=1, reshard_after_forward=not keeps)
    weights = [sum(n >= LARGEST for n in sizes) for sizes in seen]
    # The first five steps are looked at: there the leaves of one use are compared
    assert weights == ([3] * 6 if keeps else [1] * 5 + [0])
    assert all(len(sizes) >= 6 for sizes in seen), "activations go to the hooks"


@pytest.mark.parametrize("level", thinned([3, 0, 2]))
def test_hooks_that_change_what_they_save(level: int) -> None:
    """They change params in an unsharded step, too."""

    def hooks() -> AbstractContextManager[Any]:
        return saved_tensors_hooks(lambda x: x.bfloat16(), lambda x: x.float())

    if level < 3:
        whole = step_with(hooks)
        state = whole.init(PARAMS, {})
        for x in BATCHES:
            state, _ = whole(state, x)
        assert_equal_values(state.params, trained(whole, level, ranks=1), grade="reordered")
        return
    with pytest.raises(FunctorchZeroError, match=r"hooks on saved tensors bring back.*Remedy"):
        trained(step_with(hooks), level)


def test_hooks_around_a_checkpoint_and_in_one() -> None:
    def remat(params: Any, buffers: Any, x: Tensor) -> Tensor:
        with save_on_cpu():
            return applied(params, buffers, x)[0].square().mean()

    applied, _, _ = fz.functionalize(model(), units=(Unit, nn.Linear), remat=Unit)
    step = fz.train_step(remat, optim.sgd(0.1, momentum=0.9))
    expected = trained(step_with(no_hooks), 3)
    assert_equal_values(expected, trained(step, 3), grade="bitwise")
