"""The values that Python's objects and functions hold out of sight."""

from __future__ import annotations

from types import CellType
from typing import Any


def slot_values(thing: Any) -> dict[str, Any]:
    """An object's attributes that its classes have slots for, by the names that getattr takes."""
    found: dict[str, Any] = {}
    for cls in type(thing).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            # Python adds the class to a private name: __x of class A is _A__x
            private = name.startswith("__") and not name.endswith("__")
            attribute = f"_{cls.__name__.lstrip('_')}{name}" if private else name
            if name not in ("__dict__", "__weakref__") and hasattr(thing, attribute):
                found[attribute] = getattr(thing, attribute)
    return found


def is_filled(cell: CellType) -> bool:
    """Whether a closed-over variable has a value yet; Python has no other question for it."""
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
