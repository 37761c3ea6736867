"""Tensors seen as stacks of matrices, for Muon, Shampoo and SOAP."""

from __future__ import annotations

import math
from collections.abc import Callable

from ..across import Shape

Matrices = Callable[[Shape], tuple[int, int, int]]  # full shape -> (count, rows, cols)


def matrices(shape: Shape) -> tuple[int, int, int]:
    """How a tensor of this shape is seen as `(count, rows, cols)`: a stack of matrices.

    2-D: one matrix. 3-D: a stack of them, as of experts. 4-D and 5-D: a convolution
    kernel, one matrix of (out, in * kernel). A scalar or vector is one column.

    >>> matrices((8, 4)), matrices((16, 8, 4)), matrices((8, 4, 3, 3)), matrices((5,))
    ((1, 8, 4), (16, 8, 4), (1, 8, 36), (1, 5, 1))
    """
    if len(shape) < 2:
        return 1, math.prod(shape), 1  # the empty product is 1: a scalar is a 1 x 1 matrix
    if len(shape) == 3:
        return shape
    return 1, shape[0], math.prod(shape[1:])
