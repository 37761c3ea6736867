"""A user's loss: what it returns, over the micro-batches of a batch, and means by weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import optree
import torch
from optree import tree_map
from torch import Tensor

from ..errors import StructureError, explain
from ..tree import PyTree, paths, same_structure


@dataclass(frozen=True)
class Aux:
    """The second result of a loss, beside its value.

    Attributes:
        buffers: the new buffers, as `apply` returned them; None when nothing changed.
        metrics: 0-d tensors or numbers by name, averaged like the loss.
        weight: how much this batch counts (its number of tokens, say); None: each rank's batch
            counts the same. What
            weighs 0 counts for nothing: neither its loss, metrics and gradients nor the buffers
            that it changed.
    """

    buffers: Mapping[str, Tensor] | None = None
    metrics: Mapping[str, Tensor | float] = field(default_factory=dict)
    weight: Tensor | float | None = None


LossFn = Callable[[Any, Any, Any], Tensor | tuple[Tensor, Aux]]
Metrics = dict[str, Tensor]


class Outcome(NamedTuple):
    """The results of one call of a loss."""

    loss: Tensor  # 0-d
    buffers: PyTree[Tensor]
    metrics: Mapping[str, Tensor | float]
    weight: Tensor | float | None


def call_loss(
    loss_fn: LossFn, params: Any, buffers: Any, batch: Any, rank: int | None = None
) -> Outcome:
    """Call a user's loss and check what it returns."""
    loss, given = check_loss(loss_fn(params, buffers, batch), rank)
    aux = given or Aux()
    new = (
        buffers
        if aux.buffers is None
        else tree_map(
            lambda b: b if type(b) is Tensor and not b.requires_grad else b.detach(), aux.buffers
        )
    )
    same_structure(buffers, new, what="Aux.buffers", rank=rank)
    new = tree_map(lambda old, b: b if b is old else if_weighty(b, aux.weight, old), buffers, new)
    return Outcome(loss, new, aux.metrics, aux.weight)


def check_loss(result: Any, rank: int | None = None) -> tuple[Tensor, Aux | None]:
    """The loss, 0-d and differentiable, and what a user's loss returned beside it, if anything."""
    loss, aux = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(aux, Aux | None):
        raise TypeError(
            f"a loss returns a tensor, or (tensor, fz.Aux(...)); got {type(aux).__name__} as the "
            "second"
        )
    if not isinstance(loss, Tensor) or loss.dim() != 0 or not loss.is_floating_point():
        got = (
            f"shape {tuple(loss.shape)}, {loss.dtype}"
            if isinstance(loss, Tensor)
            else type(loss).__name__
        )
        what, remedy = "the loss is not a scalar", "reduce it, with .mean() for example"
        raise StructureError(explain(what, expected="shape ()", got=got, rank=rank, remedy=remedy))
    if not loss.requires_grad:
        raise independent(rank)
    if aux is None:
        return loss, None
    check_weight(aux.weight, rank)
    if "loss" in aux.metrics:
        raise StructureError(
            explain('a metric is called "loss", as the loss is', rank=rank, remedy="rename it")
        )
    return loss, aux


def independent(rank: int | None = None) -> StructureError:
    """The error for a loss that uses no param."""
    remedy = (
        "compute it from the `params` it is given, with `apply` and not the module; without "
        "detach or item"
    )
    return StructureError(
        explain("the loss does not depend on any trained leaf", rank=rank, remedy=remedy)
    )


def check_weight(weight: Any, rank: int | None) -> None:
    """Refuse a weight that no mean can be taken with."""
    if not isinstance(weight, Tensor | int | float | None):
        raise TypeError(f"Aux.weight must be a number or a 0-d tensor, got {type(weight).__name__}")
    if weight is None or (isinstance(weight, Tensor) and weight.device.type != "cpu"):
        return  # without waiting for the device
    if not 0 <= float(weight) < math.inf:
        remedy = "count examples, or tokens; 0 counts for nothing"
        raise StructureError(
            explain(
                "Aux.weight is no weight", expected=">= 0", got=weight, rank=rank, remedy=remedy
            )
        )


