"""Hessian-vector products of a loss, on whole or sharded trees.

Note [slope]: the slope of a loss along a vector is the inner product of its gradient and the
vector. The slope's gradient by the params is the Hessian times the vector; by the vector it is the
loss's gradient. So one gradient of the slope gives both. It is taken as that of any loss: a mean
over ranks, at every level, by weights. The gradient inside of it is one by whole leaves, with a
graph, and so the outer backward goes through forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import wraps
from typing import Any

import optree
import torch
from optree import tree_map
from torch import Tensor

from ..errors import StructureError
from ..optim.apply_updates import apply_updates
from ..params import engine_of, map_nodes
from ..tree import PyTree, paths, same_structure
from .backward import dense, nodes_behind, noting, refuse_reentrant_checkpoints
from .loss import Aux, check_loss, independent
from .program import (
    GradientOptions,
    LossCall,
    check_callable_here,
    unshard,
    whole_value_and_grad,
)

_VALUE = "(loss)"  # the loss among the slope's metrics
_LIKE = "pass a tree like the gradients, as fz.zero_updates(params) is"


def hvp(loss: Callable[..., Any], *, accumulate: int = 1) -> Callable[..., tuple[Any, Any, Any]]:
    """The function that gives a loss, its gradients, and its Hessian times a vector.

    `hvp(loss)(params, vector, *args)` gives `(value, grads, product)`, or
    `((value, metrics), grads, product)`. Value and gradients are those of `value_and_grad(loss)`.
    So are `accumulate`, `batch=` and `buffers=`. With buffers the result is
    `((value, metrics, buffers), grads, product)`.
    The vector is a tree like the gradients, and so is the product: None where a leaf is frozen and,
    sharded, in pieces. The product is H times the vector, H the Hessian by the trained leaves of
    the mean over ranks.

    The product is exact: backward runs through forward and backward, which needs operators with
    second derivatives. Meanwhile each rank holds params, gradients and vector whole, at every
    level. The vector travels as params do, and is rounded as they are by their `Precision`.

    Collectives: those of one `value_and_grad` of two trees, the params and the vector. At levels 1
    and 2 one all-gather of the vector per trained bucket before.

    Raises:
        StructureError: as for `value_and_grad`; the vector is not like the gradients, or complex
            for a real leaf; a custom function runs a backward of its own in its backward.
        TypeError: micro-batches were asked for, and no `batch=` was given.

    >>> def loss(params, x):
    ...     return (params["w"] ** 3).sum() * x
    >>> params = {"w": torch.tensor([1.0, 2.0], requires_grad=True)}
    >>> value, grads, product = hvp(loss)(params, {"w": torch.tensor([1.0, 10.0])}, 2.0)
    >>> value, grads, product
    (tensor(18.), {'w': tensor([ 6., 24.])}, {'w': tensor([ 12., 240.])})
    """

    options = GradientOptions(accumulate)

    def run(
        params: Any, vector: Any, *args: Any, buffers: Any = None, batch: Any = None
    ) -> tuple[Any, Any, Any]:
        engine = engine_of(params, vector)
        check_callable_here("fz.hvp", engine)
        rank = None if engine is None else engine.rank
        has_aux = False  # known once the loss has returned: whether the caller wants metrics

        # Under the loss's name, which ranks compare
        @wraps(loss, updated=())
        def slope_of(trees: tuple[Any, Any], *args: Any, **named: Any) -> tuple[Tensor, Aux]:
            nonlocal has_aux
            own, along = trees
            inner = _InnerGradient()
            leaves = tree_map(inner.view_of, unshard(own))
            # `named` has the buffers and the batch, where they were given
            value, aux = check_loss(loss(leaves, *args, **named), rank)
            refuse_reentrant_checkpoints(nodes_behind(value), rank)
            has_aux = aux is not None
            given = aux or Aux()
            metrics = {_VALUE: value.detach(), **given.metrics}
            with call.trying(value):
                grads = inner.of(value, leaves)
            slope = _inner_product(grads, along, rank)
            return slope, replace(given, metrics=metrics)

        with _noting_first_derivatives():
            held = _held_like(params, vector)
            call = LossCall(slope_of, args, buffers, batch, options, slope_of=loss)
            engine = engine_of(params, held, args)
            ask = whole_value_and_grad if engine is None else engine.value_and_grad
            found, (product, grads) = ask(call, (params, held))
        # The slope always has metrics, and buffers where the loss was given some
        _, metrics, *new_buffers = found
        value = metrics.pop(_VALUE)
        has_more = has_aux or new_buffers
        return ((value, metrics, *new_buffers) if has_more else value), grads, product

    return run


class _InnerGradient:
    """The gradient of a loss that is taken inside of another one, by views of the leaves.

    A custom function may run modules again in its backward, by a backward of its own. Its gradients
    would pass by the gradient that is being taken, and nothing would tell.

    Nodes of the graph keep this object. It has no tensors: a graph that reaches itself through its
    own hooks is never freed.

    Attributes:
        is_taken: whether it is being taken.
    """

    is_taken = False

    def view_of(self, leaf: Tensor) -> Tensor:
        """A whole leaf of the outer gradient's graph for the loss."""
        view = leaf.view_as(leaf)
        # The inner gradient ends at the view, before its node
        if view.grad_fn is not None:
            view.grad_fn.register_prehook(self._refuse)
        return view

    def of(self, value: Tensor, views: PyTree[Tensor]) -> Sequence[Tensor | None]:
        """The gradients of a loss by the trained leaves, whole, in a graph; None: not reached."""
        trained = [leaf for leaf in optree.tree_leaves(views) if leaf.requires_grad]
        if not trained:
            return []
        self.is_taken = True
        found = torch.autograd.grad(value, trained, create_graph=True, allow_unused=True)
        self.is_taken = False
        return found

    def _refuse(self, grads: Any) -> None:
        """A hook of the leaves' nodes: raise if it runs while the inner gradient is being taken.
        That one ends at the leaves' views, before these nodes, so what comes here is a backward
        that a custom function has begun itself."""
        if self.is_taken:
            raise StructureError(
                "fz.hvp met a custom autograd.Function that runs a backward of its own in its "
                "backward, of which no second derivative can be taken",
                remedy="let the loss run those modules without the function, in fz.hvp alone",
            )


