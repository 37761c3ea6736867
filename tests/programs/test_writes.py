"""A program that writes to its value in place is refused, in one process and on ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from optree import tree_map
from torch import Tensor

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import PeerError, StructureError
from functorch_zero.groups import SingleRank, run_ranks
from functorch_zero.testing import assert_equal_values, assert_sharded_equals_unsharded
from tests.tiers import thinned, tiers

FIRST = {
    "w": torch.randn(5, 3, generator=torch.Generator().manual_seed(1)).requires_grad_(),
    "b": torch.randn(3, generator=torch.Generator().manual_seed(2)).requires_grad_(),
}
BATCHES = [torch.randn(8, 5, generator=torch.Generator().manual_seed(n)) for n in range(5)]
adamw = optim.adamw(0.1)


def loss(params: Any, x: Tensor) -> Tensor:
    return (x @ params["w"] + params["b"]).square().mean()


def init(net: Any) -> Any:
    return {"net": net, "opt": adamw.init(net), "count": torch.zeros(2)}


def writing(write: Callable[[Any], Any], at: Callable[[int], bool] = lambda count: True) -> Any:
    """A program that writes to its value in the steps that `at` says."""

    def program(value: Any, x: Tensor) -> Any:
        if at(int(value["count"][0])):
            write(value)
        mean, grads = fz.value_and_grad(loss)(value["net"], x)
        net, opt = adamw.apply(grads, value["opt"], value["net"])
        return {"net": net, "opt": opt, "count": value["count"] + 1}, {"loss": mean}

    return fz.program_step(program, init=init)


def by_numpy(value: Any) -> None:
    leaf = value["net"]["w"].detach().numpy()
    np.multiply(leaf, 0.5, out=leaf)


WRITES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "a leaf": ("net", lambda value: value["net"]["w"].mul_(0.5)),
    "tree_map": ("net", lambda value: tree_map(lambda p: p.add_(1), value["net"])),
    "a copy": ("net", lambda v: tree_map(lambda p, q: p.copy_(2 * q), v["net"], v["net"])),
    "the state": ("opt", lambda value: value["opt"][0].mu["w"].add_(1)),
    "a tensor": ("count", lambda value: value["count"].add_(1)),
    "data": ("net", lambda value: value["net"]["w"].data.mul_(0.5)),
}
STORY = r"written to its value in place.*path {}.*Remedy: `p \* 0.5`"


# Past the versions, too; of pieces there are no arrays
IN_ONE_PROCESS = WRITES | {"numpy": ("net.w", by_numpy)}


@pytest.mark.parametrize("name", IN_ONE_PROCESS)
def test_in_one_process(name: str) -> None:
    path, write = IN_ONE_PROCESS[name]
    step = writing(write)
    with pytest.raises(StructureError, match=STORY.format(path)):
        step(step.init(FIRST), BATCHES[0])


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("level", thinned([0, 3, 1, 2]))
@pytest.mark.parametrize("name", WRITES)
def test_on_ranks(name: str, level: int, donate: bool) -> None:
    path, write = WRITES[name]
    step = writing(write)

    def run(group: Any) -> None:
        sharded = fz.shard(step, level=level, group=group, donate=donate)
        with pytest.raises((StructureError, PeerError), match=STORY.format(path)):
            sharded(sharded.init(FIRST), BATCHES[0].chunk(group.size)[group.rank])

    run_ranks(run, 2)


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("level", tiers([3], [1]))
def test_in_a_step_that_is_not_looked_at(level: int, donate: bool) -> None:
    """Step 3. A step that donates finds writes to what it doesn't use up."""
    step = writing(WRITES["a leaf"][1], at=lambda count: count == 3)

    def run(group: Any) -> None:
        sharded = fz.shard(step, level=level, group=group, donate=donate)
        state = sharded.init(FIRST)
        for x in BATCHES[:3]:
            state, _ = sharded(state, x.chunk(group.size)[group.rank])
        with pytest.raises(StructureError, match=STORY.format("net")):
            sharded(state, BATCHES[3].chunk(group.size)[group.rank])

    run_ranks(run, 2)


def test_one_rank_that_writes_tells_the_others() -> None:
    def run(group: Any) -> None:
        step = writing(lambda value: group.rank == 0 or value["opt"][0].nu["b"].add_(1))
        sharded = fz.shard(step, level=1, group=group)
        kind = StructureError if group.rank else PeerError
        with pytest.raises(kind, match=STORY.format("opt")):
            sharded(sharded.init(FIRST), BATCHES[0])

    run_ranks(run, 2)


