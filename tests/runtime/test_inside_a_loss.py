"""The rows of docs/howto/inside-a-loss.md: each is equal at every level, or refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from optree import tree_map
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import StructureError
from functorch_zero.groups import run_ranks
from tests.compare import (
    assert_equal_on_ranks,
)
from tests.models import even
from tests.modules import Net, seeded
from tests.runtime.test_nested_backward import RunAgain
from tests.tiers import crossed, thinned

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "inside-a-loss.md"
LEVELS = (0, 1, 2, 3)

Apply = Callable[..., Any]
Given = Callable[[Apply, Any, Any, Tensor], Tensor]  # (apply, params, buffers, x) -> the loss


def two_units(change: Callable[[nn.Linear], Any] | None = None) -> Net:
    """`change` is done to the first one's weight, `put_hook` on it, in its forward."""
    first = First(4, 5)
    first.change = change
    forward = lambda net, x: net.second(torch.tanh(net.first(x)))
    return Net(forward, first=first, second=nn.Linear(5, 3))


class First(nn.Linear):
    change: Callable[[nn.Linear], Any] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.change is not None:
            self.change(self)
        return super().forward(x)


def calling(call: Callable[[nn.Linear, Tensor], Tensor]) -> Net:
    """The second unit is called by a function."""
    forward = lambda net, x: call(net.second, torch.tanh(net.first(x)))
    return Net(forward, first=First(4, 5), second=nn.Linear(5, 3))


class Product(torch.autograd.Function):
    """x (n, i), weight (o, i) -> (n, o)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class Unread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.shape = weight.shape
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * grad, grad.sum().expand(ctx.shape)


def out(apply: Apply, params: Any, x: Tensor) -> Tensor:
    return apply(params, {}, x)[0]


def mean_square(x: Tensor) -> Tensor:
    return x.square().mean()


def several_calls(apply: Apply, params: Any, buffers: Any, x: Tensor) -> Tensor:
    return mean_square(out(apply, params, x)) + mean_square(out(apply, params, 2 * x) - 1)


def changed_params(apply: Apply, params: Any, buffers: Any, x: Tensor) -> Tensor:
    return mean_square(out(apply, tree_map(lambda p: 0.9 * p, params), x))


def penalty(apply: Apply, params: Any, buffers: Any, x: Tensor) -> Tensor:
    return mean_square(out(apply, params, x)) + params["first.weight"].square().sum()


def unsharded_leaf(apply: Apply, params: Any, buffers: Any, x: Tensor) -> Tensor:
    weight = fz.unshard(params["first.weight"])
    assert type(weight) is Tensor
    return mean_square(out(apply, params, x)) + mean_square(Product.apply(x, weight))


def called_functionally(apply: Apply, params: Any, buffers: Any, x: Tensor) -> Tensor:
    return mean_square(functional_call(two_units().double(), dict(params), (x,)))


def child_called_functionally(apply: Apply, params: Any, buffers: Any, x: Tensor) -> Tensor:
    def halved(module: nn.Linear, x: Tensor) -> Tensor:
        return functional_call(module, {"weight": 0.5 * module.weight}, (x,))

    inner = fz.functionalize(calling(halved).double())[0]
    return mean_square(out(inner, params, x)) + mean_square(out(apply, params, x))


def custom_function(apply: Apply, params: Any, buffers: Any, x: Tensor) -> Tensor:
    hidden = torch.tanh(Product.apply(x, params["first.weight"]))
    made = Product.apply(hidden, params["second.weight"])
    return mean_square(made) + mean_square(out(apply, params, x))


def reversible(apply: Apply, params: Any, buffers: Any, x: Tensor) -> Tensor:
    again = RunAgain.apply(x.clone().requires_grad_(), lambda v: out(apply, params, v))
    return mean_square(again) + mean_square(out(apply, params, 2 * x))


def torch_func(apply: Apply, params: Any, buffers: Any, x: Tensor) -> Tensor:
    slopes = vmap(grad(lambda row: out(apply, params, row).sum()))(x)
    return mean_square(out(apply, params, x)) + mean_square(slopes)


def slope_penalty(apply: Apply, params: Any, buffers: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    made = out(apply, params, x)
    (slope,) = torch.autograd.grad(made.sum(), x, create_graph=True)
    return mean_square(made) + mean_square(slope)


def own_backward(apply: Apply, params: Any, buffers: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    out(apply, params, x).sum().backward()
    return mean_square(out(apply, params, x + x.grad.sign()))


def inner_step(apply: Apply, params: Any, buffers: Any, x: Tensor) -> Tensor:
    """Of each example by itself: an inner step on a mean would see one rank's part."""
    whole = fz.unshard(params)

    def after_a_step(row: Tensor) -> Tensor:
        slopes = grad(lambda p: mean_square(out(apply, p, row)))(whole)
        return mean_square(out(apply, tree_map(lambda p, g: p - 0.1 * g, whole, slopes), row))

    return torch.stack([after_a_step(row) for row in x]).mean()


