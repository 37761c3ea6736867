"""The words that ranks owe each other in a step of a program: they make the same calls of the
library and find the same metrics, or all of them raise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from optree import tree_map
from torch import Tensor

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import GroupError, UnequalBatchesWarning
from functorch_zero.groups import CountingGroup, ProcessGroup, launch, run_ranks
from functorch_zero.testing import assert_equal_values
from tests.tiers import crossed, tiers

torch.manual_seed(0)
FIRST = {name: torch.randn(3, 5, requires_grad=True) for name in ("a", "b")}
X = torch.randn(4, 3)
UNLOOKED = 5  # the number of a step that isn't looked at
adam = optim.adam(0.1)


def init(one: Any, two: Any) -> Any:
    return one, two, adam.init(one)


def loss(params: Any, x: Tensor) -> Tensor:
    return sum((x @ leaf).square().mean() for leaf in params.values())  # type: ignore[return-value]


# What one rank alone does, beside a gradient of the first tree
Fault = Callable[[Any, Any, Tensor], Any]


def one_more(call: Fault) -> Fault:
    return lambda rank, value, x: call(rank, value, x) if rank else None


def in_another_order(call: Callable[[Any, Tensor], Any]) -> Fault:
    """A call for each of two trees that are cut alike."""

    def calls(rank: int, value: Any, x: Tensor) -> None:
        for tree in value[:2] if rank else value[1::-1]:
            call(tree, x)

    return calls


def gradients(value: Any, x: Tensor) -> Any:
    return fz.value_and_grad(loss)(value, x)[1]


FAULTS: dict[str, Fault] = {
    "value_and_grad": one_more(lambda rank, value, x: gradients(value[0], x)),
    "dot": one_more(lambda rank, value, x: fz.dot(*2 * [fz.zero_updates(value[0])])),
    "apply": one_more(
        lambda rank, value, x: adam.apply(fz.zero_updates(value[0]), value[2], value[0])
    ),
    "update": one_more(
        lambda rank, value, x: adam.update(fz.zero_updates(value[0]), value[2], value[0])
    ),
    "apply_updates": one_more(
        lambda rank, value, x: fz.apply_updates(value[0], fz.zero_updates(value[0]))
    ),
    "unshard": one_more(lambda rank, value, x: fz.unshard(value[0])),
    "init": one_more(lambda rank, value, x: adam.init(value[0])),
    "shard_tree": one_more(
        lambda rank, value, x: fz.shard_tree({"a": torch.ones(2)}, level=1, group=None)
    ),
    "value_and_grad of loss at '0' (tree 1)": in_another_order(gradients),
    "apply_updates at '0' (tree 1)": in_another_order(
        lambda tree, x: fz.apply_updates(tree, fz.zero_updates(tree))
    ),
}


def told(group: Any, fault: Fault, level: int, at: int = 0) -> str:
    """What a rank is told, which makes another call than the others in the step `at`."""
    steps = iter(range(at + 1))

    def program(value: Any, x: Tensor) -> Any:
        mean, _ = fz.value_and_grad(loss)(value[0], x)
        fault(group.rank if next(steps) == at else 0, value, x)
        return value, {"loss": mean}

    step = fz.shard(fz.program_step(program, init=init), level=level, group=group)
    state = step.init(FIRST, FIRST)
    for _ in range(at):
        state, _ = step(state, X)
    with pytest.raises(GroupError) as caught:
        step(state, X)
    return str(caught.value)


def each_fault(level: int) -> dict[str, str]:
    # One group for all: after an error that every rank has caught, they go on
    group = ProcessGroup(timeout=20)
    return {name: told(group, fault, level) for name, fault in FAULTS.items()}


@pytest.mark.parametrize("level", tiers(thorough=[1, 3], full=[0, 2]))
def test_a_rank_that_makes_another_call_ends_no_process(level: int) -> None:
    """Over gloo its collective would meet that of another call, and end a process by SIGABRT."""
    for found in launch(each_fault, 2, level, start_method="fork", timeout=100):
        for name, text in found.items():
            assert "in step 0, the ranks make different calls" in text and "call 2 is " in text, (
                text
            )
            assert name.partition(" (tree")[0] in text and "Remedy" in text, text


@pytest.mark.parametrize(
    "name", ["apply_updates at '0' (tree 1)", "value_and_grad of loss at '0' (tree 1)"]
)
def test_the_end_of_each_step_compares_the_calls(name: str) -> None:
    """In a step that isn't looked at, two calls of one length would give each other's results."""

    def run(group: Any) -> str:
        return told(group, FAULTS[name], level=1, at=UNLOOKED)

    for text in run_ranks(run, 2):
        assert "at '0' (tree 1)" in text or "at '1' (tree 2)" in text, text


def test_only_steps_that_are_looked_at_compare_each_call() -> None:
    def program(value: Any, x: Tensor) -> Any:
        one, two, state = value
        mean, grads = fz.value_and_grad(loss)(one, x)
        one, state = adam.apply(grads, state, one)
        two = fz.apply_updates(two, tree_map(torch.zeros_like, grads))
        return (one, two, state), {"loss": mean}

    group = CountingGroup(2)
    step = fz.shard(fz.program_step(program, init=init), level=3, group=group)
    state, num_words = step.init(FIRST, FIRST), []
    for _ in range(7):
        group.reset()
        state, _ = step(state, X)
        num_words.append(sum(call.dtype == torch.int64 for call in group.calls))
    # One for the gradient and one for the end, besides those of 3 calls; else only the end's
    assert num_words[0] == 5 and num_words[UNLOOKED] == 1


@pytest.mark.parametrize(("num_gradients", "donate"), crossed([1, 2, 3], [False, True]))
def test_messages_of_a_step(num_gradients: int, donate: bool) -> None:
    """Each gradient sends its metrics, and all words travel in one message; when donating, in
    another one before the first write."""

    def program(value: Any, x: Tensor) -> Any:
        params, state = value
        for _ in range(num_gradients):
            mean, grads = fz.value_and_grad(loss)(params, x)
        return adam.apply(grads, state, params), {"loss": mean}

    step = fz.program_step(program, init=lambda params: (params, adam.init(params)))
    group = CountingGroup(2)
    sharded = fz.shard(step, level=1, group=group, donate=donate)
    state = sharded.init(FIRST)
    for _ in range(UNLOOKED + 1):
        group.reset()
        state, _ = sharded(state, X)
    num_messages = sum(call.kind == "all_reduce" for call in group.calls)
    assert num_messages == num_gradients + 1 + donate


# Losses of two gradients of one step on this rank, of which ranks report other things
REPORTS: dict[str, Callable[[int], list[Callable[..., Any]]]] = {
    "metrics": lambda rank: [
        loss,
        lambda p, x: (loss(p, x), fz.Aux(metrics={f"of {rank}": x.mean()})),
    ],
    "weight": lambda rank: [
        lambda p, x: (loss(p, x), fz.Aux(weight=len(x) if rank else None)),
        loss,
    ],
}


@pytest.mark.parametrize(("name", "donate"), crossed([*REPORTS], [False, True]))
def test_words_that_wait_are_compared(name: str, donate: bool) -> None:
    """Ranks that report other things in a step that isn't looked at raise, and their states are
    good."""

    def run(group: Any) -> None:
        losses = REPORTS[name]
        steps = iter(range(UNLOOKED + 1))

        def program(value: Any, x: Tensor) -> Any:
            params, state = value
            # Afterwards, and before, all ranks do the same
            at = next(steps, None)
            for each in losses(group.rank if at == UNLOOKED else 0):
                _, grads = fz.value_and_grad(each)(params, x)
            return adam.apply(grads, state, params), {}

        step = fz.program_step(program, init=lambda params: (params, adam.init(params)))
        sharded = fz.shard(step, level=3, group=group, donate=donate)
        state = sharded.init(FIRST)
        for _ in range(UNLOOKED):
            state, _ = sharded(state, X)
        before = tree_map(torch.clone, sharded.unshard(state))
        with pytest.raises(GroupError, match=r"have not started the same collectives.*Remedy"):
            sharded(state, X)
        assert_equal_values(before, sharded.unshard(state))
        sharded(state, X)

    run_ranks(run, 2)


def test_unequal_batches_are_told_later() -> None:
    def run(group: Any) -> None:
        def program(params: Any, x: Tensor) -> Any:
            first, _ = fz.value_and_grad(loss)(params, x)
            second, _ = fz.value_and_grad(loss)(params, x[:2])
            return params, {"first": first, "second": second}

        sharded = fz.shard(fz.program_step(program, init=lambda p: p), level=1, group=group)
        state = sharded.init(FIRST)
        for _ in range(UNLOOKED):
            state, _ = sharded(state, X)
        sharded(state, X[: 4 - group.rank])

    # 4 and 2 rows on rank 0, 3 and 2 on rank 1
    with pytest.warns(UnequalBatchesWarning, match="3 rows on rank 0, from 2.5 to 3 on all ranks"):
        run_ranks(run, 2)


def at_another_step() -> str:
    """What a rank is told that is a step behind the others, or before them."""
    loss_fn = lambda params, buffers, x: loss(params, x)
    step = fz.shard(fz.train_step(loss_fn, adam), level=3, group=ProcessGroup(), donate=False)
    states = [step.init(FIRST)]
    for _ in range(4):
        states.append(step(states[-1], X)[0])
    with pytest.raises(GroupError) as caught:
        step(states[4 - step.group.rank], X)
    return str(caught.value)


def test_ranks_at_other_steps_are_told() -> None:
    """Whether a call is looked at doesn't follow from the state: over gloo the messages of a rank
    that looks would meet another's gather."""
    found = launch(at_another_step, 2, start_method="fork", timeout=100)
    assert all("different steps: [4, 3]" in text for text in found), found
