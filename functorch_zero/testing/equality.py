"""The three grades of equality, and comparisons that name the first difference.

What is compared is *updates*, `new - old`, and the expected update must be non-zero on every
trained leaf: params that have hardly moved would be equal whatever the optimizer does.

Note [reordered]: the same sums, added in another order, differ by a few roundings of their largest
terms, so an element that cancels to nearly zero may be wrong relative to itself while nothing is
wrong. Hence a leaf's differences are measured against the largest magnitude in that leaf's expected
update. And a param holds `old + update` only to its own last place, so a param large beside its
update shows differences of that size too; two last places are allowed, and an update that is not
well above them is refused, because comparing it would say nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, get_args

import optree
import torch
from torch import Tensor

from ..errors import explain
from ..tree import PyTree, paths, same_structure

Grade = Literal["bitwise", "reordered", "approximate"]

REORDERED = {torch.float64: 1e-12, torch.float32: 1e-5}  # relative; about 4500 and 84 roundings
LAST_PLACES = 2  # of a param, that its new and its old value may be off by in all
VISIBLE = (
    8  # an update's largest magnitude must be this many times what the params' last places allow
)


@dataclass(frozen=True)
class Equality:
    """A grade of equality; `approximate` has a bound, relative to the largest magnitude, and the
    reason for it.

    - bitwise: the same arithmetic in the same order: the same bits.
    - reordered: the same mathematics, sums in another order: 1e-12 for float64, 1e-5 for float32,
      relative to the leaf's largest update. Where a tree mixes dtypes, the coarsest counts for all
      of it, since gradients pass through every dtype. Half precisions are refused: round-off alone
      may reach any size there, so state a
          bound.
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
        if self.grade != "approximate" and (self.bound is not None or self.reason is not None):
            raise ValueError(f"grade {self.grade!r} takes no bound: only 'approximate' does")

    def tolerance(self, dtypes: Iterable[torch.dtype]) -> float:
        """How far values computed in these dtypes may be apart, relative to the largest of them."""
        if self.grade == "bitwise":
            return 0.0
        if self.bound is not None:
            return self.bound
        kinds = {dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex}
        real = {torch.zeros((), dtype=dtype).abs().dtype for dtype in kinds}
        if refused := real - set(REORDERED):
            names = ", ".join(sorted(map(str, refused)))
            raise ValueError(
                f"grade 'reordered' is for float64 and float32, got {names}. Remedy: use "
                "'approximate'"
            )
        return max((REORDERED[dtype] for dtype in real), default=0.0)


class ProvesNothing(AssertionError):
    """What was expected is such that a comparison with it would prove nothing."""


class Difference(NamedTuple):
    """Two leaves that should be equal and aren't."""

    path: str
    element: tuple[int, ...]  # index of the element that is furthest off
    expected: Any
    got: Any
    error: float
    allowed: float

    def __str__(self) -> str:
        place = f"{list(self.element)}" if self.element else ""
        return (
            f"leaf {self.path or '(root)'}{place}: expected {self.expected}, got {self.got}, "
            f"{self.error:.3g} apart, {self.allowed:.3g} allowed"
        )


