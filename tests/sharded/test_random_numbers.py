"""Random numbers of sharded trees are, to the bit, those of whole ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from optree import tree_leaves, tree_map
from torch import Tensor

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import MismatchError, StructureError, TransformError
from functorch_zero.groups import CountingGroup, HybridGroup, run_ranks
from functorch_zero.optim import Transform
from functorch_zero.testing import assert_sharded_equals_unsharded
from functorch_zero.testing.equality import assert_equal_values
from tests.local import part
from tests.tiers import crossed, tiers

LEVELS: tuple[Any, ...] = (0, 1, 2, 3, {"": 2, "block": 3, "gain": 0})
RANKS = (1, 2, 3, 5)


def started(dtype: torch.dtype = torch.float64) -> Any:
    """Trained leaves, one of them empty, one of them 0-d, and a frozen one."""
    shapes = {"bias": (5,), "empty": (0, 3), "weight": (6, 7)}
    tree: Any = {"block": {name: torch.ones(shape, dtype=dtype) for name, shape in shapes.items()}}
    tree |= {"frozen": torch.ones(4, dtype=dtype), "gain": torch.ones((), dtype=dtype)}
    tree["half"] = torch.ones(3, 3, dtype=torch.bfloat16)
    # Two blocks of numbers, and a border of pieces in each
    tree["wide"] = torch.ones(100_000, dtype=torch.float32)
    return tree_map(lambda leaf: leaf.requires_grad_(leaf is not tree["frozen"]), tree)


def zero(params: Any) -> Tensor:
    """A loss whose gradients are zeros."""
    total = torch.zeros((), dtype=torch.float64)
    for leaf in tree_leaves(fz.unshard(params)):
        total = total + (leaf * 0).double().sum()
    return total


def zeros(params: Any) -> Any:
    grads = fz.value_and_grad(zero)(params)[1]
    return grads


def in_block(path: str, leaf: Tensor) -> bool:
    return path.startswith("block")


def label(path: str, leaf: Tensor) -> str:
    return "rows" if leaf.ndim > 1 else "others"


def every_kind() -> Transform:
    def update(updates: Any, count: Tensor, params: Any, across: Any) -> tuple[Any, Tensor]:
        for kind in ("normal", "uniform", "rademacher"):
            drawn = getattr(across, kind)(params, seed=2**50, step=count)
            updates = tree_map(torch.add, updates, drawn)
        return updates, count + 1

    return optim.with_statistics(lambda params: optim.step_count(), update)


TRANSFORMS: dict[str, Callable[[], Transform]] = {
    "every kind": every_kind,
    "masked": lambda: optim.masked(every_kind(), in_block),
    "chain": lambda: optim.chain(optim.add_noise(0.1, 0.5), optim.add_noise(0.1, 0.5, seed=1)),
    "partition": lambda: optim.partition(
        {"rows": optim.add_noise(0.1, 0.5), "others": every_kind()}, label
    ),
    "every second step": lambda: optim.multi_steps(optim.add_noise(0.1, 0.5), 2),
}


def two_updates(params: Any, transform: Transform) -> list[Any]:
    state, found = transform.init(params), []
    for _ in range(2):
        updates, state = transform.update(zeros(params), state, params)
        found.append(fz.unshard(updates))
    return found


@pytest.mark.parametrize(
    ("name", "level", "ranks"), crossed(TRANSFORMS, LEVELS, RANKS, n=5, quick=2)
)
def test_updates_of_a_transform_that_draws(name: str, level: Any, ranks: int) -> None:
    transform = TRANSFORMS[name]()
    expected = two_updates(started(), transform)
    assert torch.count_nonzero(expected[1]["block"]["weight"])

    def run(group: Any) -> Any:
        return two_updates(fz.shard_tree(started(), level=level, group=group), transform)

    for found in run_ranks(run, ranks):
        assert_equal_values(expected, found, grade="bitwise")


@pytest.mark.parametrize("level", tiers([3], [0, 1, 2]))
def test_on_a_mesh(level: int) -> None:
    transform = every_kind()
    expected = two_updates(started(), transform)

    def run(group: Any) -> Any:
        mesh = HybridGroup(group, shard_size=2)
        return two_updates(fz.shard_tree(started(), level=level, group=mesh), transform)

    for found in run_ranks(run, 4):
        assert_equal_values(expected, found, grade="bitwise")


def net() -> Any:
    """A linear layer's params."""
    tree = {"b": torch.zeros(3).double(), "w": torch.ones(4, 3).double()}
    return tree_map(Tensor.requires_grad_, tree)


