"""What ranks must agree on before the first step, compared as plain data."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from .errors import MismatchError
from .groups.protocol import Group


def agree(group: Group, facts: dict[str, Any]) -> None:
    """Raise `MismatchError` on every rank, naming the first field that differs, unless all ranks give equal facts.

    Two small exchanges: digests of 32 bytes, and only when they differ the facts themselves, as JSON.
    """
    digests = group.exchange(hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest())
    if len(set(digests)) == 1:
        return
    everyone = [json.loads(data) for data in group.exchange(json.dumps(facts).encode())]  # in order: causes come first
    other = next(rank for rank, theirs in enumerate(everyone) if theirs != everyone[0])
    field, ours, theirs = first_difference(everyone[0], everyone[other])
    like_other = [rank for rank, facts in enumerate(everyone) if facts == everyone[other]]
    raise MismatchError(
        f"the ranks were given different things: {field} is {_short(ours)} on rank 0 and {_short(theirs)} on "
        f"{_ranks(like_other)} (this is rank {group.rank}). Remedy: {_remedy(field)}"
    )


def _remedy(field: str) -> str:
    if field.startswith("values"):
        return (
            "build the model from the same seed on every rank, or take one rank's values, fz.broadcast(params, group)"
        )
    return "build model, optimizer and options the same way on every rank"


def first_difference(a: Any, b: Any, field: str = "") -> tuple[str, Any, Any]:
    """The dotted name of the first field in which two pieces of plain data differ, and the two values."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in [*a, *(k for k in b if k not in a)]:
            if a.get(key, _Absent) != b.get(key, _Absent):
                return first_difference(a.get(key, _Absent), b.get(key, _Absent), f"{field}.{key}".lstrip("."))
    if isinstance(a, list) and isinstance(b, list):
        for i, (x, y) in enumerate(zip(a, b, strict=False)):
            if x != y:
                return first_difference(x, y, f"{field}[{i}]")
        if len(a) != len(b):
            return f"the length of {field}", len(a), len(b)
    return field, a, b


class _Absent:
    """Stands for a field that one side does not have."""


def _short(value: Any) -> str:
    if value is _Absent:
        return "absent"
    text = json.dumps(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _ranks(numbers: list[int]) -> str:
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))
