"""Gradients of programs that aren't finite: told, or refused, on all ranks alike; scaled losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import MismatchError, NonFiniteError
from functorch_zero.groups import run_ranks
from functorch_zero.testing import assert_equal_values
from tests.tiers import crossed, thinned

LEVELS = [0, 1, 2, 3]


def weights() -> dict[str, Tensor]:
    w = torch.arange(1.0, 8.0, dtype=torch.float64)
    return {"w": w.requires_grad_(), "b": torch.ones(3, dtype=torch.float64).requires_grad_()}


def loss(params: Any, x: Tensor) -> Tensor:
    w, b = fz.unshard(params["w"]), fz.unshard(params["b"])
    return (w.square() * x).sum() + b.sum()


def told(params: Any, x: Tensor, **options: Any) -> Any:
    return fz.value_and_grad(loss, nonfinite="tell", **options)(params, x)


@pytest.mark.parametrize(("level", "bad"), crossed(LEVELS, [torch.nan, torch.inf], n=2))
def test_told_on_all_ranks(level: int, bad: float) -> None:
    good, nans = torch.ones(7).double(), torch.ones(7).double()
    nans[6] = bad
    (value, fine), expected = told(weights(), good)
    assert fine is True and float(value) == 143
    (_, fine), grads = told(weights(), nans)
    assert fine is False and not grads["w"].isfinite().all()

    def run(group: Any) -> None:
        params = fz.shard_tree(weights(), level=level, group=group)
        (_, fine), grads = told(params, good)
        assert fine is True
        assert_equal_values(expected, fz.unshard(grads))
        (_, fine), _ = told(params, nans if group.rank == 1 else good)
        assert fine is False

    run_ranks(run, 3)


def step_of(**options: Any) -> Any:
    sgd = optim.sgd(0.1, momentum=0.9)

    def program(value: Any, x: Tensor) -> Any:
        mean, grads = fz.value_and_grad(loss, **options)(value["net"], x)
        net, opt = sgd.apply(grads, value["opt"], value["net"])
        return {"net": net, "opt": opt}, {"loss": mean}

    return fz.program_step(program, init=lambda net: {"net": net, "opt": sgd.init(net)})


@pytest.mark.parametrize(("level", "donate"), crossed(LEVELS, [True, False], n=2, quick=1))
def test_refused_on_all_ranks(level: int, donate: bool) -> None:
    """With the same words everywhere, in a step that is looked at and in one that isn't; the state
    is as it was, and the ranks go on."""
    step = step_of(nonfinite="raise")
    good, nans = torch.ones(7).double(), torch.full((7,), torch.nan).double()

    def run(group: Any) -> list[str]:
        sharded = fz.shard(step, level=level, group=group, donate=donate)
        state, words = sharded.init(weights()), []
        for _ in range(4):
            before = sharded.unshard(state)
            with pytest.raises(NonFiniteError) as error:
                sharded(state, nans if group.rank == 1 else good)
            words.append(str(error.value))
            assert_equal_values(before, sharded.unshard(state), grade="bitwise")
            state, _ = sharded(state, good)
        return words

    first, *others = run_ranks(run, 3)
    assert all(words == first for words in others)
    for number, words in enumerate(first):
        expected = f"step {number} is not finite: the loss is nan on rank 1; the gradients of w are"
        assert words.startswith(expected) and "Remedy" in words
    with pytest.raises(NonFiniteError, match=r"step 0 is not finite: .* the gradients of w are"):
        step(step.init(weights()), nans)
    with pytest.raises(NonFiniteError, match="the gradient is not finite"):
        fz.value_and_grad(loss, nonfinite="raise")(weights(), nans)


@pytest.mark.parametrize("level", thinned(LEVELS))
def test_a_scale_changes_nothing_but_the_range(level: int) -> None:
    """A power of two rounds nothing; backward sees the scaled loss."""
    seen: list[Tensor] = []

    def watched(params: Any, x: Tensor) -> Tensor:
        result = loss(params, x)
        result.register_hook(seen.append)
        return result

    x = torch.ones(7).double()
    expected = fz.value_and_grad(loss)(weights(), x)
    for scale in (2.0**10, torch.tensor(2.0**10, dtype=torch.float64)):
        got = fz.value_and_grad(watched, scale=scale)(weights(), x)
        assert_equal_values(expected, got, grade="bitwise")
    assert {*map(float, seen)} == {2.0**10}

    def run(group: Any) -> Any:
        params = fz.shard_tree(weights(), level=level, group=group)
        both = [fz.value_and_grad(loss, scale=scale)(params, x) for scale in (None, 2.0**10)]
        return [(value, fz.unshard(grads)) for value, grads in both]

    for plain, scaled in run_ranks(run, 2):
        assert_equal_values(plain, scaled, grade="bitwise")


def test_ranks_give_one_set_of_options() -> None:
    def run(group: Any) -> None:
        x = torch.ones(7).double()
        for options in ({"scale": 2.0 + group.rank}, {"nonfinite": ["tell", "pass"][group.rank]}):
            step = fz.shard(step_of(**options), level=1, group=group)
            state = step.init(weights())
            with pytest.raises(MismatchError, match=r"the options in call 1.*on rank 0"):
                step(state, x)

    run_ranks(run, 2)


def test_options_that_are_none() -> None:
    for scale in (0.0, -1.0, torch.nan, torch.inf):
        with pytest.raises(ValueError, match="scale must be a positive number or None"):
            fz.value_and_grad(loss, scale=scale)
    with pytest.raises(ValueError, match="nonfinite must be one of"):
        fz.value_and_grad(loss, nonfinite="skip")  # type: ignore[arg-type]
