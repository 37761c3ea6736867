"""SOAP: Adam in the eigenbasis of Shampoo's statistics.

Note [Turning the basis]: three things differ from the paper, so that a last bit of a gradient shows
as a last bit of the update.

A statistic has a null space while the ranks of its gradients add up to less than its rows: almost
always at first. Its eigenvectors there are arbitrary, and rounding picks them. So the basis is
turned by QR of `(outer / norm(outer) + shift) @ basis`, whose fixed points are the same
eigenvectors. And it is started by ten such turns from the unit vectors, not by an
eigendecomposition. `shift=0` turns as the paper does: then two runs that differ in a last bit soon
share nothing in such a leaf.

Elements that are mere rounding once rotated count as zero, where Adam would divide them by their
own size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..across import Shape, sum_dtype
from ..arithmetic import bias_correction, identity
from ..base import NumberOrSchedule, Transform, chain, real_only, step_count, with_whole_leaves
from ..naming import named
from ..transforms.matrices import Matrices, matrices
from ..transforms.matrix_roots import if_finite, is_due
from ..transforms.scaling import scale_by_learning_rate
from ..transforms.weight_decay import add_decayed_weights
from ..wrappers.masking import Mask

FIRST_TURNS = 10  # of the basis, in the first step: see Note [Turning the basis]


class Basis(NamedTuple):
    """One side of a matrix. At the leaf's owner, at least fp32."""

    outer: Tensor  # (count, n, n): running mean of outer products
    vectors: Tensor  # (count, n, n): the columns of the basis


class SoapState(NamedTuple):
    """SOAP's state of one leaf, all at its owner, at least fp32."""

    count: Tensor  # type: ignore[assignment]  # 0-d int64, on the CPU
    mu: Tensor  # (count, rows, cols): running mean of the gradients
    nu: Tensor  # (count, rows, cols): running mean of the squared gradients in the basis
    left: Any  # Basis of the rows, or () where they are too many or the leaf is a vector
    right: Any  # Basis of the columns, likewise


def first_basis(count: int, size: int, like: Tensor) -> Basis:
    """The unit vectors, and no statistic, in the dtype and on the device of a tensor."""
    # The first turns start from the unit vectors
    unit = identity(size, like.dtype, like.device)
    return Basis(like.new_zeros(count, size, size), unit.repeat(count, 1, 1))


def turned(basis: Basis, shift: float) -> Tensor:
    """The vectors of a basis, (count, n, n), turned once. See Note [Turning the basis]."""
    # A zero statistic is divided by this, and stays zero
    tiny = torch.finfo(basis.outer.dtype).tiny
    norm = torch.linalg.matrix_norm(basis.outer, keepdim=True).clamp(min=tiny)
    # The power iteration's product: columns lean to the eigenvectors of large eigenvalues
    towards = basis.outer / norm @ basis.vectors + shift * basis.vectors
    vectors: Tensor = torch.linalg.qr(towards).Q
    return vectors


def without_rounding(x: Tensor) -> Tensor:
    """A batch of matrices (count, rows, cols) with zeros for elements that are mere rounding.

    That is, beside their matrix's norm.
    """
    least = 4 * torch.finfo(x.dtype).eps * torch.linalg.matrix_norm(x, keepdim=True)
    return x.masked_fill(x.abs() < least, 0.0)


def into_basis(x: Tensor, left: Any, right: Any) -> Tensor:
    """Matrices (count, rows, cols) in the coordinates of their bases; () is the unit vectors."""
    # Plain Adam: nothing was rotated, so nothing is rounding
    if left == () and right == ():
        return x
    if left != ():
        x = left.vectors.mT @ x
    if right != ():
        x = x @ right.vectors
    return without_rounding(x)


def out_of_basis(x: Tensor, left: Any, right: Any) -> Tensor:
    """The inverse of `into_basis`."""
    if left != ():
        x = left.vectors @ x
    if right != ():
        x = x @ right.vectors.mT
    return x


class AdamStep(NamedTuple):
    """Adam's direction, and its moments after the step; all (count, rows, cols)."""

    direction: Tensor
    mu: Tensor
    nu: Tensor