def micro_batches(batch: Any, count: int) -> list[Any]:
    """The batch in `count` parts along dim 0 of its tensors; whatever has no dims is in all of
    them."""
    if count == 1:
        return [batch]
    leaves, treedef = optree.tree_flatten(batch)
    parts = [_parts(path, leaf, count) for path, leaf in zip(paths(batch), leaves, strict=True)]
    return [treedef.unflatten([part[i] for part in parts]) for i in range(count)]


def _parts(path: str, leaf: Any, count: int) -> list[Any]:
    if not isinstance(leaf, Tensor) or leaf.dim() == 0:
        return [leaf] * count
    if 0 < len(leaf) < count:
        remedy = "pass larger batches, or accumulate over fewer"
        raise StructureError(
            explain(
                "the batch is too small", path=path, expected=count, got=len(leaf), remedy=remedy
            )
        )
    return list(leaf.tensor_split(count))


def weighted_mean(values: Sequence[Any], outcomes: Sequence[Outcome]) -> Tensor:
    """The mean of one value a micro-batch, by their weights; 0 where nothing has weight."""
    weights = [as_metric(1.0 if o.weight is None else o.weight) for o in outcomes]
    terms = [
        if_weighty(as_tensor(v), w) * w.to(as_tensor(v).device)
        for v, w in zip(values, weights, strict=True)
    ]
    total = sum(weights[1:], weights[0])
    return sum(terms[1:], terms[0]) / torch.where(total == 0, 1, total).to(terms[0].device)


def if_weighty(
    value: Tensor, weight: Tensor | float | None, otherwise: Tensor | float = 0
) -> Tensor:
    """The value, or zeros where the weight is 0: what weighs nothing counts for nothing, the mean
    of nothing too."""
    if weight is None:
        return value
    if isinstance(weight, Tensor) and weight.device.type != "cpu":
        return torch.where(weight == 0, otherwise, value)  # without waiting for the device
    if float(weight) != 0:
        return value
    return otherwise if isinstance(otherwise, Tensor) else torch.full_like(value, otherwise)


def joined(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcomes of several micro-batches as one."""
    if len(outcomes) == 1:
        return outcomes[0]
    _check_all_weighted(outcomes)
    last = outcomes[-1]
    metrics = {
        name: weighted_mean([o.metrics[name] for o in outcomes], outcomes) for name in last.metrics
    }
    weights = [as_metric(o.weight) for o in outcomes if o.weight is not None]
    weight = sum(weights[1:], weights[0]) if weights else None
    return Outcome(
        weighted_mean([o.loss for o in outcomes], outcomes), last.buffers, metrics, weight
    )


def _check_all_weighted(outcomes: Sequence[Outcome]) -> None:
    """Refuse micro-batches of which some have a weight and others have none."""
    without = [i for i, outcome in enumerate(outcomes) if outcome.weight is None]
    if without and len(without) < len(outcomes):
        raise StructureError(
            explain(
                "some micro-batches have a weight, and others have none",
                expected="Aux.weight from every call of the loss, or from none",
                got=f"none from micro-batches {without} of {len(outcomes)}",
                remedy="give each a weight; 1 counts as much as none",
            )
        )


def as_tensor(value: Any) -> Tensor:
    """A tensor, detached; numbers become 0-d ones."""
    return value.detach() if isinstance(value, Tensor) else torch.tensor(value)


def as_metric(value: Tensor | float) -> Tensor:
    """A metric as a 0-d floating-point tensor, since it will be averaged."""
    metric = as_tensor(value)
    if not metric.is_floating_point():
        metric = metric.to(torch.get_default_dtype())
    if metric.dim() != 0:
        raise StructureError(
            f"a metric must be a number or a 0-d tensor, got shape {tuple(metric.shape)}"
        )
    return metric
