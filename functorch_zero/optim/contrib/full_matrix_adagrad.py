"""Full-matrix Adagrad, of each leaf or of the whole tree: the square of its elements must fit."""

from __future__ import annotations

from typing import NamedTuple

import optree
import torch
from torch import Tensor

from ...errors import TransformError
from ...layout.extent import Extent
from ...tree import paths
from ..across import Across, Shape, sum_dtype, widest_dtype
from ..arithmetic import Tree, device_of
from ..base import (
    NumberOrSchedule,
    Transform,
    chain,
    checked,
    real_only,
    with_whole_leaves,
    with_whole_tree,
)
from ..naming import named
from ..transforms.matrix_roots import if_finite, solve_root
from ..transforms.scaling import scale_by_learning_rate
from ..transforms.weight_decay import add_decayed_weights


class FullMatrixState(NamedTuple):
    """Full-matrix Adagrad's statistic."""

    outer: Tensor  # (n, n), at least fp32: the sum of the outer products of gradients of n elements


def first_state(params: Tree) -> FullMatrixState:
    """No outer products yet, of whole leaves; every rank that has them makes the same."""
    leaves = optree.tree_leaves(params)
    size = sum(leaf.numel() for leaf in leaves)
    dtype = widest_dtype(leaves, torch.float32)
    return FullMatrixState(torch.zeros(size, size, dtype=dtype, device=device_of(params)))


def take_step(updates: Tree, state: FullMatrixState, eps: float) -> tuple[Tree, FullMatrixState]:
    """The direction of whole leaves, seen as one vector (n,), and the state after it."""
    leaves, treedef = optree.tree_flatten(updates)
    flats = [state.outer.new_empty(0)]  # so that an empty tree can be joined, too
    # In the tree's order, which is the same on every rank
    for leaf in leaves:
        flats.append(leaf.reshape(-1).to(state.outer.dtype))
    g = torch.cat(flats)
    # A gradient that is not finite leaves the sum as it was: see Note [No answer]
    outer = if_finite(torch.addr(state.outer, g, g), state.outer)
    # By the new sum, which has seen this gradient
    direction = solve_root(outer, g, eps)
    directions = []
    for flat, leaf in zip(direction.split([*map(torch.numel, leaves)]), leaves, strict=True):
        directions.append(flat.to(leaf.dtype).reshape(leaf.shape))
    return treedef.unflatten(directions), FullMatrixState(outer)


@named
def scale_by_full_matrix_adagrad(eps: float = 1e-8, *, limit: int = 256 * 2**20) -> Transform:
    """Multiply each leaf's gradient g by the inverse root of the sum of its outer products.

        outer = outer + g @ g.T    (g as a vector)
        update = (eps + outer**(1/2))**-1 @ g

    Source: Duchi et al., 2011 (JMLR 12), Figure 1, full matrices, with zero for the inverse along
    eigenvalues of `outer` that are rounding; g has no part there. Gradients that are nearly
    multiples of each other leave small eigenvalues that aren't: a last bit of the gradient grows by
    the inverse of their root, at most `1 / eps`.

    Needs: whole leaves at their owners: two all-to-alls, about 2S/N bytes per rank. State, at the
    leaf's owner: for n elements an n x n matrix.

    Args:
        eps: added to the root's eigenvalues.
        limit: bytes of one leaf's matrix above which `init` refuses, naming the size.
    """

    # A leaf is a tree, too
    def update(update: Tensor, state: FullMatrixState) -> tuple[Tensor, FullMatrixState]:
        return take_step(update, state, eps)

    def cost(shape: Shape) -> float:
        """Operations of the eigendecomposition, up to a factor."""
        return float(torch.Size(shape).numel()) ** 3

    # Before any rank allocates a matrix
    def check(params: Tree, across: Across) -> None:
        leaves: list[Tensor] = optree.tree_leaves(params)
        extents: list[Extent] = optree.tree_leaves(across.extents)
        remedy = "partition the tree, with adagrad for this leaf"
        for path, leaf, extent in zip(paths(params), leaves, extents, strict=True):
            refuse_above(limit, extent.numel, leaf.dtype, path, remedy)

    return checked(real_only(with_whole_leaves(first_state, update, cost=cost)), check)


