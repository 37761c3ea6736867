"""Norms of whole tensors, and scalings by them: the parts of transforms that need statistics.

Leaves may be 1-D pieces of tensors. So every update is elementwise, and everything else is asked of
`across`, whose answers (0-d tensors, vectors) are the same on every rank. Statistics are kept in at
least float32: a sum of many half-precision squares would overflow or stand still.
"""

from __future__ import annotations

import math
from typing import Any

from optree import tree_leaves, tree_map
from torch import Tensor

from ...layout.extent import Extent
from ..across import Across, sum_dtype, total_of
from ..arithmetic import Tree


def times(leaf: Tensor, factor: Any) -> Tensor:
    """`leaf * factor`, rounded once to the leaf's dtype.

    Args:
        leaf: of any shape; a 0-d leaf is no special case.
        factor: a number, or a tensor that broadcasts to the leaf. A tensor is multiplied in at
            least float32.
    """
    # A Python number has no dtype to be rounded to
    if not isinstance(factor, Tensor):
        return leaf.mul(factor)
    # Else the factor would be rounded to half precision before the product
    wide = sum_dtype(leaf.dtype)
    product = leaf.to(wide) * factor.to(wide)
    return product.to(leaf.dtype)


def safe_square(leaf: Tensor) -> Tensor:
    """The squares of a leaf's elements, in at least float32."""
    wide = leaf.to(sum_dtype(leaf.dtype))
    return wide * wide


def global_norm(updates: Tree, across: Across) -> Tensor:
    """The Euclidean norm of a whole tree, 0-d. One all-reduce of a scalar per leaf."""
    # In the tree's order, from equal norms: the same bits on every rank
    squares = [norm * norm for norm in tree_leaves(across.norm(updates))]
    return total_of(squares).sqrt()


def block_rms(norms: Tree, across: Across) -> Tree:
    """From each leaf's norm, 0-d, the root of the mean of its squared elements, 0-d.

    It is 0 for an empty leaf.
    """

    def rms(norm: Tensor, extent: Extent) -> Tensor:
        # By the whole leaf's elements, as the norm is of the whole leaf
        return norm / math.sqrt(max(extent.numel, 1))

    return tree_map(rms, norms, across.extents)
