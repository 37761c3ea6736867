"""A rank's share of the step: by what its loss's gradients are multiplied, and what makes their sum the mean.

Note [seeds]: the loss is differentiated with this rank's share of the whole (its weight, or 1/N) as the seed, so that
gradients need only be summed. Lower precisions would round what such a seed makes of them, and float16 overflow where
the unsharded step doesn't. There the seed is a power of two not above 1/N, and packed gradients get the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from .layout import Layout
from .step import Outcome


class Shares(NamedTuple):
    """By what gradients are multiplied."""

    seed: Tensor  # of backward, 0-d, in the loss's dtype
    rest: Tensor | float | None  # packed gradients; None: not at all


def shares_of(outcome: Outcome, layout: Layout, num_ranks: int, count: int, scale: float) -> Shares:
    """The shares of one of `count` micro-batches on one of `num_ranks` ranks, with a loss scale; see Note [seeds]."""
    share = 1 / (num_ranks * count) if outcome.weight is None else outcome.weight
    if not layout.rounds and outcome.loss.dtype in (torch.float32, torch.float64):
        first, rest = share, None
    else:
        first = 0.5 ** math.ceil(math.log2(num_ranks))
        rest = share / first
    seed = torch.as_tensor(first * scale, dtype=outcome.loss.dtype, device=outcome.loss.device)
    return Shares(seed.detach(), rest)


def to_means(reduced: Mapping[int, Tensor], total: Tensor | None, scale: float) -> None:
    """Sums of weighted, scaled gradients -> weighted means, in place. A total of 0 leaves them 0."""
    for flat in reduced.values():
        if total is not None:
            flat.div_(torch.where(total == 0, 1.0, total).to(flat.dtype))
        if scale != 1:
            flat.div_(scale)
