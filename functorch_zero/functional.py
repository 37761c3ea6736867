"""`functionalize`: an nn.Module as a pure function of `(params, buffers)`.

The module is copied once into a *skeleton* that owns no values (its tensors are on the meta device) and is private to
the `apply` made of it. A call puts the caller's leaves into the skeleton's places and runs it. Given `Handle`s, each
unit's forward on the skeleton enters the unit first and leaves it afterwards; given tensors, nothing is entered.

Note [captured skeletons]: something that runs a module again later, such as torch.utils.checkpoint in backward, holds
on to skeleton modules and must find the same values there. So values stay in a skeleton after the call, and a
skeleton is used again only when nothing outside refers to its modules any more.

Note [changed buffers]: a version counter says whether a buffer was written to, except that torch's batch_norm writes
its running statistics without counting. So floating-point buffers are compared, on the CPU; elsewhere comparing would
wait for the device, and they count as changed.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import attrgetter, ne
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .errors import StructureError, explain
from .handle import Handle
from .lowering import lower
from .params import Params, UnitSpec
from .places import Place, entering, found, put, used
from .policies import Policies, PrecisionRules, cast_floats, find_policies
from .profiling import ranged
from .regions import Region, check_options
from .remat import recomputed
from .units import Units, choose_modules, find_units

MAX_SKELETONS = 16


class Slot(NamedTuple):
    """A place in a module where a leaf is used."""

    module: str  # its path
    attribute: str
    leaf: str  # the leaf's path


class Anatomy(NamedTuple):
    """Where things are in a model: all that `apply` must know beside the module itself."""

    units: tuple[UnitSpec, ...]
    slots: list[Slot]  # of params
    buffer_slots: list[Slot]
    policies: Policies
    remat: frozenset[str] = frozenset()  # paths of the modules that are computed again in backward
    compiled: frozenset[str] = frozenset()  # and of those whose forward is a compiled region
    compile_options: Mapping[str, Any] = {}


_SHAPE = attrgetter("shape")


class Apply:
    """`apply(params, buffers, *args, **kwargs) -> (output, new_buffers)`, pure.

    `params` and `buffers` map dotted paths to leaves; neither is changed, and buffers that the call changed
    (BatchNorm's running statistics) come back as new tensors. `train()` and `eval()` give the same function in that
    mode.
    """

    def __init__(self, model: nn.Module, anatomy: Anatomy):
        self._anatomy = anatomy
        self.units, self.slots, self.buffer_slots = anatomy.units, anatomy.slots, anatomy.buffer_slots
        self._shapes = {name: p.shape for name, p in model.named_parameters()}
        self._buffers = dict.fromkeys(slot.leaf for slot in anatomy.buffer_slots)
        self._prototype = model
        self._skeletons: list[_Skeleton] = []

    def train(self, mode: bool = True) -> Apply:
        """The same function with every module in training mode."""
        return Apply(_copy(self._prototype, {}).train(mode), self._anatomy)

    def eval(self) -> Apply:
        """The same function with every module in evaluation mode."""
        return self.train(False)

    def __call__(
        self, params: Mapping[str, Any], buffers: Mapping[str, Tensor], /, *args: Any, **kwargs: Any
    ) -> tuple[Any, dict[str, Tensor]]:
        self._check(params, buffers)
        skeleton = self._take()
        try:
            taken = skeleton.bind(params, buffers)
            output = skeleton.root(*args, **kwargs)
            return output, skeleton.new_buffers(buffers, taken)
        finally:
            skeleton.release(buffers)
            self._skeletons.append(skeleton)

    def _check(self, params: Mapping[str, Any], buffers: Mapping[str, Tensor]) -> None:
        known: Mapping[str, Any]
        for what, given, known in (("params", params, self._shapes), ("buffers", buffers, self._buffers)):
            if given.keys() != known.keys():
                path = next(iter([p for p in known if p not in given] + [p for p in given if p not in known]))
                got = "no such leaf" if path not in given else "a leaf the model does not have"
                remedy = "pass the tree functionalize returned"
                raise StructureError(explain(f"{what} don't fit the model", path=path, got=got, remedy=remedy))
        leaves = [*map(params.__getitem__, self._shapes)]
        if {*map(type, leaves)} != {Handle} and any(map(ne, map(_SHAPE, leaves), self._shapes.values())):
            path = next(path for path, shape in self._shapes.items() if params[path].shape != shape)
            raise StructureError(
                explain(
                    "params don't fit the model",
                    path=path,
                    expected=tuple(self._shapes[path]),
                    got=tuple(params[path].shape),
                    remedy="inside a sharded step pass the params the loss was given, not the state's pieces",
                )
            )

    def _take(self) -> _Skeleton:
        for i, skeleton in enumerate(self._skeletons):
            if skeleton.is_free():
                return self._skeletons.pop(i)
        del self._skeletons[: -MAX_SKELETONS or None]  # captured ones live as long as what captured them
        return _Skeleton(_copy(self._prototype, {}), self._anatomy).settle()


class _Skeleton:
    """A copy of the model whose places can be filled; see Note [captured skeletons]."""

    def __init__(self, root: nn.Module, anatomy: Anatomy):
        self.root = root
        at = root.get_submodule
        self._policies = {leaf: policy for unit in anatomy.units for leaf, policy in unit.policies.items()}
        anatomy.policies.cast_calls(root)
        self._slots: list[Place] = [(at(s.module)._parameters, s.attribute, s.leaf) for s in anatomy.slots]
        self._buffer_slots: list[Place] = [(at(s.module)._buffers, s.attribute, s.leaf) for s in anatomy.buffer_slots]
        self._places = self._slots + self._buffer_slots
        self._empty = found(self._places)
        self._params: Mapping[str, Any] = {}
        self._lazy = False
        by_leaf: dict[str, list[Place]] = {}
        for place in self._slots:
            by_leaf.setdefault(place[2], []).append(place)
        for unit in anatomy.units:
            inside = [place for leaf in unit.leaves for place in by_leaf.get(leaf, ())]
            for path in unit.modules:
                module = root.get_submodule(path)
                if path in anatomy.compiled:
                    module.forward = Region(module.forward, anatomy.compile_options)
                module.forward = self._entering(path, inside, module.forward)
                if path in anatomy.remat:
                    within = {id(m._buffers) for m in module.modules()}
                    places = [place for place in self._buffer_slots if id(place[0]) in within]
                    module.forward = recomputed(module.forward, places)
        self._held = [*root.modules(), *_functions(root)]
        self._refs: list[int] = []

    def settle(self) -> _Skeleton:
        """Note how often modules and functions are referred to while nothing runs. Call it outside `__init__`."""
        self._refs = self._count_refs()
        return self

    def _count_refs(self) -> list[int]:
        return [*map(sys.getrefcount, self._held)]

    def is_free(self) -> bool:
        """Whether nothing but this skeleton refers to its modules and their functions."""
        return self._count_refs() == self._refs

    def bind(self, params: Mapping[str, Any], buffers: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, int | None]]:
        """Fill every place; buffers with copies, which are returned with their versions."""
        self._params = params
        kinds = {*map(type, params.values())}
        self._lazy = Handle in kinds
        leaves = used(self._slots, params)
        if self._policies and kinds != {Handle}:
            leaves = [self._as_used(path, leaf) for (_, _, path), leaf in zip(self._slots, leaves, strict=True)]
        put(self._slots, leaves)
        return {path: (copied, _version(copied)) for path, copied in self._put_copies(buffers).items()}

    def _as_used(self, path: str, leaf: Any) -> Any:
        """A leaf that was given whole, in the dtype it is used in; a handle gives it so when it is entered."""
        policy = self._policies.get(path)
        return leaf if policy is None or type(leaf) is Handle else lower(leaf, policy.dtypes(leaf.dtype))

    def release(self, buffers: Mapping[str, Tensor]) -> None:
        """Let go of the values, unless something still refers to a module and may yet run it.

        Then it finds the params there, and copies of the buffers that the call was given: what it makes of them is
        nobody's.
        """
        if self.is_free():
            self._params = {}
            put(self._places, self._empty)
        else:
            self._put_copies(buffers)

    def _put_copies(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        copies = {path: buffer.clone() for path, buffer in buffers.items()}
        for attributes, name, leaf in self._buffer_slots:
            attributes[name] = copies[leaf]
        return copies

    def new_buffers(self, old: Mapping[str, Tensor], taken: dict[str, tuple[Tensor, int | None]]) -> dict[str, Tensor]:
        """The buffers after the call: the old tensors where nothing changed."""
        new = dict(old)
        for attributes, name, leaf in self._buffer_slots:
            buffer, (copied, version) = attributes[name], taken[leaf]
            if buffer is not copied or _version(copied) != version or _may_differ(copied, old[leaf]):
                assert isinstance(buffer, Tensor)
                new[leaf] = buffer.detach()
        return new

    def _entering(self, path: str, inside: list[Place], forward: Callable[..., Any]) -> Any:
        @functools.wraps(forward)
        def enter_and_run(*args: Any, **kwargs: Any) -> Any:
            with ranged("forward", path or "root"):
                run = entering(path, inside, self._params, forward) if self._lazy else forward
                return run(*args, **kwargs)

        return enter_and_run


def _version(tensor: Tensor) -> int | None:
    """How often it has been written to; tensors of inference mode don't count."""
    return None if tensor.is_inference() else tensor._version


def _may_differ(copied: Tensor, old: Tensor) -> bool:
    """Whether a copy whose version is as it was may have changed; see Note [changed buffers]."""
    if not copied.is_floating_point() and not copied.is_inference():
        return False
    comparable = type(copied) is Tensor and copied.device.type == "cpu" and not _transforms_active()
    return not comparable or not torch.equal(copied, old)


def _transforms_active() -> bool:
    return torch._C._are_functorch_transforms_active()


def functionalize(
    model: nn.Module,
    units: Units = None,
    *,
    remat: Units | bool = False,
    compile: Units | bool = False,
    compile_options: Mapping[str, Any] | None = None,
    precision: PrecisionRules = None,
) -> tuple[Apply, Params, dict[str, Tensor]]:
    """Make a module into `(apply, params, buffers)`. The module is not changed, now or later.

    Args:
        model: any nn.Module, on any device, the meta device included. Its modules keep their training modes.
        units: what is gathered and freed together when sharded: a module class, a predicate `(path, module) -> bool`,
            a pattern of module paths such as "layers.*", or several of these. None: each child of the model.
        remat: the units whose activations are computed again in backward instead of being kept, chosen as `units` are
            among the units' modules. True: all that have no other unit inside. The numbers stay the same, dropout's
            too; at level 3 the second run's gather takes the place of backward's.
        compile: the units whose forward torch.compile makes a region of, chosen in the same way among those that have
            no other unit inside: collectives stay outside. Blocks of one class and shape are compiled once.
        compile_options: for torch.compile: backend, mode, options, dynamic, fullgraph. Inductor draws random numbers as
            torch does, unless options have fallback_random=False.
        precision: a `Precision` for the model, or a dict from module classes, predicates or patterns of module paths
            ("" is the model) to one each, which counts for all that is in those modules; the innermost module named
            counts, and of two rules for one module the later one. None: leaves are used as they are stored.

    Returns:
        apply: the pure function, see `Apply`.
        params: a `Params`, dotted path -> leaf, detached but sharing the module's storage (steps copy what they
            keep). `requires_grad` says which leaves are trained. A tied weight is one leaf, under its first name.
        buffers: a dict, dotted path -> tensor.

    No rank is involved and nothing is communicated. After torch.func.functional_call.

    >>> apply, params, buffers = functionalize(nn.Linear(2, 3))
    >>> output, _ = apply(params, buffers, torch.ones(1, 2))
    >>> list(params), tuple(output.shape)
    (['weight', 'bias'], (1, 3))
    """
    if any(torch.nn.parameter.is_lazy(p) for p in model.parameters()):
        raise StructureError("a lazy module has no shapes yet. Remedy: run it once before functionalize")
    names = {id(p): name for name, p in model.named_parameters()}
    buffer_names = {id(b): name for name, b in model.named_buffers()}
    slots, buffer_slots = [], []
    for path, module in model.named_modules():
        slots += [Slot(path, a, names[id(p)]) for a, p in module._parameters.items() if p is not None]
        buffer_slots += [Slot(path, a, buffer_names[id(b)]) for a, b in module._buffers.items() if b is not None]
    found, policies = find_units(model, units, slots), find_policies(model, precision)
    of_leaves = policies.of_leaves(slots)
    if policies.given:
        found = tuple(replace(unit, precisions=tuple(of_leaves[leaf] for leaf in unit.leaves)) for unit in found)
    stored = {n: cast_floats(p.detach(), of_leaves[n].storage) for n, p in model.named_parameters()}
    params = Params({n: stored[n].requires_grad_(p.requires_grad) for n, p in model.named_parameters()}, found)
    kept = {slot.leaf: policies.of(slot.module).buffers for slot in buffer_slots}
    buffers = {name: cast_floats(buffer.detach(), kept[name]) for name, buffer in model.named_buffers()}
    again = choose_modules(model, remat, found, what="remat")
    compiled = choose_modules(model, compile, found, what="compile", innermost=True)
    options = check_options(compile_options, bool(compiled))
    anatomy = Anatomy(found, slots, buffer_slots, policies, again, compiled, options)
    return Apply(without_values(model), anatomy), params, buffers


def without_values(model: nn.Module) -> nn.Module:
    """A copy of the module whose parameters and buffers are on the meta device."""
    memo: dict[int, Any] = {}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
    for b in model.buffers():
        memo[id(b)] = torch.empty_like(b, device="meta")
    return _copy(model, memo)


def _copy(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy in which the functions that a module holds, as its own `forward` or as hooks, are about the copy.

    deepcopy leaves functions alone, so a closure over the model would go on using the model's own parameters.
    """
    copied = copy.deepcopy(model, memo)
    for module in copied.modules():
        for held in [vars(module), *(value for value in vars(module).values() if isinstance(value, dict))]:
            held.update({name: _about_copy(value, memo) for name, value in held.items() if callable(value)})
    return copied


def _functions(model: nn.Module) -> list[Any]:
    """The functions and bound methods that modules hold, and those that these are closed over."""
    found: dict[int, Any] = {}
    waiting = [value for module in model.modules() for value in vars(module).values()]
    while waiting:
        value = waiting.pop()
        if isinstance(value, FunctionType | MethodType) and id(value) not in found:
            found[id(value)] = value
            waiting += [cell.cell_contents for cell in getattr(value, "__closure__", None) or () if _is_filled(cell)]
            waiting += [*(value.__defaults__ or ()), *(getattr(value, "__kwdefaults__", None) or {}).values()]
    return list(found.values())


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _about_copy(value: Any, memo: dict[int, Any]) -> Any:
    """What a function is closed over, or has as a default: a copied module for a module, a function about the copy for
    a function."""
    if isinstance(value, MethodType) and id(value.__self__) in memo:
        return MethodType(value.__func__, memo[id(value.__self__)])
    if isinstance(value, FunctionType) and id(value) not in memo:
        memo[id(value)] = value  # a function may be closed over itself
        cells = tuple(_copied_cell(cell, memo) for cell in value.__closure__ or ())
        defaults = tuple(_about_copy(default, memo) for default in value.__defaults__ or ())
        named = {name: _about_copy(default, memo) for name, default in (value.__kwdefaults__ or {}).items()}
        held = [*(value.__closure__ or ()), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        if any(new is not old for new, old in zip([*cells, *defaults, *named.values()], held, strict=True)):
            new = FunctionType(value.__code__, value.__globals__, value.__name__, defaults or None, cells or None)
            new.__kwdefaults__ = named or None
            memo[id(value)] = functools.update_wrapper(new, value)
    return memo.get(id(value), value) if isinstance(value, nn.Module | FunctionType) else value


def _copied_cell(cell: CellType, memo: dict[int, Any]) -> CellType:
    if not _is_filled(cell):
        return cell
    new = _about_copy(cell.cell_contents, memo)
    return cell if new is cell.cell_contents else CellType(new)
