"""`ShapesOnly`: answers to a transform's questions of leaves that are not here as a whole."""

from __future__ import annotations

from collections.abc import Sequence

from optree import tree_map
from torch import Tensor

from ..layout.extent import Extent
from .across import DimOp, Question, Shape, Tree, reduced_dtype, without
from .local import Local


class ShapesOnly(Local):
    """Answers have the shapes and dtypes of real ones: sums over dims are ones, which are the same
    however leaves are cut, and whole leaves, which may be large, have no values."""

    def reduce_dims(self, questions: Sequence[Question], op: DimOp) -> tuple[Tree, ...]:
        def ones(x: Tensor, extent: Extent, dims: Shape) -> Tensor:
            return x.new_ones(without(extent.shape, dims), dtype=reduced_dtype(x.dtype, op))

        return tuple(self._per_leaf(ones, tree, dim) for tree, dim in questions)

    def gather(self, trees: list[Tree], limit: int) -> list[Tree]:
        def whole(x: Tensor, extent: Extent) -> Tensor:
            return x.new_empty(extent.shape, device="meta")

        return [tree_map(whole, tree, self.extents) for tree in trees]