@named
def scale_by_soap(
    b1: float = 0.95,
    b2: float = 0.95,
    eps: float = 1e-8,
    *,
    shampoo_beta: float | None = None,
    precondition_frequency: int = 10,
    max_precond_dim: int = 10000,
    shift: float = 1e-3,
    as_matrices: Matrices | None = None,
) -> Transform:
    """Adam in a slowly turning basis, the eigenvectors L, R of means of `g @ g.T` and `g.T @ g`.

        mu = b1 * mu + (1 - b1) * g
        nu = b2 * nu + (1 - b2) * (L.T @ g @ R)**2
        u = (L.T @ mu @ R / (1 - b1**t)) / (sqrt(nu / (1 - b2**t)) + eps)
        update = L @ u @ R.T
        left = shampoo_beta * left + (1 - shampoo_beta) * g @ g.T    (first step: left = g @ g.T)
        right likewise, of g.T @ g
        L, R turn towards the eigenvectors of left, right

    Source: Vyas et al., 2024 (2409.11321), Algorithms 3 and 4. As in the authors' code the first
    step only starts the basis: its update is zero, and t counts from the second. Vectors get plain
    Adam. Note [Turning the basis] in this module says how it differs from the paper. A gradient
    that is not finite leaves the statistics and the basis as they were.

    Needs: whole leaves at their owners: two all-to-alls, about 2S/N bytes per rank. State, at the
    leaf's owner: for m x n, 2 (m n + m^2 + n^2) numbers.

    Args:
        b1: decay of the mean of the gradients, per step.
        b2: decay of the mean of their squares in the basis, per step.
        eps: added to the root, against division by zero.
        shampoo_beta: decay of the outer products, per step; None for b2.
        precondition_frequency: steps between turns of the basis.
        max_precond_dim: longer dims keep the unit vectors for a basis, and no statistic.
        shift: see Note [Turning the basis]; 0 for the paper's turns.
        as_matrices: from a full shape to `(count, rows, cols)`, the stack of matrices it is; None
            for `matrices`.
    """
    beta = b2 if shampoo_beta is None else shampoo_beta
    # From the full shape, as the owner sees the leaf
    view = matrices if as_matrices is None else as_matrices

    def init(param: Tensor) -> SoapState:
        shape = view(tuple(param.shape))
        count, rows, cols = shape
        # Of the stack's shape, so that no step reshapes the moments
        mu = torch.zeros(shape, dtype=sum_dtype(param.dtype), device=param.device)
        # A side without a basis is (): its dims keep their own coordinates
        is_vector = param.ndim < 2
        has_left = not is_vector and rows <= max_precond_dim
        has_right = not is_vector and cols <= max_precond_dim
        return SoapState(
            count=step_count(),
            mu=mu,
            nu=mu.clone(),
            left=first_basis(count, rows, mu) if has_left else (),
            right=first_basis(count, cols, mu) if has_right else (),
        )

    def adam(g: Tensor, state: SoapState) -> AdamStep:
        # 0-d: 0 in the first step, which leaves the moments alone; 1 later
        later = (state.count > 0).double()
        # In the leaf's own coordinates: a mean that need not turn with the basis
        mu = state.mu + ((1 - b1) * later).to(g.dtype) * (g - state.mu)
        # nu is a mean over steps, each in its own basis: a turn leaves it, as in Algorithm 3
        rotated = into_basis(g, state.left, state.right)
        rotated_mu = into_basis(mu, state.left, state.right)
        nu = state.nu + ((1 - b2) * later).to(g.dtype) * (rotated * rotated - state.nu)
        # Steps that count; in the first, where there are none, the corrections are 1
        c1 = bias_correction(b1, state.count) + (1 - later)
        c2 = bias_correction(b2, state.count) + (1 - later)
        corrected = rotated_mu / c1.to(mu.dtype)
        scaled = corrected / ((nu / c2.to(nu.dtype)).sqrt() + eps)
        # The first step's mu is zero, so its direction is zero, too
        return AdamStep(out_of_basis(scaled, state.left, state.right), mu, nu)

    def new_basis(old: Any, outer: Tensor, count: Tensor) -> Any:
        """A side one step on, from this step's outer products (count, n, n)."""
        if old == ():
            return old
        is_first = int(count) == 0  # on the CPU: waits for no device
        weight = 1.0 if is_first else 1 - beta
        # A gradient that is not finite leaves the mean as it was: see Note [No answer]
        mean = if_finite(old.outer + weight * (outer - old.outer), old.outer)
        basis = Basis(mean, old.vectors)
        # FIRST_TURNS of them start the basis; later there is one whenever it is due
        num_due = 1 if is_due(count, precondition_frequency) else 0
        num_turns = FIRST_TURNS if is_first else num_due
        for _ in range(num_turns):
            basis = basis._replace(vectors=turned(basis, shift))
        return basis

    def update(update: Tensor, state: SoapState) -> tuple[Tensor, SoapState]:
        g = update.to(state.nu.dtype).reshape(state.nu.shape)
        # All (count, rows, cols), at least float32
        direction, mu, nu = adam(g, state)
        # The basis turns after the step, as in Algorithm 3
        left = new_basis(state.left, g @ g.mT, state.count)
        right = new_basis(state.right, g.mT @ g, state.count)
        new = SoapState(state.count + 1, mu, nu, left, right)
        return direction.reshape(update.shape).to(update.dtype), new

    def cost(shape: Shape) -> float:
        """Multiplications of the rotations and of the turns, up to a factor."""
        count, rows, cols = view(shape)
        # Products with both bases, and a QR per side
        rotations = (rows + cols) * rows * cols
        turns = rows**3 + cols**3
        return float(count * rotations + count * turns)

    return real_only(with_whole_leaves(init, update, cost=cost))


@named
def soap(
    learning_rate: NumberOrSchedule = 3e-3,
    b1: float = 0.95,
    b2: float = 0.95,
    eps: float = 1e-8,
    *,
    weight_decay: NumberOrSchedule = 0.01,
    mask: Mask | None = None,
    shampoo_beta: float | None = None,
    precondition_frequency: int = 10,
    max_precond_dim: int = 10000,
    as_matrices: Matrices | None = None,
) -> Transform:
    """SOAP, with decoupled weight decay (g gradient, p param).

        update = -learning_rate * (scale_by_soap(g) + weight_decay * p)

    Source: Vyas et al., 2024 (2409.11321); see `scale_by_soap` for where it differs.

    Needs: whole leaves: two all-to-alls, about 2S/N bytes per rank. State: for a matrix of m x n,
    2 (m n + m^2 + n^2) numbers at its owner.

    Args:
        learning_rate: a number or a schedule.
        weight_decay: decoupled, times the learning rate: per step.
        mask: which leaves decay; None for all. Others: see `scale_by_soap`.
    """
    directions = scale_by_soap(
        b1,
        b2,
        eps,
        shampoo_beta=shampoo_beta,
        precondition_frequency=precondition_frequency,
        max_precond_dim=max_precond_dim,
        as_matrices=as_matrices,
    )
    return chain(
        directions,
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )
