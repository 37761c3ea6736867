"""Modules that refer to their params and buffers in further ways: right, or refused by name."""

from __future__ import annotations

import copy
import functools
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from functorch_zero import optim
from functorch_zero.errors import StructureError
from functorch_zero.groups import run_ranks
from functorch_zero.model.functionalize import functionalize
from functorch_zero.sharded.api import shard
from functorch_zero.step.evaluate import eval_step
from functorch_zero.step.loss import Aux
from functorch_zero.step.program import value_and_grad
from functorch_zero.step.train import train_step
from tests.compare import (
    assert_equal_on_ranks,
    train,
)
from tests.models import even
from tests.modules import seeded
from tests.tiers import crossed

Look = Callable[["Net"], Any]  # finds a tensor by the further reference


class Net(nn.Module):
    """A layer, a buffer that counts, and a further reference to weight, bias and buffer."""

    def __init__(self, refer: Callable[[Net], None], look: Look) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3, dtype=torch.float64)
        self.outer = nn.Linear(3, 2, dtype=torch.float64)
        self.register_buffer("scale", torch.ones(3, dtype=torch.float64))
        self.look = look
        refer(self)

    def forward(self, x: Tensor) -> Tensor:
        weight, scale = self.look(self)
        if self.training:
            scale.mul_(1.25)
        return self.outer((x @ weight.T + self.inner(x)).tanh() * scale * self.scale)


@dataclass
class Record:
    """A plain object."""

    weight: Any
    scale: Any


@dataclass(frozen=True)
class Frozen:
    """One that refuses new values."""

    weight: Any
    scale: Any


class Slotted:
    """An object without a `__dict__`."""

    __slots__ = ("pair",)

    def __init__(self, pair: Any) -> None:
        self.pair = pair


class Private:
    """One whose slot has a private name."""

    __slots__ = ("__pair",)

    def __init__(self, pair: Any) -> None:
        self.__pair = pair

    def pair(self) -> Any:
        return self.__pair


class Pair(NamedTuple):
    """A tuple with names."""

    weight: Any
    scale: Any


class Kept(nn.Module):
    """A module that shares a weight, and that nobody registers."""

    def __init__(self, weight: nn.Parameter, scale: Tensor) -> None:
        super().__init__()
        self.weight = weight
        self.register_buffer("scale", scale)


def pair_of(net: Net) -> list[Any]:
    return [net.inner.weight, net.scale]


def refer(make: Callable[[Net], Any]) -> Callable[[Net], None]:
    """Keeps it as a plain attribute."""
    return lambda net: vars(net).__setitem__("kept", make(net))


RIGHT: dict[str, tuple[Callable[[Net], None], Look]] = {
    "list": (refer(pair_of), lambda net: net.kept),
    "deque": (refer(lambda net: deque(pair_of(net))), lambda net: net.kept),
    "nested dict": (
        refer(lambda net: {"a": OrderedDict(b=pair_of(net))}),
        lambda net: net.kept["a"]["b"],
    ),
    "list in a tuple": (refer(lambda net: (1, pair_of(net))), lambda net: net.kept[1]),
    "dataclass": (
        refer(lambda net: Record(*pair_of(net))),
        lambda net: (net.kept.weight, net.kept.scale),
    ),
    "frozen dataclass": (
        refer(lambda net: Frozen(*pair_of(net))),
        lambda net: (net.kept.weight, net.kept.scale),
    ),
    "second attribute": (
        lambda net: vars(net).update(w=net.inner.weight, s=net.scale),
        lambda net: (net.w, net.s),
    ),
    "attribute of another module": (
        lambda net: vars(net.outer).update(w=net.inner.weight, s=net.scale),
        lambda net: (net.outer.w, net.outer.s),
    ),
    "second registration": (
        lambda net: (
            setattr(net, "w", net.inner.weight),
            net.register_buffer("s", net.scale),
        ),
        lambda net: (net.w, net.s),
    ),
    "list of modules": (
        refer(lambda net: [net.inner, net]),
        lambda net: (net.kept[0].weight, net.kept[1].scale),
    ),
    "unregistered module": (
        refer(lambda net: [Kept(*pair_of(net))]),
        lambda net: (net.kept[0].weight, net.kept[0].scale),
    ),
    "weak reference to the model": (refer(weakref.ref), lambda net: pair_of(net.kept())),
    "closure over a weak reference": (
        refer(lambda net: closed_over(weakref.ref(net))),
        lambda net: pair_of(net.kept()()),
    ),
    "method": (
        refer(lambda net: net.inner.state_dict),
        lambda net: (net.kept(keep_vars=True)["weight"], net.scale),
    ),
}

