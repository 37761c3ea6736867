"""Deferred values don't depend on the leaves that are made with them: whatever way an initialiser
draws, sharded = unsharded = the same module with values, or an error."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from functorch_zero import optim
from functorch_zero.errors import StructureError
from functorch_zero.groups import run_ranks
from functorch_zero.model import deferred_init as module
from functorch_zero.model.deferred_init import deferred_init
from functorch_zero.model.functionalize import functionalize
from functorch_zero.sharded.api import shard
from functorch_zero.step.train import train_step
from tests.tiers import crossed

SHAPE = (6, 8)  # from 16 elements on torch draws in another way, if they are contiguous


def made_by(factory: Callable[..., Tensor], *before: Any, **after: Any) -> Callable[..., None]:
    def fill(x: Tensor) -> None:
        x.copy_(factory(*before, x.shape, device=x.device, **after))

    return fill


def on_its_device(x: Tensor) -> None:
    with x.device:
        x.copy_(torch.randn(x.shape))


def with_a_generator(x: Tensor) -> None:
    generator = torch.Generator().manual_seed(3)
    x.normal_(generator=generator)
    x.add_(torch.randn(x.shape, device=x.device, generator=generator))


def by_views(x: Tensor) -> None:
    nn.init.normal_(x[:, :5])
    nn.init.normal_(x[:, 5:])
    nn.init.xavier_uniform_(x[:4].t())


def spread_by_a_tensor(x: Tensor) -> None:
    x.copy_(torch.normal(torch.zeros_like(x), torch.full_like(x, 0.1)))


DRAWS: dict[str, Callable[[Tensor], Any]] = {
    "randn": made_by(torch.randn),
    "rand": made_by(torch.rand),
    "randint": made_by(torch.randint, 10),
    "normal": made_by(torch.normal, 0.0, 1.0),
    "randperm": lambda x: x.copy_(torch.randperm(x.numel(), device=x.device).view_as(x)),
    "empty": lambda x: x.copy_(torch.empty(x.shape, device=x.device).normal_()),
    "like": lambda x: x.copy_(torch.rand_like(x)).add_(torch.randint_like(x, 4)),
    "like, on the CPU": lambda x: x.copy_(torch.randn_like(x, device="cpu")),
    "new": lambda x: x.copy_(x.new_empty(SHAPE).exponential_()),
    "views": by_views,
    "flipped": lambda x: x.copy_(torch.randn_like(x.t()).t()),
    "in place of data": lambda x: setattr(x, "data", torch.randn(x.shape, device=x.device)),
    "generator": with_a_generator,
    "the default generator": lambda x: x.uniform_(generator=torch.default_generator),
    "device context": on_its_device,
    "bernoulli": lambda x: x.copy_(torch.bernoulli(torch.full_like(x, 0.3))),
    "normal, by tensors": spread_by_a_tensor,
    "dropout": lambda x: x.copy_(nn.functional.dropout(torch.ones_like(x), 0.4)),
    "orthogonal": nn.init.orthogonal_,
    "truncated": nn.init.trunc_normal_,
    "sparse": lambda x: nn.init.sparse_(x, 0.5),
    "Python's": lambda x: x.fill_(random.random()),
    "numpy's": lambda x: x.copy_(torch.from_numpy(np.random.standard_normal(x.shape))),
}


class Filled(nn.Module):
    """Its leaves are filled in turn, from one stream of random numbers."""

    def __init__(self, draw: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.draw = draw
        self.a, self.b, self.c = (nn.Parameter(torch.empty(SHAPE)) for _ in range(3))

    def reset_parameters(self) -> None:
        for x in (self.a, self.b, self.c):
            with torch.no_grad():
                self.draw(x)
                x.add_(torch.rand_like(x))  # whatever the draw has left of the stream

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.a + self.b + self.c).sum()


def plain(draw: Callable[[Tensor], Any]) -> dict[str, Tensor]:
    """The values of a module that was never on the meta device."""
    model = Filled(draw)
    with module._seeded(0, "", torch.device("cpu")):
        model.reset_parameters()
    return {path: p.detach() for path, p in model.named_parameters()}


def prepared(draw: Callable[[Tensor], Any], frozen: str = "") -> tuple[Any, ...]:
    with torch.device("meta"):
        model = Filled(draw)
    apply, params, buffers = functionalize(model)
    step = train_step(
        lambda p, b, x: apply(p, b, x)[0].mean(),
        optim.sgd(0.1),
        trainable=lambda path, leaf: path not in frozen,
    )
    return step, params, buffers, deferred_init(model)


def check(params: Any, name: str) -> None:
    for path, want in plain(DRAWS[name]).items():
        assert torch.equal(params[path], want), f"{name}: {path}"


@pytest.mark.parametrize("name", DRAWS)
def test_each_leaf_alone_has_the_values_of_a_module_with_values(name: str) -> None:
    _, params, _, values = prepared(DRAWS[name])
    check(values.fill(dict(params)), name)
    check({path: values.fill({path: leaf})[path] for path, leaf in params.items()}, name)


@pytest.mark.parametrize(("level", "ranks"), crossed((0, 1, 2, 3), [1, 2], quick=1))
def test_sharded_values_are_those_of_a_module_with_values(level: int, ranks: int) -> None:
    """Frozen leaves are made apart from trained ones: each in its turn."""

    def run(group: Any) -> None:
        for i, name in enumerate(DRAWS):
            step, params, buffers, values = prepared(DRAWS[name], frozen="abc"[i % 3])
            sharded = shard(step, level=level, group=group)
            state = sharded.init(params, buffers, values=values)
            check(sharded.unshard(state).params, name)

    run_ranks(run, ranks)


def test_a_draw_that_is_always_on_the_meta_device_counts_for_each_leaf() -> None:
    """It can't be told from a draw for a leaf that is not wanted."""
    _, params, _, values = prepared(
        lambda x: (torch.empty(SHAPE, device="meta").normal_(), x.normal_())
    )
    together = values.fill(dict(params))
    for path, leaf in params.items():
        assert torch.equal(values.fill({path: leaf})[path], together[path])


