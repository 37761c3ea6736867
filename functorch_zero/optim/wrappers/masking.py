"""Transforms for some of the leaves: `masked`, `partition`, `freeze`, `scale_by_label`,
`apply_if_nonzero`.

Masks and labels are trees shaped like params (or a prefix of it), or a function `(path, leaf)`. The
function's `leaf` is a meta tensor with the leaf's whole shape and dtype, also where only a piece of
it is here. So a decision by shape is the same on every rank. Leaves that are None are in no one's
part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from itertools import compress
from typing import Any

import optree
import torch
from optree import tree_map
from torch import Tensor

from ...errors import StructureError, explain, first_few
from ...tree import PyTree, map_with_paths, merge, paths, select
from ..across import Across, Shape
from ..arguments import check_is_transform, check_takes
from ..arithmetic import Tree, on_leaf
from ..base import Needs, Schedule, Transform, value_of
from ..naming import named
from ..states import CountState, init_count
from ..transforms.scaling import set_to_zero

# A tree, or a function of a leaf's dotted path and of a meta tensor like the whole leaf
Labels = PyTree[Any] | Callable[[str, Tensor], Any]
Mask = PyTree[bool] | Callable[[str, Tensor], bool]


def labeller(labels: Labels) -> Callable[[Tree, Across], PyTree[Any]]:
    """A function `(params, across) -> tree of labels`; a user's function is asked once per tree of
    shapes."""
    if not callable(labels):
        # A tree says all by itself; its prefix is spread anew, which costs little
        return lambda params, across: _spread(labels, params)
    check_takes(labels, ("path", "leaf"), 2, by="a mask's or labels' function")

    # Asked in every step, by nested wrappers for parts of the tree: a few trees are remembered
    @lru_cache(maxsize=16)
    def ask(treedef: Any, leaves: tuple[tuple[Shape, torch.dtype], ...]) -> PyTree[Any]:
        # No values: a label must not depend on them, or ranks would differ
        metas = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in leaves]
        return map_with_paths(labels, treedef.unflatten(metas))

    def label(params: Tree, across: Across) -> PyTree[Any]:
        leaves, treedef = optree.tree_flatten(params)
        seen = []  # whole shapes, since the leaves may be pieces
        for extent, leaf in zip(optree.tree_leaves(across.extents), leaves, strict=True):
            seen.append((extent.shape, leaf.dtype))
        return ask(treedef, tuple(seen))

    return label


def _spread(labels: PyTree[Any], params: Tree) -> PyTree[Any]:
    """The labels of `params`' leaves, from a tree of labels shaped like params or like a prefix of
    it."""
    # A tree of labels covers masked-out and frozen leaves, too; they are None in `params`
    leaves, treedef = optree.tree_flatten(params, none_is_leaf=True)
    try:
        spread = optree.broadcast_prefix(labels, params, none_is_leaf=True)
    except ValueError as error:
        raise StructureError(
            "the mask or labels do not fit the params",
            expected=f"a tree shaped like params, or a prefix of it: {_outline(params)}",
            got=_outline(labels),
            remedy="pass such a tree, as tree_map(fn, params) makes it, or a function (path, leaf) "
            "-> label",
        ) from error
    rows = zip(leaves, spread, strict=True)
    return treedef.unflatten([None if leaf is None else label for leaf, label in rows])


def _outline(tree: PyTree[Any]) -> str:
    """'dict of kernel, bias'."""
    return f"{type(tree).__name__} of {first_few(paths(tree), 5)}"


@named
def masked(inner: Transform, mask: Mask) -> Transform:
    """Run `inner` on the leaves where `mask` is true; the others' updates pass unchanged. As
    optax.masked.

    The state is `inner`'s, with None for the other leaves. Communication: `inner`'s, for its
    leaves.

    Args:
        inner: any transform.
        mask: a tree of bools, or a function `(path, leaf) -> bool`.

    Raises:
        TypeError: the mask is a text.
    """
    # A text is a prefix of each tree, and true: a pattern would choose all leaves
    if isinstance(mask, str):
        raise TypeError(
            explain(
                "a mask is no pattern",
                expected="a tree of bools, or a function (path, leaf) -> bool",
                got=repr(mask),
                remedy="lambda path, leaf: path.startswith(...), say; leaves go by dotted paths",
            )
        )
    label = labeller(mask)

    def init(params: Tree, across: Across) -> Any:
        return _init(inner, _true(label(params, across), params), params, across)

    def update(
        updates: Tree, state: Any, params: Tree, across: Across, *, run: _Update = Transform.update
    ) -> tuple[Tree, Any]:
        chosen = _true(label(params, across), params)
        return _run(run, inner, chosen, updates, state, params, across)

    ending = partial(update, run=Transform.update_and_add) if inner.has_kernel else None
    return Transform(init, update, inner.needs, (inner,), ending=ending, takes_rows=True)


@named
def partition(transforms: Mapping[str, Transform], param_labels: Labels) -> Transform:
    """Run each leaf's updates through the transform that its label names. As optax.partition.

    The state is a dict from label to that transform's state. Communication: that of the transforms.

    Args:
        transforms: by label.
        param_labels: a tree of labels, or a function `(path, leaf) -> label`.

    Raises:
        ValueError: a leaf's label names no transform.
    """
    label = labeller(param_labels)
    # A copy: a caller's later change must not change this transform
    transforms = dict(transforms)
    for name, inner in transforms.items():
        check_is_transform(f"partition's {name!r}", inner)

    def init(params: Tree, across: Across) -> dict[str, Any]:
        labels = label(params, across)
        _check_labels(labels, params, transforms)
        # A label without leaves has a state, too: the dict has every label in any case
        return {
            name: _init(inner, _chosen(name, labels, params), params, across)
            for name, inner in transforms.items()
        }

    def update(
        updates: Tree,
        state: dict[str, Any],
        params: Tree,
        across: Across,
        *,
        run: _Update = Transform.update,
    ) -> tuple[Tree, dict[str, Any]]:
        labels = label(params, across)
        states = {}
        # Each leaf has one label, so no transform sees what another has made
        for name, inner in transforms.items():
            chosen, own = _chosen(name, labels, params), state[name]
            updates, states[name] = _run(run, inner, chosen, updates, own, params, across)
        return updates, states

    # No `plain`: leaves are told apart, so they can't be regrouped by the bucket here
    needs = max((t.needs for t in transforms.values()), default=Needs.POINTWISE)
    has_kernel = any(t.has_kernel for t in transforms.values())
    ending = partial(update, run=Transform.update_and_add) if has_kernel else None
    inside = tuple(transforms.values())
    return Transform(init, update, needs, inside, ending=ending, takes_rows=True)


@named
def apply_if_nonzero(inner: Transform, param_labels: Labels | None = None) -> Transform:
    """Run `inner` on each leaf whose update has an element other than 0, and leave the others, and
    their part of the state, alone.

    So a leaf that no rank's loss has reached in this step rests, as under torch.optim, where it has
    no gradient. Weight decay and old momentum don't move it, and its count of steps stands still.
    A leaf that was reached, with a gradient of zeros, rests, too.

    `inner` sees the leaves of one label alone, as in `partition`. So what looks at all leaves
    belongs before it: `chain(clip_by_global_norm(1.0), apply_if_nonzero(adamw(1e-3)))`. A schedule
    inside is given the label's own number of steps. torch's schedulers count all steps, as
    `scale_by_learning_rate` does behind it. Weight decay belongs inside.

    State: a dict from label to a state of `inner`. Communication: one all-reduce of a number per
    leaf, and `inner`'s, label by label. The answer is the same on all ranks, and the host waits for
    it.

    Args:
        inner: any transform.
        param_labels: a tree of labels, or a function `(path, leaf) -> label`. Leaves of one label
            share a state, and rest where all of them are 0. None: each leaf has a label of its own,
            its path, as in torch. The host's work grows with the labels times the leaves.
    """
    label = labeller((lambda path, leaf: path) if param_labels is None else param_labels)

    def init(params: Tree, across: Across) -> dict[Any, Any]:
        labels = label(params, across)
        return {
            name: _init(inner, _chosen(name, labels, params), params, across)
            for name in dict.fromkeys(_names(labels, params))
        }

    def update(
        updates: Tree, state: dict[Any, Any], params: Tree, across: Across
    ) -> tuple[Tree, dict[Any, Any]]:
        labels = label(params, across)
        largest = optree.tree_leaves(across.max(tree_map(lambda u: u != 0, updates)))
        # Here the host waits for the gradients. Every rank has the same answers, so all ranks
        # branch alike. Single ones, to which a plan says yes
        moves = map(bool, torch.stack(largest).cpu().unbind() if largest else ())
        states = dict(state)
        # The updates of one that rests are zeros, as they should be
        for name in dict.fromkeys(compress(_names(labels, params), moves)):
            chosen, own = _chosen(name, labels, params), state[name]
            run = Transform.update
            updates, states[name] = _run(run, inner, chosen, updates, own, params, across)
        return updates, states

    # The question about all leaves is its own, whatever `inner` needs
    return Transform(init, update, max(Needs.STATISTICS, inner.needs), (inner,))


def _names(labels: PyTree[Any], params: Tree) -> list[Any]:
    """The label of each leaf."""
    names: list[Any] = optree.tree_structure(params).flatten_up_to(labels)
    return names


def _chosen(name: Any, labels: PyTree[Any], params: Tree) -> PyTree[bool]:
    # The params give the structure: a label may be any object, a tuple, say
    return tree_map(lambda _, label: bool(label == name), params, labels)


def _true(mask: PyTree[Any], params: Tree) -> PyTree[bool]:
    """The leaves whose mask is true, by Python's truth: a function may return a `re.Match`."""
    return tree_map(lambda _, chosen: bool(chosen), params, mask)


