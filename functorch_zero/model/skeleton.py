"""A copy of the model whose places can be filled with leaves.

Note [captured skeletons]: something that runs a module again later, such as torch.utils.checkpoint
in backward, holds on to skeleton modules and must find the same values there. So values stay in a
skeleton after the call, and a skeleton is used again only when nothing outside refers to its
modules, or to functions about them, any more. Hooks don't count: only their own module runs those.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from .._torch_private import (
    buffers_dict,
    has_backward_hooks,
    params_dict,
    without_torch_function,
)
from ..errors import StructureError
from ..params import UnitSpec
from ..precision import Precision
from ..profiling import ranged
from ..tree import grouped
from .buffer_copies import BufferCopy, copy_of, note_changed, note_left
from .casting import Policies, as_used
from .compile import compiled
from .copying import copied_functions, copy_module
from .fast_path import asked_about
from .lazy_param import LazyParam, check_answered
from .lazy_table import LazyTable
from .references import references
from .remat import recomputed
from .slots import Place, Slot, check_kept, entering, leaves_inside, put_by_path, tensors_in


class Anatomy(NamedTuple):
    """Where things are in a model: all that `apply` must know beside the module itself."""

    units: tuple[UnitSpec, ...]
    slots: list[Slot]  # of params
    buffer_slots: list[Slot]
    policies: Policies
    remat: frozenset[str] = frozenset()  # paths of the modules that are computed again in backward
    compiled: frozenset[str] = frozenset()  # and of those whose forward is a compiled region
    compile_options: Mapping[str, Any] = {}
    sharing: Mapping[str, str] = {}  # leaves by buffers that had elements of them, and can't change


class Skeleton:
    """A copy of the model whose places can be filled; see Note [captured skeletons].

    Args:
        model: is copied; without values.
    """

    def __init__(self, model: nn.Module, anatomy: Anatomy):
        memo: dict[int, Any] = {}
        self.root = root = copy_module(model, memo)
        self._sharing = anatomy.sharing
        self._policies: dict[str, Precision] = {}  # by leaf, of those that have one
        for unit in anatomy.units:
            self._policies |= unit.policies
        self._param_places = _places(root, anatomy.slots, params_dict)
        self._buffer_places = _places(root, anatomy.buffer_slots, buffers_dict)
        self._add_other_places()
        self._params: Mapping[str, Any] = {}  # those of the call, by path
        self._in_regions = leaves_inside(anatomy.slots, anatomy.compiled)
        self._hooked = any(map(has_backward_hooks, root.modules()))
        self._lazy = False  # whether the call's params have lazy ones, so that units are entered
        # Modules and functions about them: whoever keeps one may run a module later
        self._held: list[Any] = [*root.modules(), *copied_functions(memo)]
        # Casts go inside: a unit's inputs are cast after it is entered, in its compiled region
        anatomy.policies.cast_calls(root)
        self._wrap_units(anatomy)
        self._held += filter(None, [vars(module).get("forward") for module in root.modules()])
        self._refs: list[int] = []  # references to each while nothing runs

    def _add_other_places(self) -> None:
        """Add the places in attributes, lists and dicts that modules lead to."""
        by_id: dict[int, tuple[str, list[Place]]] = {}  # a leaf's path, and the places of its kind
        for places in self._param_places, self._buffer_places:
            by_id |= {id(place.held[place.attribute]): (place.leaf, places) for place in places}
        for reference in references(self.root):
            if id(reference.value) in by_id:
                leaf, places = by_id[id(reference.value)]
                places.append(Place(reference.container, reference.key, leaf))

    def _wrap_units(self, anatomy: Anatomy) -> None:
        """Give the units' modules a forward that, from the outside in, is computed again in
        backward, enters the unit, and is compiled."""
        # Path of a leaf -> its places, several where it is tied
        by_leaf = grouped((place.leaf, place) for place in self._param_places)
        inside_of: dict[str, list[Place]] = {}  # by the unit's name
        for unit in anatomy.units:
            # Wherever the unit's leaves are used, also in modules inside
            inside_of[unit.name] = [p for leaf in unit.leaves for p in by_leaf.get(leaf, [])]
        # Innermost, so that gathering and hooks stay out of the region
        for path in anatomy.compiled:
            module = self.root.get_submodule(path)
            module.forward = compiled(module.forward, anatomy.compile_options)
        self._wrap_askers(anatomy.units, inside_of)
        for unit in anatomy.units:
            inside = inside_of[unit.name]
            # A unit's modules each enter it; its leaves stay until the last has returned
            for path in unit.modules:
                module = self.root.get_submodule(path)
                module.forward = self._entering(path, inside, module.forward)
                self._held.append(module.forward)
                # Outermost, so that the second run enters the unit anew
                if path in anatomy.remat:
                    buffers, modules = self._buffers_in(module), tuple(module.modules())
                    module.forward = recomputed(module.forward, inside, buffers, modules)

    def _wrap_askers(
        self, units: tuple[UnitSpec, ...], inside_of: Mapping[str, list[Place]]
    ) -> None:
        """Give modules that ask about params a forward that enters the units of these first."""
        for path, module in self.root.named_modules():
            asked = asked_about(module)
            if asked is None:
                continue
            inner = {*asked.modules()}
            held = {id(params_dict(m)) for m in inner}
            entered: list[tuple[str, list[Place]]] = []  # a module's path, and its unit's places
            for unit in units:
                inside = inside_of[unit.name]
                # What is the module's own is entered before its forward runs
                is_own = path in unit.modules
                if not is_own and any(id(place.held) in held for place in inside):
                    # A unit around them may not have been called: it is entered for this call
                    own = [p for p in unit.modules if self.root.get_submodule(p) in inner]
                    entered += [(p, inside) for p in own or [path]]
            if entered:
                module.forward = self._asking(asked, entered, module.forward)

    def _buffers_in(self, module: nn.Module) -> list[Place]:
        """All places of the buffers of a module and of those inside it."""
        inside = {id(buffers_dict(m)) for m in module.modules()}
        leaves = {place.leaf for place in self._buffer_places if id(place.held) in inside}
        return [place for place in self._buffer_places if place.leaf in leaves]

    def settle(self) -> Skeleton:
        """Note how often modules and functions are referred to while nothing runs.

        Call it after `__init__`, whose frame still refers to them.
        """
        self._refs = [*map(sys.getrefcount, self._held)]
        return self

    def is_free(self) -> bool:
        """Whether nothing but this skeleton refers to its modules and their functions."""
        return [*map(sys.getrefcount, self._held)] == self._refs

    def bind(
        self, params: Mapping[str, Any], buffers: Mapping[str, Tensor]
    ) -> dict[str, BufferCopy]:
        """Fill every place; return the copies that are in the places of buffers."""
        self._params = params
        # Asked once per call, and not once per leaf
        kinds = {*map(type, params.values())}
        self._lazy = any(issubclass(kind, LazyParam) for kind in kinds)
        if LazyTable in kinds:
            self._check_tables(params)
        # A lazy leaf has its policy's dtype already, and is cast when it is entered
        if self._policies and self._lazy:
            self._check_policies(params)
        casts = bool(self._policies) and kinds != {LazyParam}
        for place in self._param_places:
            leaf = params[place.leaf]
            place.fill(self._as_used(place.leaf, leaf) if casts else leaf)
        return self._put_copies(buffers)

    def _check_tables(self, params: Mapping[str, Any]) -> None:
        """Raise if a table is looked up in a compiled region: collectives must stay outside."""
        for path in self._in_regions:
            if type(params[path]) is LazyTable:
                raise StructureError(
                    "a table is looked up inside of a compiled unit",
                    path=path,
                    expected="its collectives outside of what is compiled",
                    remedy="functionalize(compile=...) of other units; or a level of other "
                    f'leaves for this one, level={{"": 3, "{path}": 3}}, say',
                )

    def _check_policies(self, params: Mapping[str, Any]) -> None:
        """Raise if a lazy leaf isn't cast by its policy: its tree has forgotten the policy, which a
        plain dict of params does."""
        with without_torch_function():
            for path, policy in self._policies.items():
                leaf = params[path]
                if not isinstance(leaf, LazyParam) or policy.dtypes(leaf.stored) == leaf.dtypes:
                    continue
                if policy.dtypes(leaf.dtype) is not None:
                    raise StructureError(
                        "params have lost the model's Precision, as a plain dict of them does",
                        path=path,
                        expected=policy,
                        got=leaf.dtypes or leaf.dtype,
                        remedy="give `init` or `shard_tree` the `Params` that functionalize "
                        "returned; a tree_map over it keeps it one",
                    )

    def _as_used(self, path: str, leaf: Any) -> Any:
        """A leaf that was given whole, in the dtype that its module computes with."""
        policy = self._policies.get(path)
        if policy is None or isinstance(leaf, LazyParam):
            return leaf
        return as_used(leaf, policy.dtypes(leaf.dtype))

    def release(self, buffers: Mapping[str, Tensor]) -> None:
        """Let go of the values, unless something still refers to a module and may yet run it.

        Then it finds the params there, and copies of the buffers that the call was given. It may
        change those: nobody reads them.
        """
        if self.is_free():
            self._params = {}
            for place in self._param_places + self._buffer_places:
                place.fill(place.empty)
        else:
            taken = self._put_copies(buffers)
            # A hook runs in backward, and finds these
            if self._hooked:
                for path, copied in taken.items():
                    note_left(path, copied.tensor)

    def _put_copies(self, buffers: Mapping[str, Tensor]) -> dict[str, BufferCopy]:
        """Put copies in the places of buffers, since modules write to theirs."""
        taken = {path: copy_of(buffer) for path, buffer in buffers.items()}
        tensors = {path: copied.tensor for path, copied in taken.items()}
        put_by_path(self._buffer_places, tensors)
        return taken

    def new_buffers(
        self, old: Mapping[str, Tensor], taken: Mapping[str, BufferCopy]
    ) -> dict[str, Tensor]:
        """The buffers after the call: the old tensors where nothing changed.

        Raises:
            StructureError: the call put a tensor in the place of a param, or in one of several
                places of a buffer; or it asked what a lazy param is.
        """
        check_kept(self._param_places)
        if self._lazy:
            check_answered(self._params)
        found: dict[str, Tensor] = {}
        for place in self._buffer_places:
            buffer = place.held[place.attribute]
            if found.setdefault(place.leaf, buffer) is not buffer:
                raise _torn(place)
        new = dict(old)
        for path, buffer in found.items():
            if not taken[path].is_changed(buffer):
                note_left(path, taken[path].tensor)
                continue
            if path in self._sharing and taken[path].is_surely_changed(buffer):
                raise _parted(path, self._sharing[path])
            note_changed(path, taken[path], buffer)
            new[path] = buffer.detach()
        return new

    def _entering(self, path: str, inside: list[Place], forward: Callable[..., Any]) -> Any:
        """A forward that enters the unit of the module of this path where leaves are lazy."""

        # `wraps`, so that signatures and names stay for hooks and compilers
        @functools.wraps(forward)
        def enter_and_run(*args: Any, **kwargs: Any) -> Any:
            run = forward
            with ranged("forward", path or "root"):
                # Asked at each call: one skeleton serves whole leaves and lazy ones
                if self._lazy:
                    run = entering(path, inside, self._params, forward)
                return run(*args, **kwargs)

        return enter_and_run

    def _asking(
        self,
        asked: nn.Module,
        entered: list[tuple[str, list[Place]]],
        forward: Callable[..., Any],
    ) -> Any:
        """A function that enters the units whose leaves it would find lazy, each for the
        module of a path. See Note [asked what it is] in `lazy_param.py`."""

        @functools.wraps(forward)
        def enter_and_run(*args: Any, **kwargs: Any) -> Any:
            run = forward
            if self._lazy and not asked.training:
                for path, inside in reversed(entered):  # the last is entered first
                    if any(type(leaf) is LazyParam for leaf in tensors_in(inside)):
                        run = entering(path, inside, self._params, run)
            return run(*args, **kwargs)

        return enter_and_run


def _places(
    root: nn.Module, slots: list[Slot], held_by: Callable[[nn.Module], dict[str, Any]]
) -> list[Place]:
    """The places of these slots in the modules of `root`, in the same order."""
    places = []
    for slot in slots:
        module = root.get_submodule(slot.module)
        places.append(Place(held_by(module), slot.attribute, slot.leaf))
    return places


def _parted(path: str, other: str) -> StructureError:
    """The error for a buffer that has changed, and had elements of `other` in the original, which
    would have changed with it."""
    return StructureError(
        "the model changed a buffer that lies in the same storage as another leaf, which would "
        "not change with it",
        path=path,
        expected="storage of its own",
        got=f"elements of {other}",
        remedy="register one tensor, and make views of it when they are needed; or clone it",
    )


def _torn(place: Place) -> StructureError:
    """The error for a buffer that has become two."""
    return StructureError(
        "the model holds a buffer in several places, and put another tensor in some of them "
        "while it ran",
        path=place.leaf,
        expected="the same tensor in all of them",
        got=f"another one at {place.attribute!r}",
        remedy="write to the buffer in place, `self.count += 1` or `copy_`; or register two "
        "buffers with clones of the values",
    )
