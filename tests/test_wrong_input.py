"""Wrong input, one row each: the call, its error's class, and words that the error holds.

Rows of steps run unsharded and, on 2 thread ranks, at levels 0 and 3.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from optree import tree_map
from torch import nn

import functorch_zero as fz
from functorch_zero import optim, testing
from functorch_zero.errors import StructureError
from functorch_zero.groups import SingleRank

RANKS = 2
LEVELS = [None, 0, 3]  # None: the unsharded step

with torch.random.fork_rng(devices=[]):
    torch.manual_seed(
        0
    )  # of any values, a rule might train no leaf, or only one behind a dead ReLU
    NET = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1)).double()
APPLY, PARAMS, BUFFERS = fz.functionalize(NET)
DEEPER = fz.functionalize(nn.Sequential(*NET, nn.Linear(1, 1)).double())[1]
NARROWER = fz.functionalize(nn.Sequential(nn.Linear(3, 1), nn.ReLU(), nn.Linear(1, 1)).double())[1]
X = torch.arange(6.0, dtype=torch.float64).view(2, 3)


def loss_fn(params: Any, buffers: Any, x: Any) -> Any:
    return (APPLY(params, buffers, x)[0] ** 2).mean()


with warnings.catch_warnings():  # of torch: that both are prototypes, or go
    warnings.simplefilter("ignore")
    QUANTIZED = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    NESTED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


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


def by_pieces_of(init: Any) -> Any:
    return optim.pointwise(init, lambda updates, state, params: (updates, state))


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
    "optimizer: torch's names, where they are right": Call(
        lambda: optim.from_torch(torch.optim.SGD, PARAMS, lr=0.1),  # type: ignore[call-arg]
        TypeError,
        r"from_torch\(\): too many .*options. Remedy: params are given to `init`",
    ),
    "optimizer: something missing": Call(
        lambda: optim.params_ema(0.9),  # type: ignore[call-arg, arg-type]
        TypeError,
        r"params_ema\(\): missing .* 'decay': expected inner, decay.$",
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
    "optimizer: a NaN": Call(
        lambda: optim.adamw(float("nan")),
        ValueError,
        r"adamw's learning_rate is out of its range: expected >= 0, got nan. Remedy",
    ),
    "optimizer: a bool": Call(
        lambda: optim.adamw(True), TypeError, r"learning_rate is no number.*got bool True. Remedy"
    ),
    "optimizer: several rates": Call(
        lambda: optim.adamw(torch.tensor([1e-3, 1e-3])),
        ValueError,
        r"learning_rate has dims: expected .*0-d tensor, got shape \(2,\). Remedy: .*partition",
    ),
    "optimizer: a mean that grows": Call(
        lambda: optim.adamw(0.1, b1=1.5),
        ValueError,
        r"adamw's b1 is out of its range: expected 0 <= x < 1, got 1.5. Remedy",
    ),
    "optimizer: a negative eps": Call(
        lambda: optim.adam(0.1, eps=-1e-8), ValueError, r"adam's eps .*expected >= 0, got -1e-08"
    ),
    "optimizer: a negative decay": Call(
        lambda: optim.adamw(0.1, weight_decay=-0.1),
        ValueError,
        r"adamw's weight_decay .*expected >= 0, got -0.1",
    ),
    "optimizer: a negative momentum": Call(
        lambda: optim.sgd(0.1, momentum=-0.9), ValueError, r"sgd's momentum .*expected >= 0, got"
    ),
    "optimizer: a norm that ascends": Call(
        lambda: optim.clip_by_global_norm(-1.0),
        ValueError,
        r"clip_by_global_norm's max_norm is out of its range: expected > 0, got -1.0. Remedy",
    ),
    "optimizer: torch's scheduler": Call(
        lambda: optim.adamw(torch.optim.lr_scheduler.CosineAnnealingLR),
        TypeError,
        r"learning_rate is no number.*got type CosineAnnealingLR. Remedy: .*cosine_decay_schedule",
    ),
    "optimizer: a mask of a leaf": Call(
        lambda: optim.adamw(0.1, mask=lambda leaf: leaf.ndim > 1),  # type: ignore[misc, arg-type]
        TypeError,
        r"mask.*expected \(path, leaf\), got .*<lambda>\(leaf\). Remedy",
    ),
    "optimizer: a mask of a pattern": Call(
        lambda: optim.adamw(0.1, mask="*.weight"),
        TypeError,
        r"a mask is no pattern: expected a tree of bools, or .* got '\*.weight'. Remedy: lambda",
    ),
    "optimizer: no average": Call(
        lambda: optim.ema_params(optim.sgd(0.1).init(PARAMS)),
        ValueError,
        r"expected one params_ema .*got 0. Remedy: .* an optimizer that has params_ema in it",
    ),
    "schedule: text": Call(
        lambda: optim.cosine_decay_schedule(1e-3, "10"),  # type: ignore[arg-type]
        TypeError,
        r"cosine_decay_schedule's decay_steps is no number.*got str '10'. Remedy",
    ),
    "schedule: no decay after the warm-up": Call(
        lambda: optim.warmup_cosine_decay_schedule(0.0, 1e-2, warmup_steps=10, decay_steps=5),
        ValueError,
        r"decay_steps has the warm-up in it: expected more than 10, got 5",
    ),
    "schedule: it returns text": Call(
        lambda: make(optimizer=optim.adamw(lambda count: "0.1")).init(PARAMS),
        TypeError,
        r"the result of the schedule .*<lambda> is no number.*got str '0.1'",
    ),
    "schedule: it returns several": Call(
        lambda: make(optimizer=optim.adamw(lambda count: torch.ones(2))).init(PARAMS),
        ValueError,
        r"the result of the schedule .*has dims.*got shape \(2,\)",
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
    "to_torch: torch's class": Call(
        lambda: optim.to_torch(torch.optim.AdamW, NET, lr=0.1),  # type: ignore[arg-type]
        TypeError,
        r"to_torch's transform must be .*got type AdamW. Remedy: optim.adamw\(",
    ),
    "to_torch: no rate": Call(
        lambda: optim.to_torch(optim.adamw, NET), TypeError, r"got adamw with lr=None. Remedy"
    ),
    "to_torch: swapped": Call(
        lambda: optim.to_torch(NET, optim.adamw, lr=0.1),  # type: ignore[arg-type]
        TypeError,
        r"params came without names.*got function. Remedy: pass the model",
    ),
    "to_torch: params without names": Call(
        lambda: optim.to_torch(optim.adamw, NET.parameters(), lr=0.1),  # type: ignore[arg-type]
        TypeError,
        r"params came without names.*got generator. Remedy: pass the model",
    ),
    "to_torch: a frozen model": Call(
        lambda: optim.to_torch(optim.adamw, nn.Linear(1, 1).requires_grad_(False), lr=0.1),
        ValueError,
        "empty parameter list",
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
        r"a module that is built: expected an nn.Module, got the class Linear. Remedy: build",
    ),
    "model: a dtype as its precision": Call(
        lambda: fz.functionalize(NET, precision=torch.bfloat16),  # type: ignore[arg-type]
        TypeError,
        r"got dtype for ''. Remedy: fz.Precision\(compute=torch.bfloat16\)",
    ),
    "shard: a loss": Call(
        lambda: fz.shard(loss_fn, level=1, group=SingleRank()),  # type: ignore[call-overload]
        TypeError,
        r"shard takes what .*got function. Remedy: shard\(fz.train_step\(",
    ),
    "evaluation: a tensor": Call(
        lambda: fz.eval_step(loss_fn)(make().init(PARAMS), X),
        TypeError,
        r"got Tensor. Remedy: return \{\"loss\": loss\}",
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
    "apply: a sharded tree": Call(
        lambda: APPLY(PIECES, {}, X),  # type: ignore[arg-type]
        StructureError,
        r"apply was given a sharded tree for params: path PIECES, .*, on rank 0. Remedy: .*frozen",
    ),
    "apply: numbers": Call(
        lambda: APPLY(dict.fromkeys(PARAMS, 1.0), {}, X),
        StructureError,
        r"path 0.weight, expected \(2, 3\), got float",
    ),
    "loss: none": Call(lambda: make(loss=1.0), TypeError, r"loss_fn must be a function.*float"),
    "loss: without buffers": Call(
        lambda: make(loss=lambda params, batch: batch.sum()),
        TypeError,
        r"loss_fn can't be called .*expected \(params, buffers, batch\), got .*\(params, batch\)",
    ),
    "accumulate: a float": Call(
        lambda: fz.train_step(loss_fn, optim.sgd(0.1), accumulate=2.0),  # type: ignore[arg-type]
        TypeError,
        r"accumulate is no number of micro-batches: expected an int, got float 2.0. Remedy",
    ),
    "trainable: of a leaf": Call(
        lambda: fz.train_step(
            loss_fn,
            optim.sgd(0.1),
            trainable=lambda leaf: True,  # type: ignore[misc, arg-type]
        ),
        TypeError,
        r"trainable can't be called.*expected \(path, leaf\), got .*<lambda>\(leaf\). Remedy",
    ),
    "trainable: a pattern": Call(
        lambda: fz.train_step(loss_fn, optim.sgd(0.1), trainable="2.*").init(PARAMS),
        StructureError,
        r"the mask does not have .*1 leaves in a str.*Remedy: pass a function \(path, leaf\)",
    ),
    "level: a number as a path": Call(
        lambda: fz.shard(make(), level={0: 3, "": 1}, group=SingleRank()),  # type: ignore[dict-item]
        TypeError,
        r"level=.* has a pattern that is no text, 0. Remedy: level=\{\"0\": 3\}",
    ),
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
        r"held as params are, got a tuple, on rank 0. Remedy: .*of several trees pass one",
    ),
    "trees: params and gradients": Call(  # optree's error
        lambda: tree_map(lambda p, g: p - 0.1 * g, PIECES, GRADS),
        ValueError,
        r"as params are held \(fz.pieces.params. gives them in pieces\), cut as level 3.*"
        r"as gradients are \(fz.apply_updates adds them to params\)",
    ),
    "trees: a state of adamax, with the same leaves": Call(
        lambda: optim.adam(0.1).update(PARAMS, optim.adamax(0.1).init(PARAMS), PARAMS),
        StructureError,
        r"the optimizer's state .*path 0, .*this leaf is in a \w+ in place of a \w+.*Remedy: pass",
    ),
    "trees: the same, sharded": Call(
        lambda: optim.adam(0.1).update(GRADS, optim.adamax(0.1).init(PIECES), PIECES),
        StructureError,
        r"the optimizer's state .*path 0, .*this leaf is in a \w+ in place of a \w+.*on rank 0.*",
    ),
    "trees: a state of a narrower net": Call(
        lambda: optim.adam(0.1).update(PARAMS, optim.adam(0.1).init(NARROWER), PARAMS),
        StructureError,
        r"the optimizer's state has another shape.*path 0.mu.0.weight, expected .*Remedy: pass",
    ),
    "trees: a whole state": Call(
        lambda: optim.adam(0.1).update(GRADS, optim.adam(0.1).init(PARAMS), PIECES),
        StructureError,
        r"a state that it has not made of these params: .*, got tuple, .*Remedy: keep each",
    ),
    "trees: sharded twice": Call(
        lambda: fz.shard_tree(PIECES, level=3, group=SingleRank()),
        StructureError,
        r"a sharded tree lies in the tree, .*Remedy: pass fz.unshard\(tree\)",
    ),
    "trees: sparse": Call(
        lambda: fz.shard_tree({"w": X.to_sparse()}, level=3, group=SingleRank()),
        StructureError,
        r"path w, expected torch.strided, got torch.sparse_coo. Remedy",
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
        r"expected what train_step or program_step made, got ShardedStep. Remedy: pass",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    call = CALLS[name]
    with pytest.raises(call.error, match=re.compile(call.words, re.DOTALL)):
        call.run()


# Of the page of programs, in its order: trees that are given to one tree_map, and mended ones
MIXED: list[tuple[Any, Any, Callable[[], tuple[Any, Any]]]] = [
    (PARAMS, PLAIN, lambda: (PARAMS, fz.Params(PLAIN, PARAMS.units))),
    (PLAIN, PARAMS, lambda: (fz.Params(PLAIN, PARAMS.units), PARAMS)),
    (PIECES, GRADS, lambda: (fz.pieces(PIECES), GRADS)),
    (PIECES, PARAMS, lambda: (PIECES, fz.shard_tree(PARAMS, layout_like=PIECES))),
    (PARAMS, PIECES, lambda: (PARAMS, fz.unshard(PIECES))),
]


def test_the_errors_of_tree_map_are_those_of_the_docs() -> None:
    page = (Path(__file__).parents[1] / "docs" / "extend" / "programs.md").read_text()
    section = page.split("### Errors of tree_map")[1].split("## Rules")[0]
    rows = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    for text, (a, b, mended) in zip(rows, MIXED, strict=True):
        with pytest.raises(ValueError, match=re.escape(text)):
            tree_map(torch.add, a, b)
        tree_map(torch.add, *mended())
