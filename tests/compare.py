"""Train by the oracle and on ranks, and compare updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from functorch_zero.groups import run_ranks
from functorch_zero.groups.protocol import Group
from functorch_zero.sharded.api import shard
from functorch_zero.step.state import State, TrainValue
from functorch_zero.step.train import TrainStep
from functorch_zero.testing.runs import Start, run_in_parts
from functorch_zero.tree import named_leaves
from tests.models import Batch, split

REORDERED = 1e-12  # float64: the same mathematics, sums in another order


class Run(NamedTuple):
    """What training gave: the whole state before and after each step, and the metrics."""

    states: list[State]
    metrics: list[dict[str, Tensor]]


def train(step: TrainStep, params: Any, buffers: Any, batches: Sequence[Batch]) -> Run:
    """The oracle on whole batches."""
    states, metrics = [step.init(params, buffers)], []
    for batch in batches:
        state, seen = step(states[-1], batch)
        states.append(state)
        metrics.append(seen)
    return Run(states, metrics)


def train_by_rank(
    step: TrainStep, params: Any, buffers: Any, batches: Sequence[Batch], sizes: list[int]
) -> Run:
    """The oracle on each rank's part by itself, gradients, metrics and buffers averaged."""
    parts = [split(batch, sizes) for batch in batches]
    run, *_ = run_in_parts(step, Start((params, buffers), 0), parts)
    states = [step.init(params, buffers)]
    for done in run.steps:
        value = TrainValue(done.params, done.others["buffers"], done.others["opt_state"])
        states.append(State(done.others["counters"][0], value, None))
    return Run(states, [done.others["metrics"] for done in run.steps])


def train_sharded(
    group: Group,
    step: TrainStep,
    params: Any,
    buffers: Any,
    batches: Sequence[Batch],
    sizes: list[int],
    **options: Any,
) -> Run:
    """One rank's run, with the whole states gathered."""
    sharded = shard(step, group=group, **options)
    state = sharded.init(params, buffers)
    states, metrics = [sharded.unshard(state)], []
    for batch in batches:
        state, seen = sharded(state, split(batch, sizes)[group.rank])
        states.append(sharded.unshard(state))
        metrics.append(seen)
    return Run(states, metrics)


def assert_equal_on_ranks(
    make: Callable[[], tuple[TrainStep, Any, Any]],
    batches: Sequence[Batch],
    sizes: list[int],
    *,
    unused: Sequence[str] = (),
    tolerance: float | Callable[[str], float] = REORDERED,
    **options: Any,
) -> list[Run]:
    """Train by the oracle, and on a rank per part of a batch, each with a step of its own from
    `make`; compare. The ranks' runs."""
    expected = train(*make(), batches)
    runs = run_ranks(
        lambda group: train_sharded(group, *make(), batches, sizes, **options), len(sizes)
    )
    assert_same_on_all_ranks(runs)
    assert_equal_updates(expected, runs[0], unused=unused, tolerance=tolerance)
    return runs


def assert_same_on_all_ranks(runs: Sequence[Run]) -> None:
    """Every rank ends with the same whole state, bit for bit."""
    first = optree.tree_leaves(runs[0].states[-1])
    for run in runs[1:]:
        assert all(
            torch.equal(a, b)
            for a, b in zip(first, optree.tree_leaves(run.states[-1]), strict=True)
        )


def assert_equal_updates(
    expected: Run,
    got: Run,
    *,
    unused: Sequence[str] = (),
    tolerance: float | Callable[[str], float] = REORDERED,
) -> None:
    """Compare new - old of every leaf after every step, which must not be zero where a leaf is
    trained."""
    assert len(expected.states) == len(got.states)
    start = expected.states[0]
    trained = {path for path, leaf in named_leaves(start.params).items() if leaf.requires_grad}
    assert trained
    for number, (want, have) in enumerate(zip(expected.states[1:], got.states[1:], strict=True), 1):
        assert int(want.step) == int(have.step) == number
        updates, theirs = (
            _updates(start.params, want.params),
            _updates(got.states[0].params, have.params),
        )
        for path in updates:
            if path in trained and path not in unused:
                assert updates[path].any(), (
                    f"the oracle's update of {path} is zero after step {number}"
                )
            if path not in trained:
                assert not updates[path].any() and not theirs[path].any(), path
        assert named_leaves(have.params).keys() == updates.keys()
        assert_close(
            updates, theirs, tolerance, f"updates after step {number}", held=_tensors(want.params)
        )
        for what, a, b in (
            ("buffers", want.buffers, have.buffers),
            ("opt_state", want.opt_state, have.opt_state),
        ):
            assert_close(_tensors(a), _tensors(b), tolerance, f"{what} after step {number}")
    for number, (a, b) in enumerate(zip(expected.metrics, got.metrics, strict=True), 1):
        assert_close(a, b, tolerance, f"metrics of step {number}")


def assert_close(
    expected: dict[str, Tensor],
    got: dict[str, Tensor],
    tolerance: float | Callable[[str], float],
    what: str,
    held: dict[str, Tensor] | None = None,
) -> None:
    """Each leaf's largest difference is at most `tolerance` of its largest element.

    Differences of what is `held` carry its rounding besides, half a last bit of each of the two.
    """
    assert list(expected) == list(got), what
    for path, want in expected.items():
        have = got[path]
        assert want.shape == have.shape and want.dtype == have.dtype, (
            f"{path} in {what}: {want} and {have}"
        )
        if want.numel():
            allowed = (tolerance(path) if callable(tolerance) else tolerance) * float(
                want.double().abs().max()
            )
            if held is not None and want.is_floating_point():
                allowed += torch.finfo(want.dtype).eps * float(held[path].double().abs().max())
            worst = float((want.double() - have.double()).abs().max())
            assert worst <= allowed, (
                f"{path} differs by {worst:.3g} in {what}, allowed {allowed:.3g}"
            )


def _updates(old: Any, new: Any) -> dict[str, Tensor]:
    before, after = named_leaves(old), named_leaves(new)
    return {path: after[path].detach() - leaf.detach() for path, leaf in before.items()}


def _tensors(tree: Any) -> dict[str, Tensor]:
    return {
        path: leaf.detach() for path, leaf in named_leaves(tree).items() if isinstance(leaf, Tensor)
    }
