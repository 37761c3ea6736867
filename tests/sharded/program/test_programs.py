"""Programs of gradients and updates: on sharded trees they give what they give on whole ones."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import optree
import pytest
import torch
from optree import tree_map
from torch import Tensor

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import (
    DonatedError,
    GroupError,
    MismatchError,
    PeerError,
    StructureError,
)
from functorch_zero.groups import run_ranks
from functorch_zero.layout.sharded_tree import ShardedTree
from functorch_zero.sharded.program import engine as engine_module
from functorch_zero.testing import assert_equal_values, assert_sharded_equals_unsharded
from tests.models import MLP
from tests.tiers import thinned

LEVELS = [0, 1, 2, 3]


def model(dims: tuple[int, ...], seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    apply, params, _ = fz.functionalize(MLP(dims).double(), units=torch.nn.Linear)
    return lambda params, x: apply(params, {}, x)[0], params


def batches(rows: int, width: int, num: int = 3) -> list[Tensor]:
    made = torch.Generator().manual_seed(7)
    return [torch.randn(rows, width, generator=made, dtype=torch.float64) for _ in range(num)]


def test_a_step_s_params_are_such_trees() -> None:
    """Gradients, whole trees and norms of `state.params`, next to the step that made them."""
    apply, params = model((4, 6, 2), 8)

    def loss(params: Any, x: Tensor) -> Tensor:
        return apply(params, x).square().mean()

    step = fz.train_step(lambda p, b, x: loss(p, x), optim.adamw(0.1))
    x = batches(4, 4)[0]
    state, _ = step(step.init(params), x)
    _, expected = fz.value_and_grad(loss)(state.params, x)

    def run(group: fz.Group) -> None:
        for level in LEVELS:
            sharded = fz.shard(step, level=level, group=group)
            own, _ = sharded(sharded.init(params), x.chunk(2)[group.rank])
            _, grads = fz.value_and_grad(loss)(own.params, x.chunk(2)[group.rank])
            assert_equal_values(expected, fz.unshard(grads), grade="reordered")
            assert_equal_values(
                fz.unshard(own.params), sharded.unshard(own).params, grade="bitwise"
            )
            assert "layers.0.weight" in own.params

    run_ranks(run, 2)


@pytest.mark.parametrize("level", thinned([3, 2, 1, 0]))
def test_params_that_a_step_took_are_refused(level: int) -> None:
    """Their storage holds the next ones. A copy, and what was made of them, stay as they were."""
    step = fz.train_step(lambda p, b, x: square(p) * x, optim.sgd(0.1))

    def run(group: fz.Group) -> None:
        sharded = fz.shard(step, level=level, group=group)
        state = sharded.init({"w": torch.ones(3, requires_grad=True)})
        kept, (_, grads) = (
            tree_map(torch.clone, state.params),
            fz.value_and_grad(square)(state.params),
        )
        away = fz.apply_updates(state.params, grads)
        after, _ = sharded(state, torch.ones(()))
        for call in (
            lambda: fz.value_and_grad(square)(state.params),
            lambda: fz.apply_updates(state.params, grads),
            lambda: fz.unshard(state.params),
            lambda: state.params["w"],
            lambda: tree_map(torch.clone, state),
        ):
            with pytest.raises(DonatedError, match="was donated to a step"):
                call()
        assert "donated to a step" in repr(state.params)
        values = [fz.value_and_grad(square)(p)[0].item() for p in (kept, away, after.params)]
        assert values == pytest.approx([3, 27, 3 * 0.8**2])

    run_ranks(run, 2)


def square(params: Any, *others: Any) -> Tensor:
    total: Tensor = sum(fz.unshard(leaf).square().sum() for leaf in optree.tree_leaves(params))
    return total


def test_what_is_refused() -> None:
    def tree() -> Any:
        return {
            "w": torch.arange(1.0, 6.0).requires_grad_(),
            "b": torch.ones(3, requires_grad=True),
        }

    def run(group: fz.Group) -> None:
        params = fz.shard_tree(tree(), level=3, group=group)
        grad = fz.value_and_grad(square)
        _, grads = grad(params)
        sgd = optim.sgd(0.1)
        state = sgd.init(params)
        other = fz.shard_tree(tree(), level=3, group=fz.groups.SingleRank())
        for message, call in {
            r"tree was read inside of a sharded loss": lambda: fz.value_and_grad(
                lambda p: square(p) + params["w"].sum()
            )(params),
            r"expected a sharded tree, held as params are, got .* in pieces": lambda: grad(grads),
            r"different groups": lambda: grad(params, other),
            r"of sharded and of whole trees together": lambda: grad((params, tree())),
            r"returned Aux\(buffers=": lambda: fz.value_and_grad(
                lambda p: (square(p), fz.Aux(buffers={}))
            )(params),
            r"does not depend on any trained leaf": lambda: fz.value_and_grad(
                lambda p, q: square(q)
            )(params, params),
            r"expected updates in pieces": lambda: fz.apply_updates(params, params),
            r"got a dict": lambda: sgd.update(grads, state, tree()),
            r"pickled has no group": lambda: fz.unshard(pickle.loads(pickle.dumps(params))),
            r"expected updates in pieces, cut as": lambda: fz.dot(params, grads),
            r"either a level or layout_like": lambda: fz.shard_tree(tree(), group=group),
            r"the tree does not have the tree structure": lambda: fz.shard_tree(
                {"w": torch.ones(5)}, layout_like=params
            ),
        }.items():
            with pytest.raises(StructureError, match=message):
                call()
        with pytest.raises(ValueError, match="in pieces, as gradients are"):
            tree_map(torch.add, params, grads)

    run_ranks(run, 2)


@pytest.mark.parametrize("level", thinned([3, 2, 1, 0]))
def test_leaves_without_an_update_stay(level: int) -> None:
    """`apply_updates` where some updates are None, in a bucket with others and alone."""
    tree = {
        "frozen": torch.ones(2),
        "w": torch.arange(1.0, 6.0).requires_grad_(),
        "x": torch.ones(3, requires_grad=True),
        "z": torch.ones(3, dtype=torch.float64, requires_grad=True),
    }
    kept = {"frozen": None, "w": True, "x": None, "z": None}

    def masked(updates: Any) -> Any:
        return tree_map(
            lambda flag, update: update if flag else None, kept, updates, none_is_leaf=True
        )

    expected = fz.apply_updates(tree, masked(fz.value_and_grad(square)(tree)[1]))

    def run(group: fz.Group) -> None:
        params = fz.shard_tree(tree, level=level, group=group)
        _, grads = fz.value_and_grad(square)(params)
        updates = ShardedTree(masked(grads.tree), grads.holding)
        got = fz.unshard(fz.apply_updates(params, updates))
        assert_equal_values(expected, got, grade="bitwise")
        assert not torch.equal(got["w"], tree["w"]) and torch.equal(got["x"], tree["x"])
        wrong = ShardedTree(grads.tree | {"frozen": torch.ones(2)}, grads.holding)
        with pytest.raises(StructureError, match="path frozen"):
            fz.apply_updates(params, wrong)

    run_ranks(run, 2)


def test_one_rank_s_mistake_reaches_the_other() -> None:
    def run(group: fz.Group) -> None:
        params = fz.shard_tree({"w": torch.ones(4, requires_grad=True)}, level=3, group=group)
        _, grads = fz.value_and_grad(square)(params)
        calls = [
            lambda tree: fz.value_and_grad(square)(tree),
            lambda tree: fz.unshard(fz.apply_updates(tree, grads)),
        ]
        for call in calls:
            error = StructureError if group.rank else PeerError
            with pytest.raises(error, match=r"got tree 1 .* in pieces"):
                call(grads if group.rank else params)

    run_ranks(run, 2)


def test_read_tensors_without_values_are_no_dry_run() -> None:
    """The differentiated tree and the data decide, for whole trees as for sharded ones."""

    def loss(params: Any, read: Tensor, batch: Tensor | None = None) -> Tensor:
        return params["w"] * read

    here = {"w": torch.tensor(2.0, requires_grad=True)}
    there = {"w": torch.tensor(2.0, device="meta", requires_grad=True)}
    read = torch.ones((), device="meta")

    def check(params: Any, without_values: Any) -> None:
        with pytest.raises(StructureError, match=r"result of the loss has no values.*path loss"):
            fz.value_and_grad(loss)(params, read)
        # The batch is here, so this is no dry run of params on the meta device
        with pytest.raises(StructureError, match=r"a param has no values: path (0\.)?w,"):
            fz.value_and_grad(loss)(without_values, read, batch=torch.ones(3))

    def run(group: Any) -> None:
        for level in LEVELS:
            params = fz.shard_tree(here, level=level, group=group)
            check(params, tree_map(lambda leaf: leaf.to("meta"), params))

    check(here, there)
    value, _ = fz.value_and_grad(loss)(there, read)
    assert value.is_meta
    run_ranks(run, 1)


@pytest.mark.parametrize("level", [0, 3])
def test_an_optimizer_s_state_is_passed_on_to_a_loss(level: int) -> None:
    """Where it isn't read. A loss that has one signature for several uses is given it, say."""
    params, sgd = {"w": torch.ones(5, requires_grad=True)}, optim.sgd(0.1, momentum=0.9)

    def loss(params: Any, opt_state: Any, x: Tensor) -> Tensor:
        return (params["w"] * x).sum()

    def reading(params: Any, opt_state: Any) -> Tensor:
        return sum(leaf.sum() for leaf in optree.tree_leaves(opt_state)) * params["w"].sum()

    def writing(params: Any, opt_state: Any, x: Tensor) -> Tensor:
        x.zero_()
        return params["w"].sum()

    x = torch.arange(5.0)
    expected = fz.value_and_grad(loss)(params, sgd.init(params), x)

    def run(group: Any) -> None:
        sharded = fz.shard_tree(params, level=level, group=group)
        opt_state = sgd.init(sharded)
        value, grads = fz.value_and_grad(loss)(sharded, opt_state, x)
        assert_equal_values(expected, (value, fz.unshard(grads)))
        with pytest.raises(StructureError, match=r"state was read inside of a sharded loss"):
            fz.value_and_grad(reading)(sharded, opt_state)
        with pytest.raises(StructureError, match=r"written to .*path args\.1,"):
            fz.value_and_grad(writing)(sharded, opt_state, x.clone())

    run_ranks(run, 2)


