"""Sums over dims of a tensor of which only a contiguous range of elements is here, and their
answers put back.

A full shape is read as (rows, width): `width` is the last run of dims that are all reduced or all
kept, `rows` the dims before it. Then a piece is a few whole rows with a part of one at each end,
and each row goes to one place of the answer.

A piece of a box of the tensor is first taken as a piece of a tensor of the box's shape. The answer
about that is the box's part of the answer about the whole.
"""

from __future__ import annotations

import math
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..groups.protocol import ReduceOp
from ..layout.extent import Box, Extent
from ..optim.across import sum_dtype, without


class _Rows(NamedTuple):
    width: int
    reduced: bool  # whether the width is reduced away
    start: int  # the first row that is here, in part at least
    stop: int
    places: Tensor  # (stop - start,) int64: the row of the answer that each row goes to
    num_places: int


def _rows(extent: Extent, dims: tuple[int, ...], device: torch.device) -> _Rows:
    shape = extent.shape
    reduced = len(shape) - 1 in dims
    first = len(shape)
    while first > 0 and (first - 1 in dims) == reduced:
        first -= 1
    width = prod(shape[first:])
    start, stop = (extent.start // width, -(-extent.stop // width)) if width else (0, 0)
    rows = torch.arange(start, stop, device=device)
    places, stride_in, stride_out = torch.zeros_like(rows), 1, 1
    for dim in reversed(range(first)):
        if dim not in dims:
            places += rows // stride_in % shape[dim] * stride_out
            stride_out *= shape[dim]
        stride_in *= shape[dim]
    return _Rows(width, reduced, start, stop, places, stride_out)


def _kept(box: Box, dims: tuple[int, ...]) -> tuple[slice, ...]:
    """The box's part of an answer over `dims`."""
    return tuple(slice(*ends) for dim, ends in enumerate(box) if dim not in dims)


def reduce_piece(piece: Tensor, extent: Extent, dims: tuple[int, ...], op: ReduceOp) -> Tensor:
    """This piece's share of a sum or maximum over `dims`, in the full reduced shape."""
    dtype = sum_dtype(piece.dtype) if op == "sum" else piece.dtype
    identity = 0.0 if op == "sum" else -math.inf
    if extent.box is not None:
        out = piece.new_full(without(extent.shape, dims), identity, dtype=dtype)
        out[_kept(extent.box, dims)] = reduce_piece(piece, extent.in_box, dims, op)
        return out
    shape = without(extent.shape, dims)
    if not extent.num_here:
        return piece.new_full(shape, identity, dtype=dtype)
    if dims and extent.num_here == extent.numel:  # the whole tensor
        whole = piece.view(extent.shape)
        return whole.sum(dims, dtype=dtype) if op == "sum" else whole.amax(dims)
    if len(dims) == len(extent.shape) > 0:
        return piece.sum(dtype=dtype) if op == "sum" else piece.max()
    r = _rows(extent, dims, piece.device)
    padded = piece.new_full(((r.stop - r.start) * r.width,), identity, dtype=dtype)
    padded[extent.start - r.start * r.width : extent.stop - r.start * r.width] = piece
    rows = padded.view(-1, r.width)
    if r.reduced:
        rows = (rows.sum(1) if op == "sum" else rows.amax(1)).unsqueeze(1)
    out = piece.new_full((r.num_places, rows.shape[1]), identity, dtype=dtype)
    if op == "sum":
        out.index_add_(0, r.places, rows)
    else:
        out.scatter_reduce_(0, r.places[:, None].expand_as(rows), rows, "amax")
    return out.view(shape)


def spread_over_piece(answer: Tensor, extent: Extent, dims: tuple[int, ...]) -> Tensor:
    """The values of an answer beside each element of the piece, 1-D."""
    if extent.box is not None:
        whole = answer.reshape(without(extent.shape, dims))
        return spread_over_piece(whole[_kept(extent.box, dims)], extent.in_box, dims)
    if not extent.num_here:
        return answer.new_empty(0)
    if len(dims) == len(extent.shape) > 0:
        return answer.expand(extent.num_here)
    r = _rows(extent, dims, answer.device)
    rows = answer.reshape(r.num_places, -1)[r.places].expand(-1, r.width)
    return rows.reshape(-1)[extent.start - r.start * r.width : extent.stop - r.start * r.width]
