"""Copies of modules: without values, and with the functions that they hold."""

from __future__ import annotations

import copy
import functools
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn


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
    parameters.
    """
    copied = copy.deepcopy(model, memo)
    for module in copied.modules():
        for held in [
            vars(module),
            *(value for value in vars(module).values() if isinstance(value, dict)),
        ]:
            held.update(
                {name: _about_copy(value, memo) for name, value in held.items() if callable(value)}
            )
    return copied


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
    """What a function is closed over, or has as a default: a copied module for a module, a function
    about the copy for a function."""
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
