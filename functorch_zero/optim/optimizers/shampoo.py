"""Shampoo: whole matrices, in blocks, between inverse roots of the sums of their outer products."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..across import sum_dtype
from ..arithmetic import Number
from ..base import Schedule, Transform, chain, step_count, with_whole_leaves
from ..naming import named
from ..transforms.matrices import Matrices, matrices
from ..transforms.matrix_roots import if_finite, inverse_root
from ..transforms.momentum import trace
from ..transforms.scaling import scale_by_learning_rate
from ..transforms.weight_decay import add_decayed_weights
from ..wrappers.masking import Mask

Graft = Literal["sgd", "adagrad", "rmsprop"]


class Side(NamedTuple):
    """One side of a block: the statistic and its root. All at the leaf's owner, at least fp32."""

    outer: Tensor  # (count, n, n): the sum, or the mean, of outer products
    root: Tensor  # (count, n, n): its inverse root, as of the last time it was taken


class ShampooState(NamedTuple):
    """Shampoo's state of one leaf."""

    count: Tensor  # type: ignore[assignment]  # 0-d int64, on the CPU, at the leaf's owner
    # For each block, row by row: the left side, and of a matrix the right side
    blocks: tuple[tuple[Side, ...], ...]
    # like the param, at least fp32, at its owner: sum or mean of squares; () where grafting needs
    # none
    graft: Any


def cuts(size: int, block_size: int) -> list[slice]:
    """A dim in blocks; the last may be smaller."""
    return [slice(start, min(start + block_size, size)) for start in range(0, size, block_size)]


def is_due(count: Tensor, every: int) -> bool:
    """Whether a step that comes every so many is due. The counter is on the CPU: reading it waits
    for nothing."""
    return every == 1 or int(count) % every == 0


