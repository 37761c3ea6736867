"""The manifest: what a checkpoint holds and where. Plain data that checks itself, to and from JSON.

The file's first line is the checksum of the rest. What comes out of `parse_manifest` is safe to act
on: file names follow from the number of ranks, every number is bounded, no piece lies outside its
file, and the pieces cover every leaf exactly once. Values may still be wrong, if somebody wants
them to be: checksums stop accidents, not attackers.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from .checksums import CHECKSUMS
from .errors import CorruptError
from .safetensors_file import DTYPES, strict_json

FORMAT = "functorch_zero checkpoint"
VERSION = 1
NAME = "manifest.json"
MAX_BYTES = 2**26
MAX_RANKS = 99_999
MIN_BLOCK, MAX_BLOCK = 2**12, 2**26
MAX_DIMS = 64
HUGE = 2**62  # no count of elements or bytes is larger


class Leaf(NamedTuple):
    """One leaf of the state, whole."""

    path: str
    dtype: str  # a key of container.DTYPES
    shape: tuple[int, ...]
    order: tuple[int, ...] | None = (
        None  # its dims from the slowest to the fastest in memory, where not row by row
    )

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype].itemsize


class Piece(NamedTuple):
    """Elements of a leaf in a file."""

    leaf: int  # its number in the manifest
    start: int  # in elements of the whole leaf
    numel: int
    offset: int  # in bytes from the beginning of the file


class File(NamedTuple):
    """What one rank wrote."""

    name: str
    size: int
    sums: str  # of each block, 8 hexadecimal digits
    pieces: tuple[Piece, ...]  # in the order in which they lie

    def sum_of(self, block: int) -> int:
        """The checksum of one block."""
        return int(self.sums[8 * block : 8 * block + 8], 16)


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds, and where.

    Attributes:
        step: the state's step.
        ranks: how many ranks saved, a file each.
        level: at which level, or None for an unsharded state.
        block: how many bytes each checksum covers.
        checksum: which one it is, a key of `CHECKSUMS`.
        leaves: the leaves that are tensors.
        values: the others, by path.
        files: in rank order.
        user: the user's own.
        about: the versions, optimizer and units it was saved with; for people.
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

    @property
    def optimizer(self) -> str | None:
        """The optimizer as it prints; None in files of earlier versions."""
        entry = self.about.get("optimizer")
        printed = entry.get("printed") if isinstance(entry, dict) else None
        return printed if isinstance(printed, str) and printed.isprintable() else None


def file_name(rank: int, ranks: int) -> str:
    """The name of one rank's file."""
    return f"rank-{rank + 1:05d}-of-{ranks:05d}.safetensors"


def encode_manifest(manifest: Manifest) -> bytes:
    """The file's bytes."""
    rows: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    rows |= {name: getattr(manifest, name) for name in _HEAD}
    rows["leaves"] = [[leaf.path, leaf.dtype, leaf.shape, leaf.order] for leaf in manifest.leaves]
    rows["files"] = [[file.name, file.size, file.sums, file.pieces] for file in manifest.files]
    rows |= {"values": manifest.values, "user": manifest.user, "about": manifest.about}
    body = json.dumps(rows, allow_nan=False, separators=(",", ":")).encode()
    return f"crc32 {zlib.crc32(body):08x}\n".encode() + body + b"\n"


_HEAD = ("step", "ranks", "level", "block", "checksum")
_KEYS = {"format", "version", *_HEAD, "leaves", "files", "values", "user", "about"}


def parse_manifest(data: bytes, where: str) -> Manifest:
    """Read a manifest, trusting nothing in it.

    Args:
        data: the file's bytes.
        where: its name, for errors.

    Raises:
        CorruptError: it is damaged, of another version, or not a manifest.
    """
    rows = _Checked(_body(data, where), where)
    rows.need(
        isinstance(rows.value, dict) and rows.value.get("format") == FORMAT, f"not a {FORMAT}"
    )
    rows.need(
        rows["version"] == VERSION and type(rows["version"]) is int,
        f"of version {_short(rows['version'])}",
    )
    rows.need(
        set(rows.value) == _KEYS,
        f"has the keys {sorted(set(rows.value) ^ _KEYS)[:5]} too many or too few",
    )
    rows.need(_is_count(rows["step"]), "the step is no count")
    rows.need(
        type(rows["ranks"]) is int and 1 <= rows["ranks"] <= MAX_RANKS,
        "the number of ranks is none",
    )
    rows.need(
        rows["level"] is None or (type(rows["level"]) is int and 0 <= rows["level"] <= 3),
        "no such level",
    )
    named = isinstance(rows["checksum"], str) and rows["checksum"] in CHECKSUMS
    rows.need(named, f"unknown checksum {_short(rows['checksum'])}")
    block = rows["block"]
    rows.need(
        type(block) is int and MIN_BLOCK <= block <= MAX_BLOCK and block % 64 == 0,
        "no size for a block",
    )
    rows.need(isinstance(rows["values"], dict), "values is no object")
    plain = all(type(v) in (bool, int, float, str) for v in rows["values"].values())
    rows.need(plain and isinstance(rows["about"], dict), "values or about hold what they may not")
    leaves = _leaves(rows)
    files = _files(rows, leaves)
    check_coverage(leaves, files, where)
    head = {name: rows[name] for name in (*_HEAD, "values", "user", "about")}
    return Manifest(leaves=leaves, files=files, **head)


