"""Shampoo: whole matrices, in blocks, between inverse roots of the sums of their outer products."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ...errors import check_choice
from ..across import Shape, sum_dtype
from ..arithmetic import Number, bias_correction, identity
from ..base import NumberOrSchedule, Transform, chain, real_only, step_count, with_whole_leaves
from ..naming import named
from ..transforms.matrices import Matrices, matrices
from ..transforms.matrix_roots import if_finite, inverse_root, is_due
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
    """Shampoo's state of one leaf, all at its owner."""

    count: Tensor  # type: ignore[assignment]  # 0-d int64, on the CPU
    # For each block, row by row: the left side, and of a matrix the right side
    blocks: tuple[tuple[Side, ...], ...]
    graft: Any  # like the param, at least fp32: sum or mean of squares; () where none is needed


def blocks_of(x: Tensor, size: int) -> list[Tensor]:
    """A stack of matrices (count, rows, cols) in blocks, as views, row by row: the order of
    `ShampooState.blocks`. The last of a dim may be smaller; empty matrices have none.

    >>> [tuple(block.shape) for block in blocks_of(torch.zeros(1, 5, 2), 2)]
    [(1, 2, 2), (1, 2, 2), (1, 1, 2)]
    """
    # All matrices of a stack are cut alike, and their blocks run as one batch
    if 0 in x.shape[1:]:
        return []
    return [block for band in x.split(size, 1) for block in band.split(size, 2)]


def empty_side(count: int, size: int, dtype: torch.dtype, device: torch.device) -> Side:
    """A block's side before the first step, for `count` matrices: no statistic, unit matrices for
    roots."""
    # As many copies as matrices: each block of each gets its own statistic
    unit = identity(size, dtype, device)
    return Side(
        outer=torch.zeros(count, size, size, dtype=dtype, device=device),
        root=unit.repeat(count, 1, 1),
    )


