"""Optimizers from elsewhere: pairs of functions as optax and torchopt have them, and torch.optim's
classes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from ...errors import explain
from ..arithmetic import Tree
from ..base import (
    Needs,
    Transform,
    pointwise,
    step_count,
    tree_zeros_like,
    with_whole_leaves,
    with_whole_rows,
    with_whole_tree,
)
from ..naming import named

Pair = Any  # a NamedTuple or tuple (init, update), or an object with these attributes


@named
def from_optax(transformation: Pair, *, needs: Needs) -> Transform:
    """A transform from a pair in optax's form, written in torch: `init(params)`,
    `update(updates, state, params)`.

    Args:
        transformation: the pair; its state may be any tree of tensors.
        needs: the part of a tensor that it must see: POINTWISE, which `testing.check_transform`
            checks; WHOLE_LEAF if it treats each leaf on its own (it is then called with trees that
            are one leaf); or WHOLE_TREE. STATISTICS would need `across`, which the form lacks.
    """
    # A wrong POINTWISE is refused at `init`. That leaves are independent nobody checks
    init, update = _functions(transformation)
    return _lifted(init, update, needs)


@named
def from_torchopt(transformation: Pair, *, needs: Needs) -> Transform:
    """A transform from a pair in torchopt's form: `init(params)`,
    `update(updates, state, *, params, inplace)`.

    Arguments: see `from_optax`.
    """
    init, inner = _functions(transformation)

    def update(updates: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
        # torchopt writes over updates unless told not to
        new, state = inner(updates, state, params=params, inplace=False)
        return new, state

    return _lifted(init, update, needs)


def _functions(transformation: Pair) -> tuple[Callable[..., Any], Callable[..., Any]]:
    # By name first: a NamedTuple may have more fields than these two
    if hasattr(transformation, "init") and hasattr(transformation, "update"):
        return transformation.init, transformation.update
    init, update = transformation
    return init, update


def _lifted(init: Callable[..., Any], update: Callable[..., Any], needs: Needs) -> Transform:
    # A pair in this form sees trees: whole, of one leaf each, or of pieces
    constructors: dict[Needs, Callable[..., Transform]] = {
        Needs.POINTWISE: pointwise,
        Needs.WHOLE_ROWS: with_whole_rows,
        Needs.WHOLE_LEAF: with_whole_leaves,
        Needs.WHOLE_TREE: with_whole_tree,
    }
    if needs not in constructors:
        story = "a pair of functions can't ask `across`"
        remedy = "write it with optim.with_statistics, whose update is given `across`"
        expected = ", ".join(f"optim.Needs.{known.name}" for known in constructors)
        raise ValueError(explain(story, expected=expected, got=repr(needs), remedy=remedy))

    # Of as many arguments as ours have: constructors count them, and a pair may take others
    return constructors[needs](
        lambda params: init(params),
        lambda updates, state, params: update(updates, state, params),
    )


class FromTorchState(NamedTuple):
    """A torch optimizer's state, by its own names."""

    count: Tensor  # type: ignore[assignment]  # 0-d int64, on the CPU
    like_params: dict[str, Any]  # torch's name -> a tree like params
    numbers: dict[str, Tensor]  # torch's name -> 0-d, on the CPU; the same for all params


