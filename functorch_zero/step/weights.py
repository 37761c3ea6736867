"""Weights of batches: their checks, and the rule that a batch of weight 0 counts for nothing."""

from __future__ import annotations

import math
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ..errors import StructureError
from ..tree import has_values


def check_weight(weight: Any, rank: int | None = None) -> None:
    """Raise unless means can be taken with this weight."""
    if not isinstance(weight, Tensor | int | float | None):
        raise TypeError(f"Aux.weight must be a number or a 0-d tensor, got {type(weight).__name__}")
    if weight is None:
        return
    if isinstance(weight, Tensor) and (weight.dim() > 0 or weight.is_complex()):
        raise StructureError(
            "Aux.weight is no weight",
            expected="a real number or a 0-d tensor of one",
            got=f"shape {tuple(weight.shape)}, {weight.dtype}",
            rank=rank,
            remedy="reduce it, with .sum() for example",
        )
    if isinstance(weight, Tensor) and weight.requires_grad:
        raise StructureError(
            "Aux.weight requires grad, and means take weights as constants",
            expected="a number, or a tensor in no graph",
            got="requires_grad=True",
            rank=rank,
            remedy="detach it, with weight.detach()",
        )
    # A device's is looked at in the steps that ask slow questions
    if not is_on_device(weight):
        check_weight_value(weight, rank)


# Gradients are multiplied by weights before they are summed over ranks, in float32 or less, whose
# numbers end at 3e38 and lose digits below 1e-38
LEAST_WEIGHT, MOST_WEIGHT = 1e-20, 1e20


def check_weight_value(weight: Tensor | float | None, rank: int | None = None) -> None:
    """Raise unless a weight is 0, or a number in range. The host waits for a device's."""
    if weight is None or (isinstance(weight, Tensor) and not has_values(weight)):
        return
    number = float(weight)
    if number == 0 or LEAST_WEIGHT <= number <= MOST_WEIGHT:
        return
    raise StructureError(
        "Aux.weight is no weight that float32's gradients can be multiplied by",
        expected=f">= 0, either 0 or from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}",
        got=number,
        rank=rank,
        remedy="divide all weights by the same number: only their ratio counts. Or count examples, "
        "or tokens; 0 counts for nothing",
    )


def unless_weightless(
    value: Tensor, weight: Tensor | float | None, otherwise: Tensor | float = 0
) -> Tensor:
    """The value, or `otherwise` where the weight is 0: a number, or a tensor of the value's shape.

    A product with the weight would not do: the loss of a batch without examples is a mean of
    nothing, a NaN, and 0 times a NaN is one.
    """
    if weight is None:
        return value
    # On a device: chosen there, without waiting for the weight
    if is_on_device(weight):
        return torch.where(weight == 0, otherwise, value)
    if float(weight) != 0:
        return value
    return otherwise if isinstance(otherwise, Tensor) else torch.full_like(value, otherwise)


def or_nan(weight: Tensor) -> Tensor:
    """The weight (0-d), or NaN where it is negative or infinite: a device's is read by no host, and
    others must not hide it in a sum."""
    return torch.where((weight >= 0) & (weight < math.inf), weight, torch.nan)


def nonzero(total: Tensor) -> Tensor:
    """A sum of weights (0-d) as a divisor: 1 where nothing has weight, and all sums are 0."""
    return torch.where(total == 0, 1.0, total)


def is_on_device(weight: Tensor | float | None) -> TypeGuard[Tensor]:
    """Whether the host would have to wait for a device to know the weight."""
    return isinstance(weight, Tensor) and weight.device.type != "cpu"


def as_weight(weight: Tensor | float) -> Tensor:
    """A weight as a 0-d float64 tensor: sums of counts and of shares are exact enough in it."""
    if isinstance(weight, Tensor):
        return weight.detach().to(torch.float64)
    return torch.tensor(weight, dtype=torch.float64, device="cpu")