def test_a_leaf_that_is_no_tensor_is_named() -> None:
    with pytest.raises(StructureError, match=r"must be tensors: path a\.b, got int"):
        fz.shard_tree({"a": {"b": 3}}, level=3, group=fz.groups.SingleRank())


@pytest.mark.parametrize("level", thinned([3, 2, 1, 0]))
def test_a_deep_copy_is_a_tree_of_its_own(level: int) -> None:
    """As of whole trees: a teacher, say."""

    def run(group: fz.Group) -> None:
        params = fz.shard_tree({"w": torch.ones(9, requires_grad=True)}, level=level, group=group)
        first = copy.deepcopy(params)
        with torch.no_grad():
            params["w"].add_(1)
        values = [fz.value_and_grad(square)(tree)[0] for tree in (first, params)]
        assert values == [9, 36]

    run_ranks(run, 2)


@pytest.mark.parametrize("level", thinned([3, 2, 1, 0]))
def test_deep_copies_in_a_program(level: int) -> None:
    """Of params in `init`, and of gradients and a state in a call that is looked at."""
    adam = optim.adam(0.1)

    def init(params: Any) -> Any:
        return params, copy.deepcopy(params), adam.init(params)

    def program(value: Any, x: Tensor) -> Any:
        params, first, opt_state = value
        loss, grads = fz.value_and_grad(lambda p, q, x: square(p) * x + square(q))(params, first, x)
        params, opt_state = adam.apply(copy.deepcopy(grads), copy.deepcopy(opt_state), params)
        return (params, first, opt_state), {"loss": loss}

    step = fz.program_step(program, init=init)
    whole = {"w": torch.arange(1.0, 10, dtype=torch.float64, requires_grad=True)}
    assert_sharded_equals_unsharded(
        step, whole, [torch.ones(()), torch.ones(())], levels=[level], ranks=[2], unused=["1.w"]
    )


