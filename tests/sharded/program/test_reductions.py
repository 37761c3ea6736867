"""Programs whose reduction keeps tensors between gradients: by tree, in `State.parts`."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from optree import tree_map
from torch import Tensor

import functorch_zero as fz
from functorch_zero import checkpoint, optim
from functorch_zero.errors import StructureError
from functorch_zero.groups import SingleRank, run_ranks
from functorch_zero.params import UnitSpec
from functorch_zero.runtime.reduce import Carried, Kept, Summed
from functorch_zero.testing import assert_equal_values, assert_sharded_equals_unsharded
from tests.programs.cases import CASES
from tests.sharded.test_seams import (
    EXACT,
    LR,
    ROUNDED,
    linear_loss,
    make_batches,
    make_params,
    sums_of_grads,
)
from tests.tiers import crossed

sgd = optim.sgd(LR)
LEVELS = [0, 1, 2, 3]


class Value(NamedTuple):
    first: Any
    second: Any


def loss(params: Any, x: Tensor) -> Tensor:
    return linear_loss(params, {}, x)


def twice(params: Any, x: Tensor) -> Tensor:
    return 2 * linear_loss(params, {}, x)


def descended(params: Any, grads: Any) -> Any:
    return fz.apply_updates(params, tree_map(lambda g: -LR * g, grads))


def program(value: Value, x: Tensor) -> Any:
    """Two gradients of the first tree, and one of the second."""
    first, second = value
    mean, grads = fz.value_and_grad(loss)(first, x)
    first = descended(first, grads)
    _, grads = fz.value_and_grad(twice)(first, x)
    first = descended(first, grads)
    _, grads = fz.value_and_grad(loss)(second, x)
    return Value(first, descended(second, grads)), {"loss": mean}


STEP = fz.program_step(program, init=Value)
TIMES = {"first": 3, "second": 1}  # the loss's gradient, in a step


def part(x: Tensor, group: Any) -> Tensor:
    return x.tensor_split(group.size)[group.rank]


def train(sharded: Any, state: Any, batches: list[Tensor], group: Any = None) -> Any:
    for x in batches:
        state, _ = sharded(state, part(x, sharded.group if group is None else group))
    return state


def first_of(sharded: Any) -> Any:
    return sharded.init(make_params(), make_params())


def check_conserved(sharded: Any, state: Any, batches: list[Tensor]) -> None:
    """All gradients of each tree were sent, or are kept; and some of each are kept."""
    whole = sharded.unshard(state)
    error, sums = whole.parts["reduction"]["error"], sums_of_grads(batches)
    for name, times in TIMES.items():
        for path, first in make_params().items():
            kept = error[f"{name}.{path}"][0]
            assert kept.abs().max() > 1e-6
            expected = first - LR * (times * sums[path] - kept)
            found = getattr(whole.value, name)[path]
            torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("level", "donate"), crossed(LEVELS, [False, True], quick=1))
def test_gradients_of_a_tree_are_sent_or_kept(level: int, donate: bool) -> None:
    batches = make_batches()

    def run(group: Any) -> None:
        sharded = fz.shard(STEP, level=level, group=group, reduction=ROUNDED, donate=donate)
        state = train(sharded, first_of(sharded), batches)
        check_conserved(sharded, state, batches)

    run_ranks(run, 2)


class Counted(Summed):
    """Sums as they are, and counts the reductions of each bucket."""

    keeps: Mapping[str, Carried] = {"count": "same"}

    def init(self, bucket: Any, device: torch.device) -> Kept:
        return {"count": torch.zeros((), dtype=torch.int64, device=device)}

    def start(self, flat: Tensor, kept: Kept, group: Any, *, cut: bool) -> Any:
        result, work, _ = super().start(flat, kept, group, cut=cut)
        return result, work, {"count": kept["count"] + 1}


@pytest.mark.parametrize(("name", "level"), crossed([*CASES], LEVELS, quick=1))
def test_every_program_runs_with_a_reduction_that_keeps(name: str, level: int) -> None:
    """Displaced params, copies, teachers and products by vectors among them."""
    case = CASES[name]()
    assert_sharded_equals_unsharded(
        case.step,
        *case.trees(),
        case.batches(),
        levels=[level],
        ranks=[2],
        reduction=Counted(),
        donate=level % 2 == 1,
    )


def test_the_tensors_follow_each_gradient() -> None:
    """Those of a tree that no gradient is asked of stay as they are."""

    def some(value: Value, x: Tensor) -> Any:
        for _ in range(3):
            _, grads = fz.value_and_grad(loss)(value.second, x)
        return value._replace(second=descended(value.second, grads)), {}

    def run(group: Any) -> Any:
        step = fz.program_step(some, init=Value)
        sharded = fz.shard(step, level=2, group=group, reduction=Counted())
        state = train(sharded, first_of(sharded), make_batches(2))
        return state.parts["reduction"]["count"]

    counts, _ = run_ranks(run, 2)
    assert {name.partition(".")[0] for name in counts} == {"first", "second"}
    for name, count in counts.items():
        assert int(count) == (6 if name.startswith("second") else 0)


@pytest.mark.thorough
def test_what_is_kept_goes_to_other_ranks(tmp_path: Path) -> None:
    batches = make_batches(5)

    def run(group: Any, done: int, until: int) -> None:
        sharded = fz.shard(STEP, level={"first": 3, "second": 1}, group=group, reduction=ROUNDED)
        state = first_of(sharded)
        if done:
            state = checkpoint.load(tmp_path, sharded, like=state).state
        state = train(sharded, state, batches[done:until])
        check_conserved(sharded, state, batches[:until])
        checkpoint.save(tmp_path, sharded, state)
        again = checkpoint.load(tmp_path, sharded, like=first_of(sharded)).state
        assert_equal_values(state.parts, again.parts, grade=EXACT)
        whole = sharded.unshard(state)
        again = sharded.shard(whole)
        assert_equal_values(whole, sharded.unshard(again), grade=EXACT)
        train(sharded, again, batches)

    for ranks, done, until in [(2, 0, 2), (3, 2, 4), (1, 4, 5)]:
        run_ranks(lambda g, a=done, b=until: run(g, a, b), ranks)


def test_a_tree_that_is_only_read_reduces_nothing_early() -> None:
    """A frozen one at level 3, whose level would reduce gradients at every use."""

    def distance(net: Any, frozen: Any, *, batch: Tensor) -> Any:
        return loss(net, batch) - loss(frozen, batch), fz.Aux(weight=len(batch))

    def own(value: Value, x: Tensor) -> Any:
        _, grads = fz.value_and_grad(distance, accumulate=2)(value.first, value.second, batch=x)
        return value._replace(first=descended(value.first, grads)), {}

    assert_sharded_equals_unsharded(
        fz.program_step(own, init=Value),
        make_params(),
        make_params(requires_grad=False),
        make_batches(),
        levels=[{"first": 1, "second": 3}],
        ranks=[2],
        reduction=Counted(),
    )


def test_the_value_may_be_the_tree() -> None:
    """Its leaves have their own paths, whatever the argument of `init` is called."""

    def own(params: Any, x: Tensor) -> Any:
        return descended(params, fz.value_and_grad(loss)(params, x)[1]), {}

    steps = [
        fz.program_step(own, init=lambda params: params),
        fz.program_step(own, init=lambda net: net),
    ]
    x = make_batches()[0]

    def run(group: Any) -> None:
        first, second = (fz.shard(s, level=3, group=group, reduction=ROUNDED) for s in steps)
        whole = first.unshard(train(first, first.init(make_params()), [x]))
        assert {*whole.parts["reduction"]["error"]} == {*make_params()}
        second.init(make_params())
        later = second.unshard(train(second, second.shard(whole), [x]))
        expected = first.unshard(train(first, first.shard(whole), [x]))
        assert_equal_values(expected, later, grade=EXACT)

    run_ranks(run, 2)


def test_a_step_that_fails_changes_nothing() -> None:
    x = make_batches()[0]

    def failing(value: Value, x: Tensor, fail: bool) -> Any:
        after, metrics = program(value, x)
        if fail:
            raise ValueError("after three gradients")
        return after, metrics

    def run(group: Any) -> None:
        step = fz.program_step(failing, init=Value)
        sharded = fz.shard(step, level=3, group=group, reduction=ROUNDED)
        own = part(x, group)
        state, _ = sharded(first_of(sharded), own, False)
        before = tree_map(torch.clone, state.parts)
        expected, _ = sharded(state, own, False)
        with pytest.raises(ValueError, match="after three gradients"):
            sharded(state, own, True)
        again, _ = sharded(state, own, False)
        assert_equal_values(before, state.parts, grade=EXACT)
        assert_equal_values(expected.parts, again.parts, grade=EXACT)

    run_ranks(run, 2)


@pytest.mark.parametrize("level", [0, 3])
def test_products_and_gradients_outside_are_summed_as_they_are(level: int) -> None:
    """They don't follow the gradients of the steps."""

    def cubed(params: Any, x: Tensor) -> Tensor:
        return (x @ fz.unshard(params)["w"]).pow(3).mean()

    def probing(params: Any, x: Tensor) -> Any:
        vector = tree_map(torch.ones_like, fz.zero_updates(params))
        _, grads, product = fz.hvp(cubed)(params, vector, x)
        return params, {"norm": fz.dot(grads, grads), "curvature": fz.dot(vector, product)}

    step = fz.program_step(probing, init=lambda params: params)
    params, x = {"w": make_params()["w"]}, make_batches()[0]
    _, expected = step(step.init(params), x)
    _, grads = fz.value_and_grad(cubed)(params, x)

    def run(group: Any) -> None:
        sharded = fz.shard(step, level=level, group=group, reduction=ROUNDED)
        state, found = sharded(sharded.init(params), part(x, group))
        assert_equal_values(expected, found)
        _, found = fz.value_and_grad(cubed)(state.value, part(x, group))
        assert_equal_values(dict(grads), dict(fz.unshard(found)))
        assert not state.parts["reduction"]["error"]["w"].any()

    run_ranks(run, 2)


