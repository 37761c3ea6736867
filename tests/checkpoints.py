"""What the tests of checkpoints share: a small state, saving and loading it on ranks, and comparing
bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor

from functorch_zero import checkpoint, optim
from functorch_zero.groups import run_ranks
from functorch_zero.groups.protocol import Group
from functorch_zero.sharded.api import shard
from functorch_zero.sharded.train import ShardedTrainStep
from functorch_zero.step.state import State
from functorch_zero.step.train import TrainStep, train_step
from functorch_zero.tree import paths
from tests.models import ZOO, even, split

ROWS = 12


def make_step(name: str = "mlp", optimizer: Any = None) -> tuple[TrainStep, Any, Any]:
    """(step, params, buffers) of a model of the zoo."""
    loss_fn, params, buffers = ZOO[name].build()
    return train_step(loss_fn, optimizer or optim.adamw(0.01)), params, buffers


def trained(
    step: ShardedTrainStep, params: Any, buffers: Any, steps: int, name: str = "mlp"
) -> State:
    """The state after some steps, on this rank."""
    state = step.init(params, buffers)
    for batch in ZOO[name].batches(steps, ROWS):
        state, _ = step(state, split(batch, even(ROWS, step.group.size))[step.group.rank])
    return state


def save_on(
    root: Path,
    ranks: int,
    level: int,
    *,
    steps: int = 2,
    name: str = "mlp",
    optimizer: Any = None,
    user: Any = None,
) -> State:
    """Train and save on thread ranks; the whole state that was saved."""
    base, params, buffers = make_step(name, optimizer)

    def run(group: Group) -> State:
        step = shard(base, level=level, group=group)
        state = trained(step, params, buffers, steps, name)
        checkpoint.save(root, step, state, user=user)
        return step.unshard(state)

    return run_ranks(run, ranks)[0]


def load_on(
    root: Path,
    ranks: int,
    level: int,
    *,
    name: str = "mlp",
    optimizer: Any = None,
    donate: bool = True,
    **options: Any,
) -> State:
    """Load on thread ranks; the whole state, the same on all."""
    base, params, buffers = make_step(name, optimizer)

    def run(group: Group) -> State:
        step = shard(base, level=level, group=group, donate=donate)
        like = step.init(params, buffers)
        return step.unshard(checkpoint.load(root, step, like=like, **options).state)

    states = run_ranks(run, ranks)
    for other in states[1:]:
        assert_same(states[0], other)
    return states[0]


def assert_same(a: State, b: State) -> None:
    """Bit for bit, dtypes and shapes included."""
    pairs = zip(paths(a), optree.tree_leaves(a), optree.tree_leaves(b), strict=True)
    for path, x, y in pairs:
        assert same_bits(x, y), f"{path} differs"


def same_bits(x: Tensor, y: Tensor) -> bool:
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    a, b = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (x, y))
    return torch.equal(a, b)


def leftovers(root: Path) -> list[str]:
    """Temporary folders."""
    return (
        [path.name for path in root.iterdir() if path.name.startswith(".tmp")]
        if root.exists()
        else []
    )


def on_ranks(
    ranks: int, level: int, fn: Callable[[ShardedTrainStep, State], Any], **options: Any
) -> list[Any]:
    """`fn(step, its first state)` on thread ranks."""
    base, params, buffers = make_step()

    def run(group: Group) -> Any:
        step = shard(base, level=level, group=group, **options)
        return fn(step, step.init(params, buffers))

    return run_ranks(run, ranks)