def test_a_state_is_unsharded_by_its_step() -> None:
    """Its optimizer's state stayed in pieces otherwise."""
    step = fz.train_step(lambda p, b, x: square(p) * x, optim.adam(0.1))

    def run(group: fz.Group) -> None:
        state = fz.shard(step, level=1, group=group).init({"w": torch.ones(3, requires_grad=True)})
        with pytest.raises(StructureError, match=r"step\.unshard"):
            fz.unshard({"run": state})
        whole = step.init({"w": torch.ones(3, requires_grad=True)})
        assert fz.unshard(whole).params["w"] is whole.params["w"]

    run_ranks(run, 2)


def test_a_gradient_of_nothing_says_so() -> None:
    with pytest.raises(StructureError, match="no leaf is trained"):
        fz.value_and_grad(lambda nothing, x: x.sum())({}, torch.ones(2, requires_grad=True))


def test_a_gradient_by_a_mapped_tree_says_how_to_train_it() -> None:
    """The loss depends on the tree, of which `tree_map` has made a copy without gradients."""

    def program(params: Any, x: Tensor) -> Any:
        halved = tree_map(lambda p: 0.5 * p, params)
        return params, {"loss": fz.value_and_grad(lambda p, x: square(p) * x)(halved, x)[0]}

    step = fz.program_step(program, init=lambda params: params)
    whole, x = {"w": torch.ones(9, requires_grad=True)}, torch.ones(())
    story = r"no leaf is trained.*Remedy: .*ends with \.requires_grad_\(\)"
    with pytest.raises(StructureError, match=story):
        step(step.init(whole), x)

    def run(group: fz.Group) -> None:
        sharded = fz.shard(step, level=3, group=group)
        with pytest.raises(StructureError, match=story):
            sharded(sharded.init(whole), x)

    run_ranks(run, 2)


