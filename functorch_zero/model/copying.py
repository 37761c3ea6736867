"""Copies of modules: without values, and with the functions that they hold."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from types import CellType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any

import torch
from torch import nn

from ..errors import StructureError, explain


def without_values(model: nn.Module) -> nn.Module:
    """A copy of the module whose parameters and buffers are on the meta device."""
    memo: dict[int, Any] = {}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(
            torch.empty_like(p, device="meta"), requires_grad=p.requires_grad
        )
    for b in model.buffers():
        memo[id(b)] = torch.empty_like(b, device="meta")
    return copy_module(model, memo)


def copy_module(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy in which the functions that a module holds, as its own `forward` or as hooks, are
    about the copy.

    deepcopy leaves functions alone, so a closure over the model would go on using the model's own
    parameters. One that refers to the model plainly is made anew: over a module, a module's method,
    or a function that does so.

    Raises:
        StructureError: a function refers to the model in another way, through a list say.
    """
    copied = copy.deepcopy(model, memo)
    own = {id(x) for x in (*model.modules(), *model.parameters(), *model.buffers())}
    for path, module in copied.named_modules():
        for held in [
            vars(module),
            *(value for value in vars(module).values() if isinstance(value, dict)),
        ]:
            held.update(
                {name: _about_copy(value, memo) for name, value in held.items() if callable(value)}
            )
        for name, value in vars(module).items():
            _check_plain(value, own, f"{path}.{name}".lstrip("."))
    return copied


def _check_plain(value: Any, own: set[int], path: str) -> None:
    """Raise `StructureError` if a module of the copy still leads to the model that was copied."""
    way = _way_to(value, own, set(), _DEPTH)
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


def _way_to(value: Any, own: set[int], seen: set[int], depth: int) -> str | None:
    """How a value leads to one of `own`, by names: "hook: models -> 0"; None if it doesn't."""
    if id(value) in own:
        return ""
    if isinstance(value, _LEAVES) or id(value) in seen or depth == 0:
        return None
    seen.add(id(value))
    for name, inside in _inside(value):
        way = _way_to(inside, own, seen, depth - 1)
        if way is not None:
            return f"{name} -> {way}" if way else name
    return None


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """The things that a function, container or object refers to, by name."""
    if isinstance(value, FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            if _is_filled(cell):
                yield f"{value.__qualname__}: {name}", cell.cell_contents
        yield from ((value.__qualname__, default) for default in value.__defaults__ or ())
        yield from (value.__kwdefaults__ or {}).items()
    elif isinstance(value, MethodType):
        yield value.__func__.__qualname__, value.__self__
        yield from _inside(value.__func__)
    elif isinstance(value, functools.partial):
        yield from (("partial", x) for x in (value.func, value.args, value.keywords))
    elif isinstance(value, Mapping):
        yield from ((str(key), inside) for key, inside in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((str(i), inside) for i, inside in enumerate(value))
    else:
        yield from getattr(value, "__dict__", {}).items()


def functions_of(model: nn.Module) -> list[Any]:
    """The functions and bound methods that modules hold, and those that these are closed over."""
    found: dict[int, Any] = {}
    waiting = [value for module in model.modules() for value in vars(module).values()]
    while waiting:
        value = waiting.pop()
        if isinstance(value, FunctionType | MethodType) and id(value) not in found:
            found[id(value)] = value
            waiting += [
                cell.cell_contents
                for cell in getattr(value, "__closure__", None) or ()
                if _is_filled(cell)
            ]
            waiting += [
                *(value.__defaults__ or ()),
                *(getattr(value, "__kwdefaults__", None) or {}).values(),
            ]
    return list(found.values())


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _about_copy(value: Any, memo: dict[int, Any]) -> Any:
    """The copy's counterpart of a thing that a function is closed over, or has as a default: a
    copied module for a module, a function about the copy for a function."""
    if isinstance(value, MethodType) and id(value.__self__) in memo:
        return MethodType(value.__func__, memo[id(value.__self__)])
    if isinstance(value, FunctionType) and id(value) not in memo:
        memo[id(value)] = value  # a function may be closed over itself
        cells = tuple(_copied_cell(cell, memo) for cell in value.__closure__ or ())
        defaults = tuple(_about_copy(default, memo) for default in value.__defaults__ or ())
        named = {
            name: _about_copy(default, memo)
            for name, default in (value.__kwdefaults__ or {}).items()
        }
        held = [
            *(value.__closure__ or ()),
            *(value.__defaults__ or ()),
            *(value.__kwdefaults__ or {}).values(),
        ]
        if any(
            new is not old
            for new, old in zip([*cells, *defaults, *named.values()], held, strict=True)
        ):
            new = FunctionType(
                value.__code__, value.__globals__, value.__name__, defaults or None, cells or None
            )
            new.__kwdefaults__ = named or None
            memo[id(value)] = functools.update_wrapper(new, value)
    return memo.get(id(value), value) if isinstance(value, nn.Module | FunctionType) else value


def _copied_cell(cell: CellType, memo: dict[int, Any]) -> CellType:
    if not _is_filled(cell):
        return cell
    new = _about_copy(cell.cell_contents, memo)
    return cell if new is cell.cell_contents else CellType(new)
