"""Every checker of `functorch_zero.testing` passes what is right and fails what is wrong, saying
what and where."""

from __future__ import annotations

import math
import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import optree
import pytest
import torch
from optree import tree_map
from torch import Tensor

import functorch_zero as fz
import functorch_zero.testing.step as sharded_module
from functorch_zero import optim, testing
from functorch_zero.errors import StructureError
from functorch_zero.optim.base import (
    Transform,
    init_empty,
    with_statistics,
)
from functorch_zero.params import OnEngine
from functorch_zero.sharded.program.step import ShardedStep
from functorch_zero.step.loss import Aux
from functorch_zero.step.train import train_step
from functorch_zero.testing import (
    Equality,
    ProvesNothing,
    assert_equal_updates,
    assert_equal_values,
    assert_sharded_equals_unsharded,
    models,
)
from tests.tiers import THOROUGH, thinned

F64 = torch.float64


# The three grades


def params() -> dict[str, Any]:
    return {
        "a": torch.tensor([1.0, 2.0, 3.0], dtype=F64),
        "b": {"c": torch.tensor(4.0, dtype=F64), "none": None},
    }


def moved(by: float = 0.1) -> dict[str, Any]:
    return tree_map(lambda p: p + by, params())


@pytest.mark.parametrize(
    "grade", ["bitwise", "reordered", Equality("approximate", 0.01, "for this test")]
)
def test_equal_updates_pass(grade: Any) -> None:
    assert_equal_updates(params(), moved(), moved(), grade=grade)


def test_the_first_difference_is_named() -> None:
    got = moved()
    got["a"][1] += 1e-3
    got["b"]["c"] += 1.0
    with pytest.raises(AssertionError) as caught:
        assert_equal_updates(params(), moved(), got, context={"step": 2, "level": 3, "ranks": 4})
    message = str(caught.value)
    for part in (
        "at step 2, level 3, ranks 4",
        "leaf a[1]",
        "0.001 apart",
        "and 1 more leaves: b.c",
        "reordered",
    ):
        assert part in message


def test_the_cause_of_a_difference_is_told() -> None:
    at = {"ranks": 2}
    with pytest.raises(AssertionError, match=r"What differs is 2 times .* number of ranks"):
        assert_equal_updates(params(), moved(0.1), moved(0.2), context=at)
    with pytest.raises(AssertionError, match=r"What differs is missing: zero, or None\."):
        assert_equal_values(moved(), tree_map(torch.zeros_like, moved()), context=at)
    with pytest.raises(AssertionError) as caught:
        got = tree_map(lambda x: x + torch.linspace(0.5, 2, x.numel()).view_as(x), moved())
        assert_equal_values(moved(), got, context=at)
    assert "What differs" not in str(caught.value)


@pytest.mark.parametrize(("size", "passes"), [(1e-16, True), (1e-14, False)])
def test_reordered_allows_round_off_only(size: float, passes: bool) -> None:
    old, expected, got = (torch.full((3,), x, dtype=F64) for x in (1e-3, 2e-3, 2e-3 + size))
    if passes:
        assert_equal_updates({"w": old}, {"w": expected}, {"w": got})
    else:
        with pytest.raises(AssertionError, match="apart"):
            assert_equal_updates({"w": old}, {"w": expected}, {"w": got})


def test_bitwise_sees_the_last_bit_and_the_sign_of_zero() -> None:
    old, new = torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0])
    for got in (torch.tensor([1.0 + 2**-23, 0.0]), torch.tensor([1.0, -0.0])):
        assert_equal_updates({"w": old}, {"w": new}, {"w": got})
        with pytest.raises(AssertionError, match="bitwise"):
            assert_equal_updates({"w": old}, {"w": new}, {"w": got}, grade="bitwise")


def test_approximate_needs_a_bound_and_a_reason() -> None:
    for arguments in (
        ("approximate",),
        ("approximate", 0.1),
        ("bitwise", 0.1, "because"),
        ("equal",),
    ):
        with pytest.raises(ValueError, match="grade"):
            Equality(*arguments)
    with pytest.raises(AssertionError, match="approximate"):
        assert_equal_updates(
            params(), moved(0.1), moved(0.2), grade=Equality("approximate", 0.5, "a test")
        )


def test_reordered_is_not_for_half_precision() -> None:
    old, new = torch.zeros(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"bfloat16.*approximate"):
        assert_equal_updates({"w": old}, {"w": new}, {"w": new})


