"""Why values on ranks differ from a reference's: the mistakes that are made again and again.

A `Mistake` predicts what ranks would hold if it had been made. It explains a difference if all
elements that differ are as predicted. So a mistake is told by its formula, and nothing else has to
be written down for it. A prediction that needs what isn't known raises KeyError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .recording import Recording

# By leaf, float64 or complex128; what isn't known is left out
Values = Mapping[str, Tensor]

# How much of a difference may be left unexplained: Adam's eps bends its ratios. Of a single number
# more is asked, since many mistakes are tried
_CLOSE, _CLOSE_ALONE = 1e-3, 1e-6


class Wrong(NamedTuple):
    """A leaf of one rank that differs; tensors have the leaf's shape."""

    rank: int
    leaf: str
    expected: Tensor  # float64 or complex128, as `got`
    got: Tensor
    bad: Tensor  # bool: the elements that differ
    allowed: Tensor  # float64: how far elements may be apart
    text: str = ""  # the element that is furthest off, in words

    def __str__(self) -> str:
        return self.text

    def is_as(self, predicted: Tensor, close: float = _CLOSE) -> bool:
        """Whether all elements that differ are as predicted."""
        if predicted.shape != self.got.shape:
            return False
        largest, most = (float(x.abs().max()) for x in (self.expected, predicted))
        # Round-off grows with the values
        allowed = self.allowed * max(1.0, most / largest if largest else 1.0)
        apart = (self.got - self.expected).abs()
        near = (self.got - predicted).abs() <= allowed + close * apart
        return bool(near[self.bad].all())


Predict = Callable[[Wrong], Tensor]


class Mistake(NamedTuple):
    text: str  # what the values are: that is seen; and after "likely" the mistake
    predict: Predict
    close: float = _CLOSE

    def explains(self, wrong: Sequence[Wrong]) -> bool:
        """Whether it predicts all elements that differ."""
        alone = all(int(row.bad.sum()) == 1 for row in wrong)
        close = _CLOSE_ALONE if alone else self.close
        try:
            return all(row.is_as(self.predict(row), close) for row in wrong)
        except KeyError:
            return False


class Adam(NamedTuple):
    b1: float
    b2: float
    step: float  # the number of this one, from 1


@dataclass(frozen=True)
class Evidence:
    """All that is known of a difference. What is None, or empty, isn't known."""

    kind: str  # "gradients", "updates", ...
    wrong: Sequence[Wrong]
    sizes: Mapping[str, int]  # numbers that a mistake may multiply by: {"ranks": 2}
    num_leaves: int = 1  # that were compared, on each rank
    ranks: Sequence[Values] = ()  # what each rank has
    uses: Mapping[str, int] = field(default_factory=dict)  # of tied leaves
    earlier: Values = field(default_factory=dict)  # the reference's of the step before
    later: Values = field(default_factory=dict)  # rank 0's of the step after
    # The reference's values on each rank's rows alone, and which of them is each rank's
    shares: Callable[[], Sequence[Values]] = tuple
    share_of: Sequence[int] = ()
    gradients: Values = field(default_factory=dict)  # the reference's of this step
    params: Values = field(default_factory=dict)  # the reference's before this step
    adam: Adam | None = None

    @classmethod
    def of_step(
        cls, k: int, kind: str, expected: Recording, got: Sequence[Recording], **more: Any
    ) -> Evidence:
        """A difference in step k, with what the reference and the ranks have recorded around it."""
        return cls(
            kind,
            uses=expected.uses,
            earlier=expected.known(k - 1, kind),
            later=got[0].known(k + 1, kind),
            share_of=[run.part for run in got],
            gradients=expected.known(k, "gradients"),
            params=expected.known(k, "params"),
            **more,
        )

    @property
    def wrong_ranks(self) -> list[int]:
        return sorted({row.rank for row in self.wrong})

    @property
    def on(self) -> str:
        """The ranks that differ: "on rank 1 only"."""
        ranks = self.wrong_ranks
        if len(ranks) == len(self.ranks):
            return "on all ranks"
        return f"on rank {', '.join(map(str, ranks))} only"


