"""Steps that are given or return something wrong, sharded or not: the error names it."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from optree import tree_leaves, tree_map
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import optim, testing
from functorch_zero.errors import MismatchError, StructureError, TransformError
from functorch_zero.groups import Group, SingleRank, run_ranks
from functorch_zero.params import as_local
from functorch_zero.sharded.program.step import ShardedStep
from tests.test_wrong_input import (
    APPLY,
    BUFFERS,
    DEEPER,
    NARROWER,
    NESTED,
    NET,
    PARAMS,
    PIECES,
    PLAIN,
    QUANTIZED,
    RANKS,
    X,
    by_pieces,
    by_pieces_of,
    loss_fn,
    make,
)
from tests.tiers import tiers

EACH_LEVEL = tiers([None, 3], [0])  # None: the unsharded step


class Numbers(NamedTuple):
    """An optimizer's state of Python's own things."""

    count: Any


def counting(constructor: Any) -> Any:
    """SGD that counts with a Python number, and writes a diary."""

    def init(params: Any) -> Any:
        return Numbers((0, "begin"))

    def update(updates: Any, state: Any, params: Any, *across: Any) -> Any:
        count, diary = state.count
        new = tree_map(lambda u: -0.1 / (1 + count) * u, updates)
        return new, Numbers((count + 1, f"{diary}, {count}"))

    return constructor(init, lambda u, s, p: update(u, s, p))


class Stepping(NamedTuple):
    """A step that goes wrong, in `init` or in the call."""

    run: Callable[[Any], Any]  # of a step, as `make` or `shard` makes it
    error: type[Exception]
    words: str
    loss: Any = loss_fn
    optimizer: Any = None
    levels: tuple[int | None, ...] = (None, 0, 3)
    accumulate: int = 1
    trainable: Any = None


def first(step: Any, params: Any = PARAMS, buffers: Any = BUFFERS, batch: Any = X) -> Any:
    return step(step.init(params, buffers), batch)


def evaluation(step: Any, metrics: Any = None) -> Any:
    """An evaluation, sharded as a step is."""
    whole = fz.eval_step(lambda p, b, x: metrics or {"mean": loss_fn(p, b, x)})
    sharded = isinstance(step, ShardedStep)
    return fz.shard(whole, level=step.level, group=step.group) if sharded else whole


def of(optimizer: Any) -> Callable[[Any], Any]:
    """A step with the state of another optimizer."""

    def run(step: Any) -> Any:
        state = step.init(PARAMS)
        other = optimizer.init(PARAMS)
        return step(state.replace(opt_state=other), X)

    return run


def of_other_rule(step: Any) -> Any:
    """The state of the same step, but for the leaves that are trained."""
    sharded = isinstance(step, ShardedStep)
    rule = lambda path, leaf: path.endswith("weight")
    whole = fz.train_step(loss_fn, optim.adamw(0.1), trainable=rule)
    other = fz.shard(whole, level=step.level, group=step.group) if sharded else whole
    return other.init(PARAMS)


def of_other_net(step: Any) -> Any:
    return step(step.init(PARAMS).replace(opt_state=step.init(DEEPER).opt_state), X)


def replaced(change: Callable[[Tensor], Any]) -> Callable[[Any], Any]:
    """A step with other leaves of params."""

    def run(step: Any) -> Any:
        state = step.init(PARAMS)
        return step(state.replace(params=tree_map(change, state.params)), X)

    return run


def of_narrower_net(step: Any) -> Any:
    """Whose leaves broadcast to those of the net."""
    return step(step.init(PARAMS).replace(opt_state=step.init(NARROWER).opt_state), X)


def whole_leaves(step: Any) -> Any:
    state, leaves = step.init(PARAMS), iter(PARAMS.values())
    return step(state.replace(params=tree_map(lambda piece: next(leaves), state.params)), X)


def with_buffers(new: Any) -> Any:
    return lambda params, buffers, x: (loss_fn(params, {}, x), fz.Aux(buffers=new(buffers)))


def with_metrics(metrics: Any) -> Any:
    return lambda params, buffers, x: (loss_fn(params, {}, x), fz.Aux(metrics=metrics))


@torch.jit.script
def penalty(w: Tensor) -> Tensor:
    return (w * w).sum()


ON_META = tree_map(lambda p: p.detach().to("meta").requires_grad_(), PARAMS)

OPT_STATE = r"(state.opt_state|the optimizer's state)"
STEPS = {
    "init: a module": Stepping(
        lambda step: step.init(NET),
        StructureError,
        r"params must be tensors: path \(root\), got Sequential. Remedy: .*fz.functionalize\(model",
    ),
    "init: numbers": Stepping(
        lambda step: step.init({"w": 1.0}),
        StructureError,
        r"params must be tensors: path w, got float. Remedy: .*torch.as_tensor",
    ),
    "init: buffers of numbers": Stepping(
        lambda step: step.init(PARAMS, {"n": 1.0}),
        StructureError,
        r"buffers must be tensors: path n, got float. Remedy",
    ),
    "init: meta": Stepping(
        lambda step: first(step, ON_META),
        StructureError,
        r"no values: path \S*0.weight, .*got one on the meta device. Remedy: .*deferred_init",
    ),
    "init: sparse": Stepping(
        lambda step: step.init({"w": X.to_sparse().requires_grad_()}),
        StructureError,
        r"path w, expected torch.strided, got torch.sparse_coo. Remedy: .*to_dense",
    ),
    "init: a state": Stepping(
        lambda step: step.init(step.init(PARAMS)),
        StructureError,
        r"params hold a state.*got a State. Remedy: pass state.params",
    ),
    "init: a state's value, in a dict": Stepping(
        lambda step: step.init({"net": step.init(PARAMS).value}),
        StructureError,
        r"params hold a state.*got a TrainValue. Remedy: pass state.params",
    ),
    "init: sharded params": Stepping(
        lambda step: step.init(step.init(PARAMS).params),
        StructureError,
        r"a sharded tree lies in params.*got a ShardedTree, .*Remedy: pass fz.unshard\(tree\)",
        levels=(0, 3),
    ),
    "init: sharded params, unsharded": Stepping(
        lambda step: step.init(PIECES), StructureError, r"a sharded tree lies in params.*Remedy"
    ),
    "init: sharded buffers": Stepping(
        lambda step: step.init(PARAMS, {"n": PIECES}),
        StructureError,
        r"a sharded tree lies in buffers.*Remedy",
    ),
    "evaluation: params": Stepping(
        lambda step: evaluation(step)(PARAMS, X),
        TypeError,
        r"what step.init made; got a Params",
    ),
    "state: params": Stepping(
        lambda step: step(PARAMS, X), TypeError, r"a step takes \(state, batch\).*got a Params"
    ),
    "init: quantized": Stepping(
        lambda step: step.init({"w": QUANTIZED, "v": PARAMS["0.weight"]}),
        StructureError,
        r"params must be .* can hold: path w, .*got a quantized tensor. Remedy: .*dequantize",
    ),
    "init: nested": Stepping(
        lambda step: step.init({"w": NESTED}),
        StructureError,
        r"params must be .* can hold: path w, .*got a nested tensor. Remedy",
    ),
    "init: numbers as names": Stepping(
        lambda step: step.init(fz.Params({0: PARAMS["0.weight"]})),  # type: ignore[dict-item]
        StructureError,
        r"params have a name that is no text: path 0, got int. Remedy: .*dotted paths",
    ),
    "state: numbers": Stepping(
        replaced(lambda p: 1.0), StructureError, r"path 0.weight, .*got float.*Remedy"
    ),
    "state: numpy": Stepping(
        replaced(lambda p: p.detach().numpy()),
        StructureError,
        r"path 0.weight, .*got ndarray.*Remedy|Tensor.numpy reads their values.*0.weight. Remedy",
    ),
    "state: sparse": Stepping(
        replaced(lambda p: p.detach().to_sparse()),
        StructureError,
        r"path 0.weight, expected torch.strided, got torch.sparse_coo.*Remedy|"
        r"_to_sparse.* is not elementwise.*0.weight. Remedy",
    ),
    "state: no params": Stepping(
        lambda step: step(step.init(PARAMS).replace(params=None), X),
        StructureError,
        r"(state.params .*got a NoneType|of which no leaf is trained).*Remedy",
    ),
    "state: a step with dims": Stepping(
        lambda step: step(step.init(PARAMS).replace(step=torch.zeros(2)), X),
        StructureError,
        r"state.step is no counter: expected a 0-d int64 tensor, got \(2,\)",
    ),
    "state: to be sharded, of adamax": Stepping(
        lambda step: step.shard(make(optimizer=optim.adamax(0.1)).init(PARAMS)),
        StructureError,
        r"state.opt_state .*this leaf is in a \w+ in place of a \w+.*Remedy: pass",
        optimizer=optim.adam(0.1),
        levels=(0, 3),
    ),
    "state: to be sharded, params": Stepping(
        lambda step: step.shard(PARAMS), TypeError, r"got a Params", levels=(0, 3)
    ),
    "state: of sgd": Stepping(
        of(optim.sgd(0.1)),
        StructureError,
        rf"{OPT_STATE} .*path 0.count, expected 12 leaves .*got 2 .*missing.*Remedy: pass",
    ),
    "state: of lion": Stepping(
        of(optim.lion(0.1)), StructureError, rf"{OPT_STATE} .*path 0.nu.0.weight.*Remedy"
    ),
    "state: of adamax, with the same leaves": Stepping(
        of(optim.adamax(0.1)),
        StructureError,
        rf"{OPT_STATE} .*path 0, .*this leaf is in a \w+ in place of a \w+.*Remedy: pass",
        optimizer=optim.adam(0.1),
    ),
    "state: of a narrower net": Stepping(
        of_narrower_net,
        StructureError,
        rf"{OPT_STATE} has another shape.*path 0.mu.0.weight, expected .*Remedy: pass|"
        r"a state that it has not made of these params: .*0.weight: \(1, 3\).*Remedy",
    ),
    "state: of another net": Stepping(
        of_other_net,
        StructureError,
        r"path 0.mu.3.weight.*not expected.*Remedy|"
        r"a state that it has not made of these params: .*and 2 more.*Remedy",
    ),
    "state: whole, of the optimizer": Stepping(
        of(optim.adamw(0.1)),
        StructureError,
        r"path 0.mu.0.weight, expected a piece, Extent\(.*, got shape \(2, 3\), on rank \d. Remedy",
        levels=(3,),
    ),
    "state: of a program": Stepping(
        lambda step: step(step.init(PARAMS).replace(value={"net": PARAMS}), X),
        StructureError,
        r"of another program: expected the value of step.init, a TrainValue, got a dict.*Remedy|"
        r"state was sharded by another step.*Remedy|another structure.*Remedy",
    ),
    "state: a dict": Stepping(
        lambda step: step(step.init(PARAMS).replace(params=PLAIN), X),
        StructureError,
        r"(by a whole tree: .*got a dict, on rank|in a Params in place of a dict).* Remedy: ",
    ),
    "state: whole params": Stepping(
        lambda step: step(step.init(PARAMS).replace(params=PARAMS), X),
        StructureError,
        r"replaced by a whole tree: expected a ShardedTree.*got a Params, on rank \d. "
        r"Remedy: fz.shard_tree\(tree, layout_like=state.params\)",
        levels=(0, 3),
    ),
    "state: whole leaves": Stepping(
        whole_leaves,
        StructureError,
        r"path 0.weight, expected a piece, Extent\(.*, got shape \(2, 3\), on rank \d. Remedy",
        levels=(3,),
    ),
    "loss: apply without buffers": Stepping(
        first, StructureError, r"got Tensor for buffers", lambda p, b, x: APPLY(p, x)[0].mean()
    ),
    "loss: buffers of numbers": Stepping(
        lambda step: first(step, buffers={"n": torch.ones(2)}),
        StructureError,
        r"a new buffer is no tensor: path n, got float.*Remedy",
        with_buffers(lambda b: {"n": 1.0}),
    ),
    "init: buffers first": Stepping(
        lambda step: step.init({}, PARAMS),
        StructureError,
        r"params have no leaves: got a dict. Remedy: step.init\(params, buffers\)",
    ),
    "init: trainable chooses none": Stepping(
        first,
        StructureError,
        r"trainable chose none: got leaves 0.weight, 0.bias, 2.weight, .... Remedy",
        trainable=lambda path, leaf: path == "head",
    ),
    "batch: unequal rows": Stepping(
        lambda step: first(step, batch={"x": X, "k": torch.ones(5)}),
        StructureError,
        r"unequal rows: path x, expected 5, as k has, got 2. Remedy: .*close over",
        accumulate=2,
    ),
    "state: of a step that trains others": Stepping(
        lambda step: step(of_other_rule(step), X),
        StructureError,
        r"trains other leaves: path 0.weight, expected frozen, got trained.*Remedy: .*own init",
        trainable=lambda path, leaf: path.endswith("bias"),
    ),
    "loss: a number": Stepping(
        first,
        StructureError,
        r"not a scalar: .*got float.*Remedy: return the 0-d tensor itself, without .item\(\)",
        lambda p, b, x: loss_fn(p, b, x).item(),
    ),
    "loss: a dict": Stepping(
        first,
        StructureError,
        r"not a scalar: .*got dict.*Remedy: return the loss, or \(loss, fz.Aux",
        lambda p, b, x: {"loss": loss_fn(p, b, x)},
    ),
    "loss: none": Stepping(
        first, StructureError, r"got NoneType.*return the loss", lambda p, b, x: None
    ),
    "loss: a sharded teacher": Stepping(
        first,
        StructureError,
        r"apply was given a sharded tree .*Remedy: make it an argument.*trainable=",
        lambda p, b, x: loss_fn(p, b, x) + loss_fn(PIECES, b, x),
    ),
    "loss: written to": Stepping(
        first,
        StructureError,
        r"changed in place.*(path 0.weight|got a write to a leaf of unit 0).*Remedy",
        lambda p, b, x: loss_fn(p, b, x) + 0 * p["0.weight"].detach().zero_().sum(),
    ),
    "loss: of copies": Stepping(
        first,
        StructureError,
        r"the loss does not depend on any trained leaf.*Remedy: compute it from the `params`",
        lambda p, b, x: loss_fn(
            tree_map(lambda leaf: leaf.detach().requires_grad_(), fz.unshard(p)), b, x
        ),
        levels=(None, 0, 1, 2, 3),
    ),
    "loss: fewer buffers": Stepping(
        lambda step: first(step, buffers={"n": torch.ones(2)}),
        StructureError,
        r"Aux.buffers .*path n, .*missing.*Remedy: return the tree of buffers",
        with_buffers(lambda b: {}),
    ),
    "loss: buffers that grow": Stepping(
        lambda step: first(step, buffers={"n": torch.ones(2)}),
        StructureError,
        r"path n, expected \(\(2,\), .*got \(\(4,\), .*on rank \d. Remedy: begin with a buffer",
        with_buffers(lambda b: {"n": b["n"].repeat(2)}),
        levels=(0, 3),
    ),
    "loss: scripted": Stepping(
        first,
        StructureError,
        r"scripted.*expected whole tensors.*on rank \d. Remedy: give it fz.unshard\(param\)",
        lambda p, b, x: loss_fn(p, b, x) + penalty(p["0.weight"]),
        levels=(0, 3),
    ),
    "loss: a dict beside it": Stepping(
        first,
        TypeError,
        r"got dict as the second. Remedy: fz.Aux",
        lambda p, b, x: (loss_fn(p, b, x), {"a": 1.0}),
    ),
    "loss: metrics in a list": Stepping(
        first,
        TypeError,
        r"metrics are no dict: expected real numbers by name, got list.*Remedy",
        with_metrics([1.0]),
    ),
    "loss: a metric with dims": Stepping(
        first,
        StructureError,
        r"path a, expected a number .*got shape \(3,\), torch.float32.*Remedy: .*mean\(\)",
        with_metrics({"a": torch.ones(3)}),
    ),
    "loss: a complex metric": Stepping(
        first,
        StructureError,
        r"path a, .*got shape \(\), torch.complex64.*",
        with_metrics({"a": 1j}),
    ),
    "loss: a metric of text": Stepping(
        first, StructureError, r"path a, .*got str.*Remedy", with_metrics({"a": "fine"})
    ),
    "loss: a metric that is None": Stepping(
        first, StructureError, r"path a, .*got NoneType.*Remedy", with_metrics({"a": None})
    ),
    "loss: metrics in metrics": Stepping(
        first, StructureError, r"path a, .*got dict.*Remedy", with_metrics({"a": {"b": 1.0}})
    ),
    "evaluation: metrics in metrics": Stepping(
        lambda step: evaluation(step, {"a": {"b": 1.0}})(step.init(PARAMS), X),
        StructureError,
        r"path a, .*got dict.*Remedy",
    ),
    "optimizer: updates in a list": Stepping(
        first,
        StructureError,
        r"updates .*leaves in a list.*Remedy",
        optimizer=by_pieces(lambda u, s, p: ([-x for x in tree_leaves(u)], s)),
    ),
    "optimizer: a state that grows": Stepping(
        lambda step: step(first(step)[0], X),
        TransformError,
        r"returns state of 1 leaves where 0 are expected. Remedy: keep the structure",
        optimizer=by_pieces(lambda u, s, p: (u, (*s, torch.ones(())))),
        levels=(0, 3),
    ),
    "optimizer: a question that there isn't": Stepping(
        first,
        AttributeError,
        r"across has no question 'std': expected one of extents, sum, .*Remedy: make it of these",
        optimizer=optim.chain(
            optim.with_statistics(lambda p: (), lambda u, s, p, across: (across.std(u), s)),
            optim.scale(-0.1),
        ),
    ),
    "optimizer: numbers of whole leaves": Stepping(
        first,
        TransformError,
        r"path count.*expected a tensor, got int. Remedy: torch.tensor\(number\)",
        optimizer=optim.with_whole_leaves(lambda p: Numbers(0), lambda u, s: (u, s)),
    ),
}


ROWS = [(name, level) for name, row in STEPS.items() for level in row.levels]


@pytest.mark.parametrize(
    ("name", "level"),
    tiers([row for row in ROWS if row[1] != 0], [row for row in ROWS if row[1] == 0], rows=True),
)
def test_steps(name: str, level: int | None) -> None:
    row = STEPS[name]
    optimizer = optim.adamw(0.1) if row.optimizer is None else row.optimizer
    options: Any = {"accumulate": row.accumulate, "trainable": row.trainable}
    whole = fz.train_step(row.loss, optimizer, **options)
    with pytest.raises(row.error, match=re.compile(row.words, re.DOTALL)):
        if level is None:
            row.run(whole)
        else:
            run_ranks(lambda g: row.run(fz.shard(whole, level=level, group=g)), RANKS, timeout=20)


def fails_in_a_loss(level: int | None, batch: Any) -> None:
    first(make(lambda p, b, batch: loss_fn(p, b, batch["x"]), level=level), batch=batch)


def fails_in_an_evaluation(level: int | None, batch: Any) -> None:
    evaluate = fz.eval_step(lambda p, b, batch: {"mean": loss_fn(p, b, batch["x"])})
    if level is not None:
        evaluate = fz.shard(evaluate, level=level, group=SingleRank())
    evaluate(make(level=level).init(PARAMS), batch)


def fails_in_a_program(level: int | None, batch: Any) -> None:
    params: Any = PARAMS
    if level is not None:
        params = fz.shard_tree(PARAMS, level=level, group=SingleRank())
    fz.value_and_grad(lambda p, batch: loss_fn(p, {}, batch["x"]))(params, batch)


FAILING: dict[str, Callable[[int | None, Any], None]] = {
    "loss": fails_in_a_loss,
    "evaluation": fails_in_an_evaluation,
    "program": fails_in_a_program,
}


@pytest.mark.parametrize("level", EACH_LEVEL)
@pytest.mark.parametrize("where", FAILING)
@pytest.mark.parametrize(
    "batch", [{"x": X.numpy()}, {"x": X.float()}, {"x": X[:, :2]}], ids=["numpy", "dtype", "shape"]
)
def test_a_failing_function_names_its_batch(batch: Any, where: str, level: int | None) -> None:
    with pytest.raises((RuntimeError, TypeError)) as caught:
        FAILING[where](level, batch)
    kind = "a ndarray" if not isinstance(batch["x"], Tensor) else str(tuple(batch["x"].shape))
    (note,) = caught.value.__notes__
    function = "evaluation" if where == "evaluation" else "loss"
    assert note.startswith(f"The {function} was given this batch: x: {kind}")


@pytest.mark.parametrize("level", EACH_LEVEL)
def test_a_failing_program_names_its_arguments_but_no_sharded_trees(level: int | None) -> None:
    def loss(params: Any, teacher: Any, x: Tensor, y: Tensor) -> Tensor:
        return loss_fn(params, {}, x) + (x @ y).mean()

    student, teacher = PARAMS, PARAMS
    if level is not None:
        student = fz.shard_tree(PARAMS, level=level, group=SingleRank())
        teacher = fz.shard_tree(PARAMS, layout_like=student)
    with pytest.raises(RuntimeError) as caught:
        fz.value_and_grad(loss)(student, teacher, X, X)
    (note,) = caught.value.__notes__
    assert "1: (2, 3) torch.float64 on cpu, 2: (2, 3) torch.float64 on cpu" in note
    assert ("0.0.weight" in note) == (level is None)


BIASES = {id(p) for path, p in PARAMS.items() if path.endswith("bias")}
RULES: dict[str, Any] = {
    "identity": lambda path, leaf: id(leaf) in BIASES,
    "values": lambda path, leaf: bool(leaf.sum() > 0),
    "grad": lambda path, leaf: leaf.requires_grad,
    "shape": lambda path, leaf: leaf.ndim == 2,
    "tree": tree_map(lambda p: p.ndim == 2, PARAMS),
}


@pytest.mark.parametrize("level", EACH_LEVEL)
@pytest.mark.parametrize("rule", RULES)
def test_rules_of_trained_leaves_that_their_own_states_follow(rule: str, level: int | None) -> None:
    step: Any = fz.train_step(loss_fn, optim.adamw(0.1), trainable=RULES[rule])
    if level is not None:
        step = fz.shard(step, level=level, group=SingleRank())
    state = step.init(PARAMS)
    for _ in range(2):
        state, _ = step(state.replace(params=tree_map(torch.detach, state.params)), X)


@pytest.mark.parametrize("level", EACH_LEVEL)
def test_states_print_shapes_and_no_values(level: int | None) -> None:
    step = make(level=level)
    state = step.init(PARAMS, BUFFERS)
    place = "whole" if level is None else f"sharded, level {level}, rank 0"
    assert repr(state).startswith(f"State(step 0, {place}; params: ")
    assert "0.weight: (2, 3) torch.float64" in repr(state)
    assert "opt_state: " in repr(state)
    assert "and 8 more" in repr(state)  # of the optimizer's leaves
    step(state, X)
    # Donated: its optimizer's leaves are the next state's by now
    assert ("donated to a step" in repr(state)) == (level is not None)
    for text in (repr(state), repr(PIECES), repr(optim.adam(0.1).init(PIECES))):
        assert "tensor(" not in text
        assert len(text) < 1000


@pytest.mark.parametrize("level", EACH_LEVEL)
def test_a_loss_that_runs_backward_gets_a_note(level: int | None) -> None:
    def loss(params: Any, buffers: Any, x: Tensor) -> Tensor:
        value = loss_fn(params, buffers, x)
        value.backward()  # type: ignore[no-untyped-call]
        return value

    with pytest.raises(RuntimeError, match="second time") as caught:
        first(make(loss, level=level))
    (note,) = caught.value.__notes__
    assert "Remedy: return the loss without .backward()" in note


@pytest.mark.parametrize("constructor", tiers([optim.pointwise], [optim.with_statistics]))
def test_states_of_numbers_and_text(constructor: Any) -> None:
    whole = fz.train_step(loss_fn, counting(constructor))
    state = whole.init(PARAMS)
    for _ in range(3):
        state, _ = whole(state, X)
    assert state.opt_state == Numbers((3, "begin, 0, 1, 2"))

    for level in (0, 3):

        def rank(group: Group, level: int = level) -> Any:
            step = fz.shard(whole, level=level, group=group)
            state = step.init(PARAMS)
            for _ in range(3):
                state, _ = step(state, X)
            return step.unshard(state)

        for got in run_ranks(rank, RANKS, timeout=20):
            assert got.opt_state == state.opt_state
            for path, leaf in state.params.items():
                torch.testing.assert_close(got.params[path], leaf, rtol=1e-12, atol=1e-12)


def test_a_state_that_grows_unsharded() -> None:
    step = make(optimizer=by_pieces(lambda u, s, p: (u, (*s, torch.ones(())))))
    with pytest.raises(StructureError, match=r"next value.*path opt_state.0.*Remedy: return"):
        first(step)


def test_a_state_is_compared_once_with_that_of_init() -> None:
    """Init may be slow and draw random numbers, so steps call it for states from elsewhere only."""
    calls = []

    def init(params: Any) -> Any:
        calls.append(None)
        return tree_map(torch.rand_like, params)

    step = make(optimizer=by_pieces_of(init))
    state = make(optimizer=by_pieces_of(init)).init(PARAMS, seed=None)
    del calls[:]
    before = torch.get_rng_state()
    for _ in range(3):
        state, _ = step(state, X)
    assert len(calls) == 1
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("tied", tiers([True], [False]))
def test_sparse_gradients(tied: bool) -> None:
    """An embedding's gradient is dense to the optimizer, also where the head adds a dense one."""
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 5, bias=False)).double()
    if tied:
        model[1].weight = model[0].weight
    apply, params, _ = fz.functionalize(model)

    def loss(params: Any, buffers: Any, ids: Tensor) -> Tensor:
        return (apply(params, {}, ids)[0] ** 2).mean()

    step = fz.train_step(loss, optim.adamw(0.1), accumulate=2)
    batches = [torch.tensor([0, 1, 1, 4]), torch.tensor([2, 3, 4, 0])]
    testing.assert_sharded_equals_unsharded(step, params, {}, batches, ranks=(1, 2))
    grads = fz.value_and_grad(loss)(params, {}, batches[0])[1]
    assert all(grad.layout == torch.strided for grad in grads.values())