def weighing(weight: float) -> Callable[..., Any]:
    """The loss, with a weight that says nothing of the batch."""
    return lambda params, x: (loss(params, x), fz.Aux(weight=weight))


def test_a_batch_without_weight_sends_what_is_kept_as_it_is() -> None:
    """It was divided by no weight, and so by as much as it had been multiplied by."""

    def weighted(value: Value, x: Tensor, weight: float) -> Any:
        _, grads = fz.value_and_grad(weighing(weight))(value.first, x)
        return value._replace(first=descended(value.first, grads)), {}

    x = make_batches()[0]

    def run(group: Any) -> None:
        step = fz.program_step(weighted, init=Value)
        sharded = fz.shard(step, level=2, group=group, reduction=ROUNDED)
        state, _ = sharded(first_of(sharded), part(x, group), 4096.0)
        later, _ = sharded(state, part(x, group), 0.0)
        whole, after = sharded.unshard(state), sharded.unshard(later)
        for path, error in whole.parts["reduction"]["error"].items():
            if path.startswith("first."):
                name = path.partition(".")[2]
                still = after.parts["reduction"]["error"][path][0]
                moved = (whole.value.first[name] - after.value.first[name]).detach() / LR
                torch.testing.assert_close(moved, error[0] - still, rtol=1e-9, atol=1e-13)
                assert 0 < moved.abs().max() < 0.01

    run_ranks(run, 2)


