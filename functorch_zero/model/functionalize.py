"""`functionalize`: an nn.Module as a pure function of `(params, buffers)`.

The module is copied once into a *skeleton* that owns no values (its tensors are on the meta device)
and is private to the `apply` made of it. A call puts the caller's leaves into the skeleton's places
and runs it. Given `LazyParam`s, each unit's forward on the skeleton enters the unit first and
leaves it afterwards; given tensors, nothing is entered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter, ne
from typing import Any

import torch
from torch import Tensor, nn

from .._torch_private import buffers_dict, params_dict
from ..errors import StructureError, explain
from ..params import Params
from .casting import PrecisionRules, cast_floats, find_policies
from .compile import check_options
from .copying import copy_module, without_values
from .lazy_param import LazyParam
from .skeleton import Anatomy, Skeleton
from .slots import Slot
from .units import Units, choose_modules, find_units

MAX_SKELETONS = 16


_SHAPE = attrgetter("shape")


class Apply:
    """`apply(params, buffers, *args, **kwargs) -> (output, new_buffers)`, pure.

    `params` and `buffers` map dotted paths to leaves; neither is changed, and buffers that the call
    changed (BatchNorm's running statistics) come back as new tensors. `train()` and `eval()` give
    the same function in that mode.
    """

    def __init__(self, model: nn.Module, anatomy: Anatomy):
        self._anatomy = anatomy
        self.units, self.slots, self.buffer_slots = (
            anatomy.units,
            anatomy.slots,
            anatomy.buffer_slots,
        )
        self._shapes = {name: p.shape for name, p in model.named_parameters()}
        self._buffers = dict.fromkeys(slot.leaf for slot in anatomy.buffer_slots)
        self._prototype = model
        self._skeletons: list[Skeleton] = []

    def train(self, mode: bool = True) -> Apply:
        """The same function with every module in training mode."""
        return Apply(copy_module(self._prototype, {}).train(mode), self._anatomy)

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
        for what, given, known in (
            ("params", params, self._shapes),
            ("buffers", buffers, self._buffers),
        ):
            if given.keys() != known.keys():
                path = next(
                    iter(
                        [p for p in known if p not in given] + [p for p in given if p not in known]
                    )
                )
                got = "no such leaf" if path not in given else "a leaf the model does not have"
                remedy = "pass the tree functionalize returned"
                raise StructureError(
                    explain(f"{what} don't fit the model", path=path, got=got, remedy=remedy)
                )
        leaves = [*map(params.__getitem__, self._shapes)]
        if {*map(type, leaves)} != {LazyParam} and any(
            map(ne, map(_SHAPE, leaves), self._shapes.values())
        ):
            path = next(path for path, shape in self._shapes.items() if params[path].shape != shape)
            raise StructureError(
                explain(
                    "params don't fit the model",
                    path=path,
                    expected=tuple(self._shapes[path]),
                    got=tuple(params[path].shape),
                    remedy="inside a sharded step pass the params the loss was given, not the "
                    "state's pieces",
                )
            )

    def _take(self) -> Skeleton:
        for i, skeleton in enumerate(self._skeletons):
            if skeleton.is_free():
                return self._skeletons.pop(i)
        # Captured ones live as long as what captured them
        del self._skeletons[: -MAX_SKELETONS or None]
        return Skeleton(copy_module(self._prototype, {}), self._anatomy).settle()


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
        model: any nn.Module, on any device, the meta device included. Its modules keep their
            training modes.
        units: what is gathered and freed together when sharded: a module class, a predicate
            `(path, module) -> bool`, a pattern of module paths such as "layers.*", or several of
            these. None: each child of the model.
        remat: the units whose activations are computed again in backward instead of being kept,
            chosen as `units` are among the units' modules. True: all that have no other unit
            inside. The numbers stay the same, dropout's too; at level 3 the second run's gather
            takes the place of backward's.
        compile: the units whose forward torch.compile makes a region of, chosen in the same way
            among those that have
            no other unit inside: collectives stay outside. Blocks of one class and shape are
            compiled once.
        compile_options: for torch.compile: backend, mode, options, dynamic, fullgraph. Inductor
            draws random numbers as torch does, unless options have fallback_random=False.
        precision: a `Precision` for the model, or a dict from module classes, predicates or
            patterns of module paths ("" is the model) to one each, which counts for all that is in
            those modules; the innermost module named counts, and of two rules for one module the
            later one. None: leaves are used as they are stored.

    Returns:
        apply: the pure function, see `Apply`.
        params: a `Params`, dotted path -> leaf, detached but sharing the module's storage (steps
            copy what they keep). `requires_grad` says which leaves are trained. A tied weight is
            one leaf, under its first name.
        buffers: a dict, dotted path -> tensor.

    No rank is involved and nothing is communicated. After torch.func.functional_call.

    >>> apply, params, buffers = functionalize(nn.Linear(2, 3))
    >>> output, _ = apply(params, buffers, torch.ones(1, 2))
    >>> list(params), tuple(output.shape)
    (['weight', 'bias'], (1, 3))
    """
    if any(torch.nn.parameter.is_lazy(p) for p in model.parameters()):
        raise StructureError(
            "a lazy module has no shapes yet. Remedy: run it once before functionalize"
        )
    names = {id(p): name for name, p in model.named_parameters()}
    buffer_names = {id(b): name for name, b in model.named_buffers()}
    slots, buffer_slots = [], []
    for path, module in model.named_modules():
        slots += [
            Slot(path, a, names[id(p)]) for a, p in params_dict(module).items() if p is not None
        ]
        buffer_slots += [
            Slot(path, a, buffer_names[id(b)])
            for a, b in buffers_dict(module).items()
            if b is not None
        ]
    found, policies = find_units(model, units, slots), find_policies(model, precision)
    of_leaves = policies.of_leaves(slots)
    if policies.given:
        found = tuple(
            replace(unit, precisions=tuple(of_leaves[leaf] for leaf in unit.leaves))
            for unit in found
        )
    stored = {n: cast_floats(p.detach(), of_leaves[n].storage) for n, p in model.named_parameters()}
    params = Params(
        {n: stored[n].requires_grad_(p.requires_grad) for n, p in model.named_parameters()}, found
    )
    kept = {slot.leaf: policies.of(slot.module).buffers for slot in buffer_slots}
    buffers = {
        name: cast_floats(buffer.detach(), kept[name]) for name, buffer in model.named_buffers()
    }
    again = choose_modules(model, remat, found, what="remat")
    compiled = choose_modules(model, compile, found, what="compile", innermost=True)
    options = check_options(compile_options, bool(compiled))
    anatomy = Anatomy(found, slots, buffer_slots, policies, again, compiled, options)
    return Apply(without_values(model), anatomy), params, buffers
