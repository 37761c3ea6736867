"""Why values on ranks differ from a reference's: the mistakes that are made again and again.

A `Hypothesis` predicts what ranks would hold if one such mistake had been made. It explains a
difference if all elements that differ are as predicted. So a mistake is told by its formula, and
nothing else has to be written down for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

Values = Mapping[str, Tensor]  # by leaf; float64 or complex128

# How much of a difference may be left unexplained: Adam's eps bends its ratios. Of a single number
# more is asked, since many mistakes are tried
_CLOSE, _CLOSE_ALONE = 1e-3, 1e-6


class Wrong(NamedTuple):
    """A leaf of one rank that differs; tensors have the leaf's shape."""

    rank: int
    leaf: str
    expected: Tensor
    got: Tensor
    bad: Tensor  # bool: the elements that differ
    allowed: Tensor | float  # how far elements may be apart

    def is_as(self, predicted: Tensor, close: float = _CLOSE) -> bool:
        """Whether all elements that differ are as predicted."""
        largest, most = (float(x.abs().max()) for x in (self.expected, predicted))
        # Round-off grows with the values
        allowed = self.allowed * max(1.0, most / largest if largest else 1.0)
        apart = (self.got - self.expected).abs()
        near = (self.got - predicted).abs() <= allowed + close * apart
        return bool(near[self.bad].all())


@dataclass(frozen=True)
class Evidence:
    """All that is known of a difference. What is None, or empty, isn't known."""

    kind: str  # "gradients", "updates", ...
    wrong: Sequence[Wrong]
    sizes: Mapping[str, int]  # numbers that a mistake may multiply by: {"ranks": 2}
    num_leaves: int = 1  # that were compared, on each rank
    ranks: Sequence[Values] = ()  # what each rank has
    uses: Mapping[str, int] = field(default_factory=dict)  # of tied leaves
    earlier: Values | None = None  # the reference's values of the step before
    later: Values | None = None  # rank 0's values of the step after
    # The reference's values on each rank's rows alone, and which of them is each rank's
    shares: Callable[[], Sequence[Values]] | None = None
    share_of: Sequence[int] = ()
    gradients: Values | None = None  # the reference's of this step
    params: Values | None = None  # the reference's before this step
    adam: tuple[float, float, int] | None = None  # b1, b2, and the number of this step from 1

    @property
    def wrong_ranks(self) -> list[int]:
        return sorted({row.rank for row in self.wrong})

    @property
    def is_everywhere(self) -> bool:
        """Whether no rank is right."""
        return len(self.wrong_ranks) == len(self.ranks)


class Hypothesis(NamedTuple):
    """One known mistake."""

    text: str  # what the values are: that is seen; and after "likely" the mistake
    predicted: Callable[[Wrong], Tensor | None]  # of a leaf on a rank; None: it can't be so
    close: float = _CLOSE

    def explains(self, evidence: Evidence) -> bool:
        """Whether it predicts all elements that differ."""
        alone = all(int(row.bad.sum()) == 1 for row in evidence.wrong)
        for row in evidence.wrong:
            value = self.predicted(row)
            if value is None or value.shape != row.got.shape:
                return False
            if not row.is_as(value, _CLOSE_ALONE if alone else self.close):
                return False
        return True


def causes_of(evidence: Evidence) -> list[str]:
    """The mistakes that explain a difference, in words that go on after "what differs is".

    Where several of one family predict the same numbers, all of them are returned.
    """
    if not evidence.wrong:
        return []
    for family in _FAMILIES:
        if found := [h.text for h in family(evidence) if h.explains(evidence)]:
            return found
    return []


def where(evidence: Evidence) -> str:
    """Which leaves and ranks differ: "in 2 of 8 leaves, on rank 1 only"."""
    leaves = {row.leaf for row in evidence.wrong}
    words = []
    if evidence.num_leaves > 1:
        every = len(leaves) == evidence.num_leaves
        words.append(f"in {'all' if every else f'{len(leaves)} of'} {evidence.num_leaves} leaves")
    first = evidence.wrong[0]
    if rows := _rows(first.bad, evidence.sizes):
        words.append(f"of {first.leaf} {rows}")
    if len(evidence.ranks) > 1:
        words.append(_on(evidence))
    return ", ".join(words)


