"""Operators of an update that would each launch a kernel on a GPU: counted, per block of a model.

The group is a `CountingGroup`, of which one process plays one rank. Everything lies on the CPU, so
the numbers that would be on a GPU are told by their kind: numbers of the host are 0-d, and int64 or
float64, while params and all that is made of them are float32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero._torch_private import QuickDispatchMode
from functorch_zero.groups import CountingGroup, SingleRank
from functorch_zero.layout import node
from functorch_zero.layout.piece import Piece
from functorch_zero.optim.across import norms_of, reduce_leaf
from functorch_zero.optim.arithmetic import IN_CACHE, in_batches, on_numbers
from functorch_zero.sharded_optim import pointwise
from tests.modules import Unit
from tests.tiers import thinned, tiers

# They make room, or other views of it, and launch nothing. So does whatever `is_view`
NOT_LAUNCHED = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
NOT_LAUNCHED |= {"_unsafe_view", "_reshape_alias", "lift_fresh", "detach"}
WIDTH = 8


def blocks(count: int) -> nn.Sequential:
    """Transformers' blocks without their attention, units of 12 leaves each."""

    def forward(net: Any, x: Tensor) -> Any:
        q, k, v = net.qkv(net.norm1(x)).chunk(3, -1)
        x = x + net.out(q * k + v)
        return x + net.down(net.up(net.norm2(x)).relu())

    def block() -> Unit:
        return Unit(
            forward,
            norm1=nn.LayerNorm(WIDTH),
            norm2=nn.LayerNorm(WIDTH),
            qkv=nn.Linear(WIDTH, 3 * WIDTH),
            out=nn.Linear(WIDTH, WIDTH),
            up=nn.Linear(WIDTH, 4 * WIDTH),
            down=nn.Linear(4 * WIDTH, WIDTH),
        )

    return nn.Sequential(*(block() for _ in range(count)))