@named
def scale_by_shampoo(
    b2: float = 1.0,
    eps: float = 1e-6,
    *,
    block_size: int = 1024,
    precondition_frequency: int = 1,
    graft: Graft | None = "adagrad",
    graft_b2: float = 0.99,
    graft_eps: float = 1e-8,
    as_matrices: Matrices | None = None,
) -> Transform:
    """Multiply each matrix by the inverse fourth roots of the sums of `g @ g.T` and `g.T @ g`.

    Source: Gupta et al., 2018 (1802.09568), Algorithm 1 (vectors: the order 1 of Algorithm 2, an
    inverse square root); blocks, grafting and the relative ridge as in Anil et al., 2020
    (2002.09018). Leaves of more dims are stacks of matrices, see `as_matrices`, rather than the
    paper's tensors with a root for each dim.

    Roots are by eigenvectors: eigenvalues below zero count as zero, `eps` times the largest is
    added. Where that does not converge see `roots.eigh`. A gradient that is not finite leaves the
    statistics as they were. Where a statistic has a null space, a last bit of the gradient grows by
    up to `eps ** (-1 / 4)` (vectors: `eps ** (-1 / 2)`).

    State, at the leaf's owner: for a block of m x n, 2 (m^2 + n^2) numbers; with grafting (not
    "sgd") a tensor like the param. Sharded: two all-to-alls, about 2S/N bytes per rank.

    Args:
        b2: decay of the statistics; 1 sums, as the paper does.
        eps: the ridge, relative to the largest eigenvalue.
        block_size: longer dims are cut into blocks of this size, each a matrix of its own.
        precondition_frequency: roots are taken every so many steps, the first one included.
        graft: whose step size (its norm, per leaf) the direction takes; None for Shampoo's own.
        graft_b2: decay of rmsprop's mean of squares.
        graft_eps: in adagrad's and rmsprop's denominators.
    """
    if graft not in (None, "sgd", "adagrad", "rmsprop"):
        raise ValueError(f"graft must be 'sgd', 'adagrad', 'rmsprop' or None, got {graft!r}")

    view = matrices if as_matrices is None else as_matrices

    def blocks_of(shape: tuple[int, ...]) -> list[tuple[slice, slice]]:
        _, rows, cols = view(shape)
        return [(row, col) for row in cuts(rows, block_size) for col in cuts(cols, block_size)]

    def init(param: Tensor) -> ShampooState:
        dtype, count, is_vector = (
            sum_dtype(param.dtype),
            view(tuple(param.shape))[0],
            param.ndim < 2,
        )

        def side(where: slice) -> Side:
            size = where.stop - where.start
            return Side(
                torch.zeros(count, size, size, dtype=dtype, device=param.device),
                torch.eye(size, dtype=dtype, device=param.device).repeat(count, 1, 1),
            )

        blocks = [
            (side(row),) if is_vector else (side(row), side(col))
            for row, col in blocks_of(tuple(param.shape))
        ]
        squares = () if graft in (None, "sgd") else torch.zeros_like(param, dtype=dtype)
        return ShampooState(step_count(), tuple(blocks), squares)

    def new_side(old: Side, outer: Tensor, order: int, count: Tensor) -> Side:
        mixed = if_finite(b2 * old.outer + (1.0 if b2 == 1.0 else 1 - b2) * outer, old.outer)
        return Side(
            mixed,
            inverse_root(mixed, 2 * order, eps)
            if is_due(count, precondition_frequency)
            else old.root,
        )

    def precondition(
        g: Tensor, sides: tuple[Side, ...], count: Tensor
    ) -> tuple[Tensor, tuple[Side, ...]]:
        if len(sides) == 1:
            left = new_side(sides[0], g @ g.mT, 1, count)
            return left.root @ g, (left,)
        left, right = new_side(sides[0], g @ g.mT, 2, count), new_side(sides[1], g.mT @ g, 2, count)
        return left.root @ g @ right.root, (left, right)

    def grafted(g: Tensor, squares: Any, count: Tensor) -> tuple[Tensor, Any]:
        if graft == "sgd":
            return g, squares
        if graft == "adagrad":
            new = squares + g * g
            return g / (new.sqrt() + graft_eps), new
        new = (graft_b2 * squares + (1 - graft_b2) * g * g).to(squares.dtype)
        corrected = new / (1 - graft_b2 ** (count + 1).double()).to(new.dtype)
        return g / (corrected.sqrt() + graft_eps), new

    def update(update: Tensor, state: ShampooState) -> tuple[Tensor, ShampooState]:
        shape = tuple(update.shape)
        g = update.to(sum_dtype(update.dtype)).reshape(view(shape))
        direction, blocks = torch.zeros_like(g), []
        for (row, col), sides in zip(blocks_of(shape), state.blocks, strict=True):
            direction[:, row, col], sides = precondition(g[:, row, col], sides, state.count)
            blocks.append(sides)
        squares = state.graft
        if graft is not None:
            size, squares = grafted(g.reshape(shape), squares, state.count)
            norm, wanted = torch.linalg.vector_norm(direction), torch.linalg.vector_norm(size)
            direction = direction * torch.where(norm == 0, 0.0, wanted / norm)
        return direction.reshape(shape).to(update.dtype), ShampooState(
            state.count + 1, tuple(blocks), squares
        )

    def cost(shape: tuple[int, ...]) -> float:
        count = view(shape)[0]
        sizes = [(row.stop - row.start, col.stop - col.start) for row, col in blocks_of(shape)]
        return float(count * sum(m**3 + (n**3 if len(shape) > 1 else 0) for m, n in sizes))

    return with_whole_leaves(init, update, cost=cost)


@named
def shampoo(
    learning_rate: Number | Schedule,
    momentum: Number = 0.9,
    b2: float = 1.0,
    eps: float = 1e-6,
    *,
    block_size: int = 1024,
    precondition_frequency: int = 1,
    graft: Graft | None = "adagrad",
    weight_decay: Number | Schedule = 0.0,
    mask: Mask | None = None,
    nesterov: bool = False,
    as_matrices: Matrices | None = None,
) -> Transform:
    """Shampoo with grafting, then momentum and decoupled weight decay. See `scale_by_shampoo`.

    Source: Gupta et al., 2018 (1802.09568); Anil et al., 2020 (2002.09018).

    State: 1 tensor like params in pieces; at owners the blocks' statistics and roots and the
    graft's squares. Sharded: two all-to-alls, about 2S/N bytes per rank.

    Args:
        mask: which leaves decay; None for all.
    """
    directions = scale_by_shampoo(
        b2,
        eps,
        block_size=block_size,
        precondition_frequency=precondition_frequency,
        graft=graft,
        as_matrices=as_matrices,
    )
    decay = add_decayed_weights(weight_decay, mask)
    return chain(
        directions, trace(momentum, nesterov), decay, scale_by_learning_rate(learning_rate)
    )
