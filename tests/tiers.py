"""Three tiers of tests: quick, which plain `pytest` runs, `pytest -m thorough` and
`pytest -m full`.

Each is a set of its own. A test or a parameter without a mark is quick.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings

THOROUGH, FULL = pytest.mark.thorough, pytest.mark.full
FULL_RUNS = 10  # of one drawn test: each ends within the time limit, and they run side by side

Test = Callable[..., None]


def tiers(
    quick: Iterable[Any] = (),
    thorough: Iterable[Any] = (),
    full: Iterable[Any] = (),
    *,
    rows: bool = False,
) -> list[Any]:
    """Values for `parametrize`, each in its tier; with `rows`, tuples of values for several
    names."""

    def marked(values: Iterable[Any], mark: pytest.MarkDecorator) -> list[Any]:
        return [pytest.param(*(value if rows else (value,)), marks=mark) for value in values]

    return [*quick, *marked(thorough, THOROUGH), *marked(full, FULL)]


def thinned(values: Iterable[Any], n: int = 8, *, rows: bool = False) -> list[Any]:
    """Values for `parametrize`, or `rows`: every n-th is quick, the others are thorough."""
    values = [*values]
    return tiers(values[::n], [value for i, value in enumerate(values) if i % n], rows=rows)


def crossed(*axes: Iterable[Any], n: int = 3, quick: int | None = None) -> list[Any]:
    """Rows for `parametrize`: all combinations of the axes' values.

    Rows along the diagonal have each value of each axis. Where the rows whose sum of places is a
    multiple of n (of 6 where an axis is longer than that) are fewer, those are taken instead, and
    may lack some values. Every second of them is quick, from the last, which is level 3 in most
    tables, up to `quick` of them. The others of these are thorough, and of the remaining rows those
    at an odd sum of places, as on a chessboard; the rest are full. Of three axes or more, one in as
    many rows as the shortest has values is thorough, by the sum of places: together they have each
    pair of values of two axes.
    """
    lists = [[*axis] for axis in axes]
    places = [*itertools.product(*(range(len(values)) for values in lists))]
    steps = range(max(map(len, lists)))
    diagonal = {tuple(k % len(values) for values in lists) for k in steps}
    n = n if len(steps) <= 6 else max(n, 6)
    few = min(diagonal, {at for at in places if sum(at) % n == 0}, key=len)
    chosen = sorted(few)[::-2][:quick]

    def rows(those: Iterable[tuple[int, ...]]) -> list[tuple[Any, ...]]:
        return [tuple(values[i] for values, i in zip(lists, at, strict=True)) for at in those]

    every = 2 if len(lists) < 3 else max(2, min(map(len, lists)))
    others = [at for at in places if at not in chosen]
    thorough = [at for at in others if at in few or sum(at) % every == 1]
    full = [at for at in others if at not in thorough]
    return tiers(rows(sorted(chosen)), rows(thorough), rows(full), rows=True)


def drawn(
    *strategies: Any, quick: int = 2, thorough: int = 16, full: int = 500, **named: Any
) -> Callable[[Test], Test]:
    """Hypothesis's `given`, with a number of examples per tier.

    The quick and the thorough tier draw the same examples every time, the full tier new ones.
    """
    runs = [
        pytest.param(full // FULL_RUNS, True, marks=FULL, id=f"full-{k}") for k in range(FULL_RUNS)
    ]
    runs.append(pytest.param(thorough, False, marks=THOROUGH, id="thorough"))
    runs.append(pytest.param(quick, False, id="quick"))

    def decorate(test: Test) -> Test:
        @pytest.mark.parametrize(("num_examples", "new"), runs)
        def run(num_examples: int, new: bool, **others: Any) -> None:
            chosen = settings(max_examples=num_examples, derandomize=not new, print_blob=new)
            chosen(given(*strategies, **named)(test))(**others)

        own = inspect.signature(run).parameters
        kept = [p for p in inspect.signature(test).parameters.values() if p.name not in named]
        others = kept[: len(kept) - len(strategies)]  # parameters of other marks, and fixtures
        run.__signature__ = inspect.Signature([*others, own["num_examples"], own["new"]])  # type: ignore[attr-defined]
        run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
        return run

    return decorate
