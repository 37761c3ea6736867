"""Weights from and to torch.distributed.checkpoint, for those who live there. Its files are trusted
files."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..step.state import State
from .catalogue import chosen
from .contents import Step
from .convert import (
    TREES,
    Aliases,
    Found,
    PathLike,
    Rename,
    Source,
    import_into,
    leaves_by_name,
    names_of,
    places_of,
    read_leaf,
)
from .files import folder_named
from .load import Allowed, Chosen


def export_dcp(
    root: PathLike,
    out: PathLike,
    *,
    count: int | None = None,
    trees: Sequence[str] = TREES,
    aliases: Aliases = None,
    prefix: str = "",
) -> Path:
    """Write a model's leaves as torch.distributed.checkpoint reads them: weights only. Returns the
    folder `out`.

    `dcp.load` reads them into plain tensors or DTensors of any placement. Run by one process,
    without a group. Memory: all the weights, since that is how DCP writes.

    Args:
        root: the folder of checkpoints.
        out: a new folder; it gets its name when everything is on disk.
        count: the step; None: the newest complete one.
        trees: as in `export_weights`.
        aliases: as in `export_weights`.
        prefix: put before each name, "model." for torchtitan, say.

    Raises:
        CheckpointError: there is no such checkpoint, `out` exists, or no leaf lies under `trees`.
        CorruptError: the checkpoint is damaged; the file is named.
    """
    manifest, folder = chosen(root, count)
    leaves = leaves_by_name(manifest, trees, names_of(aliases))
    places = places_of(leaves.values(), manifest, folder)
    tensors = {prefix + name: read_leaf(leaf, places) for name, leaf in leaves.items()}
    with folder_named(out) as made:
        write_tensors(made, tensors)
    return Path(out)


def import_dcp(
    folder: PathLike,
    step: Step,
    *,
    like: State,
    prefix: str = "",
    aliases: Aliases = None,
    rename: Rename = None,
    allow_missing: Chosen = False,
    allow_extra: Chosen = False,
    cast: bool = False,
) -> State:
    """A first state with weights from a folder that torch.distributed.checkpoint wrote. Every rank
    calls this.

    **Reading such a folder unpickles its metadata, which can run any code, and checks no checksum:
    read only folders that you trust.** Weights only: optimizer states of others have other
    structures. Each rank reads whole leaves, one after the other, and keeps the elements that it is
    to hold.

    Args:
        folder: one that `dcp.save` wrote, sharded in any way.
        step: the step function that the state is for.
        like: a state of `step`, from `step.init`. If `step` donates, it can't be used again.
        prefix: of the names that are taken, "model." for torchtitan, say; others are not looked at.
        aliases: as in `import_weights`.
        rename: as in `import_weights`, of names without the prefix.
        allow_missing: leaves that the folder lacks keep `like`'s values, chosen as in
            `import_weights`.
        allow_extra: entries that `like` lacks are left out, chosen in the same way: tensors, and
            pickled objects.
        cast: convert dtypes.

    Raises:
        StructureError: on every rank: names, shapes or dtypes are not `like`'s, or two names of a
            tied leaf have different values; they are named.
        CheckpointError: on every rank: the folder can't be read.
    """
    path = Path(folder)

    # Runs inside of the job: only metadata is read, tensors one by one when their turn comes
    def sources() -> dict[str, Found]:
        found = list_entries(path).items()
        return {name[len(prefix) :]: entry for name, entry in found if name.startswith(prefix)}

    allowed = Allowed(missing=allow_missing, extra=allow_extra, cast=cast)
    return import_into(f"import {path}", sources, step, like, names_of(aliases), rename, allowed)


def list_entries(folder: Path) -> dict[str, Found]:
    """The entries of a folder by name. This unpickles the folder's metadata, which can run any
    code."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    found: dict[str, Found] = {}
    for name, entry in FileSystemReader(folder).read_metadata().state_dict_metadata.items():
        found[name] = "pickled object"
        if isinstance(entry, TensorStorageMetadata):
            kind = tuple(entry.size), entry.properties.dtype
            found[name] = Source(*kind, whole=partial(read_tensor, folder, name, *kind))
    return found


def read_tensor(folder: Path, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """One of a folder's tensors, whole, on the CPU."""
    from torch.distributed.checkpoint.state_dict_loader import load

    # The target: DCP reads in place, whatever the saved sharding
    whole = torch.empty(shape, dtype=dtype, device="cpu")
    with _alone(folder):
        # no_dist: each rank reads by itself, and no group of torch's is used
        load({name: whole}, checkpoint_id=folder, no_dist=True)
    return whole


def write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a folder of these tensors, all by this process."""
    from torch.distributed.checkpoint.state_dict_saver import save

    state: dict[str, Any] = dict(tensors)
    with _alone(folder):
        save(state, checkpoint_id=folder, no_dist=True)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Inside, torch.distributed.checkpoint doesn't warn that there is no process group, and its
    errors, which are no `Exception`s, become OSErrors that name the folder."""
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except CheckpointException as error:
            # `error.failures`: rank -> (exception, traceback)
            causes = "; ".join(str(cause) for cause, _ in error.failures.values())
            raise OSError(f"{folder}: torch.distributed.checkpoint failed: {causes}") from None
