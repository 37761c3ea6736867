"""Schedules: their values, that they stand wherever a number can, and reduce_on_plateau. (parity/
has optax's.)"""

from __future__ import annotations

import itertools
import math
from typing import Any

import optree
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from functorch_zero import optim
from functorch_zero.optim.local import Local
from functorch_zero.optim.naming import described
from tests.parity.cases import assert_close, gradients, hostile_tree, run, stacked


@pytest.mark.parametrize(
    ("shape", "middle"), [("linear", 0.5), ("cosine", 0.5), ("sqrt", 1 - math.sqrt(0.5))]
)
def test_warmup_stable_decay(shape: str, middle: float) -> None:
    schedule = optim.warmup_stable_decay_schedule(0.0, 1.0, 4, 6, 10, end_value=0.2, shape=shape)
    values = [schedule(torch.tensor(count)).item() for count in range(25)]
    assert values[:5] == pytest.approx([0, 0.25, 0.5, 0.75, 1])
    assert values[4:11] == [1.0] * 7
    assert values[15] == pytest.approx(0.2 + 0.8 * middle)
    assert values[20:] == pytest.approx([0.2] * 5)
    assert all(a >= b for a, b in itertools.pairwise(values[10:]))


def test_a_schedule_stands_for_a_number() -> None:
    """Learning rate, decay, and AdEMAMix's b3 and alpha; a schedule of one value is that value."""
    params = hostile_tree()
    grads = gradients(params, 3)
    same = optim.constant_schedule
    pairs = [
        (optim.adamw(same(0.1), weight_decay=same(0.2)), optim.adamw(0.1, weight_decay=0.2)),
        (optim.sgd(same(0.1), 0.9, weight_decay=same(0.2)), optim.sgd(0.1, 0.9, weight_decay=0.2)),
        (
            optim.contrib.ademamix(0.1, b3=same(0.9), alpha=same(2.0)),
            optim.contrib.ademamix(0.1, b3=0.9, alpha=2.0),
        ),
        (optim.lookahead(optim.sgd(same(0.1)), 2, 0.5), optim.lookahead(optim.sgd(0.1), 2, 0.5)),
        (optim.params_ema(optim.sgd(0.1), same(0.9)), optim.params_ema(optim.sgd(0.1), 0.9)),
        (optim.lamb(same(0.1), weight_decay=same(0.2)), optim.lamb(0.1, weight_decay=0.2)),
    ]
    for scheduled, plain in pairs:
        assert_close(
            stacked(run(scheduled, params, grads)[0]), stacked(run(plain, params, grads)[0])
        )


def test_the_first_step_is_step_zero() -> None:
    params = {"a": torch.zeros(1, dtype=torch.float64)}
    one = {"a": torch.ones(1, dtype=torch.float64)}
    history, _, _ = run(optim.sgd(optim.linear_schedule(1.0, 0.0, 4)), params, [one] * 5)
    assert [-u["a"].item() for u in history] == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_a_schedule_of_torchs() -> None:
    """LambdaLR computes in Python's float64; with the count as it comes torch takes float32."""
    base = 0.3

    def decay(count: Any) -> Any:
        return 1 / (1 + 0.7 * count)

    optimizer = torch.optim.SGD([torch.zeros(1)], base)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
    expected = []
    for _ in range(9):
        expected += scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()

    def rates(schedule: Any) -> list[float]:
        params = {"a": torch.zeros(1, dtype=torch.float64)}
        one = {"a": torch.ones(1, dtype=torch.float64)}
        return [-u["a"].item() for u in run(optim.sgd(schedule), params, [one] * 9)[0]]

    doubles = rates(lambda count: base * decay(count.double()))
    assert doubles == pytest.approx(expected, rel=1e-15)
    singles = rates(lambda count: base * decay(count))
    assert singles == pytest.approx(expected, rel=1e-6)
    assert singles != pytest.approx(expected, rel=1e-9)
    table = torch.tensor([base * decay(count) for count in range(9)], dtype=torch.float64)
    assert rates(lambda count: table[count]) == table.tolist()


class NoHostReads(TorchDispatchMode):
    """Refuses to read a tensor's value on the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "host read"
        return func(*args, **(kwargs or {}))


def test_schedules_read_nothing_on_the_host() -> None:
    schedules = [
        optim.warmup_cosine_decay_schedule(0.0, 1.0, 3, 9),
        optim.warmup_stable_decay_schedule(0.0, 1.0, 3, 3, 3),
        optim.contrib.cosine_onecycle_schedule(9, 1.0),
        optim.exponential_decay(1.0, 3, 0.5),
    ]
    with NoHostReads():
        for schedule in schedules:
            schedule(torch.tensor(4))
        with pytest.raises(AssertionError, match="host read"):
            schedules[0](torch.tensor(4)).item()


def test_joined_schedules_count_from_their_beginning() -> None:
    schedule = optim.join_schedules(
        [lambda count: count + 100, lambda count: count, lambda count: -1.0], [2, 5]
    )
    assert [schedule(count).item() for count in range(7)] == [100, 101, 0, 1, 2, -1, -1]


def test_descriptions_tell_schedules_apart() -> None:
    a, b = (optim.sgd(optim.warmup_cosine_decay_schedule(0.0, peak, 3, 9)) for peak in (1.0, 2.0))
    assert described(a) != described(b)
    assert described(a) == described(optim.sgd(optim.warmup_cosine_decay_schedule(0.0, 1.0, 3, 9)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.exponential_decay(1.0, 0, 0.5), "transition_steps"),
        (lambda: optim.cosine_decay_schedule(1.0, 0), "decay_steps"),
        (lambda: optim.join_schedules([optim.constant_schedule(1.0)], [3]), "need 0 boundaries"),
        (lambda: optim.warmup_stable_decay_schedule(0.0, 1.0, 1, 1, 1, shape="cubic"), "'cubic'"),
        (lambda: optim.contrib.piecewise_interpolate_schedule("cubic", 1.0), "'cubic'"),
        (lambda: optim.reduce_on_plateau(factor=1.5), "factor 1.5"),
        (lambda: optim.observe((), 1.0), "got none"),
    ],
)
def test_mistakes(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


def test_plateau() -> None:
    """The learning rate halves after the second observation in a row that isn't better, anywhere in
    a state."""
    params = {"a": torch.zeros(1)}
    optimizer = optim.chain(
        optim.sgd(1.0), optim.chain(optim.reduce_on_plateau(factor=0.5, patience=2))
    )
    state = {"inside": optimizer.init(params, Local(params))}

    def rate() -> float:
        (updates, _) = optimizer.update(
            {"a": torch.ones(1)}, state["inside"], params, Local(params)
        )
        return -updates["a"].item()

    rates = []
    for value in (3.0, 2.0, torch.tensor(2.0), 2.0, 2.0, float("nan"), 1.0):
        before = [x.clone() for x in optree.tree_leaves(state)]
        old, state = state, optim.observe(state, value)
        assert all(torch.equal(a, b) for a, b in zip(before, optree.tree_leaves(old), strict=True))
        rates.append(rate())
    assert rates == [1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