def test_what_the_program_has_made_may_be_written_to() -> None:
    def program(value: Any, x: Tensor) -> Any:
        own = tree_map(torch.clone, value["net"])
        tree_map(lambda p: p.mul_(0.9), own)
        mean, grads = fz.value_and_grad(loss)(value["net"], x)
        tree_map(lambda g: g.mul_(2), grads)
        net, opt = adamw.apply(grads, value["opt"], value["net"])
        tree_map(lambda p, o: p.add_(o, alpha=0.01), net, own)
        return {"net": net, "opt": opt, "count": value["count"].clone().add_(1)}, {"loss": mean}

    step = fz.program_step(program, init=init)
    for donate in (False, True):
        assert_sharded_equals_unsharded(
            step, FIRST, BATCHES[:3], levels=[1, 3], ranks=[2], donate=donate
        )


@pytest.mark.parametrize("level", [None, 1, 3])
def test_a_module_s_buffers_go_by_the_parameter_for_them(level: int | None) -> None:
    """Batch norm writes to its buffers: to those of the value, where a loss reaches these."""

    def normed(params: Any, x: Tensor, buffers: Any) -> Tensor:
        running = buffers["mean"], buffers["variance"]
        return F.batch_norm(x @ params["w"], *running, training=True).sigmoid().mean()

    def step_of(by_name: bool) -> Any:
        def program(value: Any, x: Tensor) -> Any:
            net, buffers = value
            if by_name:
                (_, _, buffers), grads = fz.value_and_grad(normed)(net, x, buffers=buffers)
            else:
                _, grads = fz.value_and_grad(lambda p, x: normed(p, x, buffers))(net, x)
            return (fz.apply_updates(net, grads), buffers), {}

        first = {"mean": torch.zeros(3), "variance": torch.ones(3)}
        return fz.program_step(program, init=lambda net: (net, first))

    def run(step: Any, group: Any) -> Any:
        sharded = step if group is None else fz.shard(step, level=level, group=group)
        state = sharded.init(FIRST)
        return state, sharded(state, BATCHES[0])[0]

    group = None if level is None else SingleRank()
    before, after = run(step_of(by_name=True), group)
    assert (before.value[1]["mean"] == 0).all() and (after.value[1]["mean"] != 0).all()
    with pytest.raises(StructureError, match=r"path 1.mean.*value_and_grad\(loss\)\(.*buffers="):
        run(step_of(by_name=False), group)


def assigns(value: Any, x: Tensor) -> Any:
    """It puts other leaves into dicts of its value, and returns these."""
    net, moments = value["net"], value["opt"][0].mu
    moments["w"] = 2 * moments["w"]
    mean, grads = fz.value_and_grad(loss)(net, x)
    value["net"], value["opt"] = adamw.apply(grads, value["opt"], net)
    value["count"] = value["count"] + 1
    return value, {"loss": mean}


def adds_an_entry(value: Any, x: Tensor) -> Any:
    """One that comes before the others."""
    value["a"] = torch.ones(2)
    mean, grads = fz.value_and_grad(loss)(value["net"], x)
    net, opt = adamw.apply(grads, value["opt"], value["net"])
    return {"net": net, "opt": opt, "count": value["count"] + 1}, {"loss": mean}


@pytest.mark.parametrize("program", tiers([adds_an_entry], [assigns]))
def test_a_program_may_change_dicts_of_its_value(program: Any) -> None:
    """They are its own: their next leaves count, and the state that was given stays as it is."""
    step = fz.program_step(program, init=init)
    state = step.init(FIRST)
    for x in BATCHES[:3]:
        state, _ = step(state, x)
    assert state.value["count"].tolist() == [3, 3] and state.value["opt"][0].count == 3
    assert state.value["net"]["w"].requires_grad and not state.value["count"].requires_grad
    for donate in (False, True):
        assert_sharded_equals_unsharded(
            step, FIRST, BATCHES[:3], levels=[1, 3], ranks=[2], donate=donate
        )

    sharded = fz.shard(step, level=3, group=SingleRank())
    given, _ = sharded(sharded.init(FIRST), BATCHES[0])
    before = sharded.unshard(given).value
    made = [sharded.unshard(sharded(given, BATCHES[1])[0]).value for _ in range(2)]
    assert_equal_values(before, sharded.unshard(given).value, grade="bitwise")
    assert_equal_values(*made, grade="bitwise")
