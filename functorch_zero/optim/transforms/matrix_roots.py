"""Eigenvectors and inverse roots of symmetric matrices, for optimizers that precondition leaves.

Note [No answer]: a failure here would be the owner's alone, and the other ranks would wait for it.
So the case without an answer is part of an optimizer's definition: `eigh` never raises, and
`if_finite` keeps statistics finite. A gradient with a NaN or an infinity leaves them as they were.
Its update is not finite, which `apply_if_finite` or the step sees on all ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..arithmetic import identity


def is_due(count: Tensor, every: int) -> bool:
    """Whether work that is done once per `every` steps is done at step `count` (from 0).

    The counter is on the CPU: reading it waits for no device.
    """
    # Without reading the count where the answer is always yes
    return every == 1 or int(count) % every == 0


def if_finite(new: Tensor, old: Tensor) -> Tensor:
    """`new`, or for each matrix of a batch that has a NaN or an infinity, `old`.

    Args:
        new: (..., n, n), at the leaf's owner.
        old: like `new`.
    """
    finite = new.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)  # (..., 1, 1) bool
    return torch.where(finite, new, old)


def eigh(a: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (..., n), ascending, and eigenvectors (..., n, n) of finite symmetric matrices.

    Where LAPACK or cuSOLVER does not converge, float64 is tried. As a last fallback the matrices
    count as diagonal, for the whole batch: their diagonals are the eigenvalues and the unit vectors
    the eigenvectors. See Note [No answer].

    Args:
        a: (..., n, n).
    """
    # In its own dtype first: float64 is slower, and seldom needed
    for dtype in (a.dtype, torch.float64):
        try:
            values, vectors = torch.linalg.eigh(a.to(dtype))
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            continue
        return values.to(a.dtype), vectors.to(a.dtype)
    # Neither converged: an answer all the same, and the same structure
    unit = identity(a.shape[-1], a.dtype, a.device)
    return a.diagonal(dim1=-2, dim2=-1), unit.expand_as(a)


def inverse_root(a: Tensor, p: int, ridge: float) -> Tensor:
    """`(a + ridge * largest eigenvalue) ** (-1 / p)` of positive semidefinite matrices.

    Eigenvalues that are rounding, negative ones too, count as zero. The root of a zero matrix is
    large and finite.

    Args:
        a: (..., n, n), a batch.
        p: 2 for the inverse square root, 4 for the inverse fourth root.
        ridge: relative to the largest eigenvalue.
    """
    values, vectors = eigh(a)  # (..., n), ascending, and (..., n, n)
    size = a.shape[-1]
    if not size:
        return vectors  # an empty matrix has no largest eigenvalue
    precision = torch.finfo(a.dtype)
    # Of a zero matrix the ridge, too, would be zero: the largest counts as tiny, but its root fits
    largest = values.amax(-1, keepdim=True).clamp(min=precision.tiny**0.5)
    # At most a tenth of the ridge, so that counting them as zero changes a root little
    rounding = min(size * precision.eps, ridge / 10) * largest
    shifted = values.where(values > rounding, 0.0) + ridge * largest
    roots = shifted.pow(-1 / p).unsqueeze(-2)  # (..., 1, n): scales columns
    # V @ diag(roots) @ V.T, without the diagonal matrix
    return (vectors * roots) @ vectors.mT


def solve_root(a: Tensor, g: Tensor, eps: float) -> Tensor:
    """`(eps + a ** (1/2)) ** -1 @ g`, with 0 along eigenvalues that are rounding.

    Args:
        a: (n, n), positive semidefinite.
        g: (n,), in the range of `a`: it has no part along those eigenvalues but rounding.
        eps: added to the root's eigenvalues.
    """
    # No largest eigenvalue, and nothing to solve for
    if not len(g):
        return g
    values, vectors = eigh(a)
    # An eigenvalue below this is rounding: its vector is arbitrary, and dividing by it is noise
    least = len(g) * torch.finfo(a.dtype).eps * values.amax().clamp(min=0)
    roots = values.clamp(min=0).sqrt()
    # `where` drops the quotients of zero eigenvalues, which may be infinite if eps is 0
    inverse = torch.where(values > least, 1 / (eps + roots), 0.0)
    return vectors @ (inverse * (vectors.mT @ g))
