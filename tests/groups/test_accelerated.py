"""The ways of a group over NCCL, on a CPU: gloo under another name stands for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist

from functorch_zero import optim
from functorch_zero.errors import GroupError
from functorch_zero.groups import HybridGroup, ProcessGroup, launch, torch_distributed
from functorch_zero.sharded.api import shard
from functorch_zero.step.train import train_step
from tests.collectives import CHECKS, check_all, several_at_once
from tests.models import ZOO, split
from tests.tiers import thinned

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the ranks are forked")


def on_ranks(fn: Any, ranks: int, *args: Any) -> list[Any]:
    return launch(fn, ranks, *args, timeout=60.0, start_method="fork")


def standing_for_nccl() -> dist.ProcessGroup:
    """All ranks, over gloo under another name: as far as a `ProcessGroup` knows it is NCCL."""

    def create(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)

    dist.Backend.register_backend("standin", create, devices=["cpu"])
    made = dist.new_group(backend="cpu:standin")
    assert isinstance(made, dist.ProcessGroup)
    return made


@contextmanager
def noting_groups(noted: list[tuple[str, str]]) -> Iterator[None]:
    """Notes, of each collective that is launched, its kind and the torch group that runs it."""
    launch_now = ProcessGroup._launch

    def noting(self: ProcessGroup, kind: str, method: str, *arguments: Any) -> Any:
        connections = self._connections
        group = connections.group_for(method, on_device=False)
        apart = group is not connections.host
        noted.append((kind, "apart" if apart else "common"))
        return launch_now(self, kind, method, *arguments)

    ProcessGroup._launch = noting  # type: ignore[method-assign]
    try:
        yield
    finally:
        ProcessGroup._launch = launch_now  # type: ignore[method-assign]


@pytest.mark.parametrize("ranks", thinned([2, 3]))
def test_collectives(ranks: int) -> None:
    """Those of the backend itself, with reduce-scatters among the others and apart."""

    def fn() -> Any:
        group, noted = ProcessGroup(standing_for_nccl()), []
        with noting_groups(noted):
            check_all(group)
            common = {kind for kind, runs in noted if runs == "common"}
            group.reduce_apart()
            group.reduce_apart()
            names = check_all(group)
        return names, common, {kind for kind, runs in noted if runs == "apart"}

    for names, common, apart in on_ranks(fn, ranks):
        assert names == [check.__name__ for check in CHECKS]
        assert {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"} <= common
        assert apart == {"reduce_scatter"}


def test_gloo_has_one_torch_group() -> None:
    def fn() -> Any:
        group = ProcessGroup()
        group.reduce_apart()
        return [*group._connections.groups]

    assert on_ranks(fn, 2) == [["host"]] * 2


def test_a_failure_ends_both_torch_groups_and_both_come_back() -> None:
    def fn() -> Any:
        group = ProcessGroup(standing_for_nccl(), timeout=20)
        group.reduce_apart()
        before = dist.distributed_c10d._world.pg_map.keys()  # type: ignore[attr-defined]
        num_before, heard = len(before), []
        for _ in range(2):
            if group.rank == 1:
                group.fail(ValueError("bad batch"))
            with pytest.raises(GroupError) as caught:
                group.reduce_scatter(torch.empty(4), torch.ones(8)).wait()
            heard.append("bad batch" in str(caught.value))
            assert not group._connections.groups
            group.rejoin()
            noted: list[tuple[str, str]] = []
            with noting_groups(noted):
                several_at_once(group)
            assert ("reduce_scatter", "apart") in noted
            assert len(dist.distributed_c10d._world.pg_map) == num_before  # type: ignore[attr-defined]
        return heard

    assert on_ranks(fn, 2) == [[True, True]] * 2


def test_a_call_after_a_failure_leaves_the_connecting_to_rejoin() -> None:
    def fn() -> Any:
        group = ProcessGroup(standing_for_nccl(), timeout=20)
        group.fail(ValueError("bad batch"))
        group.reduce_apart()
        group.rejoin()
        several_at_once(group)
        return "reduce" in group._connections.groups

    assert on_ranks(fn, 2) == [True, True]


def trained(group: Any, level: int, **options: Any) -> tuple[list[Any], set[str]]:
    """Two steps: the state's leaves, and the kinds of collectives that ran apart."""
    case, noted = ZOO["mlp"], []  # type: tuple[Any, list[tuple[str, str]]]
    loss_fn, params, buffers = case.build()
    step = shard(train_step(loss_fn, optim.adamw(0.01)), level=level, group=group, **options)
    state = step.init(params, buffers)
    with noting_groups(noted):
        for batch in case.batches(2, 8):
            state, _ = step(state, split(batch, [8 // group.size] * group.size)[group.rank])
    leaves = [leaf.tolist() for leaf in optree.tree_leaves(step.unshard(state))]
    return leaves, {kind for kind, runs in noted if runs == "apart"}


@pytest.mark.parametrize("shape", thinned(["one axis", "replicas"]))
def test_a_step_reduces_apart(shape: str) -> None:
    """And has the numbers that it has over gloo."""

    def fn() -> Any:
        found = []
        for parent in (None, standing_for_nccl()):
            group: Any = ProcessGroup(parent)
            if shape == "replicas":
                group = HybridGroup(group, shard_size=2)
            found.append(trained(group, 3))
        return found

    for (expected, over_gloo), (leaves, apart) in on_ranks(fn, 2 if shape == "one axis" else 4):
        assert over_gloo == set() and apart == {"reduce_scatter"}
        assert leaves == expected


def test_backends_that_queue_on_a_device() -> None:
    backends = {"cpu": "gloo", "cuda": "nccl"}
    assert torch_distributed.accelerated(backends) == {"cuda": "nccl"}
    assert torch_distributed.accelerated({"cpu": "gloo", "cuda": "gloo"}) == {}
