"""Schedules: functions of the number of steps taken, which may stand wherever a hyperparameter can.
optax's names.

A schedule takes a count, a 0-d int64 tensor or an int. It answers with a 0-d float64 tensor on the
CPU, and reads no value on the host. Any function `count -> number or 0-d tensor` will do as one.

In one of your own, torch computes `0.1 * count` and `0.1 / (1 + count)` in float32. The eighth
digit differs from that of torch's LambdaLR, whose counts are Python's. `0.1 / (1 + count.double())`
is LambdaLR's. Counts are integers, so that a table can be indexed with one.

>>> schedule = warmup_cosine_decay_schedule(0.0, 1.0, warmup_steps=10, decay_steps=100)
>>> [round(schedule(count).item(), 3) for count in (0, 5, 10, 55, 100)]
[0.0, 0.5, 1.0, 0.5, 0.0]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import check_choice
from .arithmetic import Number, number
from .naming import named

Count = Tensor | int  # the number of steps before this one; a Tensor is 0-d int64
# Of ours; the Schedule of `base`, anyone's, is given tensors only
CountSchedule = Callable[[Count], Any]


# Shapes: functions of `gone`, the share of a stretch's steps that are gone, 0-d float64, 0 to 1


def _gone(count: Count, steps: int, begin: int = 0) -> Tensor:
    """Of a stretch of so many steps, which begins at a count."""
    return ((number(count) - begin) / steps).clamp(0, 1)


# From 1 to 0; half the cosine's period
def _half_cosine(gone: Tensor) -> Tensor:
    return 0.5 * (1 + torch.cos(math.pi * gone))


def _rising_cosine(gone: Tensor) -> Tensor:
    return 0.5 - 0.5 * torch.cos(math.pi * gone)


_Shape = Callable[[Tensor], Tensor]  # from a share, 0 to 1, to a share
_FALLING: dict[str, _Shape] = {  # from 1 to 0
    "linear": lambda gone: 1 - gone,
    "cosine": _half_cosine,
    "sqrt": lambda gone: 1 - gone.sqrt(),
}
_RISING: dict[str, _Shape] = {  # from 0 to 1
    "linear": lambda gone: gone,
    "cosine": _rising_cosine,
    "constant": lambda gone: (gone >= 1).double(),
}


@named
def constant_schedule(value: Number) -> CountSchedule:
    """One value at every step."""

    def schedule(count: Count) -> Tensor:
        return number(value)

    return schedule


@named
def polynomial_schedule(
    init_value: Number,
    end_value: Number,
    power: float,
    transition_steps: int,
    transition_begin: int = 0,
) -> CountSchedule:
    """From `init_value` to `end_value` along a power of the steps that remain.

    Args:
        init_value: the value until `transition_begin`.
        end_value: the value from `transition_begin + transition_steps` on.
        power: 1 is linear.
        transition_steps: how long it takes; 0 or less stays at `init_value`, as in optax.
        transition_begin: steps before it begins.
    """

    def schedule(count: Count) -> Tensor:
        # Plain Python: the number of steps is known when the schedule is made
        if transition_steps <= 0:
            return number(init_value)
        falling = (1 - _gone(count, transition_steps, transition_begin)) ** power
        return (init_value - end_value) * falling + end_value

    return schedule


@named
def linear_schedule(
    init_value: Number, end_value: Number, transition_steps: int, transition_begin: int = 0
) -> CountSchedule:
    """From `init_value` to `end_value` along a line, then `end_value`; without steps `init_value`
    for ever, as in optax.

    Arguments: see `polynomial_schedule`.
    """
    return polynomial_schedule(init_value, end_value, 1.0, transition_steps, transition_begin)


@named
def exponential_decay(
    init_value: float,
    transition_steps: int,
    decay_rate: float,
    transition_begin: int = 0,
    staircase: bool = False,
    end_value: float | None = None,
) -> CountSchedule:
    """`init_value * decay_rate ** (steps / transition_steps)`.

    Args:
        init_value: the value until `transition_begin`.
        transition_steps: steps for one factor of `decay_rate`.
        decay_rate: that factor, above 0.
        transition_begin: steps before it begins.
        staircase: only whole factors.
        end_value: a bound, from below if `decay_rate` is under 1, else from above.
    """
    if transition_steps <= 0 or decay_rate <= 0:
        raise ValueError(
            f"expected positive transition_steps and decay_rate, got {transition_steps} and "
            f"{decay_rate}"
        )

    def schedule(count: Count) -> Tensor:
        # Of `decay_rate`, 0-d float64; a fraction between two whole factors
        exponent = (number(count) - transition_begin).clamp(min=0) / transition_steps
        if staircase:
            exponent = exponent.floor()
        value = init_value * number(decay_rate) ** exponent
        # The bound lies on the side to which the value moves
        if end_value is None:
            return value
        return value.clamp(min=end_value) if decay_rate < 1 else value.clamp(max=end_value)

    return schedule


@named
def cosine_decay_schedule(
    init_value: float, decay_steps: int, alpha: float = 0.0, exponent: float = 1.0
) -> CountSchedule:
    """From `init_value` to `alpha * init_value` along half a cosine.

    Source: Loshchilov and Hutter, 2017 (1608.03983), equation 5; optax.cosine_decay_schedule.

    Args:
        init_value: the first value.
        decay_steps: steps to the last one.
        alpha: the last value as a share of the first.
        exponent: of the cosine part.
    """
    if decay_steps <= 0:
        raise ValueError(f"expected positive decay_steps, got {decay_steps}")

    def schedule(count: Count) -> Tensor:
        falling = _half_cosine(_gone(count, decay_steps)) ** exponent
        return init_value * ((1 - alpha) * falling + alpha)

    return schedule


@named
def join_schedules(schedules: Sequence[CountSchedule], boundaries: Sequence[int]) -> CountSchedule:
    """One schedule after the other; each counts from its own beginning.

    Args:
        schedules: at least one.
        boundaries: the counts at which the second, third, … begin.
    """
    if len(schedules) != len(boundaries) + 1:
        raise ValueError(
            f"{len(schedules)} schedules need {len(schedules) - 1} boundaries, got "
            f"{len(boundaries)}"
        )
    # Copies: a caller's later change must not change this schedule
    schedules, boundaries = list(schedules), list(boundaries)

    def schedule(count: Count) -> Tensor:
        now = number(count)
        # All are computed, and `where` picks: the host must not read a count that is a tensor
        value = number(schedules[0](count))
        for boundary, following in zip(boundaries, schedules[1:], strict=True):
            value = torch.where(now < boundary, value, number(following(count - boundary)))
        return value

    return schedule


@named
def warmup_constant_schedule(
    init_value: Number, peak_value: Number, warmup_steps: int
) -> CountSchedule:
    """A linear warm-up from `init_value` in `warmup_steps`, then `peak_value`; without a warm-up,
    `peak_value` from the first step."""
    # A `linear_schedule` without steps would stay at `init_value`
    if warmup_steps <= 0:
        return constant_schedule(peak_value)
    return linear_schedule(init_value, peak_value, warmup_steps)


@named
def warmup_cosine_decay_schedule(
    init_value: float,
    peak_value: float,
    warmup_steps: int,
    decay_steps: int,
    end_value: float = 0.0,
    exponent: float = 1.0,
) -> CountSchedule:
    """A linear warm-up, then half a cosine down to `end_value`.

    Args:
        init_value: the first value.
        peak_value: the value after the warm-up.
        warmup_steps: steps of the warm-up.
        decay_steps: steps in all, the warm-up included.
        end_value: the last value.
        exponent: of the cosine part.
    """
    if decay_steps <= warmup_steps:
        raise ValueError(
            f"decay_steps has the warm-up in it: expected more than {warmup_steps}, "
            f"got {decay_steps}"
        )
    # cosine_decay_schedule wants the end as a share of the peak
    alpha = 0.0 if peak_value == 0 else end_value / peak_value
    # The decay's own count begins at 0 where the warm-up ends
    warmup = linear_schedule(init_value, peak_value, warmup_steps)
    decay = cosine_decay_schedule(peak_value, decay_steps - warmup_steps, alpha, exponent)
    return join_schedules([warmup, decay], [warmup_steps])


@named
def warmup_exponential_decay_schedule(
    init_value: float,
    peak_value: float,
    warmup_steps: int,
    transition_steps: int,
    decay_rate: float,
    transition_begin: int = 0,
    staircase: bool = False,
    end_value: float | None = None,
) -> CountSchedule:
    """A linear warm-up, then an exponential decay.

    Args:
        init_value: the first value.
        peak_value: the value after the warm-up.
        warmup_steps: steps of the warm-up; those of the decay are counted from its end. Others: see
            `exponential_decay`.
    """
    warmup = linear_schedule(init_value, peak_value, warmup_steps)
    decay = exponential_decay(
        peak_value, transition_steps, decay_rate, transition_begin, staircase, end_value
    )
    return join_schedules([warmup, decay], [warmup_steps])


@named
def warmup_stable_decay_schedule(
    init_value: float,
    peak_value: float,
    warmup_steps: int,
    stable_steps: int,
    decay_steps: int,
    end_value: float = 0.0,
    shape: str = "linear",
) -> CountSchedule:
    """A linear warm-up, a plateau, then a decay.

    Source: Hägele et al., 2024 (2405.18392). optax has no such name.

    Args:
        init_value: the first value.
        peak_value: the value on the plateau.
        warmup_steps: steps of the warm-up.
        stable_steps: steps of the plateau.
        decay_steps: steps of the decay.
        end_value: the last value.
        shape: of the decay: "linear", "cosine", or "sqrt", which is
            `1 - sqrt(steps / decay_steps)`.
    """
    check_choice("shape", shape, _FALLING)
    if decay_steps <= 0:
        raise ValueError(f"expected positive decay_steps, got {decay_steps}")
    falling = _FALLING[shape]

    def decay(count: Count) -> Tensor:
        # Share of the way from end_value to peak_value, 1 to 0
        left = falling(_gone(count, decay_steps))
        return end_value + (peak_value - end_value) * left

    warmup = linear_schedule(init_value, peak_value, warmup_steps)
    plateau = constant_schedule(peak_value)
    boundaries = [warmup_steps, warmup_steps + stable_steps]
    return join_schedules([warmup, plateau, decay], boundaries)


@named
def sgdr_schedule(cosine_kwargs: Iterable[Mapping[str, Any]]) -> CountSchedule:
    """Cosines with warm-ups, one after the other: warm restarts.

    Source: Loshchilov and Hutter, 2017 (1608.03983); optax.sgdr_schedule.

    Args:
        cosine_kwargs: for each cycle, the arguments of `warmup_cosine_decay_schedule`; its
            `decay_steps` is the cycle's length.
    """
    # Copies: an iterable may be read once only
    cycles = [dict(kwargs) for kwargs in cosine_kwargs]
    schedules = [warmup_cosine_decay_schedule(**cycle) for cycle in cycles]
    # Counts at which cycles end, so all but the last are boundaries
    ends = [*itertools.accumulate(cycle["decay_steps"] for cycle in cycles)]
    return join_schedules(schedules, ends[:-1])


@named
def piecewise_constant_schedule(
    init_value: float, boundaries_and_scales: Mapping[int, float] | None = None
) -> CountSchedule:
    """`init_value`, multiplied by a scale from each boundary on.

    Arguments: see `piecewise_interpolate_schedule`.
    """
    return piecewise_interpolate_schedule("constant", init_value, boundaries_and_scales)


@named
def piecewise_interpolate_schedule(
    interpolate_type: str,
    init_value: float,
    boundaries_and_scales: Mapping[int, float] | None = None,
) -> CountSchedule:
    """From value to value between boundaries.

    Args:
        interpolate_type: "linear" or "cosine" between boundaries; "constant" up to each boundary,
            with a jump there.
        init_value: the value at step 0.
        boundaries_and_scales: at each boundary, the factor on the value before.
    """
    check_choice("interpolate_type", interpolate_type, _RISING)
    rising = _RISING[interpolate_type]
    # Boundary -> factor, in the order in which the boundaries come
    scales = dict(sorted((boundaries_and_scales or {}).items()))

    def schedule(count: Count) -> Tensor:
        value = number(init_value)
        start, start_value = 0, init_value  # of the stretch that ends at a boundary
        for boundary, factor in scales.items():
            # Each stretch adds its own rise: 0 before its start, all of it from its end on
            end_value = start_value * factor
            gone = _gone(count, max(boundary - start, 1), start)
            value = value + (end_value - start_value) * rising(gone)
            start, start_value = boundary, end_value
        return value

    return schedule


@named
def linear_onecycle_schedule(
    transition_steps: int,
    peak_value: float,
    pct_start: float = 0.3,
    pct_final: float = 0.85,
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
) -> CountSchedule:
    """One cycle of lines: up, down, and down to almost nothing.

    Source: Smith and Topin, 2018 (1708.07120); optax.linear_onecycle_schedule.

    Args:
        transition_steps: steps in all.
        peak_value: the largest value.
        pct_start: the share of steps before the peak.
        pct_final: the share of steps before the last descent.
        div_factor: the first value is `peak_value / div_factor`.
        final_div_factor: the last value is the first divided by it.
    """
    peak, trough = int(pct_start * transition_steps), int(pct_final * transition_steps)
    # Up to the peak, back to the first value, and down from there
    scales = {peak: div_factor, trough: 1 / div_factor, transition_steps: 1 / final_div_factor}
    return piecewise_interpolate_schedule("linear", peak_value / div_factor, scales)


@named
def cosine_onecycle_schedule(
    transition_steps: int,
    peak_value: float,
    pct_start: float = 0.3,
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
) -> CountSchedule:
    """One cycle of cosines: up, and down to almost nothing.

    Source: Smith and Topin, 2018 (1708.07120); optax.cosine_onecycle_schedule.

    Arguments: see `linear_onecycle_schedule`.
    """
    peak = int(pct_start * transition_steps)
    # Up to the peak, and from there to the last value at once
    scales = {peak: div_factor, transition_steps: 1 / (div_factor * final_div_factor)}
    return piecewise_interpolate_schedule("cosine", peak_value / div_factor, scales)
