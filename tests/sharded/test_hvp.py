"""Hessian-vector products on ranks, beside `jvp(grad)` of torch.func on whole batches."""

from __future__ import annotations

import gc
from typing import Any, NamedTuple

import optree
import pytest
import torch
from optree import tree_map
from torch import Tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import PeerError, StructureError
from functorch_zero.groups import CountingGroup, ProcessGroup, launch, run_ranks
from functorch_zero.testing import assert_equal_values, assert_sharded_equals_unsharded
from tests.models import MLP, ZOO, Batch, Case, even, split, uneven
from tests.modules import seeded
from tests.runtime.test_memory import WIDTH, LiveBytes, deep
from tests.step.test_hvp import loss_of_normed, normed, reversible
from tests.tiers import crossed, thinned, tiers

LEVELS = [0, 1, 2, 3]
# Not the one whose loss of a batch is no mean of its parts' losses
CASES = {name: case for name, case in ZOO.items() if not case.by_rank}
ROWS = 12
DATA = torch.ones((), dtype=torch.float64, requires_grad=True)  # of no tree


def plain(case: Case, vector: Any) -> Any:
    """Forward over reverse, in plain torch: the loss, its gradient and the product."""
    module = seeded(lambda: case.model().double(), case.seed)
    (batch,) = case.batches(1, ROWS)
    trained = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}

    def loss(leaves: dict[str, Tensor]) -> Tensor:
        return case.criterion(functional_call(module, leaves, (batch["x"],)), batch["y"])

    along = {name: vector[name] for name in trained}
    grads, product = torch.func.jvp(torch.func.grad(loss), (trained,), (along,))
    return loss(trained).detach(), grads, product


def with_weights(case: Case) -> tuple[Any, Any]:
    """The case's loss for `fz.hvp`, weighted by rows, and the params."""
    loss_fn, params, _ = case.build(weighted=True)

    def loss(params: Any, batch: Batch) -> Any:
        value, aux = loss_fn(params, {}, batch)
        return value, fz.Aux(metrics=aux.metrics, weight=aux.weight)

    return loss, params


def drawn_product(hvp: Any, params: Any, *args: Any, **named: Any) -> Any:
    """The loss, the whole gradients and the product, of `fz.hvp(loss)` and a drawn vector."""
    vector = fz.random.normal(fz.zero_updates(params), seed=1)
    found, grads, product = hvp(params, vector, *args, **named)
    return found, fz.unshard(grads), fz.unshard(product)


def on_rank(group: Any, case: Case, level: Any, sizes: list[int]) -> Any:
    loss, params = with_weights(case)
    (batch,) = case.batches(1, ROWS)
    sharded = fz.shard_tree(params, level=level, group=group)
    return drawn_product(fz.hvp(loss), sharded, split(batch, sizes)[group.rank])


def check(case: Case, results: list[Any]) -> None:
    loss, params = with_weights(case)
    vector = fz.random.normal(fz.zero_updates(params), seed=1)
    expected, of_loss, of_hessian = plain(case, vector)
    (_, seen), *_ = fz.hvp(loss)(params, vector, case.batches(1, ROWS)[0])
    for (value, metrics), grads, product in results:
        assert_equal_values(expected, value)
        assert_equal_values(seen, metrics)
        for found, wanted in (grads, of_loss), (product, of_hessian):
            trained = {path: leaf for path, leaf in found.items() if leaf is not None}
            assert_equal_values(wanted, trained)
        moved = {path for path, leaf in product.items() if leaf is not None and leaf.any()}
        assert moved == {*of_hessian} - {*case.unused}


@pytest.mark.parametrize(
    ("name", "level", "ranks"), crossed(CASES, LEVELS, [2, 1, 3], n=4, quick=1)
)
def test_ranks(name: str, level: int, ranks: int) -> None:
    case = CASES[name]
    sizes = uneven(ROWS, ranks)
    with sdpa_kernel(SDPBackend.MATH):  # of all threads
        check(case, run_ranks(lambda group: on_rank(group, case, level, sizes), ranks))