class _Checked:
    """Parsed JSON, and a place to complain."""

    def __init__(self, value: Any, where: str):
        self.value, self.where = value, where

    def __getitem__(self, key: str) -> Any:
        self.need(key in self.value, f"lacks {key!r}")
        return self.value[key]

    def need(self, condition: bool, problem: str) -> None:
        if not condition:
            raise CorruptError(f"{self.where}: {problem}")


def _short(value: Any) -> str:
    return repr(value)[:60]


def _body(data: bytes, where: str) -> Any:
    if len(data) > MAX_BYTES:
        raise CorruptError(f"{where}: larger than {MAX_BYTES} bytes")
    line, _, body = data.partition(b"\n")
    body = body[:-1] if body.endswith(b"\n") else body
    if line != f"crc32 {zlib.crc32(body):08x}".encode():
        raise CorruptError(
            f"{where}: its checksum is not that of its first line, so it is damaged or cut off"
        )
    return strict_json(body, where)


def _is_count(value: Any) -> bool:
    """Whether it is an int that can count bytes; True and 1.0 are none."""
    return type(value) is int and 0 <= value <= HUGE


def _check_shape(shape: Any, what: str) -> None:
    """Raise `CorruptError` unless this is a shape of sane size."""
    sane = isinstance(shape, list) and len(shape) <= MAX_DIMS and all(_is_count(n) for n in shape)
    if not sane or prod(shape) > HUGE // 16:
        raise CorruptError(f"{what} is not a shape: {str(shape)[:80]}")


def _leaves(rows: _Checked) -> tuple[Leaf, ...]:
    table = rows["leaves"]
    rows.need(isinstance(table, list), "leaves is no list")
    made = []
    for row in table:
        rows.need(
            isinstance(row, list) and len(row) == 4 and isinstance(row[0], str),
            f"no leaf: {_short(row)}",
        )
        path, dtype, shape, order = row
        rows.need(
            isinstance(dtype, str) and dtype in DTYPES,
            f"{path[:200]} has the unknown dtype {_short(dtype)}",
        )
        _check_shape(shape, f"{rows.where}: the shape of {path[:200]}")
        if order is not None:
            dims = isinstance(order, list) and all(type(n) is int for n in order)
            rows.need(
                dims and sorted(order) == list(range(len(shape))),
                f"{path[:200]} has no order of dims",
            )
        made.append(Leaf(path, dtype, tuple(shape), None if order is None else tuple(order)))
    names = [leaf.path for leaf in made] + list(rows["values"])
    rows.need(len(set(names)) == len(names), "a path occurs twice")
    return tuple(made)


def _files(rows: _Checked, leaves: tuple[Leaf, ...]) -> tuple[File, ...]:
    table, ranks = rows["files"], rows["ranks"]
    rows.need(
        isinstance(table, list) and len(table) == ranks, f"{ranks} ranks must have as many files"
    )
    return tuple(_file(rows, row, file_name(i, ranks), leaves) for i, row in enumerate(table))


def _file(rows: _Checked, row: Any, name: str, leaves: tuple[Leaf, ...]) -> File:
    rows.need(isinstance(row, list) and len(row) == 4, f"no entry of a file: {_short(row)}")
    rows.need(row[0] == name, f"expected the file {name}, got {_short(row[0])}")
    _, size, sums, pieces = row
    rows.need(_is_count(size), f"{name}: no size")
    blocks = -(-size // rows["block"])
    rows.need(
        isinstance(sums, str) and len(sums) == 8 * blocks,
        f"{name}: {blocks} blocks need as many checksums",
    )
    rows.need(not set(sums) - set("0123456789abcdef"), f"{name}: checksums are hexadecimal")
    rows.need(isinstance(pieces, list), f"{name}: pieces is no list")
    made, end = [], 8
    for numbers in pieces:
        rows.need(
            isinstance(numbers, list) and len(numbers) == 4 and all(_is_count(n) for n in numbers),
            f"{name}: no piece: {_short(numbers)}",
        )
        piece = Piece(*numbers)
        rows.need(
            piece.leaf < len(leaves), f"{name}: a piece of leaf {piece.leaf}, which there isn't"
        )
        width = leaves[piece.leaf].width
        rows.need(
            piece.numel > 0 and piece.offset >= end and piece.offset % width == 0,
            f"{name}: pieces out of place",
        )
        end = piece.offset + piece.numel * width
        rows.need(end <= size, f"{name}: a piece ends at byte {end} of {size}")
        made.append(piece)
    return File(name, size, sums, tuple(made))


def check_coverage(leaves: tuple[Leaf, ...], files: tuple[File, ...], where: str) -> None:
    """Raise `CorruptError` unless the pieces cover each leaf exactly once."""
    ends = [0] * len(leaves)
    for piece in sorted(piece for file in files for piece in file.pieces):
        if piece.start != ends[piece.leaf]:
            story = "twice" if piece.start < ends[piece.leaf] else "not at all"
            at = min(piece.start, ends[piece.leaf])
            raise CorruptError(
                f"{where}: element {at} of {leaves[piece.leaf].path} is there {story}"
            )
        ends[piece.leaf] += piece.numel
    for leaf, end in zip(leaves, ends, strict=True):
        if end != leaf.numel:
            raise CorruptError(
                f"{where}: {leaf.path} has {leaf.numel} elements, its pieces hold {end}"
            )
