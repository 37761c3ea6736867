"""Leaves of sharded trees in programs: a function of them is right as on one process, or refused on
every rank, in any step of a run."""

from __future__ import annotations

import pickle
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import optree
import pytest
import torch
from optree import tree_map
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import (
    FunctorchZeroError,
    MismatchError,
    StructureError,
)
from functorch_zero.groups import run_ranks
from functorch_zero.optim.base import init_empty
from functorch_zero.step.state import State
from functorch_zero.testing import assert_equal_values, assert_sharded_equals_unsharded
from tests.local import part
from tests.tiers import crossed, thinned, tiers

torch.manual_seed(0)
FIRST = {
    "a": torch.randn(3, 40, dtype=torch.float64, requires_grad=True),
    "b": torch.randn(3, 40, dtype=torch.float64, requires_grad=True),
    "scale": torch.tensor(0.5, dtype=torch.float64, requires_grad=True),
}
X = torch.randn(8, 3, dtype=torch.float64)
sgd = optim.sgd(0.1)


def loss(params: Any, x: Tensor) -> Tensor:
    return (params["scale"] * (x @ params["a"]).tanh() * (x @ params["b"])).square().mean()


STEPS = (0, 5)  # of a run. Ranks look closely at the first of these alone
LEVELS = (0, 1, 3)
Change = Callable[[Any, Any, Tensor], Any]


def step_with(change: Change) -> Any:
    """A program that changes its gradients where it is told to; `change` is given them, the params
    and the part of the batch."""

    def program(params: Any, x: Tensor, now: bool) -> Any:
        value, grads = fz.value_and_grad(loss)(params, x)
        if now:
            grads = change(grads, params, x)
        return fz.apply_updates(params, tree_map(lambda g: -0.1 * g, grads)), {"loss": value}

    return fz.program_step(program, init=lambda params: params)


def changed_at(k: int, step: Any, first: Any, x: Tensor) -> State:
    """The state after step k, the only one in which the program is told to change something."""
    state = step.init(*first)
    for n in range(k + 1):
        state, _ = step(state, x, n == k)
    return state  # type: ignore[no-any-return]


def on_ranks(step: Any, level: int, x: Tensor = X, first: Any = (FIRST,)) -> list[list[Any]]:
    """For each of `STEPS` what each rank has then: the whole state, or an error."""

    def run(group: Any) -> list[Any]:
        found: list[Any] = []
        for k in STEPS:
            sharded = fz.shard(step, level=level, group=group)
            try:
                state = changed_at(k, sharded, first, part(x, group))
                found.append(sharded.unshard(state))
            except FunctorchZeroError as error:
                found.append(error)
        return found

    return [[*ranks] for ranks in zip(*run_ranks(run, 2), strict=True)]


def check_right(step: Any, level: int, x: Tensor = X, first: Any = (FIRST,)) -> None:
    for k, ranks in zip(STEPS, on_ranks(step, level, x, first), strict=True):
        for found in ranks:
            assert not isinstance(found, Exception), f"step {k}: {found}"
            assert_equal_values(changed_at(k, step, first, x), found)


def check_refused(
    step: Any,
    level: int,
    error: type[Exception],
    story: str,
    x: Tensor = X,
    first: Any = (FIRST,),
) -> None:
    """On all ranks, in each of the steps. On one process it runs."""
    for k, ranks in zip(STEPS, on_ranks(step, level, x, first), strict=True):
        changed_at(k, step, first, x)
        for found in ranks:
            assert isinstance(found, error), f"step {k}: {found!r}"
            assert re.search(story, str(found)), f"step {k}: {found}"


# Of the error of a part that is used as if it were whole: the operator, the line, the remedy
REFUSED = r"as if they were whole: .*({}).* \(test_\w+\.py:\d+\): .*got elements.*Remedy: "


def norm_by_hand(grads: Any, params: Any, x: Tensor) -> Any:
    norm = sum(g.square().sum() for g in grads.values()).sqrt()
    return tree_map(lambda g: g / norm, grads)


