"""SOAP: Adam in the eigenbasis of Shampoo's statistics."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..across import sum_dtype
from ..arithmetic import Number
from ..base import Schedule, Transform, chain, step_count, with_whole_leaves
from ..naming import named
from ..transforms.matrices import Matrices, matrices
from ..transforms.matrix_roots import if_finite
from ..transforms.scaling import scale_by_learning_rate
from ..transforms.weight_decay import add_decayed_weights
from ..wrappers.masking import Mask
from .shampoo import is_due


def without_rounding(x: Tensor) -> Tensor:
    """A batch of matrices with zeros for elements that are mere rounding beside their matrix's
    norm."""
    least = 4 * torch.finfo(x.dtype).eps * torch.linalg.matrix_norm(x, keepdim=True)
    return x.masked_fill(x.abs() < least, 0.0)


class Basis(NamedTuple):
    """One side of a matrix. At the leaf's owner, at least fp32."""

    outer: Tensor  # (count, n, n): mean of outer products
    vectors: Tensor  # (count, n, n): the columns of the basis


class SoapState(NamedTuple):
    """SOAP's state of one leaf, all at its owner."""

    count: Tensor  # type: ignore[assignment]  # 0-d int64, on the CPU
    mu: Tensor  # (count, rows, cols): mean of the gradients
    nu: Tensor  # (count, rows, cols): mean of the squared gradients in the basis
    left: Any  # Basis of the rows, or () where they are too many or the leaf is a vector
    right: Any  # Basis of the columns, likewise


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
    """Adam in a slowly turning basis, the eigenvectors of the means of `g @ g.T` and `g.T @ g`.

    Source: Vyas et al., 2024 (2409.11321), Algorithms 3 and 4. As in the authors' code the first
    step only starts the basis: its update is zero, and bias correction counts from the second.
    Vectors get plain Adam.

    Three things differ, so that a last bit of a gradient shows as a last bit of the update. Where a
    statistic has a null space (a gradient's rank is less than its rows, so almost always at first),
    its eigenvectors are arbitrary and rounding picks them. So the basis is turned by QR of
    `(outer / norm(outer) + shift) @ basis`, whose fixed points are the same eigenvectors; and it is
    started by ten such turns from the unit vectors, not by an eigendecomposition. `shift=0` turns
    as the paper does: then two runs that differ in a last bit soon share nothing in such a leaf.
    And elements that are rounding once rotated count as zero, where Adam would divide them by
    their own size.

    A gradient that is not finite leaves the statistics and the basis as they were.

    State, at the leaf's owner: for m x n, 2 (m n + m^2 + n^2) numbers. Sharded: two all-to-alls,
    about 2S/N bytes.

    Args:
        shampoo_beta: decay of the outer products; None for b2.
        precondition_frequency: steps between turns of the basis.
        max_precond_dim: longer dims keep the unit vectors for a basis, and no statistic.
    """
    beta = b2 if shampoo_beta is None else shampoo_beta
    view = matrices if as_matrices is None else as_matrices

    def turned(basis: Basis) -> Tensor:
        norm = torch.linalg.matrix_norm(basis.outer, keepdim=True).clamp(
            min=torch.finfo(basis.outer.dtype).tiny
        )
        vectors: Tensor = torch.linalg.qr(
            basis.outer / norm @ basis.vectors + shift * basis.vectors
        )[0]
        return vectors

    def turn(old: Any, outer: Tensor, count: Tensor) -> Any:
        if old == ():
            return old
        first = int(count) == 0
        weight = 1.0 if first else 1 - beta
        basis = Basis(if_finite(old.outer + weight * (outer - old.outer), old.outer), old.vectors)
        for _ in range(10 if first else int(is_due(count, precondition_frequency))):
            basis = basis._replace(vectors=turned(basis))
        return basis

    def project(x: Tensor, left: Any, right: Any, *, back: bool = False) -> Tensor:
        if left != ():
            x = (left.vectors if back else left.vectors.mT) @ x
        if right != ():
            x = x @ (right.vectors.mT if back else right.vectors)
        return x if back or (left == () and right == ()) else without_rounding(x)

    def init(param: Tensor) -> SoapState:
        dtype, shape = sum_dtype(param.dtype), view(tuple(param.shape))

        def basis(size: int) -> Any:
            if param.ndim < 2 or size > max_precond_dim:
                return ()
            zeros = torch.zeros(shape[0], size, size, dtype=dtype, device=param.device)
            return Basis(
                zeros, torch.eye(size, dtype=dtype, device=param.device).repeat(shape[0], 1, 1)
            )

        mu = torch.zeros(shape, dtype=dtype, device=param.device)
        return SoapState(step_count(), mu, mu.clone(), basis(shape[1]), basis(shape[2]))

    def adam(g: Tensor, state: SoapState) -> tuple[Tensor, Tensor, Tensor]:
        """Adam's direction in the basis, and the moments. The first step counts for nothing."""
        later = (state.count > 0).double()
        mu = state.mu + ((1 - b1) * later).to(g.dtype) * (g - state.mu)
        rotated, m = (project(x, state.left, state.right) for x in (g, mu))
        nu = state.nu + ((1 - b2) * later).to(g.dtype) * (rotated * rotated - state.nu)
        steps = state.count.double()
        c1, c2 = (1 - decay**steps + (1 - later) for decay in (b1, b2))
        scaled = (m / c1.to(m.dtype)) / ((nu / c2.to(nu.dtype)).sqrt() + eps)
        return project(scaled, state.left, state.right, back=True), mu, nu

    def update(update: Tensor, state: SoapState) -> tuple[Tensor, SoapState]:
        g = update.to(state.nu.dtype).reshape(state.nu.shape)
        direction, mu, nu = adam(g, state)
        left, right = (
            turn(state.left, g @ g.mT, state.count),
            turn(state.right, g.mT @ g, state.count),
        )
        made = direction.reshape(update.shape).to(update.dtype)
        return made, SoapState(state.count + 1, mu, nu, left, right)

    def cost(shape: tuple[int, ...]) -> float:
        count, rows, cols = view(shape)
        return float(count * (rows + cols) * rows * cols + count * (rows**3 + cols**3))

    return with_whole_leaves(init, update, cost=cost)


@named
def soap(
    learning_rate: Number | Schedule = 3e-3,
    b1: float = 0.95,
    b2: float = 0.95,
    eps: float = 1e-8,
    *,
    weight_decay: Number | Schedule = 0.01,
    mask: Mask | None = None,
    shampoo_beta: float | None = None,
    precondition_frequency: int = 10,
    max_precond_dim: int = 10000,
    as_matrices: Matrices | None = None,
) -> Transform:
    """SOAP: Adam in the eigenbasis of Shampoo's statistics, with decoupled weight decay. See
    `scale_by_soap`.

    Source: Vyas et al., 2024 (2409.11321).

    State: for a matrix of m x n, 2 (m n + m^2 + n^2) numbers at its owner. Sharded: two
    all-to-alls, about 2S/N bytes per rank.

    Args:
        mask: which leaves decay; None for all.
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
        directions, add_decayed_weights(weight_decay, mask), scale_by_learning_rate(learning_rate)
    )
