"""Whether a transform does what its `needs` says, seen from the operators it runs. Milliseconds,
without communication.

On shards a transform's update runs on 1-D pieces, so whatever it does to them itself, outside what
it asks of `across`, must be elementwise. `check_claims` runs it once on a made-up rank that holds a
few elements of each leaf, and watches.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import optree
import torch
from optree import tree_map
from torch import Tensor

from ...errors import TransformError
from ...layout.extent import Extent
from ...tree import PyTree, paths
from ..across import (
    Dim,
    DimOp,
    LeafOp,
    Owned,
    Pointwise,
    Product,
    Question,
    Refusing,
    Tree,
    WholeLeaf,
    state_elsewhere,
    sum_dtype,
    without,
)
from ..base import Needs, Transform
from ..local import Local
from .operators import Watch

NUM_STEPS = 2  # the first step and another: some updates treat the first one differently
NUM_HERE = 3  # elements of each leaf that the made-up rank holds
# No real tensor is that long: a 1-D meta tensor of this length plus n stands for the n-th param
_LONG = 2**40


def name_of(transform: Transform) -> str:
    """The transform's name; of a chain or wrapper, those of its parts. One that is not `named` has
    the qualified name of its author's update."""
    if transform.parts:
        return " + ".join(name_of(part) for part in transform.parts)
    update = transform.hyperparams.get("update")
    if inspect.isfunction(update):
        return f"{update.__module__}.{update.__qualname__}"
    return transform.name or "a transform"


def simple_parts(transform: Transform) -> Iterator[Transform]:
    """The transforms inside that have no parts themselves, in order; itself if it has none."""
    if not transform.parts:
        yield transform
    for part in transform.parts:
        yield from simple_parts(part)


def check_claims(transform: Transform, params: PyTree[Tensor] | None = None) -> None:
    """Raise `TransformError` if the transform's updates do to a piece what only whole tensors
    allow.

    Args:
        transform: any; chains and wrappers are checked through their parts.
        params: the tree it is meant for (whole or in pieces or on the meta device: only structure,
            shapes and dtypes are read). With it the transform is run as a whole on a few elements
            of each leaf, wrappers, masks and labels included. Without it the parts are run one by
            one on a small tree, and those are left out that belong to one structure (they have
            neither parts nor an author's functions, such as `scale_by_label`).

    Refused: operators that combine elements of different positions (sums, norms, sorts, cumulative
    sums, matrix products), random ones, values read on the host, and changes in place of what was
    given; and an `in_place` that is not `update` to the bit. Nothing is communicated.
    `testing.check_transform` checks the numbers too.

    >>> from functorch_zero import optim
    >>> check_claims(optim.adamw(1e-3))
    >>> def centre(updates, state, params):
    ...     return tree_map(lambda u: u - u.mean(), updates), state
    >>> lie = optim.pointwise(lambda params: (), centre)
    >>> check_claims(lie)  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    functorch_zero.errors.TransformError: ... runs aten.mean.default ...
    """
    tiny: Any = {
        "matrix": torch.zeros(2, 3),
        "vector": torch.zeros(5),
        "scalar": torch.zeros(()),
        "empty": torch.zeros(0),
    }
    for part in simple_parts(transform):
        if part.plain is not None:
            _run_watched(_alone(part.plain), tiny, name_of(part))
            for dtype in (torch.float32, torch.float64):
                _check_in_place(part.plain, dtype, name_of(part))
        elif params is None and part.needs > Needs.POINTWISE:
            _run_watched(part, tiny, name_of(part))
    if params is not None:
        _run_watched(transform, params, name_of(transform))


def _alone(part: Pointwise) -> Transform:
    """A pointwise author's functions as they are."""
    return Transform(
        lambda params, across: part.init(params),
        lambda u, s, p, across: part.update(u, s, p),
        Needs.POINTWISE,
    )


def _check_in_place(part: Pointwise, dtype: torch.dtype, name: str) -> None:
    """`in_place` gives the bits of `update`, and writes to nothing but updates and what follows a
    param."""
    if part.in_place is None:
        return
    g = torch.Generator().manual_seed(0)
    params: Any = {"": torch.randn(NUM_HERE, generator=g, dtype=dtype)}
    state, own = part.init(params), part.init(params)
    for _ in range(NUM_STEPS):
        updates: Any = {"": torch.randn(NUM_HERE, generator=g, dtype=dtype)}
        kept = [params, [x for x in optree.tree_leaves(own) if x.shape != (NUM_HERE,)]]
        before = tree_map(torch.clone, kept)
        got, own = part.in_place(tree_map(torch.clone, updates), own, params)
        _must_equal(
            before,
            kept,
            f"{name}: in_place writes over params, or over a state leaf that follows none",
        )
        expected, state = part.update(updates, state, params)
        _must_equal(
            (expected, state), (got, own), f"{name}: in_place and update differ, in {dtype}"
        )


def _must_equal(expected: Any, got: Any, story: str) -> None:
    pairs = [*zip(optree.tree_leaves(expected), optree.tree_leaves(got), strict=False)]
    alike = all(
        x.dtype == y.dtype and torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in pairs
    )
    if not alike or optree.tree_structure(expected) != optree.tree_structure(got):
        raise TransformError(f"{story}. Remedy: the same operators in the same order")