REFUSED: dict[str, tuple[Callable[[Net], None], Look]] = {
    "tuple": (refer(lambda net: tuple(pair_of(net))), lambda net: net.kept),
    "named tuple": (refer(lambda net: Pair(*pair_of(net))), lambda net: net.kept),
    "tuple in a dict": (
        refer(lambda net: {"a": tuple(pair_of(net))}),
        lambda net: net.kept["a"],
    ),
    "set": (refer(lambda net: {net.inner.weight}), lambda net: (next(iter(net.kept)), net.scale)),
    "key": (
        refer(lambda net: {net.inner.weight: 1}),
        lambda net: (next(iter(net.kept)), net.scale),
    ),
    "slots": (
        refer(lambda net: Slotted(tuple(pair_of(net)))),
        lambda net: net.kept.pair,
    ),
    "a private slot": (
        refer(lambda net: Private(tuple(pair_of(net)))),
        lambda net: net.kept.pair(),
    ),
    "closure": (refer(lambda net: closed_over(pair_of(net))), lambda net: net.kept()),
    "closure in a dataclass": (
        refer(lambda net: Record(closed_over(net.inner.weight), closed_over(net.scale))),
        lambda net: (net.kept.weight(), net.kept.scale()),
    ),
    "closure over a model in a list": (
        refer(lambda net: [closed_over(net)]),
        lambda net: pair_of(net.kept[0]()),
    ),
    "default": (
        refer(lambda net: with_default(pair_of(net))),
        lambda net: net.kept(),
    ),
    "partial": (
        refer(lambda net: functools.partial(lambda *pair: pair, *pair_of(net))),
        lambda net: net.kept(),
    ),
    "weak reference to a param": (
        refer(lambda net: weakref.ref(net.inner.weight)),
        lambda net: (net.kept(), net.scale),
    ),
    "weak references in a list": (
        refer(lambda net: [*map(weakref.ref, pair_of(net))]),
        lambda net: [kept() for kept in net.kept],
    ),
    "weak reference in a dataclass": (
        refer(lambda net: Record(weakref.ref(net), None)),
        lambda net: pair_of(net.kept.weight()),
    ),
    "weak dict": (
        refer(lambda net: weakref.WeakValueDictionary(net=net)),
        lambda net: pair_of(net.kept["net"]),
    ),
    "weak method": (
        refer(lambda net: weakref.WeakMethod(net.inner.extra_repr)),
        lambda net: pair_of(net),
    ),
    "weak proxy": (refer(weakref.proxy), lambda net: pair_of(net.kept)),
    "detached": (
        refer(lambda net: [net.inner.weight.detach(), net.scale]),
        lambda net: net.kept,
    ),
    "view of a buffer": (
        refer(lambda net: [net.inner.weight, net.scale[:2], net.scale]),
        lambda net: net.kept[::2],
    ),
    "computed": (
        refer(lambda net: [net.inner.weight * 2, net.scale]),
        lambda net: net.kept,
    ),
}


def closed_over(held: Any) -> Callable[[], Any]:
    return lambda: held


def with_default(held: Any) -> Callable[[], Any]:
    def give(pair: Any = held) -> Any:
        return pair

    return give


def make(name: str) -> Net:
    return seeded(lambda: Net(*{**RIGHT, **REFUSED}[name]))


def batches() -> list[Any]:
    g = torch.Generator().manual_seed(1)
    draw = functools.partial(torch.randn, generator=g, dtype=torch.float64)
    return [{"x": draw(4, 3), "y": draw(4, 2)} for _ in range(3)]


def step_of(name: str, **options: Any) -> tuple[Any, Any, Any]:
    apply, params, buffers = functionalize(make(name), units=nn.Linear, **options)

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
        output, new = apply(params, buffers, batch["x"])
        return (output - batch["y"]).square().mean(), Aux(buffers=new)

    return train_step(loss_fn, optim.sgd(0.1)), params, buffers


@pytest.mark.parametrize(("name", "remat"), crossed([*RIGHT], [False, True]))
def test_further_references_see_the_values_of_the_call(name: str, remat: bool) -> None:
    """As a plain loop of torch does."""
    model = make(name)
    step, params, buffers = step_of(name, remat=remat)
    run = train(step, params, buffers, batches())
    for number, batch in enumerate(batches(), 1):
        model.zero_grad()
        loss = (model(batch["x"]) - batch["y"]).square().mean()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
        assert torch.allclose(run.metrics[number - 1]["loss"], loss.detach(), rtol=1e-12)
        for path, p in (*model.named_parameters(), *model.named_buffers()):
            got = {**run.states[number].params, **run.states[number].buffers}[path]
            assert torch.allclose(got, p, rtol=1e-12), path


