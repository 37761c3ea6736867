"""Copies of modules: without values, and with the functions that they hold."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Iterator, Mapping
from types import CellType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any

import torch
from torch import nn

from ..errors import StructureError, explain


def without_values(model: nn.Module) -> nn.Module:
    """A copy of the module whose parameters and buffers are on the meta device."""
    memo: dict[int, Any] = {}  # id of an original -> its copy, which deepcopy takes as done
    for p in model.parameters():
        # Shape, dtype and strides stay
        meta = torch.empty_like(p, device="meta")
        memo[id(p)] = nn.Parameter(meta, requires_grad=p.requires_grad)
    for b in model.buffers():
        memo[id(b)] = torch.empty_like(b, device="meta")
    return copy_module(model, memo)


def copy_module(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy in which the functions that a module holds, as its own `forward` or as hooks, are
    about the copy. `memo` is deepcopy's: the copies to use, by the id of the original.

    deepcopy leaves functions alone, so a closure over the model would go on using the model's own
    parameters. One that refers to the model plainly is made anew: over a module, a module's method,
    or a function that does so.

    Raises:
        StructureError: a function refers to the model in another way, through a list say.
    """
    copied = copy.deepcopy(model, memo)
    # The ids of everything that no copied function may lead to
    originals = {id(x) for x in (*model.modules(), *model.parameters(), *model.buffers())}
    for path, module in copied.named_modules():
        attributes = vars(module)
        _replace_functions(attributes, memo)
        for value in attributes.values():
            if isinstance(value, dict):  # of hooks, and of submodules
                _replace_functions(value, memo)
        # After all are replaced: what still leads to the original could not be made anew
        for name, value in attributes.items():
            _check_plain(value, originals, f"{path}.{name}".lstrip("."))
    return copied


def _replace_functions(held: dict[str, Any], memo: dict[int, Any]) -> None:
    """Put functions about the copy in the places of those about the original."""
    for name, value in held.items():
        if callable(value):
            held[name] = _about_copy(value, memo)


def _check_plain(value: Any, originals: set[int], path: str) -> None:
    """Raise `StructureError` if a module of the copy still leads to the model that was copied."""
    way = _way_to(value, originals, set(), _DEPTH)
    if way is not None:
        raise StructureError(
            explain(
                "a function that a module holds refers to the model indirectly, so that it would "
                "go on using the model's own parameters",
                path=path,
                expected="a closure over the module itself",
                got=way,
                remedy="close over the module, and look up there what you need when called; or "
                "make it a method",
            )
        )


_DEPTH = 6  # of containers, objects and functions in one another
_LEAVES = (type, ModuleType, nn.Module, torch.Tensor, str, bytes, int, float, complex, NoneType)


def _way_to(value: Any, originals: set[int], seen: set[int], depth: int) -> str | None:
    """The way from a value to one of the originals, by names: "hook: models -> 0"; None: no way."""
    if id(value) in originals:
        return ""
    # Modules of the copy are looked at one by one, by the caller
    if isinstance(value, _LEAVES) or id(value) in seen or depth == 0:
        return None
    seen.add(id(value))  # cycles end here
    for name, inside in _inside(value):
        way = _way_to(inside, originals, seen, depth - 1)
        if way is not None:
            return f"{name} -> {way}" if way else name
    return None


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """The things that a function, container or object refers to, by name."""
    if isinstance(value, FunctionType):
        # Closed-over variables, by their names in the code
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            if _is_filled(cell):
                yield f"{value.__qualname__}: {name}", cell.cell_contents
        for default in value.__defaults__ or ():
            yield value.__qualname__, default
        yield from (value.__kwdefaults__ or {}).items()
    elif isinstance(value, MethodType):
        yield value.__func__.__qualname__, value.__self__
        yield from _inside(value.__func__)
    elif isinstance(value, functools.partial):
        yield "partial", value.func
        yield "partial", value.args
        yield "partial", value.keywords
    elif isinstance(value, Mapping):
        for key, inside in value.items():
            yield str(key), inside
    elif isinstance(value, list | tuple | set | frozenset):
        for i, inside in enumerate(value):
            yield str(i), inside
    else:
        yield from getattr(value, "__dict__", {}).items()


def functions_of(model: nn.Module) -> list[Any]:
    """The functions and bound methods that modules hold, and those that these are closed over."""
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
                if _is_filled(cell):
                    waiting.append(cell.cell_contents)
            waiting += value.__defaults__ or ()
            waiting += (getattr(value, "__kwdefaults__", None) or {}).values()
    return list(found.values())


def _is_filled(cell: CellType) -> bool:
    """Whether a closed-over variable has a value yet; Python has no other question for it."""
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _about_copy(value: Any, memo: dict[int, Any]) -> Any:
    """The copy's counterpart of a thing that a module holds, or that a function is closed over or
    has as a default: the copied module for a module, its method for a method, a function about the
    copy for a function."""
    if isinstance(value, MethodType) and id(value.__self__) in memo:
        return MethodType(value.__func__, memo[id(value.__self__)])
    if isinstance(value, FunctionType) and id(value) not in memo:
        # Ends the recursion where a function is closed over itself. The copy's cell then holds the
        # original, which `_check_plain` refuses if it leads to the model.
        memo[id(value)] = value
        memo[id(value)] = _function_about_copy(value, memo)
    if isinstance(value, nn.Module | FunctionType):  # not in the memo: none of the model's
        return memo.get(id(value), value)
    return value


def _function_about_copy(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    """The function with its closure and defaults about the copy; itself if it doesn't refer to the
    original."""
    old_cells = function.__closure__ or ()
    old_defaults = function.__defaults__ or ()
    old_keywords = function.__kwdefaults__ or {}
    cells = tuple(_copied_cell(cell, memo) for cell in old_cells)
    defaults = tuple(_about_copy(default, memo) for default in old_defaults)
    keywords = {name: _about_copy(default, memo) for name, default in old_keywords.items()}

    # By identity: tensors and arrays don't compare to one bool
    old = [*old_cells, *old_defaults, *old_keywords.values()]
    new = [*cells, *defaults, *keywords.values()]
    if all(map(operator.is_, old, new)):
        return function
    # The same code over other cells: Python has no public way to rebind a closure
    made = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        defaults or None,
        cells or None,
    )
    made.__kwdefaults__ = keywords or None
    # Not by `update_wrapper`: its `__wrapped__` would keep the original function, and the model,
    # alive
    for name in functools.WRAPPER_ASSIGNMENTS:  # the name, the docstring and their like
        setattr(made, name, getattr(function, name))
    for attribute, value in vars(function).items():  # a decorator's `__wrapped__` among them
        setattr(made, attribute, _about_copy(value, memo))
    return made


def _copied_cell(cell: CellType, memo: dict[int, Any]) -> CellType:
    """A cell with the copy's counterpart of its value; itself if that is the value."""
    if not _is_filled(cell):
        return cell
    new = _about_copy(cell.cell_contents, memo)
    return cell if new is cell.cell_contents else CellType(new)
