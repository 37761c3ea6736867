"""A stand-in for a loss that is not there: it goes through the layout's units.

The leaves inside a unit change neither its gathers and reductions nor their times. The stand-in
supposes the things that only a loss can say: each unit is entered once, in the layout's order, and
all take part in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from ..layout.layout import Bucket, Layout, LeafSpec, Unit
from ..layout.levels import level_of
from ..model.lazy_param import LazyParam


def one_leaf_a_bucket(layout: Layout) -> Layout:
    """The same units and buckets, each bucket with one leaf that fills it, or nearly, where several
    leaves do."""
    buckets, leaves = [], []
    for b, bucket in enumerate(layout.buckets):
        if bucket.cut.by_rows:  # it has one leaf, whose rows the loss looks up
            spec = replace(layout.leaves[bucket.leaves[0]], path=bucket.name)
            buckets.append(replace(bucket, leaves=(b,)))
            leaves.append(spec)
            continue
        # A leaf that fills its bucket needs no copy of its gradient, and several leaves need one
        is_full = bucket.numels == (bucket.numel,)  # one leaf, without padding
        numel = bucket.numel if is_full else bucket.numel - 1
        # One leaf from the flat's start, an element shorter where several are packed
        joined = replace(bucket, leaves=(b,), shapes=((numel,),), offsets=(0,))
        buckets.append(joined)
        leaf = LeafSpec(
            joined.name,
            joined.shapes[0],
            joined.dtype,
            joined.trainable,
            joined.cut,
            joined.dtypes,
        )
        leaves.append(leaf)
    # A list of leaves, one per bucket
    treedef = optree.tree_structure([0] * len(buckets))
    return replace(layout, leaves=tuple(leaves), buckets=tuple(buckets), treedef=treedef)


def loss_through(layout: Layout, num_saved: Callable[[Unit], int]) -> Callable[..., Tensor]:
    """A loss on a layout of `one_leaf_a_bucket`.

    `num_saved` says how many leaves made on use a unit's backward needs; two stand for more.
    """

    def loss(params: list[LazyParam], **others: Any) -> Tensor:
        # The activations' place: a number, so that they take no room
        x = torch.zeros((), device="cpu")
        for unit in layout.units:
            if layout.buckets[unit.buckets[0]].cut.by_rows:
                table = params[unit.buckets[0]]
                no_ids = torch.empty(0, dtype=torch.int64, device=table.device)
                x = _Use.apply(x, 0, 0, embedding(no_ids, table))  # type: ignore[no-untyped-call]
                continue
            # Each lazy parameter knows the entrance of its unit
            entrance = params[unit.buckets[0]].entrance
            # The bucket whose leaf is saved: one that is made on use, if there is one
            k = next(iter(_made_on_use(layout, unit)), 0)
            saved = min(num_saved(unit), 2)
            # Leaves that no module uses are fetched at the first touch
            if not unit.modules:
                x = _Use.apply(x, k, saved, *entrance.touch())  # type: ignore[no-untyped-call]
            for path in unit.modules:  # all are entered, and the last one computes
                leaves = entrance.enter(path)
                if path == unit.modules[-1]:
                    # Inside, leaves are saved by place, so that backward asks for them
                    with entrance.watch():
                        x = _Use.apply(x, k, saved, *leaves)  # type: ignore[no-untyped-call]
                del leaves  # as a module's places let go of them
                entrance.leave(path)
        return x

    return loss


def _made_on_use(layout: Layout, unit: Unit) -> list[int]:
    """The positions in the unit of its buckets whose flats are gathered or cast on use. The
    others stay, and backward needn't fetch them again."""
    return [k for k, b in enumerate(unit.buckets) if _is_made_on_use(layout.buckets[b])]


def _is_made_on_use(bucket: Bucket) -> bool:
    level = level_of(bucket)
    is_cast = bucket.dtypes is not None and not bucket.is_published_as_used
    return not level.by_rows and (level.cuts_params or is_cast)


class _Use(torch.autograd.Function):
    """One use of a unit's leaves. Forward returns x. Backward asks `num_saved` times for the k-th
    leaf, and gives all leaves a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, k: int, num_saved: int, *leaves: Tensor) -> Tensor:
        # Twice at most: `Overlap` acts at the first two asks
        ctx.save_for_backward(*[leaves[k]] * num_saved)
        ctx.like = [(leaf.shape, leaf.dtype, leaf.device) for leaf in leaves]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors  # which gathers the unit again
        grads: list[Tensor | None] = []
        # `x`, `k` and `num_saved` come first, and are no leaves
        for like, is_needed in zip(ctx.like, ctx.needs_input_grad[3:], strict=True):
            shape, dtype, device = like
            grads.append(torch.empty(shape, dtype=dtype, device=device) if is_needed else None)
        return grad, None, None, *grads


def saved_by_names(layout: Layout, model: Any) -> Callable[[Unit], int]:
    """How many of a unit's leaves that are made on use its backward needs, guessed by their names.

    Linear maps, convolutions and norms need their weights in backward and not their biases; a
    lookup needs none.
    """
    lookups = set()  # paths of leaves that backward does not need
    if isinstance(model, nn.Module):
        for path, module in model.named_modules():
            if isinstance(module, nn.Embedding):
                lookups.add(f"{path}.weight".lstrip("."))

    def is_saved(path: str) -> bool:
        name = path.rpartition(".")[2]
        return path not in lookups and not name.startswith("bias")

    def num_saved(unit: Unit) -> int:
        total = 0
        for k in _made_on_use(layout, unit):
            for n in layout.buckets[unit.buckets[k]].leaves:
                total += is_saved(layout.leaves[n].path)
        return total

    return num_saved