@pytest.mark.parametrize(("name", "level"), crossed(RIGHT, [0, 1, 2, 3], n=6, quick=2))
def test_further_references_sharded(name: str, level: int) -> None:
    assert_equal_on_ranks(lambda: step_of(name), batches(), even(4, 2), level=level)


@pytest.mark.parametrize("name", REFUSED)
def test_references_that_nobody_can_follow_are_refused(name: str) -> None:
    with pytest.raises(StructureError, match=r"path kept, .*Remedy"):
        functionalize(make(name))


def test_values_of_a_call_are_let_go_of() -> None:
    """By further references, too."""
    apply, params, buffers = functionalize(make("list"))
    apply(params, buffers, torch.ones(2, 3, dtype=torch.float64))
    (skeleton,) = apply._skeletons
    assert all(x.is_meta for x in skeleton.root.kept)


@pytest.mark.parametrize("what", ["param and param", "param and buffer"])
def test_leaves_that_lie_in_the_same_storage_are_refused(what: str) -> None:
    """A plain loop trains both at once, in place."""
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    view = model[0].weight.data[:2]
    if what == "param and param":
        model[1].weight = nn.Parameter(view)
    else:
        model[1].register_buffer("view", view)
    with pytest.raises(StructureError, match=r"shares elements.*path 1\.\w+, .*Remedy"):
        functionalize(model)


class Views(nn.Module):
    """Two buffers with the same elements."""

    def __init__(self, write: bool) -> None:
        super().__init__()
        self.write = write
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.ones(2, 3))
        self.register_buffer("row", self.table[0])

    def forward(self, x: Tensor) -> Tensor:
        if self.write:
            self.table += 1
        return x * self.weight * self.row


def test_buffers_that_lie_in_the_same_storage_must_not_change() -> None:
    apply, params, buffers = functionalize(Views(write=False))
    apply(params, buffers, torch.ones(3))
    apply, params, buffers = functionalize(Views(write=True))
    with pytest.raises(StructureError, match=r"same storage.*path table, .*row\. Remedy"):
        apply(params, buffers, torch.ones(3))


def test_leaves_between_one_another_in_a_storage() -> None:
    both = torch.randn(3, 4)
    left, right = nn.Parameter(both[:, :2]), nn.Parameter(both[:, 2:])
    _, params, _ = functionalize(nn.ParameterList([left, right]))
    assert torch.equal(torch.cat([*params.values()], dim=1), both)


class Halves(nn.Module):
    """A constant that lies in the storage of a buffer, apart from it."""

    def __init__(self) -> None:
        super().__init__()
        cosine, self.sine = torch.randn(2, 3).chunk(2)
        self.register_buffer("cosine", cosine)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.cosine + self.sine


def test_a_constant_beside_a_buffer_in_its_storage() -> None:
    model = Halves()
    apply, params, buffers = functionalize(model)
    x = torch.ones(3)
    assert torch.equal(apply(params, buffers, x)[0], model(x))


class OfClass(nn.Module):
    """One whose class has the tensor."""

    table = nn.Parameter(torch.ones(3))

    def __init__(self) -> None:
        super().__init__()
        self.weight = OfClass.table

    def forward(self, x: Tensor) -> Tensor:
        return x * OfClass.table


GLOBAL = nn.Linear(3, 3)


def test_a_class_that_has_a_param() -> None:
    with pytest.raises(StructureError, match=r"path table, .*Remedy"):
        functionalize(OfClass())


def test_a_method_closed_over_a_param() -> None:
    weight = nn.Parameter(torch.ones(3))

    class Closed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: Tensor) -> Tensor:
            return x * weight

    with pytest.raises(StructureError, match=r"holds weight by.*path forward, .*Remedy"):
        functionalize(Closed())


def test_a_hook_that_names_the_model_as_a_global() -> None:
    model = nn.Sequential(GLOBAL)
    handle = GLOBAL.register_forward_hook(lambda module, args, output: output + GLOBAL.bias)
    try:
        with pytest.raises(StructureError, match=r"holds 0 by.*path 0\._forward_hooks.*lambda"):
            functionalize(model)
    finally:
        handle.remove()


