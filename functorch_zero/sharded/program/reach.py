"""The tensors that a loss can reach beside its arguments: in variables that it closes over, in
defaults, partials, globals, and attributes that it names."""

from __future__ import annotations

import inspect
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from ... import errors
from ...params import is_on_engine

PACKAGE = os.path.dirname(errors.__file__) + os.sep
_LIBRARIES = tuple(os.path.dirname(module.__file__ or "") + os.sep for module in (torch, optree))
# Objects looked at: a loss may close over a data set
_MOST = 10_000
_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, ModuleType)
_CONTAINERS = (list, tuple, set, frozenset)


class _Found(NamedTuple):
    """An object that a loss can reach."""

    label: str  # for errors
    value: Any
    # Those that the code names which reaches it; its other attributes aren't read. None: all are
    names: frozenset[str] | None


def reachable_tensors(loss: Callable[..., Any], given: Mapping[str, Any]) -> Iterator[_Found]:
    """The tensors that a loss can reach, the nearest first. Sharded trees are left out: what they
    hold is refused where a loss reads it.

    Args:
        given: its arguments, by their labels.
    """
    waiting = deque(_Found(label, value, None) for label, value in given.items())
    waiting.append(_Found("loss", loss, frozenset({"__call__"})))
    seen: dict[int, _Found] = {}  # by id, which the value keeps alive, with all names so far
    while waiting and len(seen) < _MOST:
        found = waiting.popleft()
        if isinstance(found.value, _PLAIN) or is_on_engine(found.value):
            continue
        before = seen.get(id(found.value))
        if before is not None:
            names = _both(before.names, found.names)
            # Another function may read other attributes of an object
            if names == before.names:
                continue
            found = found._replace(names=names)
        seen[id(found.value)] = found
        if isinstance(found.value, Tensor):
            yield found
        else:
            waiting += _parts(found)


def _both(names: frozenset[str] | None, others: frozenset[str] | None) -> frozenset[str] | None:
    """The names of either; None stands for all."""
    return None if names is None or others is None else names | others


def _parts(found: _Found) -> Iterator[_Found]:
    """The objects that are one step away."""
    label, value, names = found
    if isinstance(value, FunctionType):
        yield from _parts_of_function(value)
    elif isinstance(value, MethodType):
        names = _names_in(getattr(value.__func__, "__code__", None))
        yield _Found(label, value.__func__, names)
        yield _Found("self", value.__self__, names)
    elif isinstance(value, partial):
        yield _Found(label, value.func, names)
        yield _Found("partial's arguments", value.args, names)
        yield _Found("partial's arguments", value.keywords, names)
    elif isinstance(value, dict):
        for key, part in value.items():
            yield _Found(f"{label}[{key!r}]", part, names)
    elif isinstance(value, _CONTAINERS):
        for n, part in enumerate(value):
            yield _Found(f"{label}[{n}]", part, names)
    else:
        yield from _parts_of_object(found)


def _parts_of_function(function: FunctionType) -> Iterator[_Found]:
    code = function.__code__
    names = _names_in(code)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield _Found(name, cell.cell_contents, names)
        except ValueError:  # not filled yet
            continue
    yield _Found("defaults", function.__defaults__, names)
    yield _Found("defaults", function.__kwdefaults__, names)
    # Those of libraries hold nothing of the user's, and lead to everywhere
    if code.co_filename.startswith((*_LIBRARIES, PACKAGE)):
        return
    for name in sorted(names & function.__globals__.keys()):
        yield _Found(name, function.__globals__[name], names)


def _parts_of_object(found: _Found) -> Iterator[_Found]:
    """The attributes that code names, and those that methods name which it may call."""
    label, value, names = found
    own = getattr(value, "__dict__", {})
    if names is None:
        for name, part in own.items():
            yield _Found(f"{label}.{name}", part, None)
        return
    waiting, closed = {*names}, set[str]()
    while waiting:
        name = waiting.pop()
        closed.add(name)
        method = _method_of(type(value), name)
        if method is not None:
            yield _Found(label, method, names)
            waiting |= _names_in(method.__code__) - closed
    for name in sorted(closed & own.keys()):
        yield _Found(f"{label}.{name}", own[name], frozenset(closed))


def _method_of(kind: type, name: str) -> FunctionType | None:
    """The function behind a method or a property; None: there is none in Python."""
    found = inspect.getattr_static(kind, name, None)
    if isinstance(found, property):
        found = found.fget
    return found if isinstance(found, FunctionType) else None


def _names_in(code: CodeType | None) -> frozenset[str]:
    """The globals and attributes that a function's code names, with the functions inside of it."""
    if code is None:
        return frozenset()
    names = frozenset(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
    return names
