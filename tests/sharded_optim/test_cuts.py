"""No storage is looked up to find out which flat leaves lie in, and little is copied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.layout import flat_buffers, sharded_tree
from functorch_zero.sharded import publish
from functorch_zero.sharded_optim import pointwise
from functorch_zero.sharded_optim.cuts import Cuts

PARAMS = {f"w{i}": torch.randn(64, 64) for i in range(2)} | {
    f"b{i}": torch.randn(64) for i in range(2)
}


def loss_of(params: Any, x: Tensor) -> Tensor:
    for i in range(2):
        x = torch.tanh(x @ params[f"w{i}"] + params[f"b{i}"])
    return x.square().mean()


def adam_chain() -> optim.Transform:
    return optim.chain(
        optim.clip_by_global_norm(1.0),
        optim.scale_by_adam(),
        optim.add_decayed_weights(0.01),
        optim.scale(-1e-3),
    )


# The optimizer, and the flats that a step packs: of updates that come leaf by leaf
OPTIMIZERS = {
    "adamw": (lambda: optim.adamw(1e-3), 0),
    "chain": (adam_chain, 0),
    "params_ema": (lambda: optim.params_ema(optim.adamw(1e-3), 0.99), 0),
    "muon": (lambda: optim.muon(1e-2), 1),
}


def build(kind: str, optimizer: optim.Transform) -> Any:
    if kind == "train":
        return fz.train_step(lambda p, b, x: loss_of(p, x), optimizer)

    def program(value: Any, x: Tensor) -> Any:
        loss, grads = fz.value_and_grad(loss_of)(value[0], x)
        return optimizer.apply(grads, value[1], value[0]), {"loss": loss}

    return fz.program_step(program, init=lambda p: (p, optimizer.init(p)))


@pytest.mark.parametrize("level", [1, 3])
@pytest.mark.parametrize("kind", ["train", "program"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_flats_are_known(monkeypatch: pytest.MonkeyPatch, name: str, kind: str, level: int) -> None:
    make, num_packed = OPTIMIZERS[name]
    group = fz.groups.CountingGroup(2)
    step = fz.shard(build(kind, make()), level=level, group=group, donate=True)
    state = step.init({path: p.clone().requires_grad_() for path, p in PARAMS.items()})
    num_buckets = len(state.sharding.layout.buckets)
    batch = torch.randn(4, 64)
    for _ in range(3):
        state, _ = step(state, batch)

    called = []

    def counted(name: str, real: Any) -> Any:
        return lambda *args: (called.append(name), real(*args))[1]

    modules = (flat_buffers, sharded_tree, pointwise, publish)
    for lookup in ("flat_of_pieces", "flat_of_leaves", "pack_pieces"):
        own = counted(lookup, getattr(flat_buffers, lookup))
        for module in modules:
            if hasattr(module, lookup):
                monkeypatch.setattr(module, lookup, own)
    step(state, batch)
    assert called == ["pack_pieces"] * num_packed * num_buckets


def test_leaves_from_elsewhere_lie_in_no_flat() -> None:
    flat, cuts = torch.arange(8.0), Cuts()
    leaves = [flat[:3], flat[3:]]
    cuts.add(leaves, flat)
    assert cuts.flat_of(leaves) is flat and cuts.among(leaves).flat_of(leaves) is flat
    assert all(cuts.flat_of([leaf]) is leaf for leaf in leaves)
    others = [leaves[::-1], [flat[:3]], [*leaves, flat[:0]], [leaves[0], flat[3:]]]
    assert all(cuts.flat_of(own) is None for own in others)
    assert cuts.among(leaves[1:]).flat_of(leaves) is None