class Rebinds(nn.Module):
    """Puts another tensor in a place of its own."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.zeros(3))
        self.register_buffer("again", self.count)
        self.kept = [self.weight, self.count]

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "param":
            self.weight = nn.Parameter(self.weight.detach() * 2)
        elif self.what == "param in a list":
            self.kept[0] = self.weight * 2
        elif self.what == "buffer":
            self.count = self.count + 1
        elif self.what == "buffer in a list":
            self.kept[1] = self.count + 1
        elif self.what == "all":
            self.count = self.again = self.kept[1] = self.count + 1
        return x * self.kept[0] + self.kept[1] + self.again


@pytest.mark.parametrize("level", [None, 0, 3])
@pytest.mark.parametrize("what", ["param", "param in a list", "buffer", "buffer in a list"])
def test_another_tensor_in_one_of_several_places(what: str, level: int | None) -> None:
    apply, params, buffers = functionalize(Rebinds(what))

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
        output, new = apply(params, buffers, batch)
        return output.mean(), Aux(buffers=new)

    step = train_step(loss_fn, optim.sgd(0.1))

    def run(group: Any) -> None:
        sharded: Any = step if group is None else shard(step, level=level, group=group)
        with pytest.raises(StructureError, match=r"another tensor.*path (weight|count), .*Remedy"):
            sharded(sharded.init(params, buffers), torch.ones(2, 3))

    if level is None:
        run(None)
    else:
        run_ranks(run, 2)


def test_another_tensor_in_all_places_of_a_buffer() -> None:
    apply, params, buffers = functionalize(Rebinds("all"))
    _, new = apply(params, buffers, torch.ones(3))
    assert torch.equal(new["count"], torch.ones(3)) and list(new) == ["count"]


def with_weight_norm() -> nn.Module:
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(nn.Linear(3, 2))


def pruned() -> nn.Module:
    return prune.l1_unstructured(nn.Linear(3, 2), "weight", 2)


@pytest.mark.parametrize(
    "make",
    [with_weight_norm, pruned, lambda: nn.utils.spectral_norm(nn.Linear(3, 2))],
    ids=["weight_norm", "prune", "spectral_norm"],
)
def test_weights_that_hooks_compute_before_each_call(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randn(4, 3)
    apply, params, buffers = functionalize(model)
    output, _ = apply(params, buffers, x)
    grads = torch.autograd.grad(output.square().sum(), list(params.values()))
    expected = model(x)
    wanted = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
    assert torch.allclose(output, expected)
    assert all(torch.allclose(a, b) for a, b in zip(grads, wanted, strict=True))


def test_a_handle_of_a_hook_is_no_reference() -> None:
    model = nn.Linear(3, 3)
    model.handle = model.register_forward_hook(lambda module, args, output: 2 * output)
    apply, params, buffers = functionalize(model)
    x = torch.randn(2, 3)
    assert torch.equal(apply(params, buffers, x)[0], copy.deepcopy(model)(x))


LOST: dict[str, Callable[[Any], Any]] = {
    "the loss": lambda loss: loss.to("meta"),
    "a metric": lambda loss: (loss, Aux(metrics={"norm": torch.ones((), device="meta")})),
}


@pytest.mark.parametrize("what", LOST)
@pytest.mark.parametrize("level", [None, 0, 3])
def test_results_on_the_meta_device(what: str, level: int | None) -> None:
    params = {"w": torch.ones(3, requires_grad=True)}
    lose = LOST[what]
    loss_fn = lambda params, buffers, batch: lose((params["w"] * batch).sum())
    step = train_step(loss_fn, optim.sgd(0.1))
    evaluate = eval_step(lambda *args: {"loss": torch.ones((), device="meta")})

    def run(group: Any) -> None:
        ours: Any = step if group is None else shard(step, level=level, group=group)
        state = ours.init(params)
        with pytest.raises(StructureError, match=r"meta device.*Remedy"):
            ours(state, torch.ones(3))
        theirs: Any = evaluate if group is None else shard(evaluate, level=level, group=group)
        with pytest.raises(StructureError, match=r"meta device.*Remedy"):
            theirs(state, torch.ones(3))
        with pytest.raises(StructureError, match=r"meta device.*Remedy"):
            value_and_grad(lambda p: lose(p["w"].sum()))(state.params)

    if level is None:
        run(None)
    else:
        run_ranks(run, 2)


def test_a_callable_that_is_bound_by_hand_may_be_a_partial() -> None:
    net = nn.Linear(2, 2)
    net.act = MethodType(functools.partial(lambda by, module, x: x * by, 2.0), net)
    apply, params, buffers = functionalize(net)
    for _ in range(2):
        assert apply(params, buffers, torch.ones(1, 2))[0].shape == (1, 2)
