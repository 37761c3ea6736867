"""The drawn losses. Each is written once, for a network that is an nn.Module and for one that is a
pure function: it sees a `Model`, which is either."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.fuzz.models import ScaledByLeaf

Batch = dict[str, Tensor]  # "x" (n, INPUTS), "y" (n, OUTPUTS)


class Model(Protocol):
    """A network with values: a call runs it, and changes its buffers."""

    @property
    def leaves(self) -> Mapping[str, Tensor]: ...

    @property
    def buffers(self) -> Mapping[str, Tensor]: ...

    def __call__(self, x: Tensor) -> Tensor: ...


class Result(NamedTuple):
    """The loss, 0-d, and metrics: means over the rows."""

    loss: Tensor
    metrics: dict[str, Tensor | float] = {}  # noqa: RUF012
    keeps_buffers: bool = True  # whether the loss hands on the buffers that it changed


LossBody = Callable[[Model, Batch], Result]


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    """`F.mse_loss`, whose backward in torch 2.11 refuses output and target of two dtypes."""
    return (output - target).square().mean()


def squared_error(model: Model, batch: Batch) -> Tensor:
    return mean_square(model(batch["x"]), batch["y"])


def plain(model: Model, batch: Batch) -> Result:
    return Result(squared_error(model, batch))


def bare(model: Model, batch: Batch) -> Result:
    """A loss without an `Aux`: buffers stay as they are."""
    return Result(squared_error(model, batch), keeps_buffers=False)


def with_metrics(model: Model, batch: Batch) -> Result:
    output = model(batch["x"])
    off = output.detach() - batch["y"]
    metrics: dict[str, Tensor | float] = {
        "off": off.abs().mean(),
        "one": 1.0,
        "right": (off < 0).double().mean(),
    }
    return Result(mean_square(output, batch["y"]), metrics)


# Functions and derivatives inside


def function_outside(model: Model, batch: Batch) -> Result:
    """An autograd.Function is given a leaf outside of the leaf's unit."""
    output = ScaledByLeaf.apply(model(batch["x"]), model.leaves["out.bias"])
    return Result(mean_square(output, batch["y"]))


def func_grad(model: Model, batch: Batch) -> Result:
    slope = torch.func.grad(lambda x: model(x).square().sum())(batch["x"])
    return Result(squared_error(model, batch) + slope.square().sum(1).mean())


def func_vmap(model: Model, batch: Batch) -> Result:
    slope = torch.func.grad(lambda row: model(row[None]).square().sum())
    slopes = torch.func.vmap(slope)(batch["x"])
    return Result(squared_error(model, batch) + slopes.square().sum(1).mean())


def func_jvp(model: Model, batch: Batch) -> Result:
    x = batch["x"]
    output, change = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    return Result(mean_square(output, batch["y"]) + change.square().mean())


