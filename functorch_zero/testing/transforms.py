"""`check_transform`: a transform keeps the promises of its `needs`, by its operators and by its
numbers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import optree
import torch
from optree import tree_map
from torch import Tensor

from ..errors import StructureError, TransformError
from ..groups import run_ranks
from ..groups.protocol import Group
from ..layout.build import make_layout
from ..model.untouched import Untouched
from ..optim.arguments import check_is_transform
from ..optim.base import Needs, Transform
from ..optim.claims.check import check_claims, simple_parts
from ..optim.claims.cuts import CUT_REMEDY, JOINED, CutTest, name_of
from ..optim.local import Local
from ..sharded_optim.across import Sharded
from ..tree import PyTree, named_leaves
from .equality import (
    Equality,
    Grade,
    as_equality,
    assert_equal_updates,
    assert_equal_values,
)
from .slicing import slice_tree


class Steps(NamedTuple):
    """Whole params, and the updates that a transform is given in each step."""

    params: PyTree[Tensor]
    updates: list[Any]


BITWISE, REORDERED = Equality("bitwise"), Equality("reordered")


def check_transform(
    transform: Transform,
    *,
    params: PyTree[Tensor] | None = None,
    seeds: Sequence[int] = (0, 1),
    steps: int = 3,
    ranks: Sequence[int] = (2, 3),
    grade: Grade | Equality | None = None,
) -> None:
    """Raise `TransformError`, naming the operator or the leaf that gives it away, if a transform is
    falsely tagged.

    First its operators are watched (`optim.claims.check.check_claims`). Then its numbers are
    compared:

    - a pointwise link's on whole leaves, on pieces of them and on all leaves joined, bit by bit;
    - the whole transform's updates unsharded, which leave their inputs unchanged, with those on
      ranks, which are threads of this process, and on one rank alone: there a whole-leaf function
      is given all leaves of one shape as a batch, and unsharded each by itself;
    - a fused kernel's with the plain update.

    Args:
        transform: any, also a chain or a wrapper.
        params: the tree it is meant for, where masks or labels bind it to one; float64 shows the
            most. None: a tree of hostile shapes.
        seeds: of the random updates, one run each.
        steps: updates in a run.
        ranks: numbers of ranks.
        grade: of equality, instead of bitwise for pointwise links and transforms and reordered for
            the others.

    >>> from functorch_zero import optim
    >>> check_transform(optim.adamw(1e-3), seeds=(0,))
    """
    check_is_transform("check_transform's argument", transform)
    of_ours = params is None
    if params is None:
        # Not for whole-leaf functions, which work long on a large matrix
        params = hostile_params(large=transform.needs <= Needs.STATISTICS)
    # Without requires_grad: updates are no part of a graph
    detached: Any = tree_map(torch.detach, params)
    equality = None if grade is None else as_equality(grade)
    try:
        # First the operators, whose errors name a line; numbers only name a leaf
        check_claims(transform, detached)
        for seed in seeds:
            _check_links(transform, detached, seed, steps, equality or BITWISE)
            drawn = Steps(detached, _draw(detached, seed, steps))
            _check_ranks(transform, drawn, ranks, equality)
            _check_fused(transform, detached, seed, steps, equality or REORDERED)
    except (StructureError, ValueError) as error:
        if of_ours and not isinstance(error, TransformError):
            error.add_note(_BOUND_TO_A_TREE)
        raise


def hostile_params(*, large: bool = True) -> Any:
    """A tree of shapes on which a wrong transform shows itself, float64.

    Some leaves share a bucket, some have one of their own, so that every rank has a part of them.
    Among them are leaves of equal shape, of 0 to 4 dims, matrices tall and wide, and leaves of one
    element and of none. If `large`, one is longer than 4096 elements with both dims over 128, since
    optimizers change their ways there.
    """
    # A child of the root is a unit, and so has a bucket of its own
    units: dict[str, dict[str, tuple[int, ...]]] = {
        "kernel": {"twin": (4, 3, 2, 2), "weight": (4, 3, 2, 2)},
        "stack": {"twin": (2, 3, 4), "weight": (2, 3, 4)},
        "wide": {"weight": (3, 11)},  # 33 elements: no even number of ranks divides it
        "large": {"weight": (257, 129)},
        # These share a bucket
        "block": {
            "empty": (0, 3),
            "matrix": (7, 5),
            "one": (1,),
            "scalar": (),
            "twin": (7, 5),
            "twin_of_wide": (3, 11),
            "twin_scalar": (),
            "twin_vector": (6,),
            "vector": (6,),
        },
    }
    if not large:
        del units["large"]
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64, device="cpu")
    tree: dict[str, Any] = {}
    for unit, shapes in units.items():
        tree[unit] = {name: draw(shape) for name, shape in shapes.items()}
    tree["nothing"] = None  # masks leave None, and transforms must pass it on
    return tree


_BOUND_TO_A_TREE = (
    "If this transform belongs to one tree of params, pass check_transform(..., params=that tree)."
)


def _draw(tree: PyTree[Tensor], seed: int, steps: int) -> list[Any]:
    """Updates for each step, each a tenth as large as the one before, with some zeros."""
    generator = torch.Generator().manual_seed(seed)

    def one(leaf: Tensor, scale: float) -> Tensor:
        drawn = torch.randn(leaf.shape, generator=generator, dtype=torch.float64, device="cpu")
        # About one in ten: signs and quotients of zero show themselves
        is_zero = torch.rand(leaf.shape, generator=generator, device="cpu") < 0.1
        return torch.where(is_zero, 0.0, drawn).to(leaf.dtype) * scale

    # Smaller step by step, as in training: maxima and decays behave differently then
    return [tree_map(partial(one, scale=10.0**-k), tree) for k in range(steps)]


# Pointwise links, on whole leaves and on the same elements cut otherwise


def _check_links(
    transform: Transform, params: Any, seed: int, steps: int, equality: Equality
) -> None:
    """Each pointwise link's updates of whole leaves, of pieces of them, and of all joined to one,
    in both dtypes that training uses. By numbers only: `check_claims` has watched the operators."""

    def difference_of(expected: Tensor, got: Tensor) -> str | None:
        try:
            assert_equal_values(expected, got, grade=equality, what="updates")
            return None
        except AssertionError as error:
            return str(error)

    for link in simple_parts(transform):
        if link.plain is None:
            continue
        # A rule by dtype would show in one of them only
        for dtype in (torch.float64, torch.float32):
            cast: Any = tree_map(partial(Tensor.to, dtype=dtype), params)
            updates = _draw(cast, seed, steps)
            # Joined to one, too, as leaves are in a flat
            CutTest(link, cast, updates, difference_of, others=(JOINED,)).check()


@contextmanager
def _as_transform_error(story: str) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        raise TransformError(f"{story}: {error}. Remedy: {CUT_REMEDY}") from None


# The whole transform, unsharded and on ranks


def _check_ranks(
    transform: Transform, steps: Steps, ranks: Sequence[int], equality: Equality | None
) -> None:
    """Updates on ranks against those in one process, on donated storage and on other."""
    name = name_of(transform)
    story = f"{name} makes other updates on ranks than unsharded"
    # The oracle once; ranks differ only in how many they are
    expected = _run_unsharded(transform, steps, name)
    grade = equality or (BITWISE if transform.needs == Needs.POINTWISE else REORDERED)
    # On one rank leaves of one shape are a batch, which several may have apart
    for num_ranks in dict.fromkeys([1, *ranks]):
        # On donated storage an update writes over its inputs, by other code
        for donate in (False, True):
            by_rank = run_ranks(_on_a_rank(transform, steps, donate), num_ranks)
            for k, want in enumerate(expected):
                for rank, got in enumerate(by_rank):
                    at = {"step": k, "ranks": num_ranks, "rank": rank}
                    with _as_transform_error(story):
                        assert_equal_values(want, got[k], grade=grade, what="updates", context=at)


def _on_a_rank(
    transform: Transform, steps: Steps, donate: bool
) -> Callable[[Group], list[PyTree[Tensor]]]:
    """A function of a group: the updates of each step, gathered."""

    def run(group: Group) -> list[PyTree[Tensor]]:
        # Detached leaves don't say what is trained
        layout = make_layout(
            steps.params, group.size, trainable=lambda path, leaf: True, aligned=False
        )
        across = Sharded(layout, group)
        across.current.begin(donate=donate)
        # Pieces, views of one flat per bucket
        params = slice_tree(steps.params, layout, group.rank)
        state = transform.init(params, across)
        gathered = []
        for updates in steps.updates:
            pieces = slice_tree(updates, layout, group.rank)
            # Params stay as they are: only updates are compared
            new, state = transform.update(pieces, state, params, across)
            (whole,) = across.gather([new], sys.maxsize)
            # A leaf may be a view of storage that the next step overwrites
            gathered.append(tree_map(torch.clone, whole))
        return gathered

    return run


def _run_unsharded(transform: Transform, steps: Steps, name: str) -> list[PyTree[Tensor]]:
    """The updates of each step in one process, with purity checked on the way."""
    params: Any = steps.params
    across = Local(params)
    state = transform.init(params, across)
    made = []
    for updates in steps.updates:
        # Purity is checked on real steps, with the state that the transform made itself
        with unchanged({"updates": updates, "state": state, "params": params}, name):
            new, state = transform.update(updates, state, params, across)
        made.append(new)
    return made


@contextmanager
def unchanged(inputs: Any, name: str) -> Iterator[None]:
    """Raise `TransformError` if a tensor in `inputs` has other values, or has been written to,
    afterwards."""
    tensors = {path: x for path, x in named_leaves(inputs).items() if isinstance(x, Tensor)}
    before = Untouched([*tensors.values()], look=True)
    yield
    changed = before.first_changed()
    if changed is not None:
        raise TransformError(
            f"{name} changes its input {[*tensors][changed]} in place. Remedy: return new tensors"
        )


# A transform's kernel for donated storage


def _check_fused(
    transform: Transform, params: Any, seed: int, steps: int, equality: Equality
) -> None:
    """A transform's fused kernel against its plain update, on all leaves joined."""
    fused, plain = transform.fused, transform.plain
    if fused is None or plain is None:
        return
    flat = torch.cat([x.reshape(-1) for x in optree.tree_leaves(params)])  # of all elements
    if not fused.takes(flat):
        return
    story = f"the fused kernel of {name_of(transform)} does something else than its plain update"
    # Params; the kernel writes to the second
    expected, got = {"": flat}, {"": flat.clone()}
    state, fused_state = plain.init(expected), plain.init(expected)  # one state each
    for k, drawn in enumerate(_draw(expected, seed, steps)):
        old, old_got = expected, tree_map(torch.clone, got)
        updates, state = plain.update(drawn, state, expected)
        expected = tree_map(torch.add, expected, updates)
        fused_state = fused.update([got[""]], [drawn[""].clone()], fused_state)  # in place
        with _as_transform_error(story):
            assert_equal_updates(
                old, expected, got, old_got=old_got, grade=equality, context={"step": k}
            )