def whole_leaves(apply: Apply, params: Any, buffers: Any, x: Tensor) -> Tensor:
    whole = fz.unshard(params)
    made = mean_square(out(apply, whole, x)) + mean_square(out(apply, whole, 2 * x) - 1)
    slopes = torch.autograd.grad(made, [*whole.values()], create_graph=True)
    # A sum, which is linear in it: the mean over ranks is that of the whole batch
    return made + sum((slope.sum() for slope in slopes), torch.zeros_like(made))


def checkpointed(apply: Apply, params: Any, buffers: Any, x: Tensor) -> Tensor:
    return mean_square(checkpoint(lambda v: out(apply, params, v), x, use_reentrant=False))


def in_place_on_activations(apply: Apply, params: Any, buffers: Any, x: Tensor) -> Tensor:
    return mean_square(out(apply, params, x).mul_(2).add_(1))


def questions(apply: Apply, params: Any, buffers: Any, x: Tensor) -> Tensor:
    leaf = params["second.bias"]
    made = torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device)
    answers = [leaf.requires_grad, leaf.is_leaf, leaf.grad_fn is None]
    return mean_square(out(apply, params, x) + made) * sum(answers)


def random_numbers(apply: Apply, params: Any, buffers: Any, x: Tensor) -> Tensor:
    return mean_square(out(apply, params, x)) * torch.rand((), dtype=x.dtype)


