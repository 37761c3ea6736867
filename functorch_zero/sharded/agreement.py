"""`agree`: all ranks were given the same things: models, optimizers, options and values."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch

from ..errors import MismatchError
from ..groups.checks import ranks_text
from ..groups.protocol import Group
from ..tree import dotted
from ..version import __version__
from .readable import Absent, told_apart
from .words import exchange_data


def agree(group: Group, facts: dict[str, Any]) -> None:
    """Raise `MismatchError` on every rank, naming the first field that differs, unless all ranks
    give equal facts.

    One exchange of 32-byte digests. Only when they differ, a second one of the facts, as JSON.
    """
    # Keys are sorted, since equal dicts may differ in their order
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()
    if len(set(group.exchange(digest))) == 1:
        return
    # The keys in the order given: causes come before their effects
    everyone = exchange_data(group, facts)
    field, text = difference_in_words(everyone)
    raise MismatchError(
        f"the ranks were given different things: {text} (this is rank {group.rank}). Remedy: "
        f"{_remedy(field)}"
    )


def difference_in_words(everyone: Sequence[Any], field: str = "") -> tuple[str, str]:
    """Of all ranks' facts, which are not equal, the first field that differs, and how. `field`: of
    the facts."""
    # Two of the facts are enough to name: rank 0's, and the first that differ
    other = next(theirs for theirs in everyone if theirs != everyone[0])
    like_other = [rank for rank, theirs in enumerate(everyone) if theirs == other]
    field, *values = first_difference(everyone[0], other, field)
    ours, theirs = told_apart(*values)
    return field, f"{field} is {ours} on rank 0 and {theirs} on {ranks_text(like_other)}"


def releases_and_ranks(group: Group) -> dict[str, Any]:
    """The facts that come before all others: a difference in one of them causes others."""
    return {
        "functorch_zero": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "ranks": group.size,
    }


def _remedy(field: str) -> str:
    if field.startswith("values"):
        return (
            "build the model from the same seed on every rank, or take one rank's values, "
            "fz.broadcast(params, group)"
        )
    if field == "lr in param_groups":
        return "change it on every rank alike; give a scheduler the mean of the ranks' losses"
    return "build model, optimizer and options the same way on every rank"


def first_difference(ours: Any, theirs: Any, field: str = "") -> tuple[str, Any, Any]:
    """The first field in which two pieces of plain data, which are not equal, differ: its name,
    dotted ("options.donate", "buffers[2]"), and its two values."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        if len(ours) == len(theirs) == 1 and ours.keys() != theirs.keys():
            # Two things by name, adamw and sgd say, rather than fields of one
            return field, ours, theirs
        for key in dict.fromkeys([*ours, *theirs]):
            a, b = ours.get(key, Absent), theirs.get(key, Absent)
            if a != b:
                return first_difference(a, b, dotted(field, key))
    # A shape is told whole
    if isinstance(ours, list) and isinstance(theirs, list) and not _are_numbers(ours + theirs):
        for i, (a, b) in enumerate(zip_longest(ours, theirs, fillvalue=Absent)):
            if a != b:
                return first_difference(a, b, f"{field}[{i}]")
    return field, ours, theirs


def _are_numbers(values: list[Any]) -> bool:
    return all(isinstance(value, int | float) for value in values)
