"""Loss seeds and divisors that turn the sum of gradients over ranks into their weighted mean.

Note [seeds]: on N ranks with data of their own the loss is differentiated with 1/N as the seed. So
what flows back through equal parts of a batch is what flows back through its rows in one process.
The rest of a rank's share of the whole, its weight or 1 / (number of micro-batches), is a factor of
packed gradients, which then need only be summed. One process has no share in its seed either, so
that on one rank backward is that of one process, whatever runs in it.
Where there is such a factor anyway, the seed is a power of two not above 1/N, which rounds nothing.
So it is where lower precisions than the leaves' would round the gradients of a seed such as 1/3.

Gradients that come from other ranks in backward have those ranks' shares in them, and a factor
would be the receiver's. So where a loss exchanges rows with other ranks, and gives a weight, the
seed carries all of the share, in the loss's dtype. A loss of weight 0 is left out there, and its
rank's gradients are what the others' losses say.

Note [overflow]: with a loss scale the seed is 1/N. So gradients flow back through float16 in the
size that they have in the unsharded step, and overflow when those do. A leaf's gradient is a sum,
whose parts fit where the sum wouldn't. So reduced gradients count as overflown where float16
couldn't hold them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..devices import divide_, number_on
from ..errors import StructureError
from ..layout.extent import Rows, elements
from ..layout.layout import Layout
from ..step.loss import Outcome
from ..step.nonfinite import all_finite
from ..step.program import GradientOptions
from ..step.weights import as_weight, is_on_device, nonzero, or_nan, unless_weightless

# float16's largest number is 65504, and from halfway to the next power of two it rounds up
F16_END = 65520.0  # numbers from here on are infinite in float16


@dataclass(frozen=True)
class GradScale:
    """The factor of packed gradients that the loss's seed did not carry, and the batch's weight.

    A batch that weighs nothing counts for nothing, even where its gradient is the mean of nothing,
    NaN.
    """

    factor: Tensor | float | None  # 0-d; None: 1
    weight: Tensor | float | None  # of the loss's batch, 0-d; None: every batch counts the same

    def __call__(self, flat: Tensor, *, is_own: bool) -> Tensor:
        """The bucket's packed gradients, scaled: in place where the flat is nobody else's."""
        if self.factor is not None:
            flat, is_own = flat.mul_(self.factor) if is_own else flat * self.factor, True
        # Without room for another flat
        if is_own and is_on_device(self.weight):
            return flat.masked_fill_(self.weight == 0, 0)
        return unless_weightless(flat, self.weight)


class LossSeed(NamedTuple):
    """A rank's share of the mean over ranks, as factors of its gradients."""

    seed: Tensor  # of backward, 0-d, in the loss's dtype
    scale: GradScale  # of packed gradients


def loss_seed_of(
    outcome: Outcome,
    layout: Layout,
    num_ranks: int,
    options: GradientOptions,
    *,
    exchanged: bool = False,
) -> LossSeed:
    """The seed and scale of one micro-batch on one of `num_ranks` ranks: its share of the mean. See
    Note [seeds] and Note [overflow].

    Args:
        options: how many micro-batches there are, and the scale of the loss.
        exchanged: whether gradients come from other ranks in backward.

    Raises:
        StructureError: the loss's dtype can't carry a weight.
    """
    loss, weight = outcome.loss, outcome.weight
    num_micro, scale = options.accumulate, options.scale
    # Weights are divided by their sum at the end, in `to_means`
    share = 1 / (num_ranks * num_micro) if weight is None else as_weight(weight)
    if exchanged and weight is not None:
        if loss.dtype.itemsize < torch.float32.itemsize:
            raise _rounds_weights(loss.dtype)
        whole = share if scale is None else share * scale
        return LossSeed(number_on(loss.device, whole, loss.dtype), GradScale(None, None))
    # All of a plain share, where nothing rounds it; with a loss scale see Note [overflow]
    is_plain = weight is None and num_micro == 1 and _is_exact(loss.dtype, layout)
    if scale is not None or is_plain:
        carried = 1 / num_ranks
    else:
        carried = 0.5 ** math.ceil(math.log2(num_ranks))
    # Where nothing is left, gradients needn't be multiplied
    rest = None if weight is None and share == carried else share / carried
    seed = number_on(loss.device, carried if scale is None else carried * scale, loss.dtype)
    return LossSeed(seed, GradScale(rest, weight))


def _rounds_weights(dtype: torch.dtype) -> StructureError:
    return StructureError(
        "a loss that exchanges rows with other ranks gives a weight, which its dtype would round",
        expected="float32 or float64",
        got=dtype,
        remedy="return loss.float(), fz.Aux(weight=...)",
    )


def _is_exact(dtype: torch.dtype, layout: Layout) -> bool:
    """Whether a loss of this dtype carries any seed without rounding the leaves' gradients."""
    # A policy rounds them on the way, and so does a leaf that is stored in halves
    if layout.rounds:
        return False
    used = {bucket.compute for bucket in layout.buckets if bucket.trainable}
    has_doubles = not used.isdisjoint((torch.float64, torch.complex128))
    return dtype == torch.float64 or (dtype == torch.float32 and not has_doubles)


def in_range(
    reduced: Mapping[int, Tensor | Rows], layout: Layout, outcome: Outcome, *, is_to_divide: bool
) -> bool:
    """Whether reduced, scaled gradients are finite, and would be in the unsharded step; see Note
    [overflow]. So must be the batch's loss and weight, unless it weighs nothing. The host waits for
    the device, once.

    Sums that are still to be divided by a weight are not held to float16's range: it is not known
    yet.
    """
    ends: list[float] = []  # per bucket, the magnitude that its gradients must stay below
    for b in reduced:
        is_half = layout.buckets[b].compute == torch.float16
        ends.append(F16_END if is_half and not is_to_divide else math.inf)
    numbers = [unless_weightless(outcome.loss, outcome.weight)]
    # A host's has been checked
    if is_on_device(outcome.weight):
        numbers.append(or_nan(outcome.weight))
    ends += [math.inf] * len(numbers)
    return all_finite([*map(elements, reduced.values()), *numbers], ends)


def to_means(
    reduced: Mapping[int, Tensor | Rows], total: Tensor | None, scale: float | None
) -> None:
    """Sums of weighted, scaled gradients -> weighted means, in place. A total of 0 leaves them
    0.

    Args:
        reduced: by bucket, (piece,), (numel,) or rows.
        total: the sum of the weights over ranks, 0-d; None: they are divided already.
        scale: of the loss; None: it isn't scaled.
    """
    # Where nothing has weight, gradients are 0 and stay 0
    divisor = None if total is None else nonzero(total)
    for flat in map(elements, reduced.values()):
        if divisor is not None:
            divide_(flat, divisor)
        if scale is not None:
            flat.div_(scale)
