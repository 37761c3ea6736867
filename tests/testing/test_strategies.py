"""Hypothesis strategies: they draw hostile cases."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from typing import Any

import optree
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from functorch_zero import optim
from functorch_zero.testing import (
    assert_equal_updates,
    assert_sharded_equals_unsharded,
    strategies,
)
from tests.tiers import THOROUGH, drawn

# Strategies


@drawn(strategies.trees())
def test_trees_are_trees_of_tensors(tree: Any) -> None:
    leaves = optree.tree_leaves(tree)
    assert all(isinstance(leaf, Tensor) and leaf.dim() <= 4 for leaf in leaves)
    assert any(leaf.requires_grad and leaf.numel() for leaf in leaves)


def examples(strategy: Any) -> list[Any]:
    """Two hundred of a strategy's."""
    found = []

    @settings(max_examples=200)
    @given(strategy)
    def look(example: Any) -> None:
        found.append(example)

    look()
    return found


@THOROUGH
def test_trees_are_hostile() -> None:
    trees = examples(strategies.trees())
    assert any(None in optree.tree_leaves(tree, none_is_leaf=True) for tree in trees)
    leaves = [optree.tree_leaves(tree) for tree in trees]
    for dim in range(5):
        assert any(x.dim() == dim for some in leaves for x in some), f"no leaf of {dim} dims"
    assert any(x.numel() == 0 for some in leaves for x in some)
    assert any(not x.requires_grad for some in leaves for x in some)
    assert any(len({x.dtype for x in some}) > 1 for some in leaves)


def test_every_kind_of_model_is_drawn() -> None:
    drawn_names = {case.name for case in examples(strategies.modules())}
    for name in ("mlp", "frozen_mlp", "gpt", "convnet", "shared", "unused", "scalars", "mixed"):
        assert any(drawn_name.startswith(name) for drawn_name in drawn_names), name


@drawn(st.data())
def test_used_leaves_have_gradients(data: st.DataObject) -> None:
    case = data.draw(strategies.modules())
    step, params, buffers = case.step(optim.sgd(0.1))
    state = step.init(params, buffers)
    expected = step(state, data.draw(strategies.batches(case, 2))[0])[0].params
    assert_equal_updates(state.params, expected, expected, unused=case.unused)


@drawn(st.data())
def test_drawn_steps_are_equal_on_ranks(data: st.DataObject) -> None:
    case, ranks = data.draw(strategies.modules()), data.draw(strategies.world_sizes())
    # AdamW's own eps of 1e-8 makes round-off of gradients of that size visible in the update
    adamw = partial(optim.adamw, strategies.LEARNING_RATE, eps=1e-4)
    optimizer = data.draw(
        st.just(strategies.NamedOptimizer("adamw", adamw))
        | strategies.optimizers(["sgd, momentum", "clip + lamb", "adafactor"])
    )
    level, weighted = data.draw(st.integers(0, 3)), data.draw(st.booleans())
    drawn = data.draw(strategies.batches(case, ranks, weighted=weighted, max_steps=2))
    step, params, buffers = case.step(optimizer.make(), weighted=weighted)
    options = {
        "levels": (level,),
        "ranks": (ranks,),
        "per_rank": case.per_rank,
        "unused": case.unused,
    }
    assert_sharded_equals_unsharded(step, params, buffers, drawn, **options)  # type: ignore[arg-type]


# The package


@THOROUGH
def test_hypothesis_is_imported_only_for_strategies() -> None:
    code = (
        "import sys; sys.modules['hypothesis'] = None\n"
        "from functorch_zero import testing\n"
        "try: testing.strategies\n"
        "except ImportError as error: assert 'pip install' in str(error), error\n"
        "else: raise AssertionError"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
