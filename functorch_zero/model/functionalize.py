"""`functionalize`: an nn.Module as a pure function of `(params, buffers)`.

The module is copied once into a *skeleton*, which is private to the `apply` made of it. The
skeleton owns no values: its params and buffers are on the meta device. A call puts the caller's
leaves into its places and runs it. Given `LazyParam`s, each unit's forward on the skeleton enters
the unit first and leaves it afterwards; given tensors, nothing is entered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .._torch_private import (
    buffers_dict,
    is_compiled,
    not_persistent,
    params_dict,
    without_torch_function,
)
from ..errors import StructureError, explain
from ..introspection import name_in_callers
from ..params import Names, OnEngine, Params
from ..precision import Precision
from ..shared_elements import check_apart
from ..tree import check_tensors, dotted, grouped
from .casting import PrecisionRules, cast_floats, find_policies
from .compile import options_for_torch
from .copying import copy_module, without_values
from .skeleton import Anatomy, Skeleton
from .slots import Slot, leaves_inside, slots_of
from .units import Units, choose_modules, find_units

# Kept per `apply`, of those that something still refers to; free ones are used again
MAX_SKELETONS = 16


class Apply:
    """`apply(params, buffers, *args, **kwargs) -> (output, new_buffers)`, pure.

    `params` and `buffers` map dotted paths to leaves; neither is changed, and buffers that the call
    changed (BatchNorm's running statistics) come back as new tensors. `train()` and `eval()` give
    the same function in that mode.
    """

    def __init__(self, model: nn.Module, anatomy: Anatomy):
        self.units = anatomy.units
        self.slots = anatomy.slots
        self.buffer_slots = anatomy.buffer_slots
        # Names of the buffers that `state_dict` leaves out
        self.not_persistent = frozenset(
            dotted(path, attribute)
            for path, module in model.named_modules()
            for attribute in not_persistent(module)
        )
        self.names = _names_of(model, self.slots + self.buffer_slots, self.not_persistent)
        self._anatomy = anatomy
        # Leaf's path -> whole shape
        self._shapes = {name: p.shape for name, p in model.named_parameters()}
        # Paths alone; no values
        self._buffers = dict.fromkeys(slot.leaf for slot in anatomy.buffer_slots)
        self._prototype = model  # without values; skeletons are copies of it
        self._skeletons: list[Skeleton] = []  # those that no call uses now

    def __repr__(self) -> str:
        model = self._prototype
        mode = "training" if model.training else "evaluation"
        counts = f"{len(self._shapes)} params in {len(self.units)} units, {len(self._buffers)}"
        return f"Apply({type(model).__name__} in {mode} mode: {counts} buffers)"

    def train(self, mode: bool = True) -> Apply:
        """The model's function with every module in training mode."""
        # A copy: modes belong to modules, and this `apply` keeps its own
        return Apply(copy_module(self._prototype, {}).train(mode), self._anatomy)

    def eval(self) -> Apply:
        """The model's function with every module in evaluation mode."""
        return self.train(False)

    def __call__(
        self, params: Mapping[str, Any], buffers: Mapping[str, Tensor], /, *args: Any, **kwargs: Any
    ) -> tuple[Any, dict[str, Tensor]]:
        # Before a skeleton is taken: a wrong tree must not end up half bound
        _check_paths("params", params, self._shapes)
        _check_paths("buffers", buffers, self._buffers)
        self._check_shapes(params)
        skeleton = self._take()
        try:
            taken = skeleton.bind(params, buffers)  # path -> the copy that the modules may write to
            output = skeleton.root(*args, **kwargs)
            return output, skeleton.new_buffers(buffers, taken)
        finally:
            # On errors too: let go of the values, then offer the skeleton to the next call
            skeleton.release(buffers)
            self._skeletons.append(skeleton)

    def _check_shapes(self, params: Mapping[str, Any]) -> None:
        """Raise, naming the first leaf whose shape is not the model's."""
        with without_torch_function():  # a lazy parameter has the shape of its whole leaf
            for path, shape in self._shapes.items():
                leaf = params[path]
                if isinstance(leaf, Tensor) and leaf.shape == shape:
                    continue
                raise StructureError(
                    "params don't fit the model",
                    path=path,
                    expected=tuple(shape),
                    got=tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__,
                    remedy="pass params of this model; inside a sharded step those that the loss "
                    "was given, not the state's pieces",
                )

    def _take(self) -> Skeleton:
        """A skeleton that nobody uses: one whose last call is forgotten, or else a new one."""
        # A free one first: a new one is a copy of the whole model
        for i, skeleton in enumerate(self._skeletons):
            if skeleton.is_free():
                return self._skeletons.pop(i)
        # The oldest are left to those that refer to them, and live as long as these do
        del self._skeletons[:-MAX_SKELETONS]
        return Skeleton(self._prototype, self._anatomy).settle()


def _check_paths(what: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raise, naming the first leaf that is missing or unknown, unless the paths are the model's."""
    if isinstance(given, OnEngine):
        name = name_in_callers(given) or "tree"
        raise StructureError(
            f"apply was given a sharded tree for {what}",
            path=name,
            expected=f"whole {what}, or those that the loss was given",
            got=given,
            rank=given.of_rank,
            remedy="make it an argument of the loss: in a program value_and_grad(loss)(params, "
            f"{name}), in a training step a frozen part of params (trainable=); elsewhere pass "
            f"fz.unshard({name})",
        )
    if not isinstance(given, Mapping):
        raise StructureError(
            f"apply's {what} are no dict of leaves",
            expected=f"apply(params, buffers, *inputs), {what} as functionalize returned them",
            got=f"{type(given).__name__} for {what}",
            remedy="pass both trees before the inputs; buffers are {} where there are none",
        )
    if given.keys() == known.keys():
        return
    missing = [path for path in known if path not in given]
    unknown = [path for path in given if path not in known]
    raise StructureError(
        f"{what} don't fit the model",
        path=(missing + unknown)[0],
        got="no such leaf" if missing else "a leaf the model does not have",
        remedy="pass the tree functionalize returned",
    )


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
        units: the modules whose leaves are gathered and freed together when sharded: a module
            class, a predicate `(path, module) -> bool`, a pattern of module paths such as
            "layers.*" (`*` is one name, `**` any number), or several of these. None: each child of
            the model, with containers opened; and of a child that holds repeated modules, such as a
            transformer's layers, each of them and the rest. docs/begin/levels.md has the rule.
        remat: the units whose activations are computed again in backward instead of being kept,
            chosen as `units` are among the units' modules. True: all that have no other unit
            inside. The numbers stay the same, dropout's too. At level 3 the second run's gather
            takes the place of backward's.
        compile: the units whose forward torch.compile makes a region of, chosen in the same way
            among those that have no other unit inside: collectives stay outside. Blocks of one
            class and shape are compiled once.
        compile_options: for torch.compile: backend, mode, options, dynamic, fullgraph. Inductor
            draws random numbers as torch does, unless options have fallback_random=False. CUDA
            graphs, and so the modes "reduce-overhead" and "max-autotune", are refused.
        precision: a `Precision` for the model, or a dict to one each from module classes,
            predicates or patterns of module paths ("" is the model). Each counts for everything in
            those modules. The innermost module named counts, and of two rules for one module the
            later one. None: leaves are used as they are stored.

    Returns:
        `apply`, the pure function, see `Apply`. `params`, a `Params` of dotted path -> leaf,
        detached but sharing the module's storage (steps copy what they keep); `requires_grad` says
        which leaves are trained, and a tied weight is one leaf, under its first name
        (`params.names` has the others, for exports). And `buffers`, a dict of path -> tensor.

    A module may hold its params and buffers in further attributes, lists, dicts and objects: a call
    fills these, too. Functions closed over a module, and weak references to one, are about the
    skeleton.

    Raises:
        StructureError: a module is compiled or scripted already. Or the module leads to a param or
            buffer in a way that a call can't fill: by a tuple, a set, slots, a partial, a closure
            over the tensor, a weak reference to it, a global, or by a view or a computed tensor. Or
            two leaves lie in the same storage.

    No rank is involved and nothing is communicated. After torch.func.functional_call.

    >>> apply, params, buffers = functionalize(nn.Linear(2, 3))
    >>> output, _ = apply(params, buffers, torch.ones(1, 2))
    >>> list(params), tuple(output.shape)
    (['weight', 'bias'], (1, 3))
    """
    if not isinstance(model, nn.Module):
        is_class = isinstance(model, type)
        got = f"the class {model.__name__}" if is_class else type(model).__name__
        raise TypeError(
            explain(
                "functionalize takes a module that is built",
                expected="an nn.Module",
                got=got,
                remedy="build it, `Net(...)`; a function of (params, buffers, batch) needs no "
                "functionalize, and is a loss as it is",
            )
        )
    for path, module in model.named_modules():
        _check_eager(path, module)
    # Units and layouts are made of shapes
    if any(torch.nn.parameter.is_lazy(p) for p in model.parameters()):
        raise StructureError(
            "a lazy module of torch has no shapes yet. Remedy: run it once before functionalize"
        )
    check_tensors(dict(model.named_parameters()), "a model's params")
    check_tensors(dict(model.named_buffers()), "a model's buffers", dense=False)
    sharing: dict[str, str] = {}
    for one, other in check_apart(dict((*model.named_parameters(), *model.named_buffers()))):
        sharing |= {one: other, other: one}
    slots = slots_of(model.named_parameters(), model, params_dict)
    buffer_slots = slots_of(model.named_buffers(), model, buffers_dict)
    # Units are chosen on the user's module, which predicates and classes refer to
    specs = find_units(model, units, slots)
    policies = find_policies(model, precision)
    precisions = policies.of_leaves(slots)

    leaves = {}
    for path, p in model.named_parameters():
        # `detach` shares the storage: nothing is copied here unless a policy casts
        stored = cast_floats(p.detach(), precisions[path].storage)
        leaves[path] = stored.requires_grad_(p.requires_grad)
    of_buffers = policies.of_leaves(buffer_slots, buffers=True)
    buffers = {}
    for path, buffer in model.named_buffers():
        buffers[path] = cast_floats(buffer.detach(), of_buffers[path].buffers)

    # Regions are chosen among units' modules, so that collectives stay at their borders
    remat_paths = choose_modules(model, remat, specs, what="remat")
    compiled = choose_modules(model, compile, specs, what="compile", innermost=True)
    options = options_for_torch(compile_options, bool(compiled))
    sparse = _of_sparse_lookups(model, slots, precisions, compiled)
    given = precisions if policies.given else {}
    specs = tuple(
        replace(
            spec,
            precisions=tuple(given[leaf] for leaf in spec.leaves if given),
            sparse=tuple(leaf for leaf in spec.leaves if leaf in sparse),
        )
        for spec in specs
    )
    anatomy = Anatomy(specs, slots, buffer_slots, policies, remat_paths, compiled, options, sharing)
    apply = Apply(without_values(model), anatomy)
    return apply, Params(leaves, specs, apply.names), buffers


def _check_eager(path: str, module: nn.Module) -> None:
    """Raise if a module is compiled: a copy of it may run eagerly, and units are compiled apart."""
    if is_compiled(module):
        raise StructureError(
            "the model is compiled already, and collectives must stay outside of what is",
            path=path,
            expected="a module before torch.compile or .compile()",
            got="a compiled one",
            remedy="leave that call out, and compile units: functionalize(model, compile=True)",
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise StructureError(
            "TorchScript has no places that a call could fill with leaves",
            path=path,
            expected="a module before torch.jit",
            got=type(module).__name__,
            remedy="pass that module, and compile units: functionalize(model, compile=True)",
        )


def _names_of(model: nn.Module, slots: Iterable[Slot], not_persistent: frozenset[str]) -> Names:
    """The model's names in a `state_dict`, which leaves out those that are not persistent."""
    try:
        named = [*model.named_modules(remove_duplicate=False)]
    except RecursionError:  # a module that lies in itself has no state_dict
        named = [*model.named_modules()]
    # The first path of a module is that of its slots
    places = grouped((module, path) for path, module in named)
    by_path = {found[0]: found for found in places.values()}
    aliases: dict[str, str] = {}
    for slot in slots:
        own_name, *others = (dotted(p, slot.attribute) for p in by_path[slot.module])
        if own_name in not_persistent:
            continue
        aliases |= {name: slot.leaf for name in (own_name, *others) if name != slot.leaf}
    return Names(aliases, not_persistent - set(aliases.values()))


def _of_sparse_lookups(
    model: nn.Module,
    slots: Iterable[Slot],
    precisions: Mapping[str, Precision],
    compiled: Collection[str],
) -> set[str]:
    """The leaves that lookups with `sparse=True` alone use, of which a step may keep rows apart."""
    found: set[str] = set()
    others = leaves_inside(slots, compiled)  # a region's collectives stay outside
    for slot in slots:
        module, policy = model.get_submodule(slot.module), precisions[slot.leaf]
        # Codecs round blocks that rows don't have
        by_codec = any(
            not isinstance(f, torch.dtype | None) for f in (policy.gather, policy.reduce)
        )
        is_sparse = _is_sparse_lookup(module) and slot.attribute == "weight"
        (found if is_sparse and not by_codec else others).add(slot.leaf)
    return found - others


def _is_sparse_lookup(module: nn.Module) -> bool:
    # The other two options change a table, or a gradient, by what others ask of it
    return (
        isinstance(module, nn.Embedding | nn.EmbeddingBag)
        and module.sparse
        and module.max_norm is None
        and not module.scale_grad_by_freq
    )