def test_weights_of_micro_batches_are_known_too_late() -> None:
    def weighted(params: Any, *, batch: Tensor) -> Any:
        return loss(params, batch), fz.Aux(weight=len(batch))

    def accumulating(params: Any, x: Tensor) -> Any:
        _, grads = fz.value_and_grad(weighted, accumulate=2)(params, batch=x)
        return descended(params, grads), {}

    x = make_batches(1, rows=14)[0]
    step = fz.program_step(accumulating, init=lambda params: params)

    def run(group: Any) -> None:
        refusing = fz.shard(step, level=3, group=group, reduction=ROUNDED)
        with pytest.raises(StructureError, match=r'micro-batches.*reduce_gradients="once"'):
            refusing(refusing.init(make_params()), part(x, group))
        options = {"reduction": ROUNDED, "reduce_gradients": "once"}
        sharded = fz.shard(step, level=3, group=group, **options)
        whole = sharded.unshard(train(sharded, sharded.init(make_params()), [x]))
        for name, total in sums_of_grads([x]).items():
            kept = whole.parts["reduction"]["error"][name][0]
            expected = make_params()[name] - LR * (total - kept)
            torch.testing.assert_close(whole.value[name], expected, rtol=1e-13, atol=1e-13)

    run_ranks(run, 2)


