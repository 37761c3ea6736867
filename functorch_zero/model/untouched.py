"""Params that a loss must leave as they are: a write to them would change the state, or be lost."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._torch_private import storage_id, version_of
from ..errors import StructureError
from ..tree import PyTree, has_values, in_words, paths


def is_looked_at(call: int) -> bool:
    """Whether the slow questions about a loss are asked at this call: 0, 1, 2, 4, 8 and so on,
    every 100th, and the one before each of these.

    They read all params, or walk through all of autograd's graph. Work that comes every k calls,
    for any k up to 100, is met at last: counted from 0 in call 100 k, and from 1 in 100 k - 1.
    """
    return any(n & (n - 1) == 0 or n % 100 == 0 for n in (call, call + 1))


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """How often each has been written to; tensors of inference mode don't count."""
    return [version_of(x) for x in tensors if not x.is_inference()]


class Untouched:
    """Params, or flats of them, from before a loss or an evaluation ran.

    Operators in place count a tensor's version up, and `p.data = x` gives it another storage: both
    always show. A write past the counter, `p.data.clamp_()` or one through numpy, shows in the
    values alone.

    Args:
        tensors: of any shapes.
        look: whether values are compared as well, which reads all of them each time.
    """

    def __init__(self, tensors: Sequence[Tensor], *, look: bool):
        self._tensors = tensors
        self._before = _marks(tensors)
        # Of each tensor's values; empty: they aren't compared
        self._values: list[Tensor] = []
        if look and all(map(has_values, tensors)):
            self._values = [marks_of_values(tensor) for tensor in tensors]

    def check(self, where: str | PyTree[Tensor]) -> None:
        """Raise StructureError if one of them has changed.

        Args:
            where: the unit whose flats they are, or the tree whose leaves they are.
        """
        i = self.first_changed()
        if i is None:
            return
        if isinstance(where, str):
            raise changed_in_place(unit=where)
        raise changed_in_place(paths(where)[i])

    def first_changed(self) -> int | None:
        """The number of the first tensor that has changed; None: none has."""
        now = _marks(self._tensors)
        if now != self._before:
            return next(i for i, marks in enumerate(now) if marks != self._before[i])
        for i, values in enumerate(self._values):
            if not torch.equal(marks_of_values(self._tensors[i]), values):
                return i
        return None


def _marks(tensors: Sequence[Tensor]) -> list[tuple[int, int | None]]:
    """Of each the storage and the version, which tensors of inference mode don't count."""
    versions: list[int | None]
    # With `map`, since this runs for every leaf at every step
    if any(map(Tensor.is_inference, tensors)):
        versions = [None if x.is_inference() else version_of(x) for x in tensors]
    else:
        versions = [*map(version_of, tensors)]
    return [*zip(map(storage_id, tensors), versions, strict=True)]


def marks_of_values(tensor: Tensor) -> Tensor:
    """1-D integers by which a change of a tensor's values shows: a few words themselves, or sums
    of many."""
    words = in_words(tensor, _WORDS[min(tensor.element_size(), 8)])
    return words.clone() if len(words) <= _FEW_WORDS else _sums_of(words)


def _sums_of(words: Tensor) -> Tensor:
    """Sums of a tensor's words, 1-D int64: of each half a weighted one, so that an exchange shows
    too. They read the words once and copy nothing, unlike a digest."""
    in_8_bytes = 8 // words.element_size()
    paired = len(words) // in_8_bytes * in_8_bytes
    sums = []
    # Longer words are summed ten times as fast, and must begin where one can
    if paired and words.storage_offset() % in_8_bytes == 0:
        sums.append(_weighted(words[paired:]))
        words = words[:paired].view(torch.int64)
    for half in words.tensor_split(2):
        # A table's columns are summed without weights first: a product of all words is a copy
        in_table = len(half) // _COLUMNS * _COLUMNS
        sums.append(_weighted(half[:in_table].view(-1, _COLUMNS).sum(0, dtype=torch.int64)))
        sums.append(_weighted(half[in_table:]))
    return torch.stack(sums)


def _weighted(words: Tensor) -> Tensor:
    """(n,) integers -> their sum, 0-d int64, each times an odd number of its own: modulo 2**64, to
    which int64 wraps, that loses no bit."""
    return (words * torch.arange(1, 2 * len(words) + 1, 2, device=words.device)).sum()


# Integers by their size in bytes
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FEW_WORDS = 256  # whose copy takes a thirtieth of the time of their sums
_COLUMNS = 61  # odd: rows of a leaf mostly have an even number of words, and so change columns


def changed_in_place(path: str | None = None, *, unit: str | None = None) -> StructureError:
    """The error for a loss that writes to a leaf, or to one of a unit's leaves."""
    got = None if unit is None else f"a write to a leaf of unit {unit or 'root'}"
    return StructureError(
        "a leaf of params was changed in place, and a step is a pure function",
        path=path,
        got=got,
        remedy="make a new tensor, `p = p * 0.5` instead of `p *= 0.5` or `p.data = ...`; "
        "params are changed between steps, by tree_map on the state's",
    )
