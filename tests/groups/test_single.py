"""`SingleRank`: every collective of a group of one is the identity."""

from __future__ import annotations

import torch

from functorch_zero.groups.single import SingleRank


def test_collectives() -> None:
    group, given = SingleRank(), torch.arange(4.0)
    assert (group.rank, group.size) == (0, 1)
    calls = {
        "all_gather": lambda out: group.all_gather(out, given),
        "reduce_scatter": lambda out: group.reduce_scatter(out, given),
        "all_to_all": lambda out: group.all_to_all(out, [4], given, [4]),
        "all_reduce": lambda out: group.all_reduce(out.copy_(given)),
        "broadcast": lambda out: group.broadcast(out.copy_(given), 0),
    }
    for name, call in calls.items():
        out = torch.zeros(4)
        call(out).wait()
        assert torch.equal(out, given), name
    assert group.exchange(b"word") == [b"word"]
    group.barrier()
    assert group.subgroup([0]).size == 1
