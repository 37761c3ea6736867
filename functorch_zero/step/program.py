"""The parts of programs: gradients of a loss, and updates applied, on whole or sharded trees.

A function asks the engine of the trees it is given. Trees without one are whole; here is their
arithmetic in one process, which every engine must equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import optree
import torch
from optree import tree_map
from torch import Tensor

from ..errors import StructureError
from ..model.casting import CastParams
from ..model.lazy_param import LazyParam, make_whole
from ..model.untouched import Untouched, is_looked_at
from ..optim.local import Local
from ..params import engine_of, is_on_engine
from ..tree import PyTree, check_tensors, is_plain, same_structure
from .loss import (
    Aux,
    as_metric,
    check_has_values,
    check_loss,
    gradients,
    independent,
    naming_args,
    nodes_behind,
    noting_lost_graphs,
    refuse_reentrant_checkpoints,
    unless_weightless,
)
from .rng import next_stream
from .state import State, check_not_on_meta

# By loss, its unsharded calls in this process; `value_and_grad(loss)` may be made anew for each
_CALLS: WeakKeyDictionary[Callable[..., Any], Iterator[int]] = WeakKeyDictionary()


def _next_call_of(loss: Callable[..., Any]) -> int:
    """The number of this call of a loss, from 0."""
    try:
        return next(_CALLS.setdefault(loss, itertools.count()))
    except TypeError:  # an object that can't be a key
        return 0


def value_and_grad(loss: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """The function that gives a loss and its gradients.

    `value_and_grad(loss)(tree, *args)` calls `loss(tree, *args)`, which returns a 0-d tensor, or
    `(tensor, Aux(metrics=..., weight=...))`. It gives `(value, grads)`, or
    `((value, metrics), grads)`. Gradients are those of the trained leaves of `tree`, which have
    `requires_grad`, and None elsewhere; trees in `args` are read only.

    Sharded trees may be anywhere in `tree` and `args`. Then each rank passes its own part of all
    else in `args`. Value and metrics are means over ranks; gradients are of that mean, in the form
    of pieces. Units of read trees are gathered on use, like those of `tree`. Every rank calls it.
    Collectives: those of each level's row in the table of `layout/levels.py`, and one all-reduce of
    the value.

    Random numbers are torch's own, as they come. Inside of a step they follow from its seed, its
    number, the gradient's number in the step and the part of the batch instead.

    Raises:
        StructureError: the loss uses no trained leaf, or is no scalar, or returned buffers.
        GroupError: ranks have called different things.

    >>> def loss(params, x):
    ...     return ((params["w"] - x) ** 2).sum()
    >>> value, grads = value_and_grad(loss)({"w": torch.zeros(2, requires_grad=True)}, 1.0)
    >>> value, grads
    (tensor(2.), {'w': tensor([-2., -2.])})
    """

    def run(tree: Any, *args: Any) -> tuple[Any, Any]:
        return differentiate(loss, tree, args, counted=loss)

    return run


def differentiate(
    loss: Callable[..., Any], tree: Any, args: tuple[Any, ...], *, counted: Callable[..., Any]
) -> tuple[Any, Any]:
    """A loss and its gradients; see `value_and_grad`.

    `counted`: the user's own function, whose calls are counted: a loss made of it may be new in
    each call.
    """
    # Sharded trees among tree or args decide for all: one engine answers
    engine = engine_of(tree, args)
    if engine is not None:
        return engine.value_and_grad(loss, tree, args)
    look = is_looked_at(_next_call_of(counted))
    # Part 0: one process has all of the batch
    with next_stream(0, _device_of(tree)):
        return _value_and_grad(loss, tree, args, look=look)


def _device_of(tree: Any) -> torch.device:
    """Of its first leaf; the CPU, where it has none."""
    leaves: list[Tensor] = optree.tree_leaves(tree)
    return leaves[0].device if leaves else torch.device("cpu")


def _value_and_grad(
    loss: Callable[..., Any], tree: Any, args: tuple[Any, ...], *, look: bool
) -> tuple[Any, Any]:
    leaves, treedef = optree.tree_flatten(tree)
    # Such a leaf has no storage to be a leaf of a graph
    if any(type(leaf) is LazyParam for leaf in leaves):
        raise StructureError(
            "a gradient inside of a sharded loss was asked for params that are not here yet. "
            "Remedy: make them whole first, `whole = fz.unshard(params)`, and use torch.func.grad"
        )
    if not all(map(is_plain, leaves)):
        check_tensors(tree, "the tree")  # which names the leaf
    check_not_on_meta(tree, args)
    # Autograd leaves of this call's own, so that `tree` is in no autograd graph
    own = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in leaves]
    # Frozen leaves are given to the loss and not differentiated
    trained = [leaf for leaf in own if leaf.requires_grad]
    with torch.enable_grad():
        # One cast for tree and args: trees that are only read may have policies too
        cast = CastParams((treedef.unflatten(own), args), look=look)
        untouched = Untouched(own, look=look)
        own_tree, own_args = cast.params
        with naming_args(args):
            result = loss(own_tree, *own_args)
        value, aux = check_loss(result)
        check_has_values({"loss": value, **(aux.metrics if aux else {})}, own_tree, None)
        refuse_buffers(aux)
        if look:
            refuse_reentrant_checkpoints(nodes_behind(value))
        # Before backward, so that the error comes from the loss that wrote
        cast.finish()
        untouched.check(tree)
        # Nothing trained: no gradients to take
        found: Sequence[Tensor | None] = ()
        if trained:
            with noting_lost_graphs():
                found = gradients(value, trained)
    if all(grad is None for grad in found):
        raise independent()

    of_trained = iter(found)
    grads: list[Tensor | None] = []  # of each leaf of the tree
    for leaf in own:
        grads.append(_whole_grad(next(of_trained), leaf, aux) if leaf.requires_grad else None)
    value = value.detach()
    if aux is None:
        return value, treedef.unflatten(grads)
    metrics = {}
    for name, given in aux.metrics.items():
        metrics[name] = unless_weightless(as_metric(given), aux.weight)
    return (unless_weightless(value, aux.weight), metrics), treedef.unflatten(grads)


def _whole_grad(grad: Tensor | None, leaf: Tensor, aux: Aux | None) -> Tensor:
    """The gradient of a trained leaf: zeros where the loss doesn't use it, or the batch weighs
    nothing."""
    if grad is None:
        return torch.zeros_like(leaf)
    return grad if aux is None else unless_weightless(grad, aux.weight)


def refuse_buffers(aux: Aux | None) -> None:
    """Raise if a loss has returned buffers, which a gradient alone has no place for."""
    if aux is not None and aux.buffers is not None:
        raise StructureError(
            "the loss of value_and_grad returned Aux(buffers=...), and a gradient alone has no "
            "place for them. Remedy: use train_step, which keeps buffers in its state"
        )


_LIKE = "pass the trees that fz.value_and_grad and the optimizer gave of these params"


def dot(a: Any, b: Any) -> Tensor:
    """The inner product of two trees of gradients or updates, one 0-d tensor.

    It is taken, and answered, in at least float32. Sharded, it is that of the whole trees, the same
    on every rank; every rank calls it. One all-reduce. Both trees are in pieces then, as gradients
    and updates are. Params, which are held, are refused.

    >>> grads = {"w": torch.tensor([3.0, 4.0]), "frozen": None}
    >>> dot(grads, grads).sqrt()
    tensor(5.)
    """
    engine = engine_of(a, b)
    if engine is not None:
        product: Tensor = engine.dot(a, b)
        return product
    same_structure(a, b, what="the second tree", remedy=_LIKE)
    return Local(a).dot(a, b)


def zero_updates(params: Any) -> Any:
    """Updates that change nothing: zeros for trained leaves, None elsewhere.

    Sharded they are in pieces, as gradients and updates are. So a program's `init` makes moments of
    its own of them, and `fz.random` draws vectors like them. No communication.

    >>> frozen = torch.ones(3)
    >>> zero_updates({"w": torch.ones(2, requires_grad=True), "frozen": frozen})
    {'w': tensor([0., 0.]), 'frozen': None}
    """
    engine = engine_of(params)
    if engine is None:
        return tree_map(lambda p: torch.zeros_like(p) if p.requires_grad else None, params)
    return tree_map(engine.zero_updates, params, is_leaf=is_on_engine)


def unshard(tree: PyTree[Any]) -> PyTree[Any]:
    """The same tree with whole leaves; leaves that are whole already stay as they are.

    Inside of a loss, leaves become whole and differentiable. At level 3 each unit touched is
    all-gathered, all units together as many bytes as the params have. It stays whole until its
    gradient is taken. Outside, a sharded tree becomes the whole tree on every rank, in tensors of
    its own; every rank calls it.

    A sharded state's other parts don't know how they are cut: `step.unshard(state)` does.

    Raises:
        StructureError: the tree holds a sharded state.

    >>> unshard({"w": torch.ones(2)})
    {'w': tensor([1., 1.])}
    """
    engine = engine_of(tree)
    if engine is None:  # no tree is sharded; inside of a loss, lazy leaves are made whole
        return make_whole(tree)
    # Checked before the first collective, on every rank alike
    for node in optree.tree_leaves(tree, is_leaf=_is_state):
        if _is_state(node) and node.sharding is not None:
            raise StructureError(
                "fz.unshard was given a sharded state, whose optimizer state would stay in pieces. "
                "Remedy: step.unshard(state), or fz.unshard(state.params)"
            )

    def whole(node: Any) -> Any:
        return engine.unshard(node) if is_on_engine(node) else make_whole(node)

    return tree_map(whole, tree, is_leaf=is_on_engine)


def _is_state(node: Any) -> bool:
    return isinstance(node, State)