def mixed_leaves(grads: Any, params: Any, x: Tensor) -> Any:
    return tree_map(lambda g: g * grads["scale"], grads)


def by_parameter(g: Tensor) -> Tensor:
    own = torch.nn.Parameter(g)  # made without an operator
    return (own / own.norm()).detach()


def by_norm(g: Tensor) -> Tensor:
    return g / g.norm()


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


def in_threads(function: Callable[[Tensor], Tensor], grads: Any) -> Any:
    leaves, treedef = optree.tree_flatten(grads)
    with ThreadPoolExecutor(2) as pool:
        return treedef.unflatten([*pool.map(function, leaves)])


def compiled(function: Callable[[Tensor], Tensor], backend: str, grads: Any) -> Any:
    torch._dynamo.reset()
    return tree_map(torch.compile(function, backend=backend, dynamic=False), grads)


def rows(table: dict[str, Any]) -> list[Any]:
    """Names and levels. A compiler takes seconds, so its rows are thorough."""
    slow = [(name, level) for name in table if "compiled" in name for level in LEVELS]
    others = [name for name in table if "compiled" not in name]
    return [*crossed(others, LEVELS, quick=3), *tiers(thorough=slow, rows=True)]


# Right where ranks hold whole leaves; of parts refused, in these words
WRONG: dict[str, tuple[Change, str]] = {
    "norm": (norm_by_hand, r"aten\.sum.* is not elementwise"),
    "max": (lambda g, p, x: tree_map(lambda g: g / g.abs().max(), g), "not elementwise"),
    "columns": (lambda g, p, x: tree_map(lambda g: g - g.mean(0), g), "not elementwise"),
    "vector": (lambda g, p, x: torch.cat([g["a"], g["b"]]) is None or g, "not elementwise"),
    "first": (
        lambda g, p, x: tree_map(lambda g: g * g.reshape(-1)[:1].sum(), g),
        "not elementwise",
    ),
    "noise": (lambda g, p, x: tree_map(lambda g: g + torch.randn_like(g), g), "draws other"),
    "dropout": (lambda g, p, x: tree_map(lambda g: torch.dropout(g, 0.5, True), g), "draws other"),
    "table": (lambda g, p, x: (g["a"] * torch.ones(3, 40)) is None or g, r"of shape \(3, 40\)"),
    "shape": (lambda g, p, x: tree_map(lambda g: g * torch.ones(g.shape), g), "of shape"),
    "other leaf": (mixed_leaves, "pieces of another leaf"),
    "read": (lambda g, p, x: tree_map(lambda g: g * len(g.nonzero()), g), "reads their"),
    "numpy": (lambda g, p, x: tree_map(lambda g: torch.from_numpy(g.numpy()), g), "reads their"),
    "number": (lambda g, p, x: tree_map(lambda u: u * g["scale"].item(), g), "reads their"),
    "parameter": (lambda g, p, x: tree_map(by_parameter, g), "aten.linalg_vector_norm.* is not"),
    "cumulated": (lambda g, p, x: tree_map(lambda g: g.cumsum(0), g), "not elementwise"),
    "transposed": (
        lambda g, p, x: tree_map(lambda g: g.T.contiguous().T if g.dim() else g, g),
        "not elementwise",
    ),
    "threads": (lambda g, p, x: in_threads(lambda g: g / g.norm(), g), "not elementwise"),
    "compiled": (lambda g, p, x: compiled(by_norm, "eager", g), "linalg_vector_norm"),
    "compiled by aot": (lambda g, p, x: compiled(by_norm, "aot_eager", g), "linalg_vector_norm"),
}

