"""The host's memory as a place, beside a GPU that is played: its copies are late, so that one which
nobody has waited for gives wrong numbers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from optree import tree_map
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import checkpoint, optim
from functorch_zero.groups import run_ranks
from functorch_zero.groups.single import SingleRank
from functorch_zero.places import Host
from functorch_zero.testing import Equality, assert_equal_values
from tests.local import local_leaves
from tests.modules import Unit
from tests.places import PlayedStream, layer, played_host
from tests.sharded.test_placed import OPTIMIZERS, attention
from tests.sharded.test_seams import linear_loss, make_batches, make_params, train
from tests.tiers import crossed, thinned, tiers

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


@pytest.mark.parametrize("donate", thinned([True, False]))
@pytest.mark.parametrize("level", tiers([3], [0]))
@pytest.mark.parametrize("name", thinned([*ALL], len(ALL)))
def test_states_of_every_kind(name: str, level: int, donate: bool) -> None:
    step = fz.train_step(linear_loss, ALL[name](), metrics=["grad_norm", "update_norm"])

    def run(group: Any) -> None:
        states = []
        for place in (None, played_host()[0]):
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


def layers(optimizer: Any, **options: Any) -> tuple[Any, Any]:
    """A step, and its state, of several units."""
    sharded, params = step_of_layers(optimizer, **options)
    return sharded, sharded.init(params)


def step_of_layers(optimizer: Any, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer(WIDTH) for _ in range(NUM_UNITS)))
    apply, params, _ = fz.functionalize(model, units=Unit)
    step = fz.train_step(lambda p, b, x: apply(p, {}, x)[0].square().mean(), optimizer)
    return fz.shard(step, level=3, group=SingleRank(), **options), params


OPTIMIZERS_HERE = {
    "fused": optim.adamw(0.1),
    "unfused": optim.chain(optim.scale_by_adam(), optim.scale_by_learning_rate(0.1)),
    "clipped": optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(0.1)),
    "muon": optim.muon(0.1),
    "adafactor": optim.adafactor(0.1),
}


@pytest.mark.parametrize(
    ("name", "donate"), crossed(["fused", "unfused", "clipped", "muon"], [True, False], quick=1)
)
def test_a_few_buckets_are_here_at_a_time(name: str, donate: bool) -> None:
    """1 + ahead, of NUM_UNITS."""
    optimizer = OPTIMIZERS_HERE[name]
    for ahead in (0, 1, 2):
        place, stream = played_host(ahead)
        step, state = layers(optimizer, place={"state": place}, donate=donate)
        largest = max(unit_bytes(state))
        state, _ = step(state, torch.ones(2, WIDTH))
        stream.most_here = 0
        for _ in range(5):
            state, _ = step(state, torch.ones(2, WIDTH))
        assert 0 < stream.most_here <= (1 + ahead) * largest


@pytest.mark.parametrize(("name", "donate"), crossed(["fused", "adafactor"], [True, False]))
@pytest.mark.parametrize("ahead", tiers([2], [0]))
def test_a_plan_counts_what_is_here(name: str, donate: bool, ahead: int) -> None:
    optimizer = OPTIMIZERS_HERE[name]
    x = torch.ones(2, WIDTH)
    place, stream = played_host(ahead)
    step, params = step_of_layers(optimizer, place={"state": place}, donate=donate)
    state, _ = step(step.init(params), x)
    stream.most_here = 0
    step(state, x)
    for batch in (x, None):
        samples = fz.plan(params, step, batch=batch).samples
        counts = samples[0].state  # single numbers, which stay
        assert max(sample.state for sample in samples) - counts == stream.most_here > 0


def unit_bytes(state: Any) -> list[int]:
    """By unit, the bytes of two moments."""
    return [2 * flat.nbytes for flat in state.params.flats()]


READS: dict[str, Callable[[Any], Any]] = {
    "opt_state": lambda state: state.opt_state[0].mu,
    "tree_map": lambda state: tree_map(torch.clone, state).value.opt_state[0].mu,
    "deepcopy": lambda state: copy.deepcopy(state).value.opt_state[0].mu,
    "pickle": lambda state: pickle.loads(pickle.dumps(state)).value.opt_state[0].mu,
}


@pytest.mark.parametrize("how", thinned([*READS], 2))
def test_a_state_is_read_once_it_has_left(how: str) -> None:
    plain, state = layers(optim.adamw(0.1))
    state, _ = plain(state, torch.ones(2, WIDTH))
    expected = state.opt_state[0].mu
    place, stream = played_host()
    step, state = layers(optim.adamw(0.1), place={"state": place})
    state, _ = step(state, torch.ones(2, WIDTH))
    before = stream.host_waits
    assert_equal_values(local_leaves(expected), local_leaves(READS[how](state)), grade=EXACT)
    assert stream.host_waits > before


def test_a_save_has_the_values_of_its_call(tmp_path: Path) -> None:
    """While later steps write to the same memory."""
    place, stream = played_host()
    step, state = layers(optim.adamw(0.1), place={"state": place})
    x = torch.ones(2, WIDTH)
    state, _ = step(state, x)
    expected, before = step.unshard(state), stream.host_waits
    saving = checkpoint.async_save(tmp_path / "saved", step, state)
    assert stream.host_waits > before
    for _ in range(2):
        state, _ = step(state, x)
    saving.result()
    _, like = layers(optim.adamw(0.1), place={"state": place})
    loaded = checkpoint.load(tmp_path / "saved", step, like=like).state
    assert_equal_values(expected, step.unshard(loaded), grade=EXACT)
    after, _ = step(loaded, x)
    again, _ = step(step.shard(expected), x)
    assert_equal_values(step.unshard(again), step.unshard(after), grade=EXACT)


def test_copies_are_moved_into_pinned_memory() -> None:
    place, _ = played_host()
    step, state = layers(optim.adamw(0.1), place={"state": place})
    copied = tree_map(torch.clone, state)
    assert not any(map(place.holds, moments(copied)))
    state, _ = step(copied, torch.ones(2, WIDTH))
    assert all(map(place.holds, moments(state)))


def moments(state: Any) -> list[Tensor]:
    return [x for x in local_leaves(state.value.opt_state) if x.dim()]


def test_a_missing_wait_gives_wrong_numbers() -> None:
    """So the played stream can fail a test."""

    class Hasty(PlayedStream):
        def hold_caller(self, event: int) -> None:
            pass

    place, stream = Host(), Hasty()
    place._streams[stream.device] = stream  # type: ignore[assignment]
    x = place.empty(torch.ones(3))
    place.leave(torch.ones(3), x).wait()
    assert x.isnan().all()
    with pytest.raises(AssertionError, match="given away"):
        PlayedStream.hold_caller(stream, stream.end())


def test_wrong_hosts_are_refused() -> None:
    for wrong in (-1, 1.5, True):
        with pytest.raises(ValueError, match=r"ahead must be a number of buckets"):
            Host(ahead=wrong)  # type: ignore[arg-type]
    place, _ = played_host()
    for kind in ("params", "gradients"):
        with pytest.raises(NotImplementedError, match=rf"{kind}.*brings copies.*Remedy"):
            layers(optim.adamw(0.1), place={kind: place})


def test_on_a_cpu_it_is_plain_memory() -> None:
    everything = dict.fromkeys(("state", "params", "gradients", "saved"), Host())
    states = []
    for place in (None, everything):
        step, state = layers(optim.adamw(0.1), place=place)
        for _ in range(3):
            state, _ = step(state, torch.ones(2, WIDTH))
        states.append(step.unshard(state))
    assert_equal_values(*states, grade=EXACT)


@pytest.mark.parametrize("level", tiers([3], [0, 1]))
@pytest.mark.parametrize("ahead", thinned([1, 0, 2]))
def test_saved_tensors(ahead: int, level: int) -> None:
    torch.manual_seed(0)
    apply, params, _ = fz.functionalize(nn.Sequential(attention(), attention()), units=Unit)
    step = fz.train_step(lambda p, b, x: apply(p, b, x)[0].square().mean(), optim.adamw(0.1))
    batches = [torch.randn(4, 48, 32) for _ in range(3)]

    def run(group: Any) -> None:
        wholes = []
        for place in (None, played_host(ahead)[0]):
            options: dict[str, Any] = {"level": level, "group": group, "place": {"saved": place}}
            sharded = fz.shard(step, **options)
            state = sharded.init(params, {})
            stream: Any = None if place is None else place._stream
            waits = stream and stream.host_waits
            for x in batches:
                if stream is not None:
                    stream.most_here = 0
                state, _ = sharded(state, x.chunk(2)[group.rank])
            wholes.append(sharded.unshard(state))
        assert stream.host_waits == waits and stream.calls["left"] >= 3 * 2 * 6
        assert stream.calls["brought"] == stream.calls["left"], "one came twice"
        # An operator asks for two or three, and may keep one while it asks for the next
        assert stream.most_here <= (3 + ahead) * LARGEST
        assert_equal_values(*wholes, grade=EXACT)

    run_ranks(run, 2)


LARGEST = 2 * 48 * 96 * 4  # bytes of what `attention` saves: all of a projection