def linear_loss(params: Any, buffers: Any, x: Tensor) -> Tensor:
    whole = fz.unshard(params)
    return ((x @ whole["w"] + whole["b"]) ** 2).mean()


@pytest.mark.parametrize(
    ("ranks", "shard_size"), tiers([(3, None)], [(1, None), (4, 2), (2, None)], rows=True)
)
def test_a_training_step_with_noise(ranks: int, shard_size: int | None) -> None:
    optimizer = optim.chain(optim.add_noise(0.1, 0.55), optim.adamw(0.01))
    batches = list(torch.randn(3, 12, 4, generator=torch.Generator().manual_seed(0)).double())
    assert_sharded_equals_unsharded(
        fz.train_step(linear_loss, optimizer),
        net(),
        None,
        batches,
        ranks=(ranks,),
        shard_size=shard_size,
    )


# ---- fz.random ----


def all_draws(params: Any) -> list[Any]:
    """Of held trees, of trees in pieces, and of several in a structure."""
    grads = zeros(params)
    found = [fz.random.normal(params, seed=1), fz.random.uniform(params, seed=1, step=3)]
    found.append(fz.random.rademacher((params, {"g": grads, "own": torch.zeros(3)}), seed=0))
    # They fit the tree that they are like
    found.append(tree_map(torch.add, params, found[0]))
    found.append(tree_map(torch.mul, grads, fz.random.normal(grads, seed=1)))
    return [fz.unshard(tree) for tree in found]


@pytest.mark.parametrize(("level", "ranks"), crossed(LEVELS, RANKS))
def test_draws_of_a_sharded_tree(level: Any, ranks: int) -> None:
    with torch.no_grad():
        expected = all_draws(started())

    def run(group: Any) -> Any:
        with torch.no_grad():
            return all_draws(fz.shard_tree(started(), level=level, group=group))

    for found in run_ranks(run, ranks):
        assert_equal_values(expected, found, grade="bitwise")


def test_drawing_communicates_nothing() -> None:
    group = CountingGroup(4, rank=1)
    params = fz.shard_tree(started(), level=3, group=group)
    before = len(group.calls)
    fz.random.normal(params, seed=0)
    assert len(group.calls) == before


class Value(NamedTuple):
    net: Any
    opt_state: Any


optimizer = optim.chain(optim.add_noise(0.01, 0.55), optim.sgd(0.1, momentum=0.9))


def init(net: Any) -> Value:
    return Value(net, optimizer.init(net))


def displaced_loss(net: Any, noise: Any, x: Tensor) -> Tensor:
    moved = tree_map(lambda p, n: p + 0.1 * n, fz.unshard(net), fz.unshard(noise))
    return linear_loss(moved, None, x)


def program(value: Value, x: Tensor) -> Any:
    """Gradients at a displaced point, and a random walk beside the optimizer's."""
    noise = fz.random.normal(value.net)
    loss, grads = fz.value_and_grad(displaced_loss)(value.net, noise, x)
    grads = tree_map(torch.add, grads, fz.random.rademacher(grads))
    net, opt_state = optimizer.apply(grads, value.opt_state, value.net)
    return Value(fz.apply_updates(net, fz.random.uniform(grads)), opt_state), {"loss": loss}


BATCHES = list(torch.randn(4, 12, 4, generator=torch.Generator().manual_seed(1)).double())