@named
def scale_by_full_matrix_adagrad_tree(eps: float = 1e-8, *, limit: int = 256 * 2**20) -> Transform:
    """Multiply the gradient, as one vector over all leaves, by the inverse root of the sum of its
    outer products.

        outer = outer + g @ g.T    (g: all leaves, flat, one behind the other)
        update = (eps + outer**(1/2))**-1 @ g

    Source: Duchi et al., 2011 (JMLR 12), Figure 1; see `scale_by_full_matrix_adagrad`, which takes
    each leaf alone.

    Needs: the whole tree: updates are gathered, S (N-1)/N bytes per rank, and every rank does all
    the work. State: for n elements in the tree an n x n matrix, on every rank.

    Args:
        eps: added to the root's eigenvalues.
        limit: bytes of the matrix above which `init` refuses, naming the size it would need.
    """

    def update(updates: Tree, state: FullMatrixState) -> tuple[Tree, FullMatrixState]:
        return take_step(updates, state, eps)

    def check(params: Tree, across: Across) -> None:
        # Of whole leaves; the params here may be pieces
        num_elements = sum(extent.numel for extent in optree.tree_leaves(across.extents))
        dtype = widest_dtype(optree.tree_leaves(params), torch.float32)
        remedy = "use scale_by_full_matrix_adagrad, leaf by leaf"
        refuse_above(limit, num_elements, dtype, None, remedy)

    return checked(real_only(with_whole_tree(first_state, update, limit=limit)), check)


def refuse_above(
    limit: int, num_elements: int, dtype: torch.dtype, path: str | None, remedy: str
) -> None:
    """Raise TransformError if the matrix of so many elements would take more than `limit` bytes.

    Args:
        limit: in bytes.
        num_elements: of the leaf, or of the whole tree.
        dtype: of the gradient.
        path: the leaf's; None for the whole tree.
        remedy: for the error, besides raising the limit.
    """
    size = num_elements**2 * sum_dtype(dtype).itemsize  # bytes
    if size <= limit:
        return
    raise TransformError(
        f"full-matrix Adagrad of {num_elements} elements would need {size} bytes for its matrix",
        path=path,
        expected=f"at most limit={limit}",
        remedy=f"{remedy}, or raise limit",
    )


@named
def full_matrix_adagrad(
    learning_rate: NumberOrSchedule,
    eps: float = 1e-8,
    *,
    whole_tree: bool = False,
    weight_decay: NumberOrSchedule = 0.0,
    limit: int = 256 * 2**20,
) -> Transform:
    """Adagrad with full matrices, of each leaf or of all leaves together (g gradient, p param).

        g = g + weight_decay * p
        update = -learning_rate * scale_by_full_matrix_adagrad(g)

    Source: Duchi et al., 2011 (JMLR 12), Figure 1.

    Needs: whole leaves: two all-to-alls, about 2S/N bytes per rank; with `whole_tree` the whole
    tree, gathered everywhere. State: n^2 numbers for n elements, at a leaf's owner; for the whole
    tree on every rank.

    Args:
        learning_rate: a number or a schedule.
        eps: added to the root's eigenvalues.
        whole_tree: one matrix for all leaves together.
        weight_decay: coupled: joins the gradient.
        limit: bytes of a matrix above which `init` refuses.

    Raises:
        TransformError: by `init`, where a matrix would take more than `limit` bytes; it says how
            many.
    """
    rescale = scale_by_full_matrix_adagrad_tree if whole_tree else scale_by_full_matrix_adagrad
    return chain(
        # There for a decay of 0, too: paths in checkpoint files count it
        add_decayed_weights(weight_decay),
        rescale(eps, limit=limit),
        scale_by_learning_rate(learning_rate),
    )