def why(evidence: Evidence) -> str:
    """The mistakes that explain a difference, as a sentence: those of all leaves, or at least of
    the first one. Empty where none is known."""
    causes, of = causes_of(evidence), ""
    if not causes and evidence.wrong:
        leaf = evidence.wrong[0].leaf
        its = [row for row in evidence.wrong if row.leaf == leaf]
        causes, of = causes_of(replace(evidence, wrong=its)), f" of {leaf}"
    return f"What differs{of} is {'; or '.join(causes)}." if causes else ""


def sizes_of(num_ranks: int, found: Mapping[str, int]) -> dict[str, int]:
    """Numbers that a mistake may multiply by, by what they count; of equal ones that of ranks."""
    others = {what: size for what, size in found.items() if size != num_ranks}
    return {"ranks": num_ranks, **others}


def causes_of(evidence: Evidence) -> list[str]:
    """The mistakes that explain a difference, in words that go on after "what differs is".

    Where several of one family predict the same numbers, all of them are returned.
    """
    if not evidence.wrong:
        return []
    for family in _FAMILIES:
        if found := [m.text for m in family(evidence) if m.explains(evidence.wrong)]:
            return found
    return []


def where(evidence: Evidence) -> str:
    """Which leaves and ranks differ: "in 2 of 8 leaves, on rank 1 only"."""
    leaves, num = len({row.leaf for row in evidence.wrong}), evidence.num_leaves
    words = []
    if num > 1:
        words.append(f"in {'all' if leaves == num else f'{leaves} of'} {num} leaves")
    first = evidence.wrong[0]
    if rows := _rows(first.bad, evidence.sizes):
        words.append(f"of {first.leaf} {rows}")
    if len(evidence.ranks) > 1:
        words.append(evidence.on)
    return ", ".join(words)


def _rows(bad: Tensor, sizes: Mapping[str, int]) -> str:
    """The rows that differ, where they are not all of them, and whose piece they are."""
    for dim, num in enumerate(bad.shape):
        rows = bad.movedim(dim, 0).reshape(num, -1).any(1).nonzero().view(-1).tolist()
        if len(rows) == num:
            continue
        for what, size in sizes.items():
            for n, piece in enumerate(torch.arange(num, device="cpu").chunk(size)):
                others = sorted({*range(num)} - {*piece.tolist()})
                if rows in (piece.tolist(), others):
                    part = "all but" if rows == others else "only"
                    return f"{part} piece {n} of {size} ({what}) along dim {dim}"
        return f"only rows {rows[0]} to {rows[-1]} of {num} along dim {dim}"
    return ""


# The families of mistakes, in the order in which they are tried


def _late(e: Evidence) -> Iterator[Mistake]:
    def zero(row: Wrong) -> Tensor:
        comes = row.is_as(row.got - e.later[row.leaf] + row.expected)
        return torch.zeros_like(row.got) if comes else row.expected

    if 0 in e.wrong_ranks:
        yield Mistake("zero now, and the reference's in the next step: stale by a step", zero)


def _missing(e: Evidence) -> Iterator[Mistake]:
    on = f" {e.on}" if e.ranks else ""
    yield Mistake(f"missing{on}: zero, or None", lambda row: torch.zeros_like(row.got))


# By the power of a number: what is seen, and the likely mistake
_POWERS = {
    1: ("{n} times", "a sum where it takes a mean"),
    -1: ("1/{n} of", "divided by that once more, or a mean where it takes a sum"),
    0.5: ("√{n} times", "the root of a sum of squares of which each was the whole"),
    -0.5: ("1/√{n} of", "the root of a mean of squares, or of one part's"),
    2: ("{n}² times", "multiplied twice"),
    -2: ("1/{n}² of", "divided twice"),
}


def _powers(e: Evidence, *powers: float) -> Iterator[Mistake]:
    """Results that are the reference's times such a power of the number of ranks, or the like."""
    for power in powers:
        seen, likely = _POWERS[power]
        for what, n in e.sizes.items():
            if n > 1:
                number = f"{seen.format(n=n)} the reference's, {n} being the number of {what}"
                yield Mistake(f"{number}: likely {likely}", _times(n**power))


def _times(factor: float) -> Predict:
    return lambda row: factor * row.expected