def test_trees_that_change_places_take_theirs_along() -> None:
    """The first tree's gradients are a thousand times the second's."""

    def large(params: Any, x: Tensor) -> Tensor:
        return 1000 * loss(params, x)

    def exchanging(value: Value, x: Tensor, is_exchanged: bool) -> Any:
        first, second = value[::-1] if is_exchanged else value
        _, grads = fz.value_and_grad(large)(first, x)
        _, of_second = fz.value_and_grad(loss)(second, x)
        new = descended(first, grads), descended(second, of_second)
        return Value(*(new if is_exchanged else new[::-1])), {}

    step, batches = fz.program_step(exchanging, init=Value), make_batches(4)

    def run(group: Any) -> None:
        sharded = fz.shard(step, level=3, group=group, reduction=ROUNDED)
        state = first_of(sharded)
        for k, x in enumerate(batches):
            state, _ = sharded(state, part(x, group), k % 2 == 1)
        whole, sums = sharded.unshard(state), sums_of_grads(batches)
        for name, times in (("first", 1000), ("second", 1)):
            for path, first in make_params().items():
                kept = whole.parts["reduction"]["error"][f"{name}.{path}"][0]
                expected = first - LR * (times * sums[path] - kept)
                found = getattr(whole.value, name)[path]
                torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)

    run_ranks(run, 2)


def test_places_are_told_apart_by_steps_that_have_made_no_state() -> None:
    """One step puts the first tree into both places, and another one trains the second."""

    def together(value: Value, x: Tensor) -> Any:
        _, grads = fz.value_and_grad(loss)(value.first, x)
        first = descended(value.first, grads)
        return Value(first, first), {}

    def second_alone(value: Value, x: Tensor) -> Any:
        _, grads = fz.value_and_grad(loss)(value.second, x)
        return value._replace(second=descended(value.second, grads)), {}

    def run(group: Any) -> None:
        made_by, putting, going_on = (
            fz.shard(
                fz.program_step(own, init=lambda params: Value(params, params)),
                level=1,
                group=group,
                reduction=ROUNDED,
            )
            for own in (program, together, second_alone)
        )
        x, other = make_batches(2)
        state = train(putting, made_by.init(make_params()), [x])
        later = train(going_on, state, [other])
        before, after = (s.parts["reduction"]["error"] for s in (state, later))
        for path in make_params():
            assert torch.equal(before[f"first.{path}"], after[f"first.{path}"])
            assert not before[f"second.{path}"].any() and after[f"second.{path}"].any()

    run_ranks(run, 2)


