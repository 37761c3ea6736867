"""Wrong input, one row each: the call, its error's class, and words that the error holds.

Rows of steps run unsharded and, on 2 thread ranks, at levels 0 and 3.
"""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Callable
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

RANKS = 2
LEVELS = [None, 0, 3]  # None: the unsharded step

NET = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1)).double()
APPLY, PARAMS, BUFFERS = fz.functionalize(NET)
DEEPER = fz.functionalize(nn.Sequential(*NET, nn.Linear(1, 1)).double())[1]
X = torch.arange(6.0, dtype=torch.float64).view(2, 3)


def loss_fn(params: Any, buffers: Any, x: Any) -> Any:
    return (APPLY(params, buffers, x)[0] ** 2).mean()


def make(loss: Any = loss_fn, optimizer: Any = None, level: int | None = None, **init: Any) -> Any:
    """A step, or the step of one rank alone."""
    step = fz.train_step(loss, optim.adamw(0.1) if optimizer is None else optimizer)
    return step if level is None else fz.shard(step, level=level, group=SingleRank())


class Call(NamedTuple):
    """One call that goes wrong."""

    run: Callable[[], Any]
    error: type[Exception]
    words: str  # a regular expression


def by_pieces(update: Any) -> Any:
    return optim.pointwise(lambda params: (), update)


def negate(updates: Any, state: Any, params: Any) -> Any:
    return tree_map(torch.neg, updates), state


PAIR = (lambda params: (), lambda updates, state, params=None: (updates, state))
TORCH = torch.optim.SGD(NET.parameters(), lr=0.1)
PIECES = fz.shard_tree(PARAMS, level=3, group=SingleRank())
GRADS = fz.value_and_grad(lambda p: sum((x**2).sum() for x in p.values()))(PIECES)[1]
PLAIN: dict[str, Any] = dict(PARAMS)
WRONG: Any = None  # the type of what is wrong by type

