"""The three grades of equality, and comparisons that name the first difference.

Steps are compared by their *updates*, `new - old`, and the expected update must be non-zero on
every trained leaf: params that have hardly moved would be equal whatever the optimizer does.

Note [reordered]: the same sums, added in another order, differ by a few roundings of their largest
terms. So an element that cancels to nearly zero may be wrong relative to itself while nothing is
wrong. Hence a leaf's differences are measured against the largest magnitude in that leaf's expected
update. Besides, a param holds `old + update` only to its own last place. So a param large beside
its update shows differences of that size too. Two last places are allowed. An update that is not
well above them is refused, because comparing it would say nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

import optree
import torch
from torch import Tensor

from ..errors import explain
from ..params import as_local
from ..tree import PyTree, in_words, paths, same_structure
from .causes import Evidence, Wrong, why

Grade = Literal["bitwise", "reordered", "approximate"]

REORDERED = {torch.float64: 1e-12, torch.float32: 1e-5}  # relative; about 4500 and 84 roundings
LAST_PLACES = 2  # of a param, that its new and its old value may be off by in all
# An update's largest magnitude must be this many times the error that last places may make
VISIBLE = 8
SHOWN = 4  # names of leaves, in an error


@dataclass(frozen=True)
class Equality:
    """A grade of equality; `approximate` has a bound, relative to the largest magnitude, and the
    reason for it.

    - bitwise: the same arithmetic in the same order: the same bits.
    - reordered: the same mathematics, sums in another order: 1e-12 for float64, 1e-5 for float32,
      relative to the leaf's largest update; see Note [reordered]. Where a tree mixes dtypes, the
      coarsest counts for all of it, since gradients pass through every dtype. Half precisions are
      refused: round-off alone may reach any size there, so state a bound.
    - approximate: compression, low precision: the bound that you state.
    """

    grade: Grade = "reordered"
    bound: float | None = None
    reason: str | None = None

    def __post_init__(self) -> None:
        if self.grade not in get_args(Grade):
            raise ValueError(f"grade must be one of {get_args(Grade)}, got {self.grade!r}")
        if self.grade == "approximate" and not (self.bound and self.reason):
            raise ValueError("grade 'approximate' takes a bound, and the reason for it")
        given = self.bound is not None or self.reason is not None
        if self.grade != "approximate" and given:
            raise ValueError(f"grade {self.grade!r} takes no bound: only 'approximate' does")

    def tolerance(self, dtypes: Iterable[torch.dtype]) -> float:
        """How far values computed in these dtypes may be apart, relative to the largest of them."""
        if self.grade == "bitwise":
            return 0.0
        if self.bound is not None:
            return self.bound
        real = {d.to_real() for d in dtypes if d.is_floating_point or d.is_complex}
        if refused := real - REORDERED.keys():
            names = ", ".join(sorted(map(str, refused)))
            raise ValueError(
                f"grade 'reordered' is for float64 and float32, got {names}. Remedy: use "
                "'approximate'"
            )
        return max((REORDERED[dtype] for dtype in real), default=0.0)


class ProvesNothing(AssertionError):
    """The expected update is such that a comparison with it would prove nothing."""


class Unequal(AssertionError):
    """Two trees differ."""

    story: str  # all but the cause
    what: str  # the trees' name
    wrong: Sequence[Wrong]  # the leaves that differ
    context: Mapping[str, Any]


def assert_equal_updates(
    old: PyTree[Tensor],
    expected: PyTree[Tensor],
    got: PyTree[Tensor],
    *,
    grade: Grade | Equality = "reordered",
    old_got: PyTree[Tensor] | None = None,
    trained: PyTree[bool] | None = None,
    unused: Iterable[str] = (),
    slack: Sequence[float] | None = None,
    context: Mapping[str, Any] | None = None,
) -> None:
    """Compare two updates of the same params, leaf by leaf.

    Args:
        old: the params before.
        expected: the oracle's params after.
        got: the other's params after.
        grade: see `Equality`.
        old_got: the other's params before, where they aren't `old` (after several steps they may
            differ a little).
        trained: which leaves are trained; the others must not change at all. None: those with
            `requires_grad`, or all where none has it.
        unused: paths, or patterns of paths, of trained leaves whose expected update may be zero, or
            mere round-off: those that the loss does not use, or that move in another step.
        slack: for each leaf, in order, how far its elements may be apart besides.
        context: step, level, ranks and the like, for error texts.

    Raises:
        AssertionError: naming the first leaf that differs, by how much, and the context. Also where
            the expected update of a trained leaf is zero, not finite, or too small to be told from
            round-off: then the comparison would prove nothing.
    """
    equality = as_equality(grade)
    same_structure(expected, got, what="the tree compared")
    same_structure(expected, old, what="the tree before")
    # By the params' dtypes, since updates are computed in float64 here
    tolerance = equality.tolerance(leaf.dtype for leaf in optree.tree_leaves(old))
    # In flatten order, as all lists below
    mask = _trained(old) if trained is None else optree.tree_leaves(trained)
    unused = list(unused)
    found: list[Wrong] = []
    # Rows of four tensors; the other run has its own params before
    trees = map(_leaves, (old, expected, old if old_got is None else old_got, got))
    rows = zip(paths(old), *trees, mask, slack or [0.0] * len(mask), strict=True)
    for path, before, new, before_got, new_got, moves, extra in rows:
        # Shapes and dtypes first: the arithmetic below would broadcast or promote
        _check_kind(path, new, new_got, "the updates", context)
        if moves:
            excused = any(fnmatchcase(path, pattern) for pattern in unused)
            check_moves(path, [before, new], equality, context, excused=excused)
        # Frozen leaves bit by bit
        allowed = None
        update, update_got = wide(new) - wide(before), wide(new_got) - wide(before_got)
        if moves and tolerance and new.numel():
            # A part for the leaf, and one for each element; see Note [reordered]
            allowed = tolerance * largest(update) + extra + last_places(before, new)
        # Bits are the params': a rounded update may hide a difference
        bits = new, new_got
        if difference := compare_within(path, update, update_got, allowed, bits=bits):
            found.append(difference)
    # All are compared before one is raised, so that the error can name the others
    _raise_if(found, "updates", equality, context)


def assert_equal_values(
    expected: PyTree[Any],
    got: PyTree[Any],
    *,
    grade: Grade | Equality = "reordered",
    what: str = "values",
    dtypes: Iterable[torch.dtype] = (),
    slack: Sequence[float] | None = None,
    context: Mapping[str, Any] | None = None,
) -> None:
    """Compare two trees of values (optimizer states, buffers, metrics), leaf by leaf.

    Floating-point leaves may differ as the grade allows, relative to the leaf's largest expected
    magnitude; all other leaves must be equal.

    Args:
        expected: the oracle's tree.
        got: the other's.
        grade: see `Equality`.
        what: the tree's name, for errors.
        dtypes: those that the values were computed from; the coarsest of them and of the leaves'
            own counts.
        slack: for each leaf, in order, how far its elements may be apart besides.
        context: step, level, ranks and the like, for error texts.
    """
    equality = as_equality(grade)
    # Else leaves would be paired wrongly
    same_structure(expected, got, what=what)
    wanted, given = _leaves(as_local(expected)), _leaves(as_local(got))
    own = [leaf.dtype for leaf in wanted if isinstance(leaf, Tensor)]
    tolerance = equality.tolerance([*dtypes, *own])
    slacks = slack or [0.0] * len(wanted)
    found: list[Wrong] = []
    for path, a, b, extra in zip(paths(expected), wanted, given, slacks, strict=True):
        _check_kind(path, a, b, what, context)
        if not isinstance(a, Tensor):
            continue
        allowed = None
        if tolerance and a.numel() and is_rounded(a):
            most = tolerance * largest(a) + extra
            allowed = torch.full_like(a, most, dtype=torch.float64)
        if difference := compare_within(path, a, b, allowed):
            found.append(difference)
    _raise_if(found, what, equality, context)


def as_equality(grade: Grade | Equality) -> Equality:
    """A grade's name -> the grade."""
    return grade if isinstance(grade, Equality) else Equality(grade)


