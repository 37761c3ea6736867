"""Full-matrix Adagrad, of each leaf or of the whole tree: the square of the number of elements must
fit."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from ...errors import TransformError, explain
from ...tree import PyTree, paths
from ..across import Across, sum_dtype
from ..arithmetic import Number
from ..base import Schedule, Transform, chain, with_whole_leaves, with_whole_tree
from ..naming import named
from ..transforms.matrix_roots import if_finite, solve_root
from ..transforms.scaling import scale_by_learning_rate
from ..transforms.weight_decay import add_decayed_weights

Tree = PyTree[Tensor]


class FullMatrixState(NamedTuple):
    """Full-matrix Adagrad's statistic."""

    outer: Tensor  # (n, n), at least fp32: the sum of the outer products of gradients of n elements


def _init_matrix(num_elements: int, dtype: torch.dtype, device: torch.device) -> FullMatrixState:
    return FullMatrixState(
        torch.zeros(num_elements, num_elements, dtype=sum_dtype(dtype), device=device)
    )


def _step(g: Tensor, state: FullMatrixState, eps: float) -> tuple[Tensor, FullMatrixState]:
    """The direction of a flat gradient, and the state after it."""
    outer = if_finite(torch.addr(state.outer, g, g), state.outer)
    return solve_root(outer, g, eps), FullMatrixState(outer)


@named
def scale_by_full_matrix_adagrad(eps: float = 1e-8, *, limit: int = 256 * 2**20) -> Transform:
    """Multiply each leaf's gradient by the inverse root of the sum of its outer products.

    Source: Duchi et al., 2011 (JMLR 12), Figure 1, full matrices: `(eps + G ** (1/2)) ** -1 g`,
    with zero for the inverse along eigenvalues of G that are rounding; g has no part there.
    Gradients that are nearly multiples of each other leave small eigenvalues that aren't: a last
    bit of the gradient grows by the inverse of their root, at most `1 / eps`.

    State: for n elements an n x n matrix, at the leaf's owner. Sharded: two all-to-alls, about 2S/N
    bytes per rank.

    Args:
        eps: added to the root's eigenvalues.
        limit: bytes of one leaf's matrix above which `init` refuses, naming the size.
    """

    def init(param: Tensor) -> FullMatrixState:
        return _init_matrix(param.numel(), param.dtype, param.device)

    def update(update: Tensor, state: FullMatrixState) -> tuple[Tensor, FullMatrixState]:
        direction, state = _step(update.reshape(-1).to(state.outer.dtype), state, eps)
        return direction.to(update.dtype).reshape(update.shape), state

    def cost(shape: tuple[int, ...]) -> float:
        return float(torch.Size(shape).numel()) ** 3

    def check(params: Tree, across: Across) -> None:
        leaves: list[Tensor] = optree.tree_leaves(params)
        extents: list[Any] = optree.tree_leaves(across.extents)
        for path, leaf, extent in zip(paths(params), leaves, extents, strict=True):
            _refuse(
                extent.numel,
                leaf.dtype,
                limit,
                path,
                "partition the tree, with adagrad for this leaf",
            )

    return _checked(with_whole_leaves(init, update, cost=cost), check)


@named
def scale_by_full_matrix_adagrad_tree(eps: float = 1e-8, *, limit: int = 256 * 2**20) -> Transform:
    """Multiply the gradient, as one vector over all leaves, by the inverse root of the sum of its
    outer products.

    Source: Duchi et al., 2011 (JMLR 12), Figure 1; see `scale_by_full_matrix_adagrad`, which takes
    each leaf alone.

    State: for n elements in the tree an n x n matrix, on every rank. Sharded: updates are gathered,
    S (N-1)/N bytes per rank, and every rank does all the work.

    Args:
        limit: bytes of the matrix above which `init` refuses, naming the size it would need.
    """

    def init(params: Tree) -> FullMatrixState:
        leaves = optree.tree_leaves(params)
        device = leaves[0].device if leaves else torch.device("cpu")
        return _init_matrix(sum(leaf.numel() for leaf in leaves), _widest(leaves), device)

    def update(updates: Tree, state: FullMatrixState) -> tuple[Tree, FullMatrixState]:
        leaves, treedef = optree.tree_flatten(updates)
        flat = torch.cat(
            [state.outer.new_empty(0), *(g.reshape(-1).to(state.outer.dtype) for g in leaves)]
        )
        direction, state = _step(flat, state, eps)
        parts = direction.split([leaf.numel() for leaf in leaves])
        made = [
            part.to(leaf.dtype).reshape(leaf.shape)
            for part, leaf in zip(parts, leaves, strict=True)
        ]
        return treedef.unflatten(made), state

    def check(params: Tree, across: Across) -> None:
        num_elements = sum(extent.numel for extent in optree.tree_leaves(across.extents))
        leaves = optree.tree_leaves(params)
        _refuse(
            num_elements,
            _widest(leaves),
            limit,
            None,
            "use scale_by_full_matrix_adagrad, leaf by leaf",
        )

    return _checked(with_whole_tree(init, update, limit=limit), check)


def _widest(leaves: list[Tensor]) -> torch.dtype:
    dtype = torch.float32
    for leaf in leaves:
        dtype = torch.promote_types(dtype, leaf.dtype)
    return dtype


def _refuse(
    num_elements: int, dtype: torch.dtype, limit: int, path: str | None, remedy: str
) -> None:
    size = num_elements**2 * sum_dtype(dtype).itemsize
    if size > limit:
        what = (
            f"full-matrix Adagrad of {num_elements} elements would need {size} bytes for its matrix"
        )
        message = explain(
            what, path=path, expected=f"at most limit={limit}", remedy=f"{remedy}, or raise limit"
        )
        raise TransformError(message)


def _checked(transform: Transform, check: Any) -> Transform:
    """`transform` with a check of the params before `init`: by full shapes, so the same on every
    rank."""

    def init(params: Tree, across: Across) -> Any:
        check(params, across)
        return transform.init(params, across)

    return dataclasses.replace(transform, init_fn=init)


@named
def full_matrix_adagrad(
    learning_rate: Number | Schedule,
    eps: float = 1e-8,
    *,
    whole_tree: bool = False,
    weight_decay: Number | Schedule = 0.0,
    limit: int = 256 * 2**20,
) -> Transform:
    """Adagrad with full matrices, of each leaf, or with `whole_tree` of all leaves together (Duchi
    et al., 2011).

    Weight decay joins the gradient. State: n^2 numbers for n elements, at a leaf's owner; for the
    whole tree on every rank. Sharded: two all-to-alls, about 2S/N bytes per rank; for the whole
    tree all is gathered.

    Raises:
        TransformError: by `init`, where a matrix would take more than `limit` bytes; it says how
            many.
    """
    directions = (
        scale_by_full_matrix_adagrad_tree if whole_tree else scale_by_full_matrix_adagrad
    )(eps, limit=limit)
    return chain(
        add_decayed_weights(weight_decay), directions, scale_by_learning_rate(learning_rate)
    )
