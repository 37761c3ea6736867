"""Params given to a custom `autograd.Function`, and backward passes of a loss's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import StructureError
from functorch_zero.groups import run_ranks
from functorch_zero.model.functionalize import functionalize
from functorch_zero.precision import Precision
from functorch_zero.sharded.api import shard
from functorch_zero.step.train import train_step
from tests.compare import (
    assert_equal_on_ranks,
)
from tests.models import even
from tests.modules import Net, in_turn, seeded
from tests.tiers import crossed, thinned, tiers

LEVELS = (0, 1, 2, 3)


class FusedLinear(torch.autograd.Function):
    """x (n, i), weight (o, i) -> (n, o), as a fused kernel computes it: with a backward of its
    own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class FusedLinearInTwoParts(torch.autograd.Function):
    """The same, with `setup_context`."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.t()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class FusedLoss(torch.autograd.Function):
    """x (n, i), weight (o, i), target (n, o) -> the mean square, 0-d; it computes its gradients in
    forward, as Liger's kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        error = x @ weight.t() - target
        scaled = 2 * error / error.numel()
        ctx.save_for_backward(scaled @ weight, scaled.t() @ x)
        return error.square().mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        by_x, by_weight = ctx.saved_tensors
        return grad * by_x, grad * by_weight, None


class SavedOnly(torch.autograd.Function):
    """x -> 2 x, with the gradient of x + weight.sum(): forward never looks at the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.shape = weight.shape
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * grad, grad.sum().expand(ctx.shape)


def build(precision: Any = None) -> tuple[Any, Any, Any]:
    model = seeded(
        lambda: Net(
            lambda net, x: in_turn(net.body, x),
            body=nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)]),
            head=nn.Linear(5, 3, bias=False),
        )
    )
    return functionalize(model.double(), precision=precision)


def batches(num: int = 2) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)

    def draw(width: int) -> Tensor:
        return torch.randn(12, width, generator=generator, dtype=torch.float64)

    return [{"x": draw(5), "y": draw(3)} for _ in range(num)]


Head = Callable[[Any, Any, Tensor, Any], Tensor]  # (apply, params, hidden, batch) -> the loss


def through(function: type[torch.autograd.Function]) -> Head:
    def head(apply: Any, params: Any, hidden: Tensor, batch: Any) -> Tensor:
        made = function.apply(hidden, params["head.weight"])
        return (made - batch["y"]).square().mean()

    return head


def fused(apply: Any, params: Any, hidden: Tensor, batch: Any) -> Tensor:
    return FusedLoss.apply(hidden, params["head.weight"], batch["y"])


def twice(apply: Any, params: Any, hidden: Tensor, batch: Any) -> Tensor:
    """The head's weight in two functions, and in an operator beside them."""
    again = FusedLinear.apply(hidden.square(), params["head.weight"])
    by_operator = hidden.mean() * params["head.weight"].square().sum()
    return fused(apply, params, hidden, batch) + again.square().mean() + by_operator


def of_a_body_layer(apply: Any, params: Any, hidden: Tensor, batch: Any) -> Tensor:
    """A weight that its own unit uses as well."""
    again = FusedLinear.apply(hidden, params["body.0.weight"])
    return fused(apply, params, hidden, batch) + again.square().mean()


def recomputed(apply: Any, params: Any, hidden: Tensor, batch: Any) -> Tensor:
    def run(hidden: Tensor) -> Tensor:
        return fused(apply, params, hidden, batch)

    return torch.utils.checkpoint.checkpoint(run, hidden, use_reentrant=False)


HEADS = {
    "one part": through(FusedLinear),
    "two parts": through(FusedLinearInTwoParts),
    "gradients in forward": fused,
    "twice": twice,
    "of a body layer": of_a_body_layer,
    "recomputed": recomputed,
}


def loss_of(apply: Any, head: Head) -> Any:
    def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
        hidden, _ = apply(params, buffers, batch["x"])
        return head(apply, params, hidden, batch)

    return loss_fn


def check(head: Head, level: int, *, precision: Any = None, ranks: int = 2, **options: Any) -> None:
    def step() -> tuple[Any, Any, Any]:
        apply, params, buffers = build(precision)
        made = train_step(loss_of(apply, head), optim.sgd(0.05, momentum=0.9), accumulate=2)
        return made, params, buffers

    assert_equal_on_ranks(step, batches(), even(12, ranks), level=level, **options)


@pytest.mark.parametrize(("name", "level"), crossed([*HEADS], LEVELS, quick=2))
def test_a_custom_function_outside_its_unit(name: str, level: int) -> None:
    check(HEADS[name], level)


@pytest.mark.parametrize("ranks", tiers([2], [1]))
def test_when_gathered_leaves_are_kept(ranks: int) -> None:
    check(twice, 3, ranks=ranks, reshard_after_forward=False)


