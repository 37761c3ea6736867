"""torch.distributed.checkpoint's files, read and written in one process. Metadata is a pickle: trusted files only."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor


class DcpTensor(NamedTuple):
    """A tensor in a folder."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def list_tensors(folder: Path) -> dict[str, DcpTensor]:
    """The tensors of a folder by name. This unpickles its metadata, and so runs whatever it says."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    return {name: DcpTensor(tuple(entry.size), entry.properties.dtype) for name, entry in tensors.items()}


def read_tensor(folder: Path, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """One of them, whole, on the CPU."""
    from torch.distributed.checkpoint.state_dict_loader import load

    whole = torch.empty(shape, dtype=dtype)
    with _alone(folder):
        load({name: whole}, checkpoint_id=folder, no_dist=True)
    return whole


def write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write these as one process's part, which is all of it."""
    from torch.distributed.checkpoint.state_dict_saver import save

    state: dict[str, Any] = dict(tensors)
    with _alone(folder):
        save(state, checkpoint_id=folder, no_dist=True)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Without its warning that there is no process group; its errors, which are no `Exception`s, as ours."""
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except CheckpointException as error:
            causes = "; ".join(str(cause) for cause, _ in error.failures.values())
            raise OSError(f"{folder}: torch.distributed.checkpoint failed: {causes}") from None