def _inner_product(
    grads: Sequence[Tensor | None], along: PyTree[Tensor], rank: int | None
) -> Tensor:
    """The real inner product of the trained leaves' gradients and a vector, 0-d.

    The vector's leaves become whole one by one, between the products. So backward, which takes the
    newest node first, is done with each of them before it comes to the next.
    """
    total: Tensor | None = None
    trained = [leaf for leaf in optree.tree_leaves(along) if leaf.requires_grad]
    for grad, lazy in zip(grads, trained, strict=True):
        # On every rank, also where its loss doesn't reach the leaf
        direction = unshard(lazy)
        if grad is None:
            continue
        # Of a complex leaf, real and imaginary parts are coordinates of their own
        term = (dense(grad).conj() * direction).real.sum()
        total = term if total is None else total + term
    if total is None:
        raise independent(rank)
    return total


def _held_like(params: Any, vector: Any) -> Any:
    """The vector in the form of the params: zeros where it has None, and trained where they are."""
    zeros = tree_map(lambda p: torch.zeros_like(p, requires_grad=p.requires_grad), params)
    if engine_of(params, vector) is not None:
        try:
            return map_nodes(apply_updates, zeros, vector)
        except (StructureError, ValueError) as error:
            error.add_note(f"fz.hvp(loss)(params, vector, *args) takes the vector second: {_LIKE}.")
            raise
    same_structure(params, vector, what="the vector", none_is_leaf=True, remedy=_LIKE)
    # None of the params themselves are among the paths and leaves, too
    names = paths(params, lambda node: node is None)
    both = (optree.tree_leaves(tree, none_is_leaf=True) for tree in (params, vector))
    for path, leaf, along in zip(names, *both, strict=True):
        _check_vector(path, leaf, along)
    return apply_updates(zeros, vector)


def _check_vector(path: str, leaf: Tensor | None, along: Any) -> None:
    """Raise unless a leaf of the vector is None, or a tensor like a trained leaf."""
    if along is None:
        return
    if isinstance(along, Tensor) and along.requires_grad:
        raise StructureError(
            "fz.hvp was given trained params in the place of the vector",
            path=path,
            expected="fz.hvp(loss)(params, vector, *args), the vector like the gradients",
            remedy=f"{_LIKE}; params themselves as fz.pieces(params)",
        )
    expected = tuple(leaf.shape) if leaf is not None and leaf.requires_grad else None
    got = tuple(along.shape) if isinstance(along, Tensor) else type(along).__name__
    if got != expected:
        raise StructureError(
            "a leaf of the vector is not like the gradient's",
            path=path,
            expected="None: no leaf is trained there" if expected is None else f"shape {expected}",
            got=got,
            remedy=_LIKE,
        )


def _noting_first_derivatives() -> AbstractContextManager[None]:
    """Around both gradients: torch's error for an operator, or a function, without a second
    derivative gets a note."""
    return noting(
        "fz.hvp differentiates the loss twice. Remedy: use an operator with second derivatives; "
        "for attention, call it under torch.nn.attention.sdpa_kernel("
        "torch.nn.attention.SDPBackend.MATH), and for modules under torch.compile the modules "
        "themselves",
        "derivative for aten::",
        "once_differentiable",
        "double backward",
    )