def without_gradients(apply: Apply, params: Any, buffers: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = out(apply, params, x) + params["second.bias"]
    return mean_square(out(apply, params, 2 * x) - target)


EQUAL: dict[str, Given] = {
    "`apply(params, buffers, x)`, several times": several_calls,
    "`apply` with params changed by an expression": changed_params,
    "operators on a param": penalty,
    '`fz.unshard(params["w"])`': unsharded_leaf,
    "`torch.func.functional_call(module, dict(params), x)`": called_functionally,
    '`functional_call(self.child, {"weight": w}, x)` in a model\'s forward': (
        child_called_functionally
    ),
    "a custom `autograd.Function` with a param as argument": custom_function,
    "a custom `autograd.Function` that runs modules again in its backward": reversible,
    "`torch.func.grad` and `vmap` by the input": torch_func,
    "`torch.autograd.grad(..., create_graph=True)` by the input": slope_penalty,
    "`.backward()`, and then `x.grad`": own_backward,
    "`torch.func.grad` by whole leaves": inner_step,
    "`torch.autograd.grad` by whole leaves": whole_leaves,
    "`torch.utils.checkpoint` with `use_reentrant=False`": checkpointed,
    "in-place operators on activations": in_place_on_activations,
    "`shape`, `dtype`, `device`, `requires_grad`, `is_leaf` of a param": questions,
    "random numbers": random_numbers,
    "a param under `torch.no_grad()`": without_gradients,
}
# Each rank draws its own numbers, so that equality is that of one rank
ON_ONE_RANK = {"random numbers"}


def doing(act: Callable[[Any, Tensor], Any]) -> Given:
    """A loss that does something to a param, or with it, and goes on."""

    def given(apply: Apply, params: Any, buffers: Any, x: Tensor) -> Tensor:
        act(params["first.weight"], x)
        return mean_square(out(apply, params, x))

    return given


@torch.no_grad()
def halved(weight: Tensor, x: Tensor) -> None:
    weight.mul_(0.5)


def other_data(weight: Tensor, x: Tensor) -> None:
    weight.data = torch.zeros_like(weight)


def clamped(module: nn.Linear) -> None:
    module.weight.data.clamp_(-0.01, 0.01)


def replaced(module: nn.Linear) -> None:
    module.weight.data = 0.5 * module.weight.data


def hooked(module: nn.Linear) -> None:
    module.weight.register_hook(lambda grad: grad.clamp(-1, 1))


def plain(apply: Apply, params: Any, buffers: Any, x: Tensor) -> Tensor:
    return mean_square(out(apply, params, x))


def by_a_param(apply: Apply, params: Any, buffers: Any, x: Tensor) -> Tensor:
    made = mean_square(out(apply, params, x))
    return made + torch.autograd.grad(made, params["first.weight"], create_graph=True)[0].sum()


def transformed(apply: Apply, params: Any, buffers: Any, x: Tensor) -> Tensor:
    slopes = grad(lambda p: mean_square(out(apply, p, x)))(params)
    return mean_square(out(apply, params, x)) + slopes["first.weight"].sum()


def nested(apply: Apply, params: Any, buffers: Any, x: Tensor) -> Tensor:
    whole = fz.unshard(params)
    _, slopes = fz.value_and_grad(lambda p: mean_square(out(apply, p, x)))(whole)
    return mean_square(out(apply, whole, x)) + slopes["first.weight"].sum()


def updated(apply: Apply, params: Any, buffers: Any, x: Tensor) -> Tensor:
    moved = fz.apply_updates(params, tree_map(lambda p: 0.1 * p, params))
    return mean_square(out(apply, params, x)) + mean_square(out(apply, moved, x))


def unread(apply: Apply, params: Any, buffers: Any, x: Tensor) -> Tensor:
    return mean_square(Unread.apply(x, params["first.weight"]))


@torch.jit.script
def scripted(weight: Tensor) -> Tensor:
    return weight.square().sum()


class Largest(torch.autograd.Function):
    """x -> x, and the largest gradient to a buffer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, largest: Tensor) -> Tensor:
        ctx.largest = largest
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.largest.copy_(grad.abs().max())
        return grad, None


def buffer_in_backward(apply: Apply, params: Any, buffers: Any, x: Tensor) -> Tensor:
    return mean_square(Largest.apply(out(apply, params, x), buffers["largest"]))


def reentrant(apply: Apply, params: Any, buffers: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    made = checkpoint(lambda v: out(apply, params, v), x, use_reentrant=True)
    return mean_square(made) + params["second.bias"].square().sum()


def independent(apply: Apply, params: Any, buffers: Any, x: Tensor) -> Tensor:
    return mean_square(x)


def no_scalar(apply: Apply, params: Any, buffers: Any, x: Tensor) -> Tensor:
    return out(apply, params, x)


class Sign(torch.autograd.Function):
    """x -> x, with the signs of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.sign()


def by_sign(apply: Apply, params: Any, buffers: Any, x: Tensor) -> Tensor:
    return mean_square(Sign.apply(out(apply, params, x)))


def clipped(apply: Apply, params: Any, buffers: Any, x: Tensor) -> Tensor:
    made = out(apply, params, x)
    made.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    return mean_square(made)


EVERYWHERE = "everywhere"  # in a step for one process as well
REFUSED: dict[str, tuple[Given, Any, str]] = {
    # the row -> the loss, the change in the first unit's forward, where it is refused
    "an in-place operator on a param": (doing(halved), None, EVERYWHERE),
    "a write past the version counter, as in `self.weight.data.clamp_()`": (
        plain,
        clamped,
        EVERYWHERE,
    ),
    "`self.weight.data = x` in a forward": (plain, replaced, EVERYWHERE),
    '`params["w"].data = x`': (doing(other_data), None, EVERYWHERE),
    "a hook on a param": (plain, hooked, "sharded"),
    '`params["w"].grad`': (doing(lambda weight, x: weight.grad), None, "sharded"),
    "`torch.autograd.grad` by a param": (by_a_param, None, "sharded"),
    "a transform of torch.func with params as its argument": (transformed, None, "sharded"),
    "`fz.value_and_grad`, `fz.hvp` or a training step": (nested, None, EVERYWHERE),
    "`fz.apply_updates`, or an optimizer": (updated, None, EVERYWHERE),
    '`nn.Parameter(params["w"])`': (doing(lambda weight, x: nn.Parameter(weight)), None, "sharded"),
    "a function of torch.jit with a param as its argument": (
        doing(lambda weight, x: scripted(weight)),
        None,
        "sharded",
    ),
    "a custom `autograd.Function` whose forward reads no value of its param": (
        unread,
        None,
        "sharded",
    ),
    "a custom `autograd.Function` whose backward is not linear in its gradient": (
        by_sign,
        None,
        "sharded",
    ),
    "a hook that clips or normalises a gradient": (clipped, None, "sharded"),
    "`torch.utils.checkpoint` with `use_reentrant=True`": (reentrant, None, EVERYWHERE),
    "a buffer that is written to in backward, by a module's hook or a custom `autograd.Function`": (
        buffer_in_backward,
        None,
        EVERYWHERE,
    ),
    "`torch.overrides.has_torch_function` of a param, outside of its unit": (
        doing(lambda weight, x: torch.overrides.has_torch_function((weight,))),
        None,
        "sharded",
    ),
    "a loss that depends on no trained leaf": (independent, None, EVERYWHERE),
    "a loss that is no scalar": (no_scalar, None, EVERYWHERE),
}


def step_of(given: Given, change: Any = None) -> tuple[Any, Any, Any]:
    apply, params, buffers = seeded(lambda: fz.functionalize(two_units(change).double()))

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
        return given(apply, params, buffers, batch["x"])

    buffers = {"largest": torch.zeros(())}  # of the loss's own
    return fz.train_step(loss_fn, optim.sgd(0.05, momentum=0.9)), params, buffers


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(8, 4, generator=generator, dtype=torch.float64)} for _ in range(2)]