def set_leaf(tree: Any, name: str, leaf: Any) -> Any:
    changed = tree_map(lambda x: x, tree)
    changed.tree[name] = leaf
    return changed


@pytest.mark.parametrize("level", thinned([3, 2, 1, 0]))
def test_leaves_that_are_not_what_the_layout_says_are_refused(level: int) -> None:
    """Whole trees may change so; sharded ones broadcast, forgot or kept what had been changed."""
    names = {"a": (5, 3), "b": (3,), "frozen": (4,)}
    whole = {
        name: torch.ones(shape, requires_grad=name != "frozen") for name, shape in names.items()
    }

    def run(group: fz.Group) -> None:
        params = fz.shard_tree(whole, level=level, group=group)
        _, grads = fz.value_and_grad(square)(params)
        sgd = optim.sgd(0.1)
        state = sgd.init(params)
        for message, tree in {
            "(another shape|is a plain tensor): path a": set_leaf(params, "a", torch.ones(2)),
            "another dtype: path a": tree_map(Tensor.double, params),
            "require grad than when it was cut: path frozen": tree_map(
                lambda p: p.clone().requires_grad_(), params
            ),
            "is no tensor: path b": set_leaf(params, "b", None),
        }.items():
            with pytest.raises((StructureError, PeerError), match=message):
                fz.value_and_grad(square)(tree)
        for message, tree in {
            "(another shape|is a plain tensor): path a": set_leaf(grads, "a", torch.ones(2)),
            "is given for a frozen leaf: path frozen": set_leaf(grads, "frozen", torch.ones(4)),
        }.items():
            for call in (
                lambda tree=tree: fz.apply_updates(params, tree),
                lambda tree=tree: sgd.update(tree, state, params),
                lambda tree=tree: fz.unshard(tree),
            ):
                with pytest.raises((StructureError, PeerError), match=message):
                    call()
        without = set_leaf(grads, "a", None)
        for call in (lambda: sgd.update(without, state, params), lambda: fz.unshard(without)):
            with pytest.raises((StructureError, PeerError), match="is no tensor: path a"):
                call()
        with pytest.raises(StructureError, match="no leaf is trained"):
            fz.value_and_grad(lambda nothing, params: square(params))({}, params)

    run_ranks(run, 2)


def test_a_leaf_put_in_the_place_of_another_is_read() -> None:
    """It lies in no flat, and may require grad."""

    def run(group: fz.Group) -> None:
        params = fz.shard_tree({"w": torch.ones(4, requires_grad=True)}, level=3, group=group)
        params.tree["w"] = torch.full_like(params["w"], 3.0, requires_grad=True)
        value, _ = fz.value_and_grad(square)(params)
        assert value == 36
        with torch.no_grad():
            params["w"].add_(1)
        assert fz.value_and_grad(square)(params)[0] == 64

    run_ranks(run, 2)


