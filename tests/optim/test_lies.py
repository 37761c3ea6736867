"""Transforms that are falsely tagged: `shard` refuses each, and so does `check_transform`."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import optree
import pytest
import torch
from optree import tree_map
from torch import Tensor

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import TransformError
from functorch_zero.groups import run_ranks
from functorch_zero.optim import (
    Transform,
    pointwise,
    with_statistics,
    with_whole_leaves,
    with_whole_tree,
)
from functorch_zero.optim.claims.check import check_claims
from functorch_zero.testing import assert_sharded_equals_unsharded, check_transform
from functorch_zero.tree import paths
from tests.tiers import crossed, thinned

Leaf = Callable[[Tensor, Tensor], Any]  # (update, param) -> update

PARAMS: Any = {
    "block": {"bias": torch.zeros(4), "one": torch.zeros(1), "weight": torch.zeros(4, 6)},
    "empty": torch.zeros(0, 3),
    "head": {"bias": torch.zeros(3), "weight": torch.zeros(3, 4)},
    "kernel": torch.zeros(2, 3, 2, 2),
    "scalar": torch.zeros(()),
}


def leaves(fn: Leaf) -> Transform:
    def update(updates: Any, state: Any, params: Any) -> Any:
        return tree_map(fn, updates, params), state

    return pointwise(lambda params: (), update)


def trees(fn: Callable[[Any, Any], Any]) -> Transform:
    return pointwise(lambda params: (), lambda updates, state, params: (fn(updates, params), state))


def listed(fn: Callable[[int, str, list[Tensor]], Tensor]) -> Transform:
    """Each update made of its number, its path and all leaves."""

    def update(updates: Any, params: Any) -> Any:
        found, treedef = optree.tree_flatten(updates)
        return treedef.unflatten([fn(i, path, found) for i, path in enumerate(paths(updates))])

    return trees(update)


class Count(NamedTuple):
    n: Tensor


def counted(fn: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype = torch.int64) -> Transform:
    """(update, count) -> update."""

    def update(updates: Any, state: Count, params: Any) -> Any:
        n = state.n + 1
        return tree_map(lambda u: fn(u, n), updates), Count(n)

    return pointwise(lambda params: Count(torch.zeros((), dtype=dtype)), update)


def stateful(init: Any, fn: Any) -> Transform:
    """(update, its state) -> both."""

    def update(updates: Any, state: Any, params: Any) -> Any:
        found, treedef = optree.tree_flatten(updates)
        pairs = [fn(u, s) for u, s in zip(found, treedef.flatten_up_to(state), strict=True)]
        new = treedef.unflatten([u for u, _ in pairs])
        return new, treedef.unflatten([s for _, s in pairs])

    return pointwise(lambda params: tree_map(init, params), update)


def asks(fn: Callable[[Tensor, Tensor], Tensor]) -> Transform:
    """(update, norm of the whole leaf) -> update."""

    def update(updates: Any, state: Any, params: Any, across: Any) -> Any:
        return tree_map(fn, updates, across.norm(updates)), state

    return with_statistics(lambda params: (), update)


def remembers(fn: Callable[[dict[Any, Any], Tensor], Tensor]) -> Transform:
    """Something is kept outside of the state."""
    memory: dict[Any, Any] = {}
    return leaves(lambda u, p: fn(memory, u))


def once(memory: dict[Any, Any], u: Tensor) -> Tensor:
    memory["calls"] = memory.get("calls", 0) + 1
    return u * (2 if memory["calls"] == 1 else 1)


def later(memory: dict[Any, Any], u: Tensor) -> Tensor:
    memory["calls"] = memory.get("calls", 0) + 1
    return u * memory["calls"]


def momentum_outside(memory: dict[Any, Any], u: Tensor) -> Tensor:
    memory[u.shape] = memory.get(u.shape, 0) + u
    return memory[u.shape]


def index(u: Tensor) -> Tensor:
    return torch.arange(u.numel(), dtype=u.dtype).view(u.shape)


def own_norm(tree: Any) -> float:
    return math.sqrt(sum(float(u.square().sum()) for u in optree.tree_leaves(tree)))


LIES: dict[str, Callable[[], Transform]] = {
    # Of a leaf's shape
    "decay of matrices": lambda: leaves(lambda u, p: u + 0.1 * p if p.ndim >= 2 else u),
    "decay of matrices, by the update": lambda: leaves(lambda u, p: u * 2 if u.dim() > 1 else u),
    "ndim": lambda: leaves(lambda u, p: u * (u.ndim + 1)),
    "no vectors": lambda: leaves(lambda u, p: u if p.ndim == 1 else u * 2),
    "kernels": lambda: leaves(lambda u, p: u * 2 if p.ndim == 4 else u),
    "fan in": lambda: leaves(
        lambda u, p: u / math.sqrt(p.shape[-1]) if p.ndim and p.numel() else u
    ),
    "fan out": lambda: leaves(lambda u, p: u * (p.shape[0] if p.ndim else 1)),
    "size": lambda: leaves(lambda u, p: u * (p.size(0) if p.ndim == 2 else 1)),
    "aspect ratio": lambda: leaves(
        lambda u, p: u * max(1, p.shape[0] / p.shape[1]) ** 0.5 if p.ndim == 2 else u
    ),
    "len": lambda: leaves(lambda u, p: u * (len(u) if u.ndim else 1)),
    "numel": lambda: leaves(lambda u, p: u / max(p.numel(), 1)),
    "large leaves": lambda: leaves(lambda u, p: u * 2 if p.numel() > 20 else u),
    "small leaves": lambda: leaves(lambda u, p: u * 2 if p.numel() <= 2 else u),
    "nelement": lambda: leaves(lambda u, p: u * u.nelement()),
    "bytes": lambda: leaves(lambda u, p: u * u.nbytes),
    "leaves of one element": lambda: leaves(lambda u, p: u * 2 if u.numel() == 1 else u),
    "scalars": lambda: leaves(lambda u, p: u * 2 if u.shape == (1,) else u),
    "numbers that are even": lambda: leaves(lambda u, p: u * (1 + u.numel() % 2)),
    # Of the memory
    "stride": lambda: leaves(lambda u, p: u * (1 + sum(u.stride()))),
    "strides of a filter": lambda: leaves(
        lambda u, p: u * 2 if u.ndim == 4 and not u.is_contiguous() else u
    ),
    "strides of five dims": lambda: leaves(
        lambda u, p: u * 2 if u.ndim == 5 and not u.is_contiguous() else u
    ),
    "storage": lambda: leaves(lambda u, p: u * u.untyped_storage().nbytes()),
    "storage offset": lambda: leaves(lambda u, p: u * (1 + p.storage_offset())),
    "contiguity": lambda: leaves(lambda u, p: u * (2 if p.is_contiguous() else 1)),
    "alignment": lambda: leaves(lambda u, p: u * (1 + p.data_ptr() % 64)),
    "a view": lambda: leaves(lambda u, p: u * (2 if p._is_view() else 1)),
    "a base": lambda: leaves(lambda u, p: u * (2 if p._base is not None else 1)),
    "identity": lambda: leaves(lambda u, p: u * (1 + id(p) % 7)),
    "version": lambda: leaves(lambda u, p: u * (1 + p._version)),
    # Of other properties
    "position": lambda: leaves(lambda u, p: u * index(u)),
    "the first element": lambda: leaves(lambda u, p: u * (1 + (index(u) == 0))),
    "rows": lambda: leaves(
        lambda u, p: u * torch.arange(len(u), dtype=u.dtype)[:, None] if u.ndim == 2 else u
    ),
    "a triangle": lambda: leaves(lambda u, p: u.tril() if u.ndim == 2 else u),
    "another element": lambda: leaves(lambda u, p: u + u.reshape(-1)[:1] if u.numel() else u),
    "a roll": lambda: leaves(lambda u, p: u.roll(1)),
    "a flip": lambda: leaves(lambda u, p: u.flip(-1) if u.ndim else u),
    "a reshape": lambda: leaves(lambda u, p: u.reshape(-1)),
    # Of several leaves
    "path": lambda: listed(lambda i, path, all: all[i] * (2 if path.endswith("bias") else 1)),
    "a part of the path": lambda: listed(
        lambda i, path, all: all[i] * (2 if "head" in path else 1)
    ),
    "the number of the leaf": lambda: listed(lambda i, path, all: all[i] * i),
    "the last leaf": lambda: listed(lambda i, path, all: all[i] * (2 if i + 1 == len(all) else 1)),
    "the number of leaves": lambda: listed(lambda i, path, all: all[i] / len(all)),
    "another leaf": lambda: listed(
        lambda i, path, all: all[i] + (all[0].reshape(-1)[:1] if i else 0)
    ),
    "sorted leaves": lambda: listed(
        lambda i, path, all: all[i] * (1 + sorted(x.numel() for x in all).index(all[i].numel()))
    ),
    "the largest leaf": lambda: listed(
        lambda i, path, all: all[i] * (2 if all[i].numel() == max(x.numel() for x in all) else 1)
    ),
    "the total number of elements": lambda: listed(
        lambda i, path, all: all[i] / sum(x.numel() for x in all)
    ),
    "keys": lambda: trees(
        lambda u, p: {k: tree_map(lambda x, k=k: x * (1 + len(k)), v) for k, v in u.items()}
    ),
    # Of values
    "a mean": lambda: leaves(lambda u, p: u - u.mean() if u.numel() else u),
    "a norm": lambda: leaves(lambda u, p: u / (p.norm() + 1)),
    "a global norm": lambda: trees(lambda u, p: tree_map(lambda x: x / (1 + own_norm(u)), u)),
    "a global norm by foreach": lambda: trees(
        lambda u, p: tree_map(
            lambda x: x / (1 + torch.stack(torch._foreach_norm(optree.tree_leaves(u))).sum()), u
        )
    ),
    "a maximum": lambda: leaves(lambda u, p: u / u.abs().max() if u.numel() else u),
    "a branch": lambda: leaves(lambda u, p: u * 2 if u.numel() and u.reshape(-1)[0] > 0 else u),
    "a branch on any": lambda: leaves(lambda u, p: u * 0 if (u > 1).any() else u),
    "a NaN check": lambda: leaves(lambda u, p: u * 0 if not torch.isfinite(u).all() else u),
    "a list": lambda: leaves(lambda u, p: u * (1 + sum(u.reshape(-1).tolist()))),
    "numpy": lambda: leaves(lambda u, p: u * float(np.asarray(u).sum())),
    "a sort": lambda: leaves(lambda u, p: u.reshape(-1).sort().values.view(u.shape)),
    "a quantile": lambda: leaves(lambda u, p: u.clamp(max=u.quantile(0.9)) if u.numel() else u),
    "a softmax": lambda: leaves(lambda u, p: u.softmax(-1) if u.ndim else u),
    "a matrix product": lambda: leaves(lambda u, p: u @ u.mT @ u if u.ndim == 2 else u),
    "a rank": lambda: leaves(lambda u, p: u * u.reshape(-1).argsort().view(u.shape)),
    "a cumulative sum": lambda: leaves(lambda u, p: u.reshape(-1).cumsum(0).view(u.shape)),
    # Of chance and of time
    "noise": lambda: leaves(lambda u, p: u + torch.randn_like(u)),
    "noise from a generator": lambda: leaves(
        lambda u, p: u + torch.randn(u.shape, generator=torch.Generator().manual_seed(0)).to(u)
    ),
    "dropout": lambda: leaves(lambda u, p: torch.nn.functional.dropout(u)),
    "stochastic rounding": lambda: leaves(lambda u, p: (u + torch.rand_like(u)).floor()),
    "numpy's noise": lambda: leaves(
        lambda u, p: (
            u + torch.from_numpy(np.random.default_rng(0).normal(size=tuple(u.shape))).to(u)
        )
    ),
    "the clock": lambda: leaves(lambda u, p: u * (1 + time.perf_counter() % 1)),
    # Of calls
    "the first call": lambda: remembers(once),
    "the number of calls": lambda: remembers(later),
    "a momentum outside of the state": lambda: remembers(momentum_outside),
    "a late mean": lambda: counted(lambda u, n: torch.where(n > 1000, u - u.mean(), u)),
    "a late branch": lambda: counted(lambda u, n: u * u.numel() if n > 1000 else u),
    "a late decay": lambda: counted(lambda u, n: u * 2 if n > 1000 and u.ndim >= 2 else u),
    "an end of four steps": lambda: counted(
        lambda u, n: u * u.numel() if (int(n) + 1) % 4 == 0 else u
    ),
    "a late decay by a float": lambda: counted(
        lambda u, n: u * 2 if n > 1000 and u.ndim >= 2 else u, torch.float32
    ),
    "state by ndim": lambda: stateful(
        lambda p: torch.zeros_like(p) + p.ndim, lambda u, s: (u * s, s)
    ),
    "a number per leaf": lambda: stateful(
        lambda p: p.new_tensor(float(p.numel())), lambda u, s: (u * s, s)
    ),
    "a norm kept per leaf": lambda: stateful(
        lambda p: p.new_zeros(()), lambda u, s: (u / (1 + s), s + u.norm())
    ),
    "rows of a factored state": lambda: stateful(
        lambda p: p.new_zeros(p.shape[:1]), lambda u, s: (u, s + 1)
    ),
    "a dtype": lambda: leaves(lambda u, p: u * 2 if u.dtype == torch.float64 and u.ndim > 1 else u),
    # Of magnitudes
    "the first element, where it is large": lambda: leaves(
        lambda u, p: (u.reshape(-1) + (u.reshape(-1)[:1] - 100).clamp(min=0)).reshape(u.shape)
    ),
    "ndim, where values are small": lambda: leaves(
        lambda u, p: torch.where(u.abs() < 1e-3, u * u.ndim, u)
    ),
    # Beside answers
    "answers by ndim": lambda: asks(lambda u, n: u / n if u.ndim >= 2 else u),
    "answers by numel": lambda: asks(lambda u, n: u / n * math.sqrt(max(u.numel(), 1))),
    "answers and a mean": lambda: asks(lambda u, n: (u - u.mean()) / n),
    "answers and a position": lambda: asks(lambda u, n: u * index(u) / n),
    # In place
    "in_place of many elements": lambda: pointwise(
        lambda p: (),
        lambda u, s, p: (tree_map(lambda x: x * 1, u), s),
        in_place=lambda u, s, p: (tree_map(lambda x: x.mul_(1 + (x.numel() > 99)), u), s),
    ),
    "updates in place": lambda: leaves(lambda u, p: u.mul_(2)),
    "params in place": lambda: leaves(lambda u, p: u + p.mul_(0.9)),
    "data": lambda: leaves(lambda u, p: u + p.data.mul_(0.9)),
    # In whole leaves
    "noise on whole leaves": lambda: with_whole_leaves(
        lambda p: (), lambda u, s: (u + torch.randn_like(u), s)
    ),
    "calls on whole leaves": lambda: with_whole_leaves(
        lambda p: (), (lambda m: lambda u, s: (later(m, u), s))({})
    ),
}

# By what is the same in one process and on ranks: optimizers see detached, plain tensors
HARMLESS: dict[str, Callable[[], Transform]] = {
    "requires_grad": lambda: leaves(lambda u, p: u * (2 if p.requires_grad else 1)),
    "is_leaf": lambda: leaves(lambda u, p: u * (2 if p.is_leaf else 1)),
    "class": lambda: leaves(lambda u, p: u * (2 if isinstance(p, torch.nn.Parameter) else 1)),
    "an attribute": lambda: leaves(lambda u, p: u * getattr(p, "lr_scale", 1.0)),
    # Of positions
    "device": lambda: leaves(lambda u, p: u * (2 if p.device.type == "cpu" else 1)),
    "a device of its own": lambda: leaves(lambda u, p: u + torch.ones(1, device=p.device)),
    "a gradient": lambda: leaves(lambda u, p: u * (2 if p.grad is not None else 1)),
    "an environment variable": lambda: leaves(lambda u, p: u * (1 + len(os.environ["PATH"]) % 3)),
}

# `docs/extend/transforms.md` lists these
UNSEEN_BY_SHARD: dict[str, Callable[[], Transform]] = {
    "memory format": lambda: leaves(
        lambda u, p: (
            u * (2 if p.is_contiguous(memory_format=torch.channels_last) else 1)
            if p.ndim == 4
            else u
        )
    ),
    "a third step, by a float": lambda: counted(
        lambda u, n: u * 2 if n == 3 and u.ndim >= 2 else u, torch.float64
    ),
    # Of the state
}

RIGHT: dict[str, Callable[[], Transform]] = {
    "torch's Rprop": lambda: optim.from_torch(torch.optim.Rprop, lr=0.1),
    "torch's fused Adam": lambda: optim.from_torch(torch.optim.Adam, lr=0.1, fused=True),
    "torch's foreach AdamW": lambda: optim.from_torch(torch.optim.AdamW, lr=0.1, foreach=True),
    "noise on whole leaves, from a seed": lambda: with_whole_leaves(
        lambda p: torch.zeros((), dtype=torch.int64), seeded_noise
    ),
    "noise on the whole tree, from a seed": lambda: with_whole_tree(
        lambda params: torch.zeros((), dtype=torch.int64),
        lambda u, s: (tree_map(lambda x: seeded_noise(x, s)[0], u), s + 1),
    ),
    "noise by across": lambda: with_statistics(
        lambda params: optim.step_count(),
        lambda u, n, p, across: (
            tree_map(torch.add, u, across.normal(u, seed=0, step=n)),
            n + 1,
        ),
    ),
    "decay of matrices, by whole shape": lambda: with_statistics(
        lambda params: (),
        lambda u, s, p, across: (
            tree_map(
                lambda x, y, extent: x + 0.1 * y if len(extent.shape) >= 2 else x,
                u,
                p,
                across.extents,
            ),
            s,
        ),
    ),
    "fan in, by whole shape": lambda: with_statistics(
        lambda params: (),
        lambda u, s, p, across: (
            tree_map(lambda x, extent: x / math.sqrt(extent.numel + 1), u, across.extents),
            s,
        ),
    ),
    "decay of matrices, masked": lambda: optim.add_decayed_weights(
        0.1, mask=lambda path, leaf: leaf.ndim >= 2
    ),
    "a mask by path": lambda: optim.masked(
        leaves(lambda u, p: u * 2), lambda path, leaf: path.endswith("bias")
    ),
    "labels by path": lambda: optim.partition(
        {"head": optim.sgd(0.1), "rest": optim.adamw(0.1)},
        lambda path, leaf: "head" if path.startswith("head") else "rest",
    ),
    "factors by depth": lambda: optim.scale_by_label(
        {1: 0.5, 2: 1.0}, lambda path, leaf: 1 + path.count(".")
    ),
    "a norm": lambda: asks(lambda u, n: u / (n + 1e-6)),
    "a global norm": lambda: optim.clip_by_global_norm(1.0),
    "a counter read on the host": lambda: counted(lambda u, n: u / int(n)),
    "a float counter": lambda: counted(lambda u, n: u / n, torch.float32),
    "a half counter": lambda: counted(lambda u, n: u / n.clamp(max=9).to(u), torch.bfloat16),
    "a table with a row per step": lambda: counted(lambda u, n: u * torch.ones(9)[n].to(u)),
    "a branch on the counter": lambda: counted(lambda u, n: u * 2 if n > 1000 else u),
    "a branch on the dtype": lambda: leaves(lambda u, p: u * (2 if u.dtype.is_complex else 1)),
    "a branch on the device": lambda: leaves(lambda u, p: u.float().to(u) if u.is_cuda else u),
    "where": lambda: leaves(lambda u, p: torch.where(u * p > 0, u, 0.5 * u)),
    "a view of its own leaf": lambda: leaves(lambda u, p: (u.reshape(-1) * 2).view(u.shape)),
    "a strict view": lambda: leaves(lambda u, p: (u.view(-1) * 2).view(u.shape)),
    "work in place on a copy": lambda: leaves(lambda u, p: u.clone().mul_(2).add_(p)),
    "foreach": lambda: trees(
        lambda u, p: optree.tree_unflatten(
            optree.tree_structure(u), torch._foreach_mul(optree.tree_leaves(u), 2.0)
        )
    ),
    "a constant of its own": lambda: leaves(lambda u, p: u * torch.linspace(0, 1, 5).sum().to(u)),
    "a cached constant": lambda: remembers(lambda memory, u: u * memory.setdefault("two", 2.0)),
    "a pointwise cube, clamped": lambda: leaves(lambda u, p: (u**3).clamp(-1, 1)),
    "an exponential": lambda: leaves(lambda u, p: torch.expm1(u)),
    "a norm by whole size": lambda: with_statistics(
        lambda params: (),
        lambda u, s, p, across: (
            tree_map(
                lambda x, n, e: x / (1 + n / math.sqrt(e.numel + 1)) if e.numel > 9 else x,
                u,
                across.norm(u),
                across.extents,
            ),
            s,
        ),
    ),
    "a momentum": lambda: stateful(torch.zeros_like, lambda u, s: (s * 0.9 + u, s * 0.9 + u)),
    "another dtype of state": lambda: stateful(
        lambda p: torch.zeros_like(p, dtype=torch.float32),
        lambda u, s: (u + s, (s + u).to(torch.float32)),
    ),
    "nothing": lambda: leaves(lambda u, p: u),
}


def seeded_noise(u: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(int(count))
    return u + torch.randn(u.shape, generator=generator).to(u), count + 1


def doubles() -> Any:
    return tree_map(Tensor.double, PARAMS)


@pytest.mark.parametrize("lie", LIES)
def test_shard_refuses(lie: str) -> None:
    """By the question that it asks at `init`. The error names the author and the remedy."""
    with pytest.raises(TransformError, match=r"test_lies\.[\s\S]*Remedy: \w"):
        check_claims(LIES[lie](), PARAMS)


@pytest.mark.parametrize("lie", ["noise", "dropout", "stochastic rounding"])
def test_the_remedy_for_torchs_random_numbers(lie: str) -> None:
    with pytest.raises(TransformError, match=r"Remedy: across\.normal\(updates, seed="):
        check_claims(LIES[lie](), PARAMS)


@pytest.mark.parametrize("lie", thinned({**LIES, **UNSEEN_BY_SHARD}, 4))
def test_check_transform_refuses(lie: str) -> None:
    make = {**LIES, **UNSEEN_BY_SHARD}[lie]
    params = doubles()
    if lie == "memory format":  # of params that lie so
        params["kernel"] = CHANNELS_LAST.double()
    with pytest.raises(TransformError, match=r"test_lies\.[\s\S]*Remedy: \w"):
        check_transform(make(), params=params, seeds=(0,), ranks=(2,))


CHANNELS_LAST = torch.zeros(2, 3, 2, 2).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("lie", UNSEEN_BY_SHARD)
def test_what_shard_does_not_see(lie: str) -> None:
    """A test that fails where it does: then the docs may say so."""
    check_claims(UNSEEN_BY_SHARD[lie](), PARAMS)


@pytest.mark.parametrize("threshold", [4096, 16384])
def test_thresholds_above_the_elements_that_are_tried(threshold: int) -> None:
    """Larger ones are not seen, and the docs say so."""
    lie = leaves(lambda u, p: u * 2 if u.numel() >= threshold else u)
    params = {"w": torch.zeros(128, 128)}
    if threshold > 4096:
        check_claims(lie, params)
        return
    with pytest.raises(TransformError):
        check_claims(lie, params)


def loss_fn(params: Any, buffers: Any, x: Tensor) -> Tensor:
    total = x.sum() * 0
    for leaf in optree.tree_leaves(fz.unshard(params)):
        total = total + (leaf * x.mean() + leaf.square()).sum()
    return total


def started() -> Any:
    generator = torch.Generator().manual_seed(0)

    def draw(p: Tensor) -> Tensor:
        return torch.randn(p.shape, generator=generator, dtype=torch.float64).requires_grad_()

    return tree_map(draw, PARAMS)


@pytest.mark.parametrize(("lie", "level"), crossed([*LIES][::7], (0, 1, 2, 3), n=4))
def test_every_rank_is_told_at_init(lie: str, level: int) -> None:
    def run(group: fz.Group) -> None:
        step = fz.shard(fz.train_step(loss_fn, LIES[lie]()), level=level, group=group)
        with pytest.raises(TransformError, match="Remedy"):
            step.init(started())

    run_ranks(run, 2)


SAME = {**HARMLESS, **RIGHT}
SAME.pop("a half counter")  # no grade of equality is for it


@pytest.mark.parametrize(("name", "level"), crossed(SAME, (0, 1, 2, 3), n=12, quick=2))
def test_right_uses_pass_and_train_the_same(name: str, level: int) -> None:
    make = SAME[name]
    optimizer = optim.chain(make(), optim.scale(-0.01))
    step = fz.train_step(loss_fn, optimizer)
    batches = torch.linspace(-1, 1, 24, dtype=torch.float64).view(3, 8)
    if name == "noise on the whole tree, from a seed":
        batches = batches[:2]
    assert_sharded_equals_unsharded(
        step, started(), {}, [*batches], levels=(level,), ranks=(2,), unused=("empty",)
    )


@pytest.mark.parametrize("name", thinned(RIGHT, 12))
def test_right_uses_are_not_refused(name: str) -> None:
    check_claims(RIGHT[name](), PARAMS)
    # A fused kernel rounds a tensor's last elements in another way
    grade = "reordered" if "fused" in name else None
    check_transform(RIGHT[name](), params=doubles(), seeds=(0,), ranks=(2,), grade=grade)
