"""Whether something outside a skeleton may still run its modules. See Note [captured skeletons]."""

from __future__ import annotations

import sys
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from ..introspection import is_filled


class Idle:
    """The references to a skeleton's modules, and to their functions: whoever keeps one of them
    may run the module later."""

    def __init__(self, root: nn.Module):
        self._held = [*root.modules(), *_functions_of(root)]
        self._refs: list[int] = []  # references to each while nothing runs

    def note(self) -> None:
        """Count the references. Call it while nothing runs, and no frame refers to the root."""
        self._refs = self._count()

    def is_free(self) -> bool:
        """Whether nothing but the skeleton refers to its modules and their functions."""
        return self._count() == self._refs

    def _count(self) -> list[int]:
        return list(map(sys.getrefcount, self._held))


def _functions_of(model: nn.Module) -> list[Any]:
    """The functions and bound methods that modules hold as attributes, and those that these are
    closed over. Hooks are not among them: only their own module runs those."""
    found: dict[int, Any] = {}  # by id
    waiting: list[Any] = []
    for module in model.modules():
        waiting += vars(module).values()
    while waiting:
        value = waiting.pop()
        if isinstance(value, FunctionType | MethodType) and id(value) not in found:
            found[id(value)] = value
            # A bound method has the closure and the defaults of its function
            for cell in getattr(value, "__closure__", None) or ():
                if is_filled(cell):
                    waiting.append(cell.cell_contents)
            # A callable that is bound by hand may have neither, as a partial
            waiting += getattr(value, "__defaults__", None) or ()
            waiting += (getattr(value, "__kwdefaults__", None) or {}).values()
    return list(found.values())