def _on(evidence: Evidence) -> str:
    """The ranks that differ: "on rank 1 only"."""
    ranks = ", ".join(map(str, evidence.wrong_ranks))
    return "on all ranks" if evidence.is_everywhere else f"on rank {ranks} only"


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


def _late(e: Evidence) -> Iterator[Hypothesis]:
    later = e.later or {}

    def zero(row: Wrong) -> Tensor | None:
        after = later.get(row.leaf)
        comes = after is not None and row.is_as(row.got - after + row.expected)
        return torch.zeros_like(row.got) if comes else None

    if e.is_everywhere:
        yield Hypothesis("zero now, and the reference's in the next step: stale by a step", zero)


def _missing(e: Evidence) -> Iterator[Hypothesis]:
    on = f" {_on(e)}" if e.ranks else ""
    yield Hypothesis(f"missing{on}: zero, or None", lambda row: torch.zeros_like(row.got))


def _ratios(e: Evidence) -> Iterator[Hypothesis]:
    for n, number in _numbers(e):
        yield _times(n, f"{n} times the reference's, {number}: likely a sum where it takes a mean")
        yield _times(
            1 / n,
            f"1/{n} of the reference's, {number}: likely divided by that once more, or a mean "
            "where it takes a sum",
        )
    if e.uses:
        yield Hypothesis(
            "as many times the reference's as a tied leaf has names: likely each of its uses "
            "counts them all",
            lambda row: row.expected * e.uses.get(row.leaf, 1),
        )
    yield from _bias_corrections(e)


def _roots_and_squares(e: Evidence) -> Iterator[Hypothesis]:
    for n, number in _numbers(e):
        yield _times(
            math.sqrt(n),
            f"√{n} times the reference's, {number}: likely the root of a sum of squares of which "
            "each was the whole",
        )
        yield _times(
            1 / math.sqrt(n),
            f"1/√{n} of the reference's, {number}: likely the root of a mean of squares, or of one "
            "part's",
        )
        yield _times(n * n, f"{n}² times the reference's, {number}: likely multiplied twice")
        yield _times(1 / (n * n), f"1/{n}² of the reference's, {number}: likely divided twice")


def _numbers(e: Evidence) -> Iterator[tuple[int, str]]:
    for what, n in e.sizes.items():
        if n > 1:
            yield n, f"{n} being the number of {what}"


def _times(factor: float, text: str) -> Hypothesis:
    return Hypothesis(text, lambda row: factor * row.expected)


def _bias_corrections(e: Evidence) -> Iterator[Hypothesis]:
    """Adam's update with the corrections of another step, beside weight decay of any size."""
    if e.adam is None or e.params is None:
        return
    b1, b2, step = e.adam

    def correction(t: int) -> float:  # of m / sqrt(v)
        return math.sqrt(1 - b2**t) / (1 - b1**t)

    ratios = {"a step ahead": correction(step + 1) / correction(step)}
    if step > 1:
        ratios["a step behind"] = correction(step - 1) / correction(step)
        ratios["that of the first step"] = correction(1) / correction(step)
    ratios["left out"] = 1 / correction(step)
    params = e.params
    fit = _fitted(e, lambda row: row.expected, lambda row: params.get(row.leaf))
    for how, ratio in ratios.items():
        if fit is not None and abs(fit.factors[0] / ratio - 1) < _CLOSE:
            text = f"{ratio:.4g} times the reference's: Adam's bias correction is {how}"
            yield Hypothesis(text, fit.predicted)


def _other_steps(e: Evidence) -> Iterator[Hypothesis]:
    if e.earlier is None:
        return
    earlier = e.earlier
    yield Hypothesis(
        "the reference's of the step before: stale by a step",
        lambda row: earlier.get(row.leaf),
    )
    yield Hypothesis(
        "the reference's and those of the step before: likely nothing set them to zero",
        lambda row: row.expected + earlier[row.leaf] if row.leaf in earlier else None,
    )


