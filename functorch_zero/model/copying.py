"""Copies of modules: without values, and with the functions that they hold."""

from __future__ import annotations

import copy
import functools
import operator
import weakref
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from .._torch_private import has_forward_pre_hooks, storage_id
from ..errors import StructureError
from ..introspection import is_filled
from ..shared_elements import share_elements
from ..tree import grouped
from .references import Reference, behind, references


def without_values(model: nn.Module) -> nn.Module:
    """A copy of the module whose parameters and buffers are on the meta device.

    A tensor that is neither is a constant, and is copied with its values.

    Raises:
        StructureError: the module leads to one of them in a way that the copy can't follow.
    """
    memo: dict[int, Any] = {}
    for p in model.parameters():
        # Shape, dtype and strides stay
        meta = torch.empty_like(p, device="meta")
        memo[id(p)] = nn.Parameter(meta, requires_grad=p.requires_grad)
    for b in model.buffers():
        memo[id(b)] = torch.empty_like(b, device="meta")
    # deepcopy refuses tensors with a history, and hooks make these anew
    for x in _computed_by_hooks(model):
        memo[id(x)] = torch.empty_like(x, device="meta", requires_grad=False)
    copied = copy_module(model, memo)
    _check_references(model, copied)
    return copied


def _computed_by_hooks(model: nn.Module) -> list[Tensor]:
    """The tensors made of params or buffers that hooks compute anew before each call, as
    `nn.utils.weight_norm`'s do.

    Raises:
        StructureError: the module leads to such a tensor that nobody computes anew, or weakly to a
            module or tensor in a way that can't be copied.
    """
    leaves = dict((*model.named_parameters(), *model.named_buffers()))
    known = {*map(id, leaves.values())}
    # Others have no storage of their own
    strided = [(path, x) for path, x in leaves.items() if x.layout is torch.strided]
    by_storage = grouped((storage_id(x), path) for path, x in strided)
    # Modules with such hooks, by the id of their `__dict__`, which a reference calls its container
    hooked = {id(vars(m)) for m in model.modules() if has_forward_pre_hooks(m)}
    computed = []
    for reference in references(model):
        x = reference.value
        # A weakref.ref is remade for the copy; these are not
        if type(x) in (*weakref.ProxyTypes, weakref.WeakMethod):
            if isinstance(behind(x), nn.Module | Tensor | MethodType):
                raise _not_followed(reference, "a module or tensor", f"a {type(x).__name__}")
        elif isinstance(x, Tensor) and id(x) not in known:
            near = by_storage.get(storage_id(x), []) if x.layout is torch.strided else []
            leaf = next((path for path in near if share_elements(x, leaves[path])), None)
            if leaf is None and x.grad_fn is None:
                continue
            if id(reference.container) not in hooked:
                what = "a tensor computed from it, or a view of it"
                raise _not_followed(reference, leaf or "params", what)
            computed.append(x)
    return computed


def _not_followed(reference: Reference, leaf: str, got: str) -> StructureError:
    """The error for a reference to a model's tensor that a copy of the model can't follow."""
    # By the names of functions, and of objects' classes
    names = [
        getattr(x, "__qualname__", type(x).__name__) for x in (*reference.way, reference.value)
    ]
    return StructureError(
        f"the module holds {leaf} by another reference, which would not see the params and "
        "buffers that a call is given",
        path=reference.path,
        expected="a parameter or buffer itself, in a list, dict or attribute; or a closure "
        "over a module",
        got=f"{got}, by {' -> '.join(names)}",
        remedy="look it up in the module that has registered it when you need it; or make the "
        "function a method",
    )


def copy_module(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy in which the functions that a module holds, as its own `forward` or as hooks, are
    about the copy. `memo` is deepcopy's: the copies to use, by the id of the original.

    deepcopy leaves functions alone, so a closure over the model would go on using the model's own
    parameters. One that refers to the model plainly is made anew: over a module, a module's method,
    a weak reference to a module, or a function that does so.

    """
    copied = copy.deepcopy(model, memo)
    for module in copied.modules():
        attributes = vars(module)
        _replace_functions(attributes, memo)
        for value in attributes.values():
            if isinstance(value, dict):  # of hooks, and of submodules
                _replace_functions(value, memo)
    return copied


def copied_functions(memo: dict[int, Any]) -> list[Any]:
    """The functions and methods that `copy_module`, with this memo, has made about the copy. Others
    are the original's, too."""
    copies = [x for original, x in memo.items() if id(x) != original]
    return [x for x in copies if isinstance(x, FunctionType | MethodType)]


def _replace_functions(container: dict[str, Any], memo: dict[int, Any]) -> None:
    """Put functions about the copy in the place of those among a dict's values."""
    for name, value in container.items():
        if callable(value):
            container[name] = _about_copy(value, memo)


def _check_references(model: nn.Module, copied: nn.Module) -> None:
    """Raise `StructureError` if the copy still leads to the model that was copied, or to a tensor
    of its own where no other can be put."""
    named = (*model.named_modules(), *model.named_parameters(), *model.named_buffers())
    originals = {id(x): path or "the model" for path, x in named}
    names = {id(x): path for path, x in (*copied.named_parameters(), *copied.named_buffers())}
    for reference in references(copied):
        value = id(reference.value)
        if value in originals:
            raise _not_followed(reference, originals[value], "a function or object as it was")
        if value in names and reference.container is None:
            kind = "a tuple, set, slot, partial or weak reference"
            raise _not_followed(reference, names[value], kind)


def _about_copy(value: Any, memo: dict[int, Any]) -> Any:
    """The copy's counterpart of a thing that a function is closed over, or has as a default: a
    copied module for a module, weakly for a weak reference, a function about the copy for a
    function."""
    if type(value) is weakref.ref and isinstance(value(), nn.Module):
        return weakref.ref(memo.get(id(value()), value()))
    if isinstance(value, MethodType) and id(value.__self__) in memo:
        return memo.setdefault(id(value), MethodType(value.__func__, memo[id(value.__self__)]))
    if isinstance(value, FunctionType) and id(value) not in memo:
        # Ends the recursion where a function is closed over itself. The copy's cell then holds the
        # original, which `_check_references` refuses if it leads to the model.
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
    functools.update_wrapper(made, function)
    # That would keep the original function, and the model, alive
    del made.__wrapped__  # type: ignore[attr-defined]
    for attribute, value in vars(function).items():  # a decorator's `__wrapped__` among them
        setattr(made, attribute, _about_copy(value, memo))
    return made


def _copied_cell(cell: CellType, memo: dict[int, Any]) -> CellType:
    """A cell with the copy's counterpart of its value; the same cell where that stays."""
    if not is_filled(cell):
        return cell
    new = _about_copy(cell.cell_contents, memo)
    return cell if new is cell.cell_contents else CellType(new)
