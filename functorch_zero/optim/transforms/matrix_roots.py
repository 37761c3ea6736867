"""Eigenvectors and inverse roots of symmetric matrices, for optimizers that precondition whole
leaves.

What these do when there is no answer is part of an optimizer's definition, since a failure would be
the owner's alone: `eigh` never raises. Statistics are kept finite by `if_finite`: a gradient with a
NaN or an infinity leaves them as they were (its update is not finite, which `apply_if_finite` or
the step sees on all ranks).
"""

from __future__ import annotations

import torch
from torch import Tensor


def if_finite(new: Tensor, old: Tensor) -> Tensor:
    """`new`, or for each matrix of a batch that has a NaN or an infinity, `old`."""
    finite = new.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    return torch.where(finite, new, old)


def eigh(a: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, ascending, and eigenvectors of a batch of finite symmetric matrices.

    Where LAPACK or cuSOLVER does not converge it is tried in float64, and then, as a last fallback,
    the matrices count as diagonal: for the whole batch, their diagonals are the eigenvalues and the
    unit vectors the eigenvectors.
    """
    for dtype in (a.dtype, torch.float64):
        try:
            values, vectors = torch.linalg.eigh(a.to(dtype))
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            continue
        return values.to(a.dtype), vectors.to(a.dtype)
    unit = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    return a.diagonal(dim1=-2, dim2=-1), unit.expand_as(a)


def inverse_root(a: Tensor, p: int, ridge: float) -> Tensor:
    """`(a + ridge * largest eigenvalue) ** (-1 / p)` of a batch of positive semidefinite matrices.

    Eigenvalues that are rounding, negative ones too, count as zero. The root of a zero matrix is
    large and finite.
    """
    values, vectors = eigh(a)
    if not a.shape[-1]:
        return vectors
    largest = values.amax(-1, keepdim=True).clamp(min=torch.finfo(a.dtype).tiny ** 0.5)
    rounding = min(a.shape[-1] * torch.finfo(a.dtype).eps, ridge / 10) * largest
    shifted = values.where(values > rounding, 0.0) + ridge * largest
    return (vectors * shifted.pow(-1 / p).unsqueeze(-2)) @ vectors.mT


def solve_root(a: Tensor, g: Tensor, eps: float) -> Tensor:
    """`(eps + a ** (1/2)) ** -1 @ g` for a matrix and a vector in its range; 0 along eigenvalues
    that are rounding."""
    if not len(g):
        return g
    values, vectors = eigh(a)
    least = len(g) * torch.finfo(a.dtype).eps * values.amax().clamp(min=0)
    inverse = torch.where(values > least, 1 / (eps + values.clamp(min=0).sqrt()), 0.0)
    return vectors @ (inverse * (vectors.mT @ g))