@named
def from_torch(optimizer_class: type[torch.optim.Optimizer], **options: Any) -> Transform:
    """A pointwise transform from a torch.optim class: `from_torch(torch.optim.Adamax, lr=1e-3)`.

    It runs the class's own step on copies; updates are the difference it makes. So an update
    differs from one of ours by the rounding of `(param + update) - param`, and the learning rate, a
    number, is inside. In half precision some of torch's kernels round a tensor's tail differently,
    so there updates depend on the cut in their last bit. `testing.check_transform` proves or
    refutes that the class is pointwise: Adamax and Rprop pass; Adafactor, LBFGS and Muon don't.
    State: as the class's.

    Args:
        optimizer_class: a torch.optim.Optimizer; it must keep tensors like its params, or 0-d ones,
            for each.
        options: its arguments after `params`.

    Raises:
        NotImplementedError: its state holds something else.
    """
    if not (isinstance(optimizer_class, type)):
        raise TypeError(
            explain(
                "from_torch takes a class of torch.optim, and its options",
                got=type(optimizer_class).__name__,
                remedy="from_torch(torch.optim.SGD, lr=0.1); params are given to `init`",
            )
        )
    # One tensor at a time, unless the caller says otherwise
    if "foreach" in inspect.signature(optimizer_class).parameters:
        options = {"foreach": False} | options
    # Torch makes state in the first step; its structure must be known before
    example = _state_of(optimizer_class, options)

    def init(params: Tree) -> FromTorchState:
        # Placeholders of the right structure: the class itself begins its state in the first step
        like_params = {key: tree_zeros_like(params) for key, x in example.items() if x.ndim}
        numbers = {key: x.clone() for key, x in example.items() if not x.ndim}
        return FromTorchState(step_count(), like_params, numbers)

    def update(updates: Tree, state: FromTorchState, params: Tree) -> tuple[Tree, FromTorchState]:
        treedef = optree.tree_structure(params)
        old, grads = optree.tree_leaves(params), optree.tree_leaves(updates)
        # A label may have no leaves, and torch refuses an optimizer without params
        if not old:
            return updates, state._replace(count=state.count + 1)
        optimizer = _loaded(optimizer_class, options, old, grads, state)
        optimizer.step()
        new = optimizer.param_groups[0]["params"]
        # The class has moved copies; updates lead the params to the same place
        moves = [n.detach() - o for n, o in zip(new, old, strict=True)]
        # Per param, torch's name -> tensor
        states = [optimizer.state[n] for n in new]
        like_params = {}
        for key in state.like_params:
            like_params[key] = treedef.unflatten([own[key] for own in states])
        # Counts go on alike for all params, so the first one's stand for all
        numbers = {key: states[0][key] for key in state.numbers}
        return treedef.unflatten(moves), FromTorchState(state.count + 1, like_params, numbers)

    return pointwise(init, update)


def _loaded(
    optimizer_class: type[torch.optim.Optimizer],
    options: dict[str, Any],
    params: list[Tensor],
    grads: list[Tensor],
    state: FromTorchState,
) -> torch.optim.Optimizer:
    """The class's object on copies of everything; before the first step without state, since it
    makes its own."""
    # Everything is copied: the class writes to params and state in place
    copies = [p.detach().clone().requires_grad_() for p in params]
    for copy, grad in zip(copies, grads, strict=True):
        copy.grad = grad.detach().clone()
    optimizer = optimizer_class(copies, **options)
    if int(state.count) == 0:  # on the CPU
        return optimizer
    for key, tree in state.like_params.items():
        for copy, leaf in zip(copies, optree.tree_leaves(tree), strict=True):
            optimizer.state[copy][key] = leaf.clone()
    for key, number in state.numbers.items():
        for copy in copies:
            optimizer.state[copy][key] = number.clone()
    return optimizer


def _state_of(
    optimizer_class: type[torch.optim.Optimizer], options: dict[str, Any]
) -> dict[str, Tensor]:
    """The state that the class keeps for a param, found by a step on one of 2 elements."""
    with torch.enable_grad():
        # Two elements: their state is told from 0-d numbers by its shape
        param = torch.zeros(2, requires_grad=True, device="cpu")
        param.grad = torch.zeros(2, device="cpu")
        optimizer = optimizer_class([param], **options)
        optimizer.step()
    state = {k: v for k, v in optimizer.state[param].items() if v is not None}
    # State of any other shape could not be cut along with the param
    for key, value in state.items():
        if not isinstance(value, Tensor) or value.shape not in (param.shape, ()):
            got = tuple(value.shape) if isinstance(value, Tensor) else repr(value)
            raise NotImplementedError(
                explain(
                    f"{optimizer_class.__name__} can't be a pointwise transform",
                    path=f"its state {key!r}",
                    expected="a tensor shaped like the param, or 0-d",
                    got=got,
                    remedy="write it as a transform, or take ours",
                )
            )
    return state
