"""`fz.describe`: the dtypes, places and bytes it says are those of the state, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import DonatedError, StructureError
from functorch_zero.groups import CountingGroup, counted, run_ranks
from functorch_zero.precision import Precision
from functorch_zero.sharded.api import shard
from functorch_zero.step.train import train_step
from functorch_zero.testing import models
from tests.local import local_leaves, published
from tests.models import ZOO
from tests.tiers import crossed, thinned

BF16, F32 = torch.bfloat16, torch.float32
OPTIMIZERS = {
    "adamw": lambda: optim.adamw(0.01),
    "shampoo": lambda: optim.shampoo(0.01),
    "sgd": lambda: optim.sgd(0.1),
}


def build(optimizer: Any = None, **options: Any) -> tuple[Any, Any, Any]:
    model = models.gpt(vocab=30, width=8, tied=False).module().float()
    model.place.requires_grad_(False)
    rules = {"": Precision(compute=BF16), nn.LayerNorm: Precision(compute=F32)}
    apply, params, buffers = fz.functionalize(model, units=models.Block, precision=rules)
    loss_fn = lambda p, b, x: apply(p, b, x)[0].float().square().mean()
    return train_step(loss_fn, optimizer or optim.adamw(0.01), **options), params, buffers


def bytes_of(state: Any) -> int:
    """Of all storages in a state."""
    tensors = [x for x in local_leaves(state) if isinstance(x, Tensor)] + published(state)
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}.values())


@pytest.mark.parametrize(
    ("name", "level"), crossed(OPTIMIZERS, [None, 0, 1, 2, 3, {"": 3, "blocks": 1}])
)
def test_bytes_are_those_of_the_state(name: str, level: Any) -> None:
    def run(group: Any) -> Any:
        step, params, buffers = build(OPTIMIZERS[name](), loss_scale=fz.LossScale())
        watched = counted(group)
        step = step if level is None else shard(step, level=level, group=watched)
        state = step.init(params, buffers)
        watched.reset()
        described = fz.describe(step, state)
        assert not watched.calls and described.nbytes == bytes_of(state)
        assert sorted(path for row in described.rows for path in row.leaves) == sorted(params)
        assert f"; {OPTIMIZERS[name]()}" in str(described).splitlines()[len(described.rows) + 1]

        assert f"; {OPTIMIZERS[name]()}" in str(described)
        assert repr(described) == str(described), "at a prompt"
        return described

    found = run_ranks(run, 1 if level is None else 3)
    assert [d.rank for d in found] == list(range(len(found)))
    if name == "shampoo" and level not in (None, 0):
        assert any("at owners" in row.state_where for row in found[0].rows)


def test_what_each_level_says() -> None:
    def rows(level: int) -> dict[tuple[str, Any, bool], Any]:
        step, params, buffers = build()
        sharded = shard(step, level=level, group=fz.groups.CountingGroup(4))
        found = fz.describe(sharded, sharded.init(params, buffers)).rows
        return {(row.unit, row.compute, bool(row.state)): row for row in found if row.leaves}

    travels = {
        0: (("reduce", F32),),
        1: (("reduce", F32), ("publish", BF16)),
        2: (("reduce", F32), ("publish", BF16)),
        3: (("gather", BF16), ("reduce", F32)),
    }
    held = {0: "whole", 1: "1/4, whole as bfloat16", 2: "1/4, whole as bfloat16", 3: "1/4"}
    for level, wire in travels.items():
        found = rows(level)
        block, norms = found["blocks.0", BF16, True], found["blocks.0", F32, True]
        assert block.wire == wire and block.storage == block.state == (F32,)
        assert block.where == held[level] and block.state_where == ("1/4" if level else "whole")
        assert norms.where == ("1/4" if level == 3 else "whole")
        assert set(norms.leaves) == {
            f"blocks.0.norm{i}.{what}" for i in (1, 2) for what in ("weight", "bias")
        }
        frozen = found["place", BF16, False]
        assert (
            frozen.wire == ((("gather", BF16),) if level == 3 else ()) and frozen.state_nbytes == 0
        )


@pytest.mark.parametrize("state_axes", thinned(["both", "shard"]))
@pytest.mark.parametrize("level", thinned([3, 2, 1, 0]))
def test_what_is_published_on_a_mesh(level: int, state_axes: Any) -> None:
    step, params, buffers = build()
    mesh = fz.HybridGroup(CountingGroup(4), shard_size=2)
    sharded = shard(step, level=level, group=mesh, state_axes=state_axes)
    said = set()  # by each row of trained leaves: whether it is published
    for row in fz.describe(sharded, sharded.init(params, buffers)).rows:
        if row.leaves and row.state:
            said.add("publish" in [message for message, _ in row.wire])
    planned = fz.plan(
        params, step, level=level, ranks=4, shard_size=2, state_axes=state_axes, buffers=buffers
    )
    published = any(call.phase == "publish" for call in planned.collectives)
    assert said == {published} and published == (
        level in (1, 2) or (level, state_axes) == (3, "both")
    )


def test_the_table() -> None:
    step, params, buffers = build()
    alone = str(fz.describe(step, step.init(params, buffers))).splitlines()
    assert (
        " ".join(alone[0].split())
        == "unit leaves storage compute wire where bytes state where bytes"
    )
    rows = fz.describe(step, step.init(params, buffers)).rows
    assert alone[-1].startswith("this process holds") and len(alone) == len(rows) + 2
    sharded = shard(step, level=3, group=fz.groups.CountingGroup(4, rank=2))
    state = sharded.init(params, buffers)
    table = str(fz.describe(sharded, state))
    assert "gather bfloat16, reduce float32  1/4" in table and "rank 2 of 4 holds" in table
    assert "fz.plan(params, step, batch=..., bandwidth=...)" in table
    sharded(state, torch.zeros(2, 5, dtype=torch.int64))
    with pytest.raises(DonatedError):
        fz.describe(sharded, state)


def test_a_state_of_another_step_is_refused() -> None:
    loss_fn, params, buffers = ZOO["mlp"].build(weighted=True)
    step = train_step(loss_fn, optim.adamw(0.1))
    sharded = shard(step, level=3, group=CountingGroup(2))
    with pytest.raises(StructureError, match="a sharded state was given with an unsharded step"):
        fz.describe(step, sharded.init(params, buffers))
    with pytest.raises(StructureError, match="was given a whole state"):
        fz.describe(sharded, step.init(params, buffers))
    with pytest.raises(TypeError, match="got a Params"):
        fz.describe(step, params)


def test_it_says_which_units_were_found_and_why() -> None:
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(90, 90), nn.Linear(90, 90)) for _ in range(3))
    model = nn.Sequential(nn.Identity(), nn.Linear(4, 4))
    model[0].blocks = blocks
    step = train_step(lambda params, buffers, batch: params["1.bias"].sum(), optim.sgd(0.1))
    _, params, buffers = fz.functionalize(model)
    lines = str(fz.describe(step, step.init(params, buffers))).splitlines()
    assert lines[-2:] == [
        "units found: 3 (Sequential, repeated in ModuleLists or Sequentials)",
        "units found: 1 (children of the model)",
    ]
    _, params, buffers = fz.functionalize(model, units=nn.Linear)
    assert "units found" not in str(fz.describe(step, step.init(params, buffers)))


def test_it_says_which_units_were_found_in_each_network() -> None:
    params = [fz.functionalize(nn.Sequential(*map(nn.Linear, s, s)))[1] for s in ([4], [4, 5])]
    program = fz.program_step(lambda value, batch: (value, {}), init=lambda g, d: {"g": g, "d": d})
    sharded = shard(program, level=3, group=CountingGroup(2))
    lines = str(fz.describe(sharded, sharded.init(*params))).splitlines()
    assert [line for line in lines if line.startswith("units")] == [
        "units found in d: 2 (children of the model)",
        "units found in g: 1 (children of the model)",
    ]
