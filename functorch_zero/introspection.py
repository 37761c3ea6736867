"""The values that Python's objects and functions hold out of sight, and their names."""

from __future__ import annotations

from collections.abc import Iterable
from types import CellType
from typing import Any

from .errors import users_frames


def name_in_callers(thing: Any) -> str | None:
    """The name by which the user's code knows an object: "teacher", "value.teacher". The innermost
    function's comes first. None: no variable leads to it. For errors, since it takes long."""
    for frame, _ in users_frames():
        used = {n: frame.f_globals[n] for n in frame.f_code.co_names if n in frame.f_globals}
        variables = {**frame.f_locals, **used}
        inside = {f"{n}.{key}": x for n, value in variables.items() for key, x in _inside(value)}
        for name, value in (variables | inside).items():
            if value is thing:
                return name
    return None


def _inside(value: Any) -> Iterable[tuple[Any, Any]]:
    """What an object holds, by name. Trees that know how they are cut are not read."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return zip(value._fields, value, strict=True)
    if isinstance(value, list | tuple):
        return enumerate(value)
    # Of an object, `__dict__` itself, since attributes may be computed
    own = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    return [*own.items()] if isinstance(own, dict) else ()


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
