"""The manifest: the contents of a checkpoint, and their places. Plain data, to and from JSON.

The file's first line is the checksum of the rest. The rows of each rank's file, its pieces and its
blocks' checksums, lie beside that file (`rows`), and have their checksum here. A manifest from
`parse_manifest` is safe to act on: file names follow from the number of ranks, and every number is
bounded. Values may still be wrong, if somebody wants them to be: checksums stop accidents, not
attackers.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..params import Names
from .checksums import CHECKSUMS
from .errors import CorruptError
from .legacy import upgraded
from .plain_data import encoded
from .safetensors_file import DTYPES, NAMES, strict_json

FORMAT = "functorch_zero checkpoint"
VERSION = 3  # of checkpoints without frozen params; all others are of version 2
NAME = "manifest.json"
MAX_BYTES = 2**26  # bytes of the file
MAX_RANKS = 99_999
MIN_BLOCK, MAX_BLOCK = 2**12, 2**26  # bytes
MAX_DIMS = 64
HUGE = 2**62  # no count of elements or bytes is larger


class Leaf(NamedTuple):
    """One leaf of the state, whole."""

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    # Its dims from the slowest to the fastest in memory; None: row by row
    order: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.numel * self.width


class LeftOut(NamedTuple):
    """A frozen leaf that the checkpoint was saved without."""

    leaf: Leaf
    crc: int  # CRC-32 of its bytes, row by row


class File(NamedTuple):
    """The file of one rank."""

    name: str
    size: int  # in bytes
    num_pieces: int  # in its rows
    rows_crc: int  # of its rows' file, CRC-32


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint, and their places.

    Attributes:
        step: the state's step.
        ranks: the number of ranks that saved, a file each.
        level: of the step that saved; None for an unsharded one, and for levels by leaf.
        block: the number of bytes that each checksum covers.
        checksum: the kind of checksum, a key of `CHECKSUMS`.
        leaves: the leaves that are tensors.
        values: the others, by path.
        files: in rank order.
        user: the user's own data.
        about: the versions, optimizer, units, names and frozen leaves it was saved with; for
            people.
        left_out: frozen leaves that it was saved without.
        old_rows: the rows by the file's name, of version 1, which had them in the manifest.
    """

    step: int
    ranks: int
    level: int | None
    block: int
    checksum: str
    leaves: tuple[Leaf, ...]
    values: dict[str, Any]
    files: tuple[File, ...]
    user: Any
    about: dict[str, Any]
    left_out: tuple[LeftOut, ...] = ()
    old_rows: dict[str, bytes] = field(default_factory=dict)

    @cached_property
    def numels_and_widths(self) -> tuple[Tensor, Tensor]:
        """Of each leaf, its elements and the bytes of one: (number of leaves,) int64 each."""
        numels = torch.tensor([leaf.numel for leaf in self.leaves], dtype=torch.int64, device="cpu")
        widths = torch.tensor([leaf.width for leaf in self.leaves], dtype=torch.int64, device="cpu")
        return numels, widths

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Of each leaf its number, by path."""
        return {leaf.path: number for number, leaf in enumerate(self.leaves)}

    @property
    def everything(self) -> dict[int, tuple[int, int]]:
        """The elements [start, stop) of each leaf, all of them, by its number."""
        return {number: (0, leaf.numel) for number, leaf in enumerate(self.leaves)}

    def num_blocks(self, file: File) -> int:
        """The number of a file's blocks, the last of which may be shorter."""
        return -(-file.size // self.block)

    @property
    def optimizer(self) -> str | None:
        """The optimizer as it prints; None in files of earlier versions."""
        entry = self.about.get("optimizer")
        printed = entry.get("printed") if isinstance(entry, dict) else None
        return printed if isinstance(printed, str) and printed.isprintable() else None

    @property
    def frozen(self) -> frozenset[str] | None:
        """The paths of frozen leaves; None of a program, and in files of earlier versions."""
        listed = self.about.get("frozen")
        if isinstance(listed, list) and all(isinstance(path, str) for path in listed):
            return frozenset(listed)
        return None

    @property
    def names(self) -> dict[str, Names]:
        """By its path in the state, the names of the model that a tree is of; none in files of
        earlier versions."""
        try:
            return {
                path: Names(dict(names["aliases"]), frozenset(names["unsaved"]))
                for path, names in self.about["names"].items()
            }
        except (AttributeError, KeyError, TypeError, ValueError):  # somebody has changed it
            return {}


def file_name(rank: int, ranks: int) -> str:
    """The name of one rank's file."""
    return f"rank-{rank + 1:05d}-of-{ranks:05d}.safetensors"


def encode_manifest(manifest: Manifest) -> bytes:
    """The file's bytes."""
    # The order of keys is fixed, so equal manifests are equal bytes: ranks compare digests
    rows: dict[str, Any] = {"format": FORMAT, "version": VERSION if manifest.left_out else 2}
    for name in _HEAD:
        rows[name] = getattr(manifest, name)
    # JSON has tuples as lists of their fields
    rows["leaves"] = [_row(leaf) for leaf in manifest.leaves]
    rows["files"] = manifest.files
    rows["values"] = encoded(manifest.values, "values")
    rows["user"] = encoded(manifest.user, "user")
    rows["about"] = manifest.about
    if manifest.left_out:
        rows["left_out"] = [(*_row(leaf), crc) for leaf, crc in manifest.left_out]
    body = json.dumps(rows, allow_nan=False, separators=(",", ":")).encode()
    # Over the body alone; the newline at the end is for people
    return f"crc32 {zlib.crc32(body):08x}\n".encode() + body + b"\n"


_HEAD = ("step", "ranks", "level", "block", "checksum")
_KEYS = {"format", "version", *_HEAD, "leaves", "files", "values", "user", "about"}


def _row(leaf: Leaf) -> tuple[Any, ...]:
    return (leaf.path, NAMES[leaf.dtype], leaf.shape, leaf.order)


def parse_manifest(data: bytes, where: str) -> Manifest:
    """Read a manifest, trusting nothing in it.

    Args:
        data: the file's bytes.
        where: its name, for errors.

    Raises:
        CorruptError: it is damaged, of another version, or not a manifest.
    """

    def need(condition: bool, problem: str) -> None:
        if not condition:
            raise CorruptError(f"{where}: {problem}")

    # Each check may rely on those before it
    rows = _body(data, where)
    known = isinstance(rows, dict) and rows.get("format") == FORMAT
    need(known, f"not a {FORMAT}")
    version = rows.get("version")
    known = type(version) is int and 1 <= version <= VERSION
    need(known, f"of version {_short(version)}, which this library doesn't know")
    # Exact, both ways: an unknown key could change the meaning of the others
    odd = sorted(set(rows) ^ (_KEYS | {"left_out"} if version == VERSION else _KEYS))
    need(not odd, f"has the keys {odd[:5]} too many or too few")
    old_rows: dict[str, bytes] = {}
    if version == 1:
        rows["files"], old_rows = upgraded(rows["files"], where)
    # The head first: the number of ranks is needed to check the files
    _check_head(rows, need)
    head = {name: rows[name] for name in (*_HEAD, "values", "user", "about")}
    leaves = _leaves(rows["leaves"], need)
    left_out = _left_out(rows["left_out"], need) if version == VERSION else ()
    files = _files(rows["files"], rows["ranks"], need)
    paths = [*(leaf.path for leaf in leaves), *(leaf.path for leaf, _ in left_out), *rows["values"]]
    need(len(set(paths)) == len(paths), "a path occurs twice")
    return Manifest(leaves=leaves, files=files, left_out=left_out, old_rows=old_rows, **head)


# Raises `CorruptError`, which names the file and the problem, unless a condition holds
_Need = Callable[[bool, str], None]


def _short(value: Any) -> str:
    return repr(value)[:60]


def _body(data: bytes, where: str) -> Any:
    """The JSON after the first line, whose checksum it has."""
    if len(data) > MAX_BYTES:
        raise CorruptError(f"{where}: larger than {MAX_BYTES} bytes")
    # The checksum comes before any parsing
    line, _, body = data.partition(b"\n")
    body = body[:-1] if body.endswith(b"\n") else body
    if line != f"crc32 {zlib.crc32(body):08x}".encode():
        raise CorruptError(
            f"{where}: its checksum is not the one in its first line, so it is damaged or cut off"
        )
    return strict_json(body, where)


def _is_count(value: Any) -> bool:
    """Whether it is an int that can count bytes; True and 1.0 are none."""
    return _is_between(value, 0, HUGE)


def _is_between(value: Any, low: int, high: int) -> bool:
    """Whether it is an int, and no bool, from `low` to `high`."""
    return type(value) is int and low <= value <= high


def _is_list(value: Any, length: int) -> bool:
    return isinstance(value, list) and len(value) == length


def _check_head(rows: dict[str, Any], need: _Need) -> None:
    """Check all but the leaves and files: they need these numbers."""
    need(_is_count(rows["step"]), "the step is no count")
    need(_is_between(rows["ranks"], 1, MAX_RANKS), "the number of ranks is none")
    level = rows["level"]
    need(level is None or _is_between(level, 0, 3), "no such level")
    checksum = rows["checksum"]
    named = isinstance(checksum, str) and checksum in CHECKSUMS
    need(named, f"unknown checksum {_short(checksum)}")
    block = rows["block"]
    # A multiple of 64, so that no element lies in two blocks
    sane = _is_between(block, MIN_BLOCK, MAX_BLOCK) and block % 64 == 0
    need(sane, "no size for a block")
    values = rows["values"]
    need(isinstance(values, dict), "values is no object")
    # By exact type: True is an int to isinstance
    plain = all(type(value) in (bool, int, float, str) for value in values.values())
    about = isinstance(rows["about"], dict)
    need(plain and about, "values or about hold what they may not")


def _is_shape(shape: Any) -> bool:
    """Whether this is a shape of sane size."""
    # Few dims, each bounded, so that the product stays cheap
    sane = isinstance(shape, list) and len(shape) <= MAX_DIMS and all(map(_is_count, shape))
    return sane and prod(shape) <= HUGE // 16  # so that its bytes are no more than HUGE


def _leaves(table: Any, need: _Need) -> tuple[Leaf, ...]:
    need(isinstance(table, list), "leaves is no list")
    return tuple(_leaf(row, need) for row in table)


def _left_out(table: Any, need: _Need) -> tuple[LeftOut, ...]:
    need(isinstance(table, list) and bool(table), "left_out is no list of leaves")
    found = []
    for row in table:
        need(_is_list(row, 5), f"no leaf and its CRC: {_short(row)}")
        need(_is_between(row[4], 0, 2**32 - 1), f"no CRC-32: {_short(row[4])}")
        found.append(LeftOut(_leaf(row[:4], need), row[4]))
    return tuple(found)


def _leaf(row: Any, need: _Need) -> Leaf:
    """One leaf's entry, checked."""
    need(_is_list(row, 4) and isinstance(row[0], str), f"no leaf: {_short(row)}")
    path, dtype, shape, order = row
    name = path[:200]  # for errors
    known = isinstance(dtype, str) and dtype in DTYPES
    need(known, f"{name} has the unknown dtype {_short(dtype)}")
    # An export allocates by this shape
    need(_is_shape(shape), f"the shape of {name} is not a shape: {str(shape)[:80]}")
    if order is None:
        return Leaf(path, DTYPES[dtype], tuple(shape))
    ints = isinstance(order, list) and all(type(dim) is int for dim in order)
    # A permutation of the dims
    permuted = ints and sorted(order) == list(range(len(shape)))
    need(permuted, f"{name} has no order of dims")
    return Leaf(path, DTYPES[dtype], tuple(shape), tuple(order))


def _files(table: Any, ranks: int, need: _Need) -> tuple[File, ...]:
    need(_is_list(table, ranks), f"{ranks} ranks must have as many files")
    return tuple(_file(row, file_name(rank, ranks), need) for rank, row in enumerate(table))


def _file(row: Any, expected: str, need: _Need) -> File:
    """One file's entry, checked. `expected` is the name that it must have."""
    need(_is_list(row, 4), f"no entry of a file: {_short(row)}")
    name, *counts = row
    # The name follows from the rank, so that no manifest reaches outside of its folder
    need(name == expected, f"expected the file {expected}, got {_short(name)}")
    need(all(map(_is_count, counts)), f"{name}: no counts: {_short(counts)}")
    return File(name, *counts)
