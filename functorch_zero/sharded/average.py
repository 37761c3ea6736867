"""Means of metrics over ranks, and the ranks' agreement that all have done the same.

Note [two planes]: values and words travel apart. Values, of metrics and weights, lie on the params'
device, and so do their means: no host reads them, so that none waits for its device. In a step they
set out when the last loss is known, and backward hides their way. Words are of the host: a digest
of the collectives that it has started, and flags. They go from host to host when all of those have
started, while the devices are still at work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..devices import number_on
from ..errors import GroupError
from ..groups.mesh import ONLY_COPY, Copy
from ..groups.protocol import Group, Work
from ..step.reminder import Reminder
from ..step.weights import nonzero, or_nan
from .equal_copies import check_copies
from .words import WIDTH, tell


class Means(NamedTuple):
    """The metrics of all ranks together, the same on each."""

    metrics: dict[str, Tensor]  # weighted means over ranks, 0-d
    weight: Tensor  # 0-d float64, the sum of the weights of the batch's parts
    num_weighty: Tensor  # 0-d float64: parts whose weight isn't 0


class MeansUnderWay(NamedTuple):
    """Metrics and weights of all ranks, on their way to their means."""

    values: Mapping[str, Tensor]  # this rank's, 0-d and floating-point
    weight: Tensor | float | None  # of this rank's batch; None: all count the same
    vector: Tensor  # as `_pack` makes it; sums over ranks once the work is done
    work: Work

    def divisor(self, num_copies: int) -> Tensor:
        """The sum of the weights of the batch's parts, 0-d float64; 1 where nothing has weight.
        Waits for the ranks' losses.

        Args:
            num_copies: of each part.
        """
        self.work.wait()
        return nonzero(self.vector[1] / num_copies)


def start_means(
    metrics: Mapping[str, Tensor],
    weight: Tensor | float | None,
    group: Group,
    device: torch.device,
) -> MeansUnderWay:
    """Send this rank's metrics and weight to the other ranks. One all-reduce of a few float64,
    which nobody waits for yet.

    Args:
        metrics: by name; 0-d tensors on any device, floating-point.
        weight: of this rank's part of the batch, 0-d, the sum of its micro-batches'; None: all
            parts count the same.
        group: all ranks, between the same collectives.
        device: of the means.
    """
    vector = _pack([*metrics.values()], weight, device)
    return MeansUnderWay(metrics, weight, vector, group.all_reduce(vector))


def compare_words(
    means: MeansUnderWay,
    group: Group,
    log: Sequence[str],
    rows: Sequence[int],
    reminder: Reminder,
    flags: Sequence[bool] = (),
) -> list[bool]:
    """Compare the ranks' words outside of a program's step, whose ledger does it otherwise. One
    all-reduce of a few int64; see Note [two planes]. Returns the flags, each raised by any rank.

    Raises `GroupError` on every rank when ranks report other metrics, or have started other
    collectives.

    Args:
        means: under way over the same group.
        log: the name of what is compared, and the collectives that this rank has started since.
        rows: of this rank's batch, per tensor, if they say what it weighs.
        reminder: of ranks whose batches have other numbers of rows.
        flags: this rank's.
    """
    told = tell([*words_of(means), *log], flags, group, sum(rows))
    if not told.alike:
        means.work.wait()
        raise _other_collectives(group, log)
    reminder.compare_ranks(rows, told.sizes, group.rank)
    return told.flags


def words_of(means: MeansUnderWay) -> list[str]:
    """The words of a rank's metrics, which all ranks must have equal."""
    has_weight = "no weight" if means.weight is None else "a weight"
    # Names in their order, since sums are matched by position
    return [*means.values, has_weight]


def means_of(means: MeansUnderWay, group: Group, copy: Copy = ONLY_COPY) -> Means:
    """The metrics' weighted mean over ranks, and the sum of the weights, of ranks whose words are
    compared by another message: where these differ, nobody uses the means. No communication, but
    the wait for the means.

    Copies of the same data count as one. Ranks compare them: the host reads the values, once.

    A weight below 0, or not finite, makes all means and the sum of the weights NaN.

    Raises `MismatchError` on every rank when ranks of the same data have found other values.

    Args:
        means: under way over the same group.
        copy: which copy of which part of the batch this rank has.
    """
    means.work.wait()
    if copy.num > 1:
        check_copies(copy, _own_numbers(means), group)
    sent = means.vector[: 2 + len(means.values)]  # zeros come behind
    num_weighty, total, *sums = sent.unbind()
    # Where no batch weighs anything the sums are 0
    divisor = total if means.weight is None else nonzero(total)
    metrics = {}
    for (name, value), weighted in zip(means.values.items(), sums, strict=True):
        metrics[name] = (weighted / divisor).to(value.dtype)
    # Copies count `copy.num` times in sums and weights alike, which a mean doesn't show
    return Means(metrics, weight=total / copy.num, num_weighty=num_weighty / copy.num)


def _own_numbers(means: MeansUnderWay) -> dict[str, float]:
    """This rank's metrics and weight by name, read by the host. It waits for the device, once for
    all."""
    weight = 1.0 if means.weight is None else means.weight
    own = {**means.values, "weight of its batch": weight}
    on_device = [number_on(means.vector.device, number) for number in own.values()]
    return dict(zip(own, torch.stack(on_device).tolist(), strict=True))


def _pack(values: Sequence[Tensor], weight: Tensor | float | None, device: torch.device) -> Tensor:
    """Whether the weight isn't 0, the weight, each value times it, and zeros: (a multiple of
    `WIDTH`,) float64."""
    own = [1.0 if weight is None else weight, 1.0, *values]
    numbers = torch.stack([number_on(device, number) for number in own])
    if weight is not None:
        own_weight = or_nan(numbers[0])
        # A batch that weighs nothing counts for nothing, even if its metric is NaN, a mean of
        # nothing
        numbers = torch.where(own_weight == 0, 0.0, numbers * own_weight)
        numbers[0] = own_weight != 0
    # Ranks whose metrics differ still send equal lengths, and learn of it instead of hanging
    return F.pad(numbers, (0, -len(numbers) % WIDTH))


def _other_collectives(group: Group, log: Sequence[str]) -> GroupError:
    # A rank knows only its own log: each tells where it was
    at = log[0] if log else "none"
    started = log[1:]
    last = ", ".join(started[-4:]) or "none"
    return GroupError(
        "the ranks are at different steps, have not started the same collectives, or report "
        f"other metrics; rank {group.rank} was at {at} and started {len(started)}, the last ones: "
        f"{last}. Their results are wrong, and the step is undone. Remedy: make every rank take "
        "the same steps, call the same units in the same order, return the same metrics, and give "
        "a weight on all ranks or on none"
    )