def _ratios(e: Evidence) -> Iterator[Mistake]:
    yield from _powers(e, 1, -1)
    yield Mistake(
        "as many times the reference's as a tied leaf has names: likely each of its uses "
        "counts them all",
        lambda row: row.expected * e.uses.get(row.leaf, 1),
    )
    yield from _bias_corrections(e)


def _bias_corrections(e: Evidence) -> Iterator[Mistake]:
    """Adam's update with the corrections of another step, beside weight decay of any size."""
    if e.adam is None:
        return
    b1, b2, step = e.adam

    def correction(t: float) -> float:  # of m / sqrt(v)
        return math.sqrt(1 - math.pow(b2, t)) / (1 - math.pow(b1, t))

    others = {"a step ahead": correction(step + 1), "left out": 1.0}
    if step > 1:
        others |= {"a step behind": correction(step - 1), "that of the first step": correction(1)}
    for fit in _fitted(e, lambda row: row.expected, lambda row: e.params[row.leaf]):
        for how, other in others.items():
            ratio = other / correction(step)
            if abs(fit.factors[0] / ratio - 1) < _CLOSE:
                text = f"{ratio:.4g} times the reference's: Adam's bias correction is {how}"
                yield Mistake(text, fit.predict)


def _roots_and_squares(e: Evidence) -> Iterator[Mistake]:
    yield from _powers(e, 0.5, -0.5, 2, -2)


def _other_steps(e: Evidence) -> Iterator[Mistake]:
    yield Mistake(
        "the reference's of the step before: stale by a step", lambda row: e.earlier[row.leaf]
    )
    yield Mistake(
        "the reference's and those of the step before: likely nothing set them to zero",
        lambda row: row.expected + e.earlier[row.leaf],
    )


def _among_ranks(e: Evidence) -> Iterator[Mistake]:
    """Values of which each rank has another: what they make together tells what they are."""
    num = len(e.ranks)

    def others(row: Wrong) -> Tensor:  # (ranks - 1, *the leaf's shape)
        return torch.stack([x[row.leaf] for rank, x in enumerate(e.ranks) if rank != row.rank])

    def root(row: Wrong) -> Tensor:
        return (row.expected.square() - others(row).square().sum(0)).clamp(min=0).sqrt()

    if num < 2:
        return
    yield Mistake(
        "each rank's own, whose mean is the reference's: not reduced",
        lambda row: num * row.expected - others(row).sum(0),
    )
    yield Mistake(
        "each rank's part of a sum, which is the reference's: not reduced",
        lambda row: row.expected - others(row).sum(0),
    )
    if e.kind == "norm":
        text = "each rank's own, whose squares sum to the reference's: norms of the ranks' pieces"
        yield Mistake(text, root)


def _norms(e: Evidence) -> Iterator[Mistake]:
    """Norms that count some leaf otherwise."""
    if e.kind != "norm":
        return
    for leaf, gradient in e.gradients.items():
        square = gradient.abs().square().sum()
        for text, times in (("leaves out", -1), ("counts twice", 1)):
            yield Mistake(f"a norm that {text} {leaf}", _root_of_sum(times * square))


def _root_of_sum(more: Tensor) -> Predict:
    return lambda row: (row.expected.square() + more).clamp(min=0).sqrt()


_UNWEIGHTED = (
    "the plain mean over the ranks' parts, each by itself: likely weights, numbers of rows or "
    "tokens, are left out; or dropout or BatchNorm see a part by itself"
)
_MEANS = {
    "norm": "the mean of the norms of the ranks' own gradients: not reduced before",
    "updates": "the mean of updates, each of a rank's own rows: likely reduced after the "
    "optimizer, or without the rows' weights",
}


def _shares(e: Evidence) -> Iterator[Mistake]:
    """Values that come of some ranks' rows, or of all of them weighted otherwise."""
    shares = e.shares()
    if not shares:
        return
    if len(e.ranks) == len(e.share_of):  # not of losses, whose mean is compared
        yield Mistake(
            "what each rank's own rows give: not reduced",
            lambda row: shares[e.share_of[row.rank]][row.leaf],
        )
    for part, values in enumerate(shares):
        rest = ", ".join(str(n) for n in range(len(shares)) if n != part)
        yield Mistake(
            f"what part {part} of the rows gives alone: those of part {rest} don't count",
            _of(values),
        )
    yield Mistake(
        _MEANS.get(e.kind, _UNWEIGHTED),
        lambda row: torch.stack([values[row.leaf] for values in shares]).mean(0),
    )