@pytest.mark.parametrize(("level", "ranks"), tiers(thorough=[(3, 2), (2, 3), (1, 2)], rows=True))
def test_processes(level: int, ranks: int) -> None:
    def on_ranks() -> list[Any]:
        group = ProcessGroup()
        with sdpa_kernel(SDPBackend.MATH):
            sizes = uneven(ROWS, ranks)
            return [on_rank(group, case, level, sizes) for case in CASES.values()]

    found = launch(on_ranks, ranks, start_method="fork", timeout=200)
    with sdpa_kernel(SDPBackend.MATH):
        for i, case in enumerate(CASES.values()):
            check(case, [of_rank[i] for of_rank in found])


@pytest.mark.parametrize("level", [{"": 2, "layers.0": 3}, {"": 1, "layers.1": 0}])
def test_mixed_levels(level: Any) -> None:
    case = CASES["mlp"]
    check(case, run_ranks(lambda group: on_rank(group, case, level, even(ROWS, 2)), 2))


@pytest.mark.parametrize("level", thinned([3, 1]))
def test_replicas(level: int) -> None:
    case = CASES["frozen"]

    def run(group: Any) -> Any:
        return on_rank(fz.HybridGroup(group, shard_size=2), case, level, even(ROWS, 4))

    check(case, run_ranks(run, 4))


def test_weights_of_zero() -> None:
    case = CASES["mlp"]
    check(case, run_ranks(lambda group: on_rank(group, case, 3, [ROWS, 0]), 2))


@pytest.mark.parametrize("level", LEVELS)
def test_one_rank_s_mistake_reaches_the_other(level: int) -> None:
    """A vector that is complex, and a sharded tree among the buffers."""

    def loss(params: Any, x: Tensor) -> Tensor:
        return (params["w"] * x).square().sum()

    def run(group: Any) -> None:
        params = {"w": torch.ones(5, requires_grad=True)}
        sharded, x = fz.shard_tree(params, level=level, group=group), torch.ones(5)
        vector = fz.zero_updates(sharded)
        mine: Any = StructureError if group.rank == 1 else PeerError
        along = tree_map(lambda v: v * 1j, vector) if group.rank == 1 else vector
        found = r"path w, expected torch.float32, got torch.complex64.*Remedy: .*\.real"
        with pytest.raises(mine, match=found):
            fz.hvp(loss)(sharded, along, x)
        wrong = {"buffers": sharded} if group.rank == 1 else {}
        with pytest.raises(mine, match=r"fz.hvp was given a sharded tree in buffers=.*Remedy"):
            fz.hvp(loss)(sharded, vector, x, **wrong)
        # Both go on
        value, *_ = fz.hvp(loss)(sharded, vector, x)
        assert value == 5

    run_ranks(run, 2, timeout=20)


@pytest.mark.parametrize("level", tiers([3], [0, 1, 2]))
def test_micro_batches_and_buffers(level: int) -> None:
    """BatchNorm sees a rank's micro-batches, so each rank's product is one process's of its part,
    and the weights' mean of these is the product on ranks."""
    _, params, buffers = normed()
    batch, sizes = torch.randn(12, 4, dtype=torch.float64), [8, 4]
    product_of = fz.hvp(loss_of_normed, accumulate=2)

    def run(group: Any) -> Any:
        sharded = fz.shard_tree(params, level=level, group=group)
        own = batch.split(sizes)[group.rank]
        return drawn_product(product_of, sharded, buffers=buffers, batch=own)

    parts = batch.split(sizes)
    alone = [drawn_product(product_of, params, buffers=buffers, batch=part) for part in parts]

    def mean(one: Tensor, two: Tensor) -> Tensor:
        return (8 * one + 4 * two) / 12

    of_ranks = [((value, metrics), grads, product) for (value, metrics, _), grads, product in alone]
    expected = tree_map(mean, *of_ranks)
    new = tree_map(
        lambda a, b: (a + b) / 2 if a.is_floating_point() else a, *[found[2] for found, *_ in alone]
    )
    for (value, metrics, after), grads, product in run_ranks(run, 2):
        assert_equal_values(expected, ((value, metrics), grads, product))
        assert_equal_values(new, after)


