"""Functions of pieces in programs: elementwise ones pass, others are refused on every rank."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import optree
import pytest
import torch
from optree import tree_map
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import checkpoint, optim
from functorch_zero.errors import MismatchError, StructureError
from functorch_zero.groups import run_ranks
from functorch_zero.optim.base import init_empty
from functorch_zero.testing import assert_equal_values, assert_sharded_equals_unsharded
from tests.tiers import thinned

torch.manual_seed(0)
FIRST = {
    "a": torch.randn(3, 4, dtype=torch.float64, requires_grad=True),
    "b": torch.randn(3, 4, dtype=torch.float64, requires_grad=True),
    "scale": torch.tensor(0.5, dtype=torch.float64, requires_grad=True),
}
X = torch.randn(8, 3, dtype=torch.float64)
sgd = optim.sgd(0.1)


def loss(params: Any, x: Tensor) -> Tensor:
    return (params["scale"] * (x @ params["a"]).tanh() * (x @ params["b"])).square().mean()


def step_with(change: Callable[[Any, Any], Any]) -> Any:
    """A program that changes its gradients; it is given them, and the params."""

    def program(params: Any, x: Tensor) -> Any:
        value, grads = fz.value_and_grad(loss)(params, x)
        grads = change(grads, params)
        return fz.apply_updates(params, tree_map(lambda g: -0.1 * g, grads)), {"loss": value}

    return fz.program_step(program, init=lambda params: params)


def part(x: Tensor, group: Any) -> Tensor:
    return x.chunk(group.size)[group.rank]


def norm_by_hand(grads: Any, params: Any) -> Any:
    norm = sum(g.square().sum() for g in grads.values()).sqrt()
    return tree_map(lambda g: g / norm, grads)


def mixed_leaves(grads: Any, params: Any) -> Any:
    changed = tree_map(lambda g: g, grads)
    changed["a"] = grads["a"] * grads["scale"]
    return changed


def by_parameter(g: Tensor) -> Tensor:
    own = torch.nn.Parameter(g)  # made without an operator
    return (own / own.norm()).detach()


unscaled, halved = optim.scale(1), optim.scale(0.5)


def updated(grads: Any, params: Any, optimizer: Any) -> Any:
    """By an optimizer that may be made in the step. Its state has no leaves."""
    return optimizer.update(grads, unscaled.init(params), params)[0]


def by_author(factor: float) -> Any:
    """A transform without a name."""

    def update(updates: Any, state: Any, params: Any) -> Any:
        return tree_map(lambda u: factor * u, updates), state

    return optim.pointwise(init_empty, update)


def noise(grads: Any, **numbers: int) -> Any:
    return tree_map(torch.add, grads, fz.random.normal(grads, **numbers))


WRONG: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "norm": (norm_by_hand, "aten.sum.* is not elementwise"),
    "max": (lambda g, p: tree_map(lambda g: g / g.abs().max(), g), "not elementwise"),
    "columns": (lambda g, p: tree_map(lambda g: g - g.mean(0), g), "not elementwise"),
    "vector": (
        lambda g, p: torch.cat([g["a"], g["b"]]) is None or g,
        "makes shape|pieces of another",
    ),
    "first": (lambda g, p: tree_map(lambda g: g * g.reshape(-1)[:1].sum(), g), "not elementwise"),
    "noise": (lambda g, p: tree_map(lambda g: g + torch.randn_like(g), g), "draws other"),
    "dropout": (lambda g, p: tree_map(lambda g: torch.dropout(g, 0.5, True), g), "draws other"),
    "table": (lambda g, p: (g["a"] * torch.ones(3, 4)) is None or g, "tensor of shape"),
    "shape": (lambda g, p: tree_map(lambda g: g * torch.ones(g.shape), g), "Tensor.shape is of"),
    "size": (lambda g, p: tree_map(lambda g: g * sum(g.size()), g), "Tensor.size is of"),
    "numel": (lambda g, p: tree_map(lambda g: g / g.numel(), g), "Tensor.numel is of"),
    "len": (lambda g, p: len(g["a"]) and g, "Tensor.__len__ is of"),
    "vectors": (lambda g, p: tree_map(lambda g: g if g.ndim < 2 else -g, g), "Tensor.ndim is of"),
    "strides": (lambda g, p: tree_map(lambda g: g * sum(g.stride()), g), "Tensor.stride is of"),
    "other leaf": (mixed_leaves, "pieces of another leaf"),
    "read": (lambda g, p: tree_map(lambda g: g * len(g.nonzero()), g), "reads their"),
    "numpy": (lambda g, p: tree_map(lambda g: torch.from_numpy(g.numpy()), g), "reads their"),
    "parameter": (lambda g, p: tree_map(by_parameter, g), "aten.linalg_vector_norm.* is not"),
    "mapped": (lambda g, p: tree_map(torch.mul, g, tree_map(Tensor.dim, g)), "Tensor.dim is of"),
    "by name": (lambda g, p: tree_map(lambda g: g / torch.numel(input=g), g), "numel is of"),
    "order": (lambda g, p: tree_map(lambda g: g * len(g.dim_order()), g), "dim_order is of"),
    "cumulated": (lambda g, p: tree_map(lambda g: g.cumsum(0), g), "not elementwise"),
}

RIGHT: dict[str, Callable[[Any, Any], Any]] = {
    "by dot": lambda g, p: tree_map(lambda x: x / fz.dot(g, g).sqrt(), g),
    "elementwise": lambda g, p: tree_map(lambda g: g.clamp(-1, 1) + torch.sign(g) * g**2, g),
    "a like": lambda g, p: tree_map(lambda g: torch.where(g > 0, g, torch.zeros_like(g)), g),
    "torch's own": lambda g, p: tree_map(
        lambda x: torch.autograd.functional.jvp(torch.sin, x, x)[1], g
    ),
    "in place": lambda g, p: tree_map(lambda g: g.clone().mul_(0.5).add_(g), g),
    "random": lambda g, p: tree_map(lambda g, n: g + 0.1 * n, g, fz.random.normal(g)),
    "cast": lambda g, p: tree_map(lambda g: g.float().double(), g),
    "optimizer": lambda g, p: sgd.update(g, sgd.init(p), p)[0],
    "seed": lambda g, p: noise(g, seed=3, step=1),
    "optimizers": lambda g, p: updated(updated(g, p, by_author(0.5)), p, optim.scale(2)),
    "clipped": lambda g, p: optim.clip_by_global_norm(0.1).update(
        g, optim.clip_by_global_norm(0.1).init(p), p
    )[0],
}


@pytest.mark.parametrize("level", thinned([0, 1, 2, 3], 3))
@pytest.mark.parametrize("name", WRONG)
def test_functions_that_are_not_elementwise_are_refused(name: str, level: int) -> None:
    change, story = WRONG[name]
    step = step_with(change)
    step(step.init(FIRST), X)  # right on whole leaves

    def run(group: Any) -> None:
        sharded = fz.shard(step, level=level, group=group)
        state = sharded.init(FIRST)
        with pytest.raises(StructureError, match=rf"as if they were whole: .*({story}).*Remedy"):
            sharded(state, part(X, group))

    run_ranks(run, 2)


def test_a_program_without_a_file_is_watched() -> None:
    """One that is typed into a terminal, say."""
    names = {"fz": fz, "loss": loss, "tree_map": tree_map}
    lines = [
        "def program(params, x):",
        "    _, grads = fz.value_and_grad(loss)(params, x)",
        "    return fz.apply_updates(params, tree_map(lambda g: -g / g.norm(), grads)), {}",
    ]
    exec("\n".join(lines), names)
    step = fz.program_step(names["program"], init=lambda params: params)

    def run(group: Any) -> None:
        sharded = fz.shard(step, level=3, group=group)
        with pytest.raises(StructureError, match="as if they were whole"):
            sharded(sharded.init(FIRST), part(X, group))

    run_ranks(run, 2)


@pytest.mark.parametrize("level", thinned([0, 1, 2, 3], 3))
@pytest.mark.parametrize("name", RIGHT)
def test_elementwise_functions_pass(name: str, level: int) -> None:
    step = step_with(RIGHT[name])
    expected, _ = step(step.init(FIRST), X)

    def run(group: Any) -> Any:
        sharded = fz.shard(step, level=level, group=group)
        state, _ = sharded(sharded.init(FIRST), part(X, group))
        return sharded.unshard(state)

    for whole in run_ranks(run, 2):
        assert_equal_values(expected, whole)


def chosen(grads: Any, params: Any, x: Tensor) -> Any:
    zeros = fz.zero_updates(params)
    return zeros if x.mean() > 0 else grads


def chosen_leaves(grads: Any, params: Any, x: Tensor) -> Any:
    zeros = fz.zero_updates(params)
    return tree_map(lambda g, zero: zero if x.mean() > 0 else g, grads, zeros)


OWN: dict[str, Callable[[Any, Any, Tensor], Any]] = {
    "factor": lambda g, p, x: tree_map(lambda g: g * x.mean(), g),
    "read factor": lambda g, p, x: tree_map(lambda g: g * float(x.mean()), g),
    "filled": lambda g, p, x: tree_map(lambda g: torch.full_like(g, x.mean().item()), g),
    "branch": lambda g, p, x: tree_map(torch.neg, g) if x.mean() > 0 else g,
    "choice": chosen,
    "choice of leaves": chosen_leaves,
    "optimizer": lambda g, p, x: updated(g, p, optim.scale(x.mean().item())),
    "author's": lambda g, p, x: updated(g, p, by_author(x.mean().item())),
    "choice of optimizers": lambda g, p, x: updated(g, p, unscaled if x.mean() > 0 else halved),
    "seed": lambda g, p, x: noise(g, seed=int(1e6 * x.mean())),
    "step": lambda g, p, x: noise(g, seed=0, step=int(1e6 * x.mean())),
}


@pytest.mark.parametrize("level", [0, 1, 3])
@pytest.mark.parametrize("name", OWN)
def test_operations_that_differ_between_ranks_are_refused(name: str, level: int) -> None:
    """Elementwise functions by numbers that a rank has made of its own part of the batch."""

    def program(params: Any, x: Tensor) -> Any:
        value, grads = fz.value_and_grad(loss)(params, x)
        return fz.apply_updates(params, OWN[name](grads, params, x)), {"loss": value}

    story = r"operation \d( \(update\), optimizer.*)? is .*Remedy: make of each"
    step = fz.program_step(program, init=lambda params: params)
    x = X - X[:4].mean() - 0.1  # of which the first rank's part has a negative mean, the other not
    x[4:] += 1 - x[4:].mean()

    def run(group: Any) -> None:
        sharded = fz.shard(step, level=level, group=group)
        with pytest.raises(MismatchError, match=story):
            sharded(sharded.init(FIRST), part(x, group))

    run_ranks(run, 2)


@pytest.mark.parametrize("level", [0, 3])
def test_buffers_that_differ_between_ranks_are_refused(level: int) -> None:
    def scaled_loss(params: Any, *, buffers: Any, batch: Tensor) -> Tensor:
        return buffers["scale"] * loss(params, batch)

    def program(params: Any, x: Tensor, scale: Tensor) -> Any:
        buffers = {"scale": scale}
        (mean, _, _), grads = fz.value_and_grad(scaled_loss)(params, buffers=buffers, batch=x)
        return fz.apply_updates(params, tree_map(torch.neg, grads)), {"loss": mean}

    step = fz.program_step(program, init=lambda params: params)

    def run(group: Any) -> None:
        sharded, x = fz.shard(step, level=level, group=group), part(X, group)
        with pytest.raises(
            MismatchError,
            match=r"in operation 1 \(value_and_grad\), buffer 'scale' is -?\d\.\d+ on rank 0",
        ):
            sharded(sharded.init(FIRST), x, x.mean())
        sharded(sharded.init(FIRST), x, X.mean())

    run_ranks(run, 2)


def test_an_optimizer_is_compared_as_it_was_at_its_init() -> None:
    """Its function refers to a log, which one rank alone keeps."""

    def run(group: Any) -> None:
        log: list[int] = []

        def update(updates: Any, state: Any, params: Any) -> Any:
            assert len(log) < 10
            return updates, state

        logging = optim.pointwise(init_empty, update)

        def program(value: Any, x: Tensor) -> Any:
            params, state = value
            mean, grads = fz.value_and_grad(loss)(params, x)
            if group.rank == 0:
                log.append(len(log))
            return logging.apply(grads, state, params), {"loss": mean}

        step = fz.program_step(program, init=lambda params: (params, logging.init(params)))
        sharded = fz.shard(step, level=1, group=group)
        state = sharded.init(FIRST)
        for _ in range(3):
            state, _ = sharded(state, part(X, group))
        assert bool(log) == (group.rank == 0)

    run_ranks(run, 2)


@pytest.mark.parametrize("level", [0, 1, 3])
def test_a_tree_that_one_rank_alone_returns_is_refused(level: int) -> None:
    """A step is left out where a rank finds its own part of the batch bad."""

    def skips(value: Any, x: Tensor) -> Any:
        params, state = value
        mean, grads = fz.value_and_grad(loss)(params, x)
        new = sgd.apply(grads, state, params)
        return (new if x.mean() > 0 else value), {"loss": mean}

    step = fz.program_step(skips, init=lambda params: (params, sgd.init(params)))
    x = torch.cat([X[:4].abs(), -X[4:].abs()])

    def run(group: Any) -> None:
        sharded = fz.shard(step, level=level, group=group)
        state = sharded.init(FIRST)
        with pytest.raises(
            MismatchError, match=r"the next value's tree '0' is .* on rank 0 and .* on rank 1"
        ):
            sharded(state, part(x, group))
        # Where all ranks skip, all is well
        state, _ = sharded(state, -X[:4].abs())
        assert_equal_values(FIRST, sharded.unshard(state).value[0])

    run_ranks(run, 2)


def assigned(params: Any, k: Any) -> Any:
    params.tree["a"] = (params["a"] * k).requires_grad_()
    return tree_map(lambda p: p, params)


def written(params: Any, k: Any) -> Any:
    # To a tree that the library has made: those of the value may not be written to
    made = fz.apply_updates(params, fz.zero_updates(params))
    optree.tree_leaves(made)[0].mul_(k)
    return made


# Params displaced by a number
DISPLACED: dict[str, Callable[[Any, Any], Any]] = {
    "made": lambda params, k: tree_map(lambda p: (p * k).requires_grad_(), params),
    "made twice": lambda params, k: tree_map(
        lambda p: p, tree_map(lambda p: (p * k).requires_grad_(), params)
    ),
    "data": lambda params, k: tree_map(lambda p: nn.Parameter(p.data * k), params),
    "assigned": assigned,
    "written": written,
}


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("name", DISPLACED)
def test_displaced_params_that_differ_between_ranks_are_refused(name: str, level: int) -> None:
    """They never reach the next value: gradients at them are means over ranks."""

    def program(value: Any, x: Tensor, k: Any) -> Any:
        params, trained = value
        mean, grads = fz.value_and_grad(loss)(DISPLACED[name](params, k), x)
        new = fz.apply_updates(trained, tree_map(lambda g: -0.1 * g, grads))
        return (trained, new), {"loss": mean}

    step = fz.program_step(program, init=lambda p: (p, tree_map(lambda x: x * 1, p)))

    def run(group: Any) -> None:
        sharded, x = fz.shard(step, level=level, group=group), part(X, group)
        with pytest.raises(
            MismatchError, match=r"in operation \d \(value_and_grad\), leaf 'a' of tree"
        ):
            sharded(sharded.init(FIRST), x, x.mean())
        sharded(sharded.init(FIRST), x, X.mean())

    run_ranks(run, 2)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_displaced_tree_that_is_only_read_is_compared(level: int) -> None:
    def near(params: Any, centre: Any, x: Tensor) -> Tensor:
        params, centre = fz.unshard((params, centre))
        return loss(params, x) + (params["a"] - centre["a"]).square().sum()

    def program(params: Any, x: Tensor, k: Any) -> Any:
        centre = tree_map(lambda p: p.detach() * k, params)
        mean, grads = fz.value_and_grad(near)(params, centre, x)
        return fz.apply_updates(params, tree_map(lambda g: -0.1 * g, grads)), {"loss": mean}

    step = fz.program_step(program, init=lambda params: params)
    expected, _ = step(step.init(FIRST), X, X.mean())

    def run(group: Any) -> Any:
        sharded, x = fz.shard(step, level=level, group=group), part(X, group)
        with pytest.raises(
            MismatchError, match=r"in operation \d \(value_and_grad\), leaf 'a' of tree"
        ):
            sharded(sharded.init(FIRST), x, x.mean())
        state, _ = sharded(sharded.init(FIRST), x, X.mean())
        return sharded.unshard(state)

    for whole in run_ranks(run, 2):
        assert_equal_values(expected, whole)


def test_whole_params_that_differ_between_ranks_are_refused() -> None:
    def program(params: Any, x: Tensor) -> Any:
        return tree_map(lambda p: p * x.mean(), params), {}

    step = fz.program_step(program, init=lambda params: params)

    def run(group: Any) -> None:
        for level in (0, 1, 2):
            sharded = fz.shard(step, level=level, group=group)
            with pytest.raises(MismatchError, match="differ between ranks: leaf 'a' is "):
                sharded(sharded.init(FIRST), part(X, group))

    run_ranks(run, 2)


adam = optim.scale_by_adam()
injected = optim.inject_hyperparams(optim.sgd)(learning_rate=0.1)
STATES: dict[str, tuple[Any, Callable[[Any, Tensor], Any]]] = {
    "count": (adam, lambda state, x: state._replace(count=torch.tensor(int(x.mean() > 0)))),
    "rate": (
        injected,
        lambda state, x: optim.with_hyperparams(state, learning_rate=x.mean().item()),
    ),
    "observed": (optim.reduce_on_plateau(), lambda state, x: optim.observe(state, x.mean())),
}


@pytest.mark.parametrize("level", [0, 1, 3])
@pytest.mark.parametrize("name", STATES)
def test_numbers_in_a_state_that_differ_between_ranks_are_refused(name: str, level: int) -> None:
    """No operator of the program touches a leaf of the state."""
    optimizer, change = STATES[name]

    def program(value: Any, x: Tensor) -> Any:
        params, state = value
        mean, grads = fz.value_and_grad(loss)(params, x)
        params, state = optimizer.apply(grads, state, params)
        return (params, change(state, x)), {"loss": mean}

    step = fz.program_step(program, init=lambda params: (params, optimizer.init(params)))
    x = torch.cat([X[:4].abs(), -X[4:].abs()])

    def run(group: Any) -> None:
        sharded = fz.shard(step, level=level, group=group)
        with pytest.raises(MismatchError, match=r"differ between ranks: leaf '1\."):
            sharded(sharded.init(FIRST), part(x, group))
        sharded(sharded.init(FIRST), X)  # the same on all ranks

    run_ranks(run, 2)


def test_pieces_in_an_optimizers_state_are_watched() -> None:
    def program(value: Any, x: Tensor) -> Any:
        params, state = value
        loss_value, grads = fz.value_and_grad(loss)(params, x)
        params, state = adam.apply(grads, state, params)
        size = sum(mu.abs().sum() for mu in optree.tree_leaves(state.mu))
        return (tree_map(lambda p: p / size, params), state), {"loss": loss_value}

    step = fz.program_step(program, init=lambda params: (params, adam.init(params)))
    step(step.init(FIRST), X)

    def run(group: Any) -> None:
        for level in (1, 3):
            sharded = fz.shard(step, level=level, group=group)
            with pytest.raises(StructureError, match=r"sum.* is not elementwise"):
                sharded(sharded.init(FIRST), part(X, group))

    run_ranks(run, 2)


def test_an_optimizers_state_may_be_changed_elementwise() -> None:
    """A restart of momentum, with the count of steps, which every rank has."""

    def program(value: Any, x: Tensor) -> Any:
        params, state = value
        _, grads = fz.value_and_grad(loss)(params, x)
        params, state = adam.apply(grads, state, params)
        kept = 1 / (1 + state.count)
        return (params, state._replace(mu=tree_map(lambda m: m * kept, state.mu))), {}

    step = fz.program_step(program, init=lambda params: (params, adam.init(params)))
    expected, _ = step(step.init(FIRST), X)

    def run(group: Any) -> Any:
        states = []
        for level in (0, 2, 3):
            sharded = fz.shard(step, level=level, group=group)
            state, _ = sharded(sharded.init(FIRST), part(X, group))
            states.append(sharded.unshard(state))
        return states

    for states in run_ranks(run, 2):
        for whole in states:
            assert_equal_values(expected, whole)


def test_a_transposed_piece_is_refused() -> None:
    """A piece is 1-D, and would be its own transpose."""
    first = {"w": torch.randn(3, 3, dtype=torch.float64, requires_grad=True)}

    def program(params: Any, x: Tensor) -> Any:
        _, grads = fz.value_and_grad(lambda p, x: (x @ p["w"]).square().mean())(params, x)
        return fz.apply_updates(params, tree_map(lambda g: -g.T, grads)), {}

    step = fz.program_step(program, init=lambda params: params)

    def run(group: Any) -> None:
        sharded = fz.shard(step, level=1, group=group)
        with pytest.raises(StructureError, match="not elementwise"):
            sharded(sharded.init(first), part(X, group))

    run_ranks(run, 2)


def test_init_is_watched_too() -> None:
    def init(params: Any) -> Any:
        return {"params": params, "size": sum(p.abs().sum() for p in params.values())}

    step = fz.program_step(lambda value: (value, {}), init=init)

    def run(group: Any) -> None:
        with pytest.raises(StructureError, match=r"not elementwise.*test_piece_watch\.py:\d+"):
            fz.shard(step, level=3, group=group).init(FIRST)
        whole = fz.shard(step, level=1, group=group)  # held whole: right as it stands
        assert_equal_values(step.init(FIRST), whole.unshard(whole.init(FIRST)))

    run_ranks(run, 2)


def test_held_leaves_that_are_whole_may_be_used_at_will() -> None:
    def program(params: Any, x: Tensor) -> Any:
        value, grads = fz.value_and_grad(loss)(params, x)
        size = sum(p.square().sum() for p in optree.tree_leaves(params))
        return fz.apply_updates(params, tree_map(lambda g: -0.1 * g / size, grads)), {"l": value}

    step = fz.program_step(program, init=lambda params: params)
    expected, _ = step(step.init(FIRST), X)

    def run(group: Any) -> Any:
        sharded = fz.shard(step, level=2, group=group)
        state, _ = sharded(sharded.init(FIRST), part(X, group))
        return sharded.unshard(state)

    for whole in run_ranks(run, 2):
        assert_equal_values(expected, whole)


class Holder:
    """An object that a loss reads a leaf of."""

    def __init__(self, leaf: Tensor):
        self.leaf, self.other = leaf, 2.0

    def scaled(self, params: Any, x: Tensor) -> Tensor:
        return loss(params, x) * self.leaf.square().sum()

    def __call__(self, params: Any, x: Tensor) -> Tensor:
        return self.scaled(params, x)

    def harmless(self, params: Any, x: Tensor) -> Tensor:
        return loss(params, x) * self.other


HELD_GLOBALLY: dict[str, Tensor] = {}


def by_global(params: Any, x: Tensor) -> Tensor:
    return loss(params, x) * HELD_GLOBALLY["leaf"].square().sum()


def scaled(params: Any, x: Tensor, leaf: Tensor, **more: Tensor) -> Tensor:
    return loss(params, x) * leaf.square().sum()


def nested(leaf: Tensor) -> Callable[..., Tensor]:
    def norm() -> Tensor:
        return leaf.square().sum()

    return lambda params, x: loss(params, x) * norm()


def by_default(leaf: Tensor) -> Callable[..., Tensor]:
    def with_default(params: Any, x: Tensor, leaf: Tensor = leaf) -> Tensor:
        return scaled(params, x, leaf)

    return with_default


def globally(leaf: Tensor) -> Callable[..., Tensor]:
    HELD_GLOBALLY["leaf"] = leaf
    return by_global


def in_batch(params: Any, x: Tensor, *, batch: Tensor) -> Tensor:
    return loss(params, x) * batch.square().sum()


def with_buffers(params: Any, x: Tensor, *, buffers: Any) -> Tensor:
    return loss(params, x) * buffers["leaf"].square().sum()


# By the path that the error names: the gradient of a loss that uses a leaf
Take = Callable[[Any, Tensor, Tensor], Any]
USING_A_LEAF: dict[str, Take] = {
    r"args\[1\]": lambda p, x, leaf: fz.value_and_grad(scaled)(p, x, leaf),
    r"args\[1\]\['leaf'\]": lambda p, x, leaf: fz.value_and_grad(
        lambda p, x, kept: scaled(p, x, kept["leaf"])
    )(p, x, {"leaf": leaf}),
    "batch": lambda p, x, leaf: fz.value_and_grad(in_batch)(p, x, batch=leaf),
    r"buffers\['leaf'\]": lambda p, x, leaf: fz.value_and_grad(with_buffers)(
        p, x, buffers={"leaf": leaf}
    ),
    "leaf": lambda p, x, leaf: fz.value_and_grad(lambda p, x: scaled(p, x, leaf))(p, x),
    "leaf,": lambda p, x, leaf: fz.value_and_grad(nested(leaf))(p, x),
    "leaf, expected": lambda p, x, leaf: fz.hvp(lambda p, x: scaled(p, x, leaf))(
        p, fz.zero_updates(p), x
    ),
    "twice": lambda p, x, leaf: twice_of(p, x, leaf),
    "own": lambda p, x, leaf: parameter_of(p, x, leaf),
    "partial's arguments": lambda p, x, leaf: fz.value_and_grad(partial(scaled, leaf=leaf))(p, x),
    r"defaults\[0\]": lambda p, x, leaf: fz.value_and_grad(by_default(leaf))(p, x),
    r"HELD_GLOBALLY\['leaf'\]": lambda p, x, leaf: fz.value_and_grad(globally(leaf))(p, x),
    r"self\.leaf": lambda p, x, leaf: fz.value_and_grad(Holder(leaf).scaled)(p, x),
    r"held\.leaf": lambda p, x, leaf: read_of_holder(p, x, Holder(leaf)),
    r"\S*\.leaf": lambda p, x, leaf: fz.value_and_grad(Holder(leaf))(p, x),
}


def twice_of(params: Any, x: Tensor, leaf: Tensor) -> Any:
    twice = 2 * leaf
    return fz.value_and_grad(lambda p, x: scaled(p, x, twice))(params, x)


def parameter_of(params: Any, x: Tensor, leaf: Tensor) -> Any:
    own = torch.nn.Parameter(leaf)  # made without an operator
    return fz.value_and_grad(lambda p, x: scaled(p, x, own))(params, x)


def read_of_holder(params: Any, x: Tensor, held: Holder) -> Any:
    return fz.value_and_grad(lambda p, x: scaled(p, x, held.leaf))(params, x)


def step_using(take: Take, leaf_of: Callable[[Any, Any], Tensor]) -> Any:
    def program(value: Any, x: Tensor) -> Any:
        params, other = value
        grads = fz.value_and_grad(loss)(params, x)[1]
        found = take(params, x, leaf_of(other, grads))[1]
        return (fz.apply_updates(params, tree_map(lambda g: -0.1 * g, found)), other), {}

    return fz.program_step(program, init=lambda params, other: (params, other))


OTHER = {"v": torch.linspace(1, 2, 6, dtype=torch.float64, requires_grad=True)}


@pytest.mark.parametrize("path", USING_A_LEAF)
@pytest.mark.parametrize("level", thinned([0, 1, 2, 3]))
def test_a_loss_that_uses_a_single_leaf_is_refused(path: str, level: int) -> None:
    """A leaf of the gradients at every level; one of params where it is a part."""
    leaves: list[Callable[[Any, Any], Tensor]] = [lambda other, grads: grads["a"]]
    if level == 3:
        leaves.append(lambda other, grads: other["v"])
    for leaf_of in leaves:
        step = step_using(USING_A_LEAF[path], leaf_of)
        step(step.init(FIRST, OTHER), X)  # right on whole leaves

        def run(group: Any, step: Any = step) -> None:
            sharded = fz.shard(step, level=level, group=group)
            sharded(sharded.init(FIRST, OTHER), part(X, group))

        story = rf"uses a single leaf.* path {path}.* on rank \d.*Remedy: pass the tree"
        with pytest.raises(StructureError, match=story):
            run_ranks(run, 2)


@pytest.mark.parametrize("level", thinned([0, 1, 2, 3]))
def test_a_loss_may_use_what_is_whole(level: int) -> None:
    """Whole trees, single leaves where ranks hold them whole, tensors that are the same on all
    ranks; and objects with a piece that the loss doesn't name."""

    def program(value: Any, x: Tensor) -> Any:
        params, other, heat = value
        whole, twice = fz.unshard(other), 2 * heat
        leaf = whole["v"] if level == 3 else other["v"]
        grads = fz.value_and_grad(loss)(params, x)[1]
        holder = Holder(grads["a"])
        for take in (
            lambda p, x: scaled(p, x, whole["v"]) + twice,
            lambda p, x: scaled(p, x, leaf.detach()),
            holder.harmless,
            lambda p, x: loss(p, x) * holder.other,
        ):
            found = fz.value_and_grad(take)(params, x)[1]
            params = fz.apply_updates(params, tree_map(lambda g: -0.01 * g, found))
        found = fz.value_and_grad(scaled)(params, x, fz.unshard(grads)["a"])[1]
        return (fz.apply_updates(params, tree_map(lambda g: -0.01 * g, found)), other, heat), {}

    step = fz.program_step(program, init=lambda params, other, heat: (params, other, heat))
    assert_sharded_equals_unsharded(
        step,
        FIRST,
        OTHER,
        torch.ones(()).double(),
        [X, X],
        levels=[level],
        ranks=[2],
        unused=["1.v"],
    )


