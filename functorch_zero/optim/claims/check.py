"""Whether a transform keeps to its `needs`. Milliseconds, without communication.

On shards a transform's update runs on 1-D pieces. So all that it does to them itself must be
elementwise; the rest it asks of `across`. `check_claims` runs it on a few small leaves, watches its
operators (`operators`), and runs it again on the same elements cut otherwise (`cuts`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import optree
import torch
from optree import tree_map
from torch import Tensor

from ...errors import TransformError
from ...tree import grouped, paths
from ..across import Pointwise, Tree
from ..base import Needs, Transform
from .cuts import (
    FIRST_PIECES,
    JOINED,
    LAID_OUT,
    OTHER_ROWS,
    ROWS_REMEDY,
    SOME_ROWS,
    CutTest,
    TrialCut,
    is_refusal,
    middle,
    name_of,
)
from .pretended import PretendedRank, Silent, block_of

# Updates of a test: of the first step, the second (some updates treat the first differently), and
# of two late ones
NUM_STEPS = 3
MAGNITUDES = (1e4, 1e-6)  # of values that are tried, leaf by leaf in turn, beside those near 1
MOST_LEAVES = 64  # leaves: wrappers are run on all leaves of a tree that has no more

# Path -> whole shape. Empty leaves, single elements and dims of 1 make sums and broadcasts differ
HOSTILE_SHAPES = {
    "column": (5, 1),
    "cube": (2, 3, 4),
    "empty": (0,),
    "filter": (2, 3, 2, 2),  # of a convolution
    "large": (64, 64),  # of as many elements as are tried of a leaf
    "matrix": (3, 4),
    "one": (1,),
    "row": (1, 7),
    "vector": (5,),
    "volume": (2, 1, 2, 1, 2),
}


def simple_parts(transform: Transform) -> Iterator[Transform]:
    """The transforms inside that have no parts themselves, in order; itself if it has none."""
    if not transform.parts:
        yield transform
    for part in transform.parts:
        yield from simple_parts(part)


def pointwise_parts(transform: Transform) -> Iterator[Transform]:
    """The largest transforms inside that are pointwise whatever the grouping; itself if it is."""
    # `plain` is of any grouping, so the transforms inside need not be looked into
    if transform.plain is not None:
        yield transform
    else:
        for part in transform.parts:
            yield from pointwise_parts(part)


def check_claims(transform: Transform, params: Tree | None = None) -> None:
    """Raise `TransformError` if the transform needs more of a tensor than its `needs` says.

    Args:
        transform: any; chains and wrappers are checked through their parts.
        params: the tree it is meant for (whole or in pieces or on the meta device: only structure,
            shapes and dtypes are read). With it the transform is run as a whole on up to 4096
            elements of each leaf, wrappers, masks and labels included; of over 64 leaves, on the
            first and the last of those with one shape whose paths differ in numbers only. Without
            it the parts are run one by one on a small tree, and those are left out that belong to
            one structure (they have neither parts nor an author's functions, such as
            `scale_by_label`).

    Refused: operators that combine elements of different positions (sums, norms, sorts, cumulative
    sums, matrix products), random ones, values read on the host, and changes of inputs in place;
    results that depend on how leaves are cut, by their shape, strides, position, path, order or
    number, in the first two steps or in two late ones; results of a row that depend on the other
    rows, where a transform claims to go by rows; whole-leaf functions that make another
    update when they are repeated, or in a batch; and an `in_place` that is not `update` to the bit.
    Nothing is communicated. `testing.check_transform` checks more, on ranks and to the bit.

    >>> from functorch_zero import optim
    >>> check_claims(optim.adamw(1e-3))
    >>> def centre(updates, state, params):
    ...     return tree_map(lambda u: u - u.mean(), updates), state
    >>> lie = optim.pointwise(lambda params: (), centre)
    >>> check_claims(lie)  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    functorch_zero.errors.TransformError: ... runs aten.mean.default ...
    """
    # Each author's functions alone, on shapes of our own, every operator watched
    for part in simple_parts(transform):
        if part.plain is not None:
            drawn = _draw(hostile_leaves(), torch.float32)
            CutTest(part, *drawn, operators=True, others=(LAID_OUT, JOINED)).check()
            # Where values are large and small; in float64, where round-off hides least
            CutTest(part, *_draw(hostile_leaves(), torch.float64, MAGNITUDES)).check()
            for dtype in (torch.float32, torch.float64):
                _check_in_place(part.plain, dtype, name_of(part))
        if part.needs == Needs.WHOLE_ROWS:
            _check_rows(part)
        # Given params, these run below, on leaves that they are meant for
        elif params is None and part.needs > Needs.POINTWISE:
            _check_across(part, hostile_leaves() | {"scalar": torch.empty((), device="meta")})
    # Masks and labels belong to one tree, so without it there is nothing more to run
    if params is None:
        return
    # Blocks of the params' leaves, under their own paths
    few = _representatives(params)
    # With their own strides only, since leaves of our own have been tried with others
    for part in pointwise_parts(transform):
        CutTest(part, *_draw(few, torch.float64), others=(JOINED,)).check()
    if transform.plain is None:
        _check_as_a_whole(transform, params, few)


def hostile_leaves() -> dict[str, Tensor]:
    """Leaves of shapes on which a wrong transform shows itself, on the meta device."""
    return {name: torch.empty(shape, device="meta") for name, shape in HOSTILE_SHAPES.items()}


def _representatives(params: Tree) -> Any:
    """The tree with None for all but the first and the last of leaves that are alike: of one shape
    and dtype, with paths that differ in numbers only."""
    leaves, treedef = optree.tree_flatten(params)
    rows = enumerate(zip(paths(params), leaves, strict=True))
    # "blocks.3.weight" and "blocks.11.weight" are one kind
    kinds = grouped(((x.shape, x.dtype, re.sub(r"\d+", "#", path)), i) for i, (path, x) in rows)
    # Both ends: paths may be read for the number of a layer
    chosen = {i for positions in kinds.values() for i in (positions[0], positions[-1])}
    return treedef.unflatten([x if i in chosen else None for i, x in enumerate(leaves)])


def _check_as_a_whole(transform: Transform, params: Tree, few: Tree) -> None:
    """Check a transform with all that is around its parts; on few leaves, if they will do.

    `few`: `params` with None for all leaves but a few of each kind.
    """
    # A large model's tree would take seconds rather than milliseconds
    if optree.tree_structure(params).num_leaves > MOST_LEAVES:
        try:
            _check_across(transform, few)
            # A part whose mask chooses none of the few leaves was not run with the whole
            for part in simple_parts(transform):
                if part is not transform and part.needs > Needs.POINTWISE:
                    _check_across(part, few)
            return
        except Exception as error:
            if is_refusal(error):
                raise
            # It failed, and may belong to the one tree: all leaves decide
    _check_across(transform, params)


def _draw(
    tree: Tree,
    dtype: torch.dtype | None = None,
    magnitudes: Sequence[float] = (1,),
) -> tuple[Any, list[Any]]:
    """Random params and the updates of each step, a block per leaf, of this dtype or its own.
    Leaves have the magnitudes in turn."""
    # Seeded, so that all ranks come to one verdict without communication
    g, turn = torch.Generator().manual_seed(0), itertools.cycle(magnitudes)

    def block(x: Tensor) -> Tensor:
        drawn = torch.randn(block_of(tuple(x.shape)), generator=g, device="cpu")
        return (next(turn) * drawn).to(dtype or x.dtype)

    params = tree_map(block, tree)
    return params, [tree_map(block, tree) for _ in range(NUM_STEPS)]


def _check_rows(transform: Transform) -> None:
    """A row-wise author's functions on all rows of some leaves, and on a part of them."""
    shapes = {"one column": (9, 1), "rows": (11, 4), "wide": (5, 40)}
    params, updates = _draw(
        {name: torch.empty(shape, device="cpu") for name, shape in shapes.items()}
    )
    # In each step two rows of three are touched, and in the second one those of one part alone: of
    # what a rank has none may be
    for step, tree in enumerate(updates):
        for x in tree.values():
            x[step::3] = 0
    for x in updates[1].values():
        x[: middle(len(x))] = 0
    # In float64, where round-off hides least
    params, updates = tree_map(torch.Tensor.double, (params, updates))
    pieces = SOME_ROWS, OTHER_ROWS
    CutTest(transform, params, updates, pieces=pieces, remedy=ROWS_REMEDY).check()