def _among_ranks(e: Evidence) -> Iterator[Hypothesis]:
    """Values of which each rank has another: what they make together tells what they are."""
    num = len(e.ranks)

    def others(row: Wrong) -> list[Tensor]:
        return [x[row.leaf] for rank, x in enumerate(e.ranks) if rank != row.rank]

    def root(row: Wrong) -> Tensor:
        squares = torch.stack([x.square() for x in others(row)])
        return (row.expected.square() - squares.sum(0)).clamp(min=0).sqrt()

    if num < 2 or not all(row.leaf in values for row in e.wrong for values in e.ranks):
        return
    yield Hypothesis(
        "each rank's own, whose mean is the reference's: not reduced",
        lambda row: num * row.expected - torch.stack(others(row)).sum(0),
    )
    yield Hypothesis(
        "each rank's part of a sum, which is the reference's: not reduced",
        lambda row: row.expected - torch.stack(others(row)).sum(0),
    )
    if e.kind == "norm":
        text = "each rank's own, whose squares sum to the reference's: norms of the ranks' pieces"
        yield Hypothesis(text, root)


def _norms(e: Evidence) -> Iterator[Hypothesis]:
    """Norms that count some leaf otherwise."""
    if e.kind != "norm" or e.gradients is None:
        return
    yield Hypothesis(
        "the reference's square: likely no root was taken", lambda row: row.expected.square()
    )
    squares = {leaf: x.abs().square().sum() for leaf, x in e.gradients.items()}
    for times, text in ((-1, "leaves out"), (1, "counts twice")):
        for leaf, square in squares.items():
            yield Hypothesis(
                f"a norm that {text} {leaf}", partial(_root_of_sum, times=times, square=square)
            )
    flat = [square for leaf, square in squares.items() if e.gradients[leaf].dim() < 2]
    if flat and len(flat) < len(squares):
        for what, n in e.sizes.items():
            text = (
                f"a norm that counts leaves of less than two dims {n} times, the number of {what}"
            )
            square = torch.stack(flat).sum()
            yield Hypothesis(text, partial(_root_of_sum, times=n - 1, square=square))


def _root_of_sum(row: Wrong, times: int, square: Tensor) -> Tensor:
    return (row.expected.square() + times * square).clamp(min=0).sqrt()


def _shares(e: Evidence) -> Iterator[Hypothesis]:
    """Values that come of some ranks' rows, or of all of them weighted otherwise."""
    if e.shares is None:
        return
    shares = e.shares()
    if len(e.ranks) == len(e.share_of):  # not of losses, whose mean is compared
        yield Hypothesis(
            "what each rank's own rows give: not reduced",
            lambda row: shares[e.share_of[row.rank]].get(row.leaf),
        )
    for part, values in enumerate(shares):
        rest = ", ".join(str(n) for n in range(len(shares)) if n != part)
        yield Hypothesis(
            f"what part {part} of the rows gives alone: those of part {rest} don't count",
            partial(_of_leaf, values),
        )

    def mean(row: Wrong) -> Tensor | None:
        found = [values[row.leaf] for values in shares if row.leaf in values]
        return torch.stack(found).mean(0) if len(found) == len(shares) else None

    yield Hypothesis(_MEANS.get(e.kind, _UNWEIGHTED), mean)


def _of_leaf(values: Values, row: Wrong) -> Tensor | None:
    return values.get(row.leaf)


_UNWEIGHTED = (
    "the plain mean over the ranks' parts, each by itself: likely weights, numbers of rows or "
    "tokens, are left out; or dropout or BatchNorm see a part by itself"
)
_MEANS = {
    "norm": "the mean of the norms of the ranks' own gradients: not reduced before",
    "updates": "the mean of updates, each of a rank's own rows: likely reduced after the "
    "optimizer, or without the rows' weights",
}


class _Fit(NamedTuple):
    """Tensors times factors that come closest to what ranks have."""

    factors: list[float]
    predicted: Callable[[Wrong], Tensor]