def graft_step(
    graft: Graft, g: Tensor, squares: Any, count: Tensor, b2: float, eps: float
) -> tuple[Tensor, Any]:
    """The step, like `g`, and the next squares of the optimizer that is grafted on, a diagonal one,
    at step t = count + 1.

        sgd: g
        adagrad: g / (sqrt(squares) + eps), squares = squares + g**2
        rmsprop: g / (sqrt(squares / (1 - b2**t)) + eps), squares = b2 * squares + (1 - b2) * g**2

    Args:
        graft: which optimizer.
        g: like the leaf, at least fp32: the gradient.
        squares: `ShampooState.graft` of the step before.
        count: 0-d int64: the number of steps before this one.
        b2: decay of rmsprop's mean, per step.
        eps: added to the root.
    """
    # No squares: its state stays ()
    if graft == "sgd":
        return g, squares
    if graft == "adagrad":
        sums = squares + g * g
        return g / (sums.sqrt() + eps), sums
    # rmsprop, corrected for having begun at zero
    means = (b2 * squares + (1 - b2) * g * g).to(squares.dtype)
    corrected = means / bias_correction(b2, count + 1).to(means.dtype)
    return g / (corrected.sqrt() + eps), means


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
    """Multiply each matrix g of the updates by inverse fourth roots of its statistics.

        left = b2 * left + (1 - b2) * g @ g.T    (b2 = 1: left + g @ g.T)
        right = b2 * right + (1 - b2) * g.T @ g
        u = left**(-1/4) @ g @ right**(-1/4)    (vectors: left**(-1/2) @ g)
        update = u * norm(graft_step(g)) / norm(u)

    Source: Gupta et al., 2018 (1802.09568), Algorithm 1 (vectors: the order 1 of Algorithm 2, an
    inverse square root); blocks, grafting and the relative ridge as in Anil et al., 2020
    (2002.09018). Leaves of more dims are stacks of matrices, see `as_matrices`, rather than the
    paper's tensors with a root for each dim.

    Roots are by eigenvectors: eigenvalues below zero count as zero, `eps` times the largest is
    added. Where that does not converge see `matrix_roots.eigh`. A gradient that is not finite
    leaves the statistics as they were. Where a statistic has a null space, a last bit of the
    gradient grows by up to `eps ** (-1 / 4)` per side (vectors: `eps ** (-1 / 2)`).

    Needs: whole leaves at their owners: two all-to-alls, about 2S/N bytes per rank. State, at the
    leaf's owner: for a block of m x n, 2 (m^2 + n^2) numbers; with grafting (not "sgd") a tensor
    like the param.

    Args:
        b2: decay of the statistics, per step; 1 sums, as the paper does.
        eps: the ridge, relative to the largest eigenvalue.
        block_size: longer dims are cut into blocks of this size, each a matrix of its own.
        precondition_frequency: steps between the times that roots are taken, the first included.
        graft: whose step size (its norm, per leaf) the direction takes; None for Shampoo's own.
        graft_b2: decay of rmsprop's mean of squares, per step.
        graft_eps: added to adagrad's and rmsprop's roots.
        as_matrices: from a full shape to `(count, rows, cols)`, the stack of matrices it is; None
            for `matrices`.
    """
    check_choice("graft", graft, (None, *get_args(Graft)))

    # From the full shape, as the owner sees the leaf
    view = matrices if as_matrices is None else as_matrices
    share = 1.0 if b2 == 1.0 else 1 - b2  # of a step's outer products in the statistic

    def sides_of(shape: Shape) -> list[Shape]:
        """Of the blocks of a leaf of this shape, the sizes of their sides: rows and columns. A
        vector is one column: only its rows have a statistic."""
        stack = torch.empty(view(shape), device="meta")
        last = 2 if len(shape) < 2 else 3
        return [tuple(block.shape[1:last]) for block in blocks_of(stack, block_size)]

    def init(param: Tensor) -> ShampooState:
        shape = tuple(param.shape)
        count, _, _ = view(shape)
        # At least float32: roots of half-precision sums would be noise
        dtype, device = sum_dtype(param.dtype), param.device
        blocks: list[tuple[Side, ...]] = []
        for sizes in sides_of(shape):
            blocks.append(tuple(empty_side(count, size, dtype, device) for size in sizes))
        # Only grafts that divide by squares keep them
        squares = () if graft in (None, "sgd") else torch.zeros_like(param, dtype=dtype)
        return ShampooState(step_count(), tuple(blocks), squares)

    def new_side(old: Side, outer: Tensor, p: int, count: Tensor) -> Side:
        """A side one step on; its root is the inverse p-th one."""
        # A gradient that is not finite leaves the statistic as it was: see Note [No answer]
        mixed = if_finite(b2 * old.outer + share * outer, old.outer)
        # Until a root is due the statistic moves on, and the old root stays in use
        if not is_due(count, precondition_frequency):
            return Side(mixed, old.root)
        return Side(mixed, inverse_root(mixed, p, eps))

    def new_sides(g: Tensor, sides: tuple[Side, ...], count: Tensor) -> tuple[Side, ...]:
        # One side takes the whole inverse: a square root instead of two fourth roots
        p = 2 * len(sides)
        pairs = zip(sides, (g @ g.mT, g.mT @ g), strict=False)  # of one side, the first
        return tuple(new_side(side, outer, p, count) for side, outer in pairs)

    def precondition(g: Tensor, sides: tuple[Side, ...]) -> Tensor:
        product = sides[0].root @ g  # left**(-1/p) @ g, (count, rows, cols)
        return product if len(sides) == 1 else product @ sides[1].root

    def update(update: Tensor, state: ShampooState) -> tuple[Tensor, ShampooState]:
        shape = tuple(update.shape)
        g = update.to(sum_dtype(update.dtype)).reshape(view(shape))  # (count, rows, cols)
        direction = torch.zeros_like(g)
        blocks: list[tuple[Side, ...]] = []
        rows = zip(*(blocks_of(x, block_size) for x in (g, direction)), state.blocks, strict=True)
        for block, into, old in rows:
            # As in Algorithm 1 the statistic sees the gradient before it is preconditioned
            sides = new_sides(block, old, state.count)
            into.copy_(precondition(block, sides))
            blocks.append(sides)
        squares = state.graft
        if graft is not None:
            # The norm is the whole leaf's, so that blocks keep their proportions
            step, squares = graft_step(
                graft, g.reshape(shape), squares, state.count, graft_b2, graft_eps
            )
            norm = torch.linalg.vector_norm(direction)  # 0-d: of the leaf's whole direction
            wanted = torch.linalg.vector_norm(step)
            direction = direction * torch.where(norm == 0, 0.0, wanted / norm)
        new = ShampooState(state.count + 1, tuple(blocks), squares)
        return direction.reshape(shape).to(update.dtype), new

    def cost(shape: Shape) -> float:
        """Operations of the eigendecompositions, up to a factor."""
        count, _, _ = view(shape)
        # n**3 for the eigenvectors of n x n
        return float(count * sum(n**3 for sizes in sides_of(shape) for n in sizes))

    return real_only(with_whole_leaves(init, update, cost=cost))


@named
def shampoo(
    learning_rate: NumberOrSchedule,
    momentum: Number = 0.9,
    b2: float = 1.0,
    eps: float = 1e-6,
    *,
    block_size: int = 1024,
    precondition_frequency: int = 1,
    graft: Graft | None = "adagrad",
    weight_decay: NumberOrSchedule = 0.0,
    mask: Mask | None = None,
    nesterov: bool = False,
    as_matrices: Matrices | None = None,
) -> Transform:
    """Shampoo with grafting, momentum and decoupled weight decay (g gradient, p param).

        u = trace(scale_by_shampoo(g), momentum)
        update = -learning_rate * (u + weight_decay * p)

    Source: Gupta et al., 2018 (1802.09568); Anil et al., 2020 (2002.09018).

    Needs: whole leaves: two all-to-alls, about 2S/N bytes per rank. State: 1 tensor like params in
    pieces; at owners the blocks' statistics and roots and the graft's squares, see
    `scale_by_shampoo`.

    Args:
        learning_rate: a number or a schedule.
        momentum: decay of the sum of directions, per step.
        weight_decay: decoupled, times the learning rate: per step.
        mask: which leaves decay; None for all.
        nesterov: of the momentum. Others: see `scale_by_shampoo`.
    """
    directions = scale_by_shampoo(
        b2,
        eps,
        block_size=block_size,
        precondition_frequency=precondition_frequency,
        graft=graft,
        as_matrices=as_matrices,
    )
    # Directions are whole at owners; momentum and decay run on pieces
    return chain(
        directions,
        trace(momentum, nesterov),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )
