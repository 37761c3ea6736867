"""Sums and maxima over dims of a tensor of which a contiguous range of elements is here, and the
way back: an answer's values put beside the elements.

A range of elements is a few boxes, one after the other: of a matrix the end of a row, whole rows,
and the beginning of a row. Each box is a tensor of its own, a view of the range, of which torch
takes sums and maxima. Answers add up box by box: in a fixed order on every device, unlike sums at
indices, which CUDA adds as they come.

A piece of a box of the tensor is first taken as a piece of a tensor of the box's shape. The answer
about that is the box's part of the answer about the whole. `layout/placed.py` has such
pieces, of leaves that torch's tensor parallelism has cut by columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from ..groups.protocol import ReduceOp
from ..layout.extent import Box, Extent
from ..optim.across import Shape, reduce_over, reduced_dtype, smallest, with_ones, without


def boxes_of_range(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    """The boxes that the elements [start, stop) of a flattened tensor consist of, in their order:
    at most 2 * dims - 1, and one of a 0-d tensor."""
    if start == stop:
        return
    if stop - start == prod(shape):
        yield tuple((0, size) for size in shape)
        return
    row = prod(shape[1:])  # elements per index of the first dim
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)
    # Within one row
    if first == last:
        for rest in boxes_of_range(shape[1:], head, tail):
            yield (first, first + 1), *rest
        return
    # The end of a row, whole rows, the beginning of a row; each may be missing
    if head:
        for rest in boxes_of_range(shape[1:], head, row):
            yield (first, first + 1), *rest
        first += 1
    if first < last:
        yield (first, last), *((0, size) for size in shape[1:])
    for rest in boxes_of_range(shape[1:], 0, tail):
        yield (last, last + 1), *rest


def _in_boxes(piece: Tensor, extent: Extent) -> Iterator[tuple[Box, Tensor]]:
    """The boxes that a piece (n,) consists of, each with its elements: a view of its shape."""
    boxes = [*boxes_of_range(extent.shape, extent.start, extent.stop)]
    shapes = [tuple(stop - start for start, stop in box) for box in boxes]
    for box, shape, own in zip(boxes, shapes, piece.split([*map(prod, shapes)]), strict=True):
        yield box, own.view(shape)


def _place_in_answer(box: Box, dims: Shape) -> tuple[slice, ...]:
    """Where the answer over `dims` about this box lies in the answer about the whole."""
    return tuple(slice(*ends) for dim, ends in enumerate(box) if dim not in dims)


def reduce_piece(piece: Tensor, extent: Extent, dims: Shape, op: ReduceOp) -> Tensor:
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
        out[_place_in_answer(extent.box, dims)] = reduce_piece(piece, extent.in_box, dims, op)
        return out
    # An empty piece has no rows to look at
    if not extent.num_here:
        return piece.new_full(shape, identity, dtype=dtype)
    # All of the leaf lies here: as the oracle takes it
    if extent.num_here == extent.numel:
        return reduce_over(piece.view(extent.shape), dims, op)
    # One number of all elements, wherever they lie
    if len(dims) == len(extent.shape) > 0:
        return piece.sum(dtype=dtype) if op == "sum" else piece.max()
    out = piece.new_full(shape, identity, dtype=dtype)  # the whole answer
    for box, own in _in_boxes(piece, extent):
        place, here = out[_place_in_answer(box, dims)], reduce_over(own, dims, op)
        if op == "max":
            torch.maximum(place, here, out=place)
        else:
            place += here
    return out


def spread_over_piece(answer: Tensor, extent: Extent, dims: Shape) -> Tensor:
    """An answer's values beside the elements of a piece, (extent.num_here,); the inverse direction
    of `reduce_piece`.

    Args:
        answer: over `dims`, in the full reduced shape.
    """
    if extent.box is not None:
        whole = answer.reshape(without(extent.shape, dims))
        return spread_over_piece(whole[_place_in_answer(extent.box, dims)], extent.in_box, dims)
    if len(dims) == len(extent.shape) > 0:
        # 0-d: a view, as many elements long as the piece
        return answer.expand(extent.num_here)
    answer = answer.reshape(with_ones(extent.shape, dims))
    out = answer.new_empty(extent.num_here)
    for box, beside in _in_boxes(out, extent):
        # Along dims that were reduced, one value goes beside all elements
        place = tuple(slice(None) if dim in dims else slice(*ends) for dim, ends in enumerate(box))
        beside.copy_(answer[place])
    return out