def test_the_coarsest_dtype_of_a_tree_counts() -> None:
    old = {"double": torch.zeros(2, dtype=F64), "single": torch.zeros(2)}
    new, got = ({k: torch.ones_like(x) + e for k, x in old.items()} for e in (0.0, 1e-6))
    assert_equal_updates(old, new, got)


@pytest.mark.parametrize(
    ("expected", "story"),
    [
        (torch.zeros(2), "is zero"),
        (torch.tensor([1.0, math.nan]), "not finite"),
        (torch.full((2,), 1e-45), "lost in"),
    ],
)
def test_an_expected_update_that_proves_nothing_is_refused(expected: Tensor, story: str) -> None:
    old = torch.zeros(2) if story != "lost in" else torch.ones(2)
    new = old + expected if story != "lost in" else torch.nextafter(old, old + 1)
    with pytest.raises(AssertionError, match=rf"{story}.*w"):
        assert_equal_updates({"w": old}, {"w": new}, {"w": new})
    if story != "not finite":
        assert_equal_updates({"w": old}, {"w": new}, {"w": new}, unused=["w*"])


def test_frozen_leaves_may_not_move() -> None:
    old = {"w": torch.ones(2).requires_grad_(), "frozen": torch.ones(2)}
    new = {"w": torch.zeros(2), "frozen": torch.ones(2)}
    assert_equal_updates(old, new, new)
    with pytest.raises(AssertionError, match="frozen"):
        assert_equal_updates(old, new, {**new, "frozen": torch.full((2,), 1.0 + 1e-7)})


@pytest.mark.parametrize("got", [torch.zeros(3, dtype=F64), torch.zeros(2), 1.0])
def test_kinds_must_agree(got: Any) -> None:
    with pytest.raises(AssertionError, match="shape or dtype"):
        assert_equal_values({"w": torch.zeros(2, dtype=F64)}, {"w": got})


def test_values() -> None:
    a = {"x": torch.tensor([1.0, 1e-9], dtype=F64), "n": torch.tensor(3), "s": "name"}
    assert_equal_values(a, {**a, "x": a["x"] + 1e-13})
    for other in ({**a, "x": a["x"] + 1e-11}, {**a, "n": torch.tensor(4)}, {**a, "s": "other"}):
        with pytest.raises(AssertionError, match="values differ"):
            assert_equal_values(a, other)
    with pytest.raises(StructureError):
        assert_equal_values(a, {"x": a["x"]})


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_beside_one_that_is_not_finite(value: float) -> None:
    a = torch.tensor([1.0, value, -2.0], dtype=F64)
    assert_equal_values(a, a + 1e-13)
    for other in (a + torch.tensor([1e-11, 0, 0]), a.nan_to_num(0.0, 0.0), -a):
        with pytest.raises(AssertionError, match="values differ"):
            assert_equal_values(a, other)


# Steps


def linear_step(optimizer: Transform) -> Any:
    """A step with a frozen leaf and one whose gradient is nonzero, its params, and two batches."""

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
        error = (batch["x"] @ params["w"] + params["b"] - batch["y"]).square().mean()
        return error, Aux(metrics={"error": error.detach()})

    g = torch.Generator().manual_seed(0)
    start = {
        "w": torch.randn(5, 3, generator=g, dtype=F64).requires_grad_(),
        "b": torch.zeros(3, dtype=F64),
    }
    rows = [torch.randn(6, 8, generator=g, dtype=F64) for _ in range(2)]
    return train_step(loss_fn, optimizer), start, {}, [{"x": r[:, :5], "y": r[:, 5:]} for r in rows]


@THOROUGH
def test_a_right_step_passes() -> None:
    assert_sharded_equals_unsharded(*linear_step(optim.adamw(0.01)))
    assert_sharded_equals_unsharded(
        *linear_step(optim.sgd(0.1)), levels=("fsdp",), ranks=(6,), donate=False
    )