WRONG_LEAVES: dict[str, tuple[Any, str]] = {
    "module": (NET, r"path w, got Sequential. Remedy: .*functionalize"),
    "numbers": (1.0, r"path w, got float. Remedy"),
    "numpy": (X.numpy(), r"path w, got ndarray. Remedy"),
    "sparse": (X.to_sparse(), r"path w, .*got torch.sparse_coo. Remedy"),
    "quantized": (QUANTIZED, r"path w, .*got a quantized tensor. Remedy"),
    "nested": (NESTED, r"path w, .*got a nested tensor. Remedy"),
    "meta": (X.to("meta"), r"no values: path (0.)?w, .*Remedy"),
}


@pytest.mark.parametrize("level", EACH_LEVEL)
@pytest.mark.parametrize("name", WRONG_LEAVES)
def test_a_program_with_leaves_that_are_none(name: str, level: int | None) -> None:
    leaf, words = WRONG_LEAVES[name]
    tree: Any = {"w": leaf, "v": PARAMS["0.weight"]}
    with pytest.raises(StructureError, match=re.compile(words, re.DOTALL)):
        if level is not None:
            tree = fz.shard_tree(tree, level=level, group=SingleRank())
        fz.value_and_grad(lambda tree, x: tree["v"].sum())(tree, X)