def test_the_global_random_states_are_left_alone() -> None:
    python, numpys = random.getstate(), np.random.get_state()[1].copy()
    _, params, _, values = prepared(lambda x: x.fill_(random.random() + np.random.rand()))
    values.fill(dict(params))
    assert random.getstate() == python and (np.random.get_state()[1] == numpys).all()


class Reading(nn.Module):
    """An initialiser that fills one leaf, and another with the help of its values."""

    def __init__(self, read: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.read = read
        self.a, self.b = (nn.Parameter(torch.empty(8, 8)) for _ in range(2))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.a.uniform_()
        self.b.normal_()
        self.read(self.a, self.b)


READS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "copy": lambda a, b: b.copy_(a),
    "in place": lambda a, b: b.mul_(a),
    "in place, one number": lambda a, b: b.div_(a.sum()),
    "fill": lambda a, b: b.fill_(a.sum()),
    "foreach": lambda a, b: torch._foreach_mul_([b], [a * 2]),
    "masked": lambda a, b: b.masked_fill_(a > 0.5, 0.0),
    "part": lambda a, b: b.index_put_((torch.tensor([0]),), a[:1]),
    "matmul": lambda a, b: b.copy_(b @ a),
    "out": lambda a, b: torch.mul(a, 2, out=b.data),
    "another spread": lambda a, b: b.copy_(torch.normal(b, a.abs())),
    "number": lambda a, b: b.fill_(float(a.max())),
    "question": lambda a, b: b.fill_(1.0) if a.max() > 0 else b.fill_(2.0),
    "as many draws as values say": lambda a, b: (torch.poisson(a.abs() * 50), b.normal_()),
}


@pytest.mark.parametrize("name", READS)
def test_an_initialiser_may_read_what_it_has_written(name: str) -> None:
    with torch.device("meta"):
        model = Reading(READS[name])
    values, params = deferred_init(model), dict(model.named_parameters())
    together = values.fill(params)["b"]
    assert torch.equal(values.fill({"b": params["b"]})["b"], together)
    plain = Reading(READS[name])
    with module._seeded(0, "", torch.device("cpu")):
        plain.reset_parameters()
    assert torch.equal(together, plain.b)


class Outer(nn.Module):
    """Its initialiser fills a leaf with the help of another module's."""

    def __init__(self, read: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.read = read
        self.inner = nn.Linear(8, 8)
        self.b = nn.Parameter(torch.empty(8, 8))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.b.normal_()
        self.read(self.inner.weight, self.b)


@pytest.mark.parametrize("name", READS)
def test_an_initialiser_that_reads_another_modules_leaf_is_refused(name: str) -> None:
    """Where that has no values now, as one that is made on its own."""
    with torch.device("meta"):
        model = Outer(READS[name])
    values, params = deferred_init(model), dict(model.named_parameters())
    assert not values.fill(params)["b"].isnan().any()
    with pytest.raises(StructureError, match=r"reads a leaf .*path \(root\).*Remedy: initialise"):
        values.fill({"b": params["b"]})


def test_a_generator_that_has_drawn_before_is_refused() -> None:
    generator = torch.Generator().manual_seed(0)
    _, params, _, values = prepared(lambda x: x.normal_(generator=generator))
    values.fill(dict(params))
    with pytest.raises(StructureError, match=r"generator that has drawn before.*manual_seed"):
        values.fill(dict(params))
