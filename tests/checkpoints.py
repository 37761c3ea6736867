"""What the tests of checkpoints share: a small state, saving and loading it on ranks, and comparing
bits."""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor

from functorch_zero import checkpoint, optim
from functorch_zero.checkpoint.catalogue import read_manifest
from functorch_zero.checkpoint.manifest import NAME, encode_manifest
from functorch_zero.checkpoint.places import read_rows
from functorch_zero.checkpoint.rows import SavedRange, encode_rows, rows_name
from functorch_zero.groups import run_ranks
from functorch_zero.groups.protocol import Group
from functorch_zero.sharded.api import shard
from functorch_zero.sharded.program.step import ShardedStep
from functorch_zero.step.state import State
from functorch_zero.step.train import TrainStep, train_step
from functorch_zero.tree import paths
from tests.models import ZOO, even, split

ROWS = 12


def make_step(name: str = "mlp", optimizer: Any = None) -> tuple[TrainStep, Any, Any]:
    """(step, params, buffers) of a model of the zoo."""
    loss_fn, params, buffers = ZOO[name].build()
    return train_step(loss_fn, optimizer or optim.adamw(0.01)), params, buffers


def trained(step: ShardedStep, params: Any, buffers: Any, steps: int, name: str = "mlp") -> State:
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
    ranks: int, level: int, fn: Callable[[ShardedStep, State], Any], **options: Any
) -> list[Any]:
    """`fn(step, its first state)` on thread ranks."""
    base, params, buffers = make_step()

    def run(group: Group) -> Any:
        step = shard(base, level=level, group=group, **options)
        return fn(step, step.init(params, buffers))

    return run_ranks(run, ranks)


Rows = tuple[list[SavedRange], list[int]]  # of one rank's file: pieces, and the blocks' checksums


def sealed(body: bytes) -> bytes:
    """A manifest's bytes, with a checksum that is right."""
    return f"crc32 {zlib.crc32(body):08x}\n".encode() + body


def rows_of(folder: Path) -> list[Rows]:
    """The rows of all files, in rank order."""
    manifest = read_manifest(folder.parent, int(folder.name.removeprefix("step-")))
    found = []
    for number in range(len(manifest.files)):
        file = read_rows(manifest, folder, number)
        pieces = [
            SavedRange(leaf, start, stop - start) for leaf, start, stop, _ in file.table.tolist()
        ]
        found.append((pieces, file.sums.tolist()))
    return found


def put_rows(folder: Path, rank: int, pieces: Sequence[SavedRange], sums: Sequence[int]) -> None:
    """Give a rank's file other rows, which the manifest knows."""
    manifest = read_manifest(folder.parent, int(folder.name.removeprefix("step-")))
    data = encode_rows(pieces, sums)
    files = list(manifest.files)
    (folder / rows_name(files[rank].name)).write_bytes(data)
    files[rank] = files[rank]._replace(num_pieces=len(pieces), rows_crc=zlib.crc32(data))
    manifest = dataclasses.replace(manifest, files=tuple(files))
    (folder / NAME).write_bytes(encode_manifest(manifest))


def make_old(folder: Path) -> None:
    """Make a checkpoint one of version 1, whose manifest has the rows of all files, with offsets
    and with checksums as text."""
    manifest = read_manifest(folder.parent, int(folder.name.removeprefix("step-")))
    body = json.loads((folder / NAME).read_bytes().split(b"\n", 1)[1])
    files = []
    for number, file in enumerate(manifest.files):
        rank_file = read_rows(manifest, folder, number)
        sums = "".join(f"{crc:08x}" for crc in rank_file.sums.tolist())
        rows = rank_file.table.tolist()
        pieces = [[leaf, start, stop - start, at] for leaf, start, stop, at in rows]
        files.append([file.name, file.size, sums, pieces])
        (folder / rows_name(file.name)).unlink()
    body |= {"version": 1, "files": files}
    (folder / NAME).write_bytes(sealed(json.dumps(body).encode()))