def break_steps(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Make the state that ranks unshard after the second step wrong, as a defect of the library
    would."""
    unshard = ShardedStep.unshard

    def wrong(self: ShardedStep, state: Any) -> Any:
        whole = unshard(self, state)
        return change(whole, self.group.rank) if int(whole.step) == 2 and self.level == 2 else whole

    monkeypatch.setattr(ShardedStep, "unshard", wrong)


def perturbed(tree: Any, by: float = 1e-3) -> Any:
    return tree_map(lambda x: x + by if x.is_floating_point() and x.dim() else x, tree)


@pytest.mark.parametrize(
    ("change", "story"),
    thinned(
        [
            (
                lambda s, rank: s.replace(
                    params=perturbed({"w": s.params["w"]}) | {"b": s.params["b"]}
                ),
                r"updates.*leaf w",
            ),
            (
                lambda s, rank: s.replace(params={**s.params, "b": s.params["b"] + 1e-9}),
                r"updates.*leaf b",
            ),
            (
                lambda s, rank: s.replace(opt_state=perturbed(s.opt_state, 1e-9)),
                r"opt_state.*leaf .*mu.w",
            ),
            (lambda s, rank: s.replace(step=s.step + 1, opt_state=s.opt_state), "counters"),
            (
                lambda s, rank: s.replace(params=perturbed(s.params, rank * 1e-16)),
                "rank 0's results and this rank's",
            ),
        ],
        3,
        rows=True,
    ),
)
def test_a_wrong_step_fails(monkeypatch: pytest.MonkeyPatch, change: Any, story: str) -> None:
    break_steps(monkeypatch, change)
    with pytest.raises(AssertionError, match=rf"(?s){story}") as caught:
        assert_sharded_equals_unsharded(*linear_step(optim.adam(0.01)), ranks=(3,))
    assert "at step 1, level 2, ranks 3" in str(caught.value)
    assert "apart" in str(caught.value)


def test_wrong_metrics_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    call = ShardedStep.__call__

    def wrong(self: ShardedStep, state: Any, batch: Any) -> Any:
        state, metrics = call(self, state, batch)
        return state, {**metrics, "error": metrics["error"] * (1 + 1e-9)}

    monkeypatch.setattr(ShardedStep, "__call__", wrong)
    with pytest.raises(
        AssertionError, match=r"metrics differ at step 0, level 1, ranks 2: leaf error"
    ):
        assert_sharded_equals_unsharded(*linear_step(optim.sgd(0.1)), levels=(1,), ranks=(2,))


def test_an_optimizer_that_does_nothing_proves_nothing() -> None:
    with pytest.raises(AssertionError, match=r"expected update is zero.*path w"):
        assert_sharded_equals_unsharded(*linear_step(optim.set_to_zero()))


@pytest.mark.parametrize("nothing", [{"batches": []}, {"levels": ()}, {"ranks": ()}])
def test_no_runs_prove_nothing(nothing: dict[str, Any]) -> None:
    step, params, buffers, batches = linear_step(optim.sgd(0.1))
    (name,), nothing = nothing, {**nothing}
    batches = nothing.pop("batches", batches)
    with pytest.raises(ProvesNothing, match=f"{name} is empty"):
        assert_sharded_equals_unsharded(step, params, buffers, batches, **nothing)


def test_a_sum_for_a_loss_fails_with_a_hint() -> None:
    step, start, _, batches = linear_step(optim.sgd(0.01))
    summed = train_step(
        lambda p, b, batch: step.loss_fn(p, b, batch)[0] * len(batch["x"]), optim.sgd(0.01)
    )
    with pytest.raises(AssertionError, match="updates differ") as caught:
        assert_sharded_equals_unsharded(summed, start, {}, batches, ranks=(2,))
    assert any("make it a mean" in note for note in caught.value.__notes__)
    assert_sharded_equals_unsharded(summed, start, {}, batches, ranks=(2,), per_rank=True)


def test_unequal_parts_need_a_weight() -> None:
    step, start, buffers, batches = linear_step(optim.adam(0.01))
    with pytest.raises(ValueError, match=r"batch of 6 .* 4 ranks.*weight"):
        assert_sharded_equals_unsharded(step, start, buffers, batches, ranks=(4,))
    with pytest.raises(ValueError, match="can't be split over 7 ranks"):
        assert_sharded_equals_unsharded(step, start, buffers, batches, ranks=(7,))
    assert_sharded_equals_unsharded(step, start, buffers, batches, ranks=(4,), per_rank=True)

    def weighted(params: Any, buffers: Any, batch: Any) -> Any:
        return step.loss_fn(params, buffers, batch)[0], Aux(weight=len(batch["x"]))

    assert_sharded_equals_unsharded(
        train_step(weighted, optim.adam(0.01)), start, buffers, batches, ranks=(4,)
    )


@THOROUGH
def test_dropout_is_compared_per_rank() -> None:
    def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
        return torch.nn.functional.dropout(batch["x"] @ params["w"], 0.5).square().mean()

    _, start, _, batches = linear_step(optim.sgd(0.1))
    assert_sharded_equals_unsharded(
        train_step(loss_fn, optim.sgd(0.1)), start, {}, batches, per_rank=True
    )


@pytest.mark.parametrize("rule", thinned(["local", "mean", "rank0"]))
def test_buffers_by_every_rule(rule: str) -> None:
    case = models.convnet()
    step, start, buffers = case.step(optim.sgd(0.1))
    settings = {"levels": (1, 3), "ranks": (2,), "per_rank": True, "sync_buffers": rule}
    assert_sharded_equals_unsharded(step, start, buffers, case.batches(2, 4), **settings)  # type: ignore[arg-type]


def test_an_error_in_the_loss_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    step, start, buffers, batches = linear_step(optim.adam(0.01))
    run_ranks = sharded_module.run_ranks

    def fail(run: Any, num_ranks: int) -> Any:
        return run_ranks(lambda group: 1 / 0, num_ranks)

    monkeypatch.setattr(sharded_module, "run_ranks", fail)
    with pytest.raises(ZeroDivisionError) as caught:
        assert_sharded_equals_unsharded(step, start, buffers, batches, levels=(2,), ranks=(3,))
    assert any("level 2, ranks 3" in note for note in caught.value.__notes__)


def amplifying() -> Transform:
    """Adds round-off, made large: the mean of what should be zero, times 1e12."""

    def update(updates: Any, state: Any, params: Any, across: Any) -> Any:
        squares = tree_map(torch.square, updates)
        lost = tree_map(
            lambda norm, total: norm.square() - total, across.norm(updates), across.sum(squares)
        )
        third = across.sum(tree_map(lambda u: u / 3, updates))
        more = tree_map(
            lambda a, b, c: 1 + 1e12 * (a + b * 3 - c), lost, third, across.sum(updates)
        )
        return tree_map(lambda u, m: -0.1 * u * m, updates, more), state

    return with_statistics(init_empty, update)


@pytest.mark.parametrize("per_rank", thinned([False, True]))
def test_round_off_is_told_from_a_defect(per_rank: bool) -> None:
    # The state of `reduce_on_plateau` holds an infinity, which has no distance from itself
    optimizer = optim.chain(amplifying(), optim.reduce_on_plateau())
    prove = partial(
        assert_sharded_equals_unsharded, *linear_step(optimizer),
        levels=(3,), ranks=(2, 3), per_rank=per_rank,
    )  # fmt: skip
    with pytest.raises(AssertionError, match="updates differ") as caught:
        prove()
    assert any("amplify round-off" in note for note in caught.value.__notes__)
    prove(allow_round_off=True)


def test_allowing_round_off_allows_no_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    break_steps(monkeypatch, lambda s, rank: s.replace(params=perturbed(s.params, 1e-9)))
    with pytest.raises(AssertionError, match="updates differ"):
        assert_sharded_equals_unsharded(
            *linear_step(optim.adam(0.01)), levels=(2,), ranks=(2,), allow_round_off=True
        )


# Programs


class Averaged(NamedTuple):
    net: Any
    mean: Any  # of the net, over steps: read only
    opt: Any
    num_steps: int


def averaged_program(optimizer: Transform) -> Any:
    """A program that keeps an average of its net beside a frozen leaf, its tree, and two batches of
    two arguments each."""
    _, params, _, batches = linear_step(optimizer)

    def init(net: Any) -> Averaged:
        return Averaged(net, tree_map(torch.clone, net), optimizer.init(net), 0)

    def loss(net: Any, x: Tensor, y: Tensor) -> Any:
        error = (x @ net["w"] + net["b"] - y).square().mean()
        return error, Aux(metrics={"error": error})

    def program(value: Averaged, x: Tensor, y: Tensor) -> Any:
        (found, seen), grads = fz.value_and_grad(loss)(value.net, x, y)
        net, opt = optimizer.apply(grads, value.opt, value.net)
        mean = tree_map(lambda m, p: 0.9 * m + 0.1 * p, value.mean, net)
        return Averaged(net, mean, opt, value.num_steps + 1), {"loss": found, **seen}

    step = fz.program_step(program, init=init)
    return step, params, [(batch["x"], batch["y"]) for batch in batches]


@THOROUGH
def test_a_right_program_passes() -> None:
    assert_sharded_equals_unsharded(*averaged_program(optim.lamb(0.01)))
    assert_sharded_equals_unsharded(
        *averaged_program(optim.sgd(0.1)), levels=[{"net": 3, "net.w": 1}], ranks=(3,), seed=None
    )


@pytest.mark.parametrize(
    ("change", "story"),
    [
        # The average's value differs in its last places, and its update in more
        (
            lambda s, rank: s.replace(mean=tree_map(lambda m: m * (1 + 2e-14), s.value.mean)),
            r"updates.*leaf mean\.w",
        ),
        (lambda s, rank: s.replace(num_steps=7), "path num_steps, expected 2, got 7"),
    ],
)
def test_a_wrong_program_fails(monkeypatch: pytest.MonkeyPatch, change: Any, story: str) -> None:
    break_steps(monkeypatch, change)
    with pytest.raises(AssertionError, match=rf"(?s){story}") as caught:
        assert_sharded_equals_unsharded(*averaged_program(optim.adam(0.01)), ranks=(3,))
    assert "at step 1, level 2, ranks 3" in str(caught.value)
    assert any("make it a mean" in note for note in caught.value.__notes__)


def in_another_thread(update: Any) -> Any:
    """The leaves' updates by a function, made where no watch of pieces sees them."""

    def of_leaves(grads: Any) -> Any:
        leaves, treedef = optree.tree_flatten(grads)
        with ThreadPoolExecutor(1) as pool:
            return treedef.unflatten([*pool.map(update, leaves)])

    return of_leaves


@pytest.mark.parametrize("shapes", [{"w": (5, 3), "b": (3,)}, {"w": (5,)}, {"v": (5,), "w": (5,)}])
def test_small_leaves_are_cut(shapes: dict[str, tuple[int, ...]]) -> None:
    """Else a function of each leaf's pieces would pass where all leaves are small."""

    def loss(params: Any, x: Tensor) -> Tensor:
        return sum((torch.tanh(p) * x.mean()).square().mean() for p in params.values())

    def steps_by(update: Any) -> Any:
        def program(params: Any, x: Tensor) -> Any:
            value, grads = fz.value_and_grad(loss)(params, x)
            return fz.apply_updates(params, in_another_thread(update)(grads)), {"loss": value}

        return fz.program_step(program, init=lambda params: params)

    params = {
        name: torch.linspace(1, 2, math.prod(shape), dtype=F64).view(shape).requires_grad_()
        for name, shape in shapes.items()
    }
    proven = partial(assert_sharded_equals_unsharded, levels=[1, 3], ranks=[2])
    batches = [torch.ones(4, 2, dtype=F64)]
    proven(steps_by(lambda g: -0.1 * g), params, batches)
    # Of whole leaves it would run
    with pytest.raises(StructureError, match="linalg_vector_norm"):
        proven(steps_by(lambda g: -0.1 * g / g.norm()), params, batches)


def test_a_tree_that_moves_in_some_steps_alone() -> None:
    """A target, as of DQN: when it rests it still has the round-off of an earlier step."""

    def program(value: Any, x: Tensor) -> Any:
        net, target, number = value

        def loss(net: Any, target: Any, x: Tensor) -> Tensor:
            return (torch.tanh(x @ net["w"]) - 0.5 * torch.tanh(x @ target["w"])).square().mean()

        mean, grads = fz.value_and_grad(loss)(net, target, x)
        net = fz.apply_updates(net, tree_map(lambda g: -0.1 * g, grads))
        return (net, net if number % 2 == 0 else target, number + 1), {"loss": mean}

    def init(net: Any) -> Any:
        return net, tree_map(torch.clone, net), 0

    made = torch.Generator().manual_seed(0)
    w = torch.randn(6, 4, generator=made, dtype=torch.float64)
    batches = [torch.randn(12, 6, generator=made, dtype=torch.float64) for _ in range(4)]
    step = fz.program_step(program, init=init)
    assert_sharded_equals_unsharded(step, {"w": w.requires_grad_()}, batches, levels=[1, 3])


@pytest.mark.parametrize("per_rank", [False, True])
def test_random_numbers_from_elsewhere_are_no_round_off(per_rank: bool) -> None:
    """They differ between any two runs, and so would pass for round-off that is amplified."""
    drawn = random.Random(0)

    def loss(params: Any, buffers: Any, x: Tensor) -> Tensor:
        return (x @ params["w"]).square().mean() * (1 + drawn.random())

    step = fz.train_step(loss, optim.sgd(0.1))
    params = {"w": torch.ones(4, dtype=torch.float64, requires_grad=True)}
    batches = [torch.ones(6, 4, dtype=torch.float64)]
    with pytest.raises(AssertionError) as failed:
        assert_sharded_equals_unsharded(
            step, params, {}, batches, levels=[1], allow_round_off=True, per_rank=per_rank
        )
    assert "gives other numbers when it is run again" in failed.value.__notes__[-1]


def test_programs_that_prove_nothing_are_refused() -> None:
    with pytest.raises(ProvesNothing, match=r"expected update is zero.*path net\.w"):
        # The average of a net that rests moves by a rounding
        assert_sharded_equals_unsharded(*averaged_program(optim.set_to_zero()), unused=["mean.w"])
    idle = fz.program_step(lambda value, x: (value, {}), init=lambda net: net)
    for per_rank in (False, True):
        with pytest.raises(ProvesNothing, match="no tree of the program's value has a trained"):
            assert_sharded_equals_unsharded(
                idle, {"w": torch.ones(2)}, [torch.ones(6)], per_rank=per_rank
            )


def test_wrong_inits_of_programs_are_refused() -> None:
    net = {"w": torch.ones(3, requires_grad=True)}

    def check(init: Any, *trees: Any) -> None:
        step = fz.program_step(lambda value, x: (value, {}), init=init)
        assert_sharded_equals_unsharded(step, *trees, [torch.ones(6)], ranks=(2,))

    def two_trees(net: Any, read: Any) -> Any:
        return {"net": net, "read": read}

    def with_more(net: Any) -> Any:
        more = {} if isinstance(net, dict) else {"more": torch.ones(2)}
        return {"net": net} | more

    story = r"those of init\(net.*, read.*got {} \(.*Remedy"
    with pytest.raises(TypeError, match=story.format(1)):
        check(two_trees, net)
    with pytest.raises(TypeError, match=story.format(3)):
        check(two_trees, net, net, net)
    with pytest.raises(StructureError, match=r"init makes of sharded trees.*more.*Remedy"):
        check(with_more, net)


def slow_average(scale: float, *, moves_on_ranks: bool) -> Any:
    """A program that reads a tree of ones, and adds `scale` to it, in float32."""
    _, params, _, batches = linear_step(optim.sgd(0.1))
    sgd = optim.sgd(0.1)

    def init(net: Any, read: Any) -> Any:
        return {"net": net, "read": read, "opt": sgd.init(net)}

    def loss(net: Any, x: Tensor, y: Tensor) -> Tensor:
        return (x @ net["w"] + net["b"] - y).square().mean()

    def program(value: Any, x: Tensor, y: Tensor) -> Any:
        _, grads = fz.value_and_grad(loss)(value["net"], x, y)
        net, opt = sgd.apply(grads, value["opt"], value["net"])
        rests = isinstance(net, OnEngine) and not moves_on_ranks
        read = tree_map(lambda r: r + (0.0 if rests else scale), value["read"])
        return {"net": net, "read": read, "opt": opt}, {}

    read = {"r": torch.ones(3)}
    step = fz.program_step(program, init=init)
    return step, params, read, [(batch["x"], batch["y"]) for batch in batches]


@THOROUGH
def test_a_tree_that_is_read_must_move_visibly() -> None:
    # One last place of 1.0: ranks on which it rests would pass
    for moves in (True, False):
        arguments = slow_average(2**-23, moves_on_ranks=moves)
        with pytest.raises(ProvesNothing, match=r"lost in .* path read\.r\. Remedy.*float64"):
            assert_sharded_equals_unsharded(*arguments, ranks=(2,))
    for scale in (2**-10, 0.0):
        assert_sharded_equals_unsharded(*slow_average(scale, moves_on_ranks=True), ranks=(2,))
    with pytest.raises(AssertionError, match=r"updates differ .*leaf read\.r"):
        assert_sharded_equals_unsharded(*slow_average(2**-10, moves_on_ranks=False), ranks=(2,))


def test_public_names() -> None:
    assert all(hasattr(testing, name) for name in testing.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        testing.nothing  # noqa: B018


def test_a_loss_that_depends_on_the_order_of_rows_is_no_round_off():
    def loss_fn(params, buffers, batch):
        losses = (params["w"] * batch).sum(1) ** 2
        return (9 * losses[0] + losses.sum()) / (len(losses) + 9)

    torch.manual_seed(0)
    step = train_step(loss_fn, optim.sgd(0.1))
    params = {"w": torch.randn(3, dtype=torch.float64).requires_grad_()}
    batches = [torch.randn(8, 3, dtype=torch.float64)]
    with pytest.raises(AssertionError):
        assert_sharded_equals_unsharded(
            step, params, {}, batches, levels=(3,), ranks=(2,), allow_round_off=True
        )
