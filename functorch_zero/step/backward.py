"""Backward of a loss in one process: the gradients of leaves, and losses without any."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from ..errors import StructureError


def noting_lost_graphs() -> AbstractContextManager[None]:
    """Around the step's own backward: torch's error for a graph that is gone gets a note."""
    return noting(
        "The step runs backward itself, on the loss that it is given back, whose graph is gone. "
        "Remedy: return the loss without .backward(); for x.grad, call it with retain_graph=True, "
        "or on a graph of its own",
        "backward through the graph a second time",
    )


def noting_missing_graphs() -> AbstractContextManager[None]:
    """Around a program, which runs without gradients: torch's error for a backward of its own gets
    a note."""
    return noting(
        "A program runs without gradients, outside of the losses whose gradients it takes. Remedy: "
        "loss, grads = fz.value_and_grad(loss_fn)(params, ...), without .backward()",
        "does not require grad",
    )


@contextmanager
def noting(note: str, *words: str) -> Iterator[None]:
    """Add a note to an error of torch's that has one of these words."""
    try:
        yield
    except RuntimeError as error:
        # With a note already, it is an error of a loss itself
        is_noted = hasattr(error, "__notes__")
        if not is_noted and any(own in str(error) for own in words):
            error.add_note(note)
        raise


def gradients(
    loss: Tensor, leaves: Sequence[Tensor], seed: Tensor | None = None
) -> list[Tensor | None]:
    """The gradients of a loss, dense; None for a leaf that it doesn't reach.

    A custom function may run modules again in its backward, by a backward of its own. The gradients
    of that one go to the leaves' `.grad`, and count as well.

    Args:
        loss: 0-d.
        leaves: of autograd's graph, of this call's own.
        seed: 0-d, by which the gradients are multiplied; None: 1.
    """
    # A backward inside of the loss has left some, which are no part of its gradient
    for leaf in leaves:
        leaf.grad = None
    grads = []
    found = torch.autograd.grad(loss, leaves, seed, allow_unused=True)
    for leaf, grad in zip(leaves, found, strict=True):
        given = [dense(x) for x in (grad, leaf.grad) if x is not None]
        grads.append(sum(given[1:], given[0]) if given else None)
        leaf.grad = None
    return grads


def nodes_behind(*results: Tensor) -> list[Any]:
    """All nodes in the results' graph."""
    waiting, seen = [result.grad_fn for result in results], dict[Any, None]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen[node] = None
            waiting += [fn for fn, _ in node.next_functions]
    return [*seen]


def refuse_reentrant_checkpoints(nodes: Sequence[Any], rank: int | None = None) -> None:
    """Raise if one of the nodes behind a loss is a reentrant checkpoint.

    Its backward is one of its own, whose gradients of params go to `.grad`, where no step looks. So
    torch refuses it where gradients are asked for by tensor; but only where its inputs lead to
    such a tensor. Elsewhere the params inside would get none, without a word.
    """
    # Torch's own, and those made after it by other libraries, go by this name
    if any(node.name() == "CheckpointFunctionBackward" for node in nodes):
        raise StructureError(
            "the loss runs a reentrant checkpoint, which gives params no gradients",
            got="use_reentrant=True in torch.utils.checkpoint, or a function like it",
            rank=rank,
            remedy="checkpoint(..., use_reentrant=False), or functionalize(remat=...)",
        )


def dense(grad: Tensor) -> Tensor:
    """A gradient as optimizers take it: an embedding's may be sparse."""
    return grad if grad.layout == torch.strided else grad.to_dense()
