"""A batch in micro-batches, and the means over their results by weight."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ..devices import number_on
from ..errors import StructureError, explain
from .loss import Outcome
from .rows import num_rows, sizes_by_path, split_rows
from .weights import as_weight, is_on_device, or_nan, unless_weightless


def check_accumulate(count: Any) -> None:
    """Raise unless this is a number of micro-batches."""
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(
            explain(
                "accumulate is no number of micro-batches",
                expected="an int",
                got=f"{type(count).__name__} {count!r}",
                remedy="accumulate=int(...)",
            )
        )
    if count < 1:
        raise ValueError(f"accumulate must be at least 1, got {count}")


def micro_batches(batch: Any, count: int) -> list[Any]:
    """The batch in `count` parts along its rows, the first ones larger by one where that doesn't
    divide; what belongs to all rows is in all of them."""
    if count == 1:
        return [batch]
    rows = num_rows(batch)
    # Parts of size 0 would have losses of NaN; an empty batch is that of a rank without data left
    if rows and rows < count:
        raise StructureError(
            "the batch is too small",
            path=sizes_by_path(batch)[0][0],
            expected=f"{count} rows or more, one per micro-batch",
            got=rows,
            remedy="pass larger batches, or accumulate over fewer",
        )
    return split_rows(batch, count)


def weighted_mean(values: Sequence[Tensor], outcomes: Sequence[Outcome]) -> Tensor:
    """The mean of one value per micro-batch, by their weights; 0 where nothing has weight.

    The values have one shape, the mean's: a leaf's gradients, or a metric.
    """
    # Added in the order of the micro-batches, so that the oracle's sums are always the same
    numerator: Tensor | None = None
    total: Tensor | None = None  # of the weights, 0-d float64
    for value, outcome in zip(values, outcomes, strict=True):
        weight = 1.0 if outcome.weight is None else outcome.weight
        # A number of the host's goes to the weight, which the host would have to wait for
        if is_on_device(weight) and value.is_cpu and value.dim() == 0:
            value = number_on(weight.device, value, value.dtype)
        own = number_on(value.device, weight)
        term = unless_weightless(value, weight) * own
        numerator = term if numerator is None else numerator + term
        total = own if total is None else total + own
    assert numerator is not None and total is not None
    # All of weight 0: the numerator is 0, and so is the mean
    divisor = torch.where(total == 0, 1, total)
    mean = numerator / divisor
    # A 0-d value has become float64 by its weight
    return mean.to(reduce(torch.promote_types, (value.dtype for value in values)))


def joined(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcomes of several micro-batches as one."""
    if len(outcomes) == 1:
        return outcomes[0]
    _check_alike(outcomes)
    weights = [or_nan(as_weight(o.weight)) for o in outcomes if o.weight is not None]
    metrics = {}
    # The names are equal in all, as was checked above
    for name in outcomes[-1].metrics:
        metrics[name] = weighted_mean([o.metrics[name] for o in outcomes], outcomes)
    return Outcome(
        loss=weighted_mean([o.loss for o in outcomes], outcomes),
        buffers=outcomes[-1].buffers,  # each micro-batch was given those of the one before
        metrics=metrics,
        weight=sum(weights[1:], weights[0]) if weights else None,
    )


def _check_alike(outcomes: Sequence[Outcome]) -> None:
    """Raise unless all micro-batches have a weight, or none has, and metrics of the same names:
    else one has no mean."""
    first, *others = outcomes
    for i, outcome in enumerate(others, 1):
        if (outcome.weight is None) != (first.weight is None):
            raise StructureError(
                "some micro-batches have a weight, and others have none",
                expected="Aux.weight from every call of the loss, or from none",
                got=f"none from micro-batch {i if outcome.weight is None else 0} of "
                f"{len(outcomes)}",
                remedy="give each a weight; 1 counts as much as none",
            )
        if outcome.metrics.keys() != first.metrics.keys():
            raise StructureError(
                "micro-batches have different metrics",
                expected=f"{sorted(first.metrics)}, as from micro-batch 0",
                got=f"{sorted(outcome.metrics)} from micro-batch {i} of {len(outcomes)}",
                remedy="return the same metrics from every call of the loss",
            )
