"""A run of a case: the driver, and the arithmetic that the plain loop and the comparison share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tests.fuzz.cases import Case
from tests.fuzz.losses import Batch

Named = dict[str, Tensor]


class Seen(NamedTuple):
    """The results of one step, in tensors of their own."""

    params: Named
    buffers: list[Named]  # by rank; one where all have the same
    metrics: Named  # the loss's, and of an evaluation before the step
    opt_state: Named


class Program(Protocol):
    """A case in one of its three forms."""

    def step(self, parts: list[Batch]) -> Named: ...

    def between(self, parts: list[Batch]) -> Named: ...

    def seen(self, metrics: Named) -> Seen: ...


def drive(program: Program, case: Case) -> list[Seen]:
    """All steps of a case: the first state, and the results of each step."""
    found = [program.seen({})]
    for number in range(case.steps):
        parts = case.parts(number)
        metrics = program.between(parts) if number == 1 else {}
        found.append(program.seen(metrics | program.step(parts)))
    return found


def copied(tensors: Mapping[str, Tensor]) -> Named:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def in_micro_batches(batch: Batch, count: int) -> list[Batch]:
    """The batch in parts along its rows."""
    parts = {name: rows.tensor_split(count) for name, rows in batch.items()}
    return [{name: rows[i] for name, rows in parts.items()} for i in range(count)]


def weighted_mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """In double precision, rounded once. Values that weigh nothing are left out, NaNs too."""
    dtype = values[0].dtype
    wide = [value.to(torch.promote_types(dtype, torch.float64)) for value in values]
    terms = [value * weight for value, weight in zip(wide, weights, strict=True) if weight]
    mean = sum(terms[1:], terms[0]) / sum(weights)
    return mean.to(dtype) if dtype.is_floating_point or dtype.is_complex else mean


def mean_of_named(given: Sequence[Named], weights: Sequence[float]) -> Named:
    return {name: weighted_mean([one[name] for one in given], weights) for name in given[0]}


def synchronized(rule: str, new: list[Named], counts: Sequence[bool]) -> list[Named]:
    """Each rank's buffers after a step. A rank whose batch weighs nothing has changed nothing."""
    if rule == "local":
        return new
    if rule == "rank0":
        return [new[0]] * len(new)
    counting = [buffers for buffers, does in zip(new, counts, strict=True) if does] or new[:1]
    shared = {}
    for name, first in counting[0].items():
        if first.is_floating_point() or first.is_complex():
            first = torch.stack([buffers[name] for buffers in counting]).mean(0)
        shared[name] = first
    return [shared] * len(new)