def apart(a: Any, b: Any) -> float:
    """How far two leaves are apart at most; infinite where they can't be compared, or where one is
    NaN."""
    if _kind(a) != _kind(b):
        return math.inf
    if not isinstance(a, Tensor) or not a.numel():
        return 0.0
    # NaN in both counts as equal: both runs computed it. Infinities have no difference
    alike = (a == b) | (a.isnan() & b.isnan())
    error = _distances(a, b).masked_fill(alike, 0.0)
    return float(error.nan_to_num(nan=math.inf).max())  # NaN on one side only


def _leaves(tree: PyTree[Any]) -> list[Any]:
    return [x.detach() if isinstance(x, Tensor) else x for x in optree.tree_leaves(tree)]


def _trained(tree: PyTree[Tensor]) -> list[bool]:
    """Which leaves are trained: those with `requires_grad`, or all where none has it."""
    flags = [leaf.requires_grad for leaf in optree.tree_leaves(tree)]
    return flags if any(flags) else [True] * len(flags)


def _check_kind(
    path: str, expected: Any, got: Any, what: str, context: Mapping[str, Any] | None
) -> None:
    """Raise at once where leaves differ that have no distance: in shape or dtype, or as values that
    are no tensors."""
    kind, other = map(_kind, (expected, got))
    if kind != other:
        story = f"{what} differ, in shape or dtype or as plain values{_told(context)}"
        raise AssertionError(explain(story, path=path, expected=kind, got=other))


