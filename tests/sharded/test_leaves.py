"""Leaves that a step can't keep are refused by path, wherever a tree comes in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import StructureError
from functorch_zero.groups import SingleRank, run_ranks
from functorch_zero.precision import Precision
from tests.compare import (
    assert_equal_on_ranks,
)
from tests.models import even
from tests.modules import seeded
from tests.tiers import crossed, thinned


class Scaled(Tensor):
    """A subclass."""


class Marked(nn.Parameter):
    """A subclass of parameters."""


def plain() -> Tensor:
    return torch.ones(4, requires_grad=True)


def hooked() -> Tensor:
    x = plain()
    x.register_hook(lambda grad: 2 * grad)
    return x


def hooked_after() -> Tensor:
    x = plain()
    x.register_post_accumulate_grad_hook(lambda x: None)
    return x


TREES: dict[str, tuple[Callable[[], Any], str]] = {
    "subclass": (lambda: {"w": plain().detach().as_subclass(Scaled).requires_grad_()}, "path w,"),
    "subclass of Parameter": (lambda: {"w": Marked(torch.ones(4))}, "path w,"),
    "hook": (lambda: {"w": hooked()}, "path w,.*hook"),
    "hook after": (lambda: {"w": hooked_after()}, "path w,.*hook"),
    "number": (lambda: {"v": plain(), "w": 1.0}, "path w,"),
    "same paths": (lambda: {"a.b": plain(), "a": {"b": plain()}}, "path a.b,.*2 leaves"),
    "same names": (lambda: {1: plain(), "1": plain()}, "path 1,.*2 leaves"),
}


def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
    raise AssertionError("no loss is reached")


def by_init(tree: Any, group: Any, level: int) -> None:
    fz.shard(fz.train_step(loss_fn, optim.sgd(0.1)), level=level, group=group).init(tree)


def by_init_of_buffers(tree: Any, group: Any, level: int) -> None:
    step = fz.shard(fz.train_step(loss_fn, optim.sgd(0.1)), level=level, group=group)
    step.init({"w": plain()}, tree)


def by_shard_tree(tree: Any, group: Any, level: int) -> None:
    fz.shard_tree(tree, level=level, group=group)


SHARDED = {"init": by_init, "buffers": by_init_of_buffers, "shard_tree": by_shard_tree}


@pytest.mark.parametrize(("way", "level", "name"), crossed(SHARDED, [0, 1, 2, 3], TREES, n=3))
def test_sharded(way: str, level: int, name: str) -> None:
    make, message = TREES[name]

    def run(group: Any) -> None:
        with pytest.raises(StructureError, match=message):
            SHARDED[way](make(), group, level)

    run_ranks(run, 2)


@pytest.mark.parametrize("what", ["params", "buffers"])
@pytest.mark.parametrize("name", TREES)
def test_unsharded(name: str, what: str) -> None:
    make, message = TREES[name]
    step = fz.train_step(loss_fn, optim.sgd(0.1))
    with pytest.raises(StructureError, match=message):
        if what == "params":
            step.init(make())
        else:
            step.init({"w": plain()}, make())


@pytest.mark.parametrize("make", [hooked, hooked_after])
def test_an_unsharded_program(make: Callable[[], Tensor]) -> None:
    with pytest.raises(StructureError, match=r"path w,.*hook"):
        fz.value_and_grad(lambda tree: tree["w"].sum())({"w": make()})


@pytest.mark.parametrize("name", ["subclass", "subclass of Parameter", "hook", "hook after"])
def test_a_module(name: str) -> None:
    make, _ = TREES[name]
    model = nn.Sequential(nn.Linear(2, 2))
    x = make()["w"]
    model[0].bias = x if isinstance(x, nn.Parameter) else nn.Parameter(x)
    if "hook" in name:
        hook = lambda *args: None
        if name == "hook":
            model[0].bias.register_hook(hook)
        else:
            model[0].bias.register_post_accumulate_grad_hook(hook)
    with pytest.raises(StructureError, match=r"path 0\.bias,.*Remedy"):
        fz.functionalize(model)


def test_a_module_with_a_buffer_of_a_subclass() -> None:
    model = nn.BatchNorm1d(2)
    model.running_mean = model.running_mean.as_subclass(Scaled)
    with pytest.raises(StructureError, match=r"path running_mean,.*Remedy"):
        fz.functionalize(model)


def net(precision: Precision | None) -> Any:
    model = seeded(lambda: nn.Linear(3, 2, dtype=torch.float64))
    return fz.functionalize(model, precision=precision)


HALF = {
    "compute": Precision(compute=torch.float32),
    "all": Precision(compute=torch.bfloat16, reduce=torch.float32, output=torch.float64),
}


@pytest.mark.parametrize("level", thinned([3, 2, 1, 0]))
@pytest.mark.parametrize("name", HALF)
def test_a_plain_dict_has_lost_its_precision(name: str, level: int) -> None:
    apply, params, _ = net(HALF[name])
    step = fz.train_step(lambda p, b, x: apply(p, {}, x)[0].double().mean(), optim.sgd(0.1))

    def run(group: Any) -> None:
        sharded = fz.shard(step, level=level, group=group)
        state = sharded.init(dict(params))
        with pytest.raises(StructureError, match=r"path weight,.*float.*Remedy"):
            sharded(state, torch.ones(4, 3, dtype=torch.float64))

    run_ranks(run, 2)


POLICIES = {
    "storage": Precision(storage=torch.float32),
    "compute": Precision(compute=torch.float32),
    "gather": Precision(gather=torch.float32),
    "reduce": Precision(reduce=torch.float32),
    "buffers": Precision(buffers=torch.float32),
    "output": Precision(output=torch.float32),
}
ROUNDS = ("compute", "gather", "reduce")  # those that leaves and gradients are rounded by


def loss_of(apply: Any, params: Any, x: Tensor) -> Tensor:
    weight = next(iter(params.values()))
    return apply(params, {}, x.to(weight.dtype))[0].double().square().mean()


@pytest.mark.parametrize("where", ["step", "evaluation", "step.shard"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("field", POLICIES)
def test_a_state_whose_params_became_a_plain_dict(field: str, nested: bool, where: str) -> None:
    """Sharded states refuse any other tree."""
    apply, params, _ = net(POLICIES[field])
    step = fz.train_step(lambda p, b, x: loss_of(apply, p, x), optim.sgd(0.1))
    x = torch.ones(4, 3, dtype=torch.float64)
    state = step.init([params] if nested else params)
    state = state.replace(params=[dict(params)] if nested else dict(params))
    path = "0.weight" if nested else "weight"
    with pytest.raises(StructureError, match=rf"lost the model's Precision.*path {path},.*Remedy"):
        if where == "step":
            step(state, x)
        elif where == "evaluation":
            fz.eval_step(lambda p, b, x: {"loss": loss_of(apply, p, x)})(state, x)
        else:
            fz.shard(step, level=1, group=SingleRank()).shard(state)


@pytest.mark.parametrize(("field", "level"), crossed(POLICIES, [None, 0, 1, 2, 3]))
def test_a_plain_dict_from_the_start(field: str, level: int | None) -> None:
    """Unsharded, `apply` casts each leaf as the policy says, and rounds its gradient. Sharded, a
    policy that rounds is refused, and one that doesn't is none."""
    apply, params, _ = net(POLICIES[field])
    x = torch.rand(4, 3, dtype=torch.float64)
    expected = fz.value_and_grad(lambda p, x: loss_of(apply, p, x))(params, x)
    program = fz.value_and_grad(lambda p, x: loss_of(apply, p, x))

    def run(group: Any) -> Any:
        tree = dict(params)
        if level is not None:
            tree = fz.shard_tree(tree, level=level, group=group)
        value, grads = program(tree, x)
        return value, dict(fz.unshard(grads))

    if level is not None and field in ROUNDS:
        with pytest.raises(
            StructureError, match=r"lost the model's Precision.*path weight,.*Remedy"
        ):
            run_ranks(run, 1)
        return
    value, grads = run_ranks(run, 1)[0]
    assert torch.equal(value, expected[0])
    assert all(torch.equal(grads[path], expected[1][path]) for path in params)