# ---- Leaves that an evaluation chooses ----


def evaluation_on(choose: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
    """A training step with a mean of the params, and an evaluation of the leaves chosen."""
    optimizer = optim.params_ema(optim.adamw(0.1), 0.9)
    step = fz.train_step(lambda p, b, x: loss(p, x), optimizer)
    return step, fz.eval_step(lambda p, b, x: {"loss": loss(p, x)}, params=choose)


def evaluated(step: Any, evaluate: Any, batches: list[Tensor]) -> list[Tensor]:
    state, found = step.init(FIRST), []
    for x in batches:
        state, _ = step(state, x)
        found.append(evaluate(state, x)["loss"])
    return found


REFUSED_CHOICES = {
    "norm": lambda s, p: tree_map(lambda a: a / torch.linalg.norm(a), s.ema),
    "sum of params": lambda s, p: tree_map(lambda a: a * a.sum(), p),
    "largest": lambda s, p: tree_map(lambda a: a / a.abs().max(), s.ema),
    "dot": lambda s, p: tree_map(lambda a: a * fz.dot(p, p), s.ema),
    "size": lambda s, p: tree_map(lambda a: a / a.numel(), s.ema),
    "random": lambda s, p: tree_map(lambda a: a + torch.rand_like(a), s.ema),
    "on the host": lambda s, p: tree_map(lambda a: a * float(a.numpy().max()), s.ema),
}


@pytest.mark.parametrize("level", [0, 1, 3])
@pytest.mark.parametrize("name", REFUSED_CHOICES)
def test_a_choice_that_is_not_elementwise_is_refused(name: str, level: int) -> None:
    """By the first call on ranks, however often the evaluation was called without them."""
    step, evaluate = evaluation_on(REFUSED_CHOICES[name])
    evaluated(step, evaluate, [X] * 3)

    def run(group: Any) -> None:
        with pytest.raises(StructureError, match=r"eval_step\(params=\.\.\.\) uses pieces"):
            evaluated(*(fz.shard(s, level=level, group=group) for s in (step, evaluate)), [X])

    run_ranks(run, 2)


PASSING_CHOICES = {
    "mean": optim.ema_params,
    "mixed": lambda s, p: tree_map(lambda a, b: 0.5 * a + 0.5 * b, s.ema, p),
    "by a counter": lambda s, p: tree_map(lambda a: a / (1 + s.count), s.ema),
    "clipped": lambda s, p: tree_map(lambda a, b: torch.where(a > b, a.clamp(-1, 1), b), s.ema, p),
}


@pytest.mark.parametrize("level", [0, 1, 3])
@pytest.mark.parametrize("name", PASSING_CHOICES)
def test_an_elementwise_choice_passes(name: str, level: int) -> None:
    step, evaluate = evaluation_on(PASSING_CHOICES[name])
    expected = evaluated(step, evaluate, [X] * 3)

    def run(group: Any) -> Any:
        steps = [fz.shard(s, level=level, group=group) for s in (step, evaluate)]
        return evaluated(*steps, [part(X, group)] * 3)

    for found in run_ranks(run, 2):
        assert_equal_values(expected, found)


def test_a_loaded_state_is_watched(tmp_path: Any) -> None:
    step, evaluate = evaluation_on(REFUSED_CHOICES["norm"])

    def run(group: Any) -> None:
        sharded, evaluation = (fz.shard(s, level=1, group=group) for s in (step, evaluate))
        checkpoint.save(tmp_path, sharded, sharded.init(FIRST))
        loaded = checkpoint.load(tmp_path, sharded, like=sharded.init(FIRST)).state
        wholes = sharded.shard_state(sharded.unshard(loaded))
        for state in (loaded, wholes, sharded.refit(loaded, FIRST)):
            with pytest.raises(StructureError, match=r"eval_step\(params=\.\.\.\) uses pieces"):
                fz.shard(evaluate, level=1, group=group)(state, part(X, group))
        # Nobody knows how a copied state is cut
        evaluation(copy.deepcopy(sharded.init(FIRST)), part(X, group))

    run_ranks(run, 2)


SGD = optim.sgd(0.1)


def test_a_branch_in_a_step_that_is_not_looked_at_shows_later() -> None:
    """At level 0 each rank applies its own update, so that their params part."""

    def program(value: Any, x: Tensor) -> Any:
        params, opt_state, number = value
        grads = fz.value_and_grad(loss)(params, x)[1]
        if int(number) == 6 and bool(x.sum() > X.sum() / 2):
            grads = tree_map(lambda g: 0.5 * g, grads)
        params, opt_state = SGD.apply(grads, opt_state, params)
        return (params, opt_state, number + 1), {}

    def init(params: Any) -> Any:
        return params, SGD.init(params), torch.zeros((), dtype=torch.int64)

    step = fz.program_step(program, init=init)

    def run(group: Any) -> None:
        sharded = fz.shard(step, level=0, group=group)
        state = sharded.init(FIRST)
        for _ in range(7):
            state, _ = sharded(state, part(X, group))
        with pytest.raises(MismatchError, match=r"leaf '0\.\w+' is"):
            sharded(state, part(X, group))

    run_ranks(run, 2)


def test_one_rank_may_log_a_whole_leaf() -> None:
    def program(value: Any, x: Tensor) -> Any:
        params, rank = value
        mean, grads = fz.value_and_grad(loss)(params, x)
        if LOGGING.get("rank") == threading.get_ident():
            LOGGING["norm"] = float(params["a"].norm())
        return (fz.apply_updates(params, tree_map(lambda g: -0.1 * g, grads)), rank), {"l": mean}

    step = fz.program_step(program, init=lambda params: (params, 0))

    def run(group: Any) -> None:
        sharded = fz.shard(step, level=1, group=group)
        state = sharded.init(FIRST)
        if group.rank == 0:
            LOGGING["rank"] = threading.get_ident()
        for _ in range(2):
            state, _ = sharded(state, part(X, group))

    run_ranks(run, 2)
    assert LOGGING["norm"] > 0


LOGGING: dict[str, Any] = {}


class Two:
    """Two attributes, which different functions read."""

    def __init__(self, leaf: Tensor):
        self.leaf, self.other = leaf, 1.0


def test_a_leaf_is_found_behind_an_object_that_was_seen() -> None:
    """Another function has read another attribute of it; or it is an argument itself."""

    def by_two(params: Any, x: Tensor, leaf: Tensor) -> Any:
        held = Two(leaf)

        def other() -> float:
            return held.other

        def own() -> Tensor:
            return held.leaf.square().sum()

        return fz.value_and_grad(lambda p, x: loss(p, x) * other() * own())(params, x)

    def by_argument(params: Any, x: Tensor, leaf: Tensor) -> Any:
        return fz.value_and_grad(lambda p, x, held: loss(p, x) * held.leaf.sum())(
            params, x, Two(leaf)
        )

    for take in (by_two, by_argument):
        step = step_using(take, lambda other, grads: grads["a"])

        def run(group: Any, step: Any = step) -> None:
            sharded = fz.shard(step, level=1, group=group)
            sharded(sharded.init(FIRST, OTHER), part(X, group))

        with pytest.raises(StructureError, match=r"uses a single leaf.*path .*\.leaf"):
            run_ranks(run, 2)