@pytest.mark.parametrize("level", [0, 3])
def test_precision(level: int) -> None:
    """The vector is rounded as params are, on ranks as in one process."""
    torch.manual_seed(0)
    policy = fz.Precision(compute=torch.bfloat16, gather=torch.bfloat16)
    apply, params, _ = fz.functionalize(MLP(), units=torch.nn.Linear, precision=policy)
    x = torch.randn(4, 7)

    def loss(params: Any, x: Tensor) -> Tensor:
        return apply(params, {}, x)[0].float().square().mean()

    def run(group: Any) -> Any:
        return drawn_product(fz.hvp(loss), fz.shard_tree(params, level=level, group=group), x)

    expected = drawn_product(fz.hvp(loss), params, x)
    assert expected[2]["layers.0.weight"].dtype == torch.float32
    for found in run_ranks(run, 1):
        assert_equal_values(expected, found, grade="bitwise")


@pytest.mark.parametrize("level", [0, 3])
def test_recomputed_units_and_a_tree_that_is_read(level: int) -> None:
    torch.manual_seed(0)
    model = MLP((3, 5, 4)).double()
    x = torch.randn(4, 3, dtype=torch.float64)

    def product(remat: Any, group: Any = None) -> Any:
        apply, student, _ = fz.functionalize(model, units=torch.nn.Linear, remat=remat)
        teacher = tree_map(lambda p: p.detach() + 0.2, student)

        def loss(student: Any, teacher: Any, x: Tensor) -> Tensor:
            return (apply(student, {}, x)[0] * apply(teacher, {}, x)[0]).square().mean()

        own = x
        if group is not None:
            student = fz.shard_tree(student, level=level, group=group)
            teacher = fz.shard_tree(teacher, level=3, group=group)
            own = x.chunk(group.size)[group.rank]
        return drawn_product(fz.hvp(loss), student, teacher, own)

    expected = product(None)
    for found in run_ranks(lambda group: product(torch.nn.Linear, group), 2):
        assert_equal_values(expected, found)


class Pair(NamedTuple):
    left: Any
    right: Any


@pytest.mark.parametrize("level", thinned([{"left": 3, "right": 1}, 0, 2]))
def test_a_program_of_two_trees(level: Any) -> None:
    """Both trees' block of the Hessian, with random numbers in the program and in the loss."""
    torch.manual_seed(0)
    apply, left, _ = fz.functionalize(MLP((3, 5, 4)).double(), units=torch.nn.Linear)
    right = tree_map(lambda p: (p.detach() + 0.1).requires_grad_(), left)

    def loss(pair: Pair, x: Tensor) -> Any:
        ahead, _ = apply(pair.left, {}, x)
        behind, _ = apply(pair.right, {}, torch.dropout(x, 0.5, train=True))
        return (ahead * behind).square().mean(), fz.Aux(metrics={"ahead": ahead.mean()})

    def program(value: Pair, x: Tensor) -> Any:
        zeros = fz.zero_updates(value)
        vector = fz.random.rademacher(zeros)
        (found, seen), grads, product = fz.hvp(loss)(value, vector, x)
        updates = tree_map(lambda g, h: -0.1 * g - 0.01 * h, grads, product)
        rise = fz.dot(vector.left, product.left)
        return Pair(*map(fz.apply_updates, value, updates)), {"loss": found, "rise": rise, **seen}

    step = fz.program_step(program, init=Pair)
    x = torch.randn(6, 3, dtype=torch.float64)
    # One rank: others would draw other numbers for their parts of the batch
    assert_sharded_equals_unsharded(step, left, right, [x], levels=[level], ranks=[1])


