"""The errors of a sharded program name trees, numbers and ways out as their readers know them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import StructureError
from functorch_zero.groups import CountingGroup

torch.manual_seed(0)
generate, FIRST_GEN, _ = fz.functionalize(nn.Linear(3, 4).double())
judge, FIRST_DISC, _ = fz.functionalize(nn.Linear(4, 1).double())
X = torch.randn(8, 3, dtype=torch.float64)
adam = optim.adam(0.1)

Program = Callable[..., Any]


class Gan(NamedTuple):
    gen: Any
    disc: Any
    gen_opt: Any


def init(gen: Any, disc: Any) -> Gan:
    return Gan(gen, disc, adam.init(gen))


def gen_loss(gen: Any, disc: Any, noise: Tensor) -> Tensor:
    return -judge(disc, {}, generate(gen, {}, noise)[0])[0].mean()


def train(value: Gan, noise: Tensor) -> Any:
    loss, grads = fz.value_and_grad(gen_loss)(value.gen, value.disc, noise)
    gen, gen_opt = adam.apply(grads, value.gen_opt, value.gen)
    return value._replace(gen=gen, gen_opt=gen_opt), {"loss": loss}


def refused(error: type[Exception], run: Callable[[], Any]) -> str:
    """The text of an error."""
    with pytest.raises(error) as caught:
        run()
    return str(caught.value)


def test_a_pattern_of_levels_that_names_nothing() -> None:
    group = CountingGroup(2)

    def text(step: Any, level: Any, *args: Any) -> str:
        sharded = fz.shard(step, level=level, group=group)
        return refused(StructureError, lambda: sharded.init(*args))

    gan = fz.program_step(train, init=init)
    assert (
        "path generator, expected one of init's arguments (gen, disc), or a path, such as "
        "disc.weight, disc.bias, gen.weight. Remedy: begin with the name of init's argument; in a "
        "pattern"
    ) in text(gan, {"generator": 3, "disc": 1}, FIRST_GEN, FIRST_DISC)
    alone = fz.train_step(lambda params, buffers, x: params["weight"].sum(), adam)
    words = "path wait, expected a path, such as weight, bias. Remedy: fz.named_leaves(params)"
    assert words in text(alone, {"wait": 3}, FIRST_GEN)
    words = "path disc.weight, got patterns 'gen'. Remedy: add a pattern"
    assert words in text(gan, {"gen": 3}, FIRST_GEN, FIRST_DISC)
