"""Steps of the user's own: sharded they give what they give on whole trees."""

from __future__ import annotations

from typing import Any, NamedTuple

import optree
import pytest
import torch
from optree import tree_map
from torch import Tensor

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import FunctorchZeroError, PeerError, StructureError
from functorch_zero.groups import SingleRank, run_ranks
from functorch_zero.optim.states import ScaleByLearningRateState
from functorch_zero.sharded.program import step as program_module
from functorch_zero.testing import assert_equal_values, assert_sharded_equals_unsharded
from tests.local import part
from tests.models import MLP
from tests.programs.cases import CASES
from tests.tiers import thinned, tiers


def model(dims: tuple[int, ...], seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    apply, params, _ = fz.functionalize(MLP(dims).double(), units=torch.nn.Linear)
    return lambda params, x: apply(params, {}, x)[0], params


def batches(num: int) -> list[dict[str, Tensor]]:
    made = torch.Generator().manual_seed(7)
    return [{"noise": torch.randn(12, 3, generator=made, dtype=torch.float64)} for _ in range(num)]


class Noisy(NamedTuple):
    params: Any
    opt: Any


apply_noisy, first_noisy = model((3, 6, 2), 5)
sgd = optim.sgd(0.1, momentum=0.9)


def init_noisy(params: Any) -> Noisy:
    return Noisy(params, sgd.init(params))


def noisy_loss(params: Any, x: Tensor) -> Tensor:
    hidden = apply_noisy(params, torch.dropout(x, 0.5, train=True))
    return (hidden + torch.randn(())).square().mean()


def noisy(value: Noisy, x: Tensor) -> Any:
    """Random numbers between two gradients, and in both losses."""
    first, grads = fz.value_and_grad(noisy_loss)(value.params, x)
    scale = torch.rand((), dtype=torch.float64)
    away = fz.apply_updates(value.params, tree_map(scale.mul, grads))
    second, grads = fz.value_and_grad(noisy_loss)(away, x)
    params, opt = sgd.apply(grads, value.opt, value.params)
    return Noisy(params, opt), {"first": first, "second": second, "scale": scale}


def test_random_numbers_follow_from_seed_and_step() -> None:
    step = fz.program_step(noisy, init=init_noisy)
    x = batches(1)[0]["noise"]
    state = step.init(first_noisy, seed=3)
    torch.manual_seed(1)
    one, metrics = step(state, x)
    before = torch.get_rng_state()
    other, again = step(state, x)
    assert torch.equal(before, torch.get_rng_state())
    assert_equal_values((one, metrics), (other, again), grade="bitwise")
    _, later = step(one, x)
    _, elsewhere = step(step.init(first_noisy, seed=4), x)
    drawn = [metrics["scale"], later["scale"], elsewhere["scale"]]
    assert len(set(map(float, drawn))) == 3
    assert float(metrics["first"]) != float(metrics["second"])

    def run(group: Any) -> Any:
        sharded = fz.shard(step, level=3, group=group)
        state, metrics = sharded(sharded.init(first_noisy, seed=3), part(x, group))
        return sharded.unshard(state), metrics

    ((whole, found),) = run_ranks(run, 1)
    assert_equal_values((one, metrics), (whole, found))
    (_, left), (_, right) = run_ranks(run, 2)
    # The program's own numbers are those of one process; the ranks' losses draw others
    assert left["scale"] == right["scale"] == metrics["scale"]
    assert left["first"] != metrics["first"]


def test_describe() -> None:
    # Wide, so that padding is small beside the leaves
    _, gen = model((30, 50, 40), 1)
    _, disc = model((40, 70, 1), 2)
    step = CASES["gan"]().step
    whole = fz.describe(step, step.init(gen, disc))
    num_bytes = sum(leaf.nbytes for leaf in optree.tree_leaves((gen, disc)))
    assert {row.unit for row in whole.rows} >= {"gen", "disc", "gen_opt", "disc_opt"}
    assert whole.nbytes > 3 * num_bytes

    def run(group: Any) -> Any:
        sharded = fz.shard(step, level={"gen": 3, "disc": 1}, group=group)
        return fz.describe(sharded, sharded.init(gen, disc))

    for description in run_ranks(run, 2):
        where = {row.unit: row.where for row in description.rows}
        assert where["gen.layers.0"] == "1/2" and where["disc.layers.0"] == "whole"
        # Each optimizer's state stands beside the leaves that it follows
        own = {row.unit: row for row in description.rows}
        for unit in ("gen.layers.0", "disc.layers.0"):
            assert own[unit].state_where == "1/2" and own[unit].state_nbytes >= own[unit].elements
        assert own["(optimizer)"].where == "whole" and own["(optimizer)"].state == ()
        assert description.nbytes < whole.nbytes
        assert "program_step(gan.<locals>.program)" in str(description)


@pytest.mark.parametrize("level", [0, 1, 3])
def test_describe_a_tree_in_pieces(level: int) -> None:
    """At level 1 it is cut, though params are whole. Frozen leaves have no place in it."""
    params = {
        "w": torch.zeros(40, 40, requires_grad=True),
        "frozen": torch.zeros(40),
    }
    first = lambda params: {"params": params, "momentum": fz.zero_updates(params)}
    step = fz.program_step(lambda value: (value, {}), init=first)

    def run(group: Any) -> Any:
        sharded = fz.shard(step, level=level, group=group)
        return fz.describe(sharded, sharded.init(params))

    for description in run_ranks(run, 2):
        assert str(description)
        (row,) = [row for row in description.rows if row.unit == "momentum.root"]
        assert row.leaves == ("momentum.w",) and row.elements == 1600
        assert (row.where, row.nbytes) == (("whole", 6400) if level == 0 else ("1/2", 3200))
        assert row.wire == () and row.compute is None
        assert {n for row in description.rows for n in row.leaves} >= {"params.w", "params.frozen"}


class Averaged(NamedTuple):
    params: Any
    ema: Any


def test_a_copy_that_init_makes_is_read_only_as_a_whole_one_is() -> None:
    def first(params: Any) -> Averaged:
        return Averaged(params, tree_map(torch.clone, params))

    def loss(trees: Any, x: Tensor) -> Tensor:
        params, ema = trees
        return (apply_noisy(params, x) - 0.5 * apply_noisy(ema, x)).square().mean()

    num_found: list[int] = []

    def program(value: Averaged, x: Tensor) -> Any:
        loss_value, (grads, of_ema) = fz.value_and_grad(loss)((value.params, value.ema), x)
        num_found.append(len(optree.tree_leaves(of_ema)))
        params = fz.apply_updates(value.params, tree_map(lambda g: -0.1 * g, grads))
        # The params come first, and give the tree its kind; the average is still read only
        ema = tree_map(lambda p, e: 0.5 * (e + p), params, value.ema)
        return Averaged(params, ema), {"loss": loss_value}

    def alone(value: Averaged, x: Tensor) -> Any:
        return value, {"loss": fz.value_and_grad(loss)((value.ema, value.ema), x)[0]}

    step = fz.program_step(program, init=first)
    x = batches(1)[0]["noise"]
    oracle = step.init(first_noisy)
    for _ in range(2):
        oracle, _ = step(oracle, x)
    with pytest.raises(StructureError) as whole:
        fz.program_step(alone, init=first)(oracle, x)

    def run(group: Any) -> Any:
        sharded = fz.shard(step, level=3, group=group)
        state = sharded.init(first_noisy)
        assert all(leaf.requires_grad for leaf in optree.tree_leaves(state.value.params))
        assert not any(leaf.requires_grad for leaf in optree.tree_leaves(state.value.ema))
        state, _ = sharded(state, part(x, group))
        state = sharded.shard(sharded.unshard(state))
        state, _ = sharded(state, part(x, group))
        other = fz.shard(fz.program_step(alone, init=first), level=3, group=group)
        with pytest.raises(StructureError) as caught:
            other(other.init(first_noisy), part(x, group))
        return sharded.unshard(state), str(caught.value)

    for state, text in run_ranks(run, 2):
        assert_equal_values(oracle.value, state.value)
        assert state.trained == oracle.trained
        for one, other in zip(*map(optree.tree_leaves, (oracle, state)), strict=True):
            assert one.requires_grad == other.requires_grad
        assert text[:20] == str(whole.value)[:20]
    assert set(num_found) == {0}


def test_trees_that_a_program_maps_are_trained_as_whole_ones_are() -> None:
    """Programs run without gradients, so a mapped leaf is trained where its function says so."""
    maps: list[Any] = [lambda p: p, torch.clone, Tensor.detach, lambda p: 2 * p]
    maps += [lambda p: p.clone().requires_grad_(), lambda p: p.detach().requires_grad_()]

    def loss(trees: Any, x: Tensor) -> Tensor:
        return sum((apply_noisy(tree, x).square().mean() for tree in trees), torch.tensor(0.0))

    kinds: list[Any] = []

    def program(params: Any, x: Tensor) -> Any:
        trees = (params, *(tree_map(function, params) for function in maps))
        value, grads = fz.value_and_grad(loss)(trees, x)
        kinds.append([len(optree.tree_leaves(of_tree)) > 0 for of_tree in grads])
        trained = [on for on, kind in zip(grads, kinds[-1], strict=True) if kind]
        total = tree_map(lambda *g: -0.1 * sum(g), *trained)
        # The next params are a map's, and are trained in the next step all the same
        return tree_map(torch.clone, fz.apply_updates(params, total)), {"loss": value}

    step = fz.program_step(program, init=lambda params: params)
    x = batches(1)[0]["noise"]
    oracle = step.init(first_noisy)
    for _ in range(3):
        oracle, _ = step(oracle, x)
    assert kinds == 3 * [[True, True, False, False, False, True, True]]

    def run(group: Any, level: int) -> Any:
        sharded = fz.shard(step, level=level, group=group)
        state = sharded.init(first_noisy)
        for _ in range(3):
            state, _ = sharded(state, part(x, group))
        return sharded.unshard(state)

    for level in (0, 3):
        kinds.clear()
        for whole in run_ranks(lambda group: run(group, level), 2):  # noqa: B023
            assert_equal_values(oracle, whole)
        assert kinds == 6 * [[True, True, False, False, False, True, True]]


@pytest.mark.parametrize("level", tiers([3], [0, 1, 2]))
def test_trees_that_are_changed_between_steps_stay_trained_or_read_only(level: int) -> None:
    """A state says which of its trees are trained, whatever leaves it is given."""
    sgd = optim.sgd(0.1)

    def first(a: Any, b: Any) -> Any:
        return {"a": a, "b": b, "mean": tree_map(torch.clone, a)}

    def loss(trees: Any, x: Tensor) -> Tensor:
        return sum((apply_noisy(tree, x).square().mean() for tree in trees), torch.tensor(0.0))

    def program(value: Any, x: Tensor) -> Any:
        trees = (value["a"], value["b"], value["mean"])
        loss_value, (of_a, of_b, of_mean) = fz.value_and_grad(loss)(trees, x)
        assert optree.tree_leaves(of_mean) == []
        a, _ = sgd.apply(of_a, sgd.init(value["a"]), value["a"])
        b, _ = sgd.apply(of_b, sgd.init(value["b"]), value["b"])
        return {**value, "a": a, "b": b}, {"loss": loss_value}

    def clamped(value: Any) -> Any:
        return {**value, "a": tree_map(lambda p: p.detach().clamp(-0.5, 0.5), value["a"])}

    def averaged(value: Any) -> Any:
        mean = tree_map(lambda m, p: 0.5 * (m + p), value["mean"], value["a"])
        assert all(leaf.requires_grad for leaf in optree.tree_leaves(mean))
        return {**value, "mean": mean}

    def swapped(value: Any) -> Any:
        return {**value, "a": value["mean"], "mean": value["a"]}

    def with_one_frozen(value: Any) -> Any:
        leaves, treedef = optree.tree_flatten(value["b"])
        return {**value, "b": treedef.unflatten([0.5 * leaves[0].detach(), *leaves[1:]])}

    step = fz.program_step(program, init=first)
    x = batches(1)[0]["noise"]

    def train(step: Any, x: Tensor, unshard: Any) -> list[Any]:
        state, wholes = step.init(first_noisy, first_noisy), []
        for change in (clamped, averaged, swapped, with_one_frozen):
            state, _ = step(state.replace(value=change(state.value)), x)
            wholes.append(unshard(state))
            wholes.append(unshard(state.replace(value=change(state.value))))
        return wholes

    expected = train(step, x, lambda state: state)

    def run(group: Any) -> list[Any]:
        sharded = fz.shard(step, level=level, group=group)
        return train(sharded, part(x, group), sharded.unshard)

    for found in run_ranks(run, 2):
        for whole, oracle in zip(found, expected, strict=True):
            assert_equal_values(oracle, whole)
            # Whole steps go on from it as from their own
            assert whole.trained is not None
            step(whole, x)


@pytest.mark.parametrize("donate", thinned([False, True]))
def test_a_gradient_that_a_leaf_collects_ends_with_its_step(donate: bool) -> None:
    """Leaves of the next state are others, as in one process."""

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
        return apply_noisy(params, batch).square().mean()

    x = batches(1)[0]["noise"]
    train = fz.train_step(loss_fn, optim.sgd(0.1))
    idle = fz.program_step(lambda params, x: (params, {}), init=lambda params: params)

    def sums(step: Any, x: Tensor, params_of: Any) -> list[float]:
        state, found = step.init(first_noisy), []
        for _ in range(3):
            for leaf in optree.tree_leaves(params_of(state)):
                leaf.square().sum().backward()
                found.append(float(leaf.grad.sum()))
            state, _ = step(state, x)
        return found

    def run(group: Any) -> None:
        sharded = fz.shard(train, level=0, group=group, donate=donate)
        of_train = sums(sharded, part(x, group), lambda state: state.params)
        assert of_train == pytest.approx(sums(train, x, lambda state: state.params))
        of_idle = sums(fz.shard(idle, level=0, group=group), x, lambda state: state.value)
        assert of_idle == pytest.approx(sums(idle, x, lambda state: state.value))

    run_ranks(run, 2)


@pytest.mark.parametrize("level", [0, 3])
def test_a_frozen_tree_that_is_cut_like_a_trained_one_is_read_only(level: int) -> None:
    def loss(trees: Any, x: Tensor) -> Tensor:
        return apply_noisy(trees[0], x).mean() + apply_noisy(trees[1], x).mean()

    def run(group: Any) -> None:
        params = fz.shard_tree(first_noisy, level=level, group=group)
        teacher = fz.shard_tree(tree_map(Tensor.detach, first_noisy), layout_like=params)
        _, (grads, of_teacher) = fz.value_and_grad(loss)((params, teacher), batches(1)[0]["noise"])
        assert optree.tree_leaves(grads)
        assert not optree.tree_leaves(of_teacher)

    run_ranks(run, 2)


@pytest.mark.parametrize("level", [0, 3])
def test_a_tree_that_one_rank_alone_has_detached_is_an_error_on_all(level: int) -> None:
    story = "different collectives" if level == 0 else "different units"

    def run(group: Any) -> None:
        params = fz.shard_tree(first_noisy, level=level, group=group)
        if group.rank == 1:
            params = tree_map(Tensor.detach, params)
        other = fz.shard_tree(first_noisy, level=level, group=group)

        def loss(trees: Any, x: Tensor) -> Tensor:
            return apply_noisy(trees[0], x).mean() + apply_noisy(trees[1], x).mean()

        with pytest.raises(FunctorchZeroError, match=story):
            fz.value_and_grad(loss)((other, params), batches(1)[0]["noise"])

    run_ranks(run, 2, timeout=30)


def test_updates_of_a_mapped_tree_are_those_of_the_whole_one() -> None:
    optimizer = optim.adam(0.1)

    def first(params: Any) -> Any:
        copy = tree_map(torch.clone, params)
        trained = tree_map(lambda p: p.clone().requires_grad_(), params)
        return {
            "of copy": fz.zero_updates(copy),
            "trained": fz.zero_updates(trained),
            "opt_state": optimizer.init(trained),
            "applied": fz.apply_updates(copy, fz.zero_updates(trained)),
        }

    step = fz.program_step(lambda value: (value, {}), init=first)
    oracle = step.init(first_noisy)
    assert optree.tree_leaves(oracle.value["of copy"]) == []
    assert not any(leaf.requires_grad for leaf in optree.tree_leaves(oracle.value["applied"]))

    def run(group: Any) -> Any:
        sharded = fz.shard(step, level=1, group=group)
        state = sharded.init(first_noisy)
        of_copy = fz.program_step(
            lambda value: (value, {}), init=lambda p: optimizer.init(tree_map(torch.clone, p))
        )
        with pytest.raises(StructureError, match="of which no leaf is trained"):
            fz.shard(of_copy, level=1, group=group).init(first_noisy)
        return sharded.unshard(state)

    for whole in run_ranks(run, 2):
        assert_equal_values(oracle, whole)
        applied = optree.tree_leaves(whole.value["applied"])
        assert not any(leaf.requires_grad for leaf in applied)


def test_init_that_trains_other_leaves_of_a_tree_than_it_was_cut_for_is_refused() -> None:
    """The layout says which leaves a tree trains: its buckets are trained or frozen."""
    some_frozen = tree_map(lambda p: p.detach().clone().requires_grad_(p.dim() > 1), first_noisy)

    def freezing(params: Any) -> Any:
        leaves, treedef = optree.tree_flatten(params)
        return treedef.unflatten([leaves[0].clone(), *leaves[1:]])

    def thawing(params: Any) -> Any:
        return tree_map(lambda p: p.clone().requires_grad_(), params)

    def run(group: Any) -> None:
        for init, params in ((freezing, first_noisy), (thawing, some_frozen)):
            step = fz.program_step(lambda value: (value, {}), init=init)
            with pytest.raises(StructureError, match=r"other leaves .* than when it was cut"):
                fz.shard(step, level=3, group=group).init(params)

    run_ranks(run, 2)


def test_a_whole_state_of_another_net_is_refused() -> None:
    step = CASES["dino"]().step
    (_, first), (_, wider) = model((4, 7, 3), 2), model((4, 8, 3), 2)
    whole, other_net = step.init(first), step.init(wider)
    fewer = {path: leaf for path, leaf in first.items() if "bias" not in path}
    wrong = {
        "layers.0.weight": whole.replace(student=other_net.value.student),
        "opt": whole.replace(opt=other_net.value.opt),
        "bias": whole.replace(student=fz.Params(fewer, first.units)),
        "center": whole.replace(center=torch.zeros(2, dtype=torch.float64)),
        "another structure": whole.replace(value=whole.value[:2]),
    }

    def run(group: Any) -> None:
        sharded = fz.shard(step, level=3, group=group)
        state = sharded.init(first)
        for words, given in wrong.items():
            with pytest.raises(StructureError, match=r"(?s)expected.*got.*Remedy") as caught:
                sharded.shard(given)
            assert words in str(caught.value)
        with pytest.raises(TypeError, match="a state is what"):
            sharded.shard(whole.value)
        assert_equal_values(sharded.unshard(state), sharded.unshard(sharded.shard(whole)))

    run_ranks(run, 2)


def test_a_value_with_a_tree_in_pieces_goes_whole_and_back() -> None:
    def first(params: Any) -> Any:
        _, grads = fz.value_and_grad(lambda p, x: apply_noisy(p, x).sum())(
            params, torch.ones(1, 3).double()
        )
        return {"params": params, "momentum": grads}

    frozen = tree_map(lambda x: x.detach().clone().requires_grad_(x.dim() > 1), first_noisy)
    step = fz.program_step(lambda value: (value, {}), init=first)
    expected = step.init(frozen)

    def run(group: Any) -> Any:
        sharded = fz.shard(step, level=3, group=group)
        state = sharded.shard(sharded.unshard(sharded.init(frozen)))
        state, _ = sharded(state)
        return sharded.unshard(state)

    for state in run_ranks(run, 2):
        assert_equal_values(expected.value, state.value)


@pytest.mark.parametrize("level", tiers([3], [0, 1, 2]))
def test_a_tree_in_pieces_beside_a_frozen_leaf(level: int) -> None:
    """Where an operator of the program's own is run on whole leaves, ranks compare these; None of
    the leaves in pieces is whole."""

    def first(params: Any) -> Any:
        average = tree_map(torch.clone, params)
        return {"params": params, "momentum": fz.zero_updates(params), "average": average}

    def program(value: Any, batch: Any) -> Any:
        params = value["params"]
        found, grads = fz.value_and_grad(lambda p, x: apply_noisy(p, x).square().mean())(
            params, batch["noise"]
        )
        momentum = tree_map(lambda m, g: 0.9 * m + g, value["momentum"], grads)
        params = fz.apply_updates(params, tree_map(lambda m: -0.1 * m, momentum))
        average = tree_map(lambda a, p: 0.9 * a + 0.2 * p.detach(), value["average"], params)
        return {"params": params, "momentum": momentum, "average": average}, {"loss": found}

    frozen = tree_map(lambda x: x.detach().clone().requires_grad_(x.dim() > 1), first_noisy)
    step = fz.program_step(program, init=first)
    assert_sharded_equals_unsharded(step, frozen, batches(3), levels=[level], ranks=[1, 2])
    made = fz.plan(frozen, step, level=level, ranks=2, batch=batches(1)[0])

    def run(group: Any) -> Any:
        sharded = fz.shard(step, level=level, group=group)
        return fz.describe(sharded, sharded.init(frozen))

    of_trees = [row.nbytes for row in run_ranks(run, 2)[0].rows if row.leaves]
    assert made.params + made.state == sum(of_trees)


def test_single_tensors_given_to_init_are_copied() -> None:
    def first(params: Any, scale: Tensor) -> Any:
        return {"params": params, "scale": scale}

    step = fz.program_step(lambda value: (value, {}), init=first)

    def run(group: Any) -> float:
        scale = torch.ones(())
        sharded = fz.shard(step, level=3, group=group)
        state = sharded.init(first_noisy, scale)
        scale.fill_(5.0)
        return float(sharded(state)[0].value["scale"])

    assert run_ranks(run, 2) == [1.0, 1.0]


def test_init_names_its_trees() -> None:
    def many(*trees: Any) -> Any:
        return trees

    def by_name(params: Any, **more: Any) -> Any:
        return params

    def messages(step: Any) -> str:
        with pytest.raises(TypeError, match="needs a name") as caught:
            step.init(first_noisy)
        return str(caught.value)

    for init_fn, name in ((many, "*trees"), (by_name, "**more")):
        step = fz.program_step(lambda value: (value, {}), init=init_fn)
        texts = run_ranks(lambda group, s=step: messages(fz.shard(s, level=0, group=group)), 2)
        assert all(name in text for text in [messages(step), *texts])


def test_an_optimizers_state_is_read_as_a_whole_one() -> None:
    one = optim.scale_by_learning_rate(0.1)
    two = optim.chain(one, optim.scale_by_learning_rate(0.2))

    def seen(params: Any) -> Any:
        alone, both = one.init(params), two.init(params)
        changed = alone._replace(count=alone.count + 1)
        assert type(changed) is type(alone)
        found = optim.find_states(alone, ScaleByLearningRateState)
        return (
            [optim.state_metrics(state) for state in (alone, both, {"a": both})],
            [int(changed.count), sorted(changed._asdict()), len(found)],
        )

    def run(group: Any) -> Any:
        return seen(fz.shard_tree(first_noisy, level=3, group=group))

    expected = seen(first_noisy)
    assert [len(metrics) for metrics in expected[0]] == [1, 2, 2]
    for found in run_ranks(run, 2):
        assert found == expected


def test_two_leaves_of_one_path_are_refused() -> None:
    def init(params: Any) -> Any:
        return {"p": params, "p.b": torch.zeros(2)}

    step = fz.program_step(lambda value: (value, {}), init=init)
    params = {"b": torch.ones(2, requires_grad=True)}
    with pytest.raises(StructureError, match=r"same path.*p\.b"):
        step.init(params)
    with pytest.raises(StructureError, match=r"same path.*p\.b"):
        fz.shard(step, level=1, group=SingleRank()).init(params)


def test_an_init_that_failed_between_two_trees_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Trees are numbered, and all ranks must count alike."""
    failing, hold = [True], program_module.hold

    def hold_or_fail(tree: Any, holding: Any, *args: Any) -> Any:
        made = hold(tree, holding, *args)
        if holding.engine.rank == 1 and failing:
            failing.clear()
            raise MemoryError("once")
        return made

    monkeypatch.setattr(program_module, "hold", hold_or_fail)
    first = {"w": torch.ones(4, 4, requires_grad=True)}

    def program(value: Any, x: Tensor) -> Any:
        one, two = value
        grads = fz.value_and_grad(lambda p, x: (x @ p["w"]).square().mean())(one, x)[1]
        return (fz.apply_updates(one, grads), two), {}

    def run(group: Any) -> int:
        step = fz.shard(
            fz.program_step(program, init=lambda one, two: (one, two)), level=3, group=group
        )
        with pytest.raises((MemoryError, PeerError)):
            step.init(first, first)
        state, _ = step(step.init(first, first), torch.ones(2, 4))
        return int(state.step)

    assert run_ranks(run, 2) == [1, 1]
