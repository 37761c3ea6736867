"""Norms of whole tensors, and scalings by them: what transforms that need statistics share.

Leaves may be 1-D pieces of tensors. So every update is elementwise, and everything else is asked of
`across`, whose answers (0-d tensors, vectors) are the same on every rank. Statistics are taken in
at least float32: a sum of many half-precision squares would overflow or stand still.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from optree import tree_flatten, tree_leaves, tree_map
from torch import Tensor

from ...layout.extent import Extent
from ..across import (
    Across,
    Dim,
    DimOp,
    Pointwise,
    dims_of,
    reduced_dtype,
    sum_dtype,
    total_of,
    without,
)
from ..arithmetic import Tree, in_batches, on_numbers


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


def safe_squares(tree: Tree) -> Tree:
    """`safe_square` of all leaves, by one operator."""
    wide = tree_map(lambda leaf: leaf.to(sum_dtype(leaf.dtype)), tree)
    return in_batches(torch._foreach_mul, wide, wide)


def global_norm(updates: Tree, across: Across) -> Tensor:
    """The Euclidean norm of a whole tree, 0-d. One all-reduce of a scalar per leaf."""
    # In the tree's order, from equal norms: the same bits on every rank
    squares = on_numbers(torch.square, across.norm(updates))
    return total_of(tree_leaves(squares)).sqrt()


def scaled(updates: Tree, factor: Tensor, params: Tree, across: Across) -> Tree:
    """All updates times one factor, 0-d: a kernel per bucket rather than per leaf."""
    made, _ = across.run_pointwise(_TIMES_STATE, updates, factor, params)
    return made


def _foreach_times(
    multiply: Callable[..., Any], updates: Tree, factor: Tensor, params: Tree
) -> tuple[Tree, Tensor]:
    """`times` of all leaves, by one operator if they have one dtype."""
    leaves, treedef = tree_flatten(updates)
    dtypes = {u.dtype for u in leaves}
    # A half precision is multiplied in float32, and rounded then
    if len(dtypes) != 1 or dtypes != {*map(sum_dtype, dtypes)}:
        return tree_map(lambda u: times(u, factor), updates), factor
    # In place, the operator returns nothing
    made = multiply(leaves, factor.to(*dtypes)) or leaves
    return treedef.unflatten(made), factor


# The same object at all steps, which `across` plans once; so the factor comes as its state
_TIMES_STATE = Pointwise(
    lambda params: torch.ones((), device="cpu"),
    partial(_foreach_times, torch._foreach_mul),
    partial(_foreach_times, torch._foreach_mul_),
    keeps_zeros=True,
)


def zero_answers(params: Tree, across: Across, dim: Dim, op: DimOp) -> Tree:
    """Zeros in the shapes and dtypes of `across.sum_dim(params, dim)`, or of `max_dim`, for the
    state that begins a statistic."""

    def zeros(p: Tensor, extent: Extent) -> Tensor | None:
        # By the full shape: `p` may be a 1-D piece
        dims = dims_of(dim, extent.shape)
        if dims is None:
            return None
        return p.new_zeros(without(extent.shape, dims), dtype=reduced_dtype(p.dtype, op))

    return tree_map(zeros, params, across.extents)


def block_rms(norms: Tree, across: Across) -> Tree:
    """From each leaf's norm, 0-d, the root of the mean of its squared elements, 0-d.

    It is 0 for an empty leaf.
    """

    # Of the whole leaves' elements, as the norms are of whole leaves
    roots = tree_map(lambda extent: math.sqrt(max(extent.numel, 1)), across.extents)
    return in_batches(torch._foreach_div, norms, roots)
