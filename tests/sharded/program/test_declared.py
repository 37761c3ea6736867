"""What a program says of itself beside its functions: trained leaves, buffers, facts; and a refit
that takes the trees of the state."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from optree import tree_map
from torch import Tensor

import functorch_zero as fz
from functorch_zero import checkpoint, optim
from functorch_zero.errors import MismatchError, StructureError
from functorch_zero.groups import run_ranks
from functorch_zero.testing import assert_equal_values
from tests.tiers import thinned

LEVELS = [0, 1, 2, 3]
adam = optim.adam(0.1)


class Value(NamedTuple):
    net: Any
    opt: Any
    buffers: Any


def init(net: Any, buffers: Any) -> Value:
    return Value(net, adam.init(net), buffers)


def weights(*names: str) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(0)
    return {name: torch.randn(70, generator=made).double().requires_grad_() for name in names}


def seen() -> dict[str, Tensor]:
    return {"mean": torch.zeros(70).double(), "count": torch.tensor(0)}


def loss(net: Any, *, buffers: Any, batch: Tensor) -> Any:
    buffers["mean"].lerp_(batch.mean(0), 0.5)
    buffers["count"] += 1
    total = sum((fz.unshard(net[name]) - n) * batch for n, name in enumerate(net))
    return total.square().mean()


def program(value: Value, batch: Tensor) -> Any:
    gradient = fz.value_and_grad(loss)
    (mean, _, buffers), grads = gradient(value.net, buffers=value.buffers, batch=batch)
    net, opt = adam.apply(grads, value.opt, value.net)
    return Value(net, opt, buffers), {"loss": mean}


def step_of(**options: Any) -> Any:
    return fz.program_step(program, init=init, buffers=["buffers"], **options)


def rows(group: Any = None) -> Tensor:
    x = torch.randn(6, 70, generator=torch.Generator().manual_seed(1)).double()
    return x if group is None else x.chunk(group.size)[group.rank]


def only(name: str) -> Any:
    return {"net": lambda path, leaf: path == name}


def test_rules_that_are_refused() -> None:
    with pytest.raises(ValueError, match=r"doesn't take.*names among.*'net'"):
        step_of(trainable=only("b") | {"gen": True})
    with pytest.raises(StructureError, match="no leaf of params is trained"):
        step_of(trainable=only("x")).init(weights("a"), seen())


def test_buffers_of_each_rank_in_a_tuple(tmp_path: Path) -> None:
    """Its entries have numbers for names. A checkpoint has one of each."""

    def in_a_tuple(value: Any, batch: Tensor) -> Any:
        (net, opt, buffers), metrics = program(Value(*value), batch)
        return (net, opt, buffers), metrics

    def first(net: Any, buffers: Any) -> Any:
        return (*init(net, buffers),)

    step = fz.program_step(in_a_tuple, init=first, buffers=["buffers", "2"])

    def run(group: Any) -> Tensor:
        sharded = fz.shard(step, level=1, group=group, sync_buffers="local")
        state, _ = sharded(sharded.init(weights("a"), seen()), rows(group))
        with pytest.raises(StructureError, match="buffers differ by rank"):
            checkpoint.save(tmp_path, sharded, state)
        again = sharded.shard(sharded.unshard(state))
        assert_equal_values(state.value[2], again.value[2], grade="bitwise")
        return state.value[2]["mean"]

    one, two = run_ranks(run, 2)
    assert not torch.allclose(one, two)


@pytest.mark.parametrize("level", thinned(LEVELS))
def test_a_whole_state_that_trains_other_leaves(level: int) -> None:
    """Its own are, as unsharded; a rule that says otherwise refuses it."""
    sgd = optim.sgd(0.1)  # without a state, whose structure would tell

    def program(value: Any, batch: Tensor) -> Any:
        mean, grads = fz.value_and_grad(
            lambda net, *, batch: loss(net, buffers=seen(), batch=batch)
        )(value["net"], batch=batch)
        return {"net": sgd.apply(grads, sgd.init(value["net"]), value["net"])[0]}, {"loss": mean}

    def step_of(**options: Any) -> Any:
        return fz.program_step(program, init=lambda net: {"net": net}, **options)

    whole = step_of(trainable=only("b")).init(weights("a", "b"))
    expected, _ = step_of()(whole, rows())
    for options, words in (
        (only("b"), None),
        ({}, None),
        (only("a"), r"trains other leaves.*path a.*got frozen"),
    ):
        step = step_of(trainable=options)
        sharded = fz.shard(step, level=level, group=fz.groups.SingleRank())
        sharded.init(weights("a", "b"))
        if words is not None:
            with pytest.raises(StructureError, match=words):
                sharded.shard(whole)
            continue
        state, _ = sharded(sharded.shard(whole), rows())
        assert_equal_values(expected.value, sharded.unshard(state).value)


def test_buffers_that_are_nowhere() -> None:
    step = fz.program_step(program, init=init, buffers=["statistics"])
    with pytest.raises(ValueError, match=r"no buffers of this name.*'statistics'|statistics"):
        step.init(weights("a"), seen())
    with pytest.raises(TypeError, match="got the string"):
        fz.program_step(program, init=init, buffers="buffers")


def test_ranks_have_one_set_of_facts() -> None:
    def run(group: Any) -> None:
        sharded = fz.shard(step_of(facts={"rate": group.rank}), level=1, group=group)
        with pytest.raises(MismatchError, match=r"rate.* 0 on rank 0.* 1 on rank 1"):
            sharded.init(weights("a"), seen())

    run_ranks(run, 2)


def test_a_refit_without_a_rule_trains_what_the_state_trained() -> None:
    first, second = step_of(trainable=only("b")), step_of()
    state, _ = first(first.init(weights("a", "b"), seen()), rows())
    net = second.refit(state).value.net
    assert {name: leaf.requires_grad for name, leaf in net.items()} == {"a": False, "b": True}


def trained_by(optimizer: Any, name: str, entry: str = "net") -> Any:
    """A program that trains the leaves whose names are in `name`, of a net that its value has under
    this entry."""

    def init(net: Any) -> Any:
        return {entry: net, "opt": optimizer.init(net)}

    def rule(path: str, leaf: Tensor) -> bool:
        return path in name.split()

    return fz.program_step(lambda value: (value, {}), init=init, trainable={"net": rule})


@pytest.mark.parametrize("entry", ["net", "model"])
@pytest.mark.parametrize(
    ("old", "new"), thinned([("a b", "b"), ("a", "b"), ("b", "a b")], rows=True)
)
@pytest.mark.parametrize("name", ["full_matrix_adagrad", "lbfgs"])
def test_a_tensor_of_all_leaves_is_not_kept(name: str, old: str, new: str, entry: str) -> None:
    """Where it keeps its shape, its elements are those of other leaves."""
    optimizer = {
        "full_matrix_adagrad": optim.contrib.full_matrix_adagrad(0.1, whole_tree=True),
        "lbfgs": optim.chain(optim.lbfgs(0.1, memory_size=2)),
    }[name]
    params = {"a": torch.ones(2, 2), "b": torch.ones(4)}
    first, second = (trained_by(optimizer, leaves, entry) for leaves in (old, new))
    first.refit(first.init(params), params)  # the same leaves are trained
    with pytest.raises(StructureError, match="all leaves together"):
        second.refit(first.init(params), params)

    def run(group: Any) -> None:
        before, after = (fz.shard(step, level=2, group=group) for step in (first, second))
        state = before.init(params)
        before.refit(state, params)
        with pytest.raises(StructureError, match="all leaves together"):
            after.refit(state, params)

    run_ranks(run, 2)


def test_leaves_of_their_own_are_kept_beside_others() -> None:
    """Averages and another tree's optimizer stay, also one of all of that tree's leaves."""
    together, alone = optim.contrib.full_matrix_adagrad(0.1, whole_tree=True), optim.adam(0.1)

    def step_of(rule: Any) -> Any:
        def init(net: Any, disc: Any) -> Any:
            mean = tree_map(torch.clone, net)
            return {"net": net, "disc": disc, "mean": mean} | {
                "opt": alone.init(net),
                "disc_opt": together.init(disc),
            }

        return fz.program_step(lambda value: (value, {}), init=init, trainable={"net": rule})

    given = weights("a", "b"), {"w": torch.ones(2, requires_grad=True)}
    first, second = (step_of(rule) for rule in (only("a")["net"], only("b")["net"]))
    state = first.init(*given)
    mark = tree_map(lambda leaf: leaf + 1, state.value["disc_opt"])
    made = second.refit(state.replace(value=state.value | {"disc_opt": mark}))
    after, _ = first(state)
    assert after.value["mean"]["a"] is state.value["mean"]["a"]  # no step copies what stays
    assert_equal_values(mark, made.value["disc_opt"], grade="bitwise")


def test_a_tree_of_another_level_that_trains_other_leaves_is_refused() -> None:
    def run(group: Any) -> None:
        two = fz.shard(step_of(trainable=only("b")), level=1, group=group)
        one = fz.shard(step_of(trainable=only("a")), level=3, group=group)
        state, other = (step.init(weights("a", "b"), seen()) for step in (two, one))
        with pytest.raises(StructureError, match=r"path net, expected \['b'\], got \['a'\]"):
            two(state.replace(value=state.value._replace(net=other.value.net)), rows(group))

    run_ranks(run, 2)


def test_a_refit_takes_trees_by_name() -> None:
    step = step_of()
    other = fz.program_step(lambda value: (value, {}), init=lambda disc: {"net": disc})
    with pytest.raises(StructureError, match=r"no tree of its name.*disc"):
        other.refit(step.init(weights("a"), seen()))
    whole, _ = step(step.init(weights("a"), buffers=seen()), rows())
    more = seen() | {"more": torch.full((1,), 5.0)}
    expected = step.refit(whole, buffers=more)
    assert_equal_values(expected, step.refit(whole, None, more), grade="bitwise")
    assert expected.value.buffers["count"] == 1 and expected.value.buffers["more"] == 5
    for call in (step.init, lambda *args, **named: step.refit(whole, *args, **named)):
        with pytest.raises(TypeError, match="other arguments than it takes"):
            call(weights("a"), seen(), other=None)
    with pytest.raises(StructureError, match=r"path count,.*Remedy"):
        step.init(weights("a"), {"count": 0})

    def run(group: Any) -> Any:
        sharded = fz.shard(step, level=3, group=group)
        own, _ = sharded(sharded.init(weights("a"), buffers=seen()), rows(group))
        with pytest.raises(StructureError, match=r"path count,.*Remedy"):
            sharded.refit(own, buffers={"count": 0})
        return sharded.unshard(sharded.refit(own, buffers=more))

    for found in run_ranks(run, 2):
        assert_equal_values(expected, found)