class Launches(QuickDispatchMode):
    """Counts the operators that would run on a GPU, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        tensors = [x for x in tree_leaves((args, kwargs, made)) if isinstance(x, Tensor)]
        launched = not func.is_view and name not in NOT_LAUNCHED
        if launched and any(x.dim() or x.dtype == torch.float32 for x in tensors):
            self.by_name[name] += 1
        return made


def launches_of_step(optimizer: optim.Transform, num_blocks: int, **options: Any) -> Counter[str]:
    """Those of a whole step at level 3, on one of 8 ranks."""
    torch.manual_seed(0)
    model = blocks(num_blocks)
    apply, params, buffers = fz.functionalize(model, units=Unit)

    def loss_fn(params: Any, buffers: Any, batch: Tensor) -> Tensor:
        return apply(params, buffers, batch)[0].square().mean()

    train = fz.train_step(loss_fn, optimizer, **options)
    step = fz.shard(train, level=3, group=CountingGroup(8))
    state, batch = step.init(params, buffers), torch.randn(4, WIDTH)
    # The first steps find flats that later ones remember, and are looked at
    for _ in range(5):
        state, _ = step(state, batch)
    with Launches() as launches:
        step(state, batch)
    return launches.by_name


def per_block(optimizer: optim.Transform, **options: Any) -> Counter[str]:
    """An optimizer's launches for one block more, beyond those of the step and AdamW's kernel."""

    def of_a_block(optimizer: optim.Transform, **options: Any) -> Counter[str]:
        more = launches_of_step(optimizer, 4, **options)
        more.subtract(launches_of_step(optimizer, 2, **options))
        return more

    difference = of_a_block(optimizer, **options)
    difference.subtract(of_a_block(optim.adamw(1e-3)))
    # Of two blocks more
    halves = {name: count // 2 for name, count in difference.items() if count}
    return Counter(halves)


OPTIMIZERS: dict[str, Callable[[], optim.Transform]] = {
    "clip, adamw": lambda: optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3)),
    "lion": lambda: optim.lion(1e-3),
    "lamb": lambda: optim.lamb(1e-3),
    "lars": lambda: optim.lars(1e-3),
    "adafactor": lambda: optim.adafactor(),
    "adafactor of parts": lambda: optim.chain(
        optim.scale_by_factored_rms(min_dim_size_to_factor=2),
        optim.contrib.clip_by_block_rms(1.0),
        optim.contrib.scale_by_param_block_rms(),
        optim.scale(-1e-3),
    ),
    "muon": lambda: optim.muon(1e-3),
}
# Per block, of 12 leaves
NUM_LAUNCHES = {
    "clip, adamw": 0,
    "lion": 8,
    "lamb": 25,
    "lars": 22,
    "adafactor": 40,
    "adafactor of parts": 104,
    "muon": 36,
    "grad_norm": 0,
    "param_norm": 0,
    "update_norm": 11,
}


@pytest.mark.parametrize("name", thinned(OPTIMIZERS))
def test_launches_per_block(name: str) -> None:
    launches = per_block(OPTIMIZERS[name]())
    assert launches.total() == NUM_LAUNCHES[name], dict(launches)


def test_launches_of_a_torch_optimizer() -> None:
    """As many for more leaves, whose gradients are kept."""

    def launches_of(num_blocks: int) -> Counter[str]:
        model = blocks(num_blocks)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer = optim.to_torch(OPTIMIZERS["clip, adamw"](), model)
        for _ in range(3):
            optimizer.step()
        with Launches() as launches:
            optimizer.step()
        return launches.by_name

    assert launches_of(2) == launches_of(4)


def test_norms_of_all_leaves_are_those_of_each() -> None:
    """To the bit; of any dtype, also where several come together, and of empty leaves."""
    dtypes = [torch.float32, torch.float16, torch.float64, torch.complex64, torch.float32]
    leaves = [torch.randn(7 * i, 3).to(dtype) for i, dtype in enumerate(dtypes)]
    leaves.append(torch.full((5,), 300.0, dtype=torch.float16))  # whose squares would overflow
    for norm, leaf in zip(norms_of(leaves), leaves, strict=True):
        expected = reduce_leaf(leaf, "norm")
        assert norm.dtype == expected.dtype and torch.equal(norm, expected)
    assert norms_of([]) == []


def test_numbers_keep_their_dtypes() -> None:
    tree = {"a": torch.tensor(4.0), "b": torch.tensor(9.0, dtype=torch.float64), "c": None}
    other = {"a": torch.tensor(1.0), "b": torch.tensor(3.0), "c": None}
    calls: list[torch.Size] = []

    def divide(x: Tensor, y: Tensor) -> Tensor:
        calls.append(x.shape)
        return x / y

    made = on_numbers(divide, tree, other)
    assert made["a"].item() == 4 and made["a"].dtype == torch.float32
    assert made["b"].item() == 3 and made["b"].dtype == torch.float64
    assert calls == [(1,), (1,)] and made["c"] is None
    assert on_numbers(divide, {}, {}) == {}
    # Of one kind: all at once
    on_numbers(divide, [other["a"], other["b"]], [tree["a"], tree["a"]])
    assert calls[2:] == [(2,)]


def test_a_cpu_sees_as_many_leaves_as_its_caches_hold() -> None:
    sizes = [1, IN_CACHE, 2, 0, 3]
    tree = {f"leaf{i}": torch.full((size,), float(i)) for i, size in enumerate(sizes)}
    factors = {f"leaf{i}": i for i in range(len(sizes))}
    seen = []

    def multiply(leaves: list[Tensor], by: list[int]) -> Sequence[Tensor]:
        seen.append([leaf.numel() for leaf in leaves])
        return torch._foreach_mul(leaves, by)

    made = in_batches(multiply, tree, factors)
    assert seen == [[1, IN_CACHE], [2, 0, 3]]
    for i, size in enumerate(sizes):
        assert torch.equal(made[f"leaf{i}"], torch.full((size,), float(i * i)))
    assert in_batches(multiply, {}, {}) == {}


@pytest.mark.parametrize("norm", tiers(thorough=["update_norm", "grad_norm", "param_norm"]))
def test_launches_of_metrics(norm: str) -> None:
    launches = per_block(optim.adamw(1e-3), metrics=[norm])
    assert launches.total() == NUM_LAUNCHES[norm], dict(launches)


class Means(NamedTuple):
    """The state of one leaf."""

    fast: Tensor
    slow: Tensor


def two_means(seen: list[int]) -> optim.Transform:
    """Pointwise; its state goes by leaf, and not by mean. `seen` takes the leaves of each call."""

    def init(params: Any) -> Any:
        zeros = optree.tree_map(lambda p: Means(p * 0, p * 0), params)
        return {"count": torch.zeros((), dtype=torch.int64), "means": zeros}

    def update(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
        leaves, treedef = optree.tree_flatten(updates)
        seen.append(len(leaves))
        olds = treedef.flatten_up_to(state["means"])
        news = [
            Means(o.fast * 0.5 + u, o.slow * 0.9 + u) for o, u in zip(olds, leaves, strict=True)
        ]
        made = [n.fast - 0.3 * n.slow for n in news]
        state = {"count": state["count"] + 1, "means": treedef.unflatten(news)}
        return treedef.unflatten(made), state

    return optim.pointwise(init, update)


@pytest.mark.parametrize(
    ("room", "expected", "donate"),
    tiers(
        [(IN_CACHE, [6], True)],
        [(IN_CACHE, [6], False), (1, [1] * 6, False), (1, [1] * 6, True)],
        rows=True,
    ),
)
def test_an_update_sees_many_flats_at_a_time(
    room: int, expected: list[int], donate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as there is room for, with the numbers of an update that sees all leaves."""
    monkeypatch.setattr(pointwise, "_room", lambda device: room)
    torch.manual_seed(0)
    model = blocks(6)
    apply, params, buffers = fz.functionalize(model, units=Unit)
    batches = [torch.randn(4, WIDTH) for _ in range(3)]

    def loss_fn(params: Any, buffers: Any, batch: Tensor) -> Tensor:
        return apply(params, buffers, batch)[0].square().mean()

    def steps(seen: list[int], **options: Any) -> Any:
        base = fz.train_step(loss_fn, optim.chain(two_means(seen), optim.scale(-0.1)))
        step = fz.shard(base, group=SingleRank(), **options) if options else base
        state = step.init(optree.tree_map(torch.clone, params), buffers)
        for batch in batches:
            seen.clear()
            state, _ = step(state, batch)
        return step.unshard(state) if options else state

    seen: list[int] = []
    got = steps(seen, level=3, donate=donate)
    assert seen == expected
    want = steps([])
    for a, b in zip(
        optree.tree_leaves((want.params, want.opt_state)),
        optree.tree_leaves((got.params, got.opt_state)),
        strict=True,
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("level", [0, 3])
def test_a_step_makes_no_pieces_that_nobody_reads(
    level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = blocks(2)
    apply, params, buffers = fz.functionalize(model, units=Unit)
    train = fz.train_step(lambda p, b, x: apply(p, b, x)[0].square().mean(), optim.adamw(1e-3))
    step = fz.shard(train, level=level, group=SingleRank())
    state, batch = step.init(params, buffers), torch.randn(4, WIDTH)
    state, _ = step(state, batch)
    made: list[object] = []

    def noted(*args: Any, **named: Any) -> Any:
        made.append(args)
        return Piece(*args, **named)

    monkeypatch.setattr(node, "Piece", noted)
    state, _ = step(state, batch)
    assert not made
