"""Pages of the API that list a module's public functions by themselves."""

from __future__ import annotations

import re
import sys
from importlib import import_module

# `.. public:: MODULE FOLDER`: those of the module that are defined in the folder
_LINE = re.compile(r"^\.\. public:: ([\w.]+) ([\w.]+)$", re.MULTILINE)


def with_public_names(page: str) -> str:
    """The page with a line for each of a module's public functions, in the order of `__all__`."""
    return _LINE.sub(lambda line: "\n".join(_entries(*line.groups())), page)


def _entries(module: str, folder: str) -> list[str]:
    entries = []
    for name in import_module(module).__all__:
        own = getattr(getattr(sys.modules[module], name), "__module__", "")
        if own.startswith(folder):
            # A module of the same name would be found in its place
            is_hidden = f"{module}.{name}" in sys.modules
            entries.append(f".. autofunction:: {own if is_hidden else module}.{name}")
    return entries