class Kept(NamedTuple):
    params: Any
    mean: Any


@pytest.mark.parametrize("level", thinned(LEVELS[::-1]))
def test_zero_updates_are_moments_of_a_programs_own(level: int) -> None:
    case = CASES["frozen"]
    loss, params = with_weights(case)
    (batch,) = case.batches(1, ROWS)

    def program(value: Kept, batch: Batch) -> Any:
        (found, _), grads = fz.value_and_grad(loss)(value.params, batch)
        mean = tree_map(lambda m, g: 0.9 * m + 0.1 * g, value.mean, grads)
        updates = tree_map(lambda m: -0.1 * m, mean)
        return Kept(fz.apply_updates(value.params, updates), mean), {"loss": found}

    step = fz.program_step(program, init=lambda params: Kept(params, fz.zero_updates(params)))
    assert_sharded_equals_unsharded(step, params, [batch], levels=[level], ranks=[2])


def test_zero_updates_of_a_tree_that_is_read_only() -> None:
    params = CASES["mlp"].build()[1]
    seen = []

    def init(params: Any) -> Any:
        return params, tree_map(torch.clone, params)

    def program(value: Any) -> Any:
        seen.append(len(optree.tree_leaves(fz.zero_updates(value[1]))))
        return value, {}

    step = fz.program_step(program, init=init)
    step(step.init(params))

    def run(group: Any) -> None:
        sharded = fz.shard(step, level=3, group=group)
        sharded(sharded.init(params))

    run_ranks(run, 2)
    assert seen == [0, 0, 0]


@pytest.mark.parametrize("level", [0, 3])
def test_wrong_vectors_are_refused(level: int) -> None:
    loss, params = with_weights(CASES["frozen"])
    (batch,) = CASES["frozen"].batches(1, ROWS)

    def run(group: Any) -> list[str]:
        sharded = fz.shard_tree(params, level=level, group=group)
        zeros = fz.zero_updates(sharded)
        wrong = [sharded, params, tree_map(lambda v: torch.zeros(2 * v.numel()), zeros)]
        found = []
        for vector in wrong:
            with pytest.raises(StructureError) as caught:
                fz.hvp(loss)(sharded, vector, batch)
            found.append(str(caught.value))
        return found

    for texts in run_ranks(run, 2):
        assert all("Remedy" in text for text in texts)
        assert "layers.0.weight" in texts[2]


@pytest.mark.parametrize(
    ("loss", "story"),
    [
        (lambda params: torch.ones((), dtype=torch.float64), "does not depend on any"),
        (lambda params: DATA**2, "does not depend on any trained leaf"),
        (lambda params: params["w"] ** 2, "the loss is not a scalar"),
        (lambda params: (params["w"].sum() ** 2, fz.Aux(buffers={})), r"Aux\(buffers=...\)"),
    ],
)
def test_wrong_losses_are_refused_by_their_rank(loss: Any, story: str) -> None:
    params = {"w": torch.ones(5, dtype=torch.float64, requires_grad=True)}

    def run(group: Any) -> None:
        sharded = fz.shard_tree(params, level=3, group=group)
        with pytest.raises(StructureError, match=rf"{story}.* on rank {group.rank}.*Remedy"):
            fz.hvp(loss)(sharded, fz.zero_updates(sharded))

    run_ranks(run, 2)


@pytest.mark.parametrize("level", [0, 3])
def test_a_backward_inside_of_a_custom_functions_backward_is_refused(level: int) -> None:
    params = CASES["mlp"].build()[1]
    x = torch.randn(4, 7, dtype=torch.float64)

    def run(group: Any) -> None:
        sharded = fz.shard_tree(params, level=level, group=group)
        with pytest.raises(StructureError, match=r"fz.hvp met a custom autograd.Function"):
            fz.hvp(reversible)(sharded, fz.zero_updates(sharded), x)

    run_ranks(run, 2)