def _kind(leaf: Any) -> Any:
    # Dtype too: a cast leaf may have equal numbers
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf


def check_moves(
    path: str,
    values: Sequence[Tensor],
    equality: Equality,
    context: Mapping[str, Any] | None = None,
    *,
    excused: bool = False,
) -> None:
    """Refuse a leaf's expected values, before the first step and after each, that would prove
    nothing: in no step do they move visibly. Excused ones must only be finite."""
    # An empty leaf can't move
    if not values[0].numel():
        return
    steps = list(itertools.pairwise(values))
    updates = [wide(new) - wide(old) for old, new in steps]
    if not all(bool(torch.isfinite(update).all()) for update in updates):
        story = "the expected update is not finite"
        remedy = "look at the oracle's loss first; or take a smaller learning rate, or float64"
    elif excused:
        return
    elif not any(bool(update.any()) for update in updates):
        story = "the expected update is zero, so the comparison would prove nothing"
        remedy = "give this leaf a gradient; or freeze it, by requires_grad_(False) or "
        remedy += "train_step(trainable=...); or name it in `unused`"
    elif equality.grade == "reordered" and not any(is_visible(*step) for step in steps):
        size = max(map(largest, updates))
        story = f"the expected update, at most {size:.3g}, is lost in the param's last places"
        remedy = "take a larger learning rate, or float64, or name it in `unused`"
    else:
        return
    raise ProvesNothing(explain(story + _told(context), path=path, remedy=remedy))


def is_visible(old: Tensor, new: Tensor) -> bool:
    """Whether an update is well above the error that the params' last places may make. `old` has
    at least one element."""
    size = largest(wide(new) - wide(old))
    # The most that two roundings may hide, of the element with the largest last place
    hidden = float(last_places(old, new).max())
    return size > 0 and size >= VISIBLE * hidden