def inner_gradient(model: Model, batch: Batch) -> Result:
    """A penalty on the gradient by the inputs."""
    x = batch["x"].detach().requires_grad_()
    output = model(x)
    (slope,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    return Result(mean_square(output, batch["y"]) + slope.square().sum(1).mean())


def leaf_gradient(model: Model, batch: Batch) -> Result:
    """A penalty on the gradient by a leaf."""
    loss = squared_error(model, batch)
    (slope,) = torch.autograd.grad(loss, model.leaves["out.weight"], create_graph=True)
    return Result(loss + slope.square().mean())


def adversarial(model: Model, batch: Batch) -> Result:
    """Inputs moved along their gradient, which a `backward` of its own finds."""
    x = batch["x"].detach().requires_grad_()
    (model(x) - batch["y"]).square().sum().backward()
    assert x.grad is not None
    return Result(mean_square(model(x.detach() + 0.1 * x.grad), batch["y"]))


def adversarial_inputs(model: Model, batch: Batch) -> Result:
    """The same, where `backward` is told to leave the leaves alone."""
    x = batch["x"].detach().requires_grad_()
    (model(x) - batch["y"]).square().sum().backward(inputs=[x])
    assert x.grad is not None
    return Result(mean_square(model(x.detach() + 0.1 * x.grad), batch["y"]))


# Penalties


def real(leaf: Tensor) -> Tensor:
    """The sizes of a leaf's elements, in float64."""
    return leaf.abs().double()


def l2(model: Model, batch: Batch) -> Result:
    penalty = sum(real(leaf).square().sum() for leaf in model.leaves.values())
    return Result(squared_error(model, batch) + 0.01 * penalty)


def l2_first(model: Model, batch: Batch) -> Result:
    """The penalty is computed before the model runs."""
    penalty = sum(real(leaf).square().sum() for leaf in model.leaves.values())
    return Result(0.01 * penalty + squared_error(model, batch))


def one_leaf(model: Model, batch: Batch) -> Result:
    return Result(squared_error(model, batch) + model.leaves["inp.weight"].abs().sum())


def rows_of_leaf(model: Model, batch: Batch) -> Result:
    """Views of leaves, and in-place work on what is made of one."""
    weight, bias = model.leaves["inp.weight"], model.leaves["out.bias"]
    doubled = (weight[1:] * 2).t()
    doubled[0] += 1
    return Result(squared_error(model, batch) + doubled.square().sum() + bias[:1].sum())


def watched_norm(model: Model, batch: Batch) -> Result:
    """A metric of the leaves, without gradients."""
    loss = squared_error(model, batch)
    with torch.no_grad():
        norm = torch.stack([real(leaf).norm() for leaf in model.leaves.values()]).norm()
    return Result(loss, {"norm": norm})


def one_vector(model: Model, batch: Batch) -> Result:
    """All leaves in one vector."""
    joined = torch.cat([real(leaf).reshape(-1) for leaf in model.leaves.values()])
    return Result(squared_error(model, batch) + joined.square().mean())


def detached_leaf(model: Model, batch: Batch) -> Result:
    """A leaf's values used as a constant, and copied."""
    weight = model.leaves["out.weight"]
    constant = weight.detach().clone().sum() + weight.data.sum()
    return Result(squared_error(model, batch) * (1 + constant.square()))


# Calls


def two_calls(model: Model, batch: Batch) -> Result:
    there, back = model(batch["x"]), model(-batch["x"])
    return Result(mean_square(there, batch["y"]) + (there * back).mean())


def own_target(model: Model, batch: Batch) -> Result:
    """A target from the same leaves, without gradients."""
    with torch.no_grad():
        target = model(batch["x"] + 0.1)
    return Result(squared_error(model, batch) + mean_square(model(batch["x"]), target))


def recomputed(model: Model, batch: Batch) -> Result:
    output = checkpoint(model, batch["x"], use_reentrant=False)
    return Result(mean_square(output, batch["y"]))


def in_place_output(model: Model, batch: Batch) -> Result:
    output = model(batch["x"])
    output[:, 0].mul_(2)
    output.sub_(batch["y"]).pow_(2)
    return Result(output.mean())


def half_of_output(model: Model, batch: Batch) -> Result:
    """Elements of the last leaves get no gradient."""
    return Result(mean_square(model(batch["x"])[:, 0], batch["y"][:, 0]))


# Writes


def writes_buffers(model: Model, batch: Batch) -> Result:
    for buffer in model.buffers.values():
        buffer.add_(1)
    return Result(squared_error(model, batch))


def writes_leaf(model: Model, batch: Batch) -> Result:
    with torch.no_grad():
        model.leaves["out.weight"].mul_(0.9)
    return Result(squared_error(model, batch))


def writes_leaf_data(model: Model, batch: Batch) -> Result:
    model.leaves["out.weight"].data.mul_(0.9)
    return Result(squared_error(model, batch))


LOSSES: dict[str, LossBody] = {
    "plain": plain,
    "bare": bare,
    "metrics": with_metrics,
    "function outside": function_outside,
    "func.grad": func_grad,
    "func.vmap": func_vmap,
    "func.jvp": func_jvp,
    "inner gradient": inner_gradient,
    "leaf gradient": leaf_gradient,
    "adversarial": adversarial,
    "adversarial inputs": adversarial_inputs,
    "l2": l2,
    "l2 first": l2_first,
    "one leaf": one_leaf,
    "rows of leaf": rows_of_leaf,
    "watched norm": watched_norm,
    "one vector": one_vector,
    "detached leaf": detached_leaf,
    "two calls": two_calls,
    "own target": own_target,
    "recomputed": recomputed,
    "in-place output": in_place_output,
    "half of output": half_of_output,
    "writes buffers": writes_buffers,
    "writes leaf": writes_leaf,
    "writes leaf data": writes_leaf_data,
}

# The mean of such a loss over parts of a batch is not that of the whole
COUPLING = {"leaf gradient"}
