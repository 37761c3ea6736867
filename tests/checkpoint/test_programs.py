"""Checkpoints of programs: values that hold trees in pieces, such as a momentum of the program's
own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from optree import tree_map
from safetensors.torch import load_file
from torch import Tensor

import functorch_zero as fz
from functorch_zero import checkpoint
from functorch_zero.checkpoint.dcp import list_entries
from functorch_zero.groups import HybridGroup, run_ranks
from functorch_zero.step.state import State
from functorch_zero.testing import assert_equal_values
from tests.checkpoints import assert_same
from tests.programs.cases import CASES
from tests.tiers import crossed, tiers


class Value(NamedTuple):
    params: Any
    momentum: Any  # in pieces


def loss(params: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ params["w"].T + params.get("b", 0.0)).square().mean()


def program(value: Value, x: Tensor) -> Any:
    found, grads = fz.value_and_grad(loss)(value.params, x)
    momentum = tree_map(lambda m, g: 0.9 * m + g, value.momentum, grads)
    updates = tree_map(lambda m: -0.1 * m, momentum)
    return Value(fz.apply_updates(value.params, updates), momentum), {"loss": found}


STEP = fz.program_step(program, init=lambda params: Value(params, fz.zero_updates(params)))
ROWS = 12


def make_params(kind: str) -> dict[str, Tensor]:
    """Params whose pieces have equal shapes on 2 ranks ("even"), or other ones."""
    made = torch.Generator().manual_seed(3)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made, dtype=torch.float64)

    if kind == "even":
        return {"w": leaf(8, 4).requires_grad_()}
    return {
        "w": leaf(7, 4).requires_grad_(),
        "b": leaf(7).requires_grad_(kind != "frozen"),
    }


def batches() -> list[Tensor]:
    made = torch.Generator().manual_seed(5)
    return [torch.randn(ROWS, 4, generator=made, dtype=torch.float64) for _ in range(3)]


def expected_of(params: Any) -> list[State]:
    """The whole states after each step."""
    states = [STEP.init(params)]
    for x in batches():
        states.append(STEP(states[-1], x)[0])
    return states


def train(step: Any, state: Any, steps: slice) -> Any:
    """The state after those of the three steps, on this rank."""
    for x in batches()[steps]:
        state, _ = step(state, x.chunk(step.group.size)[step.group.rank])
    return state


def save_on(root: Path, ranks: int, params: Any, **options: Any) -> State:
    """Take two steps and save; the whole state."""

    def run(group: Any) -> State:
        step = fz.shard(STEP, group=group, **options)
        state = train(step, step.init(params), slice(0, 2))
        checkpoint.save(root, step, state)
        return step.unshard(state)

    return run_ranks(run, ranks)[0]


def load_on(root: Path, ranks: int, params: Any, **options: Any) -> tuple[State, State]:
    """The whole state that was loaded, and the one after another step."""

    def run(group: Any) -> tuple[State, State]:
        step = fz.shard(STEP, group=group, **options)
        state = checkpoint.load(root, step, like=step.init(params, seed=8)).state
        loaded = step.unshard(state)
        return loaded, step.unshard(train(step, state, slice(2, 3)))

    return run_ranks(run, ranks)[0]


def check_goes_on(expected: list[State], saved: State, found: tuple[State, State]) -> None:
    """What was loaded is what was saved, and the next step moves params as it would have."""
    loaded, after = found
    assert_same(saved, loaded)
    want, got = (
        tree_map(torch.sub, now.value, before.value)
        for now, before in ((expected[3], expected[2]), (after, loaded))
    )
    assert torch.count_nonzero(want.params["w"])
    assert_equal_values(want, got)


@pytest.mark.parametrize(
    ("kind", "ranks", "level"),
    crossed(["even", "uneven", "frozen"], [2, 3, 1], [1, 2, 3, 0], quick=1),
)
def test_a_tree_in_pieces_loads_anywhere(tmp_path: Path, kind: str, ranks: int, level: int) -> None:
    """At other levels, on other numbers of ranks and in one process, there and back."""
    params = make_params(kind)
    expected = expected_of(params)
    saved = save_on(tmp_path, ranks, params, level=level)
    assert_equal_values(expected[2].value, saved.value)
    for to_ranks in (1, 2, 3):
        for to_level in {level, (level + to_ranks) % 4}:
            found = load_on(tmp_path, to_ranks, params, level=to_level, donate=to_ranks == 2)
            check_goes_on(expected, saved, found)
    whole = checkpoint.load(tmp_path, STEP, like=STEP.init(params, seed=8)).state
    check_goes_on(expected, saved, (whole, STEP(whole, batches()[2])[0]))

    checkpoint.save(tmp_path / "whole", STEP, expected[2])
    found = load_on(tmp_path / "whole", ranks, params, level=level)
    check_goes_on(expected, expected[2], found)


@pytest.mark.parametrize(
    ("kind", "axes", "level"), crossed(["even", "frozen"], ["shard", "both"], [1, 3, 0, 2], quick=1)
)
def test_on_a_mesh(tmp_path: Path, kind: str, axes: Any, level: int) -> None:
    """Replicas of shards, with gradients cut over one axis or both, and from there to one axis."""
    params = make_params(kind)
    expected = expected_of(params)

    def run(group: Any) -> Any:
        mesh = HybridGroup(group, shard_size=2)
        step = sharded_over(mesh, level, axes)
        state = train(step, step.init(params), slice(0, 2))
        checkpoint.save(tmp_path, step, state)
        found = []
        for other in ("shard", "both"):
            to = sharded_over(mesh, level, other)
            loaded = checkpoint.load(tmp_path, to, like=to.init(params, seed=8)).state
            found.append((to.unshard(loaded), to.unshard(train(to, loaded, slice(2, 3)))))
        return step.unshard(state), found

    for saved, found in run_ranks(run, 4):
        for each in found:
            check_goes_on(expected, saved, each)
        check_goes_on(expected, saved, load_on(tmp_path, 2, params, level=3 - level))


def sharded_over(mesh: HybridGroup, level: int, axes: Any) -> Any:
    # At level 0 there is nothing to cut
    return fz.shard(STEP, level=level, group=mesh, state_axes=axes if level else "shard")


def test_saved_beside_training(tmp_path: Path) -> None:
    """A donating step goes on while its state is saved."""
    params = make_params("frozen")
    expected = expected_of(params)

    def run(group: Any) -> State:
        step = fz.shard(STEP, level=1, group=group, donate=True)
        state = train(step, step.init(params), slice(0, 2))
        saved = step.unshard(state)
        checkpoint.async_save(tmp_path, step, state)
        train(step, state, slice(2, 3))
        checkpoint.wait_for_saves(step)
        return saved

    saved = run_ranks(run, 2)[0]
    assert checkpoint.verify(tmp_path) == {2: []}
    check_goes_on(expected, saved, load_on(tmp_path, 3, params, level=2))


def test_a_momentum_is_exported_whole(tmp_path: Path) -> None:
    params = make_params("even")
    want = save_on(tmp_path, 2, params, level=1).value.momentum
    checkpoint.export_weights(tmp_path, tmp_path / "out", trees=["momentum"])
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == {"w"} and torch.equal(found["w"], want["w"])
    checkpoint.export_dcp(tmp_path, tmp_path / "dcp", trees=["momentum"])
    assert list_entries(tmp_path / "dcp")["w"].shape == (8, 4)


def test_a_tree_of_no_updates(tmp_path: Path) -> None:
    """Of a tree that is read only, pieces are None throughout."""
    params = make_params("uneven")

    def init(params: Any) -> Any:
        average = tree_map(torch.clone, params)
        return Value(params, fz.zero_updates(average))

    step = fz.program_step(lambda value, x: (value, {}), init=init)

    def run(group: Any) -> Any:
        sharded = fz.shard(step, level=1, group=group)
        state = sharded.init(params)
        checkpoint.save(tmp_path, sharded, state)
        loaded = checkpoint.load(tmp_path, sharded, like=sharded.init(params)).state
        return sharded.unshard(loaded).value.momentum

    for momentum in run_ranks(run, 2):
        assert momentum == {"b": None, "w": None}


@pytest.mark.parametrize(
    ("name", "ranks", "level"), crossed(["gan", "adahessian"], [3, 2], [1, 2, 0, 3], n=4, quick=1)
)
def test_cases(tmp_path: Path, name: str, ranks: int, level: int) -> None:
    """Two trees, also in pieces: saved after two steps, the third moves params as without a
    stop, on other ranks and in one process."""
    case = CASES[name]()
    steps = case.batches()

    def on(group: Any, level: int) -> Any:
        step = fz.shard(case.step, level=level, group=group)
        parts = [tree_map(lambda x: x.chunk(group.size)[group.rank], batch) for batch in steps]
        return step, parts

    def save(group: Any) -> None:
        step, parts = on(group, level)
        state = step.init(*case.trees())
        for part in parts[:2]:
            state, _ = step(state, part)
        checkpoint.save(tmp_path, step, state)

    def go_on(group: Any) -> Any:
        step, parts = on(group, 3 - level)
        state = checkpoint.load(tmp_path, step, like=step.init(*case.trees())).state
        before = step.unshard(state)
        return before, step.unshard(step(state, parts[2])[0])

    expected = [case.step.init(*case.trees())]
    for batch in steps:
        expected.append(case.step(expected[-1], batch)[0])
    run_ranks(save, ranks)
    alone = checkpoint.load(tmp_path, case.step, like=case.step.init(*case.trees())).state
    alone_after = case.step(alone, steps[2])[0]
    for before, after in [*run_ranks(go_on, 5 - ranks), (alone, alone_after)]:
        assert_equal_values(expected[2].value, before.value)
        want, got = (
            tree_map(torch.sub, now.value, then.value)
            for now, then in ((expected[3], expected[2]), (after, before))
        )
        assert_equal_values(want, got)


@pytest.mark.parametrize("level", tiers([3], [0, 1]))
def test_trees_that_begin_as_one(tmp_path: Path, level: int) -> None:
    """A program's init may return a tree twice. Where one is trained, the other keeps its values,
    though both lie in one storage in the state that is loaded into."""

    def train_first(value: Any, x: Tensor) -> Any:
        found, grads = fz.value_and_grad(loss)(value[0], x)
        updates = tree_map(lambda g: -0.1 * g, grads)
        return (fz.apply_updates(value[0], updates), value[1]), {"loss": found}

    params = make_params("uneven")
    base = fz.program_step(train_first, init=lambda params: (params, params))

    def run(group: Any) -> Any:
        step = fz.shard(base, level=level, group=group)
        state = train(step, step.init(params), slice(0, 2))
        checkpoint.save(tmp_path, step, state)
        loaded = checkpoint.load(tmp_path, step, like=step.init(params)).state
        return step.unshard(state), step.unshard(loaded)

    for saved, loaded in run_ranks(run, 2):
        first, second = saved.value
        assert not torch.equal(first["w"], second["w"])
        assert_same(saved, loaded)


def test_leaves_that_overlap(tmp_path: Path) -> None:
    """Views of one tensor in the state that is loaded into get elements of their own."""

    def views(params: Any) -> Any:
        flat = torch.zeros(8, dtype=torch.float64)
        return params, [flat[:4], flat[2:6], flat[4:], flat[1:3], flat[8:]]

    def count(value: Any, x: Tensor) -> Any:
        made = [torch.full_like(leaf, n + 1.0) for n, leaf in enumerate(value[1])]
        return (value[0], made), {}

    step = fz.program_step(count, init=views)
    params = make_params("even")
    state, _ = step(step.init(params), batches()[0])
    checkpoint.save(tmp_path, step, state)
    assert_same(state, checkpoint.load(tmp_path, step, like=step.init(params)).state)