def assert_equal_updates(
    old: PyTree[Tensor],
    expected: PyTree[Tensor],
    got: PyTree[Tensor],
    *,
    grade: Grade | Equality = "reordered",
    old_got: PyTree[Tensor] | None = None,
    trained: PyTree[bool] | None = None,
    unused: Iterable[str] = (),
    resting: Iterable[str] = (),
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
        unused: paths, or patterns of paths, of trained leaves that the loss does not use: their
            expected update may be zero, or mere round-off.
        resting: the same of leaves whose expected update may be zero in this step: those that move
            in another.
        slack: for each leaf, in order, how far its elements may be apart besides.
        context: what to say in an error: step, level, ranks.

    Raises:
        AssertionError: naming the first leaf that differs, by how much, and the context. Also where
            the expected update of a trained leaf is zero, not finite, or too small to be told from
            round-off: then the comparison would prove nothing.
    """
    equality = grade if isinstance(grade, Equality) else Equality(grade)
    same_structure(expected, got, what="the tree compared")
    same_structure(expected, old, what="the tree before")
    mask = _trained(old) if trained is None else optree.tree_leaves(trained)
    tolerance = equality.tolerance(leaf.dtype for leaf in optree.tree_leaves(old))
    rows = zip(
        paths(old),
        mask,
        *map(_leaves, (old, old if old_got is None else old_got, expected, got)),
        strict=True,
    )
    slacks, unused, resting = slack or [0.0] * len(mask), tuple(unused), tuple(resting)
    found = []
    for number, (path, moves, before, before_got, after, after_got) in enumerate(rows):
        _check_kind(path, after, after_got, context)
        if moves:
            _check_update(path, before, after, (unused, resting), equality, context)
        more = slacks[number] if moves else 0.0
        difference = _compare_update(
            path, before, before_got, after, after_got, tolerance if moves else 0.0, more
        )
        if difference is not None:
            found.append(difference)
    _raise_if(found, "the updates differ", equality, context)


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
        context: what to say in an error: step, level, ranks.
    """
    equality = grade if isinstance(grade, Equality) else Equality(grade)
    same_structure(expected, got, what=what)
    everything = [*dtypes, *(leaf.dtype for leaf in _leaves(expected) if isinstance(leaf, Tensor))]
    tolerance = equality.tolerance(everything)
    leaves = zip(paths(expected), _leaves(expected), _leaves(got), strict=True)
    found = []
    for (path, a, b), more in zip(leaves, slack or itertools.repeat(0.0), strict=False):
        if isinstance(a, Tensor):
            _check_kind(path, a, b, context)
            difference = _compare_values(path, a, b, tolerance, more)
        else:
            difference = None if a == b else Difference(path, (), a, b, math.nan, 0.0)
        if difference is not None:
            found.append(difference)
    _raise_if(found, f"{what} differ", equality, context)


def apart(a: Any, b: Any) -> float:
    """How far two leaves are apart at most; infinite where they can't be compared, or where one is
    NaN."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.shape != b.shape:
        return 0.0 if not isinstance(a, Tensor) and a == b else math.inf
    if not a.numel():
        return 0.0
    a, b = a.detach(), b.detach()
    error = (_wide(a) - _wide(b)).abs().masked_fill(a.isnan() & b.isnan(), 0.0)
    return float(error.nan_to_num(nan=math.inf).max())


def _leaves(tree: PyTree[Any]) -> list[Any]:
    return [x.detach() if isinstance(x, Tensor) else x for x in optree.tree_leaves(tree)]


def _trained(tree: PyTree[Tensor]) -> list[bool]:
    flags = [leaf.requires_grad for leaf in optree.tree_leaves(tree)]
    return flags if any(flags) else [True] * len(flags)


def _check_kind(path: str, expected: Tensor, got: Any, context: Mapping[str, Any] | None) -> None:
    kind = (tuple(expected.shape), expected.dtype)
    other = (tuple(got.shape), got.dtype) if isinstance(got, Tensor) else type(got).__name__
    if kind != other:
        raise AssertionError(
            explain("shape or dtype differ" + _told(context), path=path, expected=kind, got=other)
        )


def _check_update(
    path: str,
    old: Tensor,
    new: Tensor,
    excused: tuple[tuple[str, ...], tuple[str, ...]],  # unused, resting
    equality: Equality,
    context: Mapping[str, Any] | None,
) -> None:
    """Refuse an expected update that would prove nothing."""
    unused, resting = (
        any(fnmatchcase(path, pattern) for pattern in patterns) for patterns in excused
    )
    if not old.numel():
        return
    update = _update(old, new)
    if not bool(torch.isfinite(update).all()):
        story, remedy = "the expected update is not finite", "look at the oracle's loss first"
    elif unused or resting:
        return
    elif not bool(update.any()):
        story = "the expected update is zero, so the comparison would prove nothing"
        remedy = "give this leaf a gradient, freeze it, or name it in `unused`"
    elif equality.grade == "reordered" and not is_visible(old, new):
        story = (
            f"the expected update, at most {_largest(update):.3g}, is lost in the param's "
            "last places"
        )
        remedy = "take a larger learning rate, or float64"
    else:
        return
    raise ProvesNothing(explain(story + _told(context), path=path, remedy=remedy))


def is_visible(old: Tensor, new: Tensor) -> bool:
    """Whether an update is well above what the params' last places hide."""
    old, new = old.detach(), new.detach()
    size = _largest(_update(old, new))
    return size > 0 and size >= VISIBLE * float(_last_places(old, new).max())


def _compare_update(
    path: str,
    old: Tensor,
    old_got: Tensor,
    new: Tensor,
    new_got: Tensor,
    tolerance: float,
    slack: float,
) -> Difference | None:
    expected, got = _update(old, new), _update(old_got, new_got)
    if not tolerance or not old.numel():
        return _compare(path, new, new_got, expected, got, None)
    allowed = tolerance * _largest(expected) + slack + _last_places(old, new)
    return _compare(path, new, new_got, expected, got, allowed)


def _compare_values(
    path: str, a: Tensor, b: Tensor, tolerance: float, slack: float
) -> Difference | None:
    if not tolerance or not a.numel() or not (a.is_floating_point() or a.is_complex()):
        return _compare(path, a, b, a, b, None)
    return _compare(
        path, a, b, a, b, torch.full(a.shape, tolerance * _largest(a) + slack, dtype=torch.float64)
    )


def _compare(
    path: str, new: Tensor, new_got: Tensor, expected: Tensor, got: Tensor, allowed: Tensor | None
) -> Difference | None:
    """The element that is furthest off; None where all are as near as `allowed` (None: bitwise, of
    the new values)."""
    if not new.numel():
        return None
    error = (_wide(expected) - _wide(got)).abs()
    if allowed is None:
        bad = ~_same_bits(new, new_got)
        allowed = torch.zeros_like(error)
    else:
        alike = (expected == got) | (expected.isnan() & got.isnan())  # infinities and NaN too
        bad = ~(alike | (error <= allowed))
    if not bool(bad.any()):
        return None
    badness = torch.where(bad, torch.nan_to_num(error - allowed, nan=torch.inf), -torch.inf)
    at = tuple(int(i) for i in torch.unravel_index(badness.argmax(), error.shape))
    return Difference(
        path, at, expected[at].item(), got[at].item(), float(error[at]), float(allowed[at])
    )


def _same_bits(a: Tensor, b: Tensor) -> Tensor:
    """Elementwise, bit by bit: NaN equals the same NaN, and 0.0 differs from -0.0."""

    def bits(x: Tensor) -> Tensor:
        return x.contiguous().reshape(-1, 1).view(torch.uint8).reshape(*x.shape, -1)

    return (bits(a) == bits(b)).all(-1)


def _update(old: Tensor, new: Tensor) -> Tensor:
    return _wide(new) - _wide(old)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def _largest(x: Tensor) -> float:
    """The largest finite magnitude: a NaN or an infinity must not widen what the other elements may
    differ by."""
    sizes = _wide(x).abs()
    return float(sizes.where(sizes.isfinite(), 0.0).max())


def _last_places(old: Tensor, new: Tensor) -> Tensor:
    """How far apart two roundings of `new - old` may be, elementwise, float64."""
    if not (old.is_floating_point() or old.is_complex()):
        return torch.zeros(old.shape, dtype=torch.float64)
    return (
        LAST_PLACES * torch.finfo(old.dtype).eps * torch.maximum(_wide(old).abs(), _wide(new).abs())
    )


def _raise_if(
    found: list[Difference], story: str, equality: Equality, context: Mapping[str, Any] | None
) -> None:
    if found:
        more = (
            f", and {len(found) - 1} more leaves: {_some(d.path for d in found[1:])}"
            if len(found) > 1
            else ""
        )
        raise AssertionError(f"{story}{_told(context)}: {found[0]}{more}. Grade: {equality.grade}.")


def _some(names: Iterator[str], limit: int = 4) -> str:
    listed = list(names)
    return ", ".join(listed[:limit]) + (", ..." if len(listed) > limit else "")


def _told(context: Mapping[str, Any] | None) -> str:
    """The context in words: " at step 2, level 3, ranks 4"."""
    return " at " + ", ".join(f"{key} {value}" for key, value in context.items()) if context else ""