CALLS = {
    "optimizer: lr": Call(
        lambda: optim.adamw(lr=0.1),  # type: ignore[call-arg]
        TypeError,
        r"adamw\(\): .*expected learning_rate, b1, .*Remedy: torch's lr is learning_rate",
    ),
    "optimizer: betas": Call(
        lambda: optim.adamw(0.1, betas=(0.9, 0.99)),  # type: ignore[call-arg]
        TypeError,
        r"torch's betas is b1 and b2",
    ),
    "optimizer: params": Call(
        lambda: optim.adamw(PARAMS),  # type: ignore[arg-type]
        TypeError,
        r"adamw's learning_rate is no number.*got Params.*params are given to `init`",
    ),
    "optimizer: text": Call(
        lambda: optim.adamw("1e-2"),  # type: ignore[arg-type]
        TypeError,
        r"expected a number or a schedule, got str '1e-2'. Remedy: convert text with float",
    ),
    "optimizer: text, elsewhere": Call(
        lambda: optim.clip_by_global_norm("1"),  # type: ignore[arg-type]
        TypeError,
        r"clip_by_global_norm's max_norm is no number: expected a number or a schedule, got str",
    ),
    "optimizer: negative": Call(
        lambda: optim.adamw(-0.1), ValueError, r"learning_rate.*expected >= 0, got -0.1. Remedy"
    ),
    "transform: a pair": Call(
        lambda: make(optimizer=PAIR),
        TypeError,
        r"optimizer must be an optim.Transform, got tuple. Remedy: optim.from_optax\(",
    ),
    "transform: torch's": Call(
        lambda: make(optimizer=TORCH),
        TypeError,
        r"got SGD. Remedy: optim.sgd\(...\), or optim.from_torch\(torch.optim.SGD, ...\) if",
    ),
    "transform: torch's class": Call(
        lambda: optim.masked(torch.optim.Adam, lambda path, leaf: True),  # type: ignore[arg-type]
        TypeError,
        r"masked's inner must be .* got type Adam. Remedy: optim.adam\(...\), or optim.from_torch",
    ),
    "transform: not called": Call(
        lambda: testing.check_transform(optim.lion),  # type: ignore[arg-type]
        TypeError,
        r"got function lion. Remedy: call the factory: lion\(...\)",
    ),
    "transform: in a chain": Call(
        lambda: optim.chain(optim.sgd(0.1), optim.sgd),  # type: ignore[arg-type]
        TypeError,
        r"chain's argument 1 must be .*call the factory: sgd",
    ),
    "transform: in a partition": Call(
        lambda: optim.partition({"a": PAIR}, lambda path, leaf: "a"),  # type: ignore[dict-item]
        TypeError,
        r"partition's 'a' must be an optim.Transform, got tuple",
    ),
    "transform: from an instance": Call(
        lambda: optim.from_torch(TORCH),  # type: ignore[arg-type]
        TypeError,
        r"from_torch takes a class .*got SGD. Remedy: from_torch\(torch.optim.SGD, lr=0.1\)",
    ),
    "author: too few arguments": Call(
        lambda: by_pieces(lambda updates, state: (updates, state)),
        TypeError,
        r"pointwise's update .*expected \(updates, state, params\) or .*got .*\(updates, state\)",
    ),
    "author: init without params": Call(
        lambda: optim.with_statistics(lambda: (), negate),
        TypeError,
        r"with_statistics's init .*expected \(params\) or \(params, across\), got .*\(\). Remedy",
    ),
    "author: too many arguments": Call(
        lambda: optim.with_whole_leaves(lambda p: (), lambda u, s, p, across: (u, s)),
        TypeError,
        r"with_whole_leaves' update .*expected \(update, state\) or \(update, state, param\)",
    ),
    "model: a function": Call(
        lambda: fz.functionalize(negate),  # type: ignore[arg-type]
        TypeError,
        r"expected an nn.Module, got function. Remedy: build it",
    ),
    "model: a class": Call(
        lambda: fz.functionalize(nn.Linear),  # type: ignore[arg-type]
        TypeError,
        r"a module that is built: expected an nn.Module, got Linear",
    ),
    "apply: no buffers": Call(
        lambda: APPLY(PARAMS, X),  # type: ignore[arg-type]
        StructureError,
        r"expected apply\(params, buffers, \*inputs\).*got Tensor for buffers. Remedy",
    ),
    "apply: a list": Call(
        lambda: APPLY([*PARAMS.values()], {}, X),  # type: ignore[arg-type]
        StructureError,
        r"got list for params",
    ),
    "apply: numbers": Call(
        lambda: APPLY(dict.fromkeys(PARAMS, 1.0), {}, X),
        StructureError,
        r"path 0.weight, expected \(2, 3\), got float",
    ),
    "loss: none": Call(lambda: make(loss=1.0), TypeError, r"loss_fn must be a function .*float"),
    "group: a number": Call(
        lambda: fz.shard(make(), level=1, group=2),
        TypeError,
        r"group must be a functorch_zero Group.*got 2. Remedy: to start ranks, fz.launch",
    ),
    "trees: a dict of updates": Call(
        lambda: fz.apply_updates(PARAMS, PLAIN),
        StructureError,
        r"the tree of updates .*this leaf is in a dict in place of a Params. Remedy: fz.Params\(",
    ),
    "trees: other updates": Call(
        lambda: fz.apply_updates(PARAMS, DEEPER),
        StructureError,
        r"path 3.weight.*not expected. Remedy: pass the trees that fz.value_and_grad",
    ),
    "trees: a dot with a dict": Call(
        lambda: fz.dot(PARAMS, PLAIN), StructureError, r"the second tree .*fz.Params\("
    ),
    "trees: a dict of params": Call(
        lambda: optim.sgd(0.1).update(PARAMS, optim.sgd(0.1).init(PARAMS), PLAIN),
        StructureError,
        r"the tree of params .*Remedy",
    ),
    "trees: several": Call(
        lambda: fz.apply_updates((PIECES, PIECES), (GRADS, GRADS)),
        StructureError,
        r"held as params are; got tuple. Remedy: .*of several trees pass one at a time",
    ),
    "trees: params and gradients": Call(  # optree's error
        lambda: tree_map(lambda p, g: p - 0.1 * g, PIECES, GRADS),
        ValueError,
        r"as params are held, level 3.*as gradients are \(fz.apply_updates adds them to params\)",
    ),
    "trees: sparse": Call(
        lambda: fz.shard_tree({"w": X.to_sparse()}, level=3, group=SingleRank()),
        StructureError,
        r"must be dense: path w, expected torch.strided, got torch.sparse_coo. Remedy",
    ),
    "equality: one batch": Call(
        lambda: testing.assert_sharded_equals_unsharded(make(), PARAMS, {}, {"x": X}),
        TypeError,
        r"batches is no sequence: expected a list or tuple, got dict. Remedy: batches=\[...\]",
    ),
    "equality: a number of ranks": Call(
        lambda: testing.assert_sharded_equals_unsharded(make(), PARAMS, {}, [X], ranks=WRONG or 2),
        TypeError,
        r"ranks is no sequence.*got int",
    ),
    "equality: one level": Call(
        lambda: testing.assert_sharded_equals_unsharded(
            make(), PARAMS, {}, [X], levels=WRONG or "fsdp"
        ),
        TypeError,
        r"levels is no sequence.*got str",
    ),
    "equality: a sharded step": Call(
        lambda: testing.assert_sharded_equals_unsharded(make(level=1), PARAMS, {}, [X]),
        TypeError,
        r"expected what train_step made, got ShardedTrainStep. Remedy: pass the step before",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    call = CALLS[name]
    with pytest.raises(call.error, match=re.compile(call.words, re.DOTALL)):
        call.run()


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


def first(step: Any, params: Any = PARAMS, buffers: Any = BUFFERS, batch: Any = X) -> Any:
    return step(step.init(params, buffers), batch)


def of(optimizer: Any) -> Callable[[Any], Any]:
    """A step with the state of another optimizer."""

    def run(step: Any) -> Any:
        state = step.init(PARAMS)
        other = optimizer.init(PARAMS)
        return step(state.replace(opt_state=other), X)

    return run


def of_other_net(step: Any) -> Any:
    return step(step.init(PARAMS).replace(opt_state=step.init(DEEPER).opt_state), X)


def whole_leaves(step: Any) -> Any:
    state, leaves = step.init(PARAMS), iter(PARAMS.values())
    return step(state.replace(params=tree_map(lambda piece: next(leaves), state.params)), X)


def with_buffers(new: Any) -> Any:
    return lambda params, buffers, x: (loss_fn(params, {}, x), fz.Aux(buffers=new(buffers)))


@torch.jit.script
def penalty(w: Tensor) -> Tensor:
    return (w * w).sum()


ON_META = tree_map(lambda p: p.detach().to("meta").requires_grad_(), PARAMS)

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
        r"no values: path 0.weight, expected .*got one on the meta device. Remedy: .*deferred_init",
    ),
    "init: sparse": Stepping(
        lambda step: step.init({"w": X.to_sparse().requires_grad_()}),
        StructureError,
        r"path w, expected torch.strided, got torch.sparse_coo. Remedy: .*to_dense",
    ),
    "state: params": Stepping(
        lambda step: step(PARAMS, X), TypeError, r"a step takes \(state, batch\).*got a Params"
    ),
    "state: of sgd": Stepping(
        of(optim.sgd(0.1)),
        StructureError,
        r"state.opt_state .*path 0.count, expected 12 leaves .*got 2 .*missing.*Remedy: pass the",
    ),
    "state: of lion": Stepping(
        of(optim.lion(0.1)), StructureError, r"state.opt_state .*path 0.nu.0.weight.*Remedy"
    ),
    "state: of another net": Stepping(
        of_other_net, StructureError, r"path 0.mu.3.weight.*not expected.*Remedy"
    ),
    "state: whole, of the optimizer": Stepping(
        of(optim.adamw(0.1)),
        StructureError,
        r"path 0.mu.0.weight, expected \(\d\,\), got \(2, 3\), on rank \d. Remedy",
        levels=(3,),
    ),
    "state: a dict": Stepping(
        lambda step: step(step.init(PARAMS).replace(params=PLAIN), X),
        StructureError,
        r"structure.*(got a dict, on rank|in a Params in place of a dict).* Remedy: ",
    ),
    "state: whole params": Stepping(
        lambda step: step(step.init(PARAMS).replace(params=PARAMS), X),
        StructureError,
        r"state.params have another tree structure .*got a Params, on rank \d. Remedy",
        levels=(0, 3),
    ),
    "state: whole leaves": Stepping(
        whole_leaves,
        StructureError,
        r"path 0.weight, expected \(\d,\), got \(2, 3\), on rank \d. Remedy",
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
    "optimizer: updates in a list": Stepping(
        first,
        StructureError,
        r"the optimizer's updates .*leaves in a list.*Remedy",
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


@pytest.mark.parametrize(
    ("name", "level"), [(name, level) for name, row in STEPS.items() for level in row.levels]
)
def test_steps(name: str, level: int | None) -> None:
    row = STEPS[name]
    optimizer = optim.adamw(0.1) if row.optimizer is None else row.optimizer
    whole = fz.train_step(row.loss, optimizer)
    with pytest.raises(row.error, match=re.compile(row.words, re.DOTALL)):
        if level is None:
            row.run(whole)
        else:
            run_ranks(lambda g: row.run(fz.shard(whole, level=level, group=g)), RANKS, timeout=20)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "batch", [{"x": X.numpy()}, {"x": X.float()}, {"x": X[:, :2]}], ids=["numpy", "dtype", "shape"]
)
def test_a_failing_loss_names_its_batch(batch: Any, level: int | None) -> None:
    step = make(lambda params, buffers, batch: loss_fn(params, buffers, batch["x"]), level=level)
    with pytest.raises((RuntimeError, TypeError)) as caught:
        first(step, batch=batch)
    kind = "a ndarray" if not isinstance(batch["x"], Tensor) else str(tuple(batch["x"].shape))
    (note,) = caught.value.__notes__
    assert note.startswith(f"The loss was given this batch: x: {kind}")


@pytest.mark.parametrize("constructor", [optim.pointwise, optim.with_statistics])
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


@pytest.mark.parametrize("tied", [False, True])
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


@pytest.mark.parametrize("level", LEVELS)
def test_a_0d_param_is_a_loss(level: int | None) -> None:
    params = {"w": torch.tensor(2.0, requires_grad=True)}
    step = make(lambda params, buffers, batch: params["w"], optim.sgd(0.5), level)
    state, metrics = step(step.init(params), X)
    assert float(metrics["loss"]) == 2.0
    assert tree_leaves(state.params)[0].item() == 1.5


@pytest.mark.parametrize("level", LEVELS)
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

    words = r"layout.leaves.w.shape is \[3, 2\] on rank 0 and \[3, 3\] on rank 1"
    with pytest.raises(MismatchError, match=words):
        run_ranks(rank, RANKS, timeout=20)


def test_ranks_that_save_to_different_folders(tmp_path: Path) -> None:
    def rank(group: Group) -> None:
        step = fz.shard(make(), level=1, group=group)
        fz.checkpoint.save(tmp_path / str(group.rank), step, step.init(PARAMS))

    with pytest.raises(MismatchError, match=r"ranks 0 and 1 save to different folders.*Remedy"):
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