def _run_watched(transform: Transform, params: PyTree[Tensor], name: str) -> None:
    """Run `init` and a few updates on a made-up rank, under the watch."""
    extents = tree_map(
        lambda e: dataclasses.replace(e, stop=min(e.numel, NUM_HERE)), Local(params).extents
    )
    watch = Watch(name, paths(params), NUM_HERE)
    rank = PretendedRank(extents, watch)
    across: Any = Silent(rank) if transform.needs == Needs.POINTWISE else rank
    follows, everyone = (
        _following(transform, params, across),
        range(optree.tree_structure(params).num_leaves),
    )
    g = torch.Generator().manual_seed(0)

    def pieces(what: str) -> PyTree[Tensor]:
        made = tree_map(
            lambda p, e: torch.randn(e.num_here, generator=g).to(p.dtype), params, extents
        )
        watch.give(made, everyone, what)
        return made

    held = pieces("params")
    with watch.running("init"):
        state = transform.init(held, across)
    watch.check_results(state, follows, "state")
    for _ in range(NUM_STEPS):
        updates = pieces("updates")
        watch.give(state, follows, "state")
        with watch.running("update"):
            new, state = transform.update(updates, state, held, across)
        watch.check_results(new, everyone, "updates")
        watch.check_results(state, follows, "state")


def _following(transform: Transform, params: PyTree[Tensor], across: Any) -> list[int | None]:
    """For each leaf of the state, the number of the param it follows, from `init` on
    placeholders."""
    leaves, treedef = optree.tree_flatten(params)
    stand_ins = [torch.empty(_LONG + i, dtype=p.dtype, device="meta") for i, p in enumerate(leaves)]
    state = transform.init(treedef.unflatten(stand_ins), across)
    return [
        x.numel() - _LONG if isinstance(x, Tensor) and x.dim() == 1 and x.numel() >= _LONG else None
        for x in optree.tree_leaves(state)
    ]


class PretendedRank(Local):
    """The `across` of a rank that holds a few elements of each leaf and owns none, with made-up
    answers.

    Its answers have the shapes and dtypes of real answers, and no position.
    """

    def __init__(self, extents: PyTree[Extent], watch: Watch):
        self.extents, self._watch = extents, watch

    def reduce(self, trees: Sequence[Tree], op: LeafOp) -> tuple[Tree, ...]:
        with self._watch.paused():
            return super().reduce(trees, op)

    def reduce_dims(self, questions: Sequence[Question], op: DimOp) -> tuple[Tree, ...]:
        def ones(x: Tensor, extent: Extent, dims: tuple[int, ...]) -> Tensor:
            dtype = sum_dtype(x.dtype) if op == "sum" else x.dtype
            return x.new_ones(without(extent.shape, dims), dtype=dtype)

        with self._watch.paused():
            return tuple(self._per_leaf(ones, tree, dim) for tree, dim in questions)

    def totals(self, products: Sequence[Product]) -> tuple[Tensor, ...]:
        with self._watch.paused():
            return super().totals(products)

    def spread(self, tree: Tree, dim: Dim) -> Tree:
        def ones(x: Tensor, extent: Extent, dims: tuple[int, ...]) -> Tensor:
            return x.new_ones(extent.num_here)

        with self._watch.paused():
            return self._per_leaf(ones, tree, dim)

    def run_pointwise(
        self, part: Pointwise, updates: Tree, state: Any, params: Tree
    ) -> tuple[Tree, Any]:
        return updates, state  # checked on its own

    def init_whole(self, part: WholeLeaf, params: Tree) -> Any:
        leaves, treedef = optree.tree_flatten(params)
        extents = optree.tree_leaves(self.extents)
        with self._watch.paused():
            states = [
                Owned(state_elsewhere(part, leaf, extent), i)
                for i, (leaf, extent) in enumerate(zip(leaves, extents, strict=True))
            ]
        return treedef.unflatten(states)

    def run_whole(
        self, part: WholeLeaf, updates: Tree, state: Any, params: Tree
    ) -> tuple[Tree, Any]:
        return tree_map(torch.clone, updates), state

    def gather(self, trees: list[Tree], limit: int) -> list[Tree]:
        def whole(x: Tensor, extent: Extent) -> Tensor:
            return x.new_empty(extent.shape, device="meta")

        return [tree_map(whole, tree, self.extents) for tree in trees]

    def init_whole_tree(self, init: Callable[[Tree], Any], params: Tree, limit: int) -> Any:
        with self._watch.paused():
            return super().init_whole_tree(init, params, limit)

    def run_whole_tree(
        self, update: Callable[..., Any], updates: Tree, state: Any, params: Tree | None, limit: int
    ) -> tuple[Tree, Any]:
        return tree_map(torch.clone, updates), state


class Silent(Refusing):
    """The `across` of a transform that says it is pointwise but looks at paths or shapes: it
    refuses every question."""

    def __init__(self, across: PretendedRank):
        self.extents, self.keep = across.extents, across.keep
        self.run_pointwise = across.run_pointwise
        self._across = across

    def select(self, mask: PyTree[bool]) -> Silent:
        return Silent(self._across.select(mask))