def compare_within(
    path: str,
    expected: Tensor,
    got: Tensor,
    allowed: Tensor | None,  # elementwise, float64
    rank: int = 0,
    *,
    bits: tuple[Tensor, Tensor] | None = None,
) -> Wrong | None:
    """The element that is furthest off, of those that are further apart than `allowed`. Without
    that, of those whose bits aren't the same: of the values that both were made of, or their
    own."""
    error = _distances(expected, got)
    if allowed is None:
        bad, allowed = ~same_bits(*(bits or (expected, got))), torch.zeros_like(error)
    else:
        alike = (expected == got) | (expected.isnan() & got.isnan())  # infinities and NaN too
        bad = ~(alike | (error <= allowed))
    if not bool(bad.any()):
        return None
    # NaN is further off than any number, and an element that is fine nearer
    excess = torch.nan_to_num(error - allowed, nan=torch.inf).where(bad, -torch.inf)
    at = tuple(map(int, torch.unravel_index(excess.argmax(), excess.shape)))
    values = f"expected {expected[at].item()}, got {got[at].item()}"
    distance = f"{float(error[at]):.3g} apart, {float(allowed[at]):.3g} allowed"
    text = f"leaf {path or '(root)'}{list(at) if at else ''}: {values}, {distance}"
    return Wrong(rank, path, wide(expected), wide(got), bad, allowed, text)


def same_bits(a: Tensor, b: Tensor) -> Tensor:
    """Elementwise, bit by bit: NaN equals the same NaN, and 0.0 differs from -0.0."""
    # (numel, bytes per element), uint8
    ours, theirs = (in_words(x, torch.uint8).view(-1, x.element_size()) for x in (a, b))
    return (ours == theirs).all(1).reshape(a.shape)


def is_rounded(x: Tensor) -> bool:
    """Integers and booleans are exact in every grade."""
    return x.is_floating_point() or x.is_complex()


def _distances(a: Tensor, b: Tensor) -> Tensor:
    """Elementwise, float64."""
    return (wide(a) - wide(b)).abs()


def differences(new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`new - old` of the leaves that both have, float64 or complex128."""
    return {name: wide(leaf) - wide(old[name]) for name, leaf in new.items() if name in old}


def wide_values(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors among leaves, float64 or complex128."""
    return {name: wide(x) for name, x in values.items() if isinstance(x, Tensor)}


def wide(x: Tensor) -> Tensor:
    """A leaf without its graph, float64 or complex128."""
    return x.detach().to(torch.complex128 if x.is_complex() else torch.float64)


def largest(x: Tensor) -> float:
    """The largest finite magnitude: a NaN or an infinity must not widen the bound for the other
    elements."""
    sizes = wide(x).abs()
    return float(sizes.where(sizes.isfinite(), 0.0).max())


def last_places(old: Tensor, new: Tensor) -> Tensor:
    """How far apart two roundings of `new - old` may be, elementwise, float64."""
    if not is_rounded(old):
        return old.new_zeros(old.shape, dtype=torch.float64)  # integers are not rounded
    sizes = torch.maximum(wide(old).abs(), wide(new).abs())
    # eps times a size is between one and two last places
    return LAST_PLACES * torch.finfo(old.dtype).eps * sizes


def _raise_if(
    found: Sequence[Wrong],
    what: str,
    equality: Equality,
    context: Mapping[str, Any] | None,
) -> None:
    """Raise an error that tells the first difference and its cause, and names some of the other
    leaves."""
    if not found:
        return
    subject = "the updates" if what == "updates" else what
    story = f"{subject} differ{_told(context)}: {first_of(found)}. Grade: {equality.grade}."
    context = context or {}
    ranks = context.get("ranks")
    cause = why(Evidence(what, found, {"ranks": ranks} if isinstance(ranks, int) else {}))
    error = Unequal(f"{story} {cause}".rstrip())
    error.story, error.what, error.wrong, error.context = story, what, found, context
    raise error


def first_of(found: Sequence[Wrong]) -> str:
    """The first difference, and the names of some of the other leaves."""
    _, *others = dict.fromkeys(difference.leaf for difference in found)
    shown = ", ".join(others[:SHOWN]) + (", ..." if len(others) > SHOWN else "")
    return f"{found[0]}" + (f", and {len(others)} more leaves: {shown}" if others else "")


def _told(context: Mapping[str, Any] | None) -> str:
    """The context in words: " at step 2, level 3, ranks 4"."""
    if not context:
        return ""
    return " at " + ", ".join(f"{key} {value}" for key, value in context.items())
