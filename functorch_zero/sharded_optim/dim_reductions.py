"""Sums and maxima over dims of a tensor of which a contiguous range of elements is here, and the
way back: an answer's values put beside the elements.

A full shape is read as (rows, width). `width` is the last run of dims that are all reduced or all
kept; `rows` are the dims before it. So a piece is a few whole rows with a part of one at each end.
Each row goes to one row of the answer.

A piece of a box of the tensor is first taken as a piece of a tensor of the box's shape. The answer
about that is the box's part of the answer about the whole. No layout here cuts leaves into boxes:
they are for pieces that lie in some columns of a matrix.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..groups.protocol import ReduceOp
from ..layout.extent import Box, Extent
from ..optim.across import reduced_dtype, smallest, without


class _Rows(NamedTuple):
    """The rows of a tensor that a piece has a part of, and where they go."""

    width: int  # elements per row
    is_width_reduced: bool  # if so, a row becomes one number of the answer
    start: int  # the first row that is here, in part at least
    stop: int
    answer_rows: Tensor  # (stop - start,) int64: for each row, the row of the answer it goes to
    num_answer_rows: int  # of the whole answer, the same on all ranks

    def in_rows(self, extent: Extent) -> slice:
        """Where the piece lies in its rows, flattened."""
        first = self.start * self.width
        return slice(extent.start - first, extent.stop - first)


def _rows(extent: Extent, dims: tuple[int, ...], device: torch.device) -> _Rows:
    """The rows of a piece that isn't empty, for a question about `dims`."""
    shape = extent.shape
    is_width_reduced = len(shape) - 1 in dims
    num_row_dims = len(shape)
    # From the end, as far as dims are of one kind
    while num_row_dims > 0 and (num_row_dims - 1 in dims) == is_width_reduced:
        num_row_dims -= 1

    width = prod(shape[num_row_dims:])
    start = stop = 0
    if width:
        start = extent.start // width
        stop = -(-extent.stop // width)  # rounded up

    # A row's number is an index in all row dims; that of its answer, in those that are kept
    rows = torch.arange(start, stop, device=device)
    answer_rows = torch.zeros_like(rows)
    # Of each row dim, from the innermost on, in rows and in rows of the answer
    stride, answer_stride = 1, 1
    for dim in reversed(range(num_row_dims)):
        if dim not in dims:
            index = rows // stride % shape[dim]
            answer_rows += index * answer_stride
            answer_stride *= shape[dim]
        stride *= shape[dim]
    return _Rows(width, is_width_reduced, start, stop, answer_rows, answer_stride)


def _kept(box: Box, dims: tuple[int, ...]) -> tuple[slice, ...]:
    """The box's part of an answer over `dims`."""
    return tuple(slice(*ends) for dim, ends in enumerate(box) if dim not in dims)


def reduce_piece(piece: Tensor, extent: Extent, dims: tuple[int, ...], op: ReduceOp) -> Tensor:
    """This piece's share of a sum or maximum over `dims`.

    Args:
        piece: (extent.num_here,).
        extent: where the piece lies in its leaf.
        dims: of the leaf, in order; may be none or all.
        op: "sum" or "max".

    Returns:
        A tensor of the full reduced shape, the same on all ranks: 0, or the `smallest` number,
        where none of the elements is here. Sums are in at least float32.
    """
    dtype = reduced_dtype(piece.dtype, op)
    identity = 0 if op == "sum" else smallest(dtype)
    shape = without(extent.shape, dims)
    if extent.box is not None:
        out = piece.new_full(shape, identity, dtype=dtype)
        out[_kept(extent.box, dims)] = reduce_piece(piece, extent.in_box, dims, op)
        return out
    # An empty piece has no rows to look at
    if not extent.num_here:
        return piece.new_full(shape, identity, dtype=dtype)
    # All of the leaf lies here: torch's own reduction, as the oracle takes it. Without dims it
    # would be taken over all of them.
    is_whole = extent.num_here == extent.numel
    if dims and is_whole:
        whole = piece.view(extent.shape)
        return whole.sum(dims, dtype=dtype) if op == "sum" else whole.amax(dims)
    # One number of all elements, wherever they lie
    if len(dims) == len(extent.shape) > 0:
        return piece.sum(dtype=dtype) if op == "sum" else piece.max()
    return _reduce_rows(piece, extent, dims, op, identity, dtype)


def _reduce_rows(
    piece: Tensor,
    extent: Extent,
    dims: tuple[int, ...],
    op: ReduceOp,
    identity: float,
    dtype: torch.dtype,
) -> Tensor:
    """The same row by row, for a piece of some rows and an answer of several values."""
    r = _rows(extent, dims, piece.device)
    # (num_rows * width,): elements of the first and last row that lie elsewhere don't count
    padded = piece.new_full(((r.stop - r.start) * r.width,), identity, dtype=dtype)
    padded[r.in_rows(extent)] = piece
    rows = padded.view(-1, r.width)  # (num_rows, width)
    if r.is_width_reduced:
        reduced = rows.sum(1) if op == "sum" else rows.amax(1)
        rows = reduced.unsqueeze(1)  # (num_rows, 1)

    answer_width = rows.shape[1]
    out = piece.new_full((r.num_answer_rows, answer_width), identity, dtype=dtype)  # whole answer
    if op == "sum":
        # On CUDA in no fixed order, unless torch is asked for deterministic algorithms
        out.index_add_(0, r.answer_rows, rows)
    else:
        index = r.answer_rows.unsqueeze(1).expand_as(rows)
        out.scatter_reduce_(0, index, rows, "amax")
    return out.view(without(extent.shape, dims))


def spread_over_piece(answer: Tensor, extent: Extent, dims: tuple[int, ...]) -> Tensor:
    """An answer's values beside the elements of a piece, (extent.num_here,); the inverse direction
    of `reduce_piece`.

    Args:
        answer: over `dims`, in the full reduced shape.
    """
    if extent.box is not None:
        whole = answer.reshape(without(extent.shape, dims))
        return spread_over_piece(whole[_kept(extent.box, dims)], extent.in_box, dims)
    if not extent.num_here:
        return answer.new_empty(0)
    if len(dims) == len(extent.shape) > 0:
        # 0-d: a view, as many elements long as the piece
        return answer.expand(extent.num_here)
    r = _rows(extent, dims, answer.device)
    answer_rows = answer.reshape(r.num_answer_rows, -1)
    # (num_rows, width); where the width was reduced, one number beside all of its row
    rows = answer_rows[r.answer_rows].expand(-1, r.width)
    return rows.reshape(-1)[r.in_rows(extent)]