def _check_across(transform: Transform, tree: Tree) -> None:
    """A transform on whole leaves, and on two ranks that are given the same answers."""
    answers: list[Any] = []  # the first rank's questions, and their answers
    ranks: list[PretendedRank] = []  # one per run
    tried: set[Any] = set()  # whole leaves, in all runs

    def across_of(cut: TrialCut) -> Any:
        # A test begins anew with the first pieces: see `CutTest.across_of`
        if cut is FIRST_PIECES:
            answers.clear()
            ranks.clear()
        rank = PretendedRank(tree, cut, test.watch, answers, tried)
        ranks.append(rank)
        # Its answers would let a transform without statistics ask for them
        return Silent(rank) if transform.needs == Needs.POINTWISE else rank

    test = CutTest(transform, *_draw(tree), operators=True, across_of=across_of)
    test.check()
    # A rank that asks less than the first would leave it waiting in a collective
    for rank in ranks:
        rank.check_all_asked()


def _check_in_place(part: Pointwise, dtype: torch.dtype, name: str) -> None:
    """`in_place` gives the bits of `update`, and writes to nothing but updates and state that
    follows a param."""
    if part.in_place is None:
        return
    wrote = f"{name}: in_place writes over params, or over a state leaf that follows none"
    differs = f"{name}: in_place and update differ, in {dtype}"
    # As many elements as are tried of a leaf, and few
    ours = hostile_leaves()
    params, steps = _draw([ours["large"], ours["vector"]], dtype)
    shapes = {x.shape for x in optree.tree_leaves(params)}
    # `state` goes on by `update`, `own` by `in_place`
    state, own = part.init(params), part.init(params)
    for updates in steps:
        # Must stay: params, and leaves of the state that follow none
        read = [params, [x for x in optree.tree_leaves(own) if x.shape not in shapes]]
        before = tree_map(torch.clone, read)
        # Updates are donated: a copy, since `update` gets the same ones
        got, own = part.in_place(tree_map(torch.clone, updates), own, params)
        _must_equal(before, read, wrote)
        expected, state = part.update(updates, state, params)
        _must_equal((expected, state), (got, own), differs)


def _must_equal(expected: Any, got: Any, story: str) -> None:
    """Raise a `TransformError` that tells `story` unless two trees of tensors are equal."""

    def is_equal(x: Tensor, y: Tensor) -> bool:
        # Shapes first, since the comparison broadcasts. NaN where the other has NaN, infinity where
        # it has the same infinity
        alike = x.dtype == y.dtype and x.shape == y.shape
        return alike and bool(torch.isclose(x, y, 0, 0, equal_nan=True).all())

    alike = optree.tree_structure(expected) == optree.tree_structure(got)
    if not (alike and all(map(is_equal, optree.tree_leaves(expected), optree.tree_leaves(got)))):
        raise TransformError(f"{story}. Remedy: the same operators in the same order")
