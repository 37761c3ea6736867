"""Proofs of transforms, and wrong ones that they refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import optree
import pytest
import torch
from optree import tree_map
from torch import Tensor

from functorch_zero import optim
from functorch_zero.errors import TransformError
from functorch_zero.optim.base import (
    Transform,
    init_empty,
    pointwise,
    with_statistics,
    with_whole_leaves,
    with_whole_tree,
)
from functorch_zero.testing import (
    check_transform,
    strategies,
)
from tests.testing.test_testing import F64
from tests.tiers import tiers

# Transforms: the operators are in tests/optim/test_claims.py, here are the numbers


def by_leaf(fn: Any) -> Transform:
    return pointwise(init_empty, lambda updates, state, params: (tree_map(fn, updates), state))


def test_a_decision_by_local_size_is_refused() -> None:
    def eight_bit_if_large(u: Tensor) -> Tensor:
        return (u * 127).round() / 127 if u.numel() >= 5000 else u

    with pytest.raises(
        TransformError,
        match=r"by_leaf.*depends on how leaves are cut: the updates of leaf large\.weight",
    ):
        check_transform(by_leaf(eight_bit_if_large), seeds=(0,))


def test_a_decision_by_the_number_of_dims_is_refused() -> None:
    with pytest.raises(TransformError, match="how leaves are cut"):
        check_transform(by_leaf(lambda u: u * 2 if u.dim() > 1 else u), seeds=(0,))


def test_a_result_that_depends_on_the_offset_is_refused() -> None:
    with pytest.raises(TransformError, match="how leaves are cut"):
        check_transform(by_leaf(lambda u: u * torch.arange(u.numel()).view(u.shape)), seeds=(0,))


def test_a_random_number_per_position_in_a_whole_leaf_function_is_refused() -> None:
    g = torch.Generator()

    def noisy(update: Tensor, state: Any) -> Any:
        return update + torch.randn(update.shape, generator=g, dtype=update.dtype), state

    with pytest.raises(TransformError, match=r"noisy.*not a function.*leaf block"):
        check_transform(with_whole_leaves(lambda param: (), noisy), seeds=(0,))


@pytest.mark.parametrize(
    ("name", "fn", "story"),
    [
        ("a hidden mean", lambda u: u - u.mean(), "aten.mean"),
        ("a sort", lambda u: u.sort(-1).values, "aten.sort"),
        ("a norm", lambda u: u / u.norm(), "aten.linalg_vector_norm"),
        ("a cumulative sum", lambda u: u.cumsum(0), "aten.cumsum"),
        ("a matrix product", lambda u: u @ u, "aten.dot"),
        ("random numbers", lambda u: u + torch.rand(u.shape), "aten.rand"),
        ("a change in place", lambda u: u.mul_(2), "aten.mul_"),
        (
            "a host read",
            lambda u: u if u.numel() and float(u.reshape(-1)[0]) > 0 else -u,
            "_local_scalar_dense",
        ),
    ],
)
def test_mistagged_transforms_are_refused_by_their_operators(
    name: str, fn: Any, story: str
) -> None:
    with pytest.raises(TransformError, match=story.replace(".", r"\.")):
        check_transform(by_leaf(fn), seeds=(0,))


def test_a_statistics_transform_that_decides_by_local_size_is_refused() -> None:
    def update(updates: Any, state: Any, params: Any, across: Any) -> Any:
        return tree_map(
            lambda u, n: u / (n if u.numel() > 20000 else 1), updates, across.norm(updates)
        ), state

    with pytest.raises(
        TransformError, match=r"other updates on ranks than unsharded.*step 0, ranks 2"
    ):
        check_transform(with_statistics(init_empty, update), seeds=(0,))


def test_whole_leaf_functions_must_leave_their_inputs_alone() -> None:
    def update(update: Tensor, state: Tensor) -> Any:
        return update, state.add_(1)

    with pytest.raises(TransformError, match=r"changes its input state\..* in place"):
        check_transform(with_whole_leaves(lambda param: torch.zeros(()), update), seeds=(0,))


def test_whole_leaf_functions_must_be_functions() -> None:
    calls: list[int] = []

    def update(update: Tensor, state: Any) -> Any:
        calls.append(1)
        return update * len(calls), state

    with pytest.raises(TransformError, match="is not a function"):
        check_transform(with_whole_leaves(lambda param: (), update), seeds=(0,))


def test_batched_whole_leaf_functions_must_not_mix_the_batch() -> None:
    def update(batch: Tensor, state: Any) -> Any:
        return batch / batch.norm().clamp(min=1e-3), state

    with pytest.raises(TransformError, match="in a batch of two than alone"):
        check_transform(with_whole_leaves(lambda param: (), update, batched=True), seeds=(0,))


@pytest.mark.parametrize("shape", [(), (6,), (7, 5), (3, 11), (2, 3, 4), (4, 3, 2, 2)], ids=str)
def test_a_little_of_the_batch_is_too_much(shape: tuple[int, ...]) -> None:
    """Too little for the trial of `init`; on one rank the leaves of one shape are a batch."""

    def update(batch: Tensor, state: Any) -> Any:
        return batch + 1e-6 * (batch.shape[1:] == shape) * batch.mean(0), state

    story = r"other updates on ranks than unsharded.*step 0, ranks 1, rank 0"
    with pytest.raises(TransformError, match=story):
        check_transform(with_whole_leaves(lambda param: (), update, batched=True), seeds=(0,))


def test_whole_leaf_updates_must_keep_their_shape() -> None:
    with pytest.raises(TransformError, match="must make an update and a state of the shapes"):
        check_transform(
            with_whole_leaves(lambda param: (), lambda u, s: (u.reshape(-1), s)), seeds=(0,)
        )


def test_whole_trees_may_be_used_as_one_likes() -> None:
    def update(updates: Any, state: Any, params: Any) -> Any:
        total = torch.cat([u.reshape(-1) for u in optree.tree_leaves(updates)]).cumsum(0)[-1]
        return tree_map(lambda u: u + total, updates), state

    check_transform(with_whole_tree(lambda params: (), update), seeds=(0,), ranks=(3,))


def test_a_wrong_fused_kernel_is_refused() -> None:
    right = optim.adamw(0.01)
    if right.fused is None:
        pytest.skip("adamw has no fused kernel")
    check_transform(right, seeds=(0,), ranks=(2,))
    with pytest.raises(TransformError, match="fused kernel"):
        check_transform(replace(right, fused=optim.adamw(0.02).fused), seeds=(0,), ranks=(2,))


def test_transforms_of_one_tree_are_checked_on_it() -> None:
    tree = {"a": torch.zeros(3, 4, dtype=F64), "b": [torch.zeros(2, dtype=F64), None]}
    labelled = optim.scale_by_label({"a": 0.5, "b": 2.0}, {"a": "a", "b": ["b", None]})
    check_transform(labelled, params=tree, seeds=(0,))
    with pytest.raises(ValueError) as caught:
        check_transform(labelled, seeds=(0,))
    assert any("params=" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    "name", tiers(["muon"], ["clip + lamb", "adamw", "sgd, momentum", "lion", "adafactor", "lbfgs"])
)
def test_right_transforms_pass(name: str) -> None:
    check_transform(strategies.known_optimizers()[name].make(), seeds=(0,), steps=2, ranks=(3,))
