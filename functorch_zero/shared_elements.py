"""Whether tensors have elements in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import optree
import torch
from torch import Tensor

from ._torch_private import storage_id
from .errors import StructureError
from .tree import PyTree, grouped, paths


def check_apart(tree: PyTree[Any]) -> list[tuple[str, str]]:
    """Raise, naming both, if a trained leaf has elements in common with another leaf.

    An optimizer in place would train both. A step copies leaves, and would part them.

    Returns: the paths of other leaves that have, by twos.
    """
    leaves = optree.tree_leaves(tree)
    pairs = [*sharing_pairs(leaves)]
    names = paths(tree) if pairs else []
    for i, k in pairs:
        if leaves[i].requires_grad or leaves[k].requires_grad:
            raise StructureError(
                "a trained leaf shares elements with another leaf, and copies would part them",
                path=names[k],
                expected="elements of its own",
                got=f"elements of {names[i]}",
                remedy="pass one leaf, and use it twice in the loss, or one nn.Parameter in "
                "both places of a model; or pass a clone, which is trained apart",
            )
    return [(names[i], names[k]) for i, k in pairs]


def sharing_pairs(leaves: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """The pairs of leaves, by their positions, that have elements in common. Dense tensors only."""
    by_storage = grouped(  # positions
        (storage_id(leaf), i)
        for i, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_nested
    )
    for near in by_storage.values():
        # In the order in which they lie: all leaves may be views of one flat
        spans = sorted((*_bytes_of(leaves[i]), i) for i in near)
        for n, (_, stop, i) in enumerate(spans):
            for start, _, k in islice(spans, n + 1, None):
                if start >= stop:  # and all further ones
                    break
                if share_elements(leaves[i], leaves[k]):
                    yield min(i, k), max(i, k)


def share_elements(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one storage have an element of it in common."""
    if a.numel() == 0 or b.numel() == 0:
        return False
    (a_start, a_stop), (b_start, b_stop) = _bytes_of(a), _bytes_of(b)
    if a_stop <= b_start or b_stop <= a_start:
        return False
    if a.itemsize != b.itemsize:
        return True
    # Columns of one matrix, say, lie between one another
    taken = torch.zeros(max(a_stop, b_stop) // a.itemsize, dtype=torch.bool, device="cpu")
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