def test_a_tree_that_is_cut_on_its_own_goes_by_no_reduction() -> None:
    def run(group: Any) -> None:
        def init(params: Any) -> Value:
            return Value(params, fz.shard_tree(make_params(), level=1, group=group))

        sharded = fz.shard(
            fz.program_step(program, init=init), level=1, group=group, reduction=ROUNDED
        )
        whole = sharded.unshard(train(sharded, sharded.init(make_params()), make_batches()))
        assert {*whole.parts["reduction"]["error"]} == {"first.w", "first.b", "first.one"}
        sums = sums_of_grads(make_batches())
        for path, first in make_params().items():
            expected = first - LR * sums[path]
            torch.testing.assert_close(whole.value.second[path], expected, rtol=1e-13, atol=1e-13)

        def replacing(value: Value, x: Tensor) -> Any:
            return value._replace(first=fz.shard_tree(make_params(), level=1, group=group)), {}

        step = fz.program_step(replacing, init=Value)
        sharded = fz.shard(step, level=1, group=group, reduction=ROUNDED)
        story = r"other trees of the program's next value.*\['second'\].*layout_like=other"
        with pytest.raises(StructureError, match=story):
            train(sharded, first_of(sharded), make_batches(1))

    run_ranks(run, 2)


def test_a_pickled_state_is_its_step_s() -> None:
    step = fz.program_step(lambda params, x: (params, {}), init=lambda params: params)
    sharded = fz.shard(step, level=1, group=SingleRank(), reduction=ROUNDED)
    state = sharded.init(make_params())
    again = pickle.loads(pickle.dumps(state))
    assert_equal_values(sharded.unshard(state), sharded.unshard(again), grade="bitwise")


def test_a_kept_tensor_of_another_shape_is_named() -> None:
    sharded = fz.shard(STEP, level=1, group=SingleRank(), reduction=ROUNDED)
    state = first_of(sharded)
    whole = sharded.unshard(state)
    for call, given in ((sharded.unshard, state), (sharded.shard, whole)):
        parts = tree_map(lambda leaf: leaf[0], given.parts)
        story = r"another shape: path parts\.reduction\.error\.first\.b, expected \(1, 5\)"
        with pytest.raises(StructureError, match=story):
            call(given.replace(parts=parts))


class Noted(Summed):
    """Keeps the length of each bucket."""

    keeps: Mapping[str, Carried] = {"numel": "same"}

    def init(self, bucket: Any, device: torch.device) -> Kept:
        return {"numel": torch.tensor(bucket.numel, device=device)}

    def start(self, flat: Tensor, kept: Kept, group: Any, *, cut: bool) -> Any:
        assert int(kept["numel"]) == flat.numel()
        result, work, _ = super().start(flat, {}, group, cut=cut)
        return result, work, kept


def test_buckets_of_one_name_keep_tensors_of_their_own() -> None:
    """A module called "root", beside leaves of the root."""
    tree = {
        "root.w": torch.ones(50, requires_grad=True),
        "w": torch.ones(3, requires_grad=True),
    }
    units = (UnitSpec("", ("",), ("w",)), UnitSpec("root", ("root",), ("root.w",)))

    def used(params: Any, x: Tensor) -> Tensor:
        return x.mean() * sum(p.sum() for p in fz.unshard(params).values())

    def own(params: Any, x: Tensor) -> Any:
        return descended(params, fz.value_and_grad(used)(params, x)[1]), {}

    step = fz.program_step(own, init=lambda params: params)

    def run(group: Any) -> None:
        sharded = fz.shard(step, level=1, group=group, reduction=Noted())
        state = train(sharded, sharded.init(fz.Params(tree, units)), make_batches())
        names = [*state.parts["reduction"]["numel"]]
        assert len(names) == 2 and names[1] == f"{names[0]}#2"

    run_ranks(run, 2)


