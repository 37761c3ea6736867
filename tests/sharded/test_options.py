"""The options of `shard`: ranks compare all of them."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from functorch_zero.groups import CountingGroup
from functorch_zero.groups.mesh import HybridGroup, axes_of
from functorch_zero.layout.levels import Levels
from functorch_zero.runtime.prefetch import Overlap
from functorch_zero.sharded.options import Options
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
    "gather": object(),
    "state_storage": object(),
    "aligned": False,
}


def test_ranks_see_every_option() -> None:
    """A rank with another option does other collectives, or holds other tensors."""
    compared_apart = {"levels"}
    assert {field.name for field in fields(Options)} == {*OTHERS} | compared_apart
    for name, other in OTHERS.items():
        assert replace(OPTIONS, **{name: other}).describe() != OPTIONS.describe(), name