# That of a transform, or its `update_and_add`
_Update = Callable[..., tuple[Tree | None, Any]]


# The transform inside sees neither the other leaves nor their extents


def _init(inner: Transform, chosen: PyTree[bool], params: Tree, across: Across) -> Any:
    """Its state of the chosen leaves."""
    return inner.init(select(params, chosen), across.select(chosen))


def _run(
    update: _Update,
    inner: Transform,
    chosen: PyTree[bool],
    updates: Tree,
    state: Any,
    params: Tree,
    across: Across,
) -> tuple[Tree, Any]:
    """Its `update` of the chosen leaves, put back among the others."""
    given, beside = select(updates, chosen), select(params, chosen)
    new, state = update(inner, given, state, beside, across.select(chosen))
    # A kernel has added them; those of other leaves are still to be added
    if new is None:
        new = tree_map(torch.empty_like, beside)
        torch._foreach_zero_(optree.tree_leaves(new))
    return merge(new, updates), state


def _check_labels(labels: PyTree[Any], params: Tree, known: Mapping[Any, Any]) -> None:
    # At `init`, so that a misspelt label is no leaf that silently stays as it is
    for path, label in zip(paths(params), _names(labels, params), strict=True):
        if label not in known:
            remedy = "add it, or change the labels"
            raise ValueError(
                explain(
                    "no such label", path=path, expected=list(known), got=repr(label), remedy=remedy
                )
            )


