"""Norms of whole tensors, asked of `across`."""

from __future__ import annotations

import math
from typing import Any

from optree import tree_leaves, tree_map
from torch import Tensor

from ...tree import PyTree
from ..across import Across, sum_dtype, total_of

Tree = PyTree[Tensor]


def times(leaf: Tensor, factor: Any) -> Tensor:
    """`leaf * factor` in the leaf's dtype, computed in at least float32, so that 0-d leaves are no
    special case."""
    if not isinstance(factor, Tensor):
        return leaf.mul(factor)
    wide = sum_dtype(leaf.dtype)
    return (leaf.to(wide) * factor.to(wide)).to(leaf.dtype)


def safe_square(leaf: Tensor) -> Tensor:
    """Its elements' squares, in at least float32."""
    wide = leaf.to(sum_dtype(leaf.dtype))
    return wide * wide


def global_norm(updates: Tree, across: Across) -> Tensor:
    """The Euclidean norm of a whole tree, 0-d. One all-reduce of a scalar per leaf."""
    return total_of([norm * norm for norm in tree_leaves(across.norm(updates))]).sqrt()


def block_rms(norms: Tree, across: Across) -> Tree:
    """From each leaf's norm, the root of the mean of its squared elements (0 for an empty leaf)."""
    return tree_map(
        lambda norm, extent: norm / math.sqrt(max(extent.numel, 1)), norms, across.extents
    )