def _added(e: Evidence, term: Callable[[Wrong], Tensor | None]) -> _Fit | None:
    """The multiple of a tensor that the reference's values lack, of which nothing else is said."""
    beside = replace(e, wrong=[row._replace(got=row.got - row.expected) for row in e.wrong])
    fit = _fitted(beside, term)
    if fit is None:
        return None
    return _Fit(fit.factors, lambda row: row.expected + fit.predicted(row))


def _fitted(e: Evidence, *terms: Callable[[Wrong], Tensor | None]) -> _Fit | None:
    """None: a term isn't known, or there are too few elements to tell."""
    rows, wanted, enough = [], [], False
    for row in e.wrong:
        values = [term(row) for term in terms]
        if row.got.is_complex() or any(x is None or x.shape != row.got.shape for x in values):
            return None
        rows.append(torch.stack([x[row.bad] for x in values if x is not None], dim=1))
        wanted.append(row.got[row.bad])
        enough |= len(wanted[-1]) >= 2 * len(terms)
    matrix, right = torch.cat(rows), torch.cat(wanted)
    if not enough or not bool(matrix.isfinite().all() & right.isfinite().all()):
        return None
    # gelsd: terms may depend on each other
    factors = torch.linalg.lstsq(matrix, right[:, None], driver="gelsd").solution[:, 0].tolist()

    def predicted(row: Wrong) -> Tensor:
        pairs = zip(factors, terms, strict=True)
        return torch.stack([factor * term(row) for factor, term in pairs]).sum(0)

    return _Fit(factors, predicted)


def _of_weight_decay(e: Evidence) -> Iterator[Hypothesis]:
    """Updates that are right but for a multiple of the params."""
    params = e.params or {}
    if e.kind != "updates":
        return
    fit = _added(e, lambda row: params.get(row.leaf))
    if fit is not None:
        text = f"the reference's and {fit.factors[0]:+.3g} times the params: likely by weight decay"
        yield Hypothesis(text, fit.predicted)


def _of_lost_state(e: Evidence) -> Iterator[Hypothesis]:
    """Values of a later step that lack what the steps before have left."""
    earlier, gradients, params = e.earlier or {}, e.gradients or {}, e.params or {}
    if e.earlier is None:
        return
    if e.kind != "updates":  # running means
        fit = _added(e, lambda row: earlier.get(row.leaf))
        if fit is not None:
            text = f"the reference's and {fit.factors[0]:+.3g} times that of the step before"
            yield Hypothesis(f"{text}: likely what went before was lost", fit.predicted)
        return
    for what, function in (("", torch.clone), ("the sign of ", torch.sign)):

        def gradient(row: Wrong, function: Callable[[Tensor], Tensor] = function) -> Tensor | None:
            return function(gradients[row.leaf]) if row.leaf in gradients else None

        fit = _fitted(e, gradient, lambda row: params.get(row.leaf))
        if fit is not None:
            text = f"made of {what}this step's gradient alone: likely the optimizer's state is lost"
            # Adam divides by a gradient's size and eps
            yield Hypothesis(text, fit.predicted, close=0.05 if what else _CLOSE)


def _in_another_order(e: Evidence) -> Iterator[Hypothesis]:
    def moved(row: Wrong) -> Tensor | None:
        if row.got.is_complex() or row.got.numel() < 2:
            return None
        ours, theirs = (x.flatten() for x in (row.expected, row.got))
        if _are_near(ours, theirs):  # each in its own place, and off by little
            return None
        return row.got if _are_near(ours.sort().values, theirs.sort().values) else None

    text = "the reference's in other places: likely pieces in another order, or a transposed leaf"
    yield Hypothesis(text, moved)


def _are_near(ours: Tensor, theirs: Tensor) -> bool:
    return bool(((ours - theirs).abs() <= _CLOSE * ours.abs()).all())


def _any_ratio(e: Evidence) -> Iterator[Hypothesis]:
    fit = _fitted(e, lambda row: row.expected)
    if fit is not None:
        ratio = fit.factors[0]
        number = f"{ratio:.6g}" if abs(ratio - 1) > _CLOSE else f"1{ratio - 1:+.3g}"
        text = f"{number} times the reference's, which is no number that is known here"
        yield Hypothesis(text, fit.predicted)


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
