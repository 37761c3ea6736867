"""The values that Python's objects and functions hold out of sight, and their names."""

from __future__ import annotations

from collections.abc import Iterator
from types import CellType
from typing import Any

from .errors import users_frames

_MOST = 1000  # objects of a frame that are looked at


def name_in_callers(thing: Any) -> str | None:
    """The name by which the user's code knows an object: "teacher", "value.teacher". The innermost
    function's comes first. None: no variable leads to it. For errors, since it takes long."""
    for frame, _ in users_frames():
        used = {n: frame.f_globals[n] for n in frame.f_code.co_names if n in frame.f_globals}
        for name, value in _named({**frame.f_locals, **used}):
            if value is thing:
                return name
    return None


def _named(variables: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The variables' values, then what lies in them, one and two steps deep, the nearest first."""
    level, seen = list(variables.items()), 0
    for _ in range(3):
        yield from level
        seen += len(level)
        if seen > _MOST:
            return
        level = [part for name, value in level for part in _parts(name, value)]


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The named parts of an object. Trees that know how they are cut are not read."""
    if isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for field, part in zip(value._fields, value, strict=True):
            yield f"{name}.{field}", part
    elif isinstance(value, list | tuple):
        yield from ((f"{name}[{n}]", part) for n, part in enumerate(value))
    elif hasattr(type(value), "__dict__") and not isinstance(value, type):
        # Of dataclasses and other objects; `__dict__` itself, since attributes may be computed
        try:
            own = object.__getattribute__(value, "__dict__")
        except AttributeError:
            return
        yield from ((f"{name}.{key}", part) for key, part in [*own.items()] if key[:1] != "_")


def slot_values(thing: Any) -> dict[str, Any]:
    """An object's attributes that its classes have slots for, by the names that getattr takes."""
    # As copy and pickle take an object apart: its __dict__, or a pair of that and these
    state = object.__getstate__(thing)
    return state[1] if isinstance(state, tuple) else {}


def is_filled(cell: CellType) -> bool:
    """Whether a closed-over variable has a value yet; Python has no other question for it."""
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
