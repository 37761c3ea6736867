"""The options of `shard`: ranks compare all of them."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.groups import CountingGroup
from functorch_zero.groups.mesh import HybridGroup, axes_of
from functorch_zero.layout.levels import Levels
from functorch_zero.places import ByUnit, File
from functorch_zero.runtime.prefetch import Overlap
from functorch_zero.sharded.options import Options, Places
from tests.sharded.test_seams import ROUNDED

OPTIONS = Options(
    levels=Levels(3),
    axes=axes_of(CountingGroup(4)),
    donate=True,
    sync_buffers="mean",
    reshard_after_forward=True,
)

# Another value of each field
OTHERS: dict[str, Any] = {
    "axes": axes_of(HybridGroup(CountingGroup(4), shard_size=2)),
    "donate": False,
    "sync_buffers": "local",
    "reshard_after_forward": False,
    "reduce_gradients": "once",
    "overlap": Overlap.time,
    "reduction": ROUNDED,
    "places": Places(state=ByUnit({"": File("folder")})),
    "reduce_bucket": 2**20,
    "aligned": False,
}


def test_ranks_see_every_option() -> None:
    """A rank with another option does other collectives, or holds other tensors."""
    compared_apart = {"levels"}
    assert {field.name for field in fields(Options)} == {*OTHERS} | compared_apart
    for name, other in OTHERS.items():
        assert replace(OPTIONS, **{name: other}).describe() != OPTIONS.describe(), name


def test_a_step_shows_its_level_and_rank() -> None:
    group = CountingGroup(2)
    loss = lambda params, buffers, x: x
    shown = [
        repr(fz.shard(step, level=level, group=group))
        for step, level in (
            (fz.train_step(loss, optim.adamw(0.1)), 3),
            (fz.eval_step(loss), 1),
            (fz.program_step(loss, init=loss), {"": 0}),
        )
    ]
    name = loss.__qualname__
    assert shown == [
        "ShardedStep(level 3, rank 0 of 2, train_step(adamw))",
        f"ShardedEvalStep(level 1, rank 0 of 2, {name})",
        f"ShardedStep(levels by leaf, rank 0 of 2, program_step({name}))",
    ]
