"""Evaluations of programs: sharded they give what they give on whole trees."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from optree import tree_map
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import StructureError
from functorch_zero.groups import HybridGroup, SingleRank, run_ranks
from functorch_zero.groups.counting import counted
from functorch_zero.testing import assert_equal_values
from tests.programs.case import applied, net
from tests.programs.cases import gan
from tests.tiers import crossed

CASE = gan()
TREES = CASE.trees()
BATCH = CASE.batches()[0]
NOISE, REAL = BATCH["noise0"], BATCH["real0"]
generate, judge = applied(CASE.modules["gen"]), applied(CASE.modules["disc"])


def score(value: Any, noise: Tensor, real: Tensor) -> Any:
    fake = generate(value.gen, noise)
    gap = judge(value.disc, real).mean() - judge(value.disc, fake).mean()
    return fz.Aux(metrics={"gap": gap}, weight=len(noise)), {"fake": fake, "first": noise[0]}


LEVELS = [0, 1, 2, 3, {"gen": 3, "disc": 1}]


@pytest.mark.parametrize(("level", "ranks"), crossed(LEVELS, [1, 2, 7], n=3, quick=1))
def test_metrics_and_rows(level: Any, ranks: int) -> None:
    evaluate = fz.eval_step(score, metrics=["weight"])
    state, _ = CASE.step(CASE.step.init(*TREES), BATCH)
    expected, rows = evaluate(state, NOISE, REAL)

    def run(group: Any) -> Any:
        step = fz.shard(CASE.step, level=level, group=group)
        whole, _ = CASE.step(CASE.step.init(*TREES), BATCH)
        step.init(*TREES)
        state = step.shard(whole)
        sharded = fz.shard(evaluate, level=level, group=group)
        own = [x.tensor_split(ranks)[group.rank] for x in (NOISE, REAL)]
        first, second = sharded(state, *own), sharded(state, *own)
        assert_equal_values(first, second, grade="bitwise")
        assert_equal_values(whole, step.unshard(state), grade="bitwise")
        return first

    found = run_ranks(run, ranks)
    for metrics, _ in found:
        assert metrics["weight"] == len(NOISE)
        assert_equal_values(expected, metrics)
    assert_equal_values(rows["fake"], torch.cat([own["fake"] for _, own in found]))


def test_units_that_are_not_used_are_not_gathered() -> None:
    def of_gen(value: Any, noise: Tensor) -> Any:
        return {"mean": generate(value.gen, noise).mean()}

    def run(group: Any) -> int:
        group = counted(group)
        state = fz.shard(CASE.step, level=3, group=group).init(*TREES)
        group.reset()
        fz.shard(fz.eval_step(of_gen), level=3, group=group)(state, NOISE)
        return int(group.num_calls("all_gather"))

    num_units = sum(isinstance(layer, nn.Linear) for layer in CASE.modules["gen"].children())
    assert run_ranks(run, 2) == [num_units] * 2


class Averaged(NamedTuple):
    net: Any
    mean: Any
    opt: Any
    num_steps: Tensor


module = net(1, 3, 5, 2)
apply, first_net, _ = fz.functionalize(
    module, units=nn.Linear, precision=fz.Precision(compute=torch.float32)
)
sgd = optim.sgd(0.1, momentum=0.9)


def init(params: Any) -> Averaged:
    mean = tree_map(lambda p: 0.5 * p, params)
    return Averaged(params, mean, sgd.init(params), torch.tensor(3))


AVERAGED = fz.program_step(lambda value, x: (value, {}), init=init)


def test_precision_and_a_tree_that_is_only_read() -> None:
    def distance(value: Averaged, x: Tensor) -> Any:
        apart = apply(value.net, {}, x)[0] - apply(value.mean, {}, x)[0]
        assert apart.dtype == torch.float32
        return {"apart": apart.square().mean(), "steps": value.num_steps}

    expected = fz.eval_step(distance)(AVERAGED.init(first_net), NOISE.float())
    assert expected["apart"] > 0.01

    def run(group: Any) -> Any:
        state = fz.shard(AVERAGED, level=3, group=group).init(first_net)
        own = NOISE.float().chunk(group.size)[group.rank]
        return fz.shard(fz.eval_step(distance), level=3, group=group)(state, own)

    for found in run_ranks(run, 2):
        assert_equal_values(expected, found)


def test_random_numbers_repeat() -> None:
    def noisy(value: Averaged, x: Tensor) -> Any:
        return {"mean": apply(value.net, {}, torch.dropout(x, 0.5, train=True))[0].mean()}

    evaluate = fz.eval_step(noisy)
    alone = [evaluate(AVERAGED.init(first_net, seed=seed), NOISE)["mean"] for seed in (1, 1, 2)]
    assert alone[0] == alone[1] != alone[2]

    def run(group: Any) -> Any:
        state = fz.shard(AVERAGED, level=3, group=group).init(first_net, seed=1)
        sharded = fz.shard(evaluate, level=3, group=group)
        return [sharded(state, NOISE)["mean"] for _ in range(2)]

    assert run_ranks(run, 1) == [alone[:2]]
    (one, again), (other, _) = run_ranks(run, 2)
    assert one == again == other != alone[0]  # the mean of two ranks' own numbers


def reads_state(value: Averaged, x: Tensor) -> Any:
    return {"sum": sum(leaf.sum() for leaf in value.opt[0].values())}


def writes_param(value: Averaged, x: Tensor) -> Any:
    next(iter(fz.unshard(value.net).values())).detach().mul_(2)
    return {}


def writes_counter(value: Averaged, x: Tensor) -> Any:
    value.num_steps.add_(1)
    return {}


@pytest.mark.parametrize(
    ("fn", "options", "story"),
    [
        (writes_param, {}, "a leaf of params was changed in place.*Remedy"),
        (writes_counter, {}, "path num_steps.*Remedy"),
        (reads_state, {"params": lambda opt_state, params: params}, "given a program's state.*Rem"),
    ],
)
def test_what_is_refused_everywhere(fn: Any, options: dict[str, Any], story: str) -> None:
    with pytest.raises(StructureError, match=story):
        fz.eval_step(fn, **options)(AVERAGED.init(first_net), NOISE)

    def run(group: Any) -> None:
        state = fz.shard(AVERAGED, level=3, group=group).init(first_net)
        with pytest.raises(StructureError, match=story):
            fz.shard(fz.eval_step(fn, **options), level=3, group=group)(state, NOISE)

    run_ranks(run, 1)


def test_what_is_refused_on_ranks() -> None:
    def run(group: Any) -> None:
        state = fz.shard(AVERAGED, level=3, group=group).init(first_net)
        sharded = fz.shard(fz.eval_step(reads_state), level=3, group=group)
        with pytest.raises(StructureError, match=r"optimizer's state was read inside.*Remedy"):
            sharded(state, NOISE)
        with pytest.raises(StructureError, match="was given a whole state"):
            sharded(AVERAGED.init(first_net), NOISE)
        other = fz.shard(fz.eval_step(reads_state), level=2, group=group)
        with pytest.raises(StructureError, match="sharded for another level, group or rank"):
            other(state, NOISE)
        with pytest.raises(StructureError, match=r"without a sharded tree.*Remedy"):
            sharded(state.replace(value=torch.zeros(())), NOISE)

        def loss(params: Any, opt: Any) -> Tensor:
            return sum(p.sum() for p in opt[0].values()) * next(iter(params.values())).sum()

        with pytest.raises(StructureError, match=r"optimizer's state was read inside.*Remedy"):
            fz.value_and_grad(loss)(state.value.net, state.value.opt)

    run_ranks(run, 1)
    with pytest.raises(StructureError, match="was given a sharded state"):
        run_ranks(
            lambda group: fz.eval_step(reads_state)(
                fz.shard(AVERAGED, level=3, group=group).init(first_net), NOISE
            ),
            1,
        )


@pytest.mark.parametrize(
    "of_value", [lambda group: HybridGroup(group, shard_size=2), lambda group: SingleRank()]
)
def test_trees_of_other_groups_are_refused(of_value: Any) -> None:
    """Cut by one group's layout and gathered by another's, they would be other numbers."""

    def run(group: Any) -> None:
        own = of_value(group)
        state = fz.shard(AVERAGED, level=3, group=own).init(first_net)
        teacher = fz.shard_tree(first_net, level=3, group=group)
        evaluate = fz.shard(fz.eval_step(distance), level=3, group=own)
        with pytest.raises(StructureError, match=r"trees of different groups.*Remedy"):
            evaluate(state, teacher)
        # Also where it has replaced a tree of the value
        with pytest.raises(StructureError, match=r"trees of different groups.*Remedy"):
            evaluate(state.replace(value=state.value._replace(mean=teacher)), state.value.net)
        # Also where it is the only one
        with pytest.raises(StructureError, match=r"tree of another group of ranks.*Remedy"):
            evaluate(state.replace(value=teacher), NOISE)

    run_ranks(run, 4)


def distance(value: Averaged, teacher: Any) -> Any:
    return {"distance": (value.mean["0.weight"] - teacher["0.weight"]).square().sum()}