@pytest.mark.parametrize("level", [0, 3])
def test_a_program_without_leaves(level: int) -> None:
    tree = fz.shard_tree({}, level=level, group=SingleRank())
    with pytest.raises(StructureError, match="no leaf is trained"):
        fz.value_and_grad(lambda tree, x: x.sum())(tree, X)


@pytest.mark.parametrize("level", EACH_LEVEL)
def test_params_that_are_lazily_conjugated(level: int | None) -> None:
    """A view with the conjugate bit is stored as any other tensor."""
    weight = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128)
    results = []
    for tree in ({"w": weight.conj()}, {"w": weight.conj().resolve_conj()}):
        params: Any = {"w": tree["w"].requires_grad_()}
        if level is not None:
            params = fz.shard_tree(params, level=level, group=SingleRank())
        optimizer = optim.adam(0.1)
        program = fz.value_and_grad(lambda p, x: (p["w"].conj() * p["w"]).real.sum())
        state, grads = optimizer.init(params), program(params, X)[1]
        updates, _ = optimizer.update(grads, state, params)
        results.append(fz.unshard(fz.apply_updates(params, updates))["w"])
    assert torch.equal(*results)
    assert not torch.equal(results[0], weight.conj())


@pytest.mark.parametrize("level", EACH_LEVEL)
def test_a_deep_copy_of_params_in_a_loss(level: int | None) -> None:
    """It is new leaves, to which no gradient of the step flows."""

    def loss(params: Any, buffers: Any, x: Tensor) -> Tensor:
        return (loss_fn(params, {}, x) - loss_fn(deepcopy(params), {}, x) / 2) ** 2

    expected, _ = first(make(loss))
    step = make(loss, level=level)
    state, _ = first(step)
    whole = state if level is None else step.unshard(state)
    for path, leaf in expected.params.items():
        torch.testing.assert_close(whole.params[path], leaf, rtol=1e-12, atol=1e-12)
    with pytest.raises(StructureError, match="does not depend on any trained leaf"):
        first(make(lambda p, b, x: loss_fn(deepcopy(p), b, x), level=level))


