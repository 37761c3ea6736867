"""Our own files, in the format of safetensors: a JSON header with its length, then the tensors.

They are written and read here. The safetensors package holds all the tensors of a file while it
writes, and it maps the files that it reads: a mapped file that gets shorter kills the process. The
package reads the files of others (`convert`).
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..savable import DTYPES as DTYPES
from .errors import CheckpointError, CorruptError
from .files import opened, read_into
from .plain_data import decoded

MAX_HEADER = 2**26  # bytes; the safetensors package takes 10**8
INTACT = "Remedy: fetch or write the file again, or take another one"

# Of the dtypes that the format lacks, files have the bytes, as U8; the manifest has the dtype
LACKING = (torch.complex128, torch.complex32)
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Entry(NamedTuple):
    """A tensor in a file's header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def make_header(
    tensors: Sequence[Entry], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[int]]:
    """The first bytes of a file that holds these tensors in a row, and the tensors' offsets.

    The offsets count from the beginning of the file; the last one is that of its end. The header is
    padded so that data starts at a multiple of 64 bytes. Give wide dtypes first: readers want each
    tensor at a multiple of its element size.

    Raises:
        CheckpointError: there are so many that `read_header` wouldn't read it.
    """
    # The header's JSON: name -> dtype, shape, place
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    starts = [0]  # in bytes from the end of the header, as the format has them
    for name, dtype, shape in tensors:
        start = starts[-1]
        stop = start + prod(shape) * dtype.itemsize
        if dtype in LACKING:
            dtype, shape = torch.uint8, (stop - start,)
        table[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
        starts.append(stop)
    text = json.dumps(table, separators=(",", ":")).encode()
    # Readers map files and want aligned data; JSON may end in blanks
    padding = -(8 + len(text)) % 64
    text += b" " * padding
    if len(text) > MAX_HEADER:
        raise CheckpointError(
            f"a file's header of {len(tensors)} tensors would have {len(text)} bytes, and no more "
            f"than {MAX_HEADER} are read. Remedy: stack leaves of one shape into one leaf"
        )
    length = len(text).to_bytes(8, "little")
    data = len(length) + len(text)  # bytes before the first tensor
    return length + text, [data + start for start in starts]


def read_header(path: Path) -> bytes:
    """The bytes of a safetensors file's header, without its length.

    Raises:
        CorruptError: the file is missing, not a regular one, or shorter than its header.
    """
    with opened(path) as (descriptor, size):
        prefix = bytearray(8)
        read_into(descriptor, 0, path, memoryview(prefix))
        # Unsigned 64-bit, lowest byte first, as the format says
        length = int.from_bytes(prefix, "little")
        # Bounded before the memory is taken
        if length > min(MAX_HEADER, size - 8):
            raise CorruptError(
                f"{path}: says that its header has {length} bytes; expected at most {MAX_HEADER}, "
                f"and no more than the file's {size}. {INTACT}"
            )
        header = bytearray(length)
        read_into(descriptor, 8, path, memoryview(header))
        return bytes(header)


def strict_json(text: bytes, file: str) -> Any:
    """Parse JSON: no duplicate keys, no NaN, no absurd numbers or nesting. Objects that stand for
    numbers are these, see `plain_data`.

    Raises:
        CorruptError: it is anything else.
    """
    try:
        return json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        # Python's parser gives up on deep nesting by RecursionError
        problem = f"not the JSON it should be: {str(error)[:200]}"
        raise CorruptError(f"{file}: {problem}. {INTACT}") from None


def _unique(pairs: list[tuple[str, Any]]) -> Any:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key occurs twice")
    return decoded(made)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy; the view keeps the tensor alive."""
    assert tensor.device.type == "cpu" and tensor.is_contiguous()
    # By address, since numpy knows no bfloat16 and needn't be installed
    array: Any = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    array.tensor = tensor
    return memoryview(array).cast("B")
