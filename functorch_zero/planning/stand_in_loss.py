"""A stand-in for a loss that is not there: it goes through the layout's units.

It supposes what only a loss can say: each unit is entered once, in the layout's order, and all take
part in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from ..layout.layout import Layout, Unit
from ..model.lazy_param import LazyParam
from ..tree import PyTree


def loss_through(layout: Layout, num_saved: Callable[[Unit], int]) -> Callable[..., Tensor]:
    """A loss on a tree of this layout.

    `num_saved` says how many leaves made on use a unit's backward needs; two stand for more.
    """

    def loss(params: PyTree[LazyParam], *others: Any) -> Tensor:
        leaves: list[Any] = optree.tree_leaves(params)
        # The activations' place: a number, so that they take no room
        x = torch.zeros((), device="cpu")
        for unit, content in zip(layout.units, layout.contents, strict=True):
            first = leaves[content.leaves[0]]
            if content.is_table:
                no_ids = torch.empty(0, dtype=torch.int64, device=first.device)
                x = _Use.apply(x, 0, 0, embedding(no_ids, first))  # type: ignore[no-untyped-call]
                continue
            # Each lazy parameter knows the entrance of its unit
            entrance = first.entrance
            # The leaf that is saved: one that is made on use, if there is one
            n = next(_made_on_use(layout, unit), content.leaves[0])
            k, saved = content.leaves.index(n), min(num_saved(unit), 2)
            # Leaves that no module uses are fetched at the first touch
            if not unit.modules:
                x = _Use.apply(x, k, saved, *entrance.touch())  # type: ignore[no-untyped-call]
            for path in unit.modules:  # all are entered, and the last one computes
                whole = entrance.enter(path)
                if path == unit.modules[-1]:
                    # Inside, leaves are saved by place, so that backward asks for them
                    with entrance.watch():
                        x = _Use.apply(x, k, saved, *whole)  # type: ignore[no-untyped-call]
                del whole  # as a module's places let go of them
                entrance.leave(path)
        return x

    return loss


def _made_on_use(layout: Layout, unit: Unit) -> Iterator[int]:
    """The numbers of the unit's leaves whose flats are gathered or cast on use. The others stay,
    and backward needn't fetch them again."""
    for b in unit.buckets:
        bucket = layout.buckets[b]
        if bucket.is_made_on_use:
            yield from bucket.leaves


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
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    embeddings = [path for path, module in modules if isinstance(module, nn.Embedding)]
    lookups = {f"{path}.weight".lstrip(".") for path in embeddings}

    def num_saved(unit: Unit) -> int:
        paths = {layout.leaves[n].path for n in _made_on_use(layout, unit)} - lookups
        return sum(not path.rpartition(".")[2].startswith("bias") for path in paths)

    return num_saved
