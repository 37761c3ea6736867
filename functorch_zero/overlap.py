"""Whether tensors have elements in common."""

from __future__ import annotations

import torch
from torch import Tensor


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one storage have an element of it in common."""
    if a.numel() == 0 or b.numel() == 0:
        return False
    (a_start, a_stop), (b_start, b_stop) = _bytes_of(a), _bytes_of(b)
    if a_stop <= b_start or b_stop <= a_start:
        return False
    if a.itemsize != b.itemsize:
        return True
    # Columns of one matrix, say, lie between one another
    taken = torch.zeros(max(a_stop, b_stop) // a.itemsize, dtype=torch.bool)
    taken.as_strided(*_strided(a)).fill_(True)
    return bool(taken.as_strided(*_strided(b)).any())


def _bytes_of(x: Tensor) -> tuple[int, int]:
    """The range of bytes of its storage that a tensor lies in."""
    shape, strides, start = _strided(x)
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return start * x.itemsize, (start + last + 1) * x.itemsize


def _strided(x: Tensor) -> tuple[list[int], list[int], int]:
    """Shape, strides and offset; a dim that repeats the same elements counts once."""
    dims = zip(x.shape, x.stride(), strict=True)
    shape = [size if stride else 1 for size, stride in dims]
    return shape, list(x.stride()), int(x.storage_offset())