@named
def freeze(mask: Mask) -> Transform:
    """Set the updates of the leaves where `mask` is true to zero. As optax.freeze.

    Last in a chain, it makes these leaves stay as they are. Transforms after it still move them,
    such as the weight decay of `adamw`.

    Args:
        mask: a tree of bools, or a function `(path, leaf) -> bool`.
    """
    return masked(set_to_zero(), mask)


@named
def scale_by_label(factors: Mapping[Any, float | Schedule], param_labels: Labels) -> Transform:
    """Multiply each leaf's updates by the factor, a number or a schedule, that its label names.

    Learning rates per leaf, or falling from layer to layer: with `factors = {k: 0.8 ** (12 - k) for
    k in range(13)}` and labels that read the layer's number from the path. No communication; the
    state is a step count.

    Args:
        factors: by label; a schedule is given the number of steps before this one.
        param_labels: a tree of labels, or a function `(path, leaf) -> label`.

    Raises:
        ValueError: a leaf's label names no factor.
    """
    label = labeller(param_labels)
    factors = dict(factors)

    def init(params: Tree, across: Across) -> CountState:
        _check_labels(label(params, across), params, factors)
        return init_count(params)

    def update(
        updates: Tree, state: CountState, params: Tree, across: Across
    ) -> tuple[Tree, CountState]:
        # Label -> a number, or 0-d
        now = {name: value_of(factor, state.count) for name, factor in factors.items()}

        def scale(update: Tensor, name: Any) -> Tensor:
            # A 0-d leaf as (1,), as a pointwise author would see it
            return on_leaf(lambda u: u * now[name], update)

        scaled = tree_map(scale, updates, label(params, across))
        return scaled, CountState(state.count + 1)

    return Transform(init, update, Needs.POINTWISE)