def linear(dtype: torch.dtype = torch.float64, rows: int = 5, trained: bool = True) -> Any:
    """A trained leaf and a frozen one."""
    w = torch.ones(rows, 3, dtype=dtype)
    return {"w": w.requires_grad_(trained), "b": torch.ones(3, dtype=dtype)}


# Trees that `layout_like=linear()` can't cut, by the error on a whole tree
UNLIKE: dict[str, Any] = {
    r"layout_like: path b.*float64.*float32": linear(dtype=torch.float32),
    r"layout_like.*\(5, 3\).*\(1, 3\).*Remedy": linear(rows=1),
    r"the tree structure.*path b": {"w": torch.ones(5, 3)},
    r"path b, expected frozen, got trained": {
        name: leaf.detach().requires_grad_() for name, leaf in linear().items()
    },
}


@pytest.mark.parametrize("rank", [None, 1])
def test_trees_unlike_layout_like_are_refused(rank: int | None) -> None:
    """On all ranks, in the first case, or on one, of which the others are told."""

    def run(group: fz.Group) -> None:
        params = fz.shard_tree(linear(), level=3, group=group)
        for other in UNLIKE.values():
            given = other if rank in (None, group.rank) else linear()
            with pytest.raises(
                (StructureError, PeerError), match=r"layout_like|the tree structure"
            ):
                fz.shard_tree(given, layout_like=params)

    run_ranks(run, 2)


def test_a_trained_tree_is_not_cut_like_one_of_which_no_leaf_is_trained() -> None:
    """Its gradients would be None, beside those of a trained tree that a loss is given, too."""

    def run(group: fz.Group) -> None:
        frozen = fz.shard_tree(linear(trained=False), level=3, group=group)
        with pytest.raises(StructureError, match=r"path w, expected frozen, got trained"):
            fz.shard_tree(linear(), layout_like=frozen)
        fz.shard_tree(linear(trained=False), layout_like=frozen)

    run_ranks(run, 2)


def test_errors_tell_how_trees_are_cut_differently() -> None:
    """optree prints both nodes' data, and the texts must differ."""

    def tree(dtype: torch.dtype = torch.float64, frozen: str = "") -> Any:
        made = {"w": torch.ones(5, 3, dtype=dtype), "b": torch.ones(3, dtype=dtype)}
        return {name: leaf.requires_grad_(name != frozen) for name, leaf in made.items()}

    def run(group: fz.Group) -> None:
        level = {"": 3, "b": 1}
        params = fz.shard_tree(tree(), level=level, group=group)
        mesh = fz.HybridGroup(group, shard_size=1)
        others = {
            r"level 1 \(b\) and level 3 \(w\).*got.*cut as level 3;": fz.shard_tree(
                tree(), level=3, group=group
            ),
            r"cut as level 1 \(b\).*float64.*got.*float32": fz.shard_tree(
                tree(torch.float32), level=level, group=group
            ),
            r"trained;.*got.*frozen \(b\) and trained \(w\)": fz.shard_tree(
                tree(frozen="b"), level=3, group=group
            ),
            r"rank . of 2 \(.*got.*rank . of 2 replicas of 1": fz.shard_tree(
                tree(), level=level, group=mesh
            ),
            r"rank . of 2 \(.*got.*rank 0 of 1": fz.shard_tree(
                tree(), level=level, group=fz.groups.SingleRank()
            ),
        }
        for story, other in others.items():
            with pytest.raises(ValueError, match=rf"{story}.*shard_tree\(tree, layout_like="):
                tree_map(torch.add, params, other)
        _, grads = fz.value_and_grad(square)(params)
        with pytest.raises(StructureError, match=r"as the params are, .* level 3;.*got.*level 1"):
            fz.apply_updates(fz.shard_tree(tree(), level=3, group=group), grads)

    run_ranks(run, 2)


def test_a_next_value_at_another_level_is_told_apart() -> None:
    step = fz.program_step(lambda value: (value[::-1], {}), init=lambda one, two: (one, two))

    def run(group: fz.Group) -> None:
        net = {"w": torch.ones(5, 3).requires_grad_()}
        sharded = fz.shard(step, level={"one": 3, "two": 1}, group=group)
        state = sharded.init(net, net)
        story = r"path 0,.*in a ShardedTree as params are held, cut as level 1;.*place of.*level 3"
        with pytest.raises(StructureError, match=story):
            sharded(state)

    run_ranks(run, 2)