def refused(program: Callable[..., Any], init: Callable[..., Any], story: str) -> None:
    """Before anything of the state has changed."""
    step = fz.program_step(program, init=init)

    def run(group: Any) -> None:
        sharded = fz.shard(step, level=1, group=group, reduction=ROUNDED)
        state = sharded.init(make_params())
        before = tree_map(torch.clone, state.parts)
        with pytest.raises(StructureError, match=story):
            sharded(state, part(make_batches()[0], group))
        assert_equal_values(before, state.parts, grade=EXACT)

    run_ranks(run, 2)


def test_a_gradient_by_copies_of_one_tree_is_refused() -> None:
    def of_both(params: Any, x: Tensor) -> Any:
        other = descended(params, fz.zero_updates(params))
        fz.value_and_grad(lambda trees, x: loss(trees[0], x) + loss(trees[1], x))(
            (params, other), x
        )
        return params, {}

    story = r"two copies of one tree.*Rounded.*Remedy: take two gradients"
    refused(of_both, lambda params: params, story)

    def of_both_named(value: Any, x: Tensor) -> Any:
        of_both(value["net"], x)
        return value, {}

    story = r"two copies of one tree.*path net.*Remedy: take two gradients"
    refused(of_both_named, lambda params: {"net": params}, story)


def test_a_gradient_by_a_tree_that_no_place_is_kept_for_is_refused() -> None:
    def of_average(value: Any, x: Tensor) -> Any:
        _, average = value
        trained = tree_map(lambda p: p.requires_grad_(), tree_map(torch.clone, average))
        fz.value_and_grad(loss)(trained, x)
        return value, {}

    def with_average(params: Any) -> Any:
        return params, tree_map(lambda p: p.detach().clone(), params)

    story = r"Rounded keeps nothing.*path 1, expected .*\['0'\].*Remedy: give the tree to init"
    refused(of_average, with_average, story)


def test_a_tree_in_two_places_is_kept_for_in_each() -> None:
    """Each step asks for a gradient by the first place alone, and then puts the tree into both."""

    def together(value: Value, x: Tensor) -> Any:
        _, grads = fz.value_and_grad(loss)(value.first, x)
        first = descended(value.first, grads)
        return Value(first, first), {}

    step = fz.program_step(together, init=lambda params: Value(params, params))
    batches = make_batches()

    def run(group: Any) -> None:
        sharded = fz.shard(step, level=3, group=group, reduction=ROUNDED)
        whole = sharded.unshard(train(sharded, sharded.init(make_params()), batches))
        error, sums = whole.parts["reduction"]["error"], sums_of_grads(batches)
        for path, first in make_params().items():
            assert not error[f"second.{path}"].any()
            expected = first - LR * (sums[path] - error[f"first.{path}"][0])
            torch.testing.assert_close(whole.value.first[path], expected, rtol=1e-13, atol=1e-13)

    run_ranks(run, 2)


def test_a_value_without_trained_trees() -> None:
    step = fz.program_step(lambda value, x: (value, {}), init=fz.zero_updates)
    sharded = fz.shard(step, level=1, group=SingleRank(), reduction=ROUNDED)
    state, _ = sharded(sharded.init(make_params()), 1.0)
    assert state.parts == {"reduction": {"error": {}}}
    sharded.shard(sharded.unshard(state))


def test_a_scaled_loss_is_refused() -> None:
    """A scale changes what gradients are multiplied by, and so what is kept of them."""

    def scaled(net: Any, x: Tensor) -> Any:
        mean, grads = fz.value_and_grad(loss, scale=2.0)(net, x)
        return descended(net, grads), {"loss": mean}

    step = fz.program_step(scaled, init=lambda net: net)

    def run(group: Any) -> None:
        sharded = fz.shard(step, level=2, group=group, reduction=ROUNDED)
        with pytest.raises(NotImplementedError, match="keeps gradients between steps, and a loss"):
            sharded(sharded.init(make_params()), part(make_batches()[0], group))

    run_ranks(run, 2)
