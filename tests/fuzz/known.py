"""Known defects: drawn cases go without them, and `test_fuzz.py` says when one is mended."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import fields, replace
from typing import Any, NamedTuple

from tests.fuzz.cases import Case


class Known(NamedTuple):
    """A defect.

    Attributes:
        case: the plainest case that shows it.
        when: the values of fields that may show it, where all of them match; drawn cases get
            another value of the first field.
    """

    case: Case
    when: Mapping[str, Set[Any]]


KNOWN: dict[str, Known] = {}


def shows(case: Case, known: Known) -> bool:
    """Whether a case has what shows a defect."""
    return all(_matching(case, name, values) for name, values in known.when.items())


def without_known(case: Case) -> Case:
    """The case with what shows known defects made plain."""
    for known in KNOWN.values():
        if shows(case, known):
            name = next(iter(known.when))
            case = replace(case, **{name: _plain(case, name, known.when[name])})
    return case


def _matching(case: Case, name: str, values: Set[Any]) -> bool:
    value = getattr(case, name)
    return bool(values & {*value}) if isinstance(value, tuple) else value in values


def _plain(case: Case, name: str, values: Set[Any]) -> Any:
    value = getattr(case, name)
    if isinstance(value, tuple):
        return tuple("plain" if one in values else one for one in value)
    return next(field.default for field in fields(case) if field.name == name)
