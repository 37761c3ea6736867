"""Checkpoints that an earlier version saved load bit for bit, and training goes on from them.

The files, and how they came to be: tests/fixtures/write_checkpoints.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

import functorch_zero as fz
from functorch_zero.testing import assert_equal_updates, assert_equal_values
from tests.fixtures.write_checkpoints import (
    FIXTURES,
    HERE,
    SEED,
    Fixture,
    Layout,
    checkpoint_paths,
    manifest_of,
    on_ranks,
    state_paths,
    whole_of,
    write,
)
from tests.tiers import thinned

ALONE = Layout(None)
OTHERS = {  # beside the layout that wrote it
    "level3_adamw_ema": [Layout(1, 3), Layout(2, 4, shard_size=2), ALONE],
    "hybrid_shampoo": [Layout(1, 3), Layout(3, 2), ALONE],
    "unsharded": [Layout(1, 3), Layout(3, 2)],
    "half_loss_scale": [Layout(1, 3), Layout(3, 4), ALONE],
    "crc32_lion": [Layout(3, 3), ALONE],
    "rows_soap": [Layout(3, 2), ALONE],
    "adapters_adamw": [Layout(1, 3), ALONE],
}
CASES = [(name, layout) for name in FIXTURES for layout in (FIXTURES[name].layout, *OTHERS[name])]
REGENERATE = (
    "Field names of states are part of the checkpoint format: a path that goes or changes makes "
    "saved checkpoints unreadable. If lines were only added: PYTHONPATH=. python "
    "tests/fixtures/write_checkpoints.py paths tests/fixtures"
)


def root_of(name: str) -> Path:
    return HERE / "checkpoints" / name


def expected_of(name: str) -> dict[str, Tensor]:
    """Every leaf of the state that was saved, whole, read by the safetensors library."""
    return load_file(root_of(name) / "expected.safetensors")


def same_bits(a: Tensor, b: Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    first, second = (x.detach().contiguous().view(-1).view(torch.uint8) for x in (a, b))
    return torch.equal(first, second)


def load(name: str, step: Any, like: fz.State) -> fz.State:
    restored = fz.checkpoint.load(root_of(name), step, like=like)
    assert restored.user == {"batches": FIXTURES[name].steps}
    return restored.state


def copied(state: fz.State) -> fz.State:
    """A copy of a whole state: the next step may use the state up."""
    made: fz.State = optree.tree_map(
        lambda x: x.detach().clone().requires_grad_(x.requires_grad), state
    )
    return made


@pytest.mark.parametrize("name", FIXTURES)
def test_the_files_are_intact(name: str) -> None:
    fixture = FIXTURES[name]
    assert fz.checkpoint.verify(root_of(name)) == {fixture.steps: []}
    manifest = manifest_of(root_of(name))
    assert (manifest["version"], manifest["checksum"]) == fixture.form
    assert (manifest["level"], manifest["ranks"]) == (fixture.layout.level, fixture.layout.ranks)
    expected = expected_of(name)
    assert (int(expected["step"]), int(expected["seed"])) == (fixture.steps, SEED)
    leaves = [*manifest["leaves"], *manifest.get("left_out", ())]
    assert {path for path, *_ in leaves} == expected.keys()


@pytest.mark.parametrize("name", FIXTURES)
def test_what_was_saved_is_not_trivial(name: str) -> None:
    """Params differ from the first ones, and no float leaf of the state is all zeros."""
    first, expected = FIXTURES[name].build()[1], expected_of(name)
    for path, leaf in first.items():
        assert torch.equal(leaf, expected[f"params.{path}"]) is not leaf.requires_grad, path
    for path, leaf in expected.items():
        assert leaf.any() and torch.isfinite(leaf).all(), path


@pytest.mark.parametrize(("name", "layout"), thinned(CASES, 3, rows=True), ids=str)
def test_every_leaf_is_bit_for_bit_what_was_saved(name: str, layout: Layout) -> None:
    expected = expected_of(name)

    def load_and_gather(step: Any, like: fz.State, part_of: Any) -> fz.State:
        return whole_of(step, load(name, step, like))

    for state in on_ranks(FIXTURES[name], layout, load_and_gather):
        leaves = fz.named_leaves(state)
        assert leaves.keys() == expected.keys()
        wrong = [path for path, leaf in leaves.items() if not same_bits(leaf, expected[path])]
        assert not wrong


@pytest.mark.parametrize(
    ("name", "path", "order"),
    [
        ("unsharded", "params.body.conv.weight", (0, 2, 3, 1)),
        # As its owner told when it was saved
        ("rows_soap", "opt_state.0.head.linear.weight.owned.left.vectors", (0, 2, 1)),
    ],
)
def test_dims_lie_in_memory_as_they_did(name: str, path: str, order: tuple[int, ...]) -> None:
    def leaf_of(step: Any, like: fz.State, part_of: Any) -> Tensor:
        return fz.named_leaves(load(name, step, like))[path]

    (leaf,) = on_ranks(FIXTURES[name], ALONE, leaf_of)
    assert leaf.stride() == torch.empty_permuted(leaf.shape, order).stride()


@pytest.mark.parametrize(("name", "layout"), thinned(CASES, 12, rows=True), ids=str)
def test_training_goes_on(name: str, layout: Layout) -> None:
    """The next step is the unsharded one's, by the fixture's grade; and it is finite, and not
    zero."""
    fixture = FIXTURES[name]

    def one_more(step: Any, like: fz.State, part_of: Any) -> tuple[fz.State, fz.State]:
        state = load(name, step, like)
        before = copied(whole_of(step, state))
        state, metrics = step(state, part_of(fixture.batch(fixture.steps)))
        assert torch.isfinite(metrics["loss"])
        return before, whole_of(step, state)

    before, want = on_ranks(fixture, ALONE, one_more)[0]
    for _, got in on_ranks(fixture, layout, one_more):
        assert int(got.step) == fixture.steps + 1
        assert_equal_updates(before.params, want.params, got.params, grade=fixture.grade)
        assert_equal_values(want.opt_state, got.opt_state, grade=fixture.grade, what="opt_state")
        assert_equal_values(want.buffers, got.buffers, grade=fixture.grade, what="buffers")
        assert_equal_values(want.finite, got.finite, grade="bitwise", what="finite")


@pytest.mark.parametrize("name", thinned(FIXTURES, 5))
def test_it_is_saved_the_same_today(name: str, tmp_path: Path) -> None:
    """The same leaves under the same paths, by the same training: a checkpoint of today would load
    yesterday, which goes by paths and not by their order."""
    fixture: Fixture = FIXTURES[name]
    write(fixture, tmp_path)
    then, now = manifest_of(root_of(name)), manifest_of(tmp_path)
    assert sorted(now["leaves"]) == sorted(then["leaves"])
    assert now.get("left_out") == then.get("left_out")
    assert (now["values"], now["user"]) == (then["values"], then["user"])


def test_paths_in_checkpoints() -> None:
    compare("checkpoint_paths.txt", checkpoint_paths(HERE / "checkpoints"))


def test_paths_of_every_optimizers_state() -> None:
    compare("state_paths.txt", state_paths())


def compare(name: str, found: Iterable[str]) -> None:
    """Compare lines with those of a golden file."""
    assert list(found) == (HERE / name).read_text().splitlines(), REGENERATE


def test_a_wrong_expectation_is_noticed() -> None:
    """The comparison above can fail."""
    with safe_open(root_of("unsharded") / "expected.safetensors", "pt") as file:
        leaf = file.get_tensor("params.head.scale")
    assert same_bits(leaf, leaf.clone())
    assert (
        not same_bits(leaf, -leaf)
        and not same_bits(leaf, leaf.float())
        and not same_bits(leaf, leaf[:1])
    )
    with pytest.raises(AssertionError, match="part of the checkpoint format"):
        compare("checkpoint_paths.txt", ["# nothing"])