def test_torch_func_differentiates_plain_dicts() -> None:
    """Inside a transform no gradient is the step's own, and none is rounded."""
    apply, params, _ = net(POLICIES["reduce"])
    x = torch.rand(4, 3, dtype=torch.float64)
    leaves = {path: leaf.detach() for path, leaf in params.items()}
    grads = torch.func.grad(lambda p: loss_of(apply, p, x))(leaves)
    plain = net(None)
    expected = torch.func.grad(lambda p: loss_of(plain[0], p, x))(leaves)
    assert all(torch.equal(grads[path], expected[path]) for path in leaves)


@pytest.mark.parametrize("field", ROUNDS)
@pytest.mark.parametrize("level", [0, 3])
def test_a_plain_dict_of_lazy_params_keeps_its_precision(level: int, field: str) -> None:
    """Those that a loss is given know their policies already."""

    def build() -> Any:
        apply, params, buffers = net(POLICIES[field])

        def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
            return apply({**params}, {}, batch["x"])[0].double().square().mean()

        return fz.train_step(loss_fn, optim.sgd(0.1)), params, buffers

    batches = [{"x": torch.ones(4, 3, dtype=torch.float64)}]
    assert_equal_on_ranks(build, batches, even(4, 2), level=level, tolerance=1e-5)
