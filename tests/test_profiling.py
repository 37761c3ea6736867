"""What a profiler shows of a sharded step: ranges named after units, and none while nobody
profiles."""

from __future__ import annotations

import pytest
import torch

from functorch_zero import optim
from functorch_zero.groups import CountingGroup
from functorch_zero.profiling import NOTHING, ranged
from functorch_zero.sharded.api import shard
from functorch_zero.testing import models


@pytest.mark.parametrize("level", [0, 1, 3])
def test_a_profile_names_units(level: int) -> None:
    case = models.mlp()
    step, params, buffers = case.step(optim.sgd(0.1))
    sharded = shard(step, level=level, group=CountingGroup(2))
    state = sharded.init(params, buffers)
    # Without `acc_events` torch 2.11 warns that it keeps the events of one cycle
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        sharded(state, case.batches(1, 4)[0])
    seen = {event.name for event in profiler.events() if event.name.startswith("fz.")}
    for layer in ("layers.0", "layers.1"):
        expected = {
            f"fz.forward {layer}",
            f"fz.reduce {layer}[float64]",
            f"fz.wait for reduce {layer}[float64]",
        }
        assert expected <= seen
        assert (f"fz.gather {layer}" in seen) == (level == 3)
    assert {"fz.loss", "fz.backward", "fz.update", "fz.publish"} <= seen


def test_nothing_is_recorded_while_nobody_profiles() -> None:
    assert ranged("forward", "x") is NOTHING