def _of(values: Values) -> Predict:
    return lambda row: values[row.leaf]


class _Fit(NamedTuple):
    """Tensors times factors that come closest to what ranks have."""

    factors: list[float]
    predict: Predict


def _fitted(e: Evidence, *terms: Predict, beside: float = 0.0) -> Iterator[_Fit]:
    """None where a term isn't known, or there are too few elements to tell.

    Args:
        terms: whose factors are looked for.
        beside: the multiple of the reference's values that is there besides.
    """
    rows, wanted = [], []
    try:
        for row in e.wrong:
            rows.append(torch.stack([term(row)[row.bad] for term in terms], dim=1))
            wanted.append((row.got - beside * row.expected)[row.bad])
    except (KeyError, IndexError):  # a term isn't known, or has another shape
        return
    matrix, right = torch.cat(rows).cpu(), torch.cat(wanted).cpu()  # where gelsd is
    is_enough = any(len(x) >= 2 * len(terms) for x in wanted)
    is_finite = bool(matrix.isfinite().all() & right.isfinite().all())
    if right.is_complex() or not (is_enough and is_finite):
        return
    # gelsd: terms may depend on each other
    factors = torch.linalg.lstsq(matrix, right[:, None], driver="gelsd").solution[:, 0].tolist()

    def predict(row: Wrong) -> Tensor:
        total = beside * row.expected
        for factor, term in zip(factors, terms, strict=True):
            total = total + factor * term(row)
        return total

    yield _Fit(factors, predict)


def _of_weight_decay(e: Evidence) -> Iterator[Mistake]:
    """Updates that are right but for a multiple of the params."""
    if e.kind != "updates":
        return
    for fit in _fitted(e, _of(e.params), beside=1.0):
        text = f"the reference's and {fit.factors[0]:+.3g} times the params: likely by weight decay"
        yield Mistake(text, fit.predict)


def _of_lost_state(e: Evidence) -> Iterator[Mistake]:
    """Values of a later step that lack what the steps before have left."""
    if e.kind != "updates":  # running means
        for fit in _fitted(e, _of(e.earlier), beside=1.0):
            text = f"the reference's and {fit.factors[0]:+.3g} times that of the step before"
            yield Mistake(f"{text}: likely what went before was lost", fit.predict)
    elif e.earlier:
        signs = {leaf: x.sgn() for leaf, x in e.gradients.items()}
        # Adam divides by a gradient's size and eps
        for what, values, close in (("", e.gradients, _CLOSE), ("the sign of ", signs, 0.05)):
            text = f"made of {what}this step's gradient alone: likely the optimizer's state is lost"
            for fit in _fitted(e, _of(values), _of(e.params)):
                yield Mistake(text, fit.predict, close)


def _in_another_order(e: Evidence) -> Iterator[Mistake]:
    def moved(row: Wrong) -> Tensor:
        ours, theirs = row.expected.flatten(), row.got.flatten()
        if row.got.is_complex() or len(ours) < 2 or _are_near(ours, theirs):
            return row.expected
        return row.got if _are_near(ours.sort().values, theirs.sort().values) else row.expected

    text = "the reference's in other places: likely pieces in another order, or a transposed leaf"
    yield Mistake(text, moved)


def _are_near(ours: Tensor, theirs: Tensor) -> bool:
    return bool(((ours - theirs).abs() <= _CLOSE * ours.abs()).all())


def _any_ratio(e: Evidence) -> Iterator[Mistake]:
    for fit in _fitted(e, lambda row: row.expected):
        ratio = fit.factors[0]
        number = f"{ratio:.6g}" if abs(ratio - 1) > _CLOSE else f"1{ratio - 1:+.3g}"
        text = f"{number} times the reference's, which is no number that is known here"
        yield Mistake(text, fit.predict)


_FAMILIES = (
    _late,
    _missing,
    _ratios,
    _roots_and_squares,
    _other_steps,
    _among_ranks,
    _norms,
    _shares,
    _of_weight_decay,
    _of_lost_state,
    _in_another_order,
    _any_ratio,
)
