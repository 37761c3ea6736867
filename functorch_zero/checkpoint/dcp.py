"""Weights from and to torch.distributed.checkpoint, for those who live there. Its files are trusted files."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ..groups.dcp import list_tensors, read_tensor, write_tensors
from ..step.state import TrainState
from .catalogue import chosen
from .exporting import Aliases, PathLike, aliases_of, named_leaves_in, read_leaf
from .folders import Temporary
from .importing import Import, Source
from .places import Step


def export_dcp(
    root: PathLike,
    out: PathLike,
    *,
    count: int | None = None,
    trees: Sequence[str] = ("params", "buffers"),
    aliases: Aliases = None,
    prefix: str = "",
) -> Path:
    """Write a model's leaves as torch.distributed.checkpoint reads them: weights only. Returns the folder `out`.

    `dcp.load` reads them into plain tensors or DTensors of any placement. Run by one process, without a group. Memory:
    all the weights, since that is how DCP writes.

    Args:
        root: the folder of checkpoints.
        out: a new folder; it gets its name when everything is on disk.
        count: the step; None: the newest complete one.
        trees: as in `export`.
        aliases: as in `export`.
        prefix: put before each name, "model." for torchtitan, say.

    Raises:
        CheckpointError: there is no such checkpoint, `out` exists, or no leaf lies under `trees`.
        CorruptError: the checkpoint is damaged; the file is named.
    """
    manifest, folder = chosen(root, count)
    named = list(named_leaves_in(manifest, trees, aliases_of(aliases)))
    tensors = {prefix + t.name: read_leaf(manifest, t.number, folder).view(t.leaf.shape) for t in named}
    temporary = Temporary(Path(out).absolute(), lock=False)
    try:
        write_tensors(temporary.path, tensors)
        temporary.commit()
    finally:
        temporary.discard()
    return Path(out)


def import_dcp(
    folder: PathLike,
    step: Step,
    *,
    like: TrainState,
    prefix: str = "",
    aliases: Aliases = None,
    allow_missing: bool = False,
    allow_extra: bool = False,
    cast: bool = False,
) -> TrainState:
    """A first state with weights from a folder that torch.distributed.checkpoint wrote. Every rank calls this.

    **Reading such a folder unpickles its metadata, which can run any code, and checks no checksum: only folders that
    you trust.** Weights only: optimizer states of others have other structures. Each rank reads whole leaves, one after
    the other, and keeps what it is to hold.

    Args:
        folder: what `dcp.save` wrote, sharded in any way.
        step: the step function that the state is for.
        like: a state of `step`, from `step.init`. If `step` donates, it can't be used again.
        prefix: of the names that are taken, "model." for torchtitan, say; others are not looked at.
        aliases: as in `import_`.
        allow_missing: leaves that the folder lacks keep `like`'s values.
        allow_extra: tensors that `like` lacks are left out.
        cast: convert dtypes.

    Raises:
        StructureError: on every rank: names, shapes or dtypes are not `like`'s; they are named.
        CheckpointError: on every rank: the folder can't be read.
    """
    path = Path(folder)

    def sources() -> dict[str, Source]:
        found = list_tensors(path)
        return {
            name.removeprefix(prefix): Source(t.shape, t.dtype, partial(read_tensor, path, name, *t))
            for name, t in found.items()
            if name.startswith(prefix)
        }

    return Import(f"import {path}", sources, step, like, aliases_of(aliases)).run(allow_missing, allow_extra, cast)