@pytest.mark.parametrize(
    ("level", "ranks"), tiers([(3, 2)], [(0, 3), (1, 2), (2, 3), (3, 3)], rows=True)
)
def test_a_program_goes_on_with_the_same_numbers(level: int, ranks: int, tmp_path: Any) -> None:
    """From a checkpoint, at another level and number of ranks."""
    step = fz.program_step(program, init=init)
    expected, values = step.init(net(), seed=4), []
    for x in BATCHES:
        expected, _ = step(expected, x)
        values.append(expected.value.net["w"])
    assert not torch.equal(values[1] - values[0], values[2] - values[1])

    def first(group: Any) -> None:
        sharded = fz.shard(step, level=level, group=group)
        state = sharded.init(net(), seed=4)
        for x in BATCHES[:2]:
            state, _ = sharded(state, part(x, group))
        fz.checkpoint.save(tmp_path, sharded, state)

    def then(group: Any) -> Any:
        sharded = fz.shard(step, level=3 - level, group=group)
        state = fz.checkpoint.load(tmp_path, sharded, like=sharded.init(net())).state
        for x in BATCHES[2:]:
            state, _ = sharded(state, part(x, group))
        return sharded.unshard(state)

    run_ranks(first, ranks)
    for whole in run_ranks(then, 4 - ranks):
        assert_equal_values(expected, whole)


def one_step(program: Any, seed: int | None = 0) -> Any:
    step = fz.program_step(program, init=lambda net: {"net": net})
    return step(step.init(net(), seed=seed), BATCHES[0])


def test_every_draw_of_a_step_is_another() -> None:
    def program(value: Any, x: Tensor) -> Any:
        first, second = fz.random.normal(value), fz.random.normal(value)
        found.append([first["net"]["w"], second["net"]["w"]])
        return value, {}

    found: list[list[Tensor]] = []
    one_step(program)
    one_step(program)
    one_step(program, seed=1)
    (a, b), again, (c, _) = found
    assert torch.equal(a, again[0]) and torch.equal(b, again[1])
    assert not torch.equal(a, b)
    assert not torch.equal(a, c)


def test_without_a_seed_it_is_refused() -> None:
    with pytest.raises(StructureError, match=r"no step of fz\.program_step runs[\s\S]*seed="):
        fz.random.normal(net())
    with pytest.raises(StructureError, match="the running step has no seed"):
        one_step(lambda value, x: (fz.random.normal(value), {}), seed=None)


def test_inside_of_a_loss_it_takes_a_seed() -> None:
    """A loss that runs again in backward would draw other numbers then."""

    def program_with(**named: int) -> Callable[..., Any]:
        def loss(net: Any, x: Tensor) -> Tensor:
            return displaced_loss(net, fz.random.normal(net, **named), x)

        def program(value: Any, x: Tensor) -> Any:
            found, grads = fz.value_and_grad(loss)(value["net"], x)
            moved = fz.apply_updates(value["net"], grads)
            fz.random.normal(moved)  # the loss is over
            return {"net": moved}, {"loss": found}

        return program

    with pytest.raises(StructureError, match=r"inside of a loss[\s\S]*Remedy: draw before"):
        one_step(program_with())
    expected, _ = one_step(program_with(seed=3))
    step = fz.program_step(program_with(seed=3), init=lambda net: {"net": net})

    def run(group: Any) -> Any:
        sharded = fz.shard(step, level=3, group=group)
        state, _ = sharded(sharded.init(net()), part(BATCHES[0], group))
        return sharded.unshard(state)

    for whole in run_ranks(run, 2):
        assert_equal_values(expected, whole)


def test_numbers_like_an_optimizers_state() -> None:
    whole = optimizer.init(net())
    with pytest.raises(TransformError, match=r"path 0.count, got torch.int64"):
        fz.random.normal(whole, seed=0)

    def run(group: Any) -> Any:
        params = fz.shard_tree(net(), level=3, group=group)
        with pytest.raises(TransformError, match=r"path 0.count, got torch.int64"):
            fz.random.normal(optimizer.init(params), seed=0)

    run_ranks(run, 2)


def test_ranks_that_draw_differently_are_told() -> None:
    """Else their next draws would be of other streams, and the trees' pieces not of one tree."""

    def run(group: Any) -> None:
        def program(value: Any, x: Tensor) -> Any:
            if group.rank:
                fz.random.normal(value)
            return fz.random.normal(value), {}

        step = fz.program_step(program, init=lambda net: {"net": net})
        sharded = fz.shard(step, level=3, group=group)
        with pytest.raises(MismatchError, match=r"number of draws of fz\.random"):
            sharded(sharded.init(net()), part(BATCHES[0], group))

    run_ranks(run, 2)