@pytest.mark.parametrize("level", EACH_LEVEL)
def test_a_0d_param_is_a_loss(level: int | None) -> None:
    params = {"w": torch.tensor(2.0, requires_grad=True)}
    step = make(lambda params, buffers, batch: params["w"], optim.sgd(0.5), level)
    state, metrics = step(step.init(params), X)
    assert float(metrics["loss"]) == 2.0
    (leaf,) = tree_leaves(as_local(state.params))
    assert leaf.item() == 1.5


@pytest.mark.parametrize("level", EACH_LEVEL)
def test_new_leaves_that_require_grad(level: int | None) -> None:
    """Params and moments replaced by others that require grad: right, and in no graph."""
    step, plain = make(level=level), make()
    state, other = step.init(PARAMS), plain.init(PARAMS)
    for _ in range(2):
        state = tree_map(_requiring_grad, state)
        state, metrics = step(state, X)
        other, expected = plain(other, X)
        assert float(metrics["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-12)


def _requiring_grad(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_() if x.is_floating_point() else x


def test_a_generator_of_batches() -> None:
    testing.assert_sharded_equals_unsharded(
        make(),
        PARAMS,
        {},
        (X for _ in range(2)),  # type: ignore[arg-type]
        ranks=(2,),
        levels=(1,),
    )


def test_ranks_of_other_models() -> None:
    def rank(group: Group) -> None:
        params = {"w": torch.ones(3, 2 + group.rank, requires_grad=True)}
        step = fz.train_step(lambda p, b, x: p["w"].sum(), optim.sgd(0.1))
        fz.shard(step, level=1, group=group).init(params)

    words = r"layout of params.leaves.w.shape is \[3, 2\] on rank 0 and \[3, 3\] on rank 1"
    with pytest.raises(MismatchError, match=words):
        run_ranks(rank, RANKS, timeout=20)


def test_ranks_that_save_to_different_folders(tmp_path: Path) -> None:
    def rank(group: Group) -> None:
        step = fz.shard(make(), level=1, group=group)
        fz.checkpoint.save(tmp_path / str(group.rank), step, step.init(PARAMS))

    with pytest.raises(MismatchError, match=r"the folder is .* on rank 0 and .* on rank 1.*Remedy"):
        run_ranks(rank, RANKS, timeout=20)
    assert not [*tmp_path.rglob("*.json")]


def test_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    def cell() -> None: ...

    cell.__module__ = "__main__"
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    with pytest.raises(TypeError, match=r'notebook.*Remedy: launch\(.*start_method="fork"'):
        fz.launch(cell, 2)


def test_a_host_without_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "loopback0"), (2, "eth0")])
    words = r"expected lo, got \['loopback0', 'eth0'\]. Remedy: set GLOO_SOCKET_IFNAME"
    with pytest.raises(fz.errors.GroupError, match=words):
        fz.launch(sum, 2)
