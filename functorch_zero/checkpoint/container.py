"""The safetensors container: 8 bytes with the length of a JSON header, the header, then the tensors' bytes.

It is read and written here, without the safetensors package: that builds whole files in memory, and maps what it
reads. A header is anybody's JSON, so it is parsed strictly and within bounds.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import StructureError, explain
from .errors import CorruptError

MAX_HEADER = 2**26  # bytes; the safetensors package takes 10**8
MAX_DIMS = 64
HUGE = 2**62  # no count of elements or bytes is larger

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Entry(NamedTuple):
    """A tensor in a file."""

    dtype: str  # a key of DTYPES
    shape: tuple[int, ...]
    start: int  # in bytes from the beginning of the file

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPES[self.dtype].itemsize


def dtype_name(path: str, dtype: torch.dtype) -> str:
    """The container's name of a dtype.

    Raises:
        StructureError: it has none.
    """
    if dtype not in NAMES:
        raise StructureError(
            explain("safetensors files can't hold this dtype", path=path, expected=", ".join(DTYPES), got=dtype)
        )
    return NAMES[dtype]


def make_header(
    tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[Entry]]:
    """The first bytes of a file that holds these (name, dtype, shape) one after the other, and where each one lies.

    The header is padded so that data starts at a multiple of 64 bytes. Give wide dtypes first: readers want each
    tensor at a multiple of its element size.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(len(text) + -(len(text) + 8) % 64)
    base = 8 + len(text)
    entries = [Entry(dtype, shape, base + header[name]["data_offsets"][0]) for name, dtype, shape in tensors]
    return len(text).to_bytes(8, "little") + text, entries


def parse_header(text: bytes, file_size: int, file: str) -> dict[str, Entry]:
    """The tensors that a header (without its 8 bytes of length) describes.

    Raises:
        CorruptError: it isn't a safetensors header, or not one for a file of this size.
    """
    table = strict_json(text, file)
    if not isinstance(table, dict):
        raise CorruptError(f"{file}: the header is not a JSON object")
    base = 8 + len(text)
    entries = {name: _entry(name, row, base, file_size, file) for name, row in table.items() if name != "__metadata__"}
    end = base
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if entry.start != end:
            raise CorruptError(f"{file}: {name!r} does not begin where the tensor before it ends")
        end += entry.nbytes
    if end != file_size:
        raise CorruptError(f"{file}: the header describes {end} bytes, the file has {file_size}")
    return entries


def _entry(name: str, row: Any, base: int, file_size: int, file: str) -> Entry:
    if not isinstance(row, dict) or set(row) != {"dtype", "shape", "data_offsets"}:
        raise CorruptError(f"{file}: {name!r} must have dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = row["dtype"], row["shape"], row["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CorruptError(f"{file}: {name!r} has the unknown dtype {str(dtype)[:40]!r}")
    check_shape(shape, f"{file}: the shape of {name!r}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(is_count(n) for n in offsets):
        raise CorruptError(f"{file}: the offsets of {name!r} are not two sizes")
    entry = Entry(dtype, tuple(shape), base + offsets[0])
    if offsets[1] - offsets[0] != entry.nbytes or base + offsets[1] > file_size:
        raise CorruptError(f"{file}: {name!r} says bytes {offsets}, which does not fit its shape or the file")
    return entry


def is_count(value: Any) -> bool:
    """Whether it is an int that can count bytes; True and 1.0 are none."""
    return type(value) is int and 0 <= value <= HUGE


def check_shape(shape: Any, what: str) -> None:
    """Raise `CorruptError` unless this is a shape of sane size."""
    sane = isinstance(shape, list) and len(shape) <= MAX_DIMS and all(is_count(n) for n in shape)
    if not sane or prod(shape) > HUGE // 16:
        raise CorruptError(f"{what} is not a shape: {str(shape)[:80]}")


def strict_json(text: bytes, file: str) -> Any:
    """Parse JSON: no duplicate keys, no NaN, no absurd numbers or nesting.

    Raises:
        CorruptError: it is anything else.
    """
    try:
        return json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{file}: not the JSON it should be: {str(error)[:200]}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key occurs twice")
    return made


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy; the view keeps the tensor alive."""
    assert tensor.device.type == "cpu" and tensor.is_contiguous()
    array: Any = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    array.tensor = tensor
    return memoryview(array).cast("B")