@pytest.mark.parametrize("level", [0, 3])
def test_ranks_that_use_other_layers(level: int) -> None:
    """Each rank makes all leaves whole, so that none misses another's reduction."""
    torch.manual_seed(0)
    _, params, _ = fz.functionalize(MLP((3, 3, 3)).double(), units=torch.nn.Linear)
    x = torch.randn(4, 3, dtype=torch.float64)

    def loss(params: Any, x: Tensor, which: int) -> Tensor:
        hidden = torch.tanh(x @ params[f"layers.{which}.weight"])
        return hidden.square().mean()

    def of_both(params: Any) -> Tensor:
        return (loss(params, x[:2], 0) + loss(params, x[2:], 1)) / 2

    def run(group: Any) -> Any:
        sharded = fz.shard_tree(params, level=level, group=group)
        return drawn_product(fz.hvp(loss), sharded, x.chunk(2)[group.rank], group.rank)

    expected = drawn_product(fz.hvp(of_both), params)
    for found in run_ranks(run, 2):
        assert_equal_values(expected, found)


def test_memory() -> None:
    """Params, gradients and vector whole for a moment, and no more."""
    apply, params, _ = fz.functionalize(deep().double(), units=torch.nn.Linear)
    x = torch.ones(2, WIDTH, dtype=torch.float64)
    tree = fz.shard_tree(params, level=3, group=CountingGroup(16))
    vector = fz.zero_updates(tree)
    product = fz.hvp(lambda params, x: apply(params, {}, x)[0].square().mean())
    for _ in range(5):  # calls that are looked at also hold copies of activations' gradients
        product(tree, vector, x)
    with torch.autograd.set_multithreading_enabled(False), LiveBytes() as live:
        product(tree, vector, x)
    assert 2 < live.peak / sum(leaf.nbytes for leaf in params.values()) < 3.5


def test_params_stay_as_they_were() -> None:
    """And the vector; a second product is that of one more call."""
    case = CASES["shared"]
    loss, params = with_weights(case)
    (batch,) = case.batches(1, ROWS)

    def run(group: Any) -> None:
        sharded = fz.shard_tree(params, level=3, group=group)
        vector = fz.random.rademacher(fz.zero_updates(sharded), seed=0)
        before = tree_map(torch.clone, (sharded, vector))
        one, two = (fz.hvp(loss)(sharded, vector, batch) for _ in range(2))
        assert_equal_values(before, (sharded, vector), grade="bitwise")
        assert_equal_values(one, two, grade="bitwise")
        # An optimizer takes the product as it takes gradients
        sgd = optim.sgd(0.1, momentum=0.9)
        moved, _ = sgd.apply(one[2], sgd.init(sharded), sharded)
        assert not torch.equal(moved["block.weight"].local, sharded["block.weight"].local)

    run_ranks(run, 2)


@pytest.mark.parametrize("level", tiers([3], [None, 0]))
def test_nothing_of_a_product_stays(level: int | None) -> None:
    """A graph that its own hooks reach is never freed."""
    params = {"w": torch.randn(8, 8, requires_grad=True)}
    if level is not None:
        params = fz.shard_tree(params, level=level, group=CountingGroup(2))
    zeros, x = fz.zero_updates(params), torch.ones(2, 8)
    alive = []
    for _ in range(4):
        fz.hvp(lambda p, x: (x @ p["w"]).pow(3).mean())(params, zeros, x)
        gc.collect()
        alive.append(sum(type(o) is Tensor for o in gc.get_objects()))
    assert alive[1:] == alive[1:2] * 3, alive


def test_another_tree_in_the_place_of_the_vector() -> None:
    """The note names the order of the arguments."""

    def run(group: Any) -> None:
        params = fz.shard_tree({"w": torch.ones(5, requires_grad=True)}, level=3, group=group)
        with pytest.raises(StructureError) as failed:
            fz.hvp(lambda p: fz.unshard(p)["w"].pow(3).sum())(params, params)
        assert "takes the vector second" in failed.value.__notes__[0]

    run_ranks(run, 2)