@pytest.mark.parametrize("level", thinned([3, 1, 2, 0]))
def test_gradients_of_a_read_only_tree_are_refused(level: int) -> None:
    """By kernels, by other optimizers and by `fz.dot`, whether somebody has read them or not."""

    def loss(trees: Any) -> Tensor:
        one, other = trees
        return (one["w"] * other["w"]).sum()

    def run(group: fz.Group) -> None:
        params = fz.shard_tree(
            {"w": torch.ones(5, 3, requires_grad=True)}, level=level, group=group
        )
        teacher = tree_map(torch.detach, params)
        for optimizer in (optim.adamw(0.1), optim.lamb(0.1), optim.sgd(0.1)):
            state = optimizer.init(params)
            for call in (optimizer.apply, optimizer.update):
                _, (grads, none) = fz.value_and_grad(loss)((params, teacher))
                for _ in range(2):
                    with pytest.raises(StructureError, match=r"read *only.*None.*rank.*Remedy"):
                        call(none, state, params)
                    with pytest.raises(StructureError, match=r"read *only.*None.*rank.*Remedy"):
                        fz.dot(grads, none)
                    # As in one process: a sum of nothing, and nothing to add
                    assert fz.dot(none, none) == 0
                    fz.apply_updates(params, none)
                    assert not optree.tree_leaves(none)  # which reads it
                call(grads, state, params)

    run_ranks(run, 2)


def test_layout_like_of_a_whole_tree() -> None:
    """A copy, trained as its tree is, after the same checks."""
    like = linear()
    for given in (linear(), linear(trained=False)):
        copied = fz.shard_tree(given, layout_like=like)
        assert_equal_values(given, copied, grade="bitwise")
        for name in given:
            assert copied[name].requires_grad == given[name].requires_grad
            assert copied[name] is not given[name] and copied[name].is_leaf
    # Of a read only copy nobody knows which leaves were trained
    assert fz.shard_tree(linear(), layout_like=linear(trained=False))["w"].requires_grad
    for story, other in UNLIKE.items():
        with pytest.raises(StructureError, match=story):
            fz.shard_tree(other, layout_like=like)
    with pytest.raises(StructureError, match="must be tensors"):
        fz.shard_tree(linear(), layout_like={"w": 1.0, "b": 2.0})


@pytest.mark.parametrize("level", thinned([3, 2, 1, 0]))
def test_a_program_cuts_a_tree_like_another_and_has_an_oracle(level: int) -> None:
    """A teacher that begins in the first step as it is given, whole."""
    teacher = {"w": torch.full((5, 3), 0.5, dtype=torch.float64)}

    def program(value: Any, x: Tensor) -> Any:
        net, average = value
        fresh = fz.shard_tree(teacher, layout_like=net)
        loss, grads = fz.value_and_grad(lambda p, t, x: (x @ (p["w"] - t["w"])).square().mean())(
            net, fresh, x
        )
        net = fz.apply_updates(net, tree_map(lambda g: -0.1 * g, grads))
        average = tree_map(lambda a, t, p: a + 0.1 * t + 0.1 * p, average, fresh, net)
        return (net, average), {"loss": loss}

    step = fz.program_step(program, init=lambda net: (net, tree_map(torch.clone, net)))
    net = {"w": torch.ones(5, 3, dtype=torch.float64).requires_grad_()}
    batches = [torch.randn(12, 5, dtype=torch.float64) for _ in range(2)]
    assert_sharded_equals_unsharded(step, net, batches, levels=[level], ranks=[2])


