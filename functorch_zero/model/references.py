"""Everything that a module leads to, as Python's garbage collector sees it, and behind weak
references.

Attributes and methods of users' classes count, and so do globals that a function names. Not looked
into: tensors, other classes, Python modules, and what a cached function remembers.
"""

from __future__ import annotations

import copy
import dis
import functools
import gc
import weakref
from collections import deque
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from .._torch_private import registered
from ..tree import dotted

_CLOSED = (type, ModuleType, torch.Tensor, type(functools.cache(len)))
_WEAK = (*weakref.ProxyTypes, weakref.ref)
# An RNN's own list of its weights: it makes both anew in a call that finds other weights
_OF_RNNS = frozenset({"_flat_weights", "_flat_weight_refs"})


class Reference(NamedTuple):
    """One of the references that lead away from a module."""

    path: str  # of the module and its attribute: "layers.1._forward_hooks"
    way: tuple[Any, ...]  # the objects from there on; (): the attribute itself has the value
    container: Any  # the dict or list that has the value; None: a value can't be replaced there
    key: Any  # of the value in it
    value: Any


def references(model: nn.Module) -> Iterator[Reference]:
    """All references that a model leads to, the nearest first, apart from the modules, params and
    buffers that it has registered."""
    seen: set[int] = set()  # everything that is looked into once
    for module in model.modules():
        seen.add(id(module))
        seen.update(map(id, registered(module)))
    waiting = deque(_of_modules(model))
    while waiting:
        reference = waiting.popleft()
        yield reference
        value = reference.value
        # What isn't tracked refers to nothing: numbers and texts, of which a module may hold many
        if id(value) not in seen and gc.is_tracked(value) and not _is_closed(value):
            seen.add(id(value))
            way = (*reference.way, value)
            waiting += (Reference(reference.path, way, *found) for found in _inside(value))


def unshared_copy(value: Any) -> Any:
    """A deep copy of containers and objects, with the same tensors, modules and functions in it;
    the value itself where an object can't be copied."""
    if _is_closed(value) or isinstance(value, nn.Module):
        return value
    memo: dict[int, Any] = {}
    waiting, seen = [value], {id(value)}
    while waiting:
        for _, _, inside in _inside(waiting.pop()):
            if isinstance(inside, torch.Tensor | nn.Module):
                memo[id(inside)] = inside
            elif not _is_closed(inside) and id(inside) not in seen:
                seen.add(id(inside))
                waiting.append(inside)
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # whatever an object's own copying raises: a lock's, say
        return value


def behind(reference: Any) -> Any:
    """The object that a weak reference or proxy stands for; None: it is gone."""
    if isinstance(reference, weakref.ref):
        return reference()
    try:
        return reference.__str__.__self__  # a method is bound to the object itself
    except ReferenceError:
        return None


def _of_modules(model: nn.Module) -> Iterator[Reference]:
    """The attributes of all modules, and of their users' classes: values, and methods other than
    `__init__`, which has run."""
    for path, module in model.named_modules():
        own = vars(module)
        for name, value in own.items():
            if not (isinstance(module, nn.RNNBase) and name in _OF_RNNS):
                yield Reference(dotted(path, name), (), own, name, value)
        for base in type(module).__mro__:
            if base is nn.Module:
                break
            if base.__module__.partition(".")[0] == "torch":
                continue
            for name, value in vars(base).items():
                if name != "__init__":
                    yield Reference(dotted(path, name), (), None, name, value)


def _is_closed(value: Any) -> bool:
    """Whether nothing is looked for inside; a model's `apply` has a copy of its own."""
    kind = type(value)
    return issubclass(kind, _CLOSED) or kind.__module__.startswith("functorch_zero.")


def _inside(value: Any) -> Iterator[tuple[Any, Any, Any]]:
    """The things that a function, container or object refers to, as in a `Reference`: the dict or
    list, the key, the thing."""
    # The first question is of the type: a weak proxy is an instance of the class it stands for
    kind = type(value)
    if issubclass(kind, _WEAK):
        yield None, None, behind(value)
        return
    if issubclass(kind, FunctionType):
        fields = (value.__closure__, value.__defaults__, value.__kwdefaults__, vars(value))
        for inside in (*fields, *_globals_of(value)):
            yield None, None, inside
        return
    entries: list[tuple[Any, Any]] = []
    if issubclass(kind, dict):
        entries = [*value.items()]
    elif issubclass(kind, list | deque):
        entries = [*enumerate(value)]
    for key, inside in entries:
        yield value, key, inside
    own = getattr(value, "__dict__", None)
    if own and isinstance(own, dict):
        yield None, None, own
        entries += own.items()
    # An object's attributes may be its own referents, too
    replaceable = {id(inside) for _, inside in entries}
    for inside in gc.get_referents(value):
        if id(inside) not in replaceable:
            yield None, None, inside


def _globals_of(function: FunctionType) -> list[Any]:
    """The modules and tensors among the globals that a function reads."""
    known, code = function.__globals__, function.__code__
    names = [n for n in code.co_names if isinstance(known.get(n), nn.Module | torch.Tensor)]
    if not names:  # most have none; reading the code takes longer
        return []
    read = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname == "LOAD_GLOBAL"  # an attribute may have the same name
    }
    return [known[name] for name in names if name in read]
