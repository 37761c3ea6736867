"""The host's memory as a place, beside a GPU that is played: its copies are late, so that one which
nobody has waited for gives wrong numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.groups import run_ranks
from functorch_zero.groups.single import SingleRank
from functorch_zero.testing import Equality, assert_equal_values
from tests.places import played_host
from tests.sharded.test_placed import OPTIMIZERS
from tests.sharded.test_seams import linear_loss, make_batches, make_params, train
from tests.tiers import thinned

EXACT = Equality("bitwise")
WIDTH, NUM_UNITS = 16, 6

ALL: dict[str, Callable[[], Any]] = {
    "adamw": lambda: optim.adamw(0.1),
    "multi_steps": lambda: optim.multi_steps(optim.adamw(0.1), 2),
    "partition": lambda: optim.partition(
        {"a": optim.adam(0.1), "b": optim.chain(optim.clip_by_global_norm(0.1), optim.lion(0.1))},
        lambda path, leaf: "a" if path == "w" else "b",
    ),
    "shampoo": lambda: optim.shampoo(0.1),
    **OPTIMIZERS,
}


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("level", [3, 0])
@pytest.mark.parametrize("name", thinned([*ALL]))
def test_states_of_every_kind(name: str, level: int, donate: bool) -> None:
    step = fz.train_step(linear_loss, ALL[name](), metrics=["grad_norm", "update_norm"])

    def run(group: Any) -> None:
        states = []
        for place in (None, played_host()[0], played_host(ahead=0)[0], played_host(ahead=3)[0]):
            options: dict[str, Any] = {"level": level, "group": group, "donate": donate}
            sharded = fz.shard(step, **options, place={"state": place})
            state = sharded.init(make_params())
            stream: Any = None if place is None else place._stream
            waits = 0 if stream is None else stream.host_waits
            first, kept = state, None if donate else sharded.unshard(state)
            state = train(sharded, state, make_batches(6), group)
            if stream is not None:
                assert stream.host_waits == waits, "a step waits for no copy on the host"
                assert stream.calls["brought"] and stream.calls["left"]
            if kept is not None:
                assert_equal_values(kept, sharded.unshard(first), grade=EXACT)
            states.append(sharded.unshard(state))
        for state in states[1:]:
            assert_equal_values(states[0], state, grade=EXACT)

    run_ranks(run, 2)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def layers(optimizer: Any, **options: Any) -> tuple[Any, Any]:
    """A step, and its state, of several units."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(NUM_UNITS)))
    apply, params, buffers = fz.functionalize(model, units=Layer)
    step = fz.train_step(lambda p, b, x: apply(p, b, x)[0].square().mean(), optimizer)
    sharded = fz.shard(step, level=3, group=SingleRank(), **options)
    return sharded, sharded.init(params, buffers)


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize(
    "optimizer",
    [
        optim.adamw(0.1),
        optim.chain(optim.scale_by_adam(), optim.scale_by_learning_rate(0.1)),
        optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(0.1)),
        optim.muon(0.1),
    ],
    ids=["fused", "unfused", "clipped", "muon"],
)
def test_a_few_buckets_are_here_at_a_time(optimizer: Any, donate: bool) -> None:
    """1 + ahead, of NUM_UNITS."""
    for ahead in (0, 1, 2):
        place, stream = played_host(ahead)
        step, state = layers(optimizer, place={"state": place}, donate=donate)
        largest = max(unit_bytes(state))
        state, _ = step(state, torch.ones(2, WIDTH))
        stream.most_here = 0
        for _ in range(5):
            state, _ = step(state, torch.ones(2, WIDTH))
        assert 0 < stream.most_here <= (1 + ahead) * largest


def unit_bytes(state: Any) -> list[int]:
    """By unit, the bytes of two moments."""
    return [2 * flat.nbytes for flat in state.params.flats()]