@pytest.mark.thorough
@pytest.mark.parametrize("level", [3, 1])
def test_trees_that_are_cut_in_each_step_are_forgotten(
    level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine remembers layouts by their ids: of those that it forgets another may be free."""
    monkeypatch.setattr(engine_module, "_MOST", 2)
    teachers = [{"w": torch.full((5, 3), 0.1 * n, dtype=torch.float64)} for n in range(6)]
    net = {"w": torch.ones(5, 3, dtype=torch.float64).requires_grad_()}

    def loss(params: Any, teacher: Any, x: Tensor) -> Tensor:
        return (x @ (params["w"] - teacher["w"])).square().mean()

    def run(group: fz.Group) -> None:
        params = fz.shard_tree(net, level=level, group=group)
        layouts = []
        x = torch.arange(20, dtype=torch.float64).view(4, 5)
        for teacher in teachers:
            fresh = fz.shard_tree(teacher, level=level, group=group)
            layouts.append(weakref.ref(fresh.sharding.layout))
            part = x.chunk(group.size)[group.rank]
            found, grads = fz.value_and_grad(loss)(params, fresh, part)
            expected, whole_grads = fz.value_and_grad(loss)(net, teacher, x)
            assert_equal_values(expected, found)
            assert_equal_values(whole_grads, fz.unshard(grads))
            fz.value_and_grad(lambda p, x: loss(p, p, x))(params, part)
        del fresh
        gc.collect()
        assert sum(layout() is not None for layout in layouts) <= 2

    run_ranks(run, 2)


def test_optimizers_that_are_made_in_each_step_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_module, "_MOST", 2)

    def run(group: fz.Group) -> None:
        net, made = {"w": torch.ones(5, 3, requires_grad=True)}, []
        params = fz.shard_tree(net, level=1, group=group)
        for _ in range(6):
            optimizer = optim.adam(0.1)
            made.append(weakref.ref(optimizer))
            state = optimizer.init(params)
            params, _ = optimizer.apply(fz.zero_updates(params), state, params)
        del optimizer, state
        gc.collect()
        assert sum(optimizer() is not None for optimizer in made) <= 2

    run_ranks(run, 2)


def test_ranks_that_shard_other_values_are_told() -> None:
    def run(group: fz.Group) -> None:
        with pytest.raises(MismatchError, match=r"values\.w"):
            fz.shard_tree({"w": torch.full((4,), float(group.rank))}, level=3, group=group)

    run_ranks(run, 2)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_ranks_that_cut_at_other_levels_are_told(first: int) -> None:
    def run(group: fz.Group) -> None:
        with pytest.raises(MismatchError, match=rf"level of leaves\.w is {first} on rank 0"):
            fz.shard_tree({"w": torch.ones(4)}, level=first + group.rank, group=group)

    run_ranks(run, 2)


def test_a_pickled_tree_has_the_same_leaves() -> None:
    params = fz.shard_tree({"w": torch.ones(3)}, level=3, group=fz.groups.SingleRank())
    again = pickle.loads(pickle.dumps(params))
    assert torch.equal(again["w"].local, params["w"].local)
    assert optree.tree_structure(again) == optree.tree_structure(params)


@pytest.mark.parametrize("way", ["shard_tree", "step.shard"])
def test_ranks_that_differentiate_other_trees_are_told(way: str) -> None:
    step = fz.train_step(lambda p, b, x: square(p) * x, optim.sgd(0.1))

    def run(group: fz.Group) -> None:
        sharded = fz.shard(step, level=3, group=group)
        trees = []
        for value in (1.0, 2.0):
            whole = {"w": torch.full((4,), value, requires_grad=True)}
            if way == "shard_tree":
                trees.append(fz.shard_tree(whole, level=3, group=group))
            else:
                trees.append(sharded.shard(step.init(whole)).params)
        with pytest.raises(GroupError, match="not started the same collectives"):
            fz.value_and_grad(square)(trees[group.rank])

    run_ranks(run, 2)


def test_gradients_go_on_after_one_rank_was_refused() -> None:
    """A rank that is refused before it counts the gradient counts with the others afterwards."""
    params = {"w": torch.ones(3, dtype=torch.float64).requires_grad_()}

    def loss(params: Any, x: Tensor) -> Tensor:
        return (params["w"] * x).sum()

    def run(group: Any) -> Any:
        sharded = fz.shard_tree(params, level=3, group=group)
        x = torch.ones(3, dtype=torch.float64)
        _, grads = fz.value_and_grad(loss)(sharded, x)
        with pytest.raises(fz.errors.FunctorchZeroError):
            fz.value_and_grad(loss)(grads if group.rank == 0 else sharded, x)
        return fz.unshard(fz.value_and_grad(loss)(sharded, x)[1])

    for grads in run_ranks(run, 2):
        assert torch.equal(grads["w"], torch.ones(3, dtype=torch.float64))
