"""Everything that a module leads to: by attributes, containers, objects, functions and weak
references.

Classes' own attributes and methods count, and so do globals that a function names. Not looked into:
tensors, Python modules, objects without `__dict__` or `__slots__`, iterators.
"""

from __future__ import annotations

import copy
import dis
import functools
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType, ModuleType, NoneType
from typing import Any, NamedTuple

import torch
from torch import nn

from .._torch_private import registered
from ..introspection import is_filled, slot_values

DEPTH = 6  # of containers, objects and functions in one another, from a module's attribute on
_PLAIN = (type, ModuleType, torch.Tensor, str, bytes, int, float, complex, NoneType)
# An RNN's own list of its weights: it makes both anew in a call that finds other weights
_OF_RNNS = frozenset({"_flat_weights", "_flat_weight_refs"})


class Reference(NamedTuple):
    """One of the references that lead away from a module."""

    path: str  # of the module and its attribute: "layers.1._forward_hooks"
    way: str  # from there on, by names: "0 -> hook: model"; "" is the attribute itself
    held: Any  # the dict or list that has the value; None: a value can't be replaced there
    key: Any  # of the value in `held`
    value: Any


class _Held(NamedTuple):
    """One thing that another refers to."""

    name: str
    value: Any
    held: Any = None
    key: Any = None


def references(model: nn.Module) -> Iterator[Reference]:
    """All references that a model leads to, the nearest first, apart from the modules, params and
    buffers that it has registered."""
    seen: set[int] = set()  # everything that is looked into once
    for module in model.modules():
        seen.add(id(module))
        seen.update(map(id, registered(module)))
    waiting: deque[tuple[str, tuple[str, ...], Any]] = deque()
    for path, module in model.named_modules():
        for name in (*_attributes(vars(module)), *_of_class(type(module))):
            if isinstance(module, nn.RNNBase) and name.name in _OF_RNNS:
                continue
            attribute = f"{path}.{name.name}".lstrip(".")
            yield Reference(attribute, "", name.held, name.key, name.value)
            waiting.append((attribute, (), name.value))
    while waiting:
        path, names, value = waiting.popleft()
        if _is_plain(value) or id(value) in seen or len(names) == DEPTH:
            continue
        seen.add(id(value))
        for name in _inside(value):
            way = (*names, name.name)
            yield Reference(path, " -> ".join(way), name.held, name.key, name.value)
            waiting.append((path, way, name.value))


def unshared_copy(value: Any) -> Any:
    """A deep copy of containers and objects, with the same tensors, modules and functions in it;
    the value itself where an object can't be copied."""
    if _is_plain(value) or isinstance(value, nn.Module):
        return value
    memo: dict[int, Any] = {}
    waiting, seen = [value], {id(value): value}
    while waiting:
        for _, inside, *_ in _inside(waiting.pop()):
            if isinstance(inside, torch.Tensor | nn.Module):
                memo[id(inside)] = inside
            elif not _is_plain(inside) and id(inside) not in seen:
                seen[id(inside)] = inside
                waiting.append(inside)
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # whatever an object's own copying raises: a lock's, say
        return value


def _is_plain(value: Any) -> bool:
    """Whether nothing is looked for inside; a model's `apply` has a copy of its own."""
    kind = type(value)
    return issubclass(kind, _PLAIN) or kind.__module__.startswith("functorch_zero.")


def _inside(value: Any) -> Iterator[_Held]:
    """The things that a function, container or object refers to."""
    # The first question is of the type: a weak proxy is an instance of the class it stands for
    if issubclass(type(value), (*weakref.ProxyTypes, weakref.ref)):
        yield _Held("weakref", behind(value))
    elif isinstance(value, FunctionType):
        yield from _in_function(value)
    elif isinstance(value, MethodType):
        # Any callable may be bound by hand, also one without a name
        yield _Held(getattr(value.__func__, "__qualname__", "method"), value.__self__)
        yield from _inside(value.__func__)
    elif isinstance(value, functools.partial):
        for part in (value.func, value.args, value.keywords):
            yield _Held("partial", part)
    else:
        yield from _in_container(value)
        yield from _attributes(getattr(value, "__dict__", None))
        yield from _in_slots(value)


def _in_container(value: Any) -> Iterator[_Held]:
    """The values of a dict or sequence, and tensors that are keys."""
    if isinstance(value, Mapping):
        held = value if isinstance(value, dict) else None
        for key, inside in list(value.items()):
            name = "key" if isinstance(key, torch.Tensor) else str(key)
            yield _Held(name, inside, held, key)
            if isinstance(key, torch.Tensor):
                yield _Held(name, key)
    elif isinstance(value, list | deque):
        for i, inside in enumerate(value):
            yield _Held(str(i), inside, value, i)
    elif isinstance(value, tuple | set | frozenset):
        for i, inside in enumerate(value):
            yield _Held(str(i), inside)


def _attributes(held: Any) -> Iterator[_Held]:
    """An object's attributes, given its `__dict__`."""
    if isinstance(held, dict):
        for name, value in list(held.items()):
            yield _Held(str(name), value, held, name)


def _in_slots(value: Any) -> Iterator[_Held]:
    """An object's attributes that its classes have slots for."""
    for name, inside in slot_values(value).items():
        yield _Held(name, inside)


def _of_class(kind: type) -> Iterator[_Held]:
    """The attributes that a user's class of modules has itself: values, and methods other than
    `__init__`, which has run."""
    for base in kind.__mro__:
        if base is nn.Module:
            return
        if base.__module__.partition(".")[0] == "torch":
            continue
        for name, value in vars(base).items():
            held = isinstance(value, FunctionType | torch.Tensor | list | tuple | dict)
            if held and name != "__init__":
                yield _Held(name, value)


def _in_function(function: FunctionType) -> Iterator[_Held]:
    """The things that a function is closed over, has as defaults, or names among its globals."""
    name = function.__qualname__
    for variable, cell in zip(
        function.__code__.co_freevars, function.__closure__ or (), strict=True
    ):
        if is_filled(cell):
            yield _Held(f"{name}: {variable}", cell.cell_contents)
    for default in function.__defaults__ or ():
        yield _Held(name, default)
    for variable, default in (function.__kwdefaults__ or {}).items():
        yield _Held(f"{name}: {variable}", default)
    for variable in _globals_of(function):
        yield _Held(f"{name}: {variable}", function.__globals__[variable])


def _globals_of(function: FunctionType) -> list[str]:
    """The globals with modules or tensors that a function reads."""
    known = function.__globals__
    names = {
        name
        for name in function.__code__.co_names
        if isinstance(known.get(name), nn.Module | torch.Tensor)
    }
    if not names:  # most have none; reading the code takes longer
        return []
    read = {
        instruction.argval
        for instruction in dis.get_instructions(function.__code__)
        if instruction.opname == "LOAD_GLOBAL"  # an attribute may have the same name
    }
    return sorted(names & read)


def behind(reference: Any) -> Any:
    """The object that a weak reference or proxy stands for; None: it is gone."""
    if isinstance(reference, weakref.ref):
        return reference()
    try:
        return reference.__str__.__self__  # a method is bound to the object itself
    except ReferenceError:
        return None