def test_a_function_whose_forward_reads_no_param() -> None:
    """Other ranks can't know of a gradient that comes without a read, so it is refused."""

    def step(group: Any) -> None:
        apply, params, buffers = build()
        sharded = shard(
            train_step(loss_of(apply, through_saved_only), optim.sgd(0.1)), level=3, group=group
        )
        sharded(sharded.init(params, buffers), batches()[0])

    with pytest.raises(StructureError, match=r"head\.weight.*fz\.unshard"):
        run_ranks(step, 2)


def through_saved_only(apply: Any, params: Any, hidden: Tensor, batch: Any) -> Tensor:
    return SavedOnly.apply(hidden, params["head.weight"]).square().mean()


@pytest.mark.parametrize("level", thinned([3, 2, 1, 0]))
def test_with_a_policy(level: int) -> None:
    """Unsharded, leaves that a policy casts are lazy too: gradients come in its dtypes."""

    def in_float32(apply: Any, params: Any, hidden: Tensor, batch: Any) -> Tensor:
        return twice(apply, params, hidden.float(), {"y": batch["y"].float()})

    # One rank: two would round the gradients of parts of the batch
    check(in_float32, level, precision=Precision(compute=torch.float32), ranks=1)


def in_a_program(params: Any, frozen: Any, batch: Any) -> Tensor:
    hidden = torch.tanh(FusedLinear.apply(batch["x"], frozen["w"]))
    return FusedLoss.apply(hidden, params["w"], batch["y"])


@pytest.mark.parametrize("level", thinned([3, 2, 1, 0]))
def test_in_a_program_with_a_frozen_tree(level: int) -> None:
    generator = torch.Generator().manual_seed(2)
    trained = {"w": torch.randn(3, 5, generator=generator, dtype=torch.float64).requires_grad_()}
    frozen = {"w": torch.randn(5, 5, generator=generator, dtype=torch.float64)}
    batch = batches()[0]
    expected = fz.value_and_grad(in_a_program)(trained, frozen, batch)

    def program(group: Any) -> Any:
        sharded = fz.shard_tree(trained, level=level, group=group)
        read_only = fz.shard_tree(frozen, level=level, group=group)
        part = {name: x.tensor_split(2)[group.rank] for name, x in batch.items()}
        value, grads = fz.value_and_grad(in_a_program)(sharded, read_only, part)
        return value, fz.unshard(grads)

    for value, grads in run_ranks(program, 2):
        torch.testing.assert_close(value, expected[0])
        assert expected[1]["w"].any()
        torch.testing.assert_close(grads["w"], expected[1]["w"])


# Backward passes of a loss's own


def fgsm(apply: Any, params: Any, hidden: Tensor, batch: Any) -> Tensor:
    """Adversarial inputs by `.backward()`: its gradients of params are no one's."""
    x = batch["x"].clone().requires_grad_()
    apply(params, {}, x)[0].square().sum().backward()
    worse, _ = apply(params, {}, x + 0.1 * x.grad)
    return fused(apply, params, worse + hidden, batch)


def retained(apply: Any, params: Any, hidden: Tensor, batch: Any) -> Tensor:
    """The same graph for an inner backward and for the loss."""
    x = batch["x"].clone().requires_grad_()
    out, _ = apply(params, {}, x)
    loss = fused(apply, params, out, batch)
    (len(x) * loss).backward(retain_graph=True)
    return loss + x.grad.square().sum(1).mean() + 0 * hidden.sum()


def by_operators(apply: Any, params: Any, hidden: Tensor, batch: Any) -> Tensor:
    """An inner backward through whole leaves, outside of any unit."""
    x = hidden.detach().requires_grad_()
    (x @ params["head.weight"].t()).square().sum().backward()
    return fused(apply, params, hidden + x.grad, batch)


def unused_afterwards(apply: Any, params: Any, hidden: Tensor, batch: Any) -> Tensor:
    """Only the inner backward reaches one of the units."""
    x = torch.ones(3, 5, dtype=torch.float64, requires_grad=True)
    torch.nn.functional.linear(x, params["body.1.weight"]).sum().backward()
    return fused(apply, params, hidden * x.grad.mean(), batch)


INNER = {
    "fgsm": fgsm,
    "retained": retained,
    "by operators": by_operators,
    "unused afterwards": unused_afterwards,
}


@pytest.mark.parametrize(("name", "level"), crossed([*INNER], LEVELS, quick=1))
def test_a_backward_of_the_loss_own(name: str, level: int) -> None:
    check(INNER[name], level)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning")
@pytest.mark.parametrize("level", thinned([3, 2, 1, 0]))
def test_a_backward_with_a_graph(level: int) -> None:
    def penalty(apply: Any, params: Any, hidden: Tensor, batch: Any) -> Tensor:
        x = batch["x"].clone().requires_grad_()
        apply(params, {}, x)[0].square().sum().backward(create_graph=True)
        return x.grad.square().mean() + fused(apply, params, hidden, batch)

    check(penalty, level)