def rows(heading: str) -> list[str]:
    """The first cells of the table under a heading of the page."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S)
    cells = re.findall(r"^\| (.*?) \|", section, re.M)
    return cells[1:]  # without the table's head


def test_the_page_lists_these() -> None:
    assert rows("Equal at every level") == [*EQUAL]
    assert rows("Refused") == [*REFUSED]


@pytest.mark.parametrize(("row", "level"), crossed([*EQUAL], LEVELS, n=4, quick=3))
def test_equal(row: str, level: int) -> None:
    ranks = 1 if row in ON_ONE_RANK else 2
    assert_equal_on_ranks(lambda: step_of(EQUAL[row]), batches(), even(8, ranks), level=level)


@pytest.mark.parametrize(("row", "level"), crossed([*REFUSED], LEVELS, n=4))
def test_refused(row: str, level: int) -> None:
    given, change, where = REFUSED[row]
    step, params, buffers = step_of(given, change)
    batch = batches()[0]
    if where == EVERYWHERE:
        with pytest.raises(StructureError):
            step(step.init(params, buffers), batch)
    else:
        step(step.init(params, buffers), batch)

    def run(group: Any) -> None:
        sharded = fz.shard(step, level=level, group=group)
        sharded(sharded.init(params, buffers), batch)

    with pytest.raises(StructureError):
        run_ranks(run, 2)


@pytest.mark.parametrize("level", thinned([3, 2, 1, 0]))
@pytest.mark.parametrize("ranks_detached", [(0, 1), (1,)])
def test_a_detached_loss_is_refused_at_every_call(level: int, ranks_detached: Any) -> None:
    """Units are entered, and nothing of them leads to the loss: of a late step, too, and on one
    rank alone."""

    def run(group: Any) -> None:
        apply, params, buffers = fz.functionalize(two_units().double())
        calls = 0

        def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
            nonlocal calls
            calls += 1
            made = out(apply, params, batch["x"])
            if calls == 4 and group.rank in ranks_detached:
                made = made.detach()
            return mean_square(made * batch["x"].clone().requires_grad_()[:, :1])

        step = fz.shard(fz.train_step(loss_fn, optim.sgd(0.05)), level=level, group=group)
        state = step.init(params, buffers)
        for _ in range(3):
            state, _ = step(state, batches()[0])
        step(state, batches()[0])

    with pytest.raises(StructureError, match="does not depend on any trained leaf"):
        run_ranks(run, 2)
