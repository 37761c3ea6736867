"""A loss that is not there has a stand-in, which goes through the layout's units.

What units gather and reduce, and when, does not depend on the leaves inside. It supposes what only
a loss can say: each unit is entered once, in the layout's order, and all take part in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import optree
import torch
from torch import Tensor, nn

from ..layout.layout import Layout, LeafSpec, Unit
from ..model.lazy_param import LazyParam
from ..step.loss import LossFn


def one_leaf_a_bucket(layout: Layout) -> Layout:
    """The same units and buckets, each bucket with one leaf that fills it, or nearly, where several
    leaves do."""
    buckets = []
    for b, bucket in enumerate(layout.buckets):
        fills = bucket.numels == (bucket.numel,)  # then its gradient needs no copy
        buckets.append(
            replace(bucket, leaves=(b,), shapes=((bucket.numel - (not fills),),), offsets=(0,))
        )
    leaves = [LeafSpec(b.name, b.shapes[0], b.dtype, b.trainable, b.cut, b.dtypes) for b in buckets]
    return replace(
        layout,
        leaves=tuple(leaves),
        buckets=tuple(buckets),
        treedef=optree.tree_structure([0] * len(buckets)),
    )


def loss_through(layout: Layout, num_saved: Callable[[Unit], int]) -> LossFn:
    """A loss on such a layout; `num_saved`: how many leaves a unit's backward needs (two stand for
    more)."""

    def loss(params: list[LazyParam], buffers: Any, batch: Any) -> Tensor:
        x = torch.zeros(())
        for unit in layout.units:
            entrance, saved = params[unit.buckets[0]].entrance, min(num_saved(unit), 2)
            if not unit.modules:
                x = _Use.apply(x, saved, *entrance.touch())  # type: ignore[no-untyped-call]
            for path in unit.modules:
                leaves = entrance.enter(path)
                if path == unit.modules[-1]:
                    with entrance.watch():
                        x = _Use.apply(x, saved, *leaves)  # type: ignore[no-untyped-call]
                del leaves  # as a module's places let go of them
                entrance.leave(path)
        return x

    return loss


def order_of_units(layout: Layout, num_saved: Callable[[Unit], int], *, keeps: bool) -> list[str]:
    """The order in which this loss fetches units, forward and, unless they are kept, backward."""
    again = [
        unit.name or "root"
        for unit in layout.units
        if unit.modules and num_saved(unit) and not keeps
    ]
    return [*(unit.name or "root" for unit in layout.units), *reversed(again)]


class _Use(torch.autograd.Function):
    """Forward: x. Backward asks for some of the leaves, and gives all of them a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, num_saved: int, *leaves: Tensor) -> Tensor:
        ctx.save_for_backward(*(leaves[0] for _ in range(num_saved)))
        ctx.like = [(leaf.shape, leaf.dtype, leaf.device) for leaf in leaves]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        grads = [
            torch.empty(shape, dtype=dtype, device=device) if need else None
            for (shape, dtype, device), need in zip(ctx.like, needed, strict=True)
        ]
        return grad, None, *grads


def saved_by_names(layout: Layout, model: Any) -> Callable[[Unit], int]:
    """Linear maps, convolutions and norms need their weights in backward and not their biases; a
    lookup needs none."""
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    lookups = {f"{path}.weight".lstrip(".") for path, m in modules if isinstance(m, nn.Embedding)}

    def num_saved(unit: Unit) -> int:
        paths = [layout.leaves[n].path for b in unit.buckets for n in layout.buckets[b].leaves]
        return sum(
            path not in lookups and not path.rpartition(".")[2].startswith("bias") for path in paths
        )

    return num_saved
