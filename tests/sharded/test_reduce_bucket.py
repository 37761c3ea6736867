"""`shard(reduce_bucket=...)`: gradients of several units that ranks sum as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from optree import tree_map
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import PeerError
from functorch_zero.groups import (
    CheckedGroup,
    CountingGroup,
    HybridGroup,
    ProcessGroup,
    counted,
    launch,
    run_ranks,
)
from functorch_zero.testing import assert_equal_values, assert_sharded_equals_unsharded
from tests.models import split
from tests.modules import Net, seeded
from tests.sharded.test_seams import ROUNDED
from tests.tiers import crossed, thinned, tiers

F64 = torch.float64
GRADIENTS = {0: "all_reduce", 1: "reduce_scatter", 2: "reduce_scatter"}


def linears(num: int, dim: int) -> Made:
    """A unit per layer."""
    model = seeded(lambda: nn.Sequential(*(nn.Linear(dim, dim) for _ in range(num))))
    apply, params, _ = fz.functionalize(model, units=nn.Linear)

    def output(params: Any, x: Tensor) -> Tensor:
        return apply(params, {}, x)[0]

    def loss_fn(params: Any, buffers: Any, x: Tensor) -> Tensor:
        return output(params, x).square().mean()

    return Made(fz.train_step(loss_fn, optim.sgd(0.1)), params, output)


class Made(NamedTuple):
    step: Any
    params: Any
    output: Callable[[Any, Tensor], Tensor]


def sums_of_gradients(group: Any, level: int) -> list[int]:
    """The elements of each collective of gradients."""
    calls = [call for call in group.calls if call.kind == GRADIENTS[level]]
    return [call.num_elements for call in calls if call.num_elements > 1000]  # others are words


def one_step(num: int, dim: int, level: int, **options: Any) -> Any:
    """The group of a step that has run."""
    group = CountingGroup(2)
    step, params, _ = linears(num, dim)
    sharded = fz.shard(step, level=level, group=group, **options)
    state = sharded.init(params)
    group.reset()
    sharded(state, torch.ones(2, dim))
    return group


@pytest.mark.parametrize("level", tiers([1], [0, 2]))
def test_sixty_small_units_send_one_collective(level: int) -> None:
    plain = sums_of_gradients(one_step(60, 64, level), level)
    joined = sums_of_gradients(one_step(60, 64, level, reduce_bucket=2**20), level)
    assert (len(plain), len(joined)) == (60, 1)
    assert sum(plain) == sum(joined)  # the same bytes


@pytest.mark.parametrize("level", thinned([2, 0, 1]))
def test_a_bucket_holds_at_most_its_bytes(level: int) -> None:
    """And leaves in backward, before the units that come later."""
    nbytes = 4 * (64 * 64 + 64)
    joined = sums_of_gradients(one_step(7, 64, level, reduce_bucket=3 * nbytes), level)
    assert [num // (64 * 64 + 64) for num in joined] == [3, 3, 1]

    group, before = CountingGroup(2), []

    def halfway(grad: Tensor) -> None:
        before.append(len(sums_of_gradients(group, level)))

    step, trees = two_halves(halfway)
    sharded = fz.shard(step, level=level, group=group, reduce_bucket=2 * nbytes)
    sharded(sharded.init(trees), torch.ones(2, 64))
    assert before[-1] == 1


def two_halves(halfway: Callable[[Tensor], None]) -> tuple[Any, Any]:
    """A step of four units, and their params; `halfway` is called in backward between the second
    pair and the first."""
    first, second = linears(2, 64), linears(2, 64)

    def loss_fn(trees: Any, buffers: Any, x: Tensor) -> Tensor:
        x = first.output(trees["a"], x)
        x.register_hook(halfway)
        return second.output(trees["b"], x).square().mean()

    return fz.train_step(loss_fn, optim.sgd(0.1)), {"a": first.params, "b": second.params}


class Operators(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func] += 1
        return func(*args, **(kwargs or {}))


def operators(level: int, **options: Any) -> Counter[Any]:
    """All of a step after the first."""
    step, params, _ = linears(3, 64)
    sharded = fz.shard(step, level=level, group=CountingGroup(2), **options)
    state, _ = sharded(sharded.init(params), torch.ones(2, 64))
    with Operators() as counter:
        sharded(state, torch.ones(2, 64))
    return counter.seen


@pytest.mark.parametrize("level", thinned([2, 0, 1]))
def test_a_unit_that_fills_a_bucket_is_not_copied(level: int) -> None:
    plain = operators(level)
    assert operators(level, reduce_bucket=4 * (64 * 64 + 64)) == plain
    # The counter can tell: joined, flats are copied once, and the sums back
    more = operators(level, reduce_bucket=2**20) - plain
    assert (more[torch.ops.aten.cat.default], more[torch.ops.aten._foreach_copy_.default]) == (1, 1)


def net() -> Net:
    """Units of unequal sizes in another order than the layout's, one of them used twice, a frozen
    leaf, and one that a rank may leave out."""

    def forward(net: Any, x: Tensor, leave_out: bool) -> Any:
        for block in (*net.blocks, net.blocks[0]):
            x = x + block(x)
        if not leave_out:
            x = x + net.maybe(x)
        return net.head(net.widen(x))

    model = Net(
        forward,
        head=nn.Linear(7, 3),
        maybe=nn.Linear(5, 5),
        blocks=nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3)),
        widen=nn.Linear(5, 7),
    )
    model.widen.bias.requires_grad_(False)
    return model


LOW = {"widen": fz.Precision(reduce=torch.float32)}  # its bucket has a dtype of its own


def build(accumulate: int = 1, precision: Any = None, uneven: bool = False) -> tuple[Any, ...]:
    model = seeded(lambda: net().double())
    units = [nn.Sequential, "head", "widen", "maybe"]
    apply, params, buffers = fz.functionalize(model, units=units, precision=precision)

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
        leave_out = uneven and bool((batch["x"][:, 0] > 0).all())
        output, _ = apply(params, buffers, batch["x"], leave_out)
        return output.square().mean(), fz.Aux(weight=len(batch["x"]))

    optimizer = optim.adamw(0.1, eps=1e-3)
    return fz.train_step(loss_fn, optimizer, accumulate=accumulate), params, buffers


def batches(ranks: int) -> list[list[Any]]:
    """Rank 0 has positive first features only, of unequal parts."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(3):
        x = torch.randn(16, 5, generator=generator, dtype=F64)
        rows = [4] + [12 // (ranks - 1)] * (ranks - 1)
        x[:4, 0] = x[:4, 0].abs()
        made.append(split({"x": x}, rows))
    return made


def train(group: Any, made: tuple[Any, ...], ranks: int, **options: Any) -> Any:
    step, params, buffers = made
    sharded = fz.shard(step, group=group, **options)
    state = sharded.init(params, buffers)
    for parts in batches(ranks):
        state, _ = sharded(state, parts[group.rank])
    return sharded.unshard(state).params


MIXED = {"": 3, "blocks.0": 1, "blocks.1": 1, "maybe": 2, "widen": 2, "head": 0}
# (ranks, of the shard axis), arguments of `build` and of `shard`
KINDS: dict[str, tuple[tuple[int, int | None], dict[str, Any], dict[str, Any]]] = {
    "level 0": ((3, None), {}, {"level": 0}),
    "level 1": ((3, None), {}, {"level": 1}),
    "level 2": ((3, None), {}, {"level": 2}),
    "level 0, accumulate": ((3, None), {"accumulate": 2}, {"level": 0}),
    "level 1, accumulate": ((3, None), {"accumulate": 2}, {"level": 1}),
    "level 2, accumulate": ((3, None), {"accumulate": 2}, {"level": 2}),
    "level 2, once": ((3, None), {"accumulate": 2}, {"level": 2, "reduce_gradients": "once"}),
    "level 0, uneven": ((2, None), {"uneven": True}, {"level": 0}),
    "level 1, uneven": ((2, None), {"uneven": True}, {"level": 1}),
    "level 0, dtypes": ((3, None), {"precision": LOW}, {"level": 0}),
    "level 2, dtypes": ((3, None), {"precision": LOW}, {"level": 2}),
    "several levels": ((3, None), {}, {"level": MIXED}),
    "level 2, time": ((3, None), {}, {"level": 2, "overlap": "time"}),
    "mesh, level 0": ((4, 2), {}, {"level": 0}),
    "mesh, level 1": ((4, 2), {}, {"level": 1}),
    "mesh, level 2": ((4, 2), {"accumulate": 2}, {"level": 2}),
    "mesh, both": ((4, 2), {}, {"level": 2, "state_axes": "both"}),
    "mesh, several": ((4, 2), {}, {"level": MIXED, "state_axes": "both"}),
    "replicas": ((2, 1), {}, {"level": 1}),
    "not donated": ((2, None), {}, {"level": 2, "donate": False}),
}


@pytest.mark.parametrize("kind", thinned([*KINDS], len(KINDS)))
def test_the_same_bits(kind: str) -> None:
    """Threads add in the order of ranks, wherever an element lies."""
    (ranks, shard_size), arguments, options = KINDS[kind]
    made = build(**arguments)

    def run(group: Any, **more: Any) -> Any:
        group = CheckedGroup(group)
        group = group if shard_size is None else HybridGroup(group, shard_size=shard_size)
        return train(group, made, ranks, **options, **more)

    expected = run_ranks(run, ranks)[0]
    # One bucket with some others, and all in one
    for num_bytes in (1000, 2**20):
        for params in run_ranks(lambda group, n=num_bytes: run(group, reduce_bucket=n), ranks):
            assert_equal_values(expected, params, grade="bitwise")


@pytest.mark.parametrize(("level", "ranks"), crossed((0, 1, 2), (1, 2, 3), quick=1))
def test_as_the_unsharded_step(level: int, ranks: int) -> None:
    step, params, buffers = build(accumulate=2)
    whole = [{"x": torch.cat([part["x"] for part in parts])} for parts in batches(3)]
    assert_sharded_equals_unsharded(
        step, params, buffers, whole, levels=(level,), ranks=(ranks,), reduce_bucket=1500
    )


@pytest.mark.thorough
@pytest.mark.parametrize("level", [2, 0, 1])
def test_processes(level: int) -> None:
    """Two ranks add two numbers, in either order."""
    made = build()

    def run() -> list[Any]:
        group = ProcessGroup()
        return [train(group, made, 2, level=level, reduce_bucket=n) for n in (None, 1000, 2**20)]

    for plain, *joined in launch(run, 2, start_method="fork", timeout=60):
        for params in joined:
            assert_equal_values(plain, params, grade="bitwise")


@pytest.mark.parametrize("level", tiers([0], [1, 2]))
def test_replicas_sum_pieces_as_one(level: int) -> None:
    step, params, _ = linears(6, 64)

    def run(group: Any, reduce_bucket: int | None) -> list[int]:
        group = counted(group)
        sharded = fz.shard(
            step,
            level=level,
            group=HybridGroup(group, shard_size=2),
            reduce_bucket=reduce_bucket,
        )
        state = sharded.init(params)
        group.reset()
        sharded(state, torch.ones(2, 64))
        return [group.num_calls("all_reduce"), group.num_calls("reduce_scatter")]

    plain, joined = (run_ranks(lambda g, n=n: run(g, n), 4)[0] for n in (None, 2**20))
    # Five fewer along each axis
    saved = [a - b for a, b in zip(plain, joined, strict=True)]
    assert saved == ([5, 0] if level == 0 else [5, 5])


@pytest.mark.parametrize("level", thinned([2, 0, 1]))
def test_a_program_joins_each_of_its_gradients(level: int) -> None:
    made, params, _ = linears(6, 64)

    def program(params: Any, x: Tensor) -> Any:
        for _ in range(2):
            loss, grads = fz.value_and_grad(made.loss_fn)(params, {}, x)
            params = fz.apply_updates(params, tree_map(lambda g: -0.1 * g, grads))
        return params, {"loss": loss}

    group = CountingGroup(2)
    step = fz.program_step(program, init=lambda params: params)
    sharded = fz.shard(step, level=level, group=group, reduce_bucket=2**20)
    value = sharded.init(params)
    group.reset()
    sharded(value, torch.ones(2, 64))
    assert len(sums_of_gradients(group, level)) == 2


@pytest.mark.thorough
@pytest.mark.parametrize("level", [2, 0, 1])
def test_a_plan_has_the_same_collectives(level: int) -> None:
    group = one_step(6, 64, level, reduce_bucket=2**20)
    step, params, _ = linears(6, 64)
    for batch in (None, torch.ones(2, 64)):
        plan = fz.plan(params, step, level=level, ranks=2, reduce_bucket=2**20, batch=batch)
        planned = [c for c in plan.collectives if c.phase == "backward"]
        assert [c.num_elements for c in planned] == sums_of_gradients(group, level)
        assert planned[0].unit == "5"  # the first to come


def test_a_description_says_so() -> None:
    step, params, _ = linears(2, 4)
    sharded = fz.shard(step, level=1, group=CountingGroup(2), reduce_bucket=2**20)
    assert "reduce_bucket=1,048,576 bytes" in str(fz.describe(sharded, sharded.init(params)))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"level": 3}, ValueError, "level 3 works unit by unit"),
        ({"level": "fsdp"}, ValueError, "level 3 works unit by unit"),
        ({"level": 1, "reduction": ROUNDED}, NotImplementedError, "Remedy: one of the two"),
    ],
)
def test_what_does_not_go_together(options: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        fz.shard(linears(1, 4)[0], group=CountingGroup(2), reduce_bucket=2**20, **options)


@pytest.mark.parametrize("value", [0, -1, True, 2.0**20, "25 MB"])
def test_wrong_numbers_of_bytes(value: Any) -> None:
    with pytest.raises(ValueError, match="a number of bytes"):
        fz.shard(linears(1, 4)[0], level=1, group=CountingGroup(2), reduce_bucket=value)


def test_units_without_elements() -> None:
    step, params, _ = linears(3, 4)
    # An empty leaf beside others, in a bucket of its own unit
    tree = {"a": params, "none": torch.empty(0, requires_grad=True)}
    loss = lambda tree, buffers, x: step.loss_fn(tree["a"], buffers, x) + tree["none"].sum()
    made = fz.train_step(loss, optim.sgd(0.1)), tree, {}

    def run(group: Any) -> Any:
        sharded = fz.shard(made[0], level=2, group=group, reduce_bucket=2**20)
        return sharded.unshard(sharded(sharded.init(tree), torch.ones(2, 4))[0]).params["a"]

    expected = made[0](made[0].init(tree), torch.ones(2, 4))[0].params["a"]
    assert_equal_values(expected, run_ranks(run, 2)[0], grade="reordered")


def test_a_rank_that_fails_while_gradients_wait() -> None:
    def run(group: Any) -> None:
        def halfway(grad: Tensor) -> None:
            if group.rank:
                raise RuntimeError("broken")

        step, trees = two_halves(halfway)
        sharded = fz.shard(step, level=1, group=group, reduce_bucket=2**20)
        state = sharded.init(trees)
        with pytest.raises(RuntimeError if group.rank else PeerError, match="broken"):
            sharded(state, torch.ones(2, 64))

    run_ranks(run, 2)
