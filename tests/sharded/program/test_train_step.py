"""A training step on ranks: what it sends, and a state that one rank has changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optree import tree_map
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import MismatchError
from functorch_zero.groups import CountingGroup, run_ranks
from functorch_zero.testing.equality import assert_equal_values
from tests.tiers import crossed

ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "norms": {"metrics": ["grad_norm", "param_norm"]},
    "skips": {"nonfinite": "skip", "metrics": ["grad_norm", "update_norm"]},
    "scaled": {"loss_scale": fz.LossScale(2.0**12, interval=2), "accumulate": 2},
}
SOME = crossed([1, 2, 3], [*ASKED], [True, False], n=2)


@pytest.mark.parametrize(("level", "asked", "donate"), SOME)
def test_a_step_sends_two_messages(level: int, asked: str, donate: bool) -> None:
    """Metrics and words, in steps that are looked at and others; all norms together are one more.
    Units take no all-reduce at these levels."""

    def loss(params: Any, buffers: Any, batch: Tensor) -> Tensor:
        return (batch @ params["w"]).square().mean()

    group, options = CountingGroup(2), ASKED[asked]
    train = fz.train_step(loss, optim.adamw(0.1), **options)
    step = fz.shard(train, level=level, group=group, donate=donate)
    state = step.init({"w": torch.ones(3, 5, requires_grad=True)})
    for _ in range(6):
        group.reset()
        state, _ = step(state, torch.ones(4, 3))
        num = sum(call.kind == "all_reduce" for call in group.calls)
        assert num == 2 + ("metrics" in options)


@pytest.mark.parametrize(("level", "donate"), crossed([3, 0, 1, 2], [True, False], quick=1))
def test_a_state_that_one_rank_has_changed(level: int, donate: bool) -> None:
    """Nothing is sent at the end of a step. What a step is given is in its gradient's words, which
    come before the first write: in a step that isn't looked at (3), too."""
    apply, params, buffers = fz.functionalize(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))

    def loss(params: Any, buffers: Any, batch: Tensor) -> Any:
        predicted, new = apply(params, buffers, batch)
        return (predicted - 1).square().mean(), fz.Aux(buffers=new)

    train = fz.train_step(loss, optim.adamw(0.1))

    def others(state: Any, name: str) -> Any:
        field = "buffers" if name == "buffer" else name
        changed = tree_map(lambda leaf: leaf * 2, getattr(state, field))
        return state.replace(**{field: changed})

    def run(group: Any) -> None:
        step = fz.shard(train, level=level, group=group, donate=donate)
        state, own = step.init(params, buffers), torch.arange(12.0).view(4, 3) + group.rank
        for _ in range(3):
            state, _ = step(state, own)
        before = step.unshard(state)
        # The count is the same on all ranks, and what differs is named
        for name in ("params", "opt_state", "buffer"):
            leaf = r"'opt_state'\.0\.mu\.0\.weight" if name == "opt_state" else name
            with pytest.raises(
                MismatchError, match=rf"the state that is given differs .*{leaf}.* on rank 0 and"
            ):
                step(others(state, name) if group.rank == 1 else state, own)
            # A rank's other params leave those of the state as they were
            assert_equal_values(before.value, step.unshard(state).value, grade="bitwise")
        step(state, own)

    run_ranks(run, 2)
