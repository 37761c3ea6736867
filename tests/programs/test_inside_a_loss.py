"""Functions of programs that a loss calls: what has no graph there is refused, on whole trees and
on sharded ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from optree import tree_map
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import StructureError
from functorch_zero.groups import run_ranks
from functorch_zero.testing import assert_equal_values
from tests.tiers import thinned

LEVELS = [0, 1, 2, 3]
FIRST = {"w": torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)}
sgd = optim.sgd(0.1)


def cubes(params: Any) -> Tensor:
    return (params["w"] ** 3).sum()


STEP = fz.train_step(lambda params, buffers, x: cubes(params), sgd)
FIRST_STATE = STEP.init(FIRST, {})


def slope(params: Any) -> Any:
    return fz.value_and_grad(cubes)(params)[1]


def trained(params: Any) -> Any:
    return STEP(FIRST_STATE, torch.ones(1))[0].params


def in_a_checkpoint(params: Any) -> Any:
    def added(w: Tensor) -> Tensor:
        return w + slope({"w": w})["w"]

    return {"w": checkpoint(added, params["w"], use_reentrant=False)}


BY_TORCH = r"inside of a loss whose own.*Remedy: take the inner gradient by torch.*func\.grad"
AFTERWARDS = r"inside of a loss whose own.*Remedy: call it after fz\.value_and_grad"
REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    # what the loss makes of whole leaves, and the error
    "value_and_grad": (slope, r"fz\.value_and_grad was called " + BY_TORCH),
    "hvp": (lambda p: fz.hvp(cubes)(p, p)[2], r"fz\.hvp was called " + BY_TORCH),
    "train_step": (trained, r"fz\.value_and_grad was called " + BY_TORCH),
    "vmap": (
        lambda p: {"w": torch.func.vmap(lambda w: slope({"w": w})["w"])(p["w"])},
        BY_TORCH,
    ),
    "checkpoint": (in_a_checkpoint, BY_TORCH),
    "apply_updates": (lambda p: fz.apply_updates(p, p), r"fz\.apply_updates was .*" + AFTERWARDS),
    "init": (lambda p: sgd.init(p) and p, "optimizer's init was called " + AFTERWARDS),
    "update": (lambda p: sgd.update(p, STATE, p)[0], "optimizer's update was .*" + AFTERWARDS),
    "apply": (lambda p: sgd.apply(p, STATE, p)[0], "optimizer's apply was called " + AFTERWARDS),
}
STATE = sgd.init(FIRST)


def with_part(part: Callable[[Any], Any]) -> Callable[[Any], Tensor]:
    """A loss with a part of its gradient in what a function makes of the leaves."""

    def loss(params: Any) -> Tensor:
        return cubes(params) + part(fz.unshard(params))["w"].sum()

    return loss


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("level", [None, *thinned(LEVELS)])
def test_what_has_no_graph_is_refused(name: str, level: int | None) -> None:
    part, story = REFUSED[name]

    def run(group: Any) -> None:
        tree = FIRST if level is None else fz.shard_tree(FIRST, level=level, group=group)
        with pytest.raises(StructureError, match=story) as caught:
            fz.value_and_grad(with_part(part))(tree)
        assert ("on rank" in str(caught.value)) == (level is not None)
        # In torch 2.11 a checkpoint's hooks stay as long as the traceback of its error
        del caught
        with pytest.raises(StructureError, match=story):
            fz.hvp(with_part(part))(tree, fz.zero_updates(tree))
        # No loss runs any more
        part_outside = fz.value_and_grad(cubes)(tree)[1]
        fz.apply_updates(tree, part_outside)

    run_ranks(run, 1 if level is None else 2)


@pytest.mark.parametrize("level", thinned(LEVELS))
def test_sharded_trees_are_refused_too(level: int) -> None:
    """Those that a loss closes over, and those that it is given."""

    def run(group: Any) -> None:
        tree = fz.shard_tree(FIRST, level=level, group=group)
        grads, state = fz.value_and_grad(cubes)(tree)[1], sgd.init(tree)
        calls: dict[str, Callable[[Any], Any]] = {
            "value_and_grad": lambda given: slope(tree),
            "value_and_grad was": slope,
            "hvp": lambda given: fz.hvp(cubes)(tree, grads),
            "apply_updates": lambda given: fz.apply_updates(tree, grads),
            "optimizer's init": lambda given: sgd.init(tree),
            "optimizer's update": lambda given: sgd.update(grads, state, tree),
            "optimizer's apply": lambda given: sgd.apply(grads, state, tree),
        }
        for story, call in calls.items():
            with pytest.raises(StructureError, match=f"{story}.* inside of a loss whose own"):
                fz.value_and_grad(lambda p, call=call: cubes(p) * (call(p) is not None))(tree)

    run_ranks(run, 2)


@pytest.mark.parametrize("level", thinned(LEVELS))
def test_the_remedy_gives_all_of_the_gradient(level: int) -> None:
    def by_torch_func(params: Any) -> Any:
        return torch.func.grad(cubes)(params)

    def by_autograd(params: Any) -> Any:
        return {"w": torch.autograd.grad(cubes(params), params["w"], create_graph=True)[0]}

    expected = {"w": (3 * FIRST["w"] ** 2 + 6 * FIRST["w"]).detach()}
    for part in (by_torch_func, by_autograd):
        assert_equal_values(expected, fz.value_and_grad(with_part(part))(FIRST)[1])

        def run(group: Any, part: Any = part) -> Any:
            tree = fz.shard_tree(FIRST, level=level, group=group)
            return fz.unshard(fz.value_and_grad(with_part(part))(tree)[1])

        for grads in run_ranks(run, 2):
            assert_equal_values(expected, grads)


@pytest.mark.parametrize("level", thinned(LEVELS))
def test_an_evaluation_takes_gradients_and_adds_updates(level: int) -> None:
    """Nobody differentiates it."""

    def evaluation(params: Any, buffers: Any, x: Tensor) -> Any:
        whole = tree_map(lambda p: p.detach().requires_grad_(), fz.unshard(params))
        grads = fz.value_and_grad(cubes)(whole)[1]
        after = fz.apply_updates(whole, tree_map(lambda g: -0.1 * g, grads))
        return {"slope": grads["w"].sum(), "after": cubes(after)}

    evaluate, x = fz.eval_step(evaluation), torch.ones(1)
    expected = evaluate(FIRST_STATE, x)

    def run(group: Any) -> Any:
        state = fz.shard(STEP, level=level, group=group).init(FIRST, {})
        return fz.shard(evaluate, level=level, group=group)(state, x)

    for metrics in run_ranks(run, 2):
        assert_equal_values(expected, metrics)
