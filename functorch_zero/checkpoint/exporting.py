"""A checkpoint as the files that everybody reads: whole leaves under the model's own names, in safetensors."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..model.functionalize import Apply
from .catalogue import chosen
from .container import DTYPES, bytes_of, make_header
from .errors import CheckpointError
from .folders import Temporary, create, write_all, write_file
from .manifest import Leaf, Manifest
from .reader import Wanted, read_wanted

PathLike = str | os.PathLike[str]
Aliases = Mapping[str, str] | Apply | None

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Named(NamedTuple):
    """A tensor to write."""

    name: str
    number: int  # of its leaf in the manifest
    leaf: Leaf

    @property
    def nbytes(self) -> int:
        return self.leaf.numel * self.leaf.width


def export(
    root: PathLike,
    out: PathLike,
    *,
    count: int | None = None,
    trees: Sequence[str] = ("params", "buffers"),
    aliases: Aliases = None,
    max_file_bytes: int = 5 * 10**9,
) -> Path:
    """Write a model's leaves, whole, as Hugging Face's loaders read them, and return the folder `out`.

    That is `model.safetensors`, or, with more than `max_file_bytes`, `model-00001-of-0000N.safetensors` with
    `model.safetensors.index.json`. `Module.load_state_dict` takes what `safetensors.torch.load_file` reads. Run by one
    process, without a group. Every block read is checked. Memory: the largest leaf, and 4 MiB.

    Args:
        root: the folder of checkpoints.
        out: a new folder; it gets its name when everything is on disk.
        count: the step; None: the newest complete one.
        trees: paths in the state. Names are what follows them, so `("opt_state.1.ema", "buffers")` exports averages
            under the model's names.
        aliases: names under which to write a leaf once more: for tied weights, which a state holds once and
            `load_state_dict` asks for twice. A dict from name to leaf, or the `apply` that `functionalize` made.
        max_file_bytes: of tensors in one file; a larger leaf has a file for itself.

    Raises:
        CheckpointError: there is no such checkpoint, `out` exists, or no leaf lies under `trees`.
        CorruptError: the checkpoint is damaged; the file is named.
    """
    manifest, folder = chosen(root, count)
    files = _split(list(named_leaves_in(manifest, trees, aliases_of(aliases))), max_file_bytes)
    temporary = Temporary(Path(out).absolute(), lock=False)
    try:
        names = _file_names(len(files))
        for name, tensors in zip(names, files, strict=True):
            _write(temporary.path / name, tensors, manifest, folder)
        if len(files) > 1:
            write_file(temporary.path / INDEX, _index(names, files))
        temporary.commit()
    finally:
        temporary.discard()
    return Path(out)


def aliases_of(given: Aliases) -> dict[str, str]:
    """Names by which a leaf also goes -> the leaf's name."""
    if isinstance(given, Apply):
        slots = ((f"{s.module}.{s.attribute}".lstrip("."), s.leaf) for s in (*given.slots, *given.buffer_slots))
        return {name: leaf for name, leaf in slots if name != leaf}
    return dict(given or {})


def name_in(path: str, trees: Sequence[str]) -> str | None:
    """What follows one of `trees` in a leaf's path; None when it lies in none of them."""
    for tree in trees:
        if path == tree:
            return tree.rpartition(".")[2]
        if path.startswith(f"{tree}."):
            return path[len(tree) + 1 :]
    return None


def named_leaves_in(manifest: Manifest, trees: Sequence[str], aliases: Mapping[str, str]) -> Iterator[Named]:
    """The leaves under `trees` by the names that a model has for them, aliases included."""
    found: dict[str, Named] = {}
    for number, leaf in enumerate(manifest.leaves):
        name = name_in(leaf.path, trees)
        if name is not None:
            if name in found:
                raise CheckpointError(f"two leaves would have the name {name}: {found[name].leaf.path} and {leaf.path}")
            found[name] = Named(name, number, leaf)
    if not found:
        raise CheckpointError(f"the checkpoint has no leaf under {', '.join(trees)}")
    for name, target in aliases.items():
        if target not in found or name in found:
            problem = "is a leaf itself" if name in found else f"stands for {target}, which is no leaf"
            raise CheckpointError(f"the alias {name} {problem}")
    yield from found.values()
    yield from (found[target]._replace(name=name) for name, target in aliases.items())


def _split(tensors: Sequence[Named], limit: int) -> list[list[Named]]:
    """Tensors in files of at most `limit` bytes, in order."""
    files: list[list[Named]] = [[]]
    size = 0
    for tensor in tensors:
        if files[-1] and size + tensor.nbytes > limit:
            files.append([])
            size = 0
        files[-1].append(tensor)
        size += tensor.nbytes
    return files


def _file_names(num_files: int) -> list[str]:
    if num_files == 1:
        return [WEIGHTS]
    return [f"model-{i + 1:05d}-of-{num_files:05d}.safetensors" for i in range(num_files)]


def _index(names: Sequence[str], files: Sequence[Sequence[Named]]) -> bytes:
    total = sum(tensor.nbytes for tensors in files for tensor in tensors)
    where = {tensor.name: name for name, tensors in zip(names, files, strict=True) for tensor in tensors}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2).encode()


def _write(path: Path, tensors: Sequence[Named], manifest: Manifest, folder: Path) -> None:
    ordered = sorted(tensors, key=lambda tensor: -tensor.leaf.width)  # so that each is aligned
    header, _ = make_header([(t.name, t.leaf.dtype, t.leaf.shape) for t in ordered], {"format": "pt"})
    descriptor = create(path)
    try:
        write_all(descriptor, memoryview(header))
        for tensor in ordered:
            if tensor.leaf.numel:  # the leaf is freed before the next one is read
                write_all(descriptor, bytes_of(read_leaf(manifest, tensor.number, folder)))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_leaf(manifest: Manifest, number: int, folder: Path) -> Tensor:
    """One leaf, whole and flat, on the CPU."""
    leaf = manifest.leaves[number]
    whole = torch.empty(leaf.numel, dtype=DTYPES[leaf.dtype])
    for file in manifest.files:
        runs = [
            Wanted(piece.offset, piece.numel, leaf.dtype, whole, piece.start)
            for piece in file.pieces
            if piece.leaf == number
        ]
        if runs:
            read_wanted(folder, file, manifest, runs)
    return whole
