"""A stand-in for a loss that is not there: it goes through the layout's units.

It supposes what only a loss can say: each unit is entered once, in the layout's order, and all take
part in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from ..model.lazy_param import LazyParam
from ..tree import PyTree, dotted, paths


def loss_through_units(model: Any) -> Callable[..., Tensor]:
    """A loss on the params of a module, or on any tree.

    How many of a unit's leaves its backward needs is guessed by their names: linear maps,
    convolutions and norms need their weights and not their biases; a lookup needs none.
    """
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    embeddings = [path for path, module in modules if isinstance(module, nn.Embedding)]
    lookups = {dotted(path, "weight") for path in embeddings}

    def loss(params: PyTree[LazyParam], *others: Any) -> Tensor:
        leaves: list[Any] = optree.tree_leaves(params)
        names = paths(params)
        # Each lazy parameter knows the entrance of its unit
        entrances = {leaf.entrance.unit.index: leaf.entrance for leaf in leaves}
        # The activations' place: a number, so that they take no room
        x = torch.zeros((), device="cpu")
        for _, entrance in sorted(entrances.items()):
            unit, content = entrance.unit, entrance.unit.content
            if content.is_table:
                table = leaves[content.leaves[0]]
                no_ids = torch.empty(0, dtype=torch.int64, device=table.device)
                x = _Use.apply(x, 0, 0, embedding(no_ids, table))  # type: ignore[no-untyped-call]
                continue
            # Flats that stay needn't be fetched again in backward
            made = [n for b in content.buckets if b.is_made_on_use for n in b.leaves]
            saved = _num_saved([names[n] for n in made], lookups)
            # The leaf that is saved: one that is made on use, if there is one
            k = content.leaves.index(made[0]) if made else 0
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


def _num_saved(made: Sequence[str], lookups: Collection[str]) -> int:
    """How many of the leaves that are made on use backward needs; two stand for more."""
    needed = [path for path in made if path not in lookups]
    # Twice at most: `Overlap` acts at the first two asks
    return min(2, sum(not path.rpartition(".")[2].startswith("bias") for path in needed))


class _Use(torch.autograd.Function):
    """One use of a unit's leaves. Forward returns x. Backward asks `num_saved` times for the k-th
    leaf, and gives all leaves a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, k: int, num_saved: int, *leaves: Tensor) -> Tensor:
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