# Of parts, too
RIGHT: dict[str, Change] = {
    "by dot": lambda g, p, x: tree_map(lambda u: u / fz.dot(g, g).sqrt(), g),
    "elementwise": lambda g, p, x: tree_map(lambda g: g.clamp(-1, 1) + torch.sign(g) * g**2, g),
    "a like": lambda g, p, x: tree_map(lambda g: torch.where(g > 0, g, torch.zeros_like(g)), g),
    "torch's own": lambda g, p, x: tree_map(
        lambda u: torch.autograd.functional.jvp(torch.sin, u, u)[1], g
    ),
    "in place": lambda g, p, x: tree_map(lambda g: g.clone().mul_(0.5).add_(g), g),
    "random": lambda g, p, x: tree_map(lambda g, n: g + 0.1 * n, g, fz.random.normal(g)),
    "cast": lambda g, p, x: tree_map(lambda g: g.float().double(), g),
    "optimizer": lambda g, p, x: sgd.update(g, sgd.init(p), p)[0],
    "seed": lambda g, p, x: noise(g, seed=3, step=1),
    "size": lambda g, p, x: tree_map(lambda g: g * sum(g.size()), g),
    "numel": lambda g, p, x: tree_map(lambda g: g / g.numel(), g),
    "len": lambda g, p, x: tree_map(lambda u: u * len(g["a"]), g),
    "vectors": lambda g, p, x: tree_map(lambda g: g if g.ndim < 2 else -g, g),
    "strides": lambda g, p, x: tree_map(lambda g: g * sum(g.stride()), g),
    "mapped": lambda g, p, x: tree_map(torch.mul, g, tree_map(Tensor.dim, g)),
    "by name": lambda g, p, x: tree_map(lambda g: g / torch.numel(input=g), g),
    "order": lambda g, p, x: tree_map(lambda g: g * len(g.dim_order()), g),
    "same shape": lambda g, p, x: tree_map(lambda g: 2 * g.view_as(g).expand_as(g), g),
    "new number": lambda g, p, x: tree_map(lambda g: g + g.new_ones(()) + g.new_tensor(0.5), g),
    "one element": lambda g, p, x: tree_map(lambda g: g * 2 if g.ndim == 0 else g * HALF, g),
    "whole quotients": lambda g, p, x: tree_map(lambda g: (8 // (1 + g.int())) * g // g.abs(), g),
    "promoted": lambda g, p, x: tree_map(lambda g: promoted(g.float()).double(), g),
    "threads": lambda g, p, x: in_threads(lambda g: g.clamp(-1, 1), g),
    "compiled": lambda g, p, x: compiled(lambda g: 2 * g.sin() / g.numel(), "eager", g),
    "compiled by aot": lambda g, p, x: compiled(lambda g: 2 * g.sin(), "aot_eager", g),
    "optimizers": lambda g, p, x: updated(updated(g, p, by_author(0.5)), p, optim.scale(2)),
    "clipped": lambda g, p, x: optim.clip_by_global_norm(0.1).update(
        g, optim.clip_by_global_norm(0.1).init(p), p
    )[0],
}


HALF = torch.tensor([0.5], dtype=torch.float64)


def promoted(g: Tensor) -> Tensor:
    """float32 where the leaf has dims, and float64 where it has none."""
    return g / torch.tensor(3.0, dtype=torch.float64)


@pytest.mark.parametrize(("name", "level"), rows(WRONG))
def test_functions_that_are_not_elementwise(name: str, level: int) -> None:
    change, story = WRONG[name]
    if level == 0:  # gradients are whole
        check_right(step_with(change), level)
    else:
        check_refused(step_with(change), level, StructureError, REFUSED.format(story))


@pytest.mark.parametrize(("name", "level"), rows(RIGHT))
def test_elementwise_functions_pass(name: str, level: int) -> None:
    check_right(step_with(RIGHT[name]), level)


def chosen(grads: Any, params: Any, x: Tensor) -> Any:
    zeros = fz.zero_updates(params)
    return zeros if x.mean() > 0 else grads


def chosen_leaves(grads: Any, params: Any, x: Tensor) -> Any:
    zeros = fz.zero_updates(params)
    return tree_map(lambda g, zero: zero if x.mean() > 0 else g, grads, zeros)


OWN: dict[str, Change] = {
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
    "in place": lambda g, p, x: tree_map(lambda g: g.clone().mul_(x.mean()), g),
    "threads": lambda g, p, x: in_threads(lambda g: g * x.mean(), g),
    "compiled": lambda g, p, x: compiled(lambda g: g * x.mean(), "eager", g),
    "foreach": lambda g, p, x: by_foreach(g, x.mean().item()),
    "whole views": lambda g, p, x: by_views(g, p, x),
    "whole arrays": lambda g, p, x: by_arrays(g, x),
    "inference mode": lambda g, p, x: in_inference_mode(g, p, x),
    "one element": lambda g, p, x: tree_map(lambda g: g * x.mean().expand([1] * g.ndim), g),
    "pickled": lambda g, p, x: tree_map(
        lambda g: pickle.loads(pickle.dumps(g)) * (x.mean() > 0).double(), g
    ),
}


def by_foreach(grads: Any, factor: float) -> Any:
    leaves, treedef = optree.tree_flatten(grads)
    return treedef.unflatten(torch._foreach_mul(leaves, factor))


def by_views(grads: Any, params: Any, x: Tensor) -> Any:
    """Of whole leaves."""
    made = tree_map(torch.clone, grads)
    for leaf in optree.tree_leaves(made):
        # Of parts there are no views
        written = leaf.view(-1)[:1] if getattr(leaf, "is_whole", True) else leaf
        written.mul_(x.mean())
    return made


def by_arrays(grads: Any, x: Tensor) -> Any:
    """Of whole leaves, by memory that numpy has."""
    made = tree_map(torch.clone, grads)
    for leaf in optree.tree_leaves(made):
        if getattr(leaf, "is_whole", True):
            leaf.numpy()[...] *= x.mean().item()
        else:
            leaf.mul_(x.mean())
    return made


def in_inference_mode(grads: Any, params: Any, x: Tensor) -> Any:
    """Whose tensors count no writes."""
    with torch.inference_mode():
        return by_views(grads, params, x)


# Rows with a negative mean for the first rank, and with a positive one for the other
UNLIKE = torch.cat([-X[:4].abs(), X[4:].abs()])


def check_own(step: Any, level: int, story: str) -> None:
    """Refused where it computes by numbers of ranks' own parts; right where these are equal."""
    check_refused(step, level, MismatchError, story, UNLIKE)
    check_right(step, level, torch.cat([X[:4]] * 2))


@pytest.mark.parametrize(("name", "level"), rows(OWN))
def test_operations_that_differ_between_ranks_are_refused(name: str, level: int) -> None:
    """Elementwise functions by numbers that a rank has made of its own part of the batch."""
    story = r"differ between ranks: .* in call \d.* is .* on rank 0 and .* on rank 1.*Remedy: "
    check_refused(step_with(OWN[name]), level, MismatchError, story, UNLIKE)


@pytest.mark.parametrize("level", tiers([3], [0]))
def test_calls_in_a_thread_that_differ_between_ranks_are_refused(level: int) -> None:
    """No ledger counts the calls of a thread that a program starts."""

    def moved(grads: Any, params: Any, x: Tensor) -> Any:
        updates = tree_map(lambda g: g * x.mean(), grads)
        with ThreadPoolExecutor(1) as pool:
            new = pool.submit(fz.apply_updates, params, updates).result()
        return tree_map(torch.sub, fz.pieces(new), fz.pieces(params))

    story = r"tree 2 in call 2 .*pieces of #.* on rank 0 and .*pieces of #.* on rank 1"
    check_refused(step_with(moved), level, MismatchError, story, UNLIKE)
    # But for rounding, where all ranks move alike
    check_right(step_with(moved), level, torch.cat([X[:4]] * 2))


@pytest.mark.parametrize(("kind", "level"), crossed(["gradients", "value"], LEVELS))
def test_a_tree_of_an_earlier_step_on_one_rank_is_refused(kind: str, level: int) -> None:
    kept: dict[Any, Any] = {}

    def program(params: Any, x: Tensor, now: bool) -> Any:
        mean, grads = fz.value_and_grad(loss)(params, x)
        used = grads if kind == "gradients" else fz.pieces(params)
        me = threading.get_ident()
        old, kept[me] = kept.get(me), used
        if now and x.mean() > 0 and old is not None:
            used = old
        return fz.apply_updates(params, tree_map(lambda g: -0.1 * g, used)), {"loss": mean}

    step = fz.program_step(program, init=lambda params: params)
    story = r"step 5's .* on rank 0 and .*step 4's .* on rank 1"

    def run(group: Any) -> None:
        sharded = fz.shard(step, level=level, group=group)
        with pytest.raises(MismatchError, match=story if kind == "gradients" else "rank 1"):
            changed_at(5, sharded, (FIRST,), part(UNLIKE, group))

    run_ranks(run, 2)


def test_a_tree_of_a_step_that_failed_on_one_rank_is_refused() -> None:
    """It has the number of the step that is tried again."""

    def run(group: Any) -> None:
        kept: list[Any] = []

        def program(params: Any, x: Tensor, fails: bool) -> Any:
            mean, grads = fz.value_and_grad(loss)(params, x)
            kept.append(grads)
            if fails:
                raise KeyError("a bad row")
            used = kept[-2] if group.rank and len(kept) == 7 else grads
            return fz.apply_updates(params, tree_map(lambda g: -0.1 * g, used)), {"loss": mean}

        step = fz.program_step(program, init=lambda params: params)
        sharded, x = fz.shard(step, level=1, group=group), part(X, group)
        state = sharded.init(FIRST)
        for _ in range(5):
            state, _ = sharded(state, x, False)
        with pytest.raises((KeyError, FunctorchZeroError)):
            sharded(state, 2 * x, True)
        with pytest.raises(MismatchError, match=r"step 5's \(era 1\) .*on rank 0 and .*step 5's r"):
            sharded(state, x, False)

    run_ranks(run, 2)


LOGGING: dict[str, int] = {}  # the thread of the rank that reads leaves


@pytest.mark.parametrize(("donate", "level"), crossed([False, True], LEVELS))
def test_one_rank_may_read_leaves(donate: bool, level: int) -> None:
    """Of gradients with frozen leaves, of states with counts, and of a value between steps."""
    first = FIRST | {"frozen": torch.ones(3, 40, dtype=torch.float64)}

    def program(value: Any, x: Tensor) -> Any:
        params, state, mean = value
        value, grads = fz.value_and_grad(loss)(params, x)
        mean = tree_map(lambda m, g: 0.9 * m + g, mean, grads)
        read(grads, state, mean)
        params, state = adam.apply(grads, state, params)
        read(params, state)
        return (params, state, mean), {"loss": value}

    def read(*trees: Any) -> None:
        if LOGGING.get("reader") == threading.get_ident():
            for leaf in optree.tree_leaves(trees):
                assert repr(getattr(leaf, "local", leaf))
                if getattr(leaf, "is_whole", False):
                    assert leaf.detach().numpy().shape == leaf.shape

    def init(params: Any) -> Any:
        return params, adam.init(params), fz.zero_updates(params)

    step = fz.program_step(program, init=init)
    expected = step.init(first)
    for _ in range(6):
        expected, _ = step(expected, X)

    def run(group: Any) -> Any:
        sharded = fz.shard(step, level=level, group=group, donate=donate)
        state = sharded.init(first)
        if group.rank == 0:
            LOGGING["reader"] = threading.get_ident()
        for _ in range(6):
            read(*state.value)
            if not donate:
                sharded(state, part(X, group))  # the state stays as all ranks know it
            state, _ = sharded(state, part(X, group))
        return sharded.unshard(state)

    for whole in run_ranks(run, 2):
        assert_equal_values(expected, whole)


@pytest.mark.parametrize("level", LEVELS)
def test_a_single_leaf_in_the_value(level: int) -> None:
    """Right where it is whole, also where the step donates the tree that it is of."""

    def program(value: Any, x: Tensor) -> Any:
        params, kept = value
        mean, grads = fz.value_and_grad(loss)(params, x)
        kept = {"a": 0.9 * kept["a"] + 0.1 * params["a"].detach(), "b": params["b"]}
        return (fz.apply_updates(params, tree_map(lambda g: -0.1 * g, grads)), kept), {"loss": mean}

    def init(params: Any) -> Any:
        return params, {"a": params["a"].detach().clone(), "b": params["b"]}

    step = fz.program_step(program, init=init)
    if level < 3:
        assert_sharded_equals_unsharded(step, FIRST, [X] * 4, levels=[level], ranks=[2])
        return

    def run(group: Any) -> None:
        with pytest.raises(StructureError, match=r"value by itself .*unshard\(tree\)\['w'\]"):
            fz.shard(step, level=level, group=group).init(FIRST)

    run_ranks(run, 2)


@pytest.mark.parametrize("level", thinned([3, 0]))
def test_buffers_that_differ_between_ranks_are_refused(level: int) -> None:
    """In one of their elements, also the last."""

    def scaled_loss(params: Any, *, buffers: Any, batch: Tensor) -> Tensor:
        return buffers["scale"].mean() * loss(params, batch)

    def program(params: Any, x: Tensor, now: bool) -> Any:
        scale = torch.ones(5).double()
        scale[-1] = x.mean() if now else 0.5
        buffers = {"scale": scale}
        (mean, _, _), grads = fz.value_and_grad(scaled_loss)(params, buffers=buffers, batch=x)
        return fz.apply_updates(params, tree_map(torch.neg, grads)), {"loss": mean}

    step = fz.program_step(program, init=lambda params: params)
    story = r"buffer 'scale' in call 1 \(value_and_grad\) is digest .* on rank 0"
    check_own(step, level, story)


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


@pytest.mark.parametrize("level", tiers([1], [0, 3]))
def test_a_tree_that_one_rank_alone_returns_is_refused(level: int) -> None:
    """A step is left out where a rank finds its own part of the batch bad."""

    def skips(value: Any, x: Tensor, now: bool) -> Any:
        params, state = value
        mean, grads = fz.value_and_grad(loss)(params, x)
        new = sgd.apply(grads, state, params)
        return (value if now and x.mean() < 0 else new), {"loss": mean}

    step = fz.program_step(skips, init=lambda params: (params, sgd.init(params)))
    # Each run but the first comes after one that failed
    made = r"step \d's( \(era \d\))? result of"
    story = rf"the next value's tree '0'.a is step \d's value.0.a on rank 0 and {made}"
    check_refused(step, level, MismatchError, story, UNLIKE)
    check_right(step, level, torch.cat([-X[:4].abs()] * 2))  # where all ranks skip


def assigned(params: Any, k: Any) -> Any:
    made = tree_map(lambda p: p, params)
    getattr(made, "tree", made)["a"] = (params["a"] * k).requires_grad_()
    return tree_map(lambda p: p, made)


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


@pytest.mark.parametrize(("name", "level"), crossed(DISPLACED, LEVELS, quick=1))
def test_displaced_params_that_differ_between_ranks_are_refused(name: str, level: int) -> None:
    """They never reach the next value: gradients at them are means over ranks."""

    def program(value: Any, x: Tensor, now: bool) -> Any:
        params, trained = value
        params = DISPLACED[name](params, x.mean() if now else 0.5)
        mean, grads = fz.value_and_grad(loss)(params, x)
        new = fz.apply_updates(trained, tree_map(lambda g: -0.1 * g, grads))
        return (trained, new), {"loss": mean}

    step = fz.program_step(program, init=lambda p: (p, tree_map(lambda x: x * 1, p)))
    check_own(step, level, r"tree 1 in call \d \(value_and_grad\).* is")


@pytest.mark.parametrize("level", tiers([3], [0, 1]))
def test_a_displaced_tree_that_is_only_read_is_compared(level: int) -> None:
    def near(params: Any, centre: Any, x: Tensor) -> Tensor:
        params, centre = fz.unshard((params, centre))
        return loss(params, x) + (params["a"] - centre["a"]).square().sum()

    def program(params: Any, x: Tensor, now: bool) -> Any:
        centre = tree_map(lambda p: p.detach() * (x.mean() if now else 0.5), params)
        mean, grads = fz.value_and_grad(near)(params, centre, x)
        return fz.apply_updates(params, tree_map(lambda g: -0.1 * g, grads)), {"loss": mean}

    step = fz.program_step(program, init=lambda params: params)
    story = r"tree 2 in call \d \(value_and_grad\).a is"
    check_own(step, level, story)


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


@pytest.mark.parametrize(("name", "level"), crossed(STATES, LEVELS, quick=1))
def test_numbers_in_a_state_that_differ_between_ranks_are_refused(name: str, level: int) -> None:
    """No operator of the program touches a leaf of the state."""
    optimizer, change = STATES[name]

    def program(value: Any, x: Tensor, now: bool) -> Any:
        params, state = value
        mean, grads = fz.value_and_grad(loss)(params, x)
        params, state = optimizer.apply(grads, state, params)
        return (params, change(state, x) if now else state), {"loss": mean}

    step = fz.program_step(program, init=lambda params: (params, optimizer.init(params)))
    story = r"the next value's tree '1'\.\w+.* is .* on rank 0 and .* on rank 1"
    check_own(step, level, story)


def by_size(params: Any, state: Any) -> Any:
    size = sum(mu.abs().sum() for mu in optree.tree_leaves(state.mu))
    return tree_map(lambda p: p / size, params), state


def restarted(params: Any, state: Any) -> Any:
    """Of momentum, with the count of steps, which every rank has."""
    kept = 1 / (1 + state.count)
    return params, state._replace(mu=tree_map(lambda m: m * kept, state.mu))


@pytest.mark.parametrize(("change", "level"), crossed([by_size, restarted], LEVELS))
def test_pieces_in_an_optimizers_state(change: Any, level: int) -> None:
    def program(value: Any, x: Tensor, now: bool) -> Any:
        params, state = value
        loss_value, grads = fz.value_and_grad(loss)(params, x)
        new = adam.apply(grads, state, params)
        return (change(*new) if now else new), {"loss": loss_value}

    step = fz.program_step(program, init=lambda params: (params, adam.init(params)))
    if change is restarted or level == 0:
        check_right(step, level)
    else:
        check_refused(step, level, StructureError, REFUSED.format("sum"))


def test_leaves_in_init() -> None:
    def init(params: Any) -> Any:
        return {"params": params, "size": sum(p.abs().sum() for p in params.values())}

    step = fz.program_step(lambda value: (value, {}), init=init)

    def run(group: Any) -> None:
        with pytest.raises(StructureError, match=r"not elementwise.*test_leaves\.py:\d+"):
            fz.shard(step, level=3, group=group).init(FIRST)
        whole = fz.shard(step, level=1, group=group)  # held whole: right as it stands
        assert_equal_values(step.init(FIRST), whole.unshard(whole.init(FIRST)))

    run_ranks(run, 2)


@pytest.mark.parametrize("level", tiers([3, 0], [1]))
def test_held_leaves_that_are_whole_may_be_used_at_will(level: int) -> None:
    """One rank alone may log one."""
    logged = []

    def change(grads: Any, params: Any, x: Tensor) -> Any:
        size = sum(p.square().sum() for p in optree.tree_leaves(params))
        if x.mean() > 0:
            logged.append(float(params["a"].norm()))
        return tree_map(lambda g: g / size, grads)

    if level == 3:
        check_refused(step_with(change), level, StructureError, REFUSED.format("sum"), UNLIKE)
    else:
        check_right(step_with(change), level, UNLIKE)
        assert logged
