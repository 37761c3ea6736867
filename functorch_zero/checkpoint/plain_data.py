"""Plain data as strict JSON, and back to the bit. JSON has neither infinities nor NaNs: those are
objects with the number's bits."""

from __future__ import annotations

import struct
from math import isfinite
from typing import Any

from ..errors import explain
from ..savable import fault_of

# The one key of such an object; its value is 16 hexadecimal digits, the sign first
BITS = "functorch_zero float64"


def encoded(data: Any, path: str) -> Any:
    """The data as JSON has them, in lists and dicts of their own.

    Args:
        data: numbers, strings and None, and lists and dicts of them.
        path: of the data, for errors.

    Raises:
        TypeError: they hold something else, which would come back changed. It is named.
    """
    kind = type(data)
    if kind is float and not isfinite(data):
        return {BITS: struct.pack(">d", data).hex()}
    if data is None or (kind in (bool, int, float, str) and fault_of(data) is None):
        return data
    if kind is list:
        return [encoded(x, f"{path}[{i}]") for i, x in enumerate(data)]
    if kind is dict and all(type(key) is str and key != BITS for key in data):
        return {key: encoded(x, f"{path}[{key!r}]") for key, x in data.items()}
    raise TypeError(
        explain(
            "user must be plain JSON data, which comes back as it was",
            path=path,
            expected="None, a bool, int, float or str, or lists and dicts of them by strings",
            got=f"a {kind.__name__}" + (f" with keys {list(data)[:5]}" if kind is dict else ""),
            remedy="pass lists instead of tuples, strings as keys, x.tolist() of a tensor or "
            "an array, x.item() of a number of numpy",
        )
    )


def decoded(made: dict[str, Any]) -> Any:
    """The number that an object of JSON stands for; any other object is itself.

    Raises:
        ValueError: it stands for none.
    """
    if made.keys() != {BITS}:
        return made
    try:
        (number,) = struct.unpack(">d", bytes.fromhex(made[BITS]))
    except (TypeError, struct.error):
        raise ValueError("no bits of a float64") from None
    return number
