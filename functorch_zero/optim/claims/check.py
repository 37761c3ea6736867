"""Whether a transform does what its `needs` says, seen from the operators it runs. Milliseconds,
without communication.

On shards a transform's update runs on 1-D pieces, so whatever it does to them itself, outside what
it asks of `across`, must be elementwise. `check_claims` runs it once on a made-up rank that holds a
few elements of each leaf, and watches.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import optree
import torch
from optree import tree_map
from torch import Tensor

from ...errors import TransformError
from ...tree import PyTree, paths, select
from ..across import (
    Dim,
    Local,
    Owned,
    Pointwise,
    Question,
    Refusing,
    Tree,
    WholeLeaf,
    dims_of,
    each,
    sum_dtype,
    total_of,
    without,
)
from ..base import Needs, Transform
from .operators import Watch

NUM_STEPS = 2  # the first step and another: some updates treat the first one differently
NUM_HERE = 3  # elements of each leaf that the made-up rank holds
# No real tensor is that long: a 1-D meta tensor of this length plus n stands for the n-th param
_LONG = 2**40


def name_of(transform: Transform) -> str:
    """The qualified names of the author's functions; of a chain or wrapper, those of its parts."""
    own = [
        f"{s.__module__}.{s.__qualname__}" for s in transform.source if hasattr(s, "__qualname__")
    ]
    parts = [name_of(part) for part in transform.parts]
    return " + ".join(parts) or (own[1] if len(own) > 1 else own[0] if own else "a transform")


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


class PretendedRank:
    """The `across` of a rank that holds a few elements of each leaf and owns none, with made-up
    answers.

    What it answers has the shapes and dtypes of real answers, and no position.
    """

    def __init__(self, extents: PyTree[Any], watch: Watch):
        self.extents, self._watch = extents, watch

    def select(self, mask: PyTree[bool]) -> PretendedRank:
        return PretendedRank(select(self.extents, mask), self._watch)

    def _per_leaf(self, fn: Callable[[Tensor], Tensor], trees: Sequence[Tree]) -> Any:
        with self._watch.paused():
            return each(lambda tree: tree_map(fn, tree), trees)

    def sum(self, *trees: Tree) -> Any:
        return self._per_leaf(lambda x: x.sum(dtype=sum_dtype(x.dtype)), trees)

    def mean(self, *trees: Tree) -> Any:
        return self._per_leaf(lambda x: x.sum(dtype=sum_dtype(x.dtype)) / max(x.numel(), 1), trees)

    def norm(self, *trees: Tree) -> Any:
        return self._per_leaf(
            lambda x: torch.linalg.vector_norm(x, dtype=sum_dtype(x.dtype)), trees
        )

    def max(self, *trees: Tree) -> Any:
        return self._per_leaf(lambda x: x.max() if x.numel() else x.new_full((), -math.inf), trees)

    def total(self, *trees: Tree) -> Any:
        with self._watch.paused():
            return each(lambda tree: total_of([x.sum() for x in optree.tree_leaves(tree)]), trees)

    def dot(self, a: Tree, b: Tree) -> Tensor:
        return self.dots((a, b))[0]

    def dots(self, *pairs: tuple[Tree, Tree]) -> tuple[Tensor, ...]:
        with self._watch.paused():
            products = [optree.tree_leaves(tree_map(torch.mul, a, b)) for a, b in pairs]
            return tuple(
                total_of([x.sum(dtype=sum_dtype(x.dtype)) for x in product]) for product in products
            )

    def sum_dim(self, tree: Tree, dim: Dim) -> Tree:
        return self.sum_dims((tree, dim))[0]

    def sum_dims(self, *questions: Question) -> tuple[Tree, ...]:
        return tuple(self._over_dims(tree, dim, sum_dtype) for tree, dim in questions)

    def max_dim(self, tree: Tree, dim: Dim) -> Tree:
        return self.max_dims((tree, dim))[0]

    def max_dims(self, *questions: Question) -> tuple[Tree, ...]:
        return tuple(self._over_dims(tree, dim, lambda dtype: dtype) for tree, dim in questions)

    def _over_dims(self, tree: Tree, dim: Dim, kind: Callable[[torch.dtype], torch.dtype]) -> Tree:
        def answer(x: Tensor, extent: Any) -> Any:
            dims = dims_of(dim, extent.shape)
            return (
                None
                if dims is None
                else x.new_ones(without(extent.shape, dims), dtype=kind(x.dtype))
            )

        with self._watch.paused():
            return tree_map(answer, tree, self.extents)

    def spread(self, tree: Tree, dim: Dim) -> Tree:
        def put_back(extent: Any, x: Tensor | None) -> Any:
            asked = x is not None and dims_of(dim, extent.shape) is not None
            return x.new_ones(extent.num_here) if asked and x is not None else None

        with self._watch.paused():
            return tree_map(put_back, self.extents, tree)

    def keep(self, state: Any, *passing: Tree) -> Any:
        return state

    def pointwise(
        self, part: Pointwise, updates: Tree, state: Any, params: Tree
    ) -> tuple[Tree, Any]:
        return updates, state  # checked on its own

    def whole_init(self, part: WholeLeaf, params: Tree) -> Any:
        leaves, treedef = optree.tree_flatten(params)
        with self._watch.paused():
            made = [
                part.init(p.new_empty(e.shape, device="meta"))
                for p, e in self._with_extents(leaves)
            ]
            states = [
                tree_map(lambda x, p=p: x.new_empty(0, device=p.device), s)
                for p, s in zip(leaves, made, strict=True)
            ]
        return treedef.unflatten([Owned(state, i) for i, state in enumerate(states)])

    def whole(self, part: WholeLeaf, updates: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
        return tree_map(torch.clone, updates), state

    def whole_tree_init(self, init: Callable[[Tree], Any], params: Tree, limit: int) -> Any:
        leaves, treedef = optree.tree_flatten(params)
        with self._watch.paused():
            return init(
                treedef.unflatten(
                    [p.new_empty(e.shape, device="meta") for p, e in self._with_extents(leaves)]
                )
            )

    def whole_tree(
        self, update: Callable[..., Any], updates: Tree, state: Any, params: Tree | None, limit: int
    ) -> tuple[Tree, Any]:
        return tree_map(torch.clone, updates), state

    def _with_extents(self, leaves: Sequence[Tensor]) -> Iterator[tuple[Tensor, Any]]:
        return zip(leaves, optree.tree_leaves(self.extents), strict=True)


class Silent(Refusing):
    """The `across` of a transform that says it is pointwise but looks at paths or shapes: it
    refuses every question."""

    def __init__(self, across: PretendedRank):
        self.extents, self.pointwise, self.keep = across.extents, across.pointwise, across.keep
        self._across = across

    def select(self, mask: PyTree[bool]) -> Silent:
        return Silent(self._across.select(mask))
